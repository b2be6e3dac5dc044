"""UnionTopK: SharedTopK with indices of exclusive stripes, which fill the union of all selections to k coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect, is_number
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.ops import (
    Number,
    divisor,
    either,
    greater,
    lesser,
    on_device,
    static_shapes,
    top_k_and_stripe,
    whole,
)

WINDOW = 64
"""Steps of the window over which the largest need for spare indices is taken; it counts for one more window."""
MARGIN = 0.05
"""Share of k that is selected beyond the largest need: more than k coordinates cost bytes, fewer waste the density."""


class FillState(NamedTuple):
    """State that decides the number of spare indices; equal on all ranks. Needs are shares of k, in [0, 1].

    Python's numbers; () float64 tensors from the first step on whose union only a device knew.
    """

    fill: Number
    """Spare indices of all ranks together in the latest step, as a share of k."""
    wanted: Number
    """k of the latest step."""
    now: Number
    """Largest need in this window of steps."""
    before: Number
    """Largest need in the window before."""
    age: Number
    """Steps in this window so far."""


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

    A rank selects ``ceil(k/n) + ceil(c k/n)`` coordinates, at most ``2 ceil(k/n)``. On CUDA the host is told the union
    of a step together with whether it counts. Where it is not told, as in :func:`~lightning_sparse.simulate`, messages
    always have the length of the latter.

    At a density of 0.001 this trains better than all published methods of equal traffic, with momentum SGD and 8 ranks;
    at 0.01, on text, too (``docs/reports/equal-bytes.md``):
    every rank contributes its largest coordinates at every step, and the full budget is used.

    Formula:
        ``S_i = argtop_(k/n) |acc_i|`` and the ``c k/n`` largest others j with ``j = i - t (mod n)``; ``update[U] =
        (1/n) sum_i acc_i[U]``, U the union of the S_i, filled to k

    Args:
        max_factor: largest number of selected indices of a rank in multiples of k/n, at least 1. With 2 the union can
            always be filled to k, and more changes nothing; with 1, which is SharedTopK, overlap makes it fall short.

    Raises:
        ValueError: if ``max_factor`` is below 1 or not finite.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> g = torch.Generator().manual_seed(0)
        >>> stream = 4 * torch.randn(20, 1, 10_000, generator=g) + torch.randn(20, 4, 10_000, generator=g)
        >>> for shared in ls.simulate(stream, sparsifier="shared_top_k", density=0.01):
        ...     pass
        >>> for union in ls.simulate(stream, sparsifier="union_top_k", density=0.01):
        ...     pass
        >>> shared.density < 0.0095 < union.density == 0.01
        True

    References:
        Ours.
    """

    max_factor: float = 2.0

    name: ClassVar[str] = "union_top_k"
    agreement: ClassVar[Agreement] = Agreement.SHARED
    exchange: ClassVar[str] = "packed_union"
    reads_runs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        finite = is_number(self.max_factor) and 1 <= self.max_factor < math.inf
        expect(finite, "max_factor", "a finite number of at least 1", self.max_factor)

    @property
    def _most(self) -> float:
        """Largest c."""
        return min(1.0, self.max_factor - 1)

    def init(self, numel: int, world_size: int, density: float, device: torch.device) -> FillState:
        """Return the state with the most spare indices, until the need of 64 steps is known."""
        most = float(self._most)
        return FillState(most, float(count(density, numel)), 0.0, most, 0.0)

    def select(self, acc: Tensor, state: FillState, ctx: Context) -> tuple[Selection, FillState]:
        """Select the k/n largest, and spare ones of the own stripe."""
        numel, n = acc.numel(), ctx.world_size
        k, turn = count(ctx.density, numel), (ctx.rank - ctx.step) % n
        after, own, wanted = self._follow(state, ctx, k, turn, acc.device)
        share, slots = (k + turn) // n, -(-k // n)  # over n ranks the shares add up to k
        # Spare indices go round in the opposite order of the shares; a single rank has no overlap.
        room = 0 if n == 1 else int((wanted * k + n - 1) / n)
        indices, spares, picks = top_k_and_stripe(acc, share, own, turn, n, ctx.candidates, slots + room)
        return Selection(indices, picks, aligned=True, limit=k, spare=spares), after

    def _follow(
        self, state: FillState, ctx: Context, k: int, turn: int, device: torch.device
    ) -> tuple[FillState, Any, float]:
        """Update the need from the previous step.

        Returns:
            The next state; this rank's number of spare indices, a () int64 tensor on a device; and a share of k that
            spare indices of all ranks do not exceed.
        """
        n, facts, union = ctx.world_size, (self._most, MARGIN, WINDOW), ctx.union
        known = ctx.told
        if union is not None and not static_shapes(union.device):
            known = int(union)
        if (union is None or known is not None) and not isinstance(state.fill, Tensor):
            after, own = _followed(state, known, k, turn, n, *facts)
            own = torch.full((), own, dtype=torch.int64, device=device) if static_shapes(device) else own
            first = union is None and static_shapes(device)  # nobody knows yet whether the host will be told
            return FillState(*map(float, after)), own, self._most if first else after[0]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        state = FillState(*(x if isinstance(x, Tensor) else torch.full_like(zero, x) for x in state))
        after, own = on_device.need(_followed, state, union, k, turn, n, *facts)
        return FillState(*after), own, self._most


def _followed(
    state: Sequence[Number], union: Number | None, k: int, turn: int, n: int, most: float, margin: float, window: int
) -> tuple[Sequence[Number], Number]:
    """Follow the need, in numbers; see :meth:`UnionTopK.select`.

    Args:
        state: the five of :class:`FillState`.
        union: coordinates that were named in the step before, at most 0 where only the device knows that there was
            none; None: there was none.
        k: coordinates that are wanted.
        turn: which stripe is this rank's.
        n: number of ranks; a single one has no overlap.
        most: largest fill.
        margin: added to the need, as a share of k.
        window: steps after which a need begins to be forgotten.

    Returns:
        The next five numbers, and how many spare indices this rank makes.
    """
    fill, wanted, now, before, age = state
    after = fill, fill * 0 + k, now, before, age
    if union is not None:
        age, surplus = age + 1, (union - wanted) / divisor(wanted)
        now = greater(now, lesser(either(surplus < 0, 2 * fill, fill - surplus), 1.0))
        full, counts = age >= window, union > 0
        before = either(full, now, before)
        fill = lesser(greater(before, now) + margin + 1 / k, most)
        moved = fill, after[1], either(full, 0.0, now), before, either(full, 0.0, age)
        after = tuple(either(counts, new, old) for new, old in zip(moved, state, strict=True))
    share = after[0] * (n > 1) * k + n - 1 - turn
    # By a tensor: torch multiplies by the reciprocal of a number on CUDA, and kernels divide.
    return after, whole(share / (torch.full_like(share, n) if isinstance(share, Tensor) else n))
