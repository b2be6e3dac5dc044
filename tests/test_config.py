"""The settings: one list, known to everybody who takes settings, checked where they are made."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pickle
import pydoc
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lightning_sparse as ls
from lightning_sparse.engine.config import StrategyConfig, docstrings_of
from tests.extending import changes
from tests.warm import forgetting, warm_python

ROOT = Path(__file__).parent.parent
SETTINGS = [field.name for field in dataclasses.fields(ls.engine.config.SparsificationConfig)]


def test_names_become_objects_whichever_way_they_are_written() -> None:
    config = ls.engine.config.SparsificationConfig(
        sparsifier="top_k", density=0.1, grouping="layer", dense="a*", rules=ls.Rules(["b"])
    )
    assert (config.sparsifier, config.density, config.exchange_in_use) == (
        ls.sparsifiers.TopK(),
        ls.density.Constant(0.1),
        ls.exchanges.GatherPairs(),
    )
    assert config.memory is None and config.memory_in_use == ls.memories.Residual()
    assert config.grouping == ls.grouping.GROUPINGS.resolve("layer")
    assert (config.dense, config.rules.dense) == (("a*",), ("b", "a*"))


def test_a_config_can_be_made_from_another_one() -> None:
    config = ls.engine.config.SparsificationConfig(sparsifier="top_k", dense=["a*"], watch=None)
    assert config == dataclasses.replace(config) == ls.engine.config.SparsificationConfig(**vars(config))
    assert config == pickle.loads(pickle.dumps(config))
    assert dataclasses.replace(config, density=0.5).density == ls.density.Constant(0.5)
    assert ls.SparseDDPStrategy(**vars(config)).config == StrategyConfig(**vars(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.density = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"single_device": "spars"}, "to be 'dense' or 'sparse', but got 'spars'. Did you mean 'sparse'?"),
        (
            {"grouping": "optimal_merge"},
            "Expected grouping to be one such as MergeBelow(8192), but got OptimalMerge(rule='optimal'), which hides "
            "messages behind backward, while gradients are exchanged after it, in optimizer.step(): use "
            "grouping=MergeBelow(8192), or overlap=True.",
        ),
        (
            {"density": ls.tuning.HiddenDensity()},
            "Expected density to be one such as 0.01, but got HiddenDensity(floor=0.001, cap=0.1), which hides "
            "messages behind backward, while gradients are exchanged after it, in optimizer.step(): use density=0.01, "
            "or overlap=True.",
        ),
        ({"fallback": "dense"}, "Expected fallback to be True or False, but got 'dense'."),
        ({"bucket_cap_mb": 0}, "Expected bucket_cap_mb to be a number above 0, or None, but got 0."),
        ({"bucket_cap_mb": "25"}, "Expected bucket_cap_mb to be a number above 0, or None, but got '25'."),
        ({"timeout": 5}, "a timedelta above 0 such as timedelta(seconds=60), or None, but got 5."),
        ({"timeout": timedelta(0)}, "Expected timeout to be a timedelta above 0"),
        ({"dense": 3}, "Expected dense to be patterns of parameter names"),
        ({"rules": ["*.bias"]}, "Expected rules to be Rules"),
        ({"watch": True}, "Expected watch to be a Watch"),
    ],
    ids=repr,
)
def test_what_cannot_work_is_refused_where_it_is_written(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ls.engine.config.SparsificationConfig(**wrong)
    assert message in str(caught.value)


def test_everybody_has_the_same_signature_and_help() -> None:
    documented = docstrings_of(StrategyConfig)
    for function in (ls.attach, ls.SparseDDPStrategy.__init__, ls.FabricSparseDDPStrategy.__init__):
        parameters = inspect.signature(function).parameters
        for name in SETTINGS:
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
            assert documented[name].splitlines()[0] in (function.__doc__ or "")
    assert documented.keys() == {field.name for field in dataclasses.fields(StrategyConfig)}
    assert "save_residuals" not in inspect.signature(ls.attach).parameters


def test_help_describes_every_field_with_what_it_accepts() -> None:
    shown = pydoc.render_doc(ls.engine.config.SparsificationConfig, renderer=pydoc.plaintext)
    assert "Resolved[" not in shown.split("__annotations__")[0]
    assert "density: float | lightning_sparse.methods.density.schedules.DensitySchedule = 0.01" in shown
    for field, text in docstrings_of(ls.engine.config.SparsificationConfig).items():
        assert f"{field}: {text.splitlines()[0]}" in shown
    assert inspect.signature(StrategyConfig).parameters.keys() > set(SETTINGS)


def test_a_strategy_takes_keywords_only() -> None:
    for strategy in (ls.SparseDDPStrategy, ls.FabricSparseDDPStrategy):
        with pytest.raises(TypeError) as caught:
            strategy("top_k")  # type: ignore[arg-type, call-arg, misc]
        name = strategy.__name__
        assert str(caught.value) == f"{name} takes keywords only, but got 'top_k': write {name}(sparsifier='top_k')."


def test_a_misspelt_keyword_is_answered_with_the_one_that_is_close() -> None:
    with pytest.raises(TypeError, match=r"SparseDDPStrategy does not know .* Did you mean density\?"):
        ls.SparseDDPStrategy(densty=0.1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"FabricSparseDDPStrategy does not know .* Did you mean grouping\?"):
        ls.FabricSparseDDPStrategy(gruping="layer")  # type: ignore[call-arg]


def test_settings_are_plain_values_for_loggers() -> None:
    config = StrategyConfig(
        sparsifier="exdyna",
        density=ls.Warmup(0.25, 0.01, 100),
        memory=ls.memories.ClipByNorm(1.0, ls.memories.Residual(decay=0.5)),
        timeout=timedelta(minutes=1),
        dense=["*.bias"],
        rules=ls.Rules(densities={"embed*": 0.5}),
    )
    plain = config.as_dict()
    assert list(plain) == [field.name for field in dataclasses.fields(StrategyConfig)]
    assert json.loads(json.dumps(plain)) == plain
    assert plain["density"] == {"class": "Warmup", "start": 0.25, "end": 0.01, "steps": 100}
    assert plain["memory"] == {
        "class": "ClipByNorm",
        "max_norm": 1.0,
        "memory": {"class": "Residual", "decay": 0.5, "rates": False},
    }
    assert (plain["timeout"], plain["fallback"]) == (60.0, False)
    assert (plain["sparsifier"]["class"], plain["sparsifier"]["alpha"]) == ("ExDyna", ls.sparsifiers.ExDyna().alpha)
    assert (plain["dense"], plain["rules"]["dense"], plain["rules"]["densities"]) == (
        ["*.bias"],
        ["*.bias"],
        {"embed*": 0.5},
    )
    assert plain["watch"]["growth"] == 10.0
    assert "(" not in json.dumps([plain, StrategyConfig().as_dict()]), "nothing is written as in Python"
    assert StrategyConfig(density=0.05).as_dict()["density"] == 0.05
    assert StrategyConfig().as_dict()["memory"] == {"class": "Residual", "decay": 1.0, "rates": False}


# A new setting is one field

KNOWN = """
import json
import pytorch_lightning as pl
import torch.distributed as dist
from jsonargparse import ArgumentParser
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel, BoringDataModule
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
import lightning_sparse.api.attach
import sys
attaching = sys.modules["lightning_sparse.api.attach"]
agreed = {}
check = attaching.check_equal_on_ranks
attaching.check_equal_on_ranks = lambda facts, *args: (agreed.update(facts), check(facts, *args))

