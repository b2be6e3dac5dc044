"""Sources of gradients: DDP's hook, and whoever else says that a backward is over.

Gradients are integers and the rate is 1, so that sums are exact: residuals, averages that wait and weights hold all
that was absorbed, at every moment.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.api.attach import sizes_of
from lightning_sparse.engine import Engine
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.share import Place, Share
from lightning_sparse.methods.grouping import make_plan
from tests.ranks import Ranks
from tests.sums import SIZES, gradient, waiting

OPTIONS: dict[str, Any] = {
    "sparsifier": "top_k",
    "density": 0.05,
    "rules": ls.Rules(dense_ndim=0, dense_numel=0),
    "grouping": "model",
}
STEPS, SKIPPED, UNUSED, SAVED = 20, 7, 4, 12
LOCAL = 2
"""Backwards of which one exchange is made."""


class Layers(nn.Module):
    """Parameters whose gradients are integers; those of shards have other lengths."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, factors: dict[str, float], rank: int) -> Tensor:
        """The factor of a gradient; without one, a parameter is not used."""
        terms = [
            (self.get_parameter(name).flatten() * gradient(name, rank)[: self.get_parameter(name).numel()]).sum() * by
            for name, by in factors.items()
        ]
        return torch.stack(terms).sum()


class AtTheEnd:
    """Says that a backward is over, and with which gradients."""

    def __init__(self, module: Layers, comm: TorchCollective, places: Any = None) -> None:
        self.module = module
        self.parameters = dict(module.named_parameters())
        settings = ls.engine.config.SparsificationConfig(**OPTIONS)
        plan = make_plan(sizes_of(self.parameters), settings.grouping, settings.rules, 1.0)
        share = None if places is None else Share(places=places)
        self.engine = Engine(plan, self.parameters, settings, comm, torch.device("cpu"), watch_usage=True, share=share)

    def backward(self, losses: Sequence[Tensor]) -> None:
        for loss in losses:
            loss.backward()
        used = [p.grad is not None for p in self.parameters.values()]
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        finite, _ = self.engine.stepper.end_backward(list(self.parameters), grads, averaged=False, used=used)
        for grad in () if finite else grads:
            grad.fill_(float("nan"))

    def close(self) -> None:
        self.engine.close()


class InDDP:
    """The source of the package."""

    def __init__(self, module: Layers, comm: TorchCollective) -> None:
        comm.close()
        self.module = module
        self.ddp = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=0.001)
        self.engine = ls.attach(self.ddp, **OPTIONS, watch=None)

    def backward(self, losses: Sequence[tuple[dict[str, float], int]]) -> None:
        *local, last = losses
        with self.ddp.no_sync():
            for one in local:
                self.ddp(*one).backward()
        self.ddp(*last).backward()

    def close(self) -> None:
        self.engine.close()


SOURCES: dict[str, Any] = {"in DDP": InDDP, "at the end": AtTheEnd}


def network() -> TorchCollective:
    return TorchCollective.over(dist.group.WORLD, None, torch.device("cpu"))


class Look(NamedTuple):
    """A moment."""

    weights: dict[str, Tensor]
    state: dict[str, Any]
    absorbed: dict[str, Tensor]
    """By this rank so far."""


def factors_of(step: int, rank: int) -> dict[str, float]:
    """Of each parameter's gradient in a step."""
    factors = {name: 1.0 for name in SIZES if not (step == UNUSED and name == "third")}
    if step == SKIPPED and rank == 1:
        factors["first"] = float("nan")
    if step == UNUSED + 1 and rank == 0:
        del factors["second"]  # used on the other rank
    return factors


