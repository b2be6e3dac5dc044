"""By what averages were multiplied between the exchange that formed them and the step that applies them.

Scripts do so: they divide gradients by a number of tokens, clip them, or let a ``GradScaler`` unscale them that the
engine does not know. Adam behind DDP does not notice a factor, because its second moment is formed of what it gets. The
second moments of :class:`~lightning_sparse.SecondMoment` are formed before, so that they have to follow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Set
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Parameter

from lightning_sparse.core.layout import own
from lightning_sparse.ops import static_shapes
from lightning_sparse.ops.sampled import Sampler

SAMPLED = 64
"""Coordinates of a parameter that are compared."""
FAR, MANY = 0.05, 0.02
"""Distance from the factor that a coordinate may have, relative to it; share of coordinates that may be further away.
"""


HIDDEN = (
    "A GradScaler that the engine was not shown unscales gradients. In the residuals, each gradient waits with the "
    "loss scale of its own step, and is divided by that of a later one. Show it: attach(..., scaler=scaler)."
)


def steps_for_a_scaler() -> bool:
    """Return True while an enabled ``GradScaler`` lets an optimizer step.

    Nothing on an optimizer that is not fused tells of its scaler, but the scaler's method is among the callers.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


class Handed(NamedTuple):
    """Some coordinates of a group's averages, as the exchange handed them out."""

    indices: Tensor | None
    """(u,) int64 of all averages, ascending, with padding indices where shapes are static; None: all coordinates."""
    places: Tensor
    """(parameters, SAMPLED) int64, within each parameter."""
    values: Tensor
    """(parameters, SAMPLED) float64 averages there."""
    there: Tensor
    """(parameters,) bool: whether any average arrived at the parameter."""
    scale: Tensor | None
    """() that averages are multiplied by, with the loss; None: by nothing."""

    @classmethod
    def of(
        cls,
        bounds: tuple[Tensor, Tensor],
        pieces: Sequence[Tensor],
        indices: Tensor | None,
        scale: Tensor | None,
        sampler: Sampler,
    ) -> Handed:
        """Take a sample, to look at again when an optimizer steps; the host waits for nothing.

        Args:
            bounds: first coordinate of each parameter, and the one behind the last, int64 on the device.
            pieces: the averages of each parameter, flat.
            indices: (u,) int64 coordinates of averages, in any order; None: all.
            scale: see :attr:`scale`.
            sampler: who takes it, in this stream.
        """
        starts, stops = bounds
        device = starts.device
        steps = torch.arange(SAMPLED, device=device)
        if indices is None:
            places = steps * (stops - starts).unsqueeze(1) // SAMPLED
            there = stops > starts
        else:
            if static_shapes(device) or bool((indices[1:] < indices[:-1]).any()):
                indices = indices.sort().values
            first, last = (torch.searchsorted(indices, bounds) for bounds in (starts, stops))
            there = last > first
            chosen = first.unsqueeze(1) + steps * (last - first).unsqueeze(1) // SAMPLED
            found = indices.new_zeros(chosen.shape) if not len(indices) else indices[chosen.clamp(max=len(indices) - 1)]
            places = (found - starts.unsqueeze(1)).where(there.unsqueeze(1), 0)
        return cls(indices, places, sampler.take(pieces, places), there, None if scale is None else scale.clone())


class Factors(NamedTuple):
    """By what a group's averages were multiplied since they were handed out."""

    by: Tensor
    """(parameters,) float64; NaN where nobody knows."""
    odd: Tensor | None
    """() float64 share of coordinates, among those that are known, that were changed in another way; None on a device,
    which nobody waits for."""


