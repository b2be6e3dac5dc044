"""Parts of parameters that the ranks of a node exchange: cut from gradients, and put together again.

Every rank of a node has whole parameters, and each exchanges its own part of them with the ranks of other nodes. Two
steps lie within the node: the mean over its ranks of each one's part, and what was made of the parts, on all of them.
Both are coroutines, see :mod:`lightning_sparse.core.messages`, whose messages are between the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor

from lightning_sparse.core.layout import even_part, sum_dtype
from lightning_sparse.core.messages import AllGather, AllToAll, Steps, ask, together
from lightning_sparse.engine.delivery import bounds_of
from lightning_sparse.engine.state.record import Averages
from lightning_sparse.ops import pad


class Parts:
    """Knows which coordinates of each parameter a rank of a node exchanges: of n ranks, rank i has the i-th n-th.

    Args:
        numels: coordinates of each whole parameter, by name.
        rank: within the node.
        ranks: of the node, n.

    Example:
        Two ranks in one process; each has gradients of 4 and of 3 coordinates.

        >>> from lightning_sparse.engine.network import drive_ranks
        >>> parts = [Parts({"weight": 4, "bias": 3}, rank, 2) for rank in range(2)]
        >>> grads = [{"weight": torch.ones(4) * x, "bias": torch.ones(3) * x} for x in (1.0, 3.0)]
        >>> into = [each.empty(grad) for each, grad in zip(parts, grads)]
        >>> _ = drive_ranks([each.mean(grad, own) for each, grad, own in zip(parts, grads, into)])
        >>> into[1]
        {'weight': tensor([2., 2.]), 'bias': tensor([2., 2.])}
    """

    def __init__(self, numels: Mapping[str, int], rank: int, ranks: int) -> None:
        self.numels, self.rank, self.ranks = numels, rank, ranks
        self._room: dict[torch.dtype, Tensor] = {}
        """Where gradients are put in order before they are sent."""
        self._lines: dict[tuple[str, ...], _Lines] = {}

    def of(self, name: str, rank: int | None = None) -> slice:
        """Return the coordinates of a whole parameter that a rank has; None: this one."""
        return even_part(self.numels[name], self.rank if rank is None else rank, self.ranks)

    def empty(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return room for this rank's part of each gradient, one behind the other for those of a dtype."""
        rooms: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(x.dtype for x in gradients.values()):
            named = {name: x for name, x in gradients.items() if x.dtype == dtype}
            lengths = [(span := self.of(name)).stop - span.start for name in named]
            device = next(iter(named.values())).device
            vectors = torch.split(torch.empty(sum(lengths), dtype=dtype, device=device), lengths)
            rooms |= dict(zip(named, vectors, strict=True))
        return {name: rooms[name] for name in gradients}

    def mean(self, gradients: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> Steps[None]:
        """Form the mean over the node's ranks of this rank's part of gradients.

        Each rank sends every other one its part, and adds up what it gets in the order of ranks, at least in float32:
        the bytes are those of a reduce-scatter, ``(n - 1) / n`` of the gradients, and the order of the sum is the same
        on every backend.

        Args:
            gradients: flat, by name of the parameter; read only.
            into: is overwritten, see :meth:`empty`.
        """
        for dtype in dict.fromkeys(x.dtype for x in gradients.values()):
            named = {name: x for name, x in gradients.items() if x.dtype == dtype}
            lengths = [-(-self.numels[name] // self.ranks) for name in named]
            message = self._message(sum(lengths), next(iter(named.values())))
            places, given = [], []
            for (name, x), rows in zip(named.items(), torch.split(message, lengths, dim=1), strict=True):
                for rank in range(self.ranks):
                    piece = x[self.of(name, rank)]
                    places.append(rows[rank, : len(piece)])
                    given.append(piece)
            torch._foreach_copy_(places, given)
            received = yield AllToAll(message)
            total = received[0].to(sum_dtype(dtype))
            for row in received[1:]:
                total.add_(row)
            total.div_(self.ranks)
            own = [into[name] for name in named]
            torch._foreach_copy_(own, [x[: len(to)] for x, to in zip(torch.split(total, lengths), own, strict=True)])

    def _message(self, length: int, like: Tensor) -> Tensor:
        """Return (ranks, length) to write to; what is not written is finite."""
        room, needed = self._room.get(like.dtype), self.ranks * length
        if room is None or room.numel() < needed:
            room = self._room[like.dtype] = torch.zeros(needed, dtype=like.dtype, device=like.device)
        return room[:needed].view(self.ranks, length)

    def together(self, averages: Sequence[Averages]) -> Steps[list[Averages]]:
        """Return averages of whole parameters, given those that each rank of the node has of its parts.

        Coordinates, averages and divisors travel as they are, so that all ranks hold equal bits.

        Args:
            averages: of this rank's parts; of the same groups on all ranks. They have values, and facts for step rules.
        """
        return (yield from together([self._whole(each) for each in averages]))

    def _whole(self, own: Averages) -> Steps[Averages]:
        values, delivery = own.values, own.delivery
        assert values is not None
        assert delivery is not None
        names = tuple(own.spans)
        lines = self._lines[names] = self._lines.get(names) or _Lines(self, names, values.device)
        facts = [len(values), own.indices is not None, delivery.by is not None, delivery.whole]
        told = (yield AllGather(torch.tensor(facts, dtype=torch.int32, device="cpu"))).tolist()
        numbers, sparse, divided, whole = zip(*told, strict=True)
        vectors = [values]
        if any(sparse):
            every = torch.arange(len(values), device=values.device)
            vectors.append((every if own.indices is None else own.indices).int())
        if any(divided):  # of averages that nobody divides, by ones
            vectors.append(torch.ones_like(values, dtype=delivery.like.dtype) if delivery.by is None else delivery.by)
        rows = yield from together([ask(AllGather(pad(x, max(numbers), 0))) for x in vectors])
        of_ranks = [[row[:number] for row, number in zip(each, numbers, strict=True)] for each in rows]
        join = torch.cat if any(sparse) else lines.spread
        indices = torch.cat([*starmap(lines.index, enumerate(of_ranks[1]))]) if any(sparse) else None
        by = join(of_ranks[-1]) if any(divided) else None
        spans, bounds = lines.spans, lines.bounds
        made = replace(delivery, spans=spans, bounds=bounds, indices=indices, by=by, whole=all(whole), handed=None)
        return Averages(spans, indices, join(of_ranks[0]), made, own.returns)


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