new = {"new_setting": 0.25}
found = {}
strategy = ls.SparseDDPStrategy(**new)
found["trainer"] = strategy.config.new_setting
found["fabric"] = ls.FabricSparseDDPStrategy(**new).config.new_setting
logger = CSVLogger(".")
logger.log_hyperparams(strategy.config.as_dict())
found["logger"] = logger.experiment.hparams["new_setting"]
cli = LightningCLI(BoringModel, BoringDataModule, run=False, save_config_callback=None, args=[
    "--trainer.strategy=lightning_sparse.SparseDDPStrategy", "--trainer.strategy.new_setting=0.25",
    "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"])
found["cli"] = cli.trainer.strategy.config.new_setting
parser = ArgumentParser()
parser.add_argument("--strategy", type=ls.SparseDDPStrategy)
try:
    parser.parse_args(["--strategy.help=SparseDDPStrategy"])
except SystemExit:
    pass
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
ddp = DistributedDataParallel(nn.Linear(40, 40))
found["attach"] = ls.attach(ddp, **new).settings.new_setting
found["agreement"] = agreed["new_setting"]
try:
    ls.attach(ddp, new_seting=1.0)
except TypeError as error:
    found["hint"] = "Did you mean new_setting?" in str(error)
print(json.dumps(found))
"""
FILES = ["__init__", "core/checks", "engine/config", "api/__init__", "api/attach"] + [
    f"integrations/{name}"
    for name in ("base", "trainer", "fabric", "pytorch_lightning", "lightning", "lightning_fabric")
]
TYPED = """
import lightning_sparse as ls
from torch.nn.parallel import DistributedDataParallel

def use(ddp: DistributedDataParallel) -> None:
    for value in (0.25, 0.5):
        ls.attach(ddp, new_setting=value)
        ls.SparseDDPStrategy(new_setting=value)
        ls.FabricSparseDDPStrategy(new_setting=value)
    ls.SparseDDPStrategy().config.density(0)  # what is kept is no float
    ls.attach(ddp, new_seting=0.25)
    ls.SparseDDPStrategy(new_setting="half")
"""


@pytest.fixture
def copy_with_a_field(tmp_path: Path) -> Path:
    package, unwanted = ROOT / "lightning_sparse", shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "lightning_sparse", ignore=unwanted)
    [field] = changes()["A setting"]  # as docs/extending.md writes it
    field.make(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_a_new_setting_is_one_field(copy_with_a_field: Path) -> None:
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    environment = os.environ | {"PYTHONPATH": str(copy_with_a_field), "JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
    command = [warm_python(), "-c", forgetting("lightning_sparse") + KNOWN]
    done = subprocess.run(command, cwd=copy_with_a_field, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("hint") is True
    assert found == dict.fromkeys(["trainer", "fabric", "logger", "cli", "attach", "agreement"], 0.25)
    assert "A setting that nobody uses." in done.stdout  # in the command line's help


@pytest.mark.thorough
@pytest.mark.slow
def test_type_checkers_know_a_new_setting(copy_with_a_field: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (copy_with_a_field / "use.py").write_text(TYPED)
    # Without torch and Lightning: what they define is not asked for, and takes a minute.
    files = [f"lightning_sparse/{file}.py" for file in FILES]
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "use.py", *files]
    done = subprocess.run(command, cwd=copy_with_a_field, capture_output=True, text=True, timeout=110)
    told = [line for line in done.stdout.splitlines() if line.startswith("use.py") and "error:" in line]
    assert len(told) == 2, done.stdout
    assert 'Unexpected keyword argument "new_seting" for "attach"' in told[0]
    assert 'Argument "new_setting" to "SparseDDPStrategy" has incompatible type "str"' in told[1]
