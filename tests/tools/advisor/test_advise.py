"""`advise` on real trainings: what it leaves behind, what it refuses, and what it says on two ranks."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.methods.sparsifiers import SPARSIFIERS
from lightning_sparse.tools.advisor.prediction import TRIED
from lightning_sparse.tools.advisor.report import markdown, write_configs
from tests.ranks import Ranks
from tests.tools.advisor.toys import TOYS, Numbers, Toy, quiet
from tests.trainers import PACKAGES
from tests.warm import warm_python

ROOT = Path(__file__).parents[3]
SHORT: dict[str, Any] = {"sparsifiers": ["top_k"], "densities": [0.01], "warmup": 1, "steps": 2}
ONE: dict[str, Any] = SHORT | {"trainer": {"accelerator": "cpu", "devices": 1}, "ranks": [8], "gbit": [10]}


@pytest.fixture
def alone(not_launched: None) -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def state(module: Any) -> dict[str, Any]:
    return copy.deepcopy(module.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# One device


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_module_is_put_back_and_trains_as_if_nothing_had_happened(package: str) -> None:
    module = TOYS[package]()
    module.net[3].eval()
    untouched, before = copy.deepcopy(module), state(module)
    modes = [part.training for part in module.modules()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Found 1 module.* in eval mode")
        advice = ls.advise(module, **ONE)
        assert advice.scenarios == [(8, 10, 0)]
        assert same(state(module), before)
        assert [part.training for part in module.modules()] == modes
        assert module._trainer is None
        for one in (module, untouched):
            torch.manual_seed(5)
            quiet(package).fit(one)
    assert not same(state(module), before)
    assert same(state(module), state(untouched))


@pytest.mark.usefixtures("alone")
def test_a_module_that_was_trained_before_keeps_its_trainer() -> None:
    module = Toy()
    trainer = quiet("pytorch_lightning")
    trainer.fit(module)
    ls.advise(module, **ONE)
    assert module.trainer.max_epochs == trainer.max_epochs == 1
    assert module.trainer.current_epoch == 1


@pytest.mark.usefixtures("alone")
def test_what_is_measured_and_predicted() -> None:
    module = Toy(nap=0.02)
    said: list[tuple[str, float]] = []
    steps: dict[str, int] = {}

    def note(what: str, done: float) -> None:
        said.append((what, done))
        steps[what] = module.global_step

    wanted: dict[str, Any] = {"sparsifiers": ["top_k", "shared_top_k", "everything"], "densities": [0.1, 0.01]}
    advice = ls.advise(module, **ONE | wanted, progress=note)
    seen = advice.measured
    assert [size.name for size in seen.sizes] == [name for name, _ in Toy().named_parameters()]
    assert sum(layer.numel for layer in seen.profile.layers) == sum(p.numel() for p in Toy().parameters())
    assert seen.profile.network.ranks == 1
    assert (seen.profile.overlap, seen.profile.messages) == ("none", "step")
    assert seen.profile.rest_seconds > 0.02  # the nap is in every step
    methods = [(method.name, method.density) for method in seen.methods]
    assert methods == [
        *((name, 1.0) for name in ("dense", "fp16", "bf16", "powersgd")),
        *((name, density) for name in ("top_k", "shared_top_k") for density in (0.1, 0.01)),
        ("everything", 1.0),
    ]
    assert len(advice.predictions) == 4 + 5 * len(TRIED)
    assert all(p.step_seconds >= seen.profile.compute_seconds > 0.02 for p in advice.predictions)
    assert advice.best().builtin
    assert "stay dense" in advice.verdict()
    assert (steps["timing backward"], steps["timing the network"]) == (0, 1 + 2)  # within the step after the last one
    shares = [done for _, done in said]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1
    assert [what for what, _ in said][-5:] == [f"timing {name} at {density:g}" for name, density in methods[4:]]


@pytest.mark.thorough
@pytest.mark.usefixtures("alone")
def test_by_default_all_sparsifiers_that_may_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_sparse.tuning.measuring import profiler

    tried = []
    measure_group = profiler.measure_group

    def note(*args: Any, **settings: Any) -> Any:
        tried.append((settings["sparsifier"], settings["density"]))
        return measure_group(
            *args, **settings | {"sparsifier": ls.sparsifiers.TopK(), "exchange": ls.exchanges.GatherPairs()}
        )

    monkeypatch.setattr(profiler, "measure_group", note)
    advice = ls.advise(Toy(), **ONE | {"sparsifiers": None, "densities": [0.1, 0.01]})
    names = [name for name, _ in SPARSIFIERS.items() if name != "random_k"]
    expected = [name for name in names for _ in ("a" if name == "everything" else "ab")]
    assert [SPARSIFIERS.name_of(sparsifier) for sparsifier, _ in tried] == expected
    assert {p.method for p in advice.predictions if not p.builtin} == set(names)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("package", PACKAGES)
def test_data_from_elsewhere(package: str) -> None:
    module = TOYS[package]()
    module.train_dataloader = None
    ls.advise(module, train_dataloaders=Numbers(4).train_dataloader(), **ONE)
    ls.advise(module, Numbers(4).train_dataloader(), **ONE)
    if package == "pytorch_lightning":
        ls.advise(module, Numbers(4), **ONE)
        ls.advise(module, datamodule=Numbers(4), **ONE)


def test_data_that_cannot_be_taken_is_refused_with_a_reason() -> None:
    module = Untouched()
    elsewhere = importlib.import_module("lightning.pytorch").LightningDataModule()
    loader = Numbers(4).train_dataloader()
    for data in ({"train_dataloaders": elsewhere}, {"datamodule": elsewhere}, {"datamodule": loader}):
        with pytest.raises(ValueError, match="Expected a datamodule for a module of pytorch_lightning"):
            ls.advise(module, **data, **ONE)
    assert module._trainer is None


STUBBORN: dict[str, Any] = {
    "max_epochs": 1,
    "max_steps": 2,
    "max_time": "00:00:00:00",
    "fast_dev_run": True,
    "accumulate_grad_batches": 4,
    "limit_train_batches": 2,
    "limit_val_batches": 3,
    "logger": True,
    "enable_checkpointing": True,
    "callbacks": [pl.callbacks.ModelCheckpoint()],
    "strategy": "ddp_find_unused_parameters_true",
}


class Callbacks(Toy):
    """Brings callbacks of its own."""

    def configure_callbacks(self) -> Any:
        return [pl.callbacks.ModelCheckpoint(dirpath="checkpoints", every_n_train_steps=1)]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Toy, Callbacks])
def test_nothing_is_written_whatever_the_trainer_is_told(
    kind: type[Toy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = dict(STUBBORN)
    module = kind()
    advice = ls.advise(module, **ONE | {"trainer": ONE["trainer"] | options})
    assert advice.predictions
    assert list(tmp_path.iterdir()) == []
    assert options == STUBBORN
    assert len(module.configure_callbacks()) == (kind is Callbacks)
    assert "configure_callbacks" not in vars(module)


class Late(pl.LightningModule):
    """Has no layers before it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Linear(10, 3)

    def train_dataloader(self) -> Any:
        return Numbers().train_dataloader()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Toy):
    """Calls its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Late, ByHand])
def test_modules_of_other_kinds(kind: Any) -> None:
    module = kind()
    assert ls.advise(module, **ONE).predictions
    quiet("pytorch_lightning").fit(module)


class Nothing(Toy):
    """Has no loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None


