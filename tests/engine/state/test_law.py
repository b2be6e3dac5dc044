"""Nothing that was absorbed is missing in a state, and nothing is there twice: at any moment, and whoever loads it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import lightning_sparse as ls
from lightning_sparse.api.attach import sizes_of
from lightning_sparse.methods.density.schedules import DensitySchedule
from lightning_sparse.methods.grouping import make_plan
from tests.covering import by_default, covering, in_one_test, in_turns
from tests.engine.state.account import Case, Look, Training, check, check_resized
from tests.nodes.model import part
from tests.ranks import Ranks
from tests.sums import SPARSE, Sums

HALF = ls.memories.MomentumCorrection(0.5)
ROUNDED = 1e-5
"""Where sums are not of integers."""
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "settings": {"lr": 0.01}}
CASES: dict[str, Case] = {
    "residual": Case(),
    "union": Case({"sparsifier": "union_top_k"}),
    "reduce union": Case({"sparsifier": "union_top_k", "exchange": "reduce_union", "grouping": "model"}),
    "exdyna": Case({"sparsifier": "exdyna", "density": 0.1}),
    "own messages": Case({"messages": "group"}),
    "decay": Case({"memory": ls.memories.Residual(decay=0.5)}),
    "momentum": Case({"memory": ls.memories.MomentumCorrection(0.5, masking=False)}),
    "momentum masked": Case({"memory": HALF}),
    "nesterov": Case({"memory": ls.memories.MomentumCorrection(0.5, nesterov=True), "sparsifier": "union_top_k"}),
    "low pass": Case({"memory": ls.memories.LowPass(0.5)}),
    "adam": Case({"memory": ls.memories.AdamCorrection(beta1=0.5)}, off=ROUNDED),
    "second moment": Case({"sparsifier": "union_top_k"}, **ADAMW),
    "clip by norm": Case({"memory": ls.memories.ClipByNorm(100.0)}, off=ROUNDED),
    "clip and momentum": Case({"memory": ls.memories.ClipByNorm(100.0, HALF)}, off=ROUNDED),
    "weight decay": Case({"memory": ls.memories.WeightDecay(0.5)}),
    "scaled": Case(scale=1024.0),
    "scaled second moment": Case({"sparsifier": "union_top_k"}, scale=1024.0, **ADAMW),
    "clipped by hand": Case(clip=1.0),
    "clipped and scaled": Case({"memory": HALF}, clip=1.0, scale=64.0),
    "accumulated": Case(local=2),
    "two optimizers": Case(optimizers=2),
    "four optimizers of Adam": Case({"sparsifier": "union_top_k"}, optimizers=4, **ADAMW),
    "two exchanges": Case(exchanges=2),
    "two exchanges of momentum": Case({"memory": HALF}, exchanges=2),
    "two exchanges of two optimizers": Case(exchanges=2, optimizers=2),
    "two optimizers in turn": Case(exchanges=2, optimizers=2, in_turn=True),
    "two exchanges of low pass": Case({"memory": ls.memories.LowPass(0.5)}, exchanges=2),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16 momentum": Case({"memory": HALF, "sparsifier": "union_top_k"}, dtype=torch.bfloat16),
    "float16 scaled": Case(dtype=torch.float16, scale=4.0, settings={"lr": 1 / 64}),
    "density 1": Case({"density": 1.0}),
    "density 1 in bfloat16": Case({"density": 1.0}, dtype=torch.bfloat16),
    "warm-up": Case({"density": ls.Warmup(1.0, 0.02, 3)}),
    "flushed": Case(flush=2),
    "flushed momentum": Case({"memory": HALF}, flush=1, optimizers=2),
    "emptied": Case(empties=2),
    "emptied second moment": Case({"sparsifier": "union_top_k"}, empties=2, **ADAMW),
    "skipped": Case(bad=1),
    "skipped momentum": Case({"memory": HALF}, bad=1),
    "skipped low pass": Case({"memory": ls.memories.LowPass(0.5)}, bad=2),
    "skipped second moment": Case({"sparsifier": "union_top_k"}, bad=1, **ADAMW),
    "skipped and clipped": Case({"memory": ls.memories.ClipByNorm(100.0)}, bad=1, off=ROUNDED),
    "skipped and scaled": Case(bad=1, scale=64.0),
    "lr_aware": Case({"lr_aware": True}),
    "regrouped": Case({"sparsifier": "union_top_k"}, regroup=1),
    "no memory": Case({"memory": ls.memories.NoMemory()}),
    "some dense": Case({"rules": ls.Rules(dense=["*.third"], dense_ndim=0, dense_numel=0)}),
    "unused": Case(unused={1: ("third",), 2: ("first", "second")}, ddp={"find_unused_parameters": True}),
    "unused in one group": Case(
        {"grouping": "model", "sparsifier": "union_top_k"}, unused={1: ("third",)}, ddp={"find_unused_parameters": True}
    ),
}
MADE = [("thread", False), ("inline", True), ("thread", True), ("inline", False)]
"""Executor, and whether gradients are views of DDP's buckets."""
MOMENTS = ["within backward", "after backward", "after a step"]
PAIRS = [*in_turns(list(CASES), MOMENTS), ("emptied", "emptied"), ("clipped and scaled", "clipped")]
LEFT = {"own messages", "nesterov", "clip and momentum", "scaled second moment", "clipped and scaled", "reduce union"}
LEFT |= {"four optimizers of Adam", "density 1 in bfloat16", "flushed momentum", "emptied second moment", "lr_aware"}
LEFT |= {"skipped momentum", "skipped low pass", "skipped and clipped", "skipped and scaled", "bfloat16 momentum"}
LEFT |= {"exdyna", "decay", "momentum", "float16 scaled", "two exchanges of momentum", "two exchanges of low pass"}
LEFT |= {"two exchanges of two optimizers", "unused in one group", "skipped second moment"}
"""To thorough runs."""
CELLS = [(name, moment, MADE[number % len(MADE)]) for number, (name, moment) in enumerate(PAIRS)]


