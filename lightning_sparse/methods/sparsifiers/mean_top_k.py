"""MeanTopK: half of the coordinates by a rank's own values, half by what codes of all ranks say of the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import InRuns
from lightning_sparse.core.messages import AllToAll, Steps
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Selected
from lightning_sparse.methods.sparsifiers.union_top_k import FillState, UnionTopK
from lightning_sparse.ops import pad, top_k

OWN = 0.5
"""Share of k that ranks select by their own values."""
LOOKED_AT = 0.17
"""A step looks at every T-th coordinate, and T is the odd number next to this over the density."""
BLOCK = 256
"""Coordinates of a stripe that have one owner, and one root mean square."""
LEAST = 64
"""Coordinates of an owner in a step; where it has fewer, the group is selected from as by UnionTopK."""
PER_BYTE = 4
"""Codes in a byte."""
LEVELS = 0.4528, 1.5104
"""Values that codes stand for, in units of the root mean square of a block: the two means of a normal distribution's
halves that leave the smallest error (Max 1960)."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class MeanTopK(UnionTopK):
    """Ranks select half of k by their own values, and half by what codes of two bits say of the mean of all.

    Where gradients are mostly noise, what is largest on one rank says little of the mean: with 8 ranks, the union of
    their selections holds 14 % of what the k coordinates with the largest means hold, and random ones hold 8 %
    (``docs/reports/causes.md``). So each step looks at every T-th coordinate, in turns, T the odd number next to
    ``0.17 / density``. Of each value there, a rank sends the sign, and whether it is large, to the coordinate's
    *owner*. The owner adds up what all have sent, and selects the largest sums. T steps look at all coordinates. Large
    values cannot wait so long: that is why each rank selects half of its share from all coordinates, as
    :class:`UnionTopK` does.

    With 8 ranks, a GPT on characters ends 0.03 behind dense training at four times its script's rate, in nats, and
    UnionTopK 0.07 (one seed), with a fifth fewer bytes. Models of words end further behind than with UnionTopK,
    perhaps because each rank has gradients in few rows of their embeddings.

    Coordinates lie in blocks of 256, which ranks own in turns. *Large* is what is beyond the root mean square of the
    rank's values in the block, which it sends, too.

    The union is filled to k as that of UnionTopK, and what is selected by the mean are the spare coordinates. The
    messages are those of UnionTopK, and before them an all-to-all of ``2.1 numel / T`` bits. A single rank
    selects as UnionTopK does, and so do all in groups of fewer than about ``64 n T`` coordinates.

    Formula:
        ``S_i = argtop_(k/2n) |acc_i|`` and the largest others of ``|acc_i[j] + sum_(l != i) code(acc_l[j])|``
        among own j with ``j = t (mod T)``; ``update[U] = (1/n) sum_i acc_i[U]``, U the union of the S_i, filled to k

    Args:
        max_factor: as that of :class:`UnionTopK`.

    Raises:
        ValueError: if ``max_factor`` is below 1 or not finite.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(60, 8, 10_000, generator=torch.Generator().manual_seed(0))
        >>> waiting = {}
        >>> for name in ("union_top_k", "mean_top_k"):
        ...     sent = sum(step.update for step in ls.simulate(stream, sparsifier=name, density=0.01))
        ...     waiting[name] = float((stream.mean(1).sum(0) - sent).square().sum())
        >>> waiting["mean_top_k"] < 0.9 * waiting["union_top_k"]
        True

    References:
        Ours. Levels: Max, Quantizing for Minimum Distortion, IRE Transactions on Information Theory 6(1), 1960.
    """

    name: ClassVar[str] = "mean_top_k"
    reads_runs: ClassVar[bool] = True

    @property
    def _most(self) -> float:
        """Largest c."""
        return min(1.0, self.max_factor - OWN)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> FillState:
        """Return the state with more spare indices than the mean's share, until the need of 64 steps is known."""
        if not Stripe.of(numel, Context(0, density, 0, world_size)).is_coded:
            return UnionTopK(self.max_factor).init(numel, world_size, density, device)
        state = super().init(numel, world_size, density, device)
        first = min((1 - OWN) * 1.5 + 1 / state.wanted, self._most)
        return state._replace(fill=first, before=first)

    def select(self, acc: Tensor, state: FillState, ctx: Context) -> Selected | Steps[Selected]:  # type: ignore[override]
        """Select the largest, send codes, and select among own coordinates by the codes of all."""
        stripe = Stripe.of(acc.numel(), ctx)
        if not stripe.is_coded:
            return UnionTopK(self.max_factor).select(acc, state, ctx)
        return self._select(acc, state, ctx, stripe)

    def _select(self, acc: Tensor, state: FillState, ctx: Context, stripe: Stripe) -> Steps[Selected]:
        numel, n = acc.numel(), ctx.world_size
        k, turn = count(ctx.density, numel), (ctx.rank - ctx.step) % n
        after, spare = self._follow(state, ctx, k, turn, acc.device)
        own = math.ceil(OWN * k)
        share, slots = (own + turn) // n, -(-own // n)
        room = int((after.fill * k + n - 1) / n)
        # All that is read of the accumulator is read before the message: other groups work meanwhile.
        first = top_k(acc, share, ctx.candidates) if share else torch.empty(0, dtype=torch.int64, device=acc.device)
        values = stripe.by_owner(acc)
        rows = yield AllToAll(encoded(values, ctx.rank))
        places, taken = stripe.places(ctx.rank, acc.device), stripe.mask(first, ctx.rank)
        magnitudes = estimated(values[ctx.rank], rows, ctx.rank).abs().flatten()
        magnitudes.masked_fill_(taken | (places >= numel), -1.0)
        top = torch.topk(magnitudes, min(room, magnitudes.numel()))
        fits = (torch.arange(top.indices.numel(), device=acc.device) < spare) & (top.values >= 0)
        keys = torch.cat([2 * first, torch.where(fits, 2 * places[top.indices] + 1, 2 * numel)])
        keys = pad(keys.sort().values, slots + room, 2 * numel)
        indices = keys >> 1
        picks = (indices < numel).sum()
        return Selection(indices, picks, aligned=True, limit=k, spare=(keys & 1).bool()), after


