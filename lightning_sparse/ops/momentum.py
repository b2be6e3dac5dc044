"""Momentum of averages that have waited: how much of it would have been spent by now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparse.core.layout import fills_memory, flattened, in_pieces, sum_dtype
from lightning_sparse.ops import static_shapes, take
from lightning_sparse.ops.addresses import DTYPES, Addresses, takes
from lightning_sparse.ops.host import reaching
from lightning_sparse.ops.on_cuda import compare, on_cuda
from lightning_sparse.ops.on_device import different
from lightning_sparse.ops.reference import PIECE

LONGEST = 255
"""Steps that a coordinate is known to have waited: as many as fit into a byte. What waited longer counts as this."""
TABLES = 8
"""Tables that are kept; schedules of the momentum make new ones at every step."""
LEAST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
"""Smallest magnitudes above 0."""


def spent(momentum: float, waited: Any) -> Any:
    """Return the share of an average's momentum that it would have spent, had its gradients not waited.

    Heavy-ball momentum adds a gradient to a velocity, ``m = momentum m + gradient``, and moves parameters by it in that
    step and, ``momentum`` times shorter each time, in all that follow. An average that arrives at a coordinate t steps
    after the one before is the sum of t gradients, of ages 0 to t - 1. In dense training, ``momentum**age`` would be
    left of each by now, in the mean

        ``left = (1 + momentum + ... + momentum**(t - 1)) / t = (1 - momentum**t) / (t (1 - momentum))``

    and ``1 - left`` is spent: 0 where averages arrive at every step, nearly 1 where t is far above
    ``1 / (1 - momentum)``.

    Args:
        momentum: in [0, 1).
        waited: t, at least 1; a number, or a tensor of them.

    Example:
        >>> [round(spent(0.9, waited), 2) for waited in (1, 2, 10, 100)]
        [0.0, 0.05, 0.35, 0.9]

    References:
        Ours.
    """
    return 1 - (1 - momentum**waited) / (waited * (1 - momentum))


class Momentum(NamedTuple):
    """The way in which ``torch.optim.SGD`` uses the velocities of a parameter group."""

    rate: float | Tensor
    """Learning rate."""
    momentum: float
    share: float
    """Of a gradient that a velocity takes: 1 less the dampening, below 0 where the optimizer maximizes."""
    nesterov: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Momentum | None:
        """Read it from a parameter group of ``torch.optim.SGD``; None: there is none that could be spent earlier."""
        if not 0 < group["momentum"] < 1 or group["differentiable"]:
            return None
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.device.type == "cpu":
            rate = float(rate)
        sign = -1 if group["maximize"] else 1
        return cls(rate, group["momentum"], sign * (1 - group["dampening"]), group["nesterov"])

    @property
    def reach(self) -> Any:
        """The distance that a velocity of 1 moves parameters in all steps that follow."""
        return self.rate * (self.momentum ** (1 + self.nesterov) / (1 - self.momentum))


class Stepped(NamedTuple):
    """A parameter that SGD has just stepped; shapes are the same."""

    parameter: Tensor
    grad: Tensor
    """The average that the step was taken with; where it is 0, none has arrived."""
    velocity: Tensor
    """SGD's ``momentum_buffer``, with the average in it."""
    waited: Tensor
    """uint8, steps since an average arrived, before this one."""


def has_velocities(optimizer: Optimizer, parameters: Set[int]) -> bool:
    """Return True for ``torch.optim.SGD`` with momentum for some parameters, given by their ids."""
    if type(optimizer) is not SGD:
        return False
    return any(Momentum.of(one) for one in optimizer.param_groups if not parameters.isdisjoint(map(id, one["params"])))


class Spending:
    """Spends, and keeps what does not change from step to step: addresses, and tables of :func:`spent`."""

    def __init__(self) -> None:
        self._addresses = Addresses()
        self._shares_of = lru_cache(maxsize=TABLES)(_shares_of)

    @torch.no_grad()
    def spend_(self, stepped: Sequence[Stepped], by: Momentum, skip: Tensor | None = None, steps: int = 1) -> None:
        """Move parameters by what averages would have moved them by now, had they not waited; velocities lose as much.

        In the end, parameters come as far as with momentum SGD, as long as rate and momentum stay the same. What each
        coordinate has waited is counted on.

        Args:
            stepped: parameters.
            by: the momentum that they were stepped with.
            skip: () on the device, above 0 where no step was taken.
            steps: gradients that came since what has waited was counted last: 1, or 0 in a flush between two steps.
        """
        if not isinstance(by.rate, Tensor) and by.rate == 0:  # what is spent now would move nothing, and be gone
            by = by._replace(share=0.0)
        elsewhere: defaultdict[Any, list[Stepped]] = defaultdict(list)
        for one in stepped:
            host = not static_shapes(one.grad.device) and skip is None and not isinstance(by.rate, Tensor)
            if host and all(x.stride() == one.grad.stride() for x in one) and fills_memory(one.grad):
                _where_arrived_(one, by, self._shares_of(by.momentum, by.share, one.grad.device), steps)
            else:
                has_kernel = {x.dtype for x in one[:3]} <= DTYPES and takes(one, by.rate, skip)
                elsewhere[(one.grad.device, *(x.dtype for x in one), has_kernel)].append(one)
        for what, alike in elsewhere.items():
            how = by, self._shares_of(by.momentum, by.share, what[0]), skip, steps
            form = Spending, what, isinstance(by.rate, Tensor), skip is None
            if what[-1] and on_cuda.tried(form, partial(_rehearse, alike[0], *how)):
                _in_triton_(self._addresses, what, alike, *how)
                continue
            for piece in in_pieces(alike, PIECE):
                _everywhere_([Stepped(*part) for part in piece], *how)


