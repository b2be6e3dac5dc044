"""The sums of :class:`~lightning_sparse.SecondMoment` of a gradient on a device: by Triton, or by operations of torch.

:mod:`~lightning_sparse.engine.fused` needs neither: it forms both in one pass, and stores no scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_sparse.ops.on_cuda import on_cuda

MOST_NUMEL = (1 << 31) - (1 << 13)
"""Longest vector: indices of a tile behind the end must fit into 31 bits."""
FEW = 4099
"""Values on which kernels are tried."""


def form_(acc: Tensor, second: Tensor, grad: Tensor, units: Tensor, beta2: float) -> Tensor:
    """``acc = carry acc + g`` and ``second = keep second + (1 - beta2) g^2``, at most the largest number, in place.

    The gradient, ``g = take grad``, is rounded to its own precision. A coordinate at which acc would not be finite is
    left as it is in both.

    Args:
        acc: (numel,) float32 or float64.
        second: the same.
        grad: (numel,) of the same dtype, or bfloat16 or float16; not written to.
        units: (3,) ``take``, ``carry`` and ``keep``, float64 on the device.
        beta2: decay.

    Returns:
        () bool: whether all of acc is finite.
    """

    def attempt() -> None:
        given = _few(acc.device).to(grad.dtype)
        given[7] = torch.inf
        by, found = units.new_tensor([0.5, 0.75, 0.75 * 0.75 * beta2]), []
        for form in (_form_in_triton, _form_in_torch):
            sums, squares = _few(acc.device) / 3, _few(acc.device).square()
            found.append((sums, squares, form(sums, squares, given, by, beta2)))
        torch.testing.assert_close(*found, rtol=1e-6, atol=0)

    works = _takes((form_, grad.dtype, acc.device), attempt, acc, second, grad)
    return (_form_in_triton if works else _form_in_torch)(acc, second, grad, units, beta2)


def score_(score: Tensor, acc: Tensor, second: Tensor, power: Tensor, eps: float, damping: float) -> None:
    """``score = acc / sqrt(sqrt(second + (acc s damping)^2) + eps s)`` with ``s = sqrt(1 - power)``.

    Args:
        score: (numel,) float32 or float64, overwritten.
        acc: the same, not written to.
        second: the same.
        power: () float64 ``beta2^t``.
        eps: Adam's.
        damping: what sums are multiplied by before their squares are added, a number of float32.
    """

    def attempt() -> None:
        x, out = _few(acc.device), acc.new_empty((2, FEW))
        _score_in_triton(out[0], x, x.square() / 7, torch.full_like(power, 0.5), eps, damping)
        _score_in_torch(out[1], x, x.square() / 7, torch.full_like(power, 0.5), eps, damping)
        torch.testing.assert_close(out[0], out[1], rtol=1e-6, atol=0)

    works = _takes((score_, eps, acc.device), attempt, score, acc, second)
    (_score_in_triton if works else _score_in_torch)(score, acc, second, power, eps, damping)


def _takes(what: object, attempt: Callable[[], None], *vectors: Tensor) -> bool:
    """Return whether kernels take vectors, of which the first one is no gradient."""
    first, numel = vectors[0], vectors[0].numel()
    fits = first.dtype == torch.float32 and vectors[-1].dtype != torch.float64 and 0 < numel <= MOST_NUMEL
    return fits and on_cuda.takes(first) and all(map(Tensor.is_contiguous, vectors)) and on_cuda.tried(what, attempt)


def _few(device: torch.device) -> Tensor:
    places = torch.arange(FEW, device=device)
    return ((1 + places * 1103 % FEW) * (1 - 2 * (places % 2))).float() / 512


def _form_in_triton(acc: Tensor, second: Tensor, grad: Tensor, units: Tensor, beta2: float) -> Tensor:
    from lightning_sparse.ops.triton import second as triton_second

    finite = torch.ones((), dtype=torch.bool, device=acc.device)
    triton_second.form_(acc, second, grad, units.float(), beta2, finite)
    return finite


def _form_in_torch(acc: Tensor, second: Tensor, grad: Tensor, units: Tensor, beta2: float) -> Tensor:
    take, carry, keep = units.to(acc.dtype).unbind()
    given = (grad * take.to(grad.dtype)).to(acc.dtype)
    total = torch.mul(acc, carry).add_(given)
    moment = torch.mul(second, keep).addcmul_(given, given, value=1 - beta2)
    moment.clamp_(max=torch.finfo(acc.dtype).max)  # squares overflow where gradients do not
    finite = total.abs() < math.inf
    torch.where(finite, total, acc, out=acc)
    torch.where(finite, moment, second, out=second)
    return finite.all()


def _score_in_triton(score: Tensor, acc: Tensor, second: Tensor, power: Tensor, eps: float, damping: float) -> None:
    from lightning_sparse.ops.triton import second as triton_second

    triton_second.score_(score, acc, second, power, eps, damping)


def _score_in_torch(score: Tensor, acc: Tensor, second: Tensor, power: Tensor, eps: float, damping: float) -> None:
    start = (1 - power).sqrt()
    root = acc.mul(start * damping).square_().add_(second).clamp_(max=torch.finfo(acc.dtype).max)  # squares overflow
    torch.div(acc, root.sqrt_().add_(eps * start).sqrt_(), out=score)