class Stripe(NamedTuple):
    """Every T-th coordinate of a group, in blocks that the ranks own in turns."""

    numel: int
    """Coordinates of the group."""
    begin: int
    """The first one of the stripe."""
    apart: int
    """T."""
    ranks: int
    block: int
    """Coordinates of a block, a multiple of 4."""
    blocks: int
    """Of each owner. The last ones may reach beyond the group."""

    @classmethod
    def of(cls, numel: int, ctx: Context) -> Stripe:
        """Return the stripe of a step; blocks are short where the group is."""
        apart = max(1, round((LOOKED_AT / ctx.density - 1) / 2) * 2 + 1)
        n, begin = ctx.world_size, ctx.step % apart
        size = max(0, -(-(numel - begin) // apart))
        block = max(PER_BYTE, min(BLOCK, size // (4 * n) // PER_BYTE * PER_BYTE))
        return cls(numel, begin, apart, n, block, max(1, -(-size // (n * block))))

    @property
    def owned(self) -> int:
        """Coordinates of an owner, with those beyond the group."""
        return self.blocks * self.block

    @property
    def is_coded(self) -> bool:
        """True if the group is selected from by codes, and not as by UnionTopK."""
        return self.ranks > 1 and self.owned >= LEAST

    def by_owner(self, x: Tensor | InRuns) -> Tensor:
        """Return a copy of the values of a (numel,) vector: (ranks, blocks, block), zero beyond the group."""
        values = x.every(self.apart, self.begin) if isinstance(x, InRuns) else x[self.begin :: self.apart]
        whole = pad(values, self.ranks * self.owned, 0)
        return whole.view(self.blocks, self.ranks, self.block).transpose(0, 1).contiguous()

    def places(self, owner: int, device: torch.device) -> Tensor:
        """Return the coordinates of an owner, (blocks * block,) int64 in the order of its values."""
        blocks = torch.arange(owner, self.ranks * self.blocks, self.ranks, device=device)
        inside = blocks[:, None] * self.block + torch.arange(self.block, device=device)
        return inside.flatten() * self.apart + self.begin

    def mask(self, coordinates: Tensor, owner: int) -> Tensor:
        """Return which values of an owner, (blocks * block,), are those of (c,) coordinates of the group."""
        place = (coordinates - self.begin) // self.apart
        number = place // self.block
        own = (coordinates % self.apart == self.begin) & (number % self.ranks == owner)
        place = torch.where(own, number // self.ranks * self.block + place % self.block, self.owned)
        found = torch.zeros(self.owned + 1, dtype=torch.bool, device=coordinates.device)
        return found.index_fill_(0, place, True)[: self.owned]


def encoded(values: Tensor, rank: int) -> Tensor:
    """Return the messages to all owners, (n, bytes) uint8, of (n, blocks, block) values.

    A value has two bits: the high one says that it is positive, the low one that it is beyond the root mean square of
    its block. Zeros are positive or negative in turns, and ranks begin with different ones. Root mean squares follow in
    bfloat16.

    Example:
        >>> encoded(torch.tensor([[[3.0, -1, 1, -3, 0, 0, 0, 0]]]), rank=0)
        tensor([[ 99, 136, 202,  63]], dtype=torch.uint8)
    """
    odd = (torch.arange(values.shape[-1], device=values.device) + rank) % 2 > 0
    up, scale = (values > 0) | ((values == 0) & odd), _scale_of(values)
    squares = (values * scale).square()
    mean = squares.mean(-1, keepdim=True)
    codes = (2 * up.to(torch.uint8) + (squares > mean).to(torch.uint8)).view(len(values), -1, PER_BYTE)
    units = (mean.sqrt() / scale).to(torch.bfloat16).view(len(values), -1)
    return torch.cat([(codes << _shifts(values.device)).sum(-1, dtype=torch.uint8), units.view(torch.uint8)], dim=1)


def _scale_of(values: Tensor) -> Tensor:
    """Return a power of two for each block, so that squares of its values, and their sums, are finite; mostly 1."""
    bits = math.frexp(torch.finfo(values.dtype).max)[1]
    largest = values.abs().amax(-1, keepdim=True)
    return torch.ones_like(largest).masked_fill_(largest > 2.0 ** (bits // 4), 2.0 ** (-bits * 5 // 8))


def estimated(own: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Return estimates of n times the mean, (blocks, block), from the owner's values and the (n, bytes) messages to it.

    Example:
        >>> rows = torch.cat([encoded(x.view(1, 1, 4), 0) for x in torch.tensor([[1.0, -1, 1, 3], [2, 2, 2, -2]])])
        >>> estimated(torch.tensor([[1.0, -1, 1, 3]]), rows, rank=0)
        tensor([[ 1.9056, -0.0944,  1.9056,  2.0944]])
    """
    others = torch.cat([rows[:rank], rows[rank + 1 :]])
    end = own.numel() // PER_BYTE
    units = (
        others[:, end:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    )  # bytes may begin anywhere
    codes = (others[:, :end].unsqueeze(-1) >> _shifts(rows.device)).view(-1, *own.shape) & 3
    low, high = LEVELS
    sizes = (codes & 1) * (high - low) + low
    told = torch.where(codes > 1, sizes, -sizes) * units.unsqueeze(-1)
    return own + told.sum(0)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 8, 8 // PER_BYTE, dtype=torch.uint8, device=device)
