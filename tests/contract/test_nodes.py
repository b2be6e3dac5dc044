"""Nodes of several ranks: between them goes what `simulate` makes of the nodes' means, part by part, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.methods.density.schedules import DensitySchedule
from lightning_sparse.tools.traffic import count_bytes
from tests.contract.cases import MEMORIES, PAIRS, Case, fit
from tests.covering import by_default, covering
from tests.nodes.model import SHAPES, SPARSE, Averages, Given, here, integers, normal, put_together, stream, wrapped
from tests.ranks import Ranks

STEPS = 3
NAMES = list(reversed(SHAPES))
"""In the order of groups."""


def differing(size: int, options: dict[str, Any], world_size: int = 4, given: Given = normal) -> list[str]:
    """What is not as plain simulations of each part say."""
    nodes = world_size // size
    ddp, engine = wrapped(size, **options)
    named: dict[str, Any] = {"sparsifier": "union_top_k"}
    named |= {name: options[name] for name in ("sparsifier", "memory", "exchange") if name in options}
    density = options.get("density", SPARSE["density"])
    parts = [
        ls.simulate(stream(STEPS, nodes, size, place, NAMES, given), density=density, **named) for place in range(size)
    ]
    averages = Averages(ddp, options.get("memory"))
    rank, wrong = torch.distributed.get_rank(), []
    for step, traces in enumerate(zip(*parts, strict=True)):
        ddp(here(step, given)).backward()
        found = averages()
        expected = put_together([trace.update for trace in traces], NAMES)
        wrong += [
            f"{options}: the average of {name} in step {step}"
            for name in NAMES
            if not torch.equal(found[name], expected[name])
        ]
        own, [group] = traces[rank % size], engine.stepper.groups
        if group.residual is not None and group.residual_norm() != float(own.residual_norm[rank // size]):
            wrong.append(f"{options}: the residual in step {step}")
    return wrong


def together(
    sizes: Sequence[int], cases: Sequence[dict[str, Any]], world_size: int = 4, given: Given = normal
) -> list[str]:
    return [found for size in sizes for options in cases for found in differing(size, options, world_size, given)]


def serves(case: Case, size: int, world_size: int) -> bool:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values()) // size
    return case.serves(world_size // size, numel, SPARSE["density"])


PLAIN = ls.memories.Residual()
KINDS = ("union_top_k", "top_k", "exdyna", "clt_k", "gtop_k", "random_k")
CELLS = [
    (case, exchange, memory)
    for memory in (PLAIN, ls.memories.NoMemory(), *MEMORIES)
    for case, exchange in PAIRS
    if fit(memory, exchange)
    and serves(case, 2, 4)
    and (memory is PLAIN or (case.name in KINDS and exchange in (case.sparsifier.exchange, "packed_union")))
]
"""Each sparsifier with each exchange, and one of each kind with each memory."""


@pytest.mark.parametrize(("case", "exchange", "memory"), by_default(covering(CELLS, together=1), 4))
def test_parts_are_exchanged_as_simulated(
    four_ranks: Ranks, case: Case, exchange: str, memory: ls.memories.Memory
) -> None:
    options = {"sparsifier": case.sparsifier, "exchange": exchange, "memory": memory}
    for found in four_ranks(together, [2], [options]):
        assert not found


@dataclass(frozen=True)
class InTurn(DensitySchedule):
    """Everything in every second step."""

    def __call__(self, step: int) -> float:
        return (0.05, 1.0)[step % 2]


SETTINGS: list[dict[str, Any]] = [
    {"density": 1.0},
    {"density": 1.0, "sparsifier": "top_k"},
    {"density": ls.Warmup(1.0, 0.05, 3)},
    {"density": InTurn(), "sparsifier": "top_k"},
]


def test_settings_do_not_change_what_nodes_exchange(four_ranks: Ranks) -> None:
    for found in four_ranks(together, [2], SETTINGS):
        assert not found


@pytest.mark.parametrize(
    ("sparsifier", "nodes", "size", "ratio"),
    [
        ("top_k", 2, 2, 1 / 3),
        ("top_k", 4, 8, 3 / 31),
        ("everything", 2, 2, 2 / 3),
        ("everything", 4, 8, 24 / 31),
        ("union_top_k", 2, 2, 0.66),
        ("union_top_k", 4, 8, 0.69),
    ],
)
def test_what_crosses_a_nodes_card_falls_as_the_page_says(sparsifier: str, nodes: int, size: int, ratio: float) -> None:
    """In a ring through consecutive ranks, what leaves a node is what one of its ranks sends."""
    flat = count_bytes(sparsifier, 1_000_000, nodes * size, 0.01).bytes_sent
    in_parts = size * count_bytes(sparsifier, 1_000_000 // size, nodes, 0.01).bytes_sent
    assert in_parts / flat == pytest.approx(ratio, abs=0.005)


@pytest.mark.thorough
def test_eight_ranks() -> None:
    cases = [{"sparsifier": name} for name in ("union_top_k", "top_k", "exdyna", "clt_k", "gtop_k")]
    with Ranks(8) as ranks:
        for found in ranks(together, [2, 4], cases, 8, integers):  # a ring adds up four ranks in orders of its own
            assert not found
