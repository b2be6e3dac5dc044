"""The ops on a device: each by a kernel in Triton where that is known to work, else by operations of torch.

Kernels take float32 on CUDA. They give the same bits as :mod:`~lightning_sparse.ops.reference`, but for sums, which may
differ in their last bits, and which only a rank's own thresholds see; of equal magnitudes they pick the first ones.
:mod:`~lightning_sparse.engine.fused` does several of these at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from lightning_sparse.core.layout import Span
from lightning_sparse.ops import reference
from lightning_sparse.ops.on_cuda import compare, on_cuda

Op = TypeVar("Op", bound=Callable[..., Any])
MOST_NUMEL = (1 << 31) - (1 << 13)
"""Longest vector: indices of a tile behind the end must fit into 31 bits."""
MOST_COUNTED = (1 << 30) - 1
"""Longest vector where kernels count twice its coordinates in 31 bits."""
MOST_CHOSEN = 512
"""Longest tensor that is chosen between."""
FEW = 4099
"""Values on which kernels are tried."""


def accumulate_(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.accumulate_`, of one run, which is not written to."""

    def plain(acc: Tensor, grad: Tensor, decay: float) -> Tensor:
        return reference.accumulate_(acc, [grad], decay)

    def few() -> list[Any]:
        places = torch.arange(FEW, device=acc.device)
        return [(places / 8, _with_infinity(places * 1103 % FEW / 64, grad), 0.5)]

    return _best(("accumulate_", grad.dtype), _kernel("dense", "add_"), plain, few, acc, grad)(acc, grad, decay)


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None, skipped: Tensor | None) -> None:
    """Do the work of :func:`lightning_sparse.ops.subtract_at_`; coordinates may be int32, too.

    Values at the padding index count for nothing, and where the flag is set, values may be NaN.

    Example:
        >>> x = torch.tensor([5.0, 6.0, 7.0, 0.0])
        >>> subtract_at_(x, torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0, 9.0]), None)
        >>> subtract_at_(x, torch.tensor([0, 2, 3]), None, torch.tensor(True))
        >>> x
        tensor([4., 6., 5., 0.])
    """

    def few() -> list[Any]:
        vector = x.new_tensor([1.5, -2.0, 3.25, 0.0, 5.0, 0.0])
        taken = None if values is None else x.new_tensor([0.5, 3.0, 3.0, 7.0, 0.0])
        flags = [None] if skipped is None else [torch.full_like(skipped, flag) for flag in (False, True)]
        return [(vector, indices.new_tensor([0, 2, 2, 5, 5]), taken, flag) for flag in flags]

    what = "subtract_at_", x.dtype, indices.dtype, values is None, skipped is None
    given = [x, indices] if values is None else [x, indices, values]
    fits = 0 < indices.numel() < 1 << 31 and (values is None or values.dtype == x.dtype)
    kernel, plain = _kernel("values", "subtract_at_"), reference.subtract_at_
    best = _best(what, kernel, plain, few, *given, doubles=True) if fits else plain
    best(x, indices, values, skipped)


def top_k(x: Tensor, k: int) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.top_k`."""

    def few() -> list[Any]:
        return [(_different(x), min(k, FEW))]

    return _best(("top_k",), _kernel("union", "top_k"), reference.top_k, few, x, most=MOST_COUNTED)(x, k)


def above(x: Tensor, threshold: Tensor, span: Span | None, capacity: int, phase: int) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.above`; ranges are left to torch."""

    def few() -> list[Any]:
        return [(_different(x), torch.full_like(threshold, FEW / 2), None, FEW // 4, 7)]

    kernel, plain = _kernel("union", "above"), reference.above
    best = _best(("above",), kernel, plain, few, x, most=MOST_COUNTED) if span is None else plain
    return best(x, threshold, span, capacity, phase)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.moments`."""
    return _summing(reference.moments, x)(x)


def norm(x: Tensor) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.norms.norm`."""
    return _summing(reference.norm, x)(x)


def mean_and_maximum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.mean_and_maximum`."""
    return _summing(reference.mean_and_maximum, x)(x)


def excess(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do the work of :func:`.reference.excess`."""
    return _summing(reference.excess, x, threshold)(x, threshold)


