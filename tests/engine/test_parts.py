"""Parts of a node's gradients: their means, and averages of parts put together, on many ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from lightning_sparse.engine.delivery import Delivery, bounds_of
from torch import Tensor

from lightning_sparse.core.layout import even_part
from lightning_sparse.engine.network import drive_ranks
from lightning_sparse.engine.record import Averages
from lightning_sparse.methods.memory import Residual
from lightning_sparse.nodes.parts import Parts
from tests.covering import by_default

NUMELS = {"first": 17, "second": 1, "third": 40, "fourth": 3}
RANKS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_have_every_coordinate_once_and_lengths_that_differ_by_one(ranks: int) -> None:
    for numel in (0, 1, 5, 8, 1001):
        spans = [even_part(numel, number, ranks) for number in range(ranks)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(numel))
        lengths = [span.stop - span.start for span in spans]
        assert max(lengths) - min(lengths) <= 1


def gradients(ranks: int, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(ranks)
    return [
        {name: torch.randn(numel, generator=generator).to(dtype) for name, numel in NUMELS.items()}
        for _ in range(ranks)
    ]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", by_default([torch.float32, torch.bfloat16, torch.float64], 2))
def test_each_rank_gets_the_mean_of_its_part_in_the_order_of_ranks(ranks: int, dtype: torch.dtype) -> None:
    given = gradients(ranks, dtype)
    given[0]["third"][5] = float("nan")
    before = [{name: x.clone() for name, x in each.items()} for each in given]
    parts = [Parts(NUMELS, rank, ranks) for rank in range(ranks)]
    into = [each.empty(grads) for each, grads in zip(parts, given, strict=True)]
    for _ in range(2):  # the second time in the same room
        drive_ranks([each.mean(*pair) for each, *pair in zip(parts, given, into, strict=True)])
    wide = np.float64 if dtype == torch.float64 else np.float32
    for name, numel in NUMELS.items():
        total = np.zeros(numel, wide)
        for each in before:
            total = total + each[name].to(torch.float64).numpy().astype(wide)
        mean = torch.from_numpy(total / wide(ranks)).to(dtype)
        found = torch.cat([each[name] for each in into])
        assert torch.equal(found.nan_to_num(7.0), mean.nan_to_num(7.0))
        assert all(
            torch.equal(now[name].nan_to_num(), then[name].nan_to_num())
            for now, then in zip(given, before, strict=True)
        )


NAMES = [["first", "third"], ["second", "fourth"]]
"""Of two groups."""


def averages(parts: Parts, names: Sequence[str], whole: Tensor, by: Tensor | None, chosen: Tensor | None) -> Averages:
    """What a rank has of a group, whose coordinates in the group of whole parameters are chosen; None: all."""
    starts = dict(zip(names, np.cumsum([0, *(NUMELS[name] for name in names)]).tolist(), strict=False))
    spans, at, own = {}, 0, []
    for name in names:
        cut = parts.of(name)
        spans[name] = slice(at, at + cut.stop - cut.start)
        at = spans[name].stop
        own.append(torch.arange(starts[name] + cut.start, starts[name] + cut.stop))
    places = torch.cat(own)
    indices = None if chosen is None else torch.isin(places, chosen).nonzero().flatten().flip(0)
    kept = places if indices is None else places[indices]
    if indices is not None and len(chosen):  # padding, as where shapes are static
        indices, kept = torch.cat([indices, torch.tensor([at])]), torch.cat([kept, torch.tensor([len(whole) - 1])])
    bounds = bounds_of(spans, torch.device("cpu"))
    divisor, like = None if by is None else by[kept], torch.empty(())
    delivery = Delivery(spans, indices, divisor, Residual(), 2, bounds, like, whole=indices is None)
    return Averages(spans, indices, whole[kept], delivery)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("sparse", ["all", "none", "some", "nothing"])
def test_averages_of_parts_become_those_of_whole_parameters(ranks: int, divided: bool, sparse: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [Parts(NUMELS, rank, ranks) for rank in range(ranks)]
    groups = []
    for number, names in enumerate(NAMES):
        numel = sum(NUMELS[name] for name in names)
        values = torch.randn(numel + 1, generator=generator).to(torch.bfloat16 if number else torch.float32)
        by = torch.rand(numel + 1, generator=generator) if divided else None
        groups.append((names, values, by, torch.randperm(numel, generator=generator)[: numel // 3]))
    if sparse == "nothing":
        groups = [(*group[:3], group[3][:0]) for group in groups]
    sends = {"none": lambda rank: False, "some": lambda rank: rank % 2 == 0}.get(sparse, lambda rank: True)
    own = [
        [averages(each, *group[:3], group[3] if sends(rank) else None) for group in groups]
        for rank, each in enumerate(parts)
    ]
    for found in drive_ranks([each.together(those) for each, those in zip(parts, own, strict=True)]):
        for (names, values, by, chosen), one in zip(groups, found, strict=True):
            numel = len(values) - 1
            assert {name: span.stop - span.start for name, span in one.spans.items()} == {n: NUMELS[n] for n in names}
            assert one.delivery.whole == (one.indices is None)
            if one.indices is None:
                assert sparse == "none"
                assert torch.equal(one.values, values[:-1])
                assert by is None or torch.equal(one.delivery.by, by[:-1])
                continue
            real = one.indices < numel
            places = one.indices[real]
            assert len(places.unique()) == len(places)
            assert torch.equal(one.values[real], values[places])
            assert by is None or torch.equal(one.delivery.by[real], by[places])
            if sparse in ("all", "nothing"):
                assert torch.equal(places.sort().values, chosen.sort().values)
