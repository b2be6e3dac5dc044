"""Gradients that are not finite: all ranks skip the step, and only what is not finite is lost."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.integrations.test_checkpoints import same
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_trainer

BATCHES, PLAIN = 30, 8
"""In Lightning's Trainer and, for every memory, with plain DDP."""


EVERYWHERE = "everywhere"
"""In all gradients of all ranks, so that nothing is absorbed."""


def bad_batches(seed: int, batches: int = BATCHES, everywhere: bool = True) -> dict[int, tuple[str, float]]:
    """Where something goes wrong: number of the batch to the parameter and what is added to its gradient."""
    rng = random.Random(seed)
    chosen = {0, 1, *rng.sample(range(2, batches), max(1, batches // 10))}  # the first step has nothing to go back to
    names = [f"{layer}.{kind}" for layer in ("first", "second", "third") for kind in ("weight", "bias")]
    names = [EVERYWHERE] if everywhere else names
    return {n: (rng.choice(names), rng.choice([float("inf"), float("-inf"), float("nan")])) for n in sorted(chosen)}


class Net(nn.Module):
    """Three layers; one coordinate of a gradient goes wrong on rank 1 where it is told so, or everything on all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.wrong: tuple[str, float] | None = None
        for name, p in self.named_parameters():
            p.register_hook(lambda grad, name=name: self.spoil(name, grad))  # type: ignore[no-untyped-call]

    def spoil(self, name: str, grad: Tensor) -> Tensor | None:
        if self.wrong is not None and self.wrong[0] == EVERYWHERE:
            return grad + self.wrong[1]
        if self.wrong is None or self.wrong[0] != name or dist.get_rank() != 1:
            return None
        grad = grad.clone()
        grad.view(-1)[3] += self.wrong[1]
        return grad

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu())
        out: Tensor = self.third(x.relu())
        return out


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Each rank's own."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(8, 12, generator=generator)
    return x, x[:, :4].argmax(1)


# In Lightning's Trainer.


def make_module(package: str, optimizer: str) -> Any:
    class Module(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.wrong = dict[int, tuple[str, float]]()

        def training_step(self, number: int, batch_idx: int) -> Tensor:
            self.net.wrong = self.wrong.get(number)
            x, y = batch(number, self.global_rank)
            # In float32, where a factor of 2**k changes no digit.
            with torch.autocast("cpu", enabled=False):
                return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            if optimizer == "Adam":
                return torch.optim.Adam(self.parameters(), lr=0.003)
            return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9)

    return Module()


def fit(
    package: str,
    numbers: list[int],
    wrong: dict[int, tuple[str, float]],
    scaled: bool,
    optimizer: str,
    sparse: dict[str, Any],
    **options: Any,
) -> SimpleNamespace:
    """One epoch over these batches, with these settings of the strategy and options of the Trainer."""
    result = SimpleNamespace(scales=[])

    class Look(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if scaled:
                result.scales.append(trainer.precision_plugin.scaler.get_scale())

        def on_train_end(self, trainer: Any, module: Any) -> None:
            engine = trainer.strategy.engine
            result.engine = engine.state_dict() | {"skipped_steps": None}  # which differs, of course
            result.optimizer = trainer.optimizers[0].state_dict()
            result.steps, result.skipped_steps = engine.step, engine.skipped_steps

    if scaled:
        precision = importlib.import_module(package + ".plugins.precision").MixedPrecision
        # Grows and shrinks by two, more than once.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        options["plugins"] = [precision("16-mixed", "cpu", scaler=scaler)]
    trainer = make_trainer(
        package,
        strategy=strategy_class(package)(**sparse),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[Look()],
        **options,
    )
    module = make_module(package, optimizer)
    module.wrong = wrong
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="A gradient was not finite")
        trainer.fit(module, DataLoader(numbers, batch_size=None))  # type: ignore[arg-type]
    result.said = [str(w.message) for w in caught]
    result.parameters = flat(module)
    return result


CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    "top_k": ("SGD", {"sparsifier": "top_k", "density": 0.05}),
    "exdyna": ("SGD", {"sparsifier": "exdyna", "density": ls.Warmup(0.3, 0.02, steps=50)}),
    "sidco_e": (
        "Adam",
        {"sparsifier": "sidco_e", "rules": EVERYTHING_SPARSE, "find_unused_parameters": True, "watch": None},
    ),
}


@pytest.mark.parametrize(
    ("choice", "seed"),
    [pytest.param(choice, seed, marks=[pytest.mark.thorough] * (seed > 0)) for seed, choice in enumerate(CHOICES)],
)
def test_a_run_with_overflows_ends_where_one_without_these_batches_does(
    two_ranks: Ranks, choice: str, seed: int
) -> None:
    package, wrong = PACKAGES[seed % 2], bad_batches(seed)
    optimizer, sparse = CHOICES[choice]
    sparse = {"grouping": "layer", **sparse}
    everything = list(range(BATCHES))
    good = [n for n in everything if n not in wrong]
    runs = [(everything, wrong, True), (everything, wrong, False), (good, {}, False)]
    results = list(zip(*(two_ranks(fit, package, *run, optimizer, sparse) for run in runs), strict=True))
    for rank, (scaled, skipped, without) in enumerate(results):
        assert without.parameters.isfinite().all()
        assert (without.steps, without.skipped_steps) == (BATCHES - len(wrong), 0)
        for run in (scaled, skipped):
            assert (run.steps, run.skipped_steps) == (BATCHES - len(wrong), len(wrong))
            assert torch.equal(run.parameters, without.parameters)
            assert same(run.optimizer, without.optimizer)
            assert same(run.engine, without.engine)
        # Said once, where nobody else sees to it.
        assert [len(run.said) for run in (scaled, skipped, without)] == [0, 1 - rank, 0]
        # The scale has gone both ways, alike on all ranks.
        assert min(scaled.scales) < 2.0**10 < max(scaled.scales)
        assert scaled.scales == results[0][0].scales
        assert torch.equal(without.parameters, results[0][2].parameters)


@pytest.mark.parametrize("choice", by_default(CHOICES))
def test_what_skips_a_step_makes_no_difference_to_what_waits(two_ranks: Ranks, choice: str) -> None:
    """One coordinate of one rank is not finite, and all others are absorbed; the loss scale is a power of two."""
    optimizer, sparse = CHOICES[choice]
    sparse = {"grouping": "layer", **sparse}
    numbers, wrong = list(range(15)), bad_batches(3, batches=15, everywhere=False)
    runs = [(numbers, wrong, scaled) for scaled in (True, False)]
    results = list(zip(*(two_ranks(fit, PACKAGES[0], *run, optimizer, sparse) for run in runs), strict=True))
    for scaled, skipped in results:
        for run in (scaled, skipped):
            assert (run.steps, run.skipped_steps) == (15 - len(wrong), len(wrong))
            assert torch.equal(run.parameters, results[0][0].parameters)
            assert same(run.optimizer, results[0][0].optimizer)
        assert skipped.parameters.isfinite().all()
        assert same(scaled.engine, skipped.engine)


def fit_in_windows(scaled: bool, clipping: dict[str, Any]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Three batches a step, of which the one that overflows is not always the last."""
    package, wrong = "pytorch_lightning", bad_batches(7, batches=30)
    sparse = {"sparsifier": "exdyna", "density": 0.1, "grouping": "layer"}
    spoilt = {number // 3 for number in wrong}
    good = [number for number in range(30) if number // 3 not in spoilt]
    options = {"accumulate_grad_batches": 3, **clipping}
    return (
        fit(package, list(range(30)), wrong, scaled, "SGD", sparse, **options),
        fit(package, good, {}, False, "SGD", sparse, **options),
    )


@pytest.mark.parametrize(
    ("skips", "clips"), by_default(covering(in_turns(["strategy", "scaler"], ["unclipped", "clipped"]), together=1))
)
def test_one_bad_batch_voids_the_accumulated_step(two_ranks: Ranks, skips: str, clips: str) -> None:
    scaled, clipping = skips == "scaler", {"gradient_clip_val": 0.1} if clips == "clipped" else {}
    for overflown, without in two_ranks(fit_in_windows, scaled, clipping):
        assert overflown.steps == without.steps > 0
        assert overflown.skipped_steps == 10 - without.steps
        assert torch.equal(overflown.parameters, without.parameters)
        assert same(overflown.optimizer, without.optimizer)
        assert same(overflown.engine, without.engine)


def fit_taking_turns(wrong: dict[tuple[int, int], tuple[str, float]], left_out: set[tuple[int, int]]) -> Tensor:
    """Two optimizers in turn; some turns overflow on rank 1, others are not taken at all. By (batch, optimizer)."""
    import pytorch_lightning as pl

    class Turns(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.automatic_optimization = False

        def training_step(self, number: int, batch_idx: int) -> None:
            x, y = batch(number, self.global_rank)
            for turn, optimizer in enumerate(self.optimizers()):
                if (number, turn) in left_out:
                    continue
                self.net.wrong = wrong.get((number, turn))
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            own = [*self.net.first.parameters(), *self.net.second.parameters()]
            return [torch.optim.SGD(own, lr=0.1, momentum=0.9), torch.optim.Adam(self.net.third.parameters())]

    strategy = strategy_class("pytorch_lightning")(
        sparsifier="top_k", density=0.1, rules=EVERYTHING_SPARSE, find_unused_parameters=True, watch=None
    )
    trainer = make_trainer("pytorch_lightning", strategy=strategy, max_epochs=1, use_distributed_sampler=False)
    module = Turns()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A gradient was not finite")
        trainer.fit(module, DataLoader(list(range(12)), batch_size=None))  # type: ignore[arg-type]
    assert (trainer.strategy.engine.skipped_steps, trainer.strategy.engine.step) == (
        len(wrong),
        24 - len(wrong) - len(left_out),
    )
    return flat(module)


TURNS = {(0, 0): float("inf"), (3, 1): float("nan"), (4, 0): -float("inf"), (4, 1): float("inf"), (7, 0): float("inf")}


def test_only_the_optimizer_whose_turn_it_was_skips(two_ranks: Ranks) -> None:
    wrong = {turn: (EVERYWHERE, value) for turn, value in TURNS.items()}
    overflown = two_ranks(fit_taking_turns, wrong, set())
    without = two_ranks(fit_taking_turns, {}, set(wrong))
    for ours, reference in zip(overflown, without, strict=True):
        assert torch.equal(ours, reference)
        assert ours.isfinite().all()


def fit_with_disabled_scaler(package: str) -> tuple[Tensor, int]:
    precision = importlib.import_module(package + ".plugins").MixedPrecision
    plugins = [precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", enabled=False))]
    wrong = {3: ("first.weight", float("inf"))}
    found = fit(package, list(range(6)), wrong, False, "SGD", {"density": 0.1}, plugins=plugins)
    return found.parameters, found.skipped_steps


def test_a_scaler_that_is_switched_off_does_not_skip_and_the_strategy_does(two_ranks: Ranks) -> None:
    for parameters, skipped_steps in two_ranks(fit_with_disabled_scaler, "pytorch_lightning"):
        assert parameters.isfinite().all()
        assert skipped_steps == 1


# With plain DistributedDataParallel.

MEMORIES = [
    ls.memories.Residual(),
    ls.memories.LowPass(0.3),
    ls.memories.MomentumCorrection(0.9),
    ls.memories.MomentumCorrection(0.9, nesterov=True, masking=False),
    ls.memories.AdamCorrection(),
    ls.memories.AdamCorrection(beta1=0.9),
    ls.memories.ClipByNorm(0.5),
    ls.memories.ClipByNorm(0.5, ls.memories.MomentumCorrection(0.9)),
    ls.memories.WeightDecay(0.01),
    ls.memories.WeightDecay(0.01, ls.memories.AdamCorrection()),
    ls.memories.NoMemory(),
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]


def train(
    numbers: list[int],
    wrong: dict[int, tuple[str, float]],
    kind: Callable[..., torch.optim.Optimizer],
    layout: dict[str, Any],
    scaled: bool = False,
    **options: Any,
) -> tuple[Tensor, dict[str, Any], dict[str, Any], int]:
    """Parameters, state of the engine and of the optimizer, number of skipped steps; scaled: a scaler skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5, enabled=scaled)
    ddp = DistributedDataParallel(Net(), **layout)
    engine = ls.attach(ddp, **options)
    optimizer = kind(ddp.parameters())
    for number in numbers:
        ddp.module.wrong = wrong.get(number)
        x, y = batch(number, dist.get_rank())
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(ddp(x), y)).backward()  # type: ignore[no-untyped-call]
        before = flat(ddp.module)
        scaler.step(optimizer)
        scaler.update()
        assert engine.stepper.record.latest_skipped == (number in wrong) == torch.equal(flat(ddp.module), before)
    state = engine.state_dict() | {"skipped_steps": None}
    engine.close()
    return flat(ddp.module), state, optimizer.state_dict(), engine.skipped_steps


def train_with_and_without(seed: int, number: int) -> tuple[tuple[bool, ...], Tensor, bool]:
    """Finite, and parameters, engine and optimizer the same; parameters where one coordinate overflows, finite too."""
    memory, wrong = MEMORIES[number], bad_batches(seed, batches=PLAIN)
    options = {
        "sparsifier": ["top_k", "exdyna", "sidco_e", "clt_k", "union_top_k"][(number + seed) % 5],
        "density": 0.05,
        "grouping": "layer",
        "memory": memory,
    }
    momentum = 0.9 if isinstance(memory, (ls.memories.Residual, ls.memories.LowPass)) else 0.0
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=momentum)
    layout = LAYOUTS[(number + seed) % len(LAYOUTS)]
    a = train(list(range(PLAIN)), wrong, sgd, layout, **options)
    b = train([n for n in range(PLAIN) if n not in wrong], {}, sgd, layout, **options)
    alone = bad_batches(seed, PLAIN, everywhere=False)
    c = train(list(range(PLAIN)), alone, sgd, layout, **options)
    assert (a[3], b[3], c[3]) == (len(wrong), 0, len(alone))
    vectors = [vector for of_one in c[1]["parameters"].values() for vector in of_one.values()]
    finite = all(bool(x.isfinite().all()) for x in [*vectors, c[0]])
    alike = bool(b[0].isfinite().all()), torch.equal(a[0], b[0]), same(a[1], b[1]), same(a[2], b[2])
    return alike, c[0], finite


SOME = [0, 1, 2, 4, 8]
"""One of each kind of memory; what is inside another one is remembered as by itself."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "numbers"),
    [
        (14, SOME),
        (14, [number for number in range(len(MEMORIES)) if number not in SOME]),
        (11, list(range(len(MEMORIES)))),
    ],
)
def test_every_memory_forgets_what_is_not_finite(two_ranks: Ranks, seed: int, numbers: list[int]) -> None:
    for number in numbers:
        results = two_ranks(train_with_and_without, seed, number)
        for alike, parameters, finite in results:
            assert alike == (True, True, True, True), MEMORIES[number]
            assert finite, MEMORIES[number]
            assert torch.equal(parameters, results[0][1]), MEMORIES[number]


def train_by_adam(
    numbers: list[int], wrong: dict[int, tuple[str, float]], scaled: bool
) -> tuple[Tensor, Any, Any, int]:
    adam, layout = partial(torch.optim.Adam, lr=0.003), {"find_unused_parameters": True}
    options = {"sparsifier": "exdyna", "density": 0.1, "grouping": "layer", "watch": None}
    return train(numbers, wrong, adam, layout, scaled, **options)


def test_a_scaler_of_the_users_skips_on_all_ranks(two_ranks: Ranks) -> None:
    wrong = bad_batches(21, batches=20)
    overflown = two_ranks(train_by_adam, list(range(20)), wrong, True)
    without = two_ranks(train_by_adam, [n for n in range(20) if n not in wrong], {}, False)
    for ours, reference in zip(overflown, without, strict=True):
        assert same(ours[:3], reference[:3])
        assert ours[3] == len(wrong)


class Frozen(Net):
    """One layer needs no gradient, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.second.requires_grad_(False)
        self.never = nn.Linear(24, 24)


def train_without_some() -> tuple[list[bool], bool, bool]:
    ddp = DistributedDataParallel(Frozen(), find_unused_parameters=True)
    engine = ls.attach(ddp, density=0.1, rules=EVERYTHING_SPARSE, watch=None)
    optimizer = torch.optim.Adam(ddp.parameters())
    ddp.module.wrong = "first.weight", float("inf")
    x, y = batch(0, dist.get_rank())
    nn.functional.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
    given = [p.grad is not None for p in ddp.parameters()]
    before = flat(ddp.module)
    optimizer.step()
    skipped = engine.stepper.record.latest_skipped
    engine.close()
    return given, skipped, torch.equal(flat(ddp.module), before) and not optimizer.state


def test_parameters_without_a_gradient_are_no_obstacle(two_ranks: Ranks) -> None:
    for given, skipped, unchanged in two_ranks(train_without_some):
        assert given == [True, True, False, False, True, True, False, False]
        assert skipped
        assert unchanged


def train_directly(wrong: int) -> tuple[list[bool], int, int, Tensor]:
    """All dense and past the groups from the third step on, as the fallback does it; one step overflows on rank 1."""
    ddp = DistributedDataParallel(Net())
    engine = ls.attach(ddp, dense=["*"], sparsifier="everything")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    direct, moved, before = [], 0, flat(ddp.module)
    for number in range(8):
        ddp.module.wrong = ("first.weight", float("inf")) if number == wrong else None
        x, y = batch(number, dist.get_rank())
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == 2:
            engine._go_direct()
        direct.append(engine.stepper.direct)
        moved += not torch.equal(flat(ddp.module), before)
        before = flat(ddp.module)
    engine.close()
    return direct, engine.skipped_steps, moved, before


@pytest.mark.parametrize("wrong", [2, 5], ids=["just before", "within"])
def test_steps_past_the_groups_are_skipped_too_and_only_those(two_ranks: Ranks, wrong: int) -> None:
    for direct, skipped_steps, moved, parameters in two_ranks(train_directly, wrong):
        assert direct[2:] == [True] * 6
        assert parameters.isfinite().all()
        assert (skipped_steps, moved) == (1, 7)
