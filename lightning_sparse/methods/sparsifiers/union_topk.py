"""UnionTopK: SharedTopK with indices of exclusive stripes, which fill the union of all selections to k coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect, is_number
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.ops import (
    divisor,
    either,
    greater,
    known,
    lesser,
    pad,
    static_shapes,
    strongest,
    tensor,
    top_k_and_stripe,
)

WINDOW = 64
"""Steps of the window over which the largest need for spare indices is taken; it counts for one more window."""
MARGIN = 0.05
"""Share of k that is selected beyond the largest need: more than k coordinates cost bytes, fewer waste the density."""


class FillState(NamedTuple):
    """State that decides the number of spare indices; equal on all ranks. Needs are shares of k, in [0, 1]."""

    fill: Tensor
    """() float64: spare indices of all ranks together in the latest step, as a share of k."""
    wanted: Tensor
    """() float64: k of the latest step."""
    now: Tensor
    """() float64: largest need in this window of steps."""
    before: Tensor
    """() float64: largest need in the window before."""
    age: Tensor
    """() float64: steps in this window so far."""


@SPARSIFIERS.register
@dataclass(frozen=True)
class UnionTopK(Sparsifier):
    """Each rank selects its k/n largest coordinates of the whole group, and spare ones that fill the union to k.

    SharedTopK stops at the k/n largest: if ranks select the same coordinates, their union falls short of k, by 15 % in
    small networks at density 0.001, and down to k/n if all ranks select the same. Here rank i also selects the
    ``c k/n`` largest of the other coordinates of its *stripe*, which are the coordinates j with ``j = i - t (mod n)``
    in step t. Stripes are disjoint, so that with c = 1 the union always holds k coordinates. Spare indices that are
    not needed are left out, evenly over the group and others in each step; their values stay in the residuals.

    All ranks know the need after the exchange of indices: ``need = k - |union of the largest|``. c k is the largest
    need of the latest 64 to 128 steps plus 5 % of k, and k in the first 64 steps: the overlap of ranks varies from
    step to step, because common coordinates are sent by all and then grow again. If the union still falls short of k
    in a step, c is doubled after it. None of this needs messages. Fractions of an index go to the ranks in turns.

    A rank selects ``ceil(k/n) + ceil(c k/n)`` coordinates, at most ``2 ceil(k/n)``. On CUDA the message has the length
    of the latter at every step.

    In closed loops this trains better than all published methods of equal traffic (``docs/comparison.md``): every rank
    contributes its largest coordinates at every step, and the full budget is used.

    Args:
        max_factor: largest number of selected indices of a rank in multiples of k/n, at least 1. With 2 the union can
            always be filled to k, and more changes nothing; with 1, which is SharedTopK, overlap makes it fall short.

    Raises:
        ValueError: if ``max_factor`` is below 1 or not finite.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> g = torch.Generator().manual_seed(0)
        >>> stream = 4 * torch.randn(20, 1, 10_000, generator=g) + torch.randn(20, 4, 10_000, generator=g)
        >>> for shared in ls.simulate(stream, sparsifier="shared_topk", density=0.01):
        ...     pass
        >>> for union in ls.simulate(stream, sparsifier="union_topk", density=0.01):
        ...     pass
        >>> shared.density < 0.0095 < union.density == 0.01
        True

    References:
        Ours.
    """

    max_factor: float = 2.0

    name: ClassVar[str] = "union_topk"
    agreement: ClassVar[Agreement] = Agreement.SHARED
    exchange: ClassVar[str] = "packed_union"

    def __post_init__(self) -> None:
        finite = is_number(self.max_factor) and 1 <= self.max_factor < math.inf
        expect(finite, "max_factor", "a finite number of at least 1", self.max_factor)

    @property
    def _most(self) -> float:
        """Largest c."""
        return min(1.0, self.max_factor - 1)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> FillState:
        """Return the state with the most spare indices, until the need of 64 steps is known."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        most = zero + self._most
        return FillState(most, zero + count(density, numel), zero, most, zero)

    def select(self, acc: Tensor, state: FillState, ctx: Context) -> tuple[Selection, FillState]:
        """Select the k/n largest, and spare ones of the own stripe."""
        numel, n = acc.numel(), ctx.world_size
        k, turn = count(ctx.density, numel), (ctx.rank - ctx.step) % n
        after, most = self._follow(state, ctx, k), self._most
        share, slots = (k + turn) // n, -(-k // n)  # over n ranks the shares add up to k
        # Spare indices go round in the opposite order of the shares; a single rank has no overlap.
        if static_shapes(acc.device):
            fill = after.fill
            if n == 1:
                most, fill = 0.0, torch.zeros_like(fill)
            # By a tensor: torch multiplies by the reciprocal of a number on CUDA, and kernels divide.
            spare = torch.floor((fill * k + n - 1 - turn) / torch.full_like(fill, n)).long()
            room = math.floor((most * k + n - 1) / n)
            # Shares differ by one, and a stripe may have no other coordinates left.
            keys = pad(_pick_static(acc, share, spare, room, turn, n), slots + room, 2 * numel)
            indices, spares = keys >> 1, (keys & 1).bool()
            picks = (indices < numel).sum()
        else:
            wanted = 0.0 if n == 1 else float(after.fill)
            room = int((wanted * k + n - 1) / n)
            own = int((wanted * k + n - 1 - turn) / n)
            indices, spares = top_k_and_stripe(acc, share, own, turn, n, ctx.candidates)
            picks = torch.tensor(indices.numel(), device="cpu")
            indices, spares = pad(indices, slots + room, numel), pad(spares, slots + room, False)
        return Selection(indices, picks, aligned=True, limit=k, spare=spares), after

    def _follow(self, state: FillState, ctx: Context, k: int) -> FillState:
        """Update the need from the previous step, and return the state with the next number of spare indices."""
        if ctx.union is None:
            return state._replace(wanted=torch.full_like(state.wanted, k))
        fill, wanted, now, before, age = map(known, state)
        union, age = known(ctx.union), age + 1
        surplus = (union - wanted) / divisor(wanted)
        now = greater(now, lesser(either(surplus < 0, 2 * fill, fill - surplus), 1.0))
        full, counts = age >= WINDOW, union > 0
        before = either(full, now, before)
        fill = lesser(greater(before, now) + MARGIN + 1 / k, self._most)
        moved = fill, k, either(full, 0.0, now), before, either(full, 0.0, age)
        return FillState(*(tensor(either(counts, new, old)) for new, old in zip(moved, state, strict=True)))


def _pick_static(acc: Tensor, share: int, spare: Tensor, room: int, turn: int, n: int) -> Tensor:
    """Compute :func:`~lightning_sparse.ops.top_k_and_stripe` with ``room`` slots for spare indices, then padding."""
    numel = acc.numel()
    first = strongest(acc, share)[1] if share else torch.empty(0, dtype=torch.int64, device=acc.device)
    if not room:
        return 2 * first.sort().values
    stripe = acc[turn::n]
    owned = stripe.numel()
    taken = torch.zeros(owned + 1, dtype=torch.bool, device=acc.device)  # one more slot for indices of other stripes
    taken.index_fill_(0, torch.where(first % n == turn, first // n, owned), True)
    magnitudes, places = strongest(stripe, min(room, owned), taken[:owned], share)
    left_out = (torch.arange(places.numel(), device=acc.device) >= spare) | (magnitudes < 0)
    own = torch.where(left_out, 2 * numel, places * (2 * n) + (2 * turn + 1))
    keys = torch.cat([2 * first, own])
    return keys.int().sort().values.long() if 2 * numel < 2**31 else keys.sort().values
