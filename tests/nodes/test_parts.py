"""Parts of a node's gradients, and averages of parts put together, on many ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_sparse.core.layout import even_part
from lightning_sparse.engine.average import Average, bounds_of
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.nodes.parts import Parts

NUMELS = {"first": 17, "second": 1, "third": 40, "fourth": 3}
RANKS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("ranks", RANKS)
def test_parts_have_every_coordinate_once_and_lengths_that_differ_by_one(ranks: int) -> None:
    for numel in (0, 1, 5, 8, 1001):
        spans = [even_part(numel, number, ranks) for number in range(ranks)]
        assert [i for span in spans for i in range(span.start, span.stop)] == list(range(numel))
        lengths = [span.stop - span.start for span in spans]
        assert max(lengths) - min(lengths) <= 1


def parts_of(ranks: int) -> list[Parts]:
    """Of all ranks of a node."""
    found = []
    for rank in range(ranks):
        within = TorchCollective.of_one()
        within.rank, within.world_size = rank, ranks
        within.between_hosts = lambda within=within: within  # type: ignore[misc]
        found.append(Parts(NUMELS, within))
    return found


NAMES = [["first", "third"], ["second", "fourth"]]
"""Of two groups."""


def averages(parts: Parts, names: Sequence[str], whole: Tensor, by: Tensor | None, chosen: Tensor | None) -> Average:
    """What a rank has of a group, whose coordinates in the group of whole parameters are chosen; None: all."""
    starts = dict(zip(names, np.cumsum([0, *(NUMELS[name] for name in names)]).tolist(), strict=False))
    spans, at, own = {}, 0, []
    for name in names:
        cut = parts.of(name, parts.within.rank)
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
    return Average(spans, indices, whole[kept], divisor, bounds, like, whole=indices is None)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("sparse", ["all", "none", "some", "nothing"])
def test_averages_of_parts_become_those_of_whole_parameters(ranks: int, divided: bool, sparse: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = parts_of(ranks)
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
    for found in drive_ranks([each.whole(those) for each, those in zip(parts, own, strict=True)]):
        for (names, values, by, chosen), one in zip(groups, found, strict=True):
            numel = len(values) - 1
            assert {name: span.stop - span.start for name, span in one.spans.items()} == {n: NUMELS[n] for n in names}
            assert one.whole == (one.indices is None)
            if one.indices is None:
                assert sparse == "none"
                assert torch.equal(one.values, values[:-1])
                assert by is None or torch.equal(one.by, by[:-1])
                continue
            real = one.indices < numel
            places = one.indices[real]
            assert len(places.unique()) == len(places)
            assert torch.equal(one.values[real], values[places])
            assert by is None or torch.equal(one.by[real], by[places])
            if sparse in ("all", "nothing"):
                assert torch.equal(places.sort().values, chosen.sort().values)
