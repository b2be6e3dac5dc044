"""Clipping of each rank's gradients before they are accumulated, in place of averages that have waited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_sparse.checks import check_positive, expect
from lightning_sparse.memory.clip import norm

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
        whole = torch.linalg.vector_norm(torch.stack([norm(piece) for piece in pieces]))
        shrink = torch.where(whole.isfinite(), (limit * math.sqrt(share) / whole).clamp(max=1.0), 1.0)
        for piece in pieces:
            piece.mul_(shrink.to(piece.dtype))
