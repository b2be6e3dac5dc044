"""Layout of coordinates in memory: of a parameter, and of a group's gradient in DDP's buckets."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Span = tuple[int | Tensor, int | Tensor]
"""First and past-the-end coordinate of a contiguous range; tensors if only the device knows them."""

Rates = Sequence[tuple[slice, float]]
"""Coordinates of each parameter, in order, and the learning rate that it is stepped with."""


def rates_at(rates: Rates, indices: Tensor | None, numel: int, like: Tensor) -> Tensor | float:
    """Return the rates at some coordinates; a number where all are the same.

    Args:
        rates: at least one. Coordinates in between have that of others.
        indices: (u,) int64; None: all.
        numel: number of all coordinates.
        like: of the device and dtype of the result.

    Example:
        >>> rates = [(slice(0, 2), 0.5), (slice(2, 3), 0.25)]
        >>> rates_at(rates, torch.tensor([2, 0]), 3, torch.empty(0))
        tensor([0.2500, 0.5000])
    """
    starts = [(span.start, rate) for span, rate in rates]
    runs = [one for one, before in zip(starts, [(0, None), *starts], strict=False) if one[1] != before[1]]
    if len(runs) == 1:
        return runs[0][1]
    if indices is None:
        found = like.new_full((numel,), runs[0][1])
        for start, rate in runs[1:]:
            found[start:] = rate
        return found
    # Written on the device: a list would be copied there, which makes the host wait.
    borders = torch.stack([torch.full((), start, device=like.device) for start, _ in runs[1:]])
    values = torch.stack([like.new_full((), rate) for _, rate in runs])
    return values[torch.searchsorted(borders, indices, right=True)]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are added up and remembered.

    Example:
        >>> sum_dtype(torch.bfloat16), sum_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


class Runs(list[Tensor]):
    """Vectors that stay where they lie: a table of their addresses is made once, and not by each part of a step."""

    table: tuple[int, Any] | None = None
    """Where the first one lies, and what :func:`.addresses.run_table` has made, on the stream of the step."""


class Gradient:
    """The gradient of a group on this rank, processed in place.

    DDP's buckets contain gradients of other groups in between. The gradient of one group therefore consists of *runs*,
    each contiguous. Gathering them and scattering the average again would take as long as all other work on them.

    Args:
        runs: (length,) vectors of one dtype, in the order of coordinates.
        rooms: buffers that :meth:`room` has allocated in earlier steps. New ones are added; unused ones are removed.

    Example:
        >>> bucket = torch.arange(6.0)
        >>> grad = Gradient.of([bucket[:2], bucket[2:3], bucket[4:]])
        >>> grad.runs, grad.flat()
        ([tensor([0., 1., 2.]), tensor([4., 5.])], tensor([0., 1., 2., 4., 5.]))
    """

    def __init__(
        self,
        runs: Sequence[Tensor],
        rooms: dict[torch.dtype, Tensor] | None = None,
        pieces: Sequence[Tensor] | None = None,
    ) -> None:
        self.runs = Runs(runs)
        self.pieces = self.runs if pieces is None else pieces
        """Their coordinates, cut alike wherever DDP has laid them: sums formed piece by piece have the same bits."""
        self.dtype, self.device = self.runs[0].dtype, self.runs[0].device
        self._lengths = [run.numel() for run in self.runs]  # len() of a tensor takes ten times as long
        *self.starts, self.numel = accumulate(self._lengths, initial=0)
        """First coordinate of each run, and the number of all coordinates."""
        self.rooms = {} if rooms is None else rooms
        if len(self.runs) == 1:
            self.rooms.pop(self.dtype, None)

    @classmethod
    def of(cls, pieces: Iterable[Tensor], rooms: dict[torch.dtype, Tensor] | None = None) -> Gradient:
        """Make one of pieces in the order of coordinates; those that lie one behind the other in memory are one run."""
        pieces = list(pieces)
        runs: list[tuple[Tensor, int]] = []
        stop = None
        for piece in pieces:
            start, length = piece.storage_offset(), piece.numel()
            if start == stop and _share_memory(piece, runs[-1][0]):
                runs[-1] = runs[-1][0], runs[-1][1] + length
            else:
                runs.append((piece, length))
            stop = start + length
        longer = (one if one.numel() == length else one.as_strided((length,), (1,)) for one, length in runs)
        # Each run has a version counter of its own: other groups write to the same buckets.
        return cls([run.data for run in longer], rooms, pieces)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over the coordinates that each run holds, and the run."""
        stops = (*self.starts[1:], self.numel)
        return zip(map(slice, self.starts, stops), self.runs, strict=True)

    def cut(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        """Iterate in parts of at most so many coordinates."""
        for span, run in self:
            for start in range(0, len(run), most):
                part = run[start : start + most]
                yield slice(span.start + start, span.start + start + len(part)), part

    def __getitem__(self, span: slice) -> Tensor:
        """Return a view of coordinates that lie in one run, such as those of a parameter."""
        number = bisect_right(self.starts, span.start) - 1
        start = self.starts[number]
        return self.runs[number][span.start - start : span.stop - start]

    def room(self, dtype: torch.dtype) -> Tensor:
        """Return (numel,) to write to: the gradient's own place, if it is one run of this dtype.

        Otherwise the vector is allocated once and reused by later calls, also in later steps.
        """
        if len(self.runs) == 1 and dtype == self.dtype:
            return self.runs[0]
        if dtype not in self.rooms:
            self.rooms[dtype] = torch.empty(self.numel, dtype=dtype, device=self.device)
        return self.rooms[dtype]

    def flat(self) -> Tensor:
        """Return the (numel,) gradient as one vector: its own place if it is one run, else a copy, in :meth:`room`."""
        return self.runs[0] if len(self.runs) == 1 else self._joined(self.dtype)

    def unscaled(self, scale: Tensor) -> Gradient:
        """Return the gradient divided by a loss scale: in place, or in :meth:`room` where 16 bits would lose it."""
        whole = self._wide()
        torch._foreach_div_(whole.runs, scale)
        return whole

    def times(self, rates: Rates) -> Gradient:
        """Return the gradient of each parameter multiplied by its rate, in the place of :meth:`unscaled`."""
        whole, each = self._wide(), {rate for _, rate in rates}
        if len(each) == 1:
            torch._foreach_mul_(whole.runs, each.pop())
        elif each:
            torch._foreach_mul_([whole[span] for span, _ in rates], [rate for _, rate in rates])
        return whole

    def _wide(self) -> Gradient:
        """Return the gradient in the dtype of sums: itself, or a copy in :meth:`room`."""
        wide = sum_dtype(self.dtype)
        if wide == self.dtype:
            return self
        flat = self._joined(wide)
        return Gradient([flat], pieces=torch.split(flat, [piece.numel() for piece in self.pieces]))

    def _joined(self, dtype: torch.dtype) -> Tensor:
        flat = self.room(dtype)
        torch._foreach_copy_(list(torch.split(flat, self._lengths)), self.runs)
        return flat

    def spread_(self, flat: Tensor) -> None:
        """Write (numel,) values to the gradient's storage, unless they are there already."""
        if len(self.runs) > 1 or flat.data_ptr() != self.runs[0].data_ptr():
            torch._foreach_copy_(self.runs, list(torch.split(flat, self._lengths)))


class InRuns:
    """A vector in the place of a gradient that lies in several runs: what selections ask of vectors, without a copy.

    Args:
        place: what it has taken the place of.

    Example:
        >>> scores = InRuns(Gradient([torch.tensor([0.0, 1, 2, 3]), torch.tensor([4.0, 5, 6])]))
        >>> scores.every(3, 1), scores.numel()
        (tensor([1., 4.]), 7)
    """

    def __init__(self, place: Gradient) -> None:
        self.place, self.runs = place, place.runs
        self.dtype, self.device = place.dtype, place.device

    def numel(self) -> int:
        """Return the number of coordinates, as tensors do."""
        return self.place.numel

    def __getitem__(self, span: slice) -> Tensor:
        """Return a view of coordinates that lie in one run, such as those of a parameter."""
        return self.place[span]

    def every(self, step: int, first: int = 0) -> Tensor:
        """Return a copy of the coordinates ``first + i step``, with first below step."""
        return torch.cat([run[(first - span.start) % step :: step] for span, run in self.place])


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def even_part(numel: int, number: int, parts: int) -> slice:
    """Return one of so many parts of coordinates, whose lengths differ by one at most.

    Example:
        >>> [even_part(7, number, 3) for number in range(3)]
        [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    return slice(number * numel // parts, (number + 1) * numel // parts)


def own(x: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has, in the tensor's own memory: all of it, unless it is sharded."""
    whole: Any = x
    if not hasattr(whole, "to_local"):
        return x
    with torch.no_grad():
        part: Tensor = whole.to_local()
    return part


def whole_of(part: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that is sharded as another one, given the part that this rank has; else the part itself."""
    kind: Any = type(like)
    if not hasattr(kind, "from_local"):
        return part
    whole: Any = like
    made: Tensor = kind.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def flattened(parameter: Tensor) -> Tensor:
    """Return (numel,) coordinates in the order of memory; a view where they lie there without gaps."""
    if fills_memory(parameter):
        return parameter.detach().as_strided((parameter.numel(),), (1,))
    return parameter.detach().flatten()


def flat_as(x: Tensor, parameter: Tensor) -> Tensor:
    """Return what this rank has of a tensor, in the order of its parameter's coordinates, as a view or a copy."""
    if type(parameter) is Parameter and x.is_contiguous() and parameter.is_contiguous():
        return (x.detach() if x.requires_grad else x).view(-1)
    return flattened(laid_out(own(x), own(parameter)))


def shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of (numel,) coordinates that lie in this order, in the parameter's shape."""
    if fills_memory(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def laid_out(x: Tensor, parameter: Tensor) -> Tensor:
    """Return values for a parameter, in its shape, so that :func:`flattened` has them in the order of its coordinates.

    Where they do not lie so, as where a script has put another gradient in place, this is a copy.
    """
    plain = x.is_contiguous() and parameter.is_contiguous() == fills_memory(parameter)  # so are coordinates behind gaps
    if plain or x.stride() == parameter.stride():
        return x
    return shaped(x.new_empty(x.numel()), parameter).copy_(x)


def fills_memory(parameter: Tensor) -> bool:
    """Return True if elements neither overlap nor leave gaps; gradients of others get the usual strides from DDP."""
    if parameter.is_contiguous():  # asking torch for other layouts takes ten times as long
        return True
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def layout_of(parameter: Tensor) -> list[int]:
    """Return sizes and strides by which :func:`flattened` orders the coordinates of a parameter.

    Example:
        >>> layout_of(torch.empty(2, 3).t()), layout_of(torch.empty(2, 3)[:, :2])
        ([3, 2, 1, 3], [2, 2, 2, 1])
    """
    like = parameter if fills_memory(parameter) else torch.empty(parameter.shape, device="meta")
    return [*like.shape, *like.stride()]


def is_layout(numbers: Sequence[int]) -> bool:
    """Return True for numbers that :func:`layout_of` may give."""
    sizes, strides = numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=False) if size > 1):
        if stride != filled:
            return False
        filled *= size
    return len(sizes) == len(strides) and all(size > 0 for size in sizes)


def order_from(before: Sequence[int], now: Sequence[int]) -> Tensor | None:
    """Return (numel,) int64: the place of each coordinate in another layout; None where it is the same.

    Example:
        >>> order_from([2, 3, 3, 1], [2, 3, 1, 2])
        tensor([0, 3, 1, 4, 2, 5])
    """
    sizes, strides = list(now[: len(now) // 2]), list(now[len(now) // 2 :])
    earlier = list(before[len(before) // 2 :])
    if list(before[: len(before) // 2]) != sizes:  # of another shape: as it lies
        return None
    if all(one == other for one, other, size in zip(earlier, strides, sizes, strict=True) if size > 1):
        return None
    places = torch.arange(math.prod(sizes), device="cpu")
    order = torch.empty_like(places)
    order.as_strided(sizes, strides).copy_(places.as_strided(sizes, earlier))
    return order


def in_pieces(rows: Iterable[Sequence[Tensor]], most: int) -> Iterator[list[list[Tensor]]]:
    """Iterate over views of tensors, in lists of at most so many elements: what is needed on the way is bounded.

    Args:
        rows: lists of tensors; the tensors of a row have one shape.
        most: number of elements of a list's first tensors together; more only for a tensor without a dimension to cut.
    """
    batch: list[list[Tensor]] = []
    size = 0
    for part in (part for row in rows for part in _cut(row, most)):
        if batch and size + part[0].numel() > most:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += part[0].numel()
    if batch:
        yield batch


def _cut(row: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    sizes = row[0].shape
    if row[0].numel() <= max(most, 1):
        yield list(row)
        return
    dim = max(range(len(sizes)), key=sizes.__getitem__)
    half = sizes[dim] // 2
    for start, length in ((0, half), (half, sizes[dim] - half)):
        yield from _cut([x.narrow(dim, start, length) for x in row], most)
