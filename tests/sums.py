"""Gradients that are the same integers in every step, so that what has become of them can be counted exactly.

The loss is a sum of parameters times integers, which differ from rank to rank. With SGD at rate 1, starting at 0, what
was applied is in the weights w, what was handed out and not applied is pending, and the rest is in the residuals. At
every moment, in float32, too, it holds exactly that ``sum_i residual_i + n pending - n w = sum_i count_i gradient_i``,
where a rank has absorbed as many gradients as it has settled exchanges, and one more where its state says so.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lightning_sparse as ls

SPARSE: dict[str, Any] = {
    "rules": ls.Rules(dense_ndim=0, dense_numel=0),
    "sparsifier": "top_k",
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

    def forward(self, rank: int, without: Collection[str] = ()) -> Tensor:
        used = [(name, p) for name, p in self.named_parameters() if name.rpartition(".")[2] not in without]
        return torch.stack([(p.flatten() * gradient(name, rank).to(p.dtype)).sum() for name, p in used]).sum()


State = Mapping[str, Any]


def pending(states: Sequence[State], name: str) -> Tensor:
    """(numel,) averages of a parameter that no optimizer has applied, in double precision.

    Those that have been handed out are in the state of rank 0, whose weights are saved; those that come late in all.

    Args:
        states: of all ranks.
        name: of the parameter.
    """
    [first, *others] = sorted(states, key=lambda state: int(state["rank"]))
    assert not any(state["pending"] for state in others)
    assert all(state["late"].keys() == first["late"].keys() for state in others)
    total = torch.zeros(first["spans"][name][2], dtype=torch.float64)
    for found in (first["pending"].get(name), first["late"].get(name)):
        if found is not None:
            indices = found["indices"].long() if "indices" in found else torch.arange(len(total))
            assert torch.equal(indices, indices.unique())
            total.index_add_(0, indices, found["values"].double())
    return total


def waiting(states: Sequence[State], name: str) -> Tensor:
    """(numel,) sum of residuals and pending averages of all ranks of a run, in double precision."""
    n = len(states)
    assert sorted(state["rank"] for state in states) == list(range(n))
    assert {state["world_size"] for state in states} == {n}
    kept = torch.stack([state["parameters"][name]["residual"].double() for state in states]).sum(0)
    return kept + n * pending(states, name)


def count(state: State, name: str) -> int:
    """How many gradients of a parameter a rank has absorbed."""
    return int(state["step"]) + int(state["skipped_steps"]) + (name in state["absorbed"])


def check_sums(
    weights: Mapping[str, Tensor],
    states: Sequence[State],
    steps: int | None = None,
    loaded: Sequence[State] = (),
) -> None:
    """Whether weights and the states of all ranks hold all that was absorbed, for each parameter and coordinate.

    Args:
        weights: of rank 0, some or all.
        states: of all ranks.
        steps: of which the states have to be; None: of any, but all of the same one.
        loaded: what the run has gone on from, if from within a backward: what was absorbed there comes on top.
    """
    [settled] = {state["step"] for state in states}
    assert steps in (None, settled), f"expected the states of step {steps}, but they are of step {settled}"
    for name, weight in weights.items():
        counts = {state["rank"]: count(state, name) for state in states}
        for state in loaded:
            counts[state["rank"]] += name in state["absorbed"]
        given = sum(number * gradient(name, rank).double() for rank, number in counts.items())
        kept = waiting(states, name) - len(states) * weight.double().flatten()
        assert torch.equal(kept, given), (name, counts)


def saved_in(path: Path | str, n: int) -> list[dict[str, Any]]:
    """The states of all ranks beside a checkpoint."""
    marker = torch.load(path, weights_only=False)["lightning_sparse"]["residuals"]
    files = [f"{path}.sparse/rank-{rank}-of-{n}.{marker['save']}.pt" for rank in range(n)]
    return [torch.load(file, weights_only=True)["state"] for file in files]


def check_files(path: Path | str, n: int, loaded: Sequence[State] = ()) -> int:
    """Whether a checkpoint and its side files hold all that was absorbed, see :func:`check_sums`; returns the step."""
    checkpoint = torch.load(path, weights_only=False)
    step = int(checkpoint["lightning_sparse"]["residuals"]["step"])
    check_sums(checkpoint["state_dict"], saved_in(path, n), step, loaded)
    return step