class Detached(Toy):
    """Its loss depends on nothing."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class Short(Toy):
    """Loses its loss after two steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_step < 2 else None


class Frozen(Toy):
    """Has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Nothing, "Expected 4 training steps with a backward pass each, but 0 ran: does training_step return a loss"),
        (Short, "Expected 4 training steps with a backward pass each, but 2 ran: does training_step return a loss"),
        (Detached, "does not require grad"),
        (Frozen, "doesn't have any parameter that requires a gradient"),
    ],
)
def test_a_module_that_does_not_train(kind: type[Toy], message: str) -> None:
    module = kind()
    before = state(module)
    with pytest.raises(RuntimeError, match=message):
        ls.advise(module, **ONE)
    assert same(state(module), before)
    assert module._trainer is None
    assert "configure_callbacks" not in vars(module)


@pytest.mark.usefixtures("alone")
def test_without_data_there_is_no_backward_pass() -> None:
    with pytest.raises(RuntimeError, match=r"but 0 ran: .* and is there data to train on"):
        ls.advise(Toy(), **ONE | {"trainer": ONE["trainer"] | {"limit_train_batches": 0}})


class Untouched(Toy):
    """Must not be trained."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        raise AssertionError("trained")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": [0]}, "Expected ranks to be a positive integer, but got 0"),
        ({"gbit": [-1]}, "Expected gbit to be a positive number, but got -1"),
        ({"gbit": []}, "there is one rank only: give ranks and gbit"),
        ({"warmup": 0}, "Expected warmup to be a positive integer, but got 0"),
        ({"warmup": True}, "Expected warmup to be a positive integer, but got True"),
        ({"steps": 1}, "Expected steps to be an integer of at least 2, but got 1"),
        ({"steps": 2.0}, "Expected steps to be an integer of at least 2, but got 2.0"),
        ({"densities": [0.1, 0]}, r"in \(0, 1\].*but got 0"),
        ({"densities": ["low"]}, r"in \(0, 1\].*but got 'low'"),
        ({"sparsifiers": ["top_k", "tpok"]}, "Unknown sparsifier 'tpok'. Did you mean 'top_k'"),
        ({"sparsifiers": [ls.sparsifiers.TopK]}, r"write TopK\(\)"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_trained(settings: dict[str, Any], message: str) -> None:
    module = Untouched()
    with pytest.raises(ValueError, match=message):
        ls.advise(module, **ONE | settings)
    assert module._trainer is None


class Missing(Numbers):
    def prepare_data(self) -> None:
        raise SystemExit("There is no data.")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["datamodule", "train_dataloaders"])
