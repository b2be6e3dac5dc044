"""Nodes of several ranks: between them goes what `simulate` makes of the nodes' means, part by part, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from tests.contract.cases import CASES, MEMORIES, PAIRS, Case, fit, kinds
from tests.covering import covering
from tests.nodes import SHAPES, SPARSE, here, put_together, stream, wrapped
from tests.ranks import Ranks

STEPS = 4
NAMES = list(reversed(SHAPES))
"""In the order of groups."""


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


def differing(size: int, options: dict[str, Any], world_size: int = 4) -> list[str]:
    """What is not as plain simulations of each part say."""
    nodes = world_size // size
    ddp, engine = wrapped(size, **options)
    named: dict[str, Any] = {"sparsifier": "union_topk"}
    named |= {name: options[name] for name in ("sparsifier", "memory", "exchange") if name in options}
    density = options.get("density", SPARSE["density"])
    parts = [
        ls.simulate(stream(STEPS, nodes, size, place, NAMES), density=density, **named) for place in range(size)
    ]
    rank, wrong = torch.distributed.get_rank(), []
    for step, traces in enumerate(zip(*parts, strict=True)):
        ddp.zero_grad()
        ddp(here(step)).backward()
        expected = put_together([trace.update for trace in traces], NAMES)
        wrong += [
            f"{options}: the average of {name} in step {step}"
            for name in NAMES
            if not torch.equal(ddp.module.get_parameter(name).grad, expected[name])
        ]
        engine.count_as_applied()
        own, [group] = traces[rank % size], engine.groups
        if group.residual is not None and group.residual_norm() != float(own.residual_norm[rank // size]):
            wrong.append(f"{options}: the residual in step {step}")
    engine.close()
    return wrong


def together(sizes: Sequence[int], cases: Sequence[dict[str, Any]], world_size: int = 4) -> list[str]:
    return [found for size in sizes for options in cases for found in differing(size, options, world_size)]


def serves(case: Case, size: int, world_size: int) -> bool:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values()) // size
    return case.serves(world_size // size, numel, SPARSE["density"])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_each_sparsifier_exchanges_the_means_of_nodes(four_ranks: Ranks, size: int) -> None:
    cases = [{"sparsifier": case.sparsifier} for case in CASES if serves(case, size, 4)]
    assert len(cases) > 20
    for found in four_ranks(together, [size], cases):
        assert not found


@pytest.mark.parametrize(
    ("case", "exchange"), covering(PAIRS, together=1, seen_as=lambda case, exchange: kinds(case, exchange)[1:])
)
def test_each_exchange_averages_means_of_nodes(four_ranks: Ranks, case: Case, exchange: str) -> None:
    if not serves(case, 2, 4):
        pytest.skip("the sparsifier does not serve groups of this size")
    for found in four_ranks(together, [2], [{"sparsifier": case.sparsifier, "exchange": exchange}]):
        assert not found


def test_each_memory_remembers_means_of_nodes(four_ranks: Ranks) -> None:
    kept = [ls.NoMemory(), ls.Residual(), *MEMORIES]
    cases = [
        {"sparsifier": name, "memory": memory}
        for name in ("union_topk", "topk")
        for memory in kept
        if fit(memory, {"union_topk": "packed_union", "topk": "gather_pairs"}[name])
    ]
    for found in four_ranks(together, [2], cases):
        assert not found


SETTINGS: list[dict[str, Any]] = [
    {"density": 1.0},
    {"sparsifier": "everything"},
    {"messages": "group", "sparsifier": "topk"},
    {"executor": "inline"},
    {"density": ls.Warmup(1.0, 0.05, 3)},
]


def test_settings_do_not_change_what_nodes_exchange(four_ranks: Ranks) -> None:
    for found in four_ranks(together, [2], SETTINGS):
        assert not found


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 4])
def test_eight_ranks(size: int) -> None:
    ranks = Ranks(8)
    try:
        cases = [{"sparsifier": name} for name in ("union_topk", "topk", "exdyna", "clt_k", "gtop_k")]
        for found in ranks(together, [size], cases, 8):
            assert not found
    finally:
        ranks.stop()