def log_sum(x: Tensor) -> Tensor:
    """Do the work of :func:`.reference.log_sum`."""
    return _summing(reference.log_sum, x)(x)


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

    def few() -> list[Any]:
        x, by = _different(acc) / 512, units.new_tensor([0.5, 0.75, 0.75 * 0.75 * beta2])
        return [(x / 3, x.square(), _with_infinity(x, grad), by, beta2)]

    kernel = _kernel("second", "form_")
    best = _best(("form_", grad.dtype), kernel, reference.form_, few, acc, second, grad, rtol=1e-6)
    return best(acc, second, grad, units, beta2)


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

    def few() -> list[Any]:
        x = _different(acc) / 512
        return [(torch.zeros_like(x), x, x.square() / 7, torch.full_like(power, 0.5), eps, damping)]

    kernel = _kernel("second", "score_")
    best = _best(("score_", eps), kernel, reference.score_, few, score, acc, second, rtol=1e-6)
    best(score, acc, second, power, eps, damping)


def fill_if_(x: Tensor, flag: Tensor, value: float) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.fill_if_`; a kernel touches nothing if the flag is not set."""
    if on_cuda.takes(x) and flag.device == x.device and x.is_contiguous() and 0 < x.numel() < MOST_NUMEL:
        kernel = _kernel("dense", "fill_if_")
        if on_cuda.tried((fill_if_, x.dtype), lambda: kernel(x[:0], flag, value)):
            kernel(x, flag, value)
            return x
    return x.masked_fill_(flag, value)


def choose(flag: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Choose one tensor of each pair, the first ones if the flag is set; in one launch where all are short."""
    if on_cuda.takes(flag) and pairs and all(_alike(*pair) for pair in pairs):
        first, second = zip(*pairs, strict=True)
        out = tuple(torch.empty_like(x) for x in second)
        what = choose, tuple((x.dtype, x.numel()) for x in out)
        kernel = _kernel("dense", "choose")
        if on_cuda.tried(what, lambda: kernel(flag, first, second, out)):
            kernel(flag, first, second, out)
            return list(out)
    return [torch.where(flag, yes, no) for yes, no in pairs]


def _kernel(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a file in ``ops/triton``, which is imported when the function is called."""
    return lambda *given: getattr(import_module(f"lightning_sparse.ops.triton.{file}"), name)(*given)


def _alike(yes: Tensor, no: Tensor) -> bool:
    """Return whether a kernel can choose between two tensors."""
    alike = yes.shape == no.shape and yes.dtype == no.dtype and yes.device == no.device
    return alike and yes.is_contiguous() and no.is_contiguous() and 0 < no.numel() <= MOST_CHOSEN


def _best(
    what: tuple[Any, ...],
    kernel: Callable[..., Any],
    plain: Op,
    few: Callable[[], list[Any]],
    *vectors: Tensor,
    most: int = MOST_NUMEL,
    rtol: float = 0.0,
    doubles: bool = False,
) -> Op:
    """Return a kernel if it takes some vectors, and if it has computed the same as operations of torch; else these.

    Args:
        what: the name of the op, and what else a kernel is compiled for.
        kernel: takes the arguments of the op.
        plain: the same.
        few: makes such arguments, on which both are tried before the first use.
        vectors: of the op, the one that it is about first.
        most: its longest length.
        rtol: see :func:`.compare`.
        doubles: whether the kernel takes float64, too.
    """
    first = vectors[0]
    wide = any(x.dtype == torch.float64 for x in vectors)
    fits = (doubles or not wide) and 1 < first.numel() <= most and all(map(Tensor.is_contiguous, vectors))
    if not fits or not on_cuda.takes(first):
        return plain

    def attempt() -> None:
        for given in few():
            made = []
            for form in (kernel, plain):
                own = [x.clone() if isinstance(x, Tensor) else x for x in given]
                result = form(*own)
                own += result if isinstance(result, tuple) else [result]
                made.append({f"tensor {number}": x for number, x in enumerate(own) if isinstance(x, Tensor)})
            compare(made[0], made[1], rtol, what=what)

    works = on_cuda.tried((*what, first.device), attempt)
    return cast(Op, kernel) if works else plain


def _different(x: Tensor) -> Tensor:
    """Return (FEW,) values of different magnitudes, from 1 on."""
    places = torch.arange(FEW, device=x.device)
    return ((1 + places * 1103 % FEW) * (1 - 2 * (places % 2))).float()


def _with_infinity(x: Tensor, grad: Tensor) -> Tensor:
    """Return values as a gradient that is not finite everywhere."""
    given = x.to(grad.dtype, copy=True)
    given[7] = torch.inf
    return given


def _summing(plain: Op, x: Tensor, *more: Tensor) -> Op:
    """Return what forms some sums over a vector."""

    def few() -> list[Any]:
        return [(_different(x).to(x.dtype), *more)]

    name = plain.__name__
    return _best((name, x.dtype), _kernel("sums", name), plain, few, x, most=MOST_COUNTED, rtol=1e-5)
