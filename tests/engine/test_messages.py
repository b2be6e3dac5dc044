"""Groups whose messages travel together: how often a step talks, and that nothing else depends on it."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import network
from lightning_sparse.engine.ahead import Ahead
from lightning_sparse.engine.calls import digest_of
from lightning_sparse.methods.exchanges import GatherPairs
from tests.engine.test_engine import batches, wrapped
from tests.engines import exchange
from tests.gpu.models import Branches
from tests.gpu.training import LAYOUTS
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

MANY = {"grouping": "layer", "rules": ls.Rules(dense_ndim=2, dense_numel=0)}
"""Four groups, and the biases as dense ones."""


# ---- How often a step talks


def collectives(layout: str, options: dict[str, Any], far: bool) -> tuple[Counter[str], int]:
    """Count the collectives that a step asks torch for, by operation and dtype; also return the number of groups.

    Each waits for the one before it: between ranks that are far apart for a message of one way, else for a round trip.
    """
    made = options.pop("optimizer", None)
    ddp, engine = wrapped(layout, **options)
    optimizer = made and made(ddp.parameters())
    engine.stepper.comm.far = far
    at_once: tuple[Any, str] = (Ahead, "send") if far else (dist, "all_to_all_single")
    seen: Counter[str] = Counter()

    def counting(name: str, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = next(arg for arg in args if isinstance(arg, Tensor))
            seen[f"{name} {str(sent.dtype).removeprefix('torch.')}"] += 1
            return operation(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for step, batch in enumerate(batches(4)):
            if step == 3:
                patch.setattr(network, "_all_gather", counting("all_gather", network._all_gather))
                patch.setattr(*at_once, counting("to_all", getattr(*at_once)))
                for name in ("all_reduce", "broadcast"):
                    patch.setattr(dist, name, counting(name, getattr(dist, name)))
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step() if optimizer else exchange(engine)
    groups = len(engine.groups)
    return seen, groups


WORDS, INTS, FLOATS, BYTES = (f"to_all {dtype}" for dtype in ("int64", "int32", "float32", "uint8"))
AVERAGES = "all_reduce float32"


TALKS: list[tuple[str, dict[str, Any], dict[str, int], int]] = [
    # what two ranks say in backward and in the step; picks, and vectors to add up: of several dtypes as bytes
    ("default", {"grouping": "layer"}, {WORDS: 2, INTS: 2}, 4),
    ("small_buckets", {"grouping": "bucket", "bucket_cap_mb": 0.01}, {WORDS: 2, INTS: 2}, 3),
    ("default", MANY, {WORDS: 2, INTS: 1, BYTES: 1}, 5),
    ("find_unused", {"grouping": "layer"}, {WORDS: 2, INTS: 2}, 4),
    ("find_unused", MANY, {WORDS: 2, INTS: 1, BYTES: 1}, 5),
    ("default", {**MANY, "sparsifier": "everything"}, {AVERAGES: 1}, 5),  # DDP's own
    ("default", {"grouping": "layer", "optimizer": torch.optim.AdamW}, {WORDS: 2, INTS: 2}, 4),
    ("default", {"grouping": "layer", "sparsifier": "top_k"}, {WORDS: 2, INTS: 1}, 4),
]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("case", range(len(TALKS)))
def test_a_step_talks_as_often_as_one_group(two_ranks: Ranks, case: int, far: bool) -> None:
    layout, options, expected, groups = TALKS[case]
    for seen in two_ranks(collectives, layout, {"density": 0.05, **options}, far):
        assert seen == (expected, groups)


@pytest.mark.parametrize("far", [False, True])
def test_between_more_than_two_ranks_sums_are_formed_in_parts(three_ranks: Ranks, far: bool) -> None:
    layout, options, expected, groups = TALKS[4]
    for seen in three_ranks(collectives, layout, {"density": 0.05, **options}, far):
        assert seen == ({**expected, BYTES: 2}, groups)


# ---- Errors


class Failing(GatherPairs):
    """Fails in one group on one rank, before or after its message."""

    def __init__(self, numel: int, before: bool) -> None:
        vars(self).update(numel=numel, before=before)

    def __repr__(self) -> str:
        return "Failing()"

    def __call__(self, acc: Tensor, selection: Any, ctx: Any) -> Any:
        fails = acc.numel() - 1 == self.numel and dist.get_rank() == 1 and ctx.step == 1
        if fails and self.before:
            raise ArithmeticError("before its message")
        update = yield from super().__call__(acc, selection, ctx)
        if fails:
            raise ArithmeticError("after its message")
        return update


def failing(before: bool) -> tuple[str, list[str]]:
    options: dict[str, Any] = {"exchange": Failing(305, before), "grouping": "layer", "density": 0.05}
    ddp, engine = wrapped("small_buckets", sparsifier="top_k", **options)
    for batch in batches(3):
        try:
            ddp(batch).square().mean().backward()
            exchange(engine)
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", [])
    return "", []


@pytest.mark.parametrize("before", [True, False])
def test_an_error_names_its_group_and_ends_the_step_on_all_ranks(before: bool) -> None:
    with Ranks(2) as ranks:  # of its own: an error closes connections
        (lost, _), (kind, notes) = ranks(failing, before)
    assert lost == "LostRankError"
    assert kind == "ArithmeticError"
    assert notes == ["sparse_ddp: in the exchange of group 'head', step 1, rank 1"]


class OneRankFails(ls.density.Constant):
    """A schedule that fails on one rank."""

    def __call__(self, step: int) -> float:
        if step == 1 and dist.get_rank() == 1:
            raise ArithmeticError("in a schedule")
        return super().__call__(step)


class Differs(ls.density.Constant):
    """A schedule that gives another density on the second half of the ranks."""

    def __call__(self, step: int) -> float:
        return 0.2 if step == 1 and dist.get_rank() * 2 >= dist.get_world_size() else super().__call__(step)


def at_another_density(options: dict[str, Any]) -> tuple[str, int]:
    """The error of this rank where a schedule gives another density on one of them, and the steps that count."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches(), **LAYOUTS["small_buckets"])
    engine = ls.attach(ddp, rules=EVERYTHING_SPARSE, density=Differs(0.05), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        ddp(batch).square().mean().backward()
        optimizer.step()

    first, second = batches(2)
    step(first)
    return error_of(step, second), engine.step


@pytest.mark.parametrize("options", [{}, {"node_size": 2}, {"overlap": True}], ids=str)
def test_ranks_whose_schedules_differ_are_told_before_messages_of_other_lengths_meet(options: dict[str, Any]) -> None:
    with Ranks(4 if "node_size" in options else 2) as ranks:
        for told, step in ranks(at_another_density, options):
            assert "The ranks have drifted apart" in told
            assert "at density 0.05; rank" in told
            assert "at density 0.2. " in told
            assert step == 1


class DoesNotSettle(ls.memories.Residual):
    """A memory that fails on one rank when the step is settled."""

    fails: ClassVar[bool] = False

    def settle_(self, *args: Any) -> None:
        if self.fails:
            raise ArithmeticError("in a memory")
        super().settle_(*args)


def failing_locally(where: str, options: dict[str, Any]) -> tuple[str, list[str], bool]:
    """The error of this rank, its notes, and whether it came long before the timeout."""
    torch.manual_seed(0)
    model = Branches()
    model.trunk.bias.requires_grad_(where != "thawed")
    ddp = DistributedDataParallel(model, **LAYOUTS["small_buckets"])
    engine = ls.attach(ddp, rules=EVERYTHING_SPARSE, timeout=timedelta(seconds=20), **options)
    for number, batch in enumerate(batches(4)):
        if number == 1 and dist.get_rank() == 1:
            model.trunk.bias.requires_grad_(True)
            DoesNotSettle.fails = True
        begin = time.monotonic()
        try:
            ddp(batch).square().mean().backward()
            exchange(engine)
        except Exception as error:
            return type(error).__name__, getattr(error, "__notes__", []), time.monotonic() - begin < 10
    return "", [], False


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "schedule": ({"density": OneRankFails(0.05)}, "in the exchange of group 'head'"),
    "memory": ({"memory": DoesNotSettle()}, "in the exchange"),
    "thawed": ({}, "before the first exchange"),
}
"""Settings, and the places of errors."""