def test_data_that_is_missing_is_said_before_other_ranks_are_started(name: str) -> None:
    module = Untouched()
    with pytest.raises(SystemExit, match=r"There is no data\."):
        ls.advise(module, **{name: Missing()}, **ONE | {"trainer": {"accelerator": "cpu", "devices": 2}})
    assert module._trainer is None


@pytest.mark.parametrize("thing", [nn.Linear(2, 1), None, Toy, "module"])
def test_only_modules_of_lightning_are_profiled(thing: Any) -> None:
    with pytest.raises(ValueError, match=f"Expected a LightningModule, but got {type(thing).__name__}"):
        ls.advise(thing, **ONE)


# Two devices


def advise_on_two(package: str) -> tuple[list[Any], str, bool, str]:
    module = TOYS[package](nap=0.05)
    before = state(module)
    advice = ls.advise(module, trainer={"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, ranks=[8], **SHORT)
    return (
        [tuple(p) for p in advice.predictions],
        advice.verdict(),
        same(state(module), before),
        advice.measured.profile.overlap,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("package", PACKAGES)
def test_all_ranks_are_given_the_same_advice(two_ranks: Ranks, package: str) -> None:
    (first, verdict, put_back, overlap), other = two_ranks(advise_on_two, package)
    assert (first, verdict, put_back, overlap) == other
    assert put_back
    assert {row[0] for row in first} == {(2, None, 0), (8, None, 0)}
    assert verdict.startswith("2 ranks, measured: ")
    assert overlap == "none"


SCRIPT = """
import lightning_sparse as ls
from tests.tools.advisor.toys import Toy

module = Toy(nap=0.05)
advice = ls.advise(module, trainer={"accelerator": "cpu", "devices": 2, "strategy": "ddp"}, sparsifiers=["top_k"],
                   densities=[0.01], warmup=1, steps=2)
seconds = [p.step_seconds for p in advice.predictions]
print(f"RESULT|{advice.measured.profile.network.ranks}|{seconds}|{advice.verdict()}|\\n", end="", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_the_usual_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [warm_python(), str(script)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr[-3000:]
    first, other = [line.split("|")[1:] for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert first == other
    assert first[0] == "2"
    assert first[2].startswith("2 ranks, measured: ")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def to_a_file(what: str, done: float) -> None:
    """At module level, because it is sent to the spawned processes."""
    with Path(os.environ["TOLD"]).open("a") as file:
        file.write(f"{what}\n")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("alone", "warm_spawn")
def test_spawned_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    module = Toy(nap=0.05)
    before = state(module)
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_spawn"}
    advice = ls.advise(module, trainer=options, gbit=[1], progress=to_a_file, **SHORT)
    assert advice.scenarios == [(2, None, 0), (2, 1, 0)]
    assert advice.measured.profile.network.ranks == 2
    assert advice.verdict().startswith("2 ranks, measured: ")  # on a busy machine, anything may win by a hair
    assert same(state(module), before)
    told = (tmp_path / "told").read_text().splitlines()
    assert told == ["timing backward", "timing the network", "timing top_k at 0.01"]  # by rank 0 only


# Adam's first moment

SLOW: dict[str, Any] = SHORT | {"ranks": [8], "gbit": [1e-6]}
"""A link on which sparsification wins."""


class AdamToy(Toy):
    """As most train."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), betas=(0.8, 0.99))


class AmsgradToy(Toy):
    """Whose steps torch takes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), betas=(0.8, 0.99), amsgrad=True)


def advise_adam(
    strategy: Any, toy: type[Toy] = AmsgradToy, **settings: Any
) -> tuple[ls.tools.advisor.Advice, list[str]]:
    """The advice, and what was warned of."""
    trainer = {"accelerator": "cpu", "devices": 1, "strategy": strategy}
    with warnings.catch_warnings(record=True, action="always") as caught:
        advice = ls.advise(toy(), **SLOW | settings, trainer=trainer)
    return advice, [str(warning.message) for warning in caught if "first moment" in str(warning.message)]


@pytest.mark.usefixtures("alone")
def test_where_a_sparsifier_wins_adams_first_moment_is_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="pyyaml is not installed")
    advice, [sentence] = advise_adam("auto")
    assert advice.best().sparse
    assert "AdamW keeps a first moment (beta1 = 0.8)" in sentence and "betas=(0.0, 0.99)" in sentence
    [remark] = advice.remarks()
    assert remark in sentence
    assert f"- {remark}\n" in markdown(advice)
    [path] = write_configs(advice, tmp_path)
    assert path.read_text().startswith(f"# {advice.verdict()}\n# {remark}\n")


@pytest.mark.usefixtures("alone")
def test_where_second_moments_travel_nothing_has_to_change() -> None:
    advice, sentences = advise_adam("auto", AdamToy, sparsifiers=["top_k", "union_top_k", "gtop_k"])
    assert advice.best().sparse
    assert sentences == advice.remarks() == []
    assert all(method.builtin or method.second_moments for method in advice.measured.methods)
    assert "gtop_k" not in {p.method for p in advice.predictions}
    assert "Left out, because they refuse the optimizer: gtop_k." in advice.assumptions()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "strategy",
    [
        ls.SparseDDPStrategy(watch=None),
        ls.SparseDDPStrategy(watch=ls.Watch(adam=False)),
        {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": {"watch": None}},
        {
            "class_path": "lightning_sparse.SparseDDPStrategy",
            "init_args": {"watch": {"class_path": "lightning_sparse.Watch", "init_args": {"adam": False}}},
        },
    ],
    ids=["none", "setting", "none-in-yaml", "setting-in-yaml"],
)
def test_a_strategy_that_silences_the_warning_silences_it_here(strategy: Any) -> None:
    advice, said = advise_adam(strategy)
    assert said == []
    assert len(advice.remarks()) == 1  # which is part of the answer


@pytest.mark.usefixtures("alone")
def test_where_dense_wins_adam_may_stay() -> None:
    advice, said = advise_adam("auto", gbit=[1000])
    assert not advice.best().sparse
    assert (said, advice.remarks()) == ([], [])
