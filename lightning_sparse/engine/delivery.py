"""Facts about averages that step rules of optimizers ask for: where they arrived, and what they are divided by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


class Delivery:
    """Averages of a group from the exchange that made them to the optimizer's step that applies them.

    Args:
        spans: of each parameter in the group.
        indices: (u,) int64 coordinates of the averages, in any order, with padding indices where shapes are static;
            None: all.
        by: (u,) what averages are divided by to be steps of Adam, see
            :meth:`~lightning_sparse.methods.memory.Memory.divisors`; None: nobody divides them.
        memory: of the group.
        ranks: number of ranks that averages are means over.
        bounds: see :func:`bounds_of`.
        like: a tensor of the dtype and on the device of what the group remembers.
        whole: whether there is a gradient's average at every coordinate, as at a density of 1; None: by ``indices``.
        sampler: who looks at averages, of all deliveries of the group; None: one of its own.
    """

    def __init__(
        self,
        spans: Mapping[str, slice],
        indices: Tensor | None,
        by: Tensor | None,
        memory: Memory,
        ranks: int,
        bounds: tuple[Tensor, Tensor],
        like: Tensor,
        whole: bool | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._sampler = Sampler() if sampler is None else sampler
        self.spans, self.indices, self.by, self.ranks = spans, indices, by, ranks
        self.whole = indices is None if whole is None else whole
        self._memory, self._bounds, self._like = memory, bounds, like
        self.handed: Handed | None = None
        """Some of the averages as they were handed out, where they are to be divided; None: nobody can have changed
        them."""

    @property
    def wide(self) -> torch.dtype:
        """Dtype of divisors."""
        return self._like.dtype

    def of_whole(
        self,
        spans: Mapping[str, slice],
        indices: Tensor | None,
        by: Tensor | None,
        bounds: tuple[Tensor, Tensor],
        whole: bool,
    ) -> Delivery:
        """Return the facts about averages of whole parameters, of which these are a part; see the class."""
        return Delivery(spans, indices, by, self._memory, self.ranks, bounds, self._like, whole, self._sampler)

    def sample(self, pieces: Sequence[Tensor], scale: Tensor | None) -> None:
        """Note some of the averages where optimizers will find them, to see later how they were changed.

        Args:
            pieces: flat averages of each parameter.
            scale: () of the loss, which they have; None: none.
        """
        if self.by is not None:
            self.handed = Handed.of(self._bounds, pieces, self.indices, scale, self._sampler)

    def lengthen_(self, lengths: Tensor) -> None:
        """Let the divisor follow what the averages were multiplied by since they were handed out.

        Args:
            lengths: (parameters,) see :class:`~lightning_sparse.engine.optimizers.scaled.Lengths`.
        """
        by, like = self.by, self._like
        if by is None or self.handed is None or (not static_shapes(like.device) and bool((lengths == 1).all())):
            return
        if self.indices is None:
            for span, length in zip(self.spans.values(), lengths, strict=True):
                self._memory.lengthen_(by[span], length)
            return
        _, stops = self._bounds
        of_each = torch.cat([lengths, lengths.new_ones(1)])[torch.searchsorted(stops, self.indices, right=True)]
        self._memory.lengthen_(by, of_each)

    def divisors(self) -> Mapping[str, tuple[Tensor | None, Tensor]]:
        """Return by what the averages of each parameter are divided, and where they arrived in it.

        The coordinates are ascending on a CPU; None: the divisors are of all coordinates, and 1 where none arrived.
        """
        indices, by = self.indices, self.by
        if by is None:
            indices, by = None, self._like.new_ones(max(span.stop for span in self.spans.values()))
        if indices is None or static_shapes(by.device):
            every = spread_divisor(indices, by, max(span.stop for span in self.spans.values()))
            return {name: (None, every[span]) for name, span in self.spans.items()}
        if bool((indices[1:] < indices[:-1]).any()):
            indices, order = indices.sort()
            by = by[order]
        first, last = (torch.searchsorted(indices, bounds).tolist() for bounds in self._bounds)
        return {
            name: (indices[start:stop] - span.start, by[start:stop])
            for (name, span), start, stop in zip(self.spans.items(), first, last, strict=True)
        }

    @property
    def second_decay(self) -> float:
        """Decay of the second moments that averages are divided by."""
        return self._memory.second_decay