def factors_of(handed: Handed, gradients: Sequence[Tensor | None], scale: Tensor | None, sampler: Sampler) -> Factors:
    """Find the median of the ratios of gradients now and then, for each parameter.

    A median also finds the factor where less than half of the coordinates were changed in another way. Those that are
    zero now, such as masked ones, do not count: whatever they are divided by, their steps are zero.

    Args:
        handed: what the exchange handed out.
        gradients: of the group's parameters, in order, as they are now, see :func:`~.layout.laid_out`; None where an
            optimizer does not step them now.
        scale: () that gradients still have and the step will divide them by; None: nothing.
        sampler: who takes what they are now, in this stream.
    """
    then = handed.values
    now = sampler.take([None if x is None else own(x.detach()) for x in gradients], handed.places)
    ratios = (now / then).where(then != 0, torch.nan)
    median = ratios.where(ratios != 0, torch.nan).nanmedian(dim=1).values
    odd = None
    if not static_shapes(ratios.device):
        off = (ratios - median.unsqueeze(1)).abs() > FAR * median.unsqueeze(1).abs()
        known = ratios.isfinite()
        odd = ((off & known).sum() / known.sum().clamp(min=1)).double()
    by = median if handed.scale is None else median * handed.scale
    by = by if scale is None else by / scale
    return Factors(by.where(handed.there & median.isfinite(), torch.nan), odd)


class Lengths:
    """Lengths of averages as optimizers got them, as Adam's second moment would know them.

    With s the factor of a step, ``m = decay m + (1 - decay) s^2``, corrected for its start at 0 as Adam's second moment
    is, and ``sqrt(m)`` the length: dense Adam's ``v`` would hold ``s^2 g^2``, whose mean is that of ``g^2`` times that
    of ``s^2``, where the two do not depend on each other. Without a factor it is exactly 1. The decay is
    Adam's second beta, but at most that by which lengths of gradients are followed: with the scale of a loss, both
    change at once, in opposite directions.
    """

    def __init__(self) -> None:
        self._known: Mapping[str, Tensor] = {}
        """By parameter, (2,) float64: m before its correction, and the correction. Replaced, never written to."""
        self._began: Mapping[str, Tensor] = {}
        """:attr:`_known` when the latest exchange began, before its averages were applied."""

    def begin_step(self) -> None:
        """Begin an exchange: averages of the one before count as applied."""
        self._began = self._known

    def follow(self, names: Sequence[str], factors: Tensor, decay: float) -> Tensor:
        """Note factors, and return the (parameters,) lengths that follow from them: 1 where no factor is known.

        Args:
            names: of parameters.
            factors: (parameters,) float64, NaN where no average is about to be applied.
            decay: of m.
        """
        nothing = factors.new_zeros(2)
        before = torch.stack([self._known.get(name, nothing).to(factors.device) for name in names])
        fresh = torch.stack([factors.square(), torch.ones_like(factors)], dim=1)
        known = factors.isfinite().unsqueeze(1)
        after = (decay * before + (1 - decay) * fresh).where(known, before)
        self._known = {**self._known, **dict(zip(names, after.unbind(), strict=True))}
        mean, correction = after.unbind(1)
        lengths = (mean / correction).sqrt()
        return lengths.where(known.squeeze(1), 1.0)

    def state(self, waiting: Set[str] = frozenset()) -> dict[str, list[float]]:
        """Return plain data, by name; waits for the device.

        Args:
            waiting: names of parameters whose latest averages do not count as applied.
        """
        meant = {name: (self._began if name in waiting else self._known).get(name) for name in self._known}
        found = {name: pair.to("cpu") for name, pair in meant.items() if pair is not None}
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}

    def load(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go on with what :meth:`state` gave."""
        pairs = torch.tensor([list(pair) for pair in state.values()], dtype=torch.float64, device="cpu")
        self._began = self._known = dict(zip(state, pairs.unbind(), strict=True))


def advice(parameters: Mapping[str, Parameter], odd: float) -> str:
    """Return a sentence for averages that were changed otherwise than by a factor."""
    name = next(iter(parameters))
    return (
        f"Between backward and the optimizer's step, {odd:.0%} of the averages that were looked at, those of {name} "
        "among them, were changed in another way than by one factor for each parameter, as noise, masks and clipping "
        "by value do. Averages of a sparse exchange are sums of what has waited for many steps, so that such a change "
        "does something else than with plain DDP. Change each rank's own gradients instead, before they are exchanged: "
        "parameter.register_hook(function), or engine.clip_gradients(limit, 'value') to clip them."
    )
