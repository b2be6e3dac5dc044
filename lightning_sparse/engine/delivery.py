"""Averages on their way from a group's exchange to the optimizer's step, and what its rule has to know of them.

Their facts are where they arrived, and what they are divided by (:class:`Delivery`). Then scripts multiply them: they
divide gradients by a number of tokens, clip them, or let a ``GradScaler`` unscale them that the engine does not know.
Adam behind DDP does not notice a factor, because its second moment is formed of what it gets. The second moments of
:class:`.SecondMoment` are formed before, so that they have to follow (:class:`Handed`,
:class:`Lengths`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.layout import Gradient, own
from lightning_sparse.core.step import Candidates
from lightning_sparse.methods.memory import Memory
from lightning_sparse.ops import put_, put_in_runs_, scatter_, static_shapes
from lightning_sparse.ops.sampled import Sampler

SAMPLED = 64
"""Coordinates of a parameter that are compared."""
FAR, MANY = 0.05, 0.02
"""Distance from the factor that a coordinate may have, relative to it; share of coordinates that may be further away.
"""


def scatter_average_(
    grad: Gradient, indices: Tensor | None, values: Tensor, candidates: Candidates | None = None
) -> None:
    """Write values of the gradient's dtype to its place, and zeros elsewhere; see :func:`.hand_over_`."""
    if static_shapes(grad.device):
        scatter_(grad.runs[0], indices, values, torch.zeros((), dtype=torch.bool, device=grad.device))
    elif indices is None:
        for span, run in grad:
            run.copy_(values[span])
    else:
        for run in () if candidates is not None and candidates.cleared(grad.runs) else grad.runs:
            run.zero_()
        put_in_runs_(grad.runs, indices, values)


def spread_divisor(indices: Tensor | None, by: Tensor, numel: int) -> Tensor:
    """Return the (numel,) divisors of all coordinates: 1 where no average arrived."""
    if indices is None:
        return by
    every = torch.ones(numel + 1, dtype=by.dtype, device=by.device)
    put_(every, indices, by)
    return every[:-1]


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


def bounds_of(spans: Mapping[str, slice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first coordinate of each parameter in a group and the one behind its last, int64 on the device."""
    bounds = [(span.start, span.stop) for span in spans.values()]
    # Written on the device: a list would be copied there, which makes the host wait.
    starts, stops = (
        torch.stack([torch.full((), x, device=device) for x in each]) for each in zip(*bounds, strict=True)
    )
    return starts, stops


@dataclass(eq=False)
class Delivery:
    """Averages of a group from the exchange that made them to the optimizer's step that applies them."""

    spans: Mapping[str, slice]
    """Of each parameter in the group."""
    indices: Tensor | None
    """(u,) int64 coordinates of the averages, in any order, with padding indices where shapes are static; None: all."""
    by: Tensor | None
    """(u,) what averages are divided by to be steps of Adam, see
    :meth:`~lightning_sparse.methods.memory.Memory.divisors`; None: nobody divides them."""
    memory: Memory
    """Of the group."""
    ranks: int
    """Number of ranks that averages are means over."""
    bounds: tuple[Tensor, Tensor]
    """See :func:`bounds_of`."""
    like: Tensor
    """Of the dtype and on the device of what the group remembers."""
    whole: bool
    """True if there is a gradient's average at every coordinate, as at a density of 1."""
    sampler: Sampler = field(default_factory=Sampler)
    """Looks at averages of all deliveries of the group."""
    handed: Handed | None = None
    """Some of the averages as they were handed out, where they are to be divided; None: nobody can change them."""

    def sample(self, pieces: Sequence[Tensor], scale: Tensor | None) -> None:
        """Note some of the averages where optimizers will find them, to see later how they were changed.

        Args:
            pieces: flat averages of each parameter.
            scale: () of the loss, which they have; None: none.
        """
        if self.by is not None:
            self.handed = Handed.of(self.bounds, pieces, self.indices, scale, self.sampler)

    def lengthen_(self, lengths: Tensor) -> None:
        """Let the divisor follow what the averages were multiplied by since they were handed out.

        Args:
            lengths: (parameters,) see :class:`~lightning_sparse.engine.delivery.Lengths`.
        """
        by, like = self.by, self.like
        if by is None or self.handed is None or (not static_shapes(like.device) and bool((lengths == 1).all())):
            return
        if self.indices is None:
            for span, length in zip(self.spans.values(), lengths, strict=True):
                self.memory.lengthen_(by[span], length)
            return
        _, stops = self.bounds
        of_each = torch.cat([lengths, lengths.new_ones(1)])[torch.searchsorted(stops, self.indices, right=True)]
        self.memory.lengthen_(by, of_each)

    def divisors(self) -> Mapping[str, tuple[Tensor | None, Tensor]]:
        """Return by what the averages of each parameter are divided, and where they arrived in it.

        The coordinates are ascending on a CPU; None: the divisors are of all coordinates, and 1 where none arrived.
        """
        indices, by = self.indices, self.by
        if by is None:
            indices, by = None, self.like.new_ones(max(span.stop for span in self.spans.values()))
        if indices is None or static_shapes(by.device):
            every = spread_divisor(indices, by, max(span.stop for span in self.spans.values()))
            return {name: (None, every[span]) for name, span in self.spans.items()}
        if bool((indices[1:] < indices[:-1]).any()):
            indices, order = indices.sort()
            by = by[order]
        first, last = (torch.searchsorted(indices, bounds).tolist() for bounds in self.bounds)
        return {
            name: (indices[start:stop] - span.start, by[start:stop])
            for (name, span), start, stop in zip(self.spans.items(), first, last, strict=True)
        }
