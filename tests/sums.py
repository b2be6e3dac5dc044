"""Gradients that are the same integers in every step, so that what has become of them can be counted exactly.

The loss is a sum of parameters times integers, which differ from rank to rank. With SGD at rate 1, starting at 0, what
was sent is in the weights w and the rest in the residuals. In float32, too, it holds exactly that
``sum_i residual_i - n w = step * sum_i gradient_i``.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_sparse as ls

SPARSE: dict[str, Any] = {
    "rules": ls.Rules(dense_ndim=0, dense_numel=0),
    "sparsifier": "topk",
    "density": 0.02,
    "grouping": "layer",
    "watch": None,
    "single_device": "sparse",
}
SIZES = {"first": (30, 10), "second": (20,), "third": (25, 12), "fourth": (7,)}


def gradient(name: str, rank: int) -> Tensor:
    """(numel,) integers, by the last part of the name."""
    own = name.rpartition(".")[2]
    generator = torch.Generator().manual_seed(zlib.crc32(own.encode()) + rank)
    shape = SIZES[own]
    return torch.randint(-100, 101, (torch.Size(shape).numel(),), generator=generator).float()


class Sums(nn.Module):
    """Parameters of several layers; the loss of a rank."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SIZES.items():
            layer = nn.Module()
            layer.register_parameter(name, nn.Parameter(torch.zeros(shape)))
            self.add_module(f"in_{name}", layer)

    def forward(self, rank: int) -> Tensor:
        terms = [(p.flatten() * gradient(name, rank)).sum() for name, p in self.named_parameters()]
        return torch.stack(terms).sum()


def check_sums(weights: dict[str, Tensor], states: Sequence[dict[str, Any]], steps: dict[str, int] | int) -> None:
    """Whether weights and the states of all ranks hold what so many steps have brought, for each parameter."""
    n = len(states)
    assert sorted(state["rank"] for state in states) == list(range(n))
    for name, weight in weights.items():
        given = sum(gradient(name, rank) for rank in range(n))
        kept = sum(state["parameters"][name]["residual"] for state in states)
        count = steps if isinstance(steps, int) else steps[name]
        assert torch.equal(kept - n * weight.flatten(), count * given), (name, count)


def check_files(path: Path | str, n: int) -> int:
    """Whether a checkpoint and its side files hold the same step, exactly; returns which."""
    checkpoint = torch.load(path, weights_only=False)
    marker = checkpoint["lightning_sparse"]["residuals"]
    files = [f"{path}.sparse/rank-{rank}-of-{n}.{marker['save']}.pt" for rank in range(n)]
    states = [torch.load(file, weights_only=True)["state"] for file in files]
    assert {state["step"] for state in states} == {marker["step"]}
    check_sums(checkpoint["state_dict"], states, marker["step"])
    return int(marker["step"])
