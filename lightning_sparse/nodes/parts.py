"""Parts of gradients that the ranks of a node exchange: cut from their mean, and put together again.

DDP's hook averages gradients over the ranks of a node while backward goes on. When an optimizer steps, each rank
exchanges its own part of the mean with the ranks of other nodes that have the same part, and the averages of all parts
are gathered within the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor
from torch.futures import Future

from lightning_sparse.core.layout import even_part
from lightning_sparse.core.messages import AllGather, Steps, ask, together
from lightning_sparse.engine.average import Average, bounds_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.share import Place, Share
from lightning_sparse.ops import pad


class Parts(Share):
    """The i-th n-th of each gradient, on rank i of a node of n.

    Args:
        numels: coordinates of each whole parameter, by name.
        within: ranks of the node.
    """

    cuts = True

    def __init__(self, numels: Mapping[str, int], within: TorchCollective) -> None:
        self.numels, self.ranks = numels, within.world_size
        parts = {name: self.of(name, within.rank) for name in numels}
        super().__init__(within, {name: Place(x.start, x.stop - x.start, numels[name]) for name, x in parts.items()})
        self._lines: dict[tuple[str, ...], _Lines] = {}

    def of(self, name: str, rank: int) -> slice:
        """Return the coordinates of a whole parameter that a rank of the node has."""
        return even_part(self.numels[name], rank, self.ranks)

    def part(self, name: str, flat: Tensor) -> Tensor:
        """See :meth:`.Share.part`."""
        return flat[self.of(name, self.within.rank)]

    def average(self, buffer: Tensor) -> Future[Tensor]:
        """See :meth:`.Share.average`."""
        return self.within.start_average(buffer)

    def whole(self, averages: Sequence[Average]) -> Steps[Sequence[Average]]:
        """Return averages of whole gradients, given those that each rank of the node has of its parts.

        Coordinates, averages and divisors travel as they are, so that all ranks hold equal bits.

        Args:
            averages: of this rank's parts; of the same groups on all ranks.
        """
        return (yield from together([self._whole(each) for each in averages]))

    def _whole(self, own: Average) -> Steps[Average]:
        values = own.values
        names = tuple(own.spans)
        lines = self._lines[names] = self._lines.get(names) or _Lines(self, names, values.device)
        facts = [len(values), own.indices is not None, own.by is not None, own.whole]
        told = (yield AllGather(torch.tensor(facts, dtype=torch.int32, device="cpu"))).tolist()
        numbers, sparse, divided, whole = zip(*told, strict=True)
        vectors = [values]
        if any(sparse):
            places = torch.arange(len(values), device=values.device)
            vectors.append((places if own.indices is None else own.indices).int())
        if any(divided):  # of averages that nobody divides, by ones
            vectors.append(torch.ones_like(values, dtype=own.like.dtype) if own.by is None else own.by)
        rows = yield from together([ask(AllGather(pad(x, max(numbers), 0))) for x in vectors])
        of_ranks = [[row[:number] for row, number in zip(each, numbers, strict=True)] for each in rows]
        join = torch.cat if any(sparse) else lines.spread
        indices = torch.cat([*starmap(lines.index, enumerate(of_ranks[1]))]) if any(sparse) else None
        by = join(of_ranks[-1]) if any(divided) else None
        spans, bounds, every = lines.spans, lines.bounds, join(of_ranks[0])
        return replace(own, spans=spans, bounds=bounds, indices=indices, values=every, by=by, whole=all(whole))


class _Lines:
    """Places of the parts of a group's parameters in the group, for one sequence of parameters."""

    def __init__(self, parts: Parts, names: Sequence[str], device: torch.device) -> None:
        starts = list(accumulate((parts.numels[name] for name in names), initial=0))
        self.numel = starts[-1]
        self.spans = {name: slice(*span) for name, span in zip(names, pairwise(starts), strict=True)}
        self.bounds = bounds_of(self.spans, device)
        self._cuts = [
            [_behind(starts[i], parts.of(name, rank)) for i, name in enumerate(names)] for rank in range(parts.ranks)
        ]
        """Of each rank's parts in the group of whole parameters."""
        self._stops, self._shifts = [], []
        for cuts in self._cuts:
            firsts = list(accumulate((cut.stop - cut.start for cut in cuts), initial=0))
            self._stops.append(torch.tensor(firsts[1:], device=device))
            # The padding index is one past the last coordinate, here as there.
            shifts = [cut.start - first for cut, first in zip(cuts, firsts, strict=False)] + [self.numel - firsts[-1]]
            self._shifts.append(torch.tensor(shifts, device=device))

    def index(self, rank: int, places: Tensor) -> Tensor:
        """Return the coordinates in the group of whole parameters, given those of a rank's parts."""
        places = places.long()
        return places + self._shifts[rank][torch.searchsorted(self._stops[rank], places, right=True)]

    def spread(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return (numel,) values of all ranks' parts, which have all coordinates, in the order of the group."""
        every = vectors[0].new_empty(self.numel)
        for cuts, vector in zip(self._cuts, vectors, strict=True):
            pieces = torch.split(vector, [cut.stop - cut.start for cut in cuts])
            torch._foreach_copy_([every[cut] for cut in cuts], list(pieces))
        return every


def _behind(start: int, span: slice) -> slice:
    return slice(start + span.start, start + span.stop)
