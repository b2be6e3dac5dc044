"""Clipping of each rank's gradients before they are accumulated, in place of averages that have waited."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.checks import check_positive, expect
from lightning_sparse.ops.length import joint_norm

ALGORITHMS = ("norm", "value")


class Clipping(NamedTuple):
    """A limit on gradients.

    A limit c is meant for the average over n ranks. Of n independent gradients it is about ``sqrt(n)`` times shorter
    than each of them, so that each rank's own norm, or each of its values, is clipped to ``sqrt(n) c``, as in DGC.
    """

    limit: float
    algorithm: str = "norm"

    def apply_(
        self,
        pieces: Sequence[Tensor],
        world_size: int,
        share: float,
        scale: Tensor | None,
        norm_of: Callable[[Sequence[Tensor]], Tensor] = joint_norm,
    ) -> None:
        """Clip this rank's gradients in place.

        If their norm is not finite, all of them become NaN: nobody can say how long the finite ones should be, and none
        is absorbed.

        Args:
            pieces: that are clipped together.
            world_size: n.
            share: of all coordinates, that the pieces have; their norm is clipped to ``sqrt(share)`` of the limit.
            scale: () of the loss, which gradients still have.
            norm_of: returns the () norm of all that is clipped together, given the pieces that this rank has of it.
        """
        limit = self.limit * math.sqrt(world_size) * (1.0 if scale is None else scale.double())
        if self.algorithm == "value":
            for piece in pieces:
                # Made on the device: copying it there would make the host wait.
                bound = (torch.ones((), dtype=torch.float64, device=piece.device) * limit).to(piece.dtype)
                piece.copy_(torch.where(piece.isfinite(), piece.clamp(-bound, bound), piece))
            return
        whole = norm_of(pieces)
        shrink = torch.where(whole.isfinite(), (limit * math.sqrt(share) / whole).clamp(max=1.0), float("nan"))
        for piece in pieces:
            piece.mul_(shrink.to(piece.dtype))


class Limit(NamedTuple):
    """A limit, and the gradients that are clipped to it together."""

    clipping: Clipping
    names: Set[str]
    """Of their parameters."""
    in_place: bool
    """True if they are clipped in place of averages. The limit rests while nothing of these parameters can wait:
    averages are clipped then."""


class GradientClipping:
    """Holds the limits of an engine: each rank's gradients are clipped to them, from the next step on.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self.limits: dict[int | None, Limit] = {}
        """By the id of an optimizer; None: of all parameters."""
        self.asked: set[int] = set()
        """Ids of optimizers for which clipping in place of averages was asked since their latest step."""
        self.beginning: Set[str] = frozenset()
        """Names of the parameters whose gradients are clipped in the latest step that has begun."""
        self.acting: Set[str] = frozenset()
        """Names of those whose averages optimizers have now, and whose gradients were clipped before."""

    @property
    def in_place(self) -> dict[int | None, Limit]:
        """Limits in place of clipping averages, from the next step on, by the id of the optimizer."""
        return {key: limit for key, limit in list(self.limits.items()) if limit.in_place}

    @property
    def chosen(self) -> bool:
        """True if gradients are clipped by the user's choice, whatever would be done to averages."""
        return any(not limit.in_place and limit.clipping.limit < math.inf for limit in list(self.limits.values()))

    @property
    def takes_over(self) -> bool:
        """True if averages are clipped for the last time: gradients are, from the next step on."""
        return any(self.acting.isdisjoint(limit.names) for limit in self.in_place.values())

    def set(self, limit: Limit, key: int | None, replaced: Set[int | None] = frozenset()) -> None:
        """Clip gradients to a limit, from the next step on.

        Args:
            limit: of parameters; those without coordinates are left out.
            key: id of the optimizer that holds them; None: all parameters.
            replaced: keys of limits that end for these parameters.

        Raises:
            ValueError: for a limit or an algorithm that cannot be.
        """
        check_positive(limit.clipping.limit, "limit", infinite=True)
        expect(limit.clipping.algorithm in ALGORITHMS, "algorithm", "'norm' or 'value'", limit.clipping.algorithm)
        if names := self._with_coordinates(limit.names):
            for old, other in list(self.limits.items()):
                if old in replaced or (None not in (old, key) and other.names == names):
                    self._hold(old, other.names - names)  # another optimizer holds them now
            self.limits[key] = limit._replace(names=names)

    def follow(self, key: int, names: Set[str]) -> None:
        """Let the limit of an optimizer, given its id, be one of the parameters that it holds now."""
        self._hold(key, self._with_coordinates(names))

    def _hold(self, key: int | None, names: Set[str]) -> None:
        if names:
            self.limits[key] = self.limits[key]._replace(names=names)
        else:
            del self.limits[key]

    def _with_coordinates(self, names: Set[str]) -> Set[str]:
        return frozenset(name for name in names if self._parameters[name].numel())

    def stop_in_place(self, key: int | None) -> None:
        """Clip no more in place of an optimizer's averages, given its id, if that was done."""
        if key in self.in_place:
            del self.limits[key]

    def before_step(self, key: int, applies: Callable[[], bool]) -> None:
        """Stop clipping in place of an optimizer's averages, if it is about to step and nobody asked for it.

        Args:
            key: the optimizer's id.
            applies: whether it is about to apply averages of a backward, for the first time.
        """
        if key in self.asked:
            self.asked.remove(key)
        elif key in self.in_place and applies():  # asked last, because it may have to look at all parameters
            self.stop_in_place(key)

    def begin_step(self, sparsified: Callable[[], Set[str]]) -> list[Limit]:
        """Fix the limits of a step."""
        waiting = sparsified() if self.in_place else frozenset()
        acting = [limit for limit in self.limits.values() if not limit.in_place or limit.names & waiting]
        self.beginning = frozenset().union(*(limit.names for limit in acting))
        return acting

    def hand_over(self, names: Set[str]) -> None:
        """Note that optimizers got the averages of these parameters in the latest step that has begun."""
        self.acting = (self.acting - names) | (names & self.beginning)
