"""Ranks whose weights differ are told of it, at the end of a backward; others are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import lightning_sparse as ls
from lightning_sparse.core.layout import flattened
from lightning_sparse.engine.weights import Weights
from tests.hsdp.model import grid, made, sharded
from tests.ranks import Ranks

SENTENCE = "Weights are no longer equal on all ranks"
SETTINGS: dict[str, Any] = {"density": 0.05, "watch": None}


class Loop:
    """A wrapped model on this rank, and how many backwards it had; loops below are steps of it."""

    def __init__(self, model: Any, engine: Any) -> None:
        self.model, self.engine = model, engine
        self.parameters: list[Any] = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = SGD(self.parameters, lr=0.05)
        self.backwards = self.step = 0
        self._random = torch.Generator().manual_seed(dist.get_rank())

    def backward(self) -> None:
        x = torch.randn(4, 13, generator=self._random)
        mse_loss(self.model(x), x[:, :3]).backward()
        self.backwards += 1

    @torch.no_grad()
    def by_hand(self, parameters: Sequence[Any]) -> None:
        for p in parameters:
            p.data -= 0.05 * p.grad


def by_hand(t: Loop) -> None:
    t.backward()
    t.by_hand(t.parameters)


def accumulated(t: Loop) -> None:
    for _ in range(4):
        t.backward()
    t.by_hand(t.parameters)


def copies(t: Loop) -> None:
    """An optimizer of torch over copies in double precision."""
    masters = vars(t).setdefault("masters", [p.detach().double() for p in t.parameters])
    if t.step == 0:
        t.optimizer = SGD(masters, lr=0.05)
    t.backward()
    for p, master in zip(t.parameters, masters, strict=True):
        master.grad = p.grad.double()
    t.optimizer.step()
    for p, master in zip(t.parameters, masters, strict=True):
        p.data.copy_(master)


def half(t: Loop) -> None:
    """An optimizer for the first parameters, and the rest by hand."""
    if t.step == 0:
        t.optimizer = SGD(t.parameters[:2], lr=0.05)
    t.backward()
    t.by_hand(t.parameters[2:])
    t.optimizer.step()


def late(t: Loop) -> None:
    t.backward()
    t.optimizer.step() if t.step < 25 else t.by_hand(t.parameters)


def exchanged(t: Loop) -> None:
    t.backward()
    if t.engine.exchange(t.parameters):
        t.by_hand(t.parameters)


def averaged(t: Loop) -> None:
    with t.engine.paused():
        t.backward()
    for p in t.parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    t.by_hand(t.parameters)


def sharpness(t: Loop, micro: int = 1) -> None:
    """SAM: weights differ between the two stages."""
    for _ in range(micro):
        t.backward()
    kept = [p.detach().clone() for p in t.parameters]
    t.by_hand(t.parameters)
    t.optimizer.zero_grad()
    for _ in range(micro):
        t.backward()
    for p, before in zip(t.parameters, kept, strict=True):
        p.data.copy_(before)
    t.optimizer.step()


def sharpness_accumulated(t: Loop) -> None:
    sharpness(t, 16)


def swapped(t: Loop) -> None:
    """Averaged weights take the place of the model's, on all ranks alike."""
    mean = vars(t).setdefault("mean", copy.deepcopy(t.parameters))
    t.backward()
    t.optimizer.step()
    for average, p in zip(mean, t.parameters, strict=True):
        average.data.lerp_(p.data, 0.5)
        if t.step % 3 == 0:
            p.data, average.data = average.data, p.data


def resumed(t: Loop) -> None:
    t.backward()
    t.optimizer.step()
    t.engine.load_state_dict(t.engine.state_dict())


def accumulated_steps(t: Loop) -> None:
    for _ in range(12):
        t.backward()
    t.optimizer.step()


