"""Which ranks are a node, and what cannot be."""

from __future__ import annotations

import functools
import platform
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.methods.grouping import Group, ParameterSize
from tests.covering import by_default
from tests.nodes.model import (
    SHAPES,
    Averages,
    here,
    integers,
    wrapped,
)
from tests.ranks import Ranks, error_of

NAMES = list(SHAPES)


def refused(size: Any, hosts: list[str] | None, options: dict[str, Any]) -> str:
    name = platform.node
    if hosts is not None:
        platform.node = lambda: hosts[dist.get_rank()]
    try:
        return error_of(functools.partial(wrapped, size, **options))
    finally:
        platform.node = name


@pytest.mark.parametrize(
    ("size", "hosts", "options", "told"),
    [
        (3, None, {}, "divide the number of ranks, 4, but got 3"),
        ("auto", ["a", "a", "a", "b"], {}, "3 on 'a', 1 on 'b'"),
        ("auto", ["a", "b", "a", "b"], {}, "one after another"),
        (2, None, {"grouping": "layer", "sparsifier": "top_k"}, "nothing"),
        (4, None, {"grouping": "layer"}, "nothing"),
        ("nodes", None, {}, "but got 'nodes'"),
        (2, None, {"fallback": True}, "Expected fallback to be False with node_size"),
    ],
)
def test_what_cannot_be_nodes_is_refused_on_all_ranks(
    four_ranks: Ranks, size: Any, hosts: list[str] | None, options: dict[str, Any], told: str
) -> None:
    for found in four_ranks(refused, size, hosts, options):
        assert told in found
        assert (told == "nothing") == (found == "nothing")


def on_one_node(size: Any, single: str) -> tuple[list[dict[str, Tensor]], bool, int]:
    ddp, engine = wrapped(size, single_device=single)
    averages, found = Averages(ddp), []
    for step in range(3):
        ddp(here(step, integers)).backward()
        found.append(averages())
    kept = engine.memory_bytes
    direct = engine.stepper.direct
    return found, direct, kept


@pytest.mark.parametrize("size", by_default(["auto", 8, 4], 2))
def test_one_node_trains_as_ddp(four_ranks: Ranks, size: Any) -> None:
    for found, direct, kept in four_ranks(on_one_node, size, "dense"):
        assert direct
        assert not kept
        for step, grads in enumerate(found):
            for name in NAMES:
                assert torch.equal(grads[name], sum(integers(step, rank, name) for rank in range(4)) / 4)


def test_one_node_rehearses_where_that_is_asked_for(four_ranks: Ranks) -> None:
    for found, direct, kept in four_ranks(on_one_node, 4, "sparse"):
        assert not direct
        assert kept
        assert 0 < sum(int(x.count_nonzero()) for x in found[0].values()) < 200


def flat(size: Any) -> list[dict[str, Tensor]]:
    hosts = [f"host{rank}" for rank in range(4)]
    name, platform.node = platform.node, lambda: hosts[dist.get_rank()]
    try:
        return on_one_node(size, "sparse")[0]
    finally:
        platform.node = name


def test_nodes_of_one_rank_are_no_nodes(four_ranks: Ranks) -> None:
    plain, one, found = (four_ranks(flat, size)[0] for size in (None, 1, "auto"))
    for first, second, third in zip(plain, one, found, strict=True):
        assert all(torch.equal(first[n], second[n]) and torch.equal(first[n], third[n]) for n in NAMES)


def regrouped_by(size: int, alike: bool) -> str:
    """The error of groups of single parameters, on all ranks or on every other one."""
    ddp, engine = wrapped(size)
    sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
    single = alike or dist.get_rank() % 2
    groups = [Group(p.name, (p,), dense=False) for p in sizes] if single else [Group("all", tuple(sizes), dense=False)]

    def follow() -> None:
        engine.regroup(groups)
        ddp(here(0)).backward()

    return error_of(follow)


def test_groups_may_have_fewer_coordinates_than_a_node_has_ranks_and_are_equal_on_all(four_ranks: Ranks) -> None:
    for size in (2, 4):
        assert four_ranks(regrouped_by, size, True) == ["nothing"] * 4
        assert all("The ranks disagree" in told for told in four_ranks(regrouped_by, size, False))