def _shares_of(momentum: float, share: float, device: torch.device) -> Tensor:
    """Return (LONGEST + 1,) float64: the part of an average that is spent after so many steps; nothing after 0."""
    waited = torch.arange(LONGEST + 1, dtype=torch.float64, device=device).clamp_(min=1)
    shares: Tensor = spent(momentum, waited) * share
    return shares


def _where_arrived_(one: Stepped, by: Momentum, shares: Tensor, steps: int) -> None:
    """Spend on the CPU, where vectors are laid out alike, without gaps: few coordinates are touched."""
    parameter, grad, velocity, waited = (flattened(x) for x in one)
    places = _nonzero(grad)
    waited.clamp_(max=LONGEST - steps).add_(steps)
    ages = torch.from_numpy(waited.numpy().take(places.numpy())).int()
    wide = sum_dtype(grad.dtype)
    moved = (take(grad, places) if grad.dtype in LEAST else grad[places]).to(wide) * shares.to(wide)[ages]
    velocity.index_add_(0, places, moved.to(velocity.dtype), alpha=-1)
    parameter.index_add_(0, places, (moved * by.reach).to(parameter.dtype), alpha=-1)
    waited.index_fill_(0, places, 0)


def _everywhere_(stepped: Sequence[Stepped], by: Momentum, shares: Tensor, skip: Tensor | None, steps: int) -> None:
    """Spend without coordinates, so that no host has to know them; as many operations for any number of parameters."""
    parameters, grads, velocities, kept = (list(each) for each in zip(*stepped, strict=True))
    grad, waited = (torch.cat([x.reshape(-1) for x in each]) for each in (grads, kept))
    wide = sum_dtype(grad.dtype)
    now = waited.clamp(max=LONGEST - steps) + steps
    moved = grad.to(wide) * shares.to(wide)[now.int()]
    after = torch.where(grad == 0, now, 0)
    if skip is not None:  # gradients may be NaN then
        moved, after = torch.where(skip > 0, 0, moved), torch.where(skip > 0, waited, after)
    for vector, targets, change_ in (
        (moved, velocities, torch._foreach_sub_),
        (moved * by.reach, parameters, torch._foreach_sub_),
        (after, kept, torch._foreach_copy_),
    ):
        parts = vector.to(targets[0].dtype).split([x.numel() for x in targets])
        change_(targets, [part.view(x.shape) for part, x in zip(parts, targets, strict=True)])


def _in_triton_(
    addresses: Addresses,
    what: Any,
    stepped: Sequence[Stepped],
    by: Momentum,
    shares: Tensor,
    skip: Tensor | None,
    steps: int,
) -> None:
    """Spend in one launch."""
    from lightning_sparse.ops.triton import tables as triton_tables

    parameters, grads, velocities, kept = zip(*stepped, strict=True)
    table = addresses.table(what, (kept, grads, parameters, velocities), aligned=2)
    kinds = grads[0].dtype, parameters[0].dtype, velocities[0].dtype
    triton_tables.spend_(table, kinds, shares.float(), by.reach, skip, steps)
    torch.autograd.graph.increment_version((*parameters, *velocities, *kept))


def _rehearse(one: Stepped, by: Momentum, shares: Tensor, skip: Tensor | None, steps: int) -> None:
    """Compile the kernel, and compare what it computes.

    Raises:
        MismatchError: if it differs from operations of torch. Whatever compilers and drivers raise comes through.
    """
    whole = different(one.grad)
    values = whole / 64
    vectors = values.flip(0), values.where(whole % 3 == 0, 0.0), values, whole.abs() % (LONGEST + 1)
    rate = torch.full_like(by.rate, 0.3) if isinstance(by.rate, Tensor) else 0.3  # it may be 0 in the first steps
    by, shares = Momentum(rate, 0.9, 1.0, by.nesterov), _shares_of(0.9, 1.0, shares.device)
    found = [Stepped(*(x.to(like.dtype, copy=True) for x, like in zip(vectors, one, strict=True))) for _ in range(2)]
    if skip is not None:
        skip = torch.zeros_like(skip)
    _everywhere_(found[:1], by, shares, skip, steps)
    _in_triton_(Addresses(), None, found[1:], by, shares, skip, steps)
    expected, ours = (each._asdict() for each in found)
    compare(ours, expected, step="SGD's momentum", numel=len(values), reach=float(by.reach), steps=steps)


def _nonzero(flat: Tensor) -> Tensor:
    """Return the ascending indices at which a vector on the CPU is not zero."""
    if flat.dtype not in LEAST:
        return flat.nonzero().flatten()
    return reaching(flat, LEAST[flat.dtype])[0].long()