def memory_of(case: Case) -> Any:
    if "memory" in case.options:
        return case.options["memory"]
    return ls.memories.Residual() if case.optimizer is torch.optim.SGD else ls.memories.SecondMoment()


def training_of(name: str, executor: str, view: bool) -> Training:
    case = CASES[name]
    options, ddp = {"executor": executor, **case.options}, {**case.ddp, "gradient_as_bucket_view": view}
    return Training(replace(case, options=options, ddp=ddp))


def latest(looks: Sequence[Look], moment: str) -> Look:
    """The last one of this moment that has others behind it."""
    return [look for look in looks[1:-1] if look.moment == moment][-1]


def train(name: str, moment: str, executor: str, view: bool) -> list[list[Look]]:
    """All looks of a run, and of one that goes on from its last state at a moment, which is looked at between them."""
    first = training_of(name, executor, view)
    first.run(CASES[name].steps)
    saved = latest(first.looks, moment)
    other = training_of(name, executor, view)
    other.resume([saved] * dist.get_world_size())
    other.run(2)
    return [first.close(), [saved, *other.close()]]


@pytest.mark.in_backward
@in_one_test("name, moment, made", covering(CELLS, together=1, thorough=LEFT), apart=0)
def test_all_that_was_absorbed_is_in_a_state_and_in_those_who_load_it(
    two_ranks: Ranks, name: str, moment: str, made: Any
) -> None:
    for ranks in zip(*two_ranks(train, name, moment, *made), strict=True):
        check(ranks, memory_of(CASES[name]), CASES[name].off)


# ---- Other numbers of ranks


def train_once(name: str, moment: str, executor: str, view: bool) -> Look:
    """The last look at a moment."""
    training = training_of(name, executor, view)
    training.run(CASES[name].steps - 1)
    return latest(training.close(), moment)


def go_on(name: str, seen: list[Look], executor: str, view: bool) -> list[Look]:
    """From what all ranks of another run have seen at a moment."""
    training = training_of(name, executor, view)
    training.resume(seen)
    training.run(1)
    return training.close()


MERGED = ["residual", "union", "momentum masked", "low pass", "second moment", "scaled", "bfloat16", "density 1"]
MERGED += ["decay", "momentum", "two optimizers", "flushed", "skipped", "clipped by hand"]


