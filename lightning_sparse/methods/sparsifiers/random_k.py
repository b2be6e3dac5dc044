"""Random-k: all ranks draw the same coordinates without messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect, is_integer
from lightning_sparse.core.hashing import GOLDEN, mix, outputs
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier


@SPARSIFIERS.register
@dataclass(frozen=True)
class RandomK(Sparsifier):
    """All ranks draw the same k random coordinates, new ones in every step, independent of the gradients.

    The draw is a hash of seed, step, group size and position, in 64-bit integers: equal on all ranks and devices, bit
    for bit, without a message and without a random number generator, so that dropout and data augmentation are not
    disturbed.

    Values are not multiplied by ``numel / k``: with error feedback, the rest is sent later. Without it (``NoMemory``)
    the update is ``k / numel`` times the dense mean on average.

    Groups of equal size draw the same indices in the same step.

    Formula:
        ``S`` = one coordinate in each of k strata, by a hash of seed and step; ``update[S] = (1/n) sum_i acc_i[S]``

    Differs from the paper:
        The draw is stratified, while the papers' is plainly uniform: the group is cut into k strata whose sizes differ
        by at most one, one coordinate is drawn in each, and all are rotated around the group by one random distance.
        The indices are unique by construction, each coordinate is drawn with probability ``k / numel``, and the work is
        O(k). If k divides numel, a mean over the draw never varies more than over k independent draws.

        Released codes reseed torch's global generator in every step, which repeats their dropout masks; or use a seed
        per rank, so that the indices differ; or draw with replacement and send fewer than k.

    Args:
        seed: any integer; the same on all ranks.

    Raises:
        ValueError: if the seed is no integer.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.ones(3, 2, 12)
        >>> steps = list(ls.simulate(stream, sparsifier=ls.sparsifiers.RandomK(seed=1), density=0.25))
        >>> [(step.indices.tolist(), step.bytes_sent.tolist()) for step in steps]
        [([3, 5, 8], [12.0, 12.0]), ([4, 8, 11], [12.0, 12.0]), ([2, 6, 8], [12.0, 12.0])]

    References:
        Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599, definition 2.1 (rand-k).
        Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014 (the mixing function).
    """

    seed: int = 0

    name: ClassVar[str] = "random_k"
    agreement: ClassVar[Agreement] = Agreement.IDENTICAL
    exchange: ClassVar[str] = "reduce_shared"

    def __post_init__(self) -> None:
        expect(is_integer(self.seed), "seed", "an integer", self.seed)

    def select(self, acc: Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
        """Draw one coordinate per stratum; no state."""
        numel = acc.numel()
        k = count(ctx.density, numel)
        key = 0
        for word in (self.seed, ctx.step, numel):
            key = mix(key + GOLDEN + word)
        indices = draw(numel, k, key, acc.device)
        return Selection(indices, torch.full((), k, device=acc.device), aligned=True), state


def draw(numel: int, k: int, key: int, device: torch.device) -> Tensor:
    """Draw k different coordinates, ascending: one in each of k strata, all rotated by the same distance.

    Args:
        numel: coordinates to draw from, below 2**31.
        k: number of coordinates to draw, in 1 .. numel.
        key: 64 bits that decide the draw.
        device: of the result.
    """
    places = torch.arange(k + 1, device=device)
    bounds = places * numel // k
    words = outputs(key, places[1:])
    drawn = bounds[:-1] + (words & 0x7FFFFFFFFFFFFFFF) % (bounds[1:] - bounds[:-1])
    distance = mix(key) % numel
    moved = (drawn + distance) % numel
    # Coordinates that passed the end were the last ones, and are now the smallest.
    stayed = (drawn < numel - distance).sum()
    return moved[(places[:-1] + stayed) % k]
