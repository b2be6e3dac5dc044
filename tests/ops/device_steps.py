"""Steps of the default between ranks in one process, with all that they leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.messages import together
from lightning_sparse.core.step import Context, GroupState
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.group import tensors_in
from lightning_sparse.engine.pipeline import Proposed, exchange_group, init_group, settle_group
from lightning_sparse.ops import reference
from tests.lockstep import strict

PARTS: dict[str, Any] = {
    "memory": ls.memories.Residual(),
    "sparsifier": ls.sparsifiers.UnionTopK(),
    "exchange": ls.exchanges.EXCHANGES.resolve("packed_union"),
}
SKIPPED = 1
"""Which step counts for nothing."""


def groups(
    n: int,
    numel: int,
    density: float,
    dtype: torch.dtype,
    device: str = "cpu",
    memory: ls.memories.Memory = PARTS["memory"],
    sparsifier: ls.sparsifiers.Sparsifier = PARTS["sparsifier"],
) -> list[GroupState]:
    return [
        init_group(
            numel, dtype, torch.device(device), Context(0, density, rank, n),
            memory=memory, sparsifier=sparsifier,
        )
        for rank in range(n)
    ]  # fmt: skip


@contextmanager
def first_of_equal() -> Iterator[None]:
    """Of equal magnitudes torch's path picks the first coordinates, as kernels do; ``top_k`` picks any of them."""

    def strongest(x: Tensor, k: int, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        magnitudes = x.abs()
        if left_out is not None:
            magnitudes.masked_fill_(left_out, -1)
        values, places = magnitudes.sort(descending=True, stable=True)
        return values[:k], places[:k]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "strongest", strongest)
        yield


def walk(
    n: int,
    numel: int | tuple[int, ...],
    density: float,
    dtype: torch.dtype,
    scaled: bool,
    device: str = "cpu",
    count: int = 3,
    memory: ls.memories.Memory = PARTS["memory"],
    sparsifier: ls.sparsifiers.Sparsifier = PARTS["sparsifier"],
    cuts: Sequence[int] = (),
) -> list[list[Tensor]]:
    """Everything that a few steps leave behind, one of them skipped; ranks agree on half of what is large.

    Several groups travel together, as in a real step. Squares of gradients are exact in float32, and
    so is a second beta of ``1 - 2**-i`` and what it leaves, however torch rounds products and sums. Gradients lie in
    runs that end at some coordinates, apart from each other, and in one if there are none.
    """
    parts = PARTS | {"memory": memory, "sparsifier": sparsifier}
    sizes = (numel,) if isinstance(numel, int) else numel
    states, left = [groups(n, size, density, dtype, device, memory, sparsifier) for size in sizes], []
    scale = torch.full((), 1024.0, device=device) if scaled else None
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        grads = [_gradients(n, size, dtype, generator) for size in sizes]
        if step == SKIPPED:
            grads[-1][n - 1][sizes[-1] // 2] = float("inf")
        grads = [[grad.to(device, copy=True) for grad in ranks] for ranks in grads]
        runs = [[_in_runs(grad, cuts) for grad in ranks] for ranks in grads]
        ctx = Context(step, density, 0, n)
        steps = []
        for rank in range(n):
            own = [
                exchange_group(lying[rank], before[rank], ctx._replace(rank=rank), **parts, scale=scale)
                for lying, before in zip(runs, states, strict=True)
            ]
            steps.append(strict(together(own)))
        for rank, ends in enumerate(drive_ranks(steps)):  # of each group
            skipped = torch.stack([proposed.skipped for proposed in ends]).any()
            assert bool(skipped) == (step == SKIPPED)
            for group, proposed in enumerate(ends):
                before = states[group][rank]
                absorbed = [x.clone() for x in _remembered(memory, before)]
                state = states[group][rank] = settle_group(before, proposed, bool(skipped), memory)
                if step == SKIPPED:  # it settles nothing
                    assert all(map(torch.equal, _remembered(memory, state), absorbed))
                    assert all(map(torch.equal, tensors_in(state.selector), tensors_in(before.selector)))
                    assert torch.equal(state.counts, before.counts)
                    assert torch.equal(state.union, before.union)
                left += _left_behind(torch.cat(runs[group][rank].runs), state, proposed, memory, step == SKIPPED)
    return left


def _in_runs(grad: Tensor, ends: Sequence[int]) -> Gradient:
    """Return a gradient in runs; a space of three elements lets some begin where 16 bytes do not."""
    ends = [end for end in ends if end < len(grad)]
    parts = [grad[start:end] for start, end in zip([0, *ends], [*ends, len(grad)], strict=True)]
    return Gradient([torch.cat([part.new_empty(3), part])[3:] for part in parts] if ends else [grad])


def _gradients(n: int, numel: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    common = 3 * torch.randn(numel, generator=generator)
    grads = [(common + torch.randn(numel, generator=generator)).to(dtype) for _ in range(n)]
    return [(grad * 256).round() / 256 for grad in grads]


def _remembered(memory: ls.memories.Memory, state: GroupState) -> list[Tensor]:
    return [*memory.vectors(state.memory).values(), *memory.counters(state.memory).values()]


def _left_behind(
    grad: Tensor, state: GroupState, proposed: Proposed, memory: ls.memories.Memory, skipped: bool
) -> list[list[Tensor]]:
    vectors = _remembered(memory, state)
    assert all(bool(x.isfinite().all()) for x in vectors)
    assert state.counts is not None and state.union is not None
    left = [[*(x.clone() for x in (grad, *vectors)), *tensors_in(state.selector), state.counts, state.union]]
    if not skipped:  # what is picked in a step that counts for nothing is anybody's choice
        statistics, indices, divisor = proposed.statistics, proposed.update.indices, proposed.divisor
        assert indices is not None
        arrived = indices < statistics.numel
        left.append([statistics.indices, statistics.union, statistics.counts])
        left.append([torch.tensor(statistics.bytes_sent)])
        left.append([proposed.update.values[arrived].float(), *([] if divisor is None else [divisor[arrived]])])
    return left