@pytest.mark.in_backward
@in_one_test(
    "name, moment",
    covering(in_turns(MERGED, MOMENTS), together=1, thorough=MERGED[6:]),
    apart=0,
)
def test_any_number_of_ranks_has_all_that_was_absorbed(
    alone: Ranks, two_ranks: Ranks, three_ranks: Ranks, name: str, moment: str
) -> None:
    memory, seen = memory_of(CASES[name]), two_ranks(train_once, name, moment, *MADE[0])
    for ranks in (alone, three_ranks):
        after = ranks(go_on, name, seen, *MADE[1])
        check_resized(seen, [looks[0] for looks in after], memory)
        check(after, memory, ROUNDED)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def loaded_into_dense_groups() -> tuple[list[str], bool, float]:
    """A state whose residuals are all in averages that wait, loaded where everything is dense."""
    module = torch.nn.Linear(20, 20, bias=False)
    torch.nn.init.ones_(module.weight)
    batch = torch.full((4, 20), float(1 + dist.get_rank()))
    states = []
    for rules in (ls.Rules(dense_ndim=0, dense_numel=0), ls.Rules(dense=("*",))):
        ddp = DistributedDataParallel(module)
        engine = ls.attach(
            ddp, sparsifier="union_top_k", density=0.1, rules=rules, memory=ls.memories.SecondMoment(), watch=None
        )
        if states:
            notes = engine.load_state_dict(states[0])
        else:
            engine._flush_next_step()
        module.weight.grad = None
        ddp(batch).sum().backward()
        states.append(engine.state_dict())
        engine.close()
    waits = bool(states[0]["pending"]) == (dist.get_rank() == 0)
    return notes, waits, float(module.weight.grad.mean())


@pytest.mark.in_backward
def test_averages_that_wait_are_sent_by_dense_groups_too(two_ranks: Ranks) -> None:
    for notes, waits, mean in two_ranks(loaded_into_dense_groups):
        assert all("learned" in note for note in notes)
        assert waits
        assert mean == 2 * 4 * 1.5  # both backwards, each of four rows of 1 and 2


# ---- Where gradients are exchanged when optimizers step


@dataclass(frozen=True)
class InTurn(DensitySchedule):
    """Dense for a step now and then."""

    def __call__(self, step: int) -> float:
        return (0.05, 0.05, 0.3, 0.02, 1.0)[step % 5]


