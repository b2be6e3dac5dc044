"""Nothing that was absorbed is missing in a state, and nothing is there twice: at any moment, and whoever loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_sparse as ls
from tests.covering import by_default, covering, in_one_test, in_turns
from tests.engine.state.account import Case, Look, Training, check, check_resized
from tests.engine.state.history import History
from tests.ranks import Ranks

HALF = ls.memories.MomentumCorrection(0.5)
ROUNDED = 1e-5
"""Where sums are not of integers."""
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "settings": {"lr": 0.01}}
CASES: dict[str, Case] = {
    "residual": Case(),
    "union": Case({"sparsifier": "union_top_k"}),
    "reduce union": Case({"sparsifier": "union_top_k", "exchange": "reduce_union", "grouping": "model"}),
    "exdyna": Case({"sparsifier": "exdyna", "density": 0.1}),
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
    "clipped by hand": Case(clip=1.0, off=ROUNDED),
    "clipped and scaled": Case({"memory": HALF}, clip=1.0, scale=64.0, off=ROUNDED),
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
    "regrouped": Case({"sparsifier": "union_top_k"}, regroup=1),
    "no memory": Case({"memory": ls.memories.NoMemory()}),
    "some dense": Case({"rules": ls.Rules(dense=["*.third"], dense_ndim=0, dense_numel=0)}),
    "unused": Case(unused={1: ("third",), 2: ("first", "second")}, ddp={"find_unused_parameters": True}),
    "unused in one group": Case(
        {"grouping": "model", "sparsifier": "union_top_k"}, unused={1: ("third",)}, ddp={"find_unused_parameters": True}
    ),
}
MADE = [False, True, True, False]
"""Whether gradients are views of DDP's buckets."""
MOMENTS = ["within a step", "after backward", "after a step"]
PAIRS = [*in_turns(list(CASES), MOMENTS), ("emptied", "emptied"), ("clipped and scaled", "clipped")]
LEFT = {"nesterov", "clip and momentum", "scaled second moment", "clipped and scaled", "reduce union"}
LEFT |= {"four optimizers of Adam", "density 1 in bfloat16", "flushed momentum", "emptied second moment"}
LEFT |= {"skipped momentum", "skipped low pass", "skipped and clipped", "skipped and scaled", "bfloat16 momentum"}
LEFT |= {"exdyna", "decay", "momentum", "float16 scaled", "two exchanges of momentum", "two exchanges of low pass"}
LEFT |= {"two exchanges of two optimizers", "unused in one group", "skipped second moment"}
LEFT |= {"union", "two optimizers in turn", "density 1", "no memory"}
"""To thorough runs."""
CELLS = [(name, moment, MADE[number % len(MADE)]) for number, (name, moment) in enumerate(PAIRS)]


def memory_of(case: Case) -> Any:
    if "memory" in case.options:
        return case.options["memory"]
    return ls.memories.Residual() if case.optimizer is torch.optim.SGD else ls.memories.SecondMoment()


def training_of(name: str, view: bool) -> Training:
    case = CASES[name]
    return Training(replace(case, ddp={**case.ddp, "gradient_as_bucket_view": view}))


def latest(looks: Sequence[Look], moment: str) -> Look:
    """The last one of this moment that has others behind it; where there is none, as with Adam, after a step."""
    seen = [look for look in looks[1:-1] if look.moment == moment]
    return seen[-1] if seen else latest(looks, "after a step")


def train(name: str, moment: str, view: bool) -> list[list[Look]]:
    """All looks of a run, and of one that goes on from its last state at a moment, which is looked at between them."""
    first = training_of(name, view)
    first.run(CASES[name].steps)
    saved = latest(first.looks, moment)
    other = training_of(name, view)
    other.resume([saved] * dist.get_world_size())
    other.run(2)
    return [first.close(), [saved, *other.close()]]


@in_one_test("name, moment, view", covering(CELLS, together=1, thorough=LEFT), apart=0)
def test_all_that_was_absorbed_is_in_a_state_and_in_those_who_load_it(
    two_ranks: Ranks, name: str, moment: str, view: bool
) -> None:
    for ranks in zip(*two_ranks(train, name, moment, view), strict=True):
        check(ranks, memory_of(CASES[name]), CASES[name].off)


# ---- Other numbers of ranks


def train_once(name: str, moment: str, view: bool) -> Look:
    """The last look at a moment."""
    training = training_of(name, view)
    training.run(CASES[name].steps - 1)
    return latest(training.close(), moment)


def go_on(name: str, seen: list[Look], view: bool) -> list[Look]:
    """From what all ranks of another run have seen at a moment."""
    training = training_of(name, view)
    training.resume(seen)
    training.run(1)
    return training.close()


MERGED = ["residual", "union", "momentum masked", "low pass", "second moment", "scaled", "bfloat16", "density 1"]
MERGED += ["decay", "momentum", "two optimizers", "flushed", "skipped", "clipped by hand"]


@in_one_test("name, moment", covering(in_turns(MERGED, MOMENTS), together=1, thorough=MERGED[6:]), apart=0)
def test_any_number_of_ranks_has_all_that_was_absorbed(
    alone: Ranks, two_ranks: Ranks, three_ranks: Ranks, name: str, moment: str
) -> None:
    memory, seen = memory_of(CASES[name]), two_ranks(train_once, name, moment, MADE[0])
    for ranks in (alone, three_ranks):
        after = ranks(go_on, name, seen, MADE[1])
        check_resized(seen, [looks[0] for looks in after], memory, CASES[name].off)
        check(after, memory, ROUNDED)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


# ---- Where gradients are exchanged when optimizers step


def history(seed: int, size: int = 1) -> tuple[int, int]:
    """Steps, and skipped ones, of a history."""
    return History(seed, dense=seed % 4 == 1, size=size).run(25)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("seed", by_default(range(1, 61), 2))
def test_whatever_happens_nothing_is_lost(two_ranks: Ranks, three_ranks: Ranks, seed: int) -> None:
    taken, *others = (three_ranks if seed % 2 == 0 else two_ranks)(history, seed)
    assert all(other == taken for other in others)
    assert taken[0] > 10


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(("seed", "ranks"), by_default([(seed, 2 if seed % 5 == 0 else 4) for seed in range(1, 31)]))
def test_whatever_happens_nothing_of_a_part_is_lost(request: pytest.FixtureRequest, seed: int, ranks: int) -> None:
    """Of two nodes of two ranks, or of one."""
    taken, *others = request.getfixturevalue("two_ranks" if ranks == 2 else "four_ranks")(history, seed, 2)
    assert all(other == taken for other in others)
    assert taken[0] > 10