def told(make: Callable[..., Loop], loop: Callable[[Loop], None], most: int, **options: Any) -> list[int]:
    """After which backwards there is a warning, of so many."""
    t, found = make(**options), []
    while t.backwards < most:
        with warnings.catch_warnings(record=True, action="always") as caught:
            loop(t)
        found += [t.backwards for each in caught if SENTENCE in str(each.message)]
        t.step += 1
        for p in t.parameters:
            p.grad = None
    return found


def in_ddp(frozen: bool = False, **settings: Any) -> Loop:
    model: Any = made()
    model.first.requires_grad_(not frozen)
    ddp = DistributedDataParallel(model)
    return Loop(ddp, ls.attach(ddp, **SETTINGS, **settings))


def in_shards() -> Loop:
    """Two replicas of two ranks."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    return Loop(model, ls.attach_hsdp(model, mesh, **SETTINGS))


def job(loop: Callable[[Loop], None], most: int, frozen: bool = False, nodes: int | None = None) -> list[int]:
    return told(in_ddp, loop, most, frozen=frozen, node_size=nodes)


def job_in_shards(loop: Callable[[Loop], None], most: int) -> list[int]:
    return told(in_shards, loop, most)


@pytest.mark.parametrize(
    ("loop", "latest", "frozen"),
    [
        (by_hand, 20, False),
        (by_hand, 20, True),
        (copies, 20, False),
        (accumulated, 20, False),
        (half, 20, False),
        (late, 25 + 20, False),
    ],
)
def test_local_gradients_applied_by_hand_are_told_of_once_on_all_ranks(
    two_ranks: Ranks, loop: Callable[[Loop], None], latest: int, frozen: bool
) -> None:
    for [backward] in two_ranks(job, loop, 80, frozen):
        assert backward <= latest


@pytest.mark.parametrize(
    "loop", [sharpness, sharpness_accumulated, exchanged, averaged, swapped, resumed, accumulated_steps]
)
def test_others_are_not_told_of(two_ranks: Ranks, loop: Callable[[Loop], None]) -> None:
    assert two_ranks(job, loop, 130 if loop is sharpness_accumulated else 65) == [[], []]


@pytest.mark.parametrize("what", ["nodes", "shards"])
def test_nodes_and_sharded_replicas_are_told_of_too(four_ranks: Ranks, what: str) -> None:
    def found(loop: Callable[[Loop], None]) -> Any:
        return four_ranks(job, loop, 45, False, 2) if what == "nodes" else four_ranks(job_in_shards, loop, 45)

    for [backward] in found(by_hand):
        assert backward <= 20
    assert found(sharpness) == found(resumed) == [[]] * 4


def weights(parameters: Sequence[Tensor]) -> Weights:
    by_name = {str(number): flattened(p) for number, p in enumerate(parameters)}
    return Weights([*by_name], by_name.__getitem__)


@pytest.mark.parametrize("sizes", [[3], [7, 0, 9000], [2] * 5000, [100_000, 1, 100_000]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_see_a_change_of_each_parameter_that_is_sampled(sizes: list[int], dtype: torch.dtype) -> None:
    parameters = [torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in sizes]
    before: Tensor = weights(parameters).sums()
    assert before.shape == (4,) and before.dtype == torch.float64
    assert torch.equal(weights([x.clone() for x in parameters]).sums(), before)
    for x in [x for x in parameters if len(x)][:4:2]:
        x += 1
        assert not torch.equal(weights(parameters).sums(), before)
        before = weights(parameters).sums()


def test_weights_that_are_not_finite_on_all_ranks_do_not_differ() -> None:
    nan, ones = [float("nan")] * 4, [1.0] * 4
    for rows, drifted in (([nan, nan], False), ([nan, ones], True), ([ones, ones], False), ([[0.0] * 4] * 2, False)):
        found = weights([torch.ones(3)])
        due = [found.is_due() for _ in range(20)]
        assert [number for number, one in enumerate(due, 1) if one] == [10, 20]
        found.drift_apart([[0.0] * 4, ones])  # has differed before
        assert found.drift_apart(rows) == drifted
