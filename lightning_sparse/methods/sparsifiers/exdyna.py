"""ExDyna: MiCRO's exclusive ranges, cut into blocks that move between neighbours until all ranks send equally much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, expect, is_number
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

PUBLISHED_BLOCKS = 1024


class Partition(NamedTuple):
    """Ranges of the ranks; equal on all ranks."""

    blocks: Tensor
    """(n,) int64: number of blocks in each range."""
    first: Tensor
    """(n,) int64: first block of each range."""
    threshold: Tensor | None
    """() float64, published variant only."""
    step: Tensor
    """() int64: the step that used these ranges, which assigns the ranks' counts to ranges."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class ExDyna(Sparsifier):
    """Exclusive ranges of movable size: like :class:`.MiCRO`, and balanced.

    The group is cut into ``num_blocks`` blocks, each of the n ranges is a run of blocks, and rank i searches range
    ``(t + i) mod n``. Before each step but the first, the counts of the step before decide if blocks move between
    neighbouring ranges: if one of two neighbours sent more than ``alpha`` times the mean and the other less than
    ``1/alpha`` of it, ``move`` blocks go from the first to the second, unless that would leave a range with fewer than
    a quarter of its fair share of blocks. The pairs are visited in order, each with the expected effect of the
    previous moves (algorithm 3).

    Formula:
        ``S_i``: the ``k_i`` largest ``|acc_i[j]|`` with j in range ``(t + i) mod n``, ``sum_i k_i = k`` (published: all
        that reach a common threshold); ``update[U] = (1/n) sum_i acc_i[U]``, U the union of the S_i

    Differs from the paper:
        Two rules, as in MiCRO:

        - ``variant="corrected"`` (default): the common threshold comes from shared order statistics, so that exactly k
          coordinates are sent in each step, at most 2 k/n by one rank. Blocks are multiples of 32 coordinates if the
          group is large enough for at least 4 n of them and smaller otherwise; the last block is short, so that no
          range has a remainder; the mean is not rounded down.
        - ``variant="published"``: the released code: controller of 0.5 % a step from ``1 / (2 sqrt(k))``, exactly
          ``num_blocks`` blocks with the remainder appended to the last range, the mean rounded down, forced
          coordinates.

    Args:
        alpha: imbalance that makes blocks move, above 1.
        num_blocks: number of blocks in a group, at least 1. None: 1024 in the published variant, as in its code, and
            ``max(128, 16 n)`` in the corrected one: one block a step has no visible effect on a range of 256 blocks.
        move: blocks that move at once, at least 1.
        variant: "corrected" or "published".
        beta: published only: width of the density band, above 1.
        gamma: published only: gain of the controller per step, in (0, 1).

    Raises:
        ValueError: for a setting outside its range; at the first step, published only, for a group of fewer than
            ``32 * num_blocks`` coordinates (its blocks would be empty), fewer blocks than ranks, or
            ``density * numel < 1``.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> scale = torch.linspace(0.5, 1.5, 20_000)                     # later layers have larger gradients
        >>> stream = scale * torch.randn(60, 2, 20_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier="exdyna", density=0.01))
        >>> steps[0].padding_ratio > 1.5, steps[-1].padding_ratio < 1.3, steps[-1].density
        (True, True, 0.01)

    References:
        Yoon, Oh, Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning,
        CCGrid 2024, arXiv 2402.13781, algorithms 2-4. Minus signs that Algorithm 3 lacks are those of the released
        code.
    """

    alpha: float = 1.05
    num_blocks: int | None = None
    move: int = 1
    variant: Literal["corrected", "published"] = "corrected"
    beta: float = 1.1
    gamma: float = 0.005

    name: ClassVar[str] = "exdyna"
    agreement: ClassVar[Agreement] = Agreement.DISJOINT
    exchange: ClassVar[str] = "reduce_union"

    def __post_init__(self) -> None:
        check_variant(self.variant)
        check_controller(self.beta, self.gamma)
        held = is_number(self.alpha) and self.alpha > 1
        expect(held, "alpha, the tolerated imbalance,", "above 1", self.alpha)
        for name, value in (("num_blocks", 1 if self.num_blocks is None else self.num_blocks), ("move", self.move)):
            check_integer(value, name)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> Partition:
        """Return ranges of equal numbers of blocks."""
        size, blocks = self.layout(numel, world_size)
        threshold = None
        if self.variant == "published":
            if size == 0 or blocks < world_size:
                raise ValueError(
                    f"ExDyna(variant='published') needs groups of at least {32 * blocks} coordinates (32 for "
                    f"each of its {blocks} blocks) and at least one block per rank, but got {numel} "
                    f"coordinates for {world_size} ranks. Use larger groups, fewer num_blocks or variant='corrected'."
                )
            threshold = initial_threshold(density, numel, device, "ExDyna")
        part = torch.arange(world_size, device=device)
        share = blocks // world_size + (part < blocks % world_size).long()
        return Partition(share, share.cumsum(0) - share, threshold, step=torch.zeros_like(part[0]))

    def select(self, acc: Tensor, state: Partition, ctx: Context) -> Steps[Selected]:
        """Move blocks, then select within the own range."""
        state = self._rebalanced(acc.numel(), state, ctx)
        spans = self.ranges(acc.numel(), state, ctx)
        if state.threshold is None:
            return (yield from pick_jointly(acc, spans, count(ctx.density, acc.numel()), ctx)), state
        first, last = spans[ctx.rank]
        given = (first, last), acc.numel(), ctx, self.beta, self.gamma
        selection, kept = pick_by_controller(acc, state.threshold, *given)
        return selection, state._replace(threshold=kept)

    def ranges(self, numel: int, state: Partition, ctx: Context) -> Tensor:
        """Return the ranges by rank: rank i has range ``(t + i) mod n``."""
        n = ctx.world_size
        size, blocks = self.layout(numel, n)
        own = (ctx.step + torch.arange(n, device=state.first.device)) % n
        first, last = state.first[own], state.first[own] + state.blocks[own]
        bounds = torch.stack([first * size, torch.where(last == blocks, numel, last * size)], dim=1)
        return bounds.clamp(max=numel)  # the last block is short, and ranges are empty if ranks outnumber blocks

    def layout(self, numel: int, world_size: int) -> tuple[int, int]:
        """Return the coordinates per block, and the number of blocks (the last one ends with the group)."""
        if self.variant == "published":
            wanted = self.num_blocks or PUBLISHED_BLOCKS
            return 32 * (numel // wanted // 32), wanted
        wanted = self.num_blocks or max(128, 16 * world_size)
        size = 32 * max(1, numel // (32 * wanted))
        if math.ceil(numel / size) < 4 * world_size:
            size = max(1, numel // (4 * world_size))
        return size, math.ceil(numel / size)

    def _rebalanced(self, numel: int, state: Partition, ctx: Context) -> Partition:
        """Apply algorithm 3 to the counts of the step that used these ranges."""
        now = state._replace(step=torch.full_like(state.step, ctx.step))
        if ctx.counts is None:
            return now
        n = ctx.world_size
        size, blocks = self.layout(numel, n)
        least = blocks / (4 * n)
        owner = (state.step + torch.arange(n, device=ctx.counts.device)) % n
        load = torch.empty_like(ctx.counts)
        load[owner] = ctx.counts
        low = round(1 / self.alpha, 5) if self.variant == "published" else 1 / self.alpha  # released: 0.95238
        blocks_moved, first = self._move(state, load, numel, size, low, least)
        return now._replace(blocks=blocks_moved, first=first)

    def _move(
        self, state: Partition, load: Tensor, numel: int, size: int, low: float, least: float
    ) -> tuple[Tensor, Tensor]:
        """Move blocks between neighbours, pair after pair in the paper, here all pairs at once.

        Each move changes what its pair is expected to send by ``floor(move size sum(load) / numel)``. So the move of a
        pair depends only on the move of the pair before, which is to the left, none, or to the right. A table has the
        move for each of these three cases. The tables are then applied one after another.
        """
        blocks, load, move = state.blocks, load.double(), min(self.move, numel)
        total = load.sum()
        mean = total / len(load)
        mean = mean.floor() if self.variant == "published" else mean
        expected = torch.floor(move * size * (total / numel))
        before = torch.arange(-1, 2, device=load.device)  # move of the pair before, in units of ``move``
        left = (load[:-1, None] - before * expected) / mean  # no move for 0/0, which is NaN
        right = load[1:, None] / mean
        given, taken = (
            blocks[:-1, None] - before * move - move >= least,
            blocks[1:, None] - move >= least,
        )
        table = ((left < low) & (right > self.alpha) & taken).long() - (
            (left > self.alpha) & (right < low) & given
        ).long()
        moves = _followed(table + 1)[:, 1] - 1  # nothing moves before the first pair
        shift = torch.nn.functional.pad(moves * move, (1, 1))
        return blocks + shift[1:] - shift[:-1], state.first + shift[:-1]


def _followed(tables: Tensor) -> Tensor:
    """Return (p, 3) compositions of the first tables, each applied to the result of the one before; by doubling.

    Example:
        >>> _followed(torch.tensor([[0, 0, 2], [2, 1, 1], [1, 1, 0]]))
        tensor([[0, 0, 2],
                [2, 2, 1],
                [0, 0, 1]])
    """
    distance = 1
    while distance < len(tables):
        tables = torch.cat([tables[:distance], tables[distance:].gather(1, tables[:-distance])])
        distance *= 2
    return tables
