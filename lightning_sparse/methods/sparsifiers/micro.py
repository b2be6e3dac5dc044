"""MiCRO: each rank selects in its own range, ranges rotate, one threshold for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Agreement, Context
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Selected, Sparsifier
from lightning_sparse.methods.sparsifiers.estimation import (
    check_controller,
    check_variant,
    initial_threshold,
    pick_by_controller,
    pick_jointly,
)


@SPARSIFIERS.register
@dataclass(frozen=True)
class MiCRO(Sparsifier):
    """Exclusive ranges: rank i selects from range ``(t + i) mod n`` of n nearly equal ones, by a common threshold.

    No coordinate is selected twice, so the union is as large as
    all selections together (no build-up), and each rank searches only numel/n coordinates; every rank searches every
    coordinate once in n steps.

    Formula:
        ``S_i``: the ``k_i`` largest ``|acc_i[j]|`` with j in range ``(t + i) mod n``, ``sum_i k_i = k`` (published: all
        that reach a common threshold); ``update[U] = (1/n) sum_i acc_i[U]``, U the union of the S_i

    Differs from the paper:
        Two rules for the threshold:

        - ``variant="corrected"`` (default): in each step, ranks share 8 to 32 order statistics of their ranges before
          they select (in place of the counts, which are then known). From these they estimate the threshold that k
          coordinates of all ranges reach, and how many each range has above it: its ``k_i <= ceil(2 k/n)``. The
          threshold is approximate, the sum of the ``k_i`` is k. It follows the gradients' scale at once and has no
          start-up phase.
        - ``variant="published"``: the released code's controller. The threshold starts at ``1 / (2 sqrt(k))`` for any
          scale of the gradients. With q = (coordinates of all ranks) / k, a step multiplies it by ``1 + gamma`` if
          ``q > beta``, by ``1 + gamma/4`` if ``q > 1/beta``, and else by ``1 - gamma``. On made-up gradients it settles
          at q of about 0.94, after up to 34 times the target at first. A rank that finds nothing sends one forced
          coordinate. ``k = int(density * numel)``. On CUDA a rank sends at most 4 k/n, more are thinned evenly.

    Args:
        variant: "corrected" or "published".
        beta: published only: width of the band around the target, above 1.
        gamma: published only: gain of the controller per step, in (0, 1).

    Raises:
        ValueError: for an unknown variant or a beta or gamma outside its range; at the first step, published only, if
            the group is smaller than the number of ranks or ``density * numel < 1``.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(30, 4, 10_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier=ls.sparsifiers.MiCRO(), density=0.01))
        >>> steps[0].density, steps[29].density, steps[29].build_up
        (0.01, 0.01, 1.0)
        >>> published = list(ls.simulate(stream, sparsifier=ls.sparsifiers.MiCRO(variant="published"), density=0.01))
        >>> published[29].density > 0.1
        True

    References:
        Yoon, Oh, MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN Training,
        HiPC 2023, arXiv 2310.00967, algorithm 1. The paper leaves the threshold rule open; the published variant is
        that of its released code.
    """

    variant: Literal["corrected", "published"] = "corrected"
    beta: float = 1.1
    gamma: float = 0.005

    name: ClassVar[str] = "micro"
    agreement: ClassVar[Agreement] = Agreement.DISJOINT
    exchange: ClassVar[str] = "reduce_union"

    def __post_init__(self) -> None:
        check_variant(self.variant)
        check_controller(self.beta, self.gamma)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> Tensor | None:
        """Return the threshold, () float64, in the published variant, and None in the corrected one."""
        if self.variant == "corrected":
            return None
        if numel < world_size:
            raise ValueError(
                f"MiCRO(variant='published') needs at least one coordinate per rank, but a group has {numel} for "
                f"{world_size} ranks. Use larger groups or variant='corrected'."
            )
        return initial_threshold(density, numel, device, "MiCRO")

    def select(self, acc: Tensor, state: Tensor | None, ctx: Context) -> Steps[Selected]:
        """Select within the own range."""
        if self.variant == "corrected":
            numel, n, place = acc.numel(), ctx.world_size, (ctx.step + ctx.rank) % ctx.world_size
            first, last = (part * (numel // n) + min(part, numel % n) for part in (place, place + 1))
            spans = _spans(numel, ctx, acc.device)
            return (yield from pick_jointly(acc, spans, count(ctx.density, numel), ctx, (first, last))), None
        assert state is not None
        first, last = self.ranges(acc.numel(), state, ctx)[ctx.rank].tolist()
        longest = -(-acc.numel() // ctx.world_size)
        return pick_by_controller(acc, state, (first, last), longest, ctx, self.beta, self.gamma)

    def ranges(self, numel: int, state: Tensor | None, ctx: Context) -> Tensor:
        """Return ranges of ``numel // n`` coordinates, one more in the first ``numel mod n``; always on the CPU."""
        return _spans(numel, ctx, torch.device("cpu"))


def _spans(numel: int, ctx: Context, device: torch.device) -> Tensor:
    n = ctx.world_size
    part = torch.arange(n + 1, device=device)
    bounds = part * (numel // n) + part.clamp(max=numel % n)
    return bounds.unfold(0, 2, 1).roll(-ctx.step % n, 0)
