"""Clipping of each rank's gradients before they are accumulated, in place of averages that have waited."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.core.checks import check_positive, expect
from lightning_sparse.engine.optimizers.around_steps import AroundSteps
from lightning_sparse.methods.memory.clip import joint_norm

ALGORITHMS = ("norm", "value")


class Clipping(NamedTuple):
    """What gradients are clipped to.

    A limit c is meant for the average over n ranks. Of n independent gradients it is about ``sqrt(n)`` times shorter
    than each of them, so that each rank's own norm, or each of its values, is clipped to ``sqrt(n) c``, as in DGC.
    """

    limit: float
    algorithm: str = "norm"

    def check(self) -> None:
        """Raise unless this can be done.

        Raises:
            ValueError: saying what came.
        """
        check_positive(self.limit, "limit")
        expect(self.algorithm in ALGORITHMS, "algorithm", "'norm' or 'value'", self.algorithm)

    def apply_(self, pieces: Sequence[Tensor], world_size: int, share: float, scale: Tensor | None) -> None:
        """Clip this rank's gradients in place; gradients that are not finite are left to be found later.

        Args:
            pieces: that are clipped together.
            world_size: n.
            share: of all coordinates, that the pieces have; their norm is clipped to ``sqrt(share)`` of the limit.
            scale: () of the loss, which gradients still have.
        """
        if not pieces:
            return
        limit = self.limit * math.sqrt(world_size) * (1.0 if scale is None else scale.double())
        if self.algorithm == "value":
            for piece in pieces:
                # Made on the device: copying it there would make the host wait.
                bound = (torch.ones((), dtype=torch.float64, device=piece.device) * limit).to(piece.dtype)
                piece.copy_(torch.where(piece.isfinite(), piece.clamp(-bound, bound), piece))
            return
        whole = joint_norm(pieces)
        shrink = torch.where(whole.isfinite(), (limit * math.sqrt(share) / whole).clamp(max=1.0), 1.0)
        for piece in pieces:
            piece.mul_(shrink.to(piece.dtype))


class Asked(AroundSteps):
    """Notices where clipping is not asked for any more: an optimizer steps without, and once was enough to begin.

    Args:
        names: of parameters, by id.
        goes_on: whether gradients of an optimizer, given by its id, are clipped.
        applies: whether an optimizer is about to apply averages of a backward, for the first time.
        stop: is given the id of an optimizer that applies them unasked.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        goes_on: Callable[[int], bool],
        applies: Callable[[Optimizer], bool],
        stop: Callable[[int], None],
    ) -> None:
        super().__init__(names)
        self._goes_on, self._applies, self._stop = goes_on, applies, stop
        self._asked: set[int] = set()

    def note(self, key: int) -> None:
        """Clipping was asked for since an optimizer, given by its id, has stepped."""
        self._asked.add(key)

    def before(self, optimizer: Optimizer) -> None:
        """What was asked for has been, for this step."""
        key = id(optimizer)
        if key in self._asked:
            self._asked.remove(key)
        elif self._goes_on(key) and self._applies(optimizer):
            self._stop(key)
