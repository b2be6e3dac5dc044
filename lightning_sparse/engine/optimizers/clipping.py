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


class GradientClipping:
    """Holds the limits of an engine: each rank's gradients are clipped to them, from the next step on.

    Args:
        parameters: by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self.limits: dict[int | None, tuple[Clipping, Set[str]]] = {}
        """Limits, and names of parameters that are clipped together, by the id of an optimizer; None: all of them."""
        self.keys_in_place: Set[int] = frozenset()
        """Of optimizers whose gradients are clipped in place of averages. These limits rest while nothing of their
        parameters can wait: averages are clipped then."""
        self._asked: set[int] = set()
        """Keys of optimizers for which clipping in place of averages was asked since their latest step."""
        self.beginning: Set[str] = frozenset()
        """Names of the parameters whose gradients are clipped in the latest step that has begun."""
        self.acting: Set[str] = frozenset()
        """Names of those whose averages optimizers have now, and whose gradients were clipped before."""

    @property
    def in_place(self) -> list[tuple[Clipping, Set[str]]]:
        """Limits in place of clipping averages, from the next step on."""
        return [limits for key, limits in list(self.limits.items()) if key in self.keys_in_place]

    @property
    def takes_over(self) -> bool:
        """True if averages are clipped for the last time: gradients are, from the next step on."""
        return any(self.acting.isdisjoint(names) for _, names in self.in_place)

    def set(self, clipping: Clipping, names: Set[str], key: int | None, in_place: bool = False) -> None:
        """Clip the gradients of these parameters together, from the next step on.

        Args:
            clipping: to what.
            names: of parameters; those without coordinates are left out.
            key: id of the optimizer that holds them; None: all parameters.
            in_place: whether this is in place of clipping averages.

        Raises:
            ValueError: for a limit or an algorithm that cannot be.
        """
        check_positive(clipping.limit, "limit", infinite=True)
        expect(clipping.algorithm in ALGORITHMS, "algorithm", "'norm' or 'value'", clipping.algorithm)
        names = frozenset(name for name in names if self._parameters[name].numel())
        if names:
            replaced = [old for old, (_, others) in self.limits.items() if None not in (old, key) and others == names]
            for old in replaced:  # another optimizer holds the same parameters now
                del self.limits[old]
            self.keys_in_place = self.keys_in_place - set(replaced)
            self.limits[key] = clipping, names
        if in_place and key is not None:
            self.keys_in_place |= {key}

    def stop_in_place(self, key: int) -> None:
        """Clip no more in place of an optimizer's averages, given its id, if that was done."""
        if key in self.keys_in_place:
            self.keys_in_place -= {key}
            self.limits.pop(key, None)

    def note_asked(self, key: int) -> None:
        """Note that clipping was asked for since an optimizer, given by its id, has stepped."""
        self._asked.add(key)

    def before_step(self, key: int, applies: Callable[[], bool]) -> None:
        """Stop clipping in place of an optimizer's averages, if it is about to step and nobody asked for it.

        Args:
            key: the optimizer's id.
            applies: whether it is about to apply averages of a backward, for the first time.
        """
        if key in self._asked:
            self._asked.remove(key)
        elif key in self.keys_in_place and applies():  # asked last, because it may have to look at all parameters
            self.stop_in_place(key)

    def begin_step(self, sparsified: Callable[[], Set[str]]) -> list[tuple[Clipping, Set[str]]]:
        """Fix the limits of a step: each with the parameters that are clipped together."""
        waiting = sparsified() if self.keys_in_place else frozenset()
        acting = {
            key: (clipping, names)
            for key, (clipping, names) in self.limits.items()
            if key not in self.keys_in_place or names & waiting
        }
        self.beginning = frozenset().union(*(names for _, names in acting.values()))
        return list(acting.values())

    def hand_over(self, names: Set[str], clipped: Set[str]) -> None:
        """Note that optimizers got the averages of these parameters, and of which of them gradients were clipped."""
        self.acting = (self.acting - names) | (names & clipped)
