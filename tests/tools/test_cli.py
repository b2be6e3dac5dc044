"""The example's configurations through LightningCLI."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

import lightning_sparse as ls
from lightning_sparse.engine.optimizers.kinds import check_pair
from tests.covering import by_default
from tests.forked import forked
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_digits.py"
SPARSE = {**dict(ls.sparsifiers.SPARSIFIERS.items()), "adam_correction": ls.sparsifiers.UnionTopK}


@pytest.fixture(scope="module")
def parser() -> Iterator[Any]:
    """The parser of a LightningCLI with the example's classes: making one takes longer than what it parses."""
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from pytorch_lightning.cli import LightningCLI

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates
        patch.setattr(sys, "argv", [str(EXAMPLE)])  # else it warns that pytest was given arguments, too
        patch.syspath_prepend(EXAMPLE.parent)
        module = importlib.import_module("train_digits")
        args = ["--seed_everything=0", "--trainer.accelerator=cpu", "--trainer.logger=false"]
        yield LightningCLI(module.DigitsClassifier, module.Digits, run=False, args=args).parser


@pytest.fixture
def parse(parser: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build what a Trainer would be given, from a command line."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def run(config: str, *overrides: str) -> Any:
        configs = [f"--config={ROOT / 'configs' / name}.yaml" for name in ("base", *config.split())]
        # As the script gets them, without the subcommand; no logger, so that nothing is written.
        args = [*configs, "--trainer.accelerator=cpu", "--trainer.logger=false", *overrides]
        return parser.instantiate_classes(parser.parse_args(args)).trainer

    return run


@pytest.mark.parametrize("name", SPARSE)
def test_every_configuration_builds_its_sparsifier(parse: Any, name: str) -> None:
    settings = parse(name).strategy.config
    assert type(settings.sparsifier) is SPARSE[name]
    assert settings.density(300) == 0.01  # in the last step: some warm up


def test_every_sparsifier_has_a_configuration_that_chooses_it_and_little_else() -> None:
    found = {path.stem: path.read_text() for path in (ROOT / "configs").glob("*.yaml")}
    assert found.keys() - {"base", "dense", "epochs", "sweep", "wandb"} == SPARSE.keys()
    assert all(text.count("\n") < 20 for name, text in found.items() if name not in {"base", "sweep"})


def train_each(log: str, names: list[str]) -> None:
    """Two steps of each configuration, in a process of its own."""
    sink = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    warnings.simplefilter("ignore")
    from pytorch_lightning.cli import LightningCLI

    sys.path.insert(0, str(EXAMPLE.parent))
    module = importlib.import_module("train_digits")
    sys.argv = [str(EXAMPLE)]
    for name in names:
        print(name, flush=True)
        configs = [f"--config={ROOT / 'configs' / file}.yaml" for file in ("base", name)]
        small = ["accelerator=cpu", "devices=1", "max_steps=2", "logger=false", "val_check_interval=1.0"]
        few = ["limit_train_batches=2", "limit_val_batches=1", "check_val_every_n_epoch=1", "num_sanity_val_steps=0"]
        args = [*configs, *(f"--trainer.{setting}" for setting in small + few)]
        cli = LightningCLI(module.DigitsClassifier, module.Digits, run=False, args=args, save_config_callback=None)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        assert cli.trainer.global_step == 2


SOME = ["dense", "dgc", "adam_correction", "sidco_e"]
"""Without this package, with a memory, for Adam, and with what most others have."""


@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize("names", by_default([SOME, [name for name in SPARSE if name not in SOME]]), ids="-".join)
def test_every_configuration_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    for needed in ("jsonargparse", "sklearn"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    process = forked().Process(target=train_each, args=(str(log), names), daemon=False)
    process.start()
    process.join(100)
    assert process.exitcode == 0, log.read_text()[-3000:]


def test_the_dense_configuration_is_plain_ddp(parse: Any) -> None:
    assert parse("dense").strategy == "ddp"


def test_configurations_lie_over_each_other(parse: Any) -> None:
    trainer = parse("exdyna epochs")
    assert type(trainer.strategy.config.sparsifier) is ls.sparsifiers.ExDyna
    assert (trainer.max_steps, trainer.max_epochs, trainer.check_val_every_n_epoch) == (-1, 30, 1)


def test_rules_are_read_from_a_file_and_toggled_on_the_command_line(parse: Any, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(
        "trainer:\n  strategy:\n    class_path: lightning_sparse.SparseDDPStrategy\n    init_args:\n"
        '      dense: ["head.*"]\n      rules: {dense_numel: 0, densities: {"embed*": 0.001, "*.1.*": 1}}\n'
    )

    def rules(*overrides: str) -> ls.Rules:
        found: ls.Rules = parse("top_k", f"--config={file}", *overrides).strategy.config.rules
        return found

    expected = ls.Rules(["head.*"], densities={"embed*": 0.001, "*.1.*": 1.0}, dense_numel=0)
    assert repr(rules()) == repr(expected)
    assert rules("--trainer.strategy.rules.dense_numel=7") == replace(expected, dense_numel=7)
    assert rules('--trainer.strategy.rules.sparse=["*.bias"]') == replace(expected, sparse=("*.bias",))
    assert parse("top_k", "--trainer.strategy.rules.dense_ndim=0").strategy.config.rules == ls.Rules(dense_ndim=0)
    assert parse("top_k").strategy.config.rules == ls.Rules()


def test_sparsifier_and_density_are_toggled_on_the_command_line(parse: Any) -> None:
    assert parse("exdyna", "--trainer.strategy.sparsifier=TopK").strategy.config.sparsifier == ls.sparsifiers.TopK()
    assert parse("exdyna", "--trainer.strategy.sparsifier=top_k").strategy.config.sparsifier == ls.sparsifiers.TopK()
    assert parse("exdyna", "--trainer.strategy.density=0.05").strategy.config.density(0) == 0.05
    warm = parse(
        "top_k",
        "--trainer.strategy.density=Warmup",
        "--trainer.strategy.density.start=0.25",
        "--trainer.strategy.density.end=0.01",
        "--trainer.strategy.density.steps=100",
    )
    assert warm.strategy.config.density == ls.Warmup(0.25, 0.01, 100)
    published = parse("exdyna", "--trainer.strategy.sparsifier.variant=published", "--trainer.strategy.grouping=model")
    assert published.strategy.config.sparsifier == ls.sparsifiers.ExDyna(variant="published")
    assert published.strategy.config.grouping == ls.grouping.GROUPINGS.resolve("model")
    merged = parse("top_k", "--trainer.strategy.grouping=MergeBelow", "--trainer.strategy.grouping.numel=100")
    assert merged.strategy.config.grouping == ls.grouping.MergeBelow(100)
    assert (
        parse("top_k", "--trainer.strategy.exchange=ReduceUnion").strategy.config.exchange == ls.exchanges.ReduceUnion()
    )
    assert parse("top_k", "--trainer.strategy.find_unused_parameters=true").strategy._ddp_kwargs == {
        "find_unused_parameters": True
    }


def test_memories_are_built_from_configurations(parse: Any, tmp_path: Path) -> None:
    def memory(*overrides: str) -> ls.memories.Memory:
        return parse("top_k", *overrides).strategy.config.memory

    assert memory() is None
    assert memory("--trainer.strategy.memory=LowPass") == ls.memories.LowPass()
    assert memory("--trainer.strategy.memory=low_pass") == ls.memories.LowPass()
    with pytest.raises(ValueError, match=r"Unknown memory 'lowpas'\. Did you mean 'low_pass'"):
        memory("--trainer.strategy.memory=lowpas")
    named = tmp_path / "named.yaml"
    named.write_text("trainer: {strategy: {init_args: {memory: adam_correction}}}")
    assert memory(f"--config={named}") == ls.memories.AdamCorrection()
    assert memory("--trainer.strategy.memory=MomentumCorrection", "--trainer.strategy.memory.momentum=0.8") == (
        ls.memories.MomentumCorrection(0.8)
    )
    written = tmp_path / "memory.yaml"
    written.write_text(
        """
        trainer:
          strategy:
            class_path: lightning_sparse.SparseDDPStrategy
            init_args:
              memory:
                class_path: lightning_sparse.memories.ClipByNorm
                init_args:
                  max_norm: 2.5
                  memory:
                    class_path: lightning_sparse.memories.MomentumCorrection
                    init_args: {momentum: 0.9, nesterov: true}
        """
    )
    assert memory(f"--config={written}") == ls.memories.ClipByNorm(
        2.5, ls.memories.MomentumCorrection(0.9, nesterov=True)
    )
    written.write_text(written.read_text().replace("ClipByNorm", "AdamCorrection").split("max_norm")[0] + "beta1: 0.8")
    assert memory(f"--config={written}") == ls.memories.AdamCorrection(0.8)
    assert memory(
        "--trainer.strategy.memory=ClipByNorm", "--trainer.strategy.memory.max_norm=1"
    ) == ls.memories.ClipByNorm(1.0)


CORRECTED = {
    "dgc": ls.memories.ClipByNorm(10.0, ls.memories.MomentumCorrection(0.9)),
    "adam_correction": ls.memories.AdamCorrection(),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_configurations_with_a_memory_have_the_optimizer_for_it(parse: Any, name: str) -> None:
    import yaml  # comes with jsonargparse

    memory = parse(name).strategy.config.memory
    assert memory == CORRECTED[name]
    model = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["model"]
    check_pair(memory, sys.modules["train_digits"].DigitsClassifier(**model).configure_optimizers())


def test_a_typo_is_answered_with_what_is_close(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="Did you mean 'exdyna'"):
        parse("exdyna", "--trainer.strategy.sparsifier=ExDina")


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_the_example_trains_from_the_command_line(tmp_path: Path) -> None:
    # One process starts the other, as for a user; everything else in this suite starts ranks by itself.
    command = [warm_python(), str(EXAMPLE), "fit"]
    command += [f"--config={ROOT / 'configs' / name}.yaml" for name in ("base", "exdyna", "wandb")]
    command += ["--trainer.accelerator=cpu", "--trainer.max_steps=10", "--trainer.strategy.sparsifier=TopK"]
    command += ["--trainer.strategy.density=0.05", "--trainer.val_check_interval=10"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "TopK() selects" in result.stderr
    assert "groups at Constant(density=0.05)" in result.stdout
    [metrics] = tmp_path.glob("lightning_logs/**/metrics.csv")
    header = metrics.read_text().splitlines()[0].split(",")
    assert {"sparse/density", "sparse/traffic/sent_mb", "val/accuracy", "step_ms"} <= set(header)
    deadline = time.monotonic() + 30  # W&B's own process may write on when the program has ended
    while not list(tmp_path.glob("lightning_logs/wandb/offline-run-*/run-*.wandb")) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list(tmp_path.glob("lightning_logs/wandb/offline-run-*/run-*.wandb"))) == 1


def test_the_sweep_gives_the_example_what_it_takes(parse: Any) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed")
    import yaml

    sweep = yaml.safe_load((ROOT / "configs" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).samefile(EXAMPLE)
    *_, program, subcommand, config, logger, arguments = sweep["command"]
    assert (program, subcommand, config, arguments) == ("${program}", "fit", "--config=configs/base.yaml", "${args}")
    parameters = {name: one["values"] for name, one in sweep["parameters"].items()}
    assert all(ls.sparsifiers.SPARSIFIERS.resolve(name) for name in parameters["trainer.strategy.sparsifier"])
    every = zip(*(islice(cycle(values), 3) for values in parameters.values()), strict=True)
    for values in every:  # each seed and density, and some sparsifiers: parsing takes a second
        given = dict(zip(parameters, values, strict=True))
        trainer = parse("base", logger, *(f"--{name}={value}" for name, value in given.items()))
        assert trainer.strategy.config.sparsifier == ls.sparsifiers.SPARSIFIERS.resolve(
            given["trainer.strategy.sparsifier"]
        )
        assert trainer.strategy.config.density(0) == given["trainer.strategy.density"]
    made = trainer.logger
    assert type(made).__name__ == "WandbLogger"
    assert not made._offline
