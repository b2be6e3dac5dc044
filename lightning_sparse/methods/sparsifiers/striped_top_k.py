"""StripedTopK: the ranks own blocks of coordinates in turn, and each selects the largest of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.ops import pad, top_k_of_blocks


@SPARSIFIERS.register
@dataclass(frozen=True)
class StripedTopK(Sparsifier):
    """Exclusive like MiCRO, without a threshold: exactly k coordinates at every step, k/n by each rank.

    The group is cut into blocks of ``block`` coordinates; block b belongs to rank ``(b - t) mod n`` in step t. Rank i
    selects the k/n coordinates of largest magnitude among its own blocks (one more for ``k mod n`` of the ranks, in
    turns). As every rank owns a part of every layer, loads are even by construction; selection reads numel/n
    coordinates only. The density error is 0 and f(t) is 1 up to the remainder.

    Blocks are shorter than ``block`` if the group has fewer than four for each rank. A rank that owns less than its
    share selects all it owns, and the others share the rest.

    Formula:
        ``S_i = argtop_(k/n) |acc_i|`` among the blocks b with ``(b - t) mod n = i``; ``update[U] = (1/n) sum_i
        acc_i[U]``, U the union of the S_i

    Args:
        block: coordinates per block, at least 1.

    Raises:
        ValueError: if the block is no positive integer.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(3, 4, 10_000, generator=torch.Generator().manual_seed(0))
        >>> steps = list(ls.simulate(stream, sparsifier="striped_top_k", density=0.01))
        >>> [(step.density, step.padding_ratio) for step in steps]
        [(0.01, 1.0), (0.01, 1.0), (0.01, 1.0)]

    References:
        Ours.
    """

    block: int = 256

    name: ClassVar[str] = "striped_top_k"
    agreement: ClassVar[Agreement] = Agreement.DISJOINT
    exchange: ClassVar[str] = "reduce_union"

    def __post_init__(self) -> None:
        check_integer(self.block, "block")

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Select the largest of the own blocks; no state."""
        numel, n = acc.numel(), ctx.world_size
        k = count(ctx.density, numel)
        block = max(1, min(self.block, numel // (4 * n)))
        rounds, left = divmod(numel, n * block)
        stripe = (ctx.rank + ctx.step) % n
        shares = even_shares(k, [rounds * block + min(block, max(0, left - s * block)) for s in range(n)])
        share = shares[stripe]
        picked = top_k_of_blocks(acc, share, stripe * block, block, n * block) if share else acc[:0].long()
        picks = torch.full((), share, device=acc.device)
        return Selection(pad(picked, max(shares), numel), picks, aligned=True, total=k), state


def even_shares(k: int, owned: list[int]) -> list[int]:
    """Split k between owners as evenly as their numbers of coordinates allow; less if fewer than k are owned.

    Example:
        >>> even_shares(7, [9, 9, 9]), even_shares(7, [1, 9, 9]), even_shares(9, [1, 2, 3])
        ([3, 2, 2], [1, 3, 3], [1, 2, 3])
    """
    shares = [0] * len(owned)
    left = min(k, sum(owned))
    while left:
        able = [i for i, limit in enumerate(owned) if shares[i] < limit]
        each = max(1, left // len(able))
        for i in able:
            more = min(each, owned[i] - shares[i], left)
            shares[i] += more
            left -= more
    return shares
