"""The average of a group's gradients, from the exchange that has made it to the rules of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import put_, put_in_runs_, scatter_, static_shapes
from lightning_sparse.ops.adam import Sparse


@dataclass(eq=False)
class Average:
    """The average of a group's gradients, which lies in their place, too."""

    spans: Mapping[str, slice]
    """Of each parameter in the group."""
    indices: Tensor | None
    """(u,) int64 coordinates of the values, in any order, maybe repeated, with padding indices where shapes are static;
    None: all."""
    values: Tensor
    """(u,) in the gradient's dtype, free of the scale of a loss."""
    by: Tensor | None
    """(u,) what averages are divided by to be steps of Adam, see
    :meth:`~lightning_sparse.methods.memory.Memory.divisors`; None: nobody divides them."""
    bounds: tuple[Tensor, Tensor]
    """See :func:`bounds_of`."""
    like: Tensor
    """Of the dtype and on the device of what the group remembers."""
    whole: bool
    """True if there is a gradient's average at every coordinate, as at a density of 1."""

    def of(self, name: str) -> tuple[Tensor | None, Tensor]:
        """Return the coordinates within a parameter, ascending, each once, and the averages there; on the CPU.

        Coordinates of None are all of them.
        """
        values, span = self.values, self.spans[name]
        if self.indices is None:
            return None, values[span].to("cpu", copy=True)
        inside = (self.indices >= span.start) & (self.indices < span.stop)
        places, values = (self.indices[inside] - span.start).cpu(), values[inside].cpu()
        different, first = torch.unique(places, return_inverse=True)
        return different, values.new_empty(len(different)).index_copy_(0, first, values)

    def arrived(self, parameters: Mapping[str, Tensor]) -> Sparse | None:
        """Return where averages of these parameters have arrived on a device; None where that is everywhere."""
        if self.indices is None or self.by is None or not static_shapes(self.by.device):
            return None
        of_group = [parameters.get(name, span.stop - span.start) for name, span in self.spans.items()]
        if any(part.numel() != self.spans[name].stop - self.spans[name].start for name, part in parameters.items()):
            return None
        return Sparse(of_group, self.indices, self.values, self.by)

    def divisors(self) -> Mapping[str, tuple[Tensor | None, Tensor]]:
        """Return by what the averages of each parameter are divided, and where they arrived in it.

        The coordinates are ascending on a CPU; None: the divisors are of all coordinates, and 1 where none arrived.
        """
        indices, by = self.indices, self.by
        if by is None:
            indices, by = None, self.like.new_ones(max(span.stop for span in self.spans.values()))
        if indices is None or static_shapes(by.device):
            every = spread_divisor(indices, by, max(span.stop for span in self.spans.values()))
            return {name: (None, every[span]) for name, span in self.spans.items()}
        if bool((indices[1:] < indices[:-1]).any()):
            indices, order = indices.sort()
            by = by[order]
        first, last = (torch.searchsorted(indices, bounds).tolist() for bounds in self.bounds)
        return {
            name: (indices[start:stop] - span.start, by[start:stop])
            for (name, span), start, stop in zip(self.spans.items(), first, last, strict=True)
        }


def scatter_average_(
    grad: Gradient, indices: Tensor | None, values: Tensor, candidates: Candidates | None = None
) -> None:
    """Write values of the gradient's dtype to its place, and zeros elsewhere; see :func:`.hand_over_`."""
    if static_shapes(grad.device):
        scatter_(grad.runs[0], indices, values, torch.zeros((), dtype=torch.bool, device=grad.device))
    elif indices is None:
        for span, run in grad:
            run.copy_(values[span])
    else:
        for run in () if candidates is not None and candidates.cleared(grad.runs) else grad.runs:
            run.zero_()
        put_in_runs_(grad.runs, indices, values)


def spread_divisor(indices: Tensor | None, by: Tensor, numel: int) -> Tensor:
    """Return the (numel,) divisors of all coordinates: 1 where no average arrived."""
    if indices is None:
        return by
    every = torch.ones(numel + 1, dtype=by.dtype, device=by.device)
    put_(every, indices, by)
    return every[:-1]


def bounds_of(spans: Mapping[str, slice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first coordinate of each parameter in a group and the one behind its last, int64 on the device."""
    bounds = [(span.start, span.stop) for span in spans.values()]
    # Written on the device: a list would be copied there, which makes the host wait.
    starts, stops = (
        torch.stack([torch.full((), x, device=device) for x in each]) for each in zip(*bounds, strict=True)
    )
    return starts, stops


@torch.no_grad()
def place(averages: Mapping[str, Average], places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Put averages where gradients lay, times the present scale of the loss.

    Args:
        averages: by parameter, in the coordinates of the places.
        places: flat gradients by parameter, of all that the averages name.
        scale: () of the loss; None: none.
    """
    parts: dict[int, tuple[Average, list[str]]] = {}
    for name, one in averages.items():
        parts.setdefault(id(one), (one, []))[1].append(name)
    for one, names in parts.values():
        _scatter(one, {name: places[name] for name in names}, scale)


def _scatter(average: Average, places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Write the averages of some parameters of a group to their places."""
    dtype = next(iter(places.values())).dtype
    values = (average.values if scale is None else average.values * scale).to(dtype)
    if places.keys() == average.spans.keys():
        place = Gradient.of(places[name] for name in average.spans)
        flat = place if len(place.runs) == 1 or not static_shapes(place.device) else Gradient([place.flat()])
        scatter_average_(flat, average.indices, values)
        if flat is not place:
            place.spread_(flat.runs[0])
        return
    whole = values.new_empty(max(span.stop for span in average.spans.values()))
    scatter_average_(Gradient([whole]), average.indices, values)
    for name, piece in places.items():
        piece.copy_(whole[average.spans[name]])
