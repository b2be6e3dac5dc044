"""Parts of parameters that the ranks of a node exchange: cut from gradients, and put together again.

Every rank of a node has whole parameters, and each exchanges its own part of them with the ranks of other nodes. Two
steps lie within the node: the mean over its ranks of each one's part, and what was made of the parts, on all of them.
Both are coroutines, see :mod:`lightning_sparse.core.messages`, whose messages are between the ranks of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import even_part, sum_dtype
from lightning_sparse.core.messages import AllGather, AllToAll, Steps
from lightning_sparse.engine.delivery import bounds_of
from lightning_sparse.engine.state.record import Averages

UNIT = 8
"""Bytes to multiples of which vectors are lengthened that travel as one: each of them can be read in place then."""


class Sent(NamedTuple):
    """Facts about averages of a part that others need to read them."""

    number: int
    """Of averages."""
    sparse: bool
    """True if coordinates come with them; else they are of all."""
    divided: bool
    """True if divisors come with them."""
    whole: bool
    """See :class:`~lightning_sparse.engine.delivery.Delivery`."""

    def bytes_of(self, kinds: Sequence[torch.dtype]) -> list[int]:
        """Return the bytes of coordinates, averages and divisors, as they are sent, given their dtypes."""
        wanted = self.sparse, True, self.divided
        return [_lengthened(self.number * kind.itemsize) * one for kind, one in zip(kinds, wanted, strict=True)]


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
        own = torch.tensor([_facts_of(each) for each in averages], dtype=torch.int32, device="cpu")
        table = (yield AllGather(own)).tolist()
        told = [[Sent(number, *map(bool, rest)) for number, *rest in of_rank] for of_rank in table]
        kinds = [_kinds_of(each) for each in averages]
        lengths = [sum(sum(sent.bytes_of(each)) for sent, each in zip(of_rank, kinds, strict=True)) for of_rank in told]
        message = torch.zeros(max(UNIT, *lengths), dtype=torch.uint8, device=_device_of(averages[0]))
        start = 0
        for each in averages:
            for vector in _vectors_of(each):
                raw = vector.contiguous().view(torch.uint8)
                message[start : start + len(raw)].copy_(raw)
                start += _lengthened(len(raw))
        rows = yield AllGather(message)
        found: list[list[_Part]] = [[] for _ in averages]
        for of_rank, row in zip(told, rows, strict=True):
            start = 0
            for sent, dtypes, parts in zip(of_rank, kinds, found, strict=True):
                read = []
                for kind, length in zip(dtypes, sent.bytes_of(dtypes), strict=True):
                    read.append(row[start : start + length].view(kind)[: sent.number])
                    start += length
                indices, values, by = read
                given = indices if sent.sparse else None, values, by if sent.divided else None
                parts.append(_Part(*given, sent.whole))
        return [self._joined(each, parts) for each, parts in zip(averages, found, strict=True)]

    def _joined(self, own: Averages, parts: Sequence[_Part]) -> Averages:
        """Return the averages of whole parameters, given those of all ranks' parts."""
        lines = self._lines_of(own)
        every = all(part.indices is None for part in parts)
        divided = any(part.by is not None for part in parts)
        if every:
            indices, values = None, lines.spread([part.values for part in parts])
            by = lines.spread([_by(part) for part in parts]) if divided else None
        else:
            indices = torch.cat([lines.index(rank, part) for rank, part in enumerate(parts)])
            values = torch.cat([part.values for part in parts])
            by = torch.cat([_by(part) for part in parts]) if divided else None
        assert own.delivery is not None
        whole = all(part.whole for part in parts)
        delivery = own.delivery.of_whole(lines.spans, indices, by, lines.bounds, whole)
        return Averages(lines.spans, indices, values, delivery, own.returns)

    def _lines_of(self, own: Averages) -> _Lines:
        names = tuple(own.spans)
        if names not in self._lines:
            self._lines[names] = _Lines(self, names, _device_of(own))
        return self._lines[names]


class _Part(NamedTuple):
    """Averages of a part."""

    indices: Tensor | None
    values: Tensor
    by: Tensor | None
    whole: bool


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

    def index(self, rank: int, part: _Part) -> Tensor:
        """Return the coordinates in the group of whole parameters, given those of a rank's parts."""
        if part.indices is None:
            return torch.cat([torch.arange(cut.start, cut.stop, device=part.values.device) for cut in self._cuts[rank]])
        places = part.indices.long()
        return places + self._shifts[rank][torch.searchsorted(self._stops[rank], places, right=True)]

    def spread(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return (numel,) values of all ranks' parts, which have all coordinates, in the order of the group."""
        every = vectors[0].new_empty(self.numel)
        for cuts, vector in zip(self._cuts, vectors, strict=True):
            pieces = torch.split(vector, [cut.stop - cut.start for cut in cuts])
            torch._foreach_copy_([every[cut] for cut in cuts], list(pieces))
        return every


def _facts_of(averages: Averages) -> Sent:
    values, delivery = averages.values, averages.delivery
    assert values is not None
    assert delivery is not None
    return Sent(len(values), averages.indices is not None, delivery.by is not None, delivery.whole)


def _kinds_of(averages: Averages) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of coordinates, averages and divisors."""
    assert averages.values is not None
    assert averages.delivery is not None
    return torch.int32, averages.values.dtype, averages.delivery.wide


def _vectors_of(averages: Averages) -> list[Tensor]:
    """Return what is sent of averages, in the order in which it is read."""
    indices, by = averages.indices, None if averages.delivery is None else averages.delivery.by
    vectors = [None if indices is None else indices.int(), averages.values, by]
    return [vector for vector in vectors if vector is not None]


def _device_of(averages: Averages) -> torch.device:
    assert averages.values is not None
    return averages.values.device


def _behind(start: int, span: slice) -> slice:
    return slice(start + span.start, start + span.stop)


def _lengthened(length: int) -> int:
    return -(-length // UNIT) * UNIT


def _by(part: _Part) -> Tensor:
    """Return divisors; of averages that nobody divides, ones."""
    return torch.ones_like(part.values) if part.by is None else part.by
