"""Facts about averages that step rules of optimizers ask for: where they arrived, and what they are divided by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse.engine.optimizers.scaled import Handed
from lightning_sparse.engine.proposal import spread_divisor
from lightning_sparse.methods.memory import Memory
from lightning_sparse.ops import static_shapes
from lightning_sparse.ops.sampled import Sampler


def bounds_of(spans: Mapping[str, slice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first coordinate of each parameter in a group and the one behind its last, int64 on the device."""
    bounds = [(span.start, span.stop) for span in spans.values()]
    # Written on the device: a list would be copied there, which makes the host wait.
    starts, stops = (
        torch.stack([torch.full((), x, device=device) for x in each]) for each in zip(*bounds, strict=True)
    )
    return starts, stops


@dataclass(eq=False)
class Delivery:
    """Averages of a group from the exchange that made them to the optimizer's step that applies them."""

    spans: Mapping[str, slice]
    """Of each parameter in the group."""
    indices: Tensor | None
    """(u,) int64 coordinates of the averages, in any order, with padding indices where shapes are static; None: all."""
    by: Tensor | None
    """(u,) what averages are divided by to be steps of Adam, see
    :meth:`~lightning_sparse.methods.memory.Memory.divisors`; None: nobody divides them."""
    memory: Memory
    """Of the group."""
    ranks: int
    """Number of ranks that averages are means over."""
    bounds: tuple[Tensor, Tensor]
    """See :func:`bounds_of`."""
    like: Tensor
    """Of the dtype and on the device of what the group remembers."""
    whole: bool
    """True if there is a gradient's average at every coordinate, as at a density of 1."""
    sampler: Sampler = field(default_factory=Sampler)
    """Looks at averages of all deliveries of the group."""
    handed: Handed | None = None
    """Some of the averages as they were handed out, where they are to be divided; None: nobody can change them."""

    def sample(self, pieces: Sequence[Tensor], scale: Tensor | None) -> None:
        """Note some of the averages where optimizers will find them, to see later how they were changed.

        Args:
            pieces: flat averages of each parameter.
            scale: () of the loss, which they have; None: none.
        """
        if self.by is not None:
            self.handed = Handed.of(self.bounds, pieces, self.indices, scale, self.sampler)

    def lengthen_(self, lengths: Tensor) -> None:
        """Let the divisor follow what the averages were multiplied by since they were handed out.

        Args:
            lengths: (parameters,) see :class:`~lightning_sparse.engine.optimizers.scaled.Lengths`.
        """
        by, like = self.by, self.like
        if by is None or self.handed is None or (not static_shapes(like.device) and bool((lengths == 1).all())):
            return
        if self.indices is None:
            for span, length in zip(self.spans.values(), lengths, strict=True):
                self.memory.lengthen_(by[span], length)
            return
        _, stops = self.bounds
        of_each = torch.cat([lengths, lengths.new_ones(1)])[torch.searchsorted(stops, self.indices, right=True)]
        self.memory.lengthen_(by, of_each)

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
