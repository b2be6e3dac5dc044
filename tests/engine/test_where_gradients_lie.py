"""Gradients are worked on where they lie, with others in between, and give the same as in one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context
from lightning_sparse.engine.group import Exchanged, GroupReducer
from tests.covering import by_default, covering
from tests.ranks import Ranks

SKIPPED, UNUSED = 2, 3
"""Steps in which a gradient is not finite, and in which no rank uses a layer."""


class Tower(nn.Module):
    """Layers of odd sizes, whose biases and norms stay dense and lie in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(33, 35), nn.LayerNorm(35), nn.ReLU(), nn.Linear(35, 33)) for _ in range(3)
        )
        self.aside = nn.Linear(33, 33)

    def forward(self, x: Tensor, aside: bool = True) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x + self.aside(x) if aside else x


exchange_steps = GroupReducer.exchange_steps
runs: list[int] = []
"""Of the groups that were worked on where they lie."""
Pieces = Mapping[str, Tensor]


def in_runs(group: GroupReducer, ctx: Context, pieces: Pieces, *args: Any) -> Steps[Exchanged]:
    """As a group's step."""
    runs.append(len(Gradient.of(pieces[name] for name in group.spans).runs))
    return exchange_steps(group, ctx, pieces, *args)


def in_one_vector(group: GroupReducer, ctx: Context, pieces: Pieces, *args: Any) -> Steps[Exchanged]:
    """As a group's step, of a copy of the gradient that is copied back."""
    flat = torch.cat([pieces[name] for name in group.spans])
    copied = {name: flat[span] for name, span in group.spans.items()}
    assert len(Gradient.of(copied.values()).runs) == 1
    made = yield from exchange_steps(group, ctx, copied, *args)
    for name, piece in pieces.items():
        piece.copy_(copied[name])
    return made


def train(
    options: dict[str, Any], dtype: torch.dtype, unused: bool, scale: float | None, flat: bool
) -> tuple[int, list[Tensor]]:
    """The most runs in which a group lies; averages and what is remembered after each step."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tower().to(dtype), find_unused_parameters=unused, bucket_cap_mb=0.01)
    engine = ls.attach(ddp, **{"density": 0.05, **options}, watch=None)
    parameters, seen = list(ddp.parameters()), []
    runs.clear()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(5):
        ddp.zero_grad()
        x = torch.randn(4, 33, generator=generator).to(dtype)
        if step == SKIPPED and dist.get_rank():
            x[0, 0] = float("inf")
        loss = ddp(x, not (unused and step == UNUSED)).float().square().mean()
        (loss if scale is None else scale * loss).backward()
        with mock.patch.object(GroupReducer, "exchange_steps", in_one_vector if flat else in_runs):
            engine.stepper.exchange(list(engine.stepper.parameters), None if scale is None else torch.tensor(scale))
        seen += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                if step != SKIPPED and parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01 / (scale or 1.0))
        for group in engine.stepper.groups:
            seen += [vector.clone() for vector in group.memory.vectors(group.state.memory).values()]
    return max(runs, default=0), [x.flatten() for x in seen]


MEMORIES = [
    ls.memories.Residual(),
    ls.memories.SecondMoment(),
    ls.memories.Residual(decay=0.9),
    ls.memories.LowPass(0.3),
    ls.memories.MomentumCorrection(0.9),
    ls.memories.MomentumCorrection(0.9, nesterov=True),
    ls.memories.AdamCorrection(beta1=0.9),
    ls.memories.ClipByNorm(0.01),
    ls.memories.WeightDecay(0.1, min_ndim=2),
    ls.memories.NoMemory(),
]
METHODS: dict[str, dict[str, Any]] = {
    "union_top_k": {"sparsifier": "union_top_k"},
    "sent densely": {"sparsifier": "top_k", "exchange": "dense"},
    "shared_top_k": {"sparsifier": "shared_top_k", "density": 0.05},
    "everything": {"sparsifier": "everything"},
    "joined": {"sparsifier": "dgc"},
}
AXES: list[list[Any]] = [
    ["bucket", "layer", "model"],
    [torch.float32, torch.bfloat16, torch.float16, torch.float32],
    MEMORIES,
    list(METHODS)[:4],
    [None, None, None, 8.0, 8.0, 8.0],
    [False, False, True, True, True],
]
"""Grouping, dtype, memory, method, loss scale, and whether parameters stay unused."""


CELLS = [tuple(axis[number % len(axis)] for axis in AXES) for number in range(60)]
SCORED = [
    (grouping, torch.float32, ls.memories.SecondMoment(), method, scale, unused)
    for grouping, method, scale, unused in [
        ("bucket", "union_top_k", None, True),
        ("model", "union_top_k", 8.0, False),
        ("model", "shared_top_k", None, False),
        ("model", "joined", None, True),
    ]
]
"""Where scores take the place of gradients."""


@pytest.mark.parametrize(
    ("grouping", "dtype", "memory", "method", "scale", "unused"),
    [*by_default(covering(CELLS, together=1), 2), *SCORED],
)
def test_steps_are_those_of_one_vector(
    two_ranks: Ranks,
    grouping: str,
    dtype: torch.dtype,
    memory: ls.memories.Memory,
    method: str,
    scale: float | None,
    unused: bool,
) -> None:
    options = {**METHODS[method], "grouping": grouping, "memory": memory}
    apart, whole = (two_ranks(train, options, dtype, unused, scale, flat) for flat in (False, True))
    for (most, ours), (_, expected) in zip(apart, whole, strict=True):
        assert most > 1 or grouping == "layer" or (most == 0 and method == "everything")  # left to DDP
        assert len(ours) == len(expected)
        for a, b in zip(ours, expected, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