@pytest.mark.parametrize("where", FAILING)
def test_nobody_waits_for_a_rank_that_fails_beside_its_exchange(where: str) -> None:
    options, place = FAILING[where]
    with Ranks(2) as ranks:
        (lost, _, soon), (kind, notes, _) = ranks(failing_locally, where, {"grouping": "layer", **options})
    assert (lost, soon) == ("LostRankError", True)
    assert kind in ("ArithmeticError", "RuntimeError")
    assert notes == [f"sparse_ddp: {place}, step 1, rank 1"]


def other_settings() -> tuple[str, int, bool]:
    """The error of this rank when one has drifted apart, the steps that count, and whether nothing is absorbed."""
    ddp, engine = wrapped("default", density=0.05, grouping="layer")
    first, second = batches(2)
    ddp(first).square().mean().backward()
    exchange(engine)
    before = [engine.residual(name).clone() for name in engine.stepper.parameters]
    engine.stepper.digest += dist.get_rank()
    told = error_of(lambda: ddp(second).square().mean().backward())
    after = [engine.residual(name) for name in engine.stepper.parameters]
    return told, engine.step, all(map(torch.equal, before, after))


def test_ranks_whose_settings_have_drifted_apart_are_told_before_anything_is_absorbed() -> None:
    with Ranks(2) as ranks:
        for told, step, kept in ranks(other_settings):
            assert "rank 0 ends a backward; rank 1 ends a backward, with other settings or groups than rank 0" in told
            assert (step, kept) == (1, True)


def test_a_digest_tells_settings_and_groups_apart() -> None:
    config = ls.engine.config.SparsificationConfig()
    digests = {
        digest_of(config, ["a"]),
        digest_of(config, ["b"]),
        digest_of(dataclasses.replace(config, density=0.02), ["a"]),
    }
    assert len(digests) == 3
    assert all(0 <= digest < 1 << 62 for digest in digests)
    assert digest_of(config, ["a"]) in digests
