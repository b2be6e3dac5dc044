"""Steps of the default between ranks in one process, with all that they leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.collective import drive_ranks
from lightning_sparse.core import Context, GroupState
from lightning_sparse.pipeline import commit_group, exchange_group, init_group
from lightning_sparse.sparsifiers import union_topk
from tests.lockstep import strict

PARTS: dict[str, Any] = {
    "memory": ls.Residual(),
    "sparsifier": ls.UnionTopK(),
    "exchange": ls.EXCHANGES.resolve("packed_union"),
}
VOID = 1
"""Which step counts for nothing."""


def groups(
    n: int, numel: int, density: float, dtype: torch.dtype, device: str = "cpu", memory: ls.Memory = PARTS["memory"]
) -> list[GroupState]:
    return [
        init_group(
            numel, dtype, torch.device(device), Context(0, density, rank, n),
            memory=memory, sparsifier=PARTS["sparsifier"],
        )
        for rank in range(n)
    ]  # fmt: skip


@contextmanager
def first_of_equal() -> Iterator[None]:
    """Of equal magnitudes torch's path picks the first coordinates, as kernels do; ``topk`` picks any of them."""

    def strongest(x: Tensor, k: int, left_out: Tensor | None = None, most: int = 0) -> tuple[Tensor, Tensor]:
        magnitudes = x.abs()
        if left_out is not None:
            magnitudes.masked_fill_(left_out, -1)
        values, places = magnitudes.sort(descending=True, stable=True)
        return values[:k], places[:k]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(union_topk, "strongest", strongest)
        yield


def walk(
    n: int,
    numel: int,
    density: float,
    dtype: torch.dtype,
    scaled: bool,
    device: str = "cpu",
    count: int = 3,
    memory: ls.Memory = PARTS["memory"],
) -> list[list[Tensor]]:
    """Everything that a few steps leave behind, one of them void; ranks agree on half of what is large.

    Squares of gradients are exact in float32, and so is a second beta of ``1 - 2**-i`` and what it leaves, however
    torch rounds products and sums.
    """
    parts = PARTS | {"memory": memory}
    states, left = groups(n, numel, density, dtype, device, parts["memory"]), []
    scale = torch.full((), 1024.0, device=device) if scaled else None
    for step in range(count):
        generator = torch.Generator().manual_seed(step)
        common = 3 * torch.randn(numel, generator=generator)
        grads = [(common + torch.randn(numel, generator=generator)).to(dtype) for _ in range(n)]
        grads = [(grad * 256).round() / 256 for grad in grads]
        if step == VOID:
            grads[n - 1][numel // 2] = float("inf")
        grads = [grad.to(device, copy=True) for grad in grads]
        ctx = Context(step, density, 0, n)
        steps = [
            strict(exchange_group(grads[rank], states[rank], ctx._replace(rank=rank), **parts, scale=scale))
            for rank in range(n)
        ]
        done = drive_ranks(steps)
        voids = [void for _, _, void in done]
        assert [bool(void) for void in voids] == [step == VOID] * n
        states = [
            commit_group(before, after, void, parts["memory"])
            for before, (after, _, void) in zip(states, done, strict=True)
        ]
        for grad, state, (_, statistics, _) in zip(grads, states, done, strict=True):
            vectors = [*memory.vectors(state.memory).values(), *memory.counters(state.memory).values()]
            left.append([grad, *(x.clone() for x in vectors), *state.selector, state.counts, state.union])
            if step != VOID:  # what is picked in a step that counts for nothing is anybody's choice
                left.append([statistics.indices, statistics.union, statistics.counts])
                left.append([torch.tensor(statistics.bytes_sent)])
                divisor, indices = memory.divisor(state.memory), statistics.indices
                left.append([] if divisor is None else [divisor[indices[indices < numel]]])
    return left
