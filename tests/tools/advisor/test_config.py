"""From configurations to modules, data and Trainers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.tools.advisor import config
from lightning_sparse.tools.advisor.config import advise_config
from lightning_sparse.tools.advisor.run import kept_settings
from tests.tools.advisor.toys import Numbers, OtherToy, Toy, WithoutOptimizer

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")

TOY = {"class_path": "tests.tools.advisor.toys.Toy", "init_args": {"width": 6}}


class Asked:
    """Stands for ``advise``: notes what it was asked."""

    module: Any
    datamodule: Any
    trainer: dict[str, Any]
    settings: dict[str, Any]

    def __call__(self, module: Any, datamodule: Any, trainer: dict[str, Any], **settings: Any) -> str:
        self.module, self.datamodule, self.trainer, self.settings = module, datamodule, trainer, settings
        return "advice"


@pytest.fixture
def asked(not_launched: None, monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    monkeypatch.setattr(config, "advise", stand_in)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates
    monkeypatch.setattr(sys, "path", list(sys.path))
    return stand_in


def written(folder: Path, text: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


@pytest.mark.parametrize("nested", [False, True])
def test_sections_flat_or_under_fit(asked: Asked, tmp_path: Path, nested: bool) -> None:
    sections = {
        "seed_everything": 3,
        "trainer": {"accelerator": "cpu", "devices": 2, "precision": "bf16-mixed", "max_steps": 9},
        "model": TOY,
        "data": {"class_path": "tests.tools.advisor.toys.Numbers", "init_args": {"batch_size": 5}},
        "ckpt_path": "last.ckpt",
        "mine": {"colour": "red"},
        "lr_scheduler": None,
    }
    given = {"fit": sections, "subcommand": "fit"} if nested else sections
    advice, seen = advise_config(written(tmp_path, given), ranks=[8], gbit=[10.0])
    assert (advice, seen) == ("advice", given)
    assert type(asked.module) is Toy
    assert asked.module.net[0].out_features == 6
    assert type(asked.datamodule) is Numbers
    assert asked.datamodule.batch_size == 5
    assert asked.settings == {"ranks": [8], "gbit": [10.0]}
    wanted = {"accelerator": "cpu", "devices": 2, "precision": "bf16-mixed", "max_steps": 9, "strategy": None}
    assert {name: asked.trainer[name] for name in wanted} == wanted
    assert torch.initial_seed() == 3


def test_what_has_nothing_to_do_with_time_is_not_made(asked: Asked, tmp_path: Path) -> None:
    nowhere = [{"class_path": "nowhere.Thing"}]
    trainer = {"accelerator": "cpu", "logger": nowhere, "callbacks": nowhere, "profiler": nowhere[0], "devices": 2}
    advise_config(written(tmp_path, {"trainer": trainer, "model": TOY}))
    assert asked.trainer["devices"] == 2
    assert not asked.trainer["callbacks"]


@pytest.mark.parametrize("trainer", [{}, {"trainer": None}])
def test_defaults_of_the_trainer(asked: Asked, tmp_path: Path, trainer: dict[str, Any]) -> None:
    advise_config(written(tmp_path, {"model": TOY} | trainer))
    assert asked.datamodule is None
    assert asked.trainer["accelerator"] == asked.trainer["devices"] == "auto"
    assert asked.trainer["strategy"] is None


@pytest.mark.parametrize("model", ["tests.tools.advisor.toys.Toy", {"class_path": "tests.tools.advisor.toys.Toy"}])
def test_a_model_without_arguments(asked: Asked, tmp_path: Path, model: Any) -> None:
    advise_config(written(tmp_path, {"model": model}))
    assert type(asked.module) is Toy
    assert asked.module.net[0].out_features == 4


def test_classes_by_option(asked: Asked, tmp_path: Path) -> None:
    toys = "tests.tools.advisor.toys"
    path = written(tmp_path, {"model": {"width": 7}, "data": {"batch_size": 3}})
    advise_config(path, model=f"{toys}.Toy", data=f"{toys}.Numbers")
    assert asked.module.net[0].out_features == 7
    assert asked.datamodule.batch_size == 3
    advise_config(written(tmp_path, {"trainer": {"devices": 1}}), model=f"{toys}.Toy")
    assert asked.module.net[0].out_features == 4
    assert asked.datamodule is None


def test_later_files_are_laid_over_earlier_ones(asked: Asked, tmp_path: Path) -> None:
    def file(name: str, content: dict[str, Any]) -> Path:
        (tmp_path / name).write_text(yaml.safe_dump(content))
        return tmp_path / name

    strategy = {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": {"density": 0.01}}
    base = file("base", {"trainer": {"devices": 2, "accelerator": "cpu", "strategy": strategy}, "model": TOY})
    top_k = {"strategy": {"init_args": {"sparsifier": "TopK"}}}
    _, given = advise_config(base, file("top_k", {"fit": {"trainer": top_k, "model": {"init_args": {"width": 7}}}}))
    merged = strategy | {"init_args": {"density": 0.01, "sparsifier": "TopK"}}
    assert given["trainer"] == {"devices": 2, "accelerator": "cpu", "strategy": merged}
    assert asked.trainer["strategy"] == merged
    assert asked.module.net[0].out_features == 7
    _, given = advise_config(base, file("dense", {"trainer": {"strategy": "ddp"}}))
    assert given["trainer"]["strategy"] == "ddp"
    other = {"class_path": "tests.tools.advisor.toys.OtherToy"}
    _, given = advise_config(base, file("other", {"model": other}))
    assert given["model"] == other  # not with the arguments of the class before
    assert type(asked.module) is OtherToy


def test_the_optimizer_of_a_configuration(asked: Asked, tmp_path: Path) -> None:
    optimizer = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.125}}
    model = {"class_path": "tests.tools.advisor.toys.WithoutOptimizer"}
    advise_config(written(tmp_path, {"model": model, "optimizer": optimizer}))
    assert type(asked.module) is WithoutOptimizer
    made = asked.module.configure_optimizers()
    assert (type(made), made.defaults["lr"]) == (torch.optim.Adam, 0.125)


def test_classes_in_the_folder_of_the_call_and_paths_in_that_of_the_configuration(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, configs = tmp_path / "here", tmp_path / "configs"
    for folder in (here, configs):
        folder.mkdir()
    (configs / "words.txt").write_text("words")
    (here / "my_own_model.py").write_text(
        "import pytorch_lightning as pl\n"
        "from jsonargparse.typing import Path_fr\n\n"
        "class Mine(pl.LightningModule):\n"
        "    def __init__(self, words: Path_fr):\n"
        "        super().__init__()\n"
        "        self.words = words\n"
    )
    monkeypatch.chdir(here)
    written(configs, {"model": {"class_path": "my_own_model.Mine", "init_args": {"words": "words.txt"}}})
    advise_config(Path("../configs/config.yaml"))
    assert Path(asked.module.words.absolute).read_text() == "words"
    assert Path.cwd() == here


def test_settings_of_strategies() -> None:
    unused = {"find_unused_parameters": True}
    toys = [
        (None, {}),
        ("auto", {}),
        ("ddp", {}),
        ("ddp_find_unused_parameters_false", {}),
        ("ddp_find_unused_parameters_true", unused),
        ("ddp_spawn", {"start_method": "spawn"}),
        ("ddp_notebook_find_unused_parameters_true", unused | {"start_method": "fork"}),
        ("sparse_ddp_spawn", {"start_method": "spawn"}),
        ({"class_path": "DDPStrategy"}, {}),
        ({"class_path": "DDPStrategy", "init_args": None}, {}),
        ({"class_path": "DDPStrategy", "init_args": {"start_method": "popen", "static_graph": False}}, {}),
        (
            {"class_path": "DDPStrategy", "init_args": {"start_method": "fork", "process_group_backend": "gloo"}},
            {"start_method": "fork"},
        ),
        (
            {"class_path": "DDPStrategy", "init_args": {"broadcast_buffers": False}, "dict_kwargs": unused},
            unused | {"broadcast_buffers": False},
        ),
        ({"class_path": "DDPStrategy", "init_args": {"broadcast_buffers": None, "static_graph": None}}, {}),
    ]
    for strategy, expected in toys:
        assert kept_settings(strategy) == expected
    from pytorch_lightning.strategies import DDPStrategy

    import lightning_sparse as ls

    made = DDPStrategy(find_unused_parameters=True, start_method="spawn", bucket_cap_mb=3)
    assert kept_settings(made) == unused | {"start_method": "spawn"}
    assert kept_settings(ls.SparseDDPStrategy(sparsifier="top_k", static_graph=True)) == {"static_graph": True}


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "Expected .*config.yaml to be a readable text file, but got: .*No such file or directory"),
    ("a: [1\n", {}, "Expected .*config.yaml to be YAML, but it is broken in line 2"),
    (b"\xff\xfe\x80", {}, "Expected .*config.yaml to be a readable text file, but got: 'utf-8' codec"),
    ("x: " + "[" * 3000 + "]" * 3000, {}, "Expected .*config.yaml .* nested too deeply"),
    ("trainer: &a {x: *a}\n", {}, "Expected .*config.yaml to hold at most 100,000 values"),
    ("model: &a {class_path: x.Y, init_args: *a}\n", {}, "Expected .*config.yaml to hold at most 100,000 values"),
    ("x: !!timestamp 99\n", {}, "Expected .*config.yaml to be settings by name, but: "),
    ("x: 2026-99-99\n", {}, "Expected .*config.yaml to be settings by name, but: month"),
    ("x: !!python/object/apply:os.abort []\n", {}, "Expected .*config.yaml to be YAML, but"),
    *(
        (
            {part: {"class_path": path}} | {"trainer": {}} | ({} if part == "model" else {"model": TOY}),
            {},
            f"config.yaml .*{part}",
        )
        for path in ("..x", "...")
        for part in ("model", "data", "optimizer")
    ),
    ({"model": {}}, {"model": "..x"}, "Expected --model to be an import path"),
    ("- 1\n- 2\n", {}, "Expected config to be a LightningCLI configuration with sections, but .*config.yaml is not"),
    ("", {}, "with sections, but .*config.yaml is not"),
    ({"fit": [1]}, {}, "with sections, but .*config.yaml is not"),
    ({"trainer": [1], "model": TOY}, {}, "with sections, but .*config.yaml is not"),
    ({"trainer": {}}, {}, "Expected the section 'model' of .*config.yaml to have a class_path, or --model with one"),
    ({"model": {"width": 3}}, {}, "Expected the section 'model' of .* to have a class_path, or --model with one"),
    ({"model": 3}, {}, "Expected the section 'model' of .* to have a class_path"),
    ({"model": TOY, "data": {"batch_size": 3}}, {}, "section 'data' of .* to have a class_path, or --data with one"),
    (
        {"model": {"class_path": "tests.tools.advisor.toys.Tyo"}},
        {},
        "LightningCLI accepts, but: .*has no attribute 'Tyo'",
    ),
    ({"model": {"class_path": "nowhere.Toy"}}, {}, "LightningCLI accepts, but: .*No module named 'nowhere'"),
    ({"model": {"class_path": "torch.nn.Linear"}}, {}, "LightningCLI accepts, but: .*subclass of LightningModule"),
    ({"model": TOY, "data": {"class_path": "nowhere.Data"}}, {}, "LightningCLI accepts, but: .*'nowhere'"),
    ({"model": TOY, "trainer": {"devcies": 3}}, {}, "LightningCLI accepts, but: .*'devcies'"),
    ({"model": TOY | {"init_args": {"width": "wide"}}}, {}, "LightningCLI accepts, but: .*wide"),
    ({"model": {}}, {"model": "Toy"}, "Expected --model to be an import path such as package.module.Class"),
    ({"model": {}}, {"model": "tests.tools.advisor.toys.Tyo"}, "Expected --model to be an import path .*'Tyo'"),
    ({"model": {}}, {"model": "os.path.join"}, "Expected .*config.yaml to be what LightningCLI accepts, but: "),
    ({"model": {"class_path": "os.path.join"}}, {}, "Expected .*config.yaml to be what LightningCLI accepts, but: "),
    ({"model": {}}, {"model": "nowhere.Toy"}, "Expected --model to be an import path .*'nowhere'"),
    ({"model": {}}, {"model": "torch.nn.Linear"}, "LightningCLI accepts, but: .*subclass of: .*LightningModule"),
    ({"model": TOY}, {"data": "nowhere.Data"}, "Expected --data to be an import path .*'nowhere'"),
]


@pytest.mark.parametrize(("text", "options", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_configurations_are_answered_in_one_line(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: Any, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "config.yaml"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        written(tmp_path, text)
    with pytest.raises(ValueError, match=message) as error:
        advise_config(path, **options)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")
    assert not hasattr(asked, "module")


def test_a_configuration_may_be_json(asked: Asked, tmp_path: Path) -> None:
    advise_config(written(tmp_path, json.dumps({"model": TOY, "trainer": {"devices": 4}})))
    assert asked.trainer["devices"] == 4