class History:
    """A training in which anything may happen, the same on all ranks; what it has given, and stepped with.

    Args:
        seed: of what happens.
        dense: whether some steps are.
        size: ranks of a node, whose means are given: each rank of it exchanges a part.
    """

    def __init__(self, seed: int, dense: bool, size: int = 1) -> None:
        self.random, self.module, self.size = random.Random(seed), Sums().double(), size
        self.density: Any = InTurn() if dense else 0.05
        self.parameters = dict(self.module.named_parameters())
        self.given, self.stepped = ({n: torch.zeros_like(p) for n, p in self.parameters.items()} for _ in range(2))
        self.attach()
        self.make_optimizers()

    def attach(self) -> None:
        self.ddp = DistributedDataParallel(self.module, find_unused_parameters=True, bucket_cap_mb=0.002)
        self.engine = ls.attach(
            self.ddp, **{**SPARSE, "density": self.density, "memory": "residual", "node_size": self.size}
        )

    def make_optimizers(self) -> None:
        every, cut = list(self.parameters.values()), self.random.choice([1, 2, 4])
        parts = [every[:cut], every[cut:]] if cut < len(every) else [every]
        self.optimizers = [SGD(part, lr=1.0) for part in parts]

    def drop(self, optimizer: SGD) -> None:
        optimizer.zero_grad(set_to_none=self.random.random() < 0.5)

    def backward(self) -> None:
        kind = self.random.choice(["one", "one", "local", "several", "discarded", "not finite"])
        for number in range({"one": 1, "not finite": 1}.get(kind, 2)):
            with self.ddp.no_sync() if kind == "local" and number == 0 else nullcontext():
                without = self.random.choice([(), (), ("first",), ("second", "third")])
                odd = self.random.randrange(dist.get_world_size())
                bad = math.nan if kind == "not finite" and dist.get_rank() == odd else 1.0
                only_here = ("fourth",) if dist.get_rank() != odd else ()
                (self.ddp(dist.get_rank(), (*without, *only_here)) * bad).backward()
            if kind == "discarded" and number == 0:
                for optimizer in self.optimizers:
                    self.drop(optimizer)

    def step(self) -> None:
        order = self.random.sample(self.optimizers, len(self.optimizers))
        for optimizer in order:
            what = self.random.choice(["step", "step", "step", "rate of 0", "leave", "drop"])
            if what in ("step", "rate of 0"):
                self._step(optimizer, 1.0 if what == "step" else 0.0)
            if what != "leave":
                self.drop(optimizer)

    def _step(self, optimizer: SGD, rate: float) -> None:
        held = {n: p for n, p in self.parameters.items() if any(p is q for q in optimizer.param_groups[0]["params"])}
        own = {name: p.grad.clone() for name, p in held.items() if p.grad is not None}
        before = {name: p.detach().clone() for name, p in held.items()}
        finite = all(bool(grad.isfinite().all()) for grad in own.values())
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 1.0
        for name, p in held.items():
            moved = before[name] - p.detach()
            assert finite or not moved.any()
            if finite:
                self.given[name] += own.get(name, 0.0)
                self.stepped[name] += moved if rate or p.grad is None else p.grad

    def between(self) -> str:
        what = self.random.choice(["nothing", "nothing", "regroup", "flush", "load", "optimizers", "send all"])
        if what == "regroup":
            sizes = sizes_of(self.engine.parameters)
            self.random.shuffle(sizes)
            grouping: Any = self.random.choice(["model", "layer"])
            self.engine.regroup(make_plan(sizes, grouping, rules=ls.Rules(dense_ndim=0, dense_numel=0)))
        elif what == "flush":
            before = {name: p.detach().clone() for name, p in self.parameters.items()}
            ls.flush(self.engine, self.optimizers)
            for name, p in self.parameters.items():
                self.stepped[name] += before[name] - p.detach()
        elif what == "load":
            state = self.engine.state_dict()
            self.engine.close()
            self.attach()
            self.engine.load_state_dict(state)
        elif what == "optimizers":
            self.make_optimizers()
        elif what == "send all":
            self.engine._flush_next_step()
        return what

    def check(self, what: str) -> None:
        """Whether all that was given is stepped with, or waits; and weights are equal on all ranks."""
        n, place = dist.get_world_size(), dist.get_rank() % self.size
        for name, p in self.parameters.items():
            residual = self.engine.residual(name)
            lost = torch.zeros_like(p).flatten()
            part(lost, place, self.size).copy_(part(self.given[name].flatten(), place, self.size))
            part(lost, place, self.size).sub_(0 if residual is None else residual)
            dist.all_reduce(lost)
            lost -= n // self.size * self.stepped[name].flatten()
            assert lost.abs().max() < 1e-8, (what, name, self.engine.step)
            others = [torch.empty_like(p) for _ in range(n)]
            dist.all_gather(others, p.detach())
            assert all(torch.equal(other, p) for other in others), (what, name, self.engine.step)


def history(seed: int, size: int = 1) -> tuple[int, int]:
    """Steps, and skipped ones, of a history."""
    history = History(seed, dense=seed % 4 == 1, size=size)
    for _ in range(25):
        history.backward()
        history.check("backward")
        history.step()
        history.check("step")
        history.check(history.between())
    taken = history.engine.step, history.engine.skipped_steps
    history.engine.close()
    return taken


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("seed", by_default(range(1, 61), 2))
def test_whatever_happens_nothing_is_lost(two_ranks: Ranks, three_ranks: Ranks, seed: int) -> None:
    taken, *others = (three_ranks if seed % 2 == 0 else two_ranks)(history, seed)
    assert all(other == taken for other in others)
    assert taken[0] > 10


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("seed", "ranks"), by_default([(seed, 2 if seed % 5 == 0 else 4) for seed in range(1, 31)], 2))
def test_whatever_happens_nothing_of_a_part_is_lost(request: pytest.FixtureRequest, seed: int, ranks: int) -> None:
    """Of two nodes of two ranks, or of one."""
    taken, *others = request.getfixturevalue("two_ranks" if ranks == 2 else "four_ranks")(history, seed, 2)
    assert all(other == taken for other in others)
    assert taken[0] > 10
