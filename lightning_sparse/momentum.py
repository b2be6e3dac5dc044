"""Momentum of averages that have waited: how much of it would have been spent by now."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

PIECE_BYTES = 1 << 26
"""Of gradients that are worked on at once, where that takes memory."""


def spent(momentum: float, share: float | Tensor) -> Any:
    """The share of an average's momentum that it would have spent, had its gradients not waited.

    Heavy-ball momentum adds a gradient to a velocity, ``m = momentum m + gradient``, and moves parameters by it in that
    step and, ``momentum`` times shorter each time, in all that follow. Where a share d of the coordinates arrives at
    each step, an average is the sum of ``t = 1 / d`` gradients, of ages 0 to t - 1. In dense training,
    ``momentum**age`` would be left of each by now, in the mean

        ``left = (1 + momentum + ... + momentum**(t - 1)) / t = (1 - momentum**t) / (t (1 - momentum))``

    and ``1 - left`` is spent: 0 where everything is sent, nearly 1 where t is far above ``1 / (1 - momentum)``.

    Args:
        momentum: in [0, 1).
        share: of coordinates that arrive, in (0, 1]; a number, or () on a device.

    Returns:
        In [0, 1), of the same kind as ``share``.

    Example:
        >>> [round(spent(0.9, share), 2) for share in (1.0, 0.5, 0.1, 0.01)]
        [0.0, 0.05, 0.35, 0.9]
    """
    waited = 1 / share
    return 1 - (1 - momentum**waited) / (waited * (1 - momentum))


class Momentum(NamedTuple):
    """What ``torch.optim.SGD`` does with the velocities of a parameter group."""

    rate: float | Tensor
    """Learning rate."""
    momentum: float
    share: float
    """What a velocity takes of a gradient: 1 less the dampening, below 0 where the optimizer maximizes."""
    nesterov: bool

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Momentum | None:
        """That of a parameter group of ``torch.optim.SGD``; None: there is none that could be spent earlier."""
        if not 0 < group["momentum"] < 1 or group["differentiable"]:
            return None
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.device.type == "cpu":
            rate = float(rate)
        sign = -1 if group["maximize"] else 1
        return cls(rate, group["momentum"], sign * (1 - group["dampening"]), group["nesterov"])

    @property
    def reach(self) -> Any:
        """How far a velocity of 1 moves parameters in all steps that follow."""
        return self.rate * (self.momentum ** (1 + self.nesterov) / (1 - self.momentum))


class Stepped(NamedTuple):
    """A parameter that SGD has just stepped; shapes are the same."""

    parameter: Tensor
    grad: Tensor
    """The average that the step was taken with."""
    velocity: Tensor
    """SGD's ``momentum_buffer``, with the average in it."""


def has_velocities(optimizer: Optimizer, parameters: Collection[int]) -> bool:
    """Whether an optimizer is ``torch.optim.SGD`` with momentum for some parameters, given by their ids."""
    return type(optimizer) is SGD and any(
        Momentum.of(group) is not None and any(id(parameter) in parameters for parameter in group["params"])
        for group in optimizer.param_groups
    )


@torch.no_grad()
def spend_(stepped: Sequence[Stepped], by: Momentum, share: float | Tensor, skip: Tensor | None = None) -> None:
    """Move parameters by what averages would have moved them by now, had they not waited; velocities lose as much.

    In the end, parameters come as far as with momentum SGD.

    Args:
        stepped: parameters.
        by: the momentum that they were stepped with.
        share: of coordinates that arrive, see :func:`spent`.
        skip: () on the device, above 0 where no step was taken.
    """
    part = spent(by.momentum, share) * by.share
    if skip is None and not isinstance(part, Tensor) and not isinstance(by.reach, Tensor):
        for parameter, grad, velocity in stepped if part else ():
            velocity.sub_(grad, alpha=part)
            parameter.sub_(grad, alpha=part * by.reach)
        return
    for dtype, pieces in _pieces(stepped):
        parameters, grads, velocities = (list(each) for each in zip(*pieces, strict=True))
        early, reach = (x.to(dtype) if isinstance(x, Tensor) else x for x in (part, by.reach))
        moved = list(torch._foreach_mul(grads, early))
        if skip is not None:  # gradients may be NaN then
            moved = [torch.where(skip > 0, 0, each) for each in moved]
        torch._foreach_sub_(velocities, moved)
        torch._foreach_mul_(moved, reach)
        torch._foreach_sub_(parameters, moved)


def _pieces(stepped: Iterable[Stepped]) -> Iterator[tuple[torch.dtype, list[Stepped]]]:
    """Of one dtype each, and of a size that bounds what is needed on the way."""
    piece: list[Stepped] = []
    filled = 0
    for one in stepped:
        if piece and (filled >= PIECE_BYTES or one.grad.dtype != piece[0].grad.dtype):
            yield piece[0].grad.dtype, piece
            piece, filled = [], 0
        piece.append(one)
        filled += one.grad.nbytes
    if piece:
        yield piece[0].grad.dtype, piece