def train(kind: str) -> list[Look]:
    """Steps, with a state before, within and after each; one of those within a step is loaded elsewhere."""
    rank, module = dist.get_rank(), Layers(SIZES)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    absorbed = {name: torch.zeros(p.numel()) for name, p in module.named_parameters()}
    looks: list[Look] = []

    def look() -> None:
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
        taken = {name: total.clone() for name, total in absorbed.items()}
        looks.append(Look(weights, source.engine.state_dict(), taken))

    def made() -> Any:
        one = SOURCES[kind](module, network())
        one.engine._binding.watchers.append(lambda _: look())
        return one

    source = made()
    for step in range(STEPS):
        optimizer.zero_grad()
        factors = factors_of(step, rank)
        source.backward([_loss(source, factors, rank) for _ in range(LOCAL)])
        look()
        for name, by in factors.items() if step != SKIPPED else ():
            absorbed[name] += LOCAL * by * gradient(name, rank)
        optimizer.step()
        if step == SAVED:  # weights and state are those within the step, whose averages are lost otherwise
            module.load_state_dict(looks[-1].weights)
            buffer = io.BytesIO()
            torch.save(looks[-1].state, buffer)
            buffer.seek(0)
            source.close()
            source = made()
            assert source.engine.load_state_dict(torch.load(buffer)) == []
        look()
    source.close()
    return looks


def _loss(source: Any, factors: dict[str, float], rank: int) -> Any:
    return (factors, rank) if isinstance(source, InDDP) else source.module(factors, rank)


def missing(both: Sequence[Look]) -> Iterator[tuple[str, Tensor]]:
    """``sum absorbed - sum_i residual_i - n (pending - weights)`` of each parameter."""
    states = [one.state for one in both]
    for name, weight in both[0].weights.items():
        yield name, sum(one.absorbed[name] for one in both) - waiting(states, name) + len(both) * weight.flatten()


@pytest.mark.parametrize("kind", SOURCES)
def test_no_source_loses_anything_at_any_moment(two_ranks: Ranks, kind: str) -> None:
    waited = 0
    for both in zip(*two_ranks(train, kind), strict=True):
        assert all(torch.equal(both[0].weights[name], both[1].weights[name]) for name in both[0].weights)
        waited += bool(both[0].state["pending"])
        for name, lost in missing(both):
            assert not lost.any(), (both[0].state["step"], name)
    assert waited == STEPS - 1  # within each step but the skipped one


# ---- Shards: two halves of each parameter, of unequal lengths, with two replicas each


WHOLE = {"first": 301, "second": 21, "third": 299, "fourth": 7}


def part_of(name: str, half: int) -> Place:
    numel = WHOLE[name]
    length = -(-numel // 2)
    return Place(0, length, numel) if half == 0 else Place(length, numel - length, numel)


def train_shards() -> list[dict[str, Any]]:
    """States of the replicas of a half, with the weights; the last one is loaded into an engine of whole parameters."""
    half, replica = divmod(dist.get_rank(), 2)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module = Layers({name: (part_of(name, half)[1],) for name in WHOLE})
    source = AtTheEnd(module, TorchCollective(groups[half]), {name: part_of(name, half) for name in WHOLE})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(6):
        optimizer.zero_grad()
        source.backward([module(dict.fromkeys(WHOLE, 1.0), replica)])
        optimizer.step()
    state = source.engine.state_dict()
    source.close()
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    whole = AtTheEnd(Layers({name: (size,) for name, size in WHOLE.items()}), TorchCollective(groups[half]))
    notes = whole.engine.load_state_dict(state)
    found = {name: whole.engine.residual(name).clone() for name in WHOLE}
    whole.close()
    return [{"half": half, "state": state, "weights": weights, "notes": notes, "found": found}]


def test_shards_of_unequal_length_are_kept_with_their_place_in_the_parameter(four_ranks: Ranks) -> None:
    seen = [found for [found] in four_ranks(train_shards)]
    for half in (0, 1):
        replicas = seen[2 * half : 2 * half + 2]
        for name in WHOLE:
            start, length, numel = part_of(name, half)
            assert all(one["state"]["spans"][name] == [start, length, numel] for one in replicas)
            given = sum(gradient(name, replica)[:length] for replica in (0, 1))
            kept = sum(one["state"]["parameters"][name]["residual"] for one in replicas)
            assert torch.equal(kept - 2 * replicas[0]["weights"][name], 6 * given)
            for one in replicas:
                own = one["state"]["parameters"][name]["residual"]
                assert torch.equal(one["found"][name][start : start + length], own)
                assert not one["found"][name][:start].any()
                assert not one["found"][name][start + length :].any()
                assert any(name in note for note in one["notes"])
