"""The pass of :class:`~lightning_sparse.SecondMoment`: residual, second moment and score of a gradient.

The score is formed where it is looked at, of two numbers, and is not stored: see :func:`_score`. What the numbers mean
is said in the memory, whose operations on tensors give the same; on CUDA, second moments may differ in their last bit
there, as a compiler may round a product and a sum together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_sparse.ops.triton.launch import TILE, Share, launch

MOST = tl.constexpr(3.4028234663852886e38)
"""The largest float32."""
TINY = tl.constexpr(1.401298464324817e-45)
"""The smallest above 0."""


class Weighed(NamedTuple):
    """By what an accumulator is weighed."""

    second: Tensor
    """(numel + 1,) float32 second moments, the last one zero."""
    by: Tensor
    """(2,) float32: what stands for Adam's eps, and what magnitudes are multiplied by."""


@triton.jit
def _score(x, second, least, damping):
    """``x / sqrt(sqrt(second + (damping x)^2) + least)``, each operation rounded by itself."""
    waited = x * damping
    within = second + waited * waited
    return tl.div_rn(x, tl.sqrt_rn(tl.sqrt_rn(tl.where(within > MOST, MOST, within)) + least))


@triton.jit
def _magnitude(x, second, by, i, mask, WEIGHED: tl.constexpr):
    """Bits of the magnitudes that coordinates are selected by."""
    value = tl.load(x + i, mask=mask, other=0.0)
    if WEIGHED:
        value = _score(value, tl.load(second + i, mask=mask, other=0.0), tl.load(by), tl.load(by + 1))
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _least(power, EPS: tl.constexpr):
    """Return the stand-in for Adam's eps beside roots that are not corrected, see :meth:`.SecondMoment.absorb_`."""
    return (tl.sqrt(1.0 - tl.load(power)) * tl.full((), EPS, tl.float64)).to(tl.float32)


@triton.jit
def _damp(power, damping):
    """Return the factor of magnitudes beside roots that are not corrected, see :meth:`.SecondMoment.absorb_`."""
    return (tl.sqrt(1.0 - tl.load(power)) * damping).to(tl.float32)


@triton.jit
def _at(x, i, numel, WHOLE: tl.constexpr):
    """Elements of a tile; without a mask, 128 bits are read at once."""
    if WHOLE:  # noqa: SIM108
        found = tl.load(x + i)
    else:
        found = tl.load(x + i, mask=i < numel, other=0.0)
    return found


@triton.jit
def _put(x, i, value, numel, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(x + i, value)
    else:
        tl.store(x + i, value, mask=i < numel)


@triton.jit
def _moments(
    acc, second, grad, scale, units, add, i, left,
    SCALED: tl.constexpr, CLEAR: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Form a tile of accumulator and second moment, where the former is finite; return both, and what it would be."""
    given = _at(grad, i, left, WHOLE)
    if SCALED:
        wide = tl.div_rn(given.to(tl.float32), tl.load(scale)) * tl.load(units)
    else:
        take = tl.load(units).to(grad.dtype.element_ty).to(tl.float32)
        wide = (given.to(tl.float32) * take).to(grad.dtype.element_ty).to(tl.float32)
    before = _at(acc, i, left, WHOLE)
    formed = wide + before * tl.load(units + 1)
    finite = tl.abs(formed) < float("inf")
    x = tl.where(finite, formed, before)
    _put(acc, i, x, left, WHOLE)
    before = _at(second, i, left, WHOLE)
    moment = before * tl.load(units + 2) + (wide * add) * wide
    moment = tl.where(moment > MOST, MOST, moment)  # squares overflow where gradients do not
    moment = tl.where(finite, moment, before)
    _put(second, i, moment, left, WHOLE)
    if CLEAR:
        _put(grad, i, tl.zeros_like(given), left, WHOLE)
    return x, moment, formed


@triton.jit(do_not_specialize=["numel", "per"])
def _weigh(
    acc, second, grad, words, counts, verdict, bound, scale, power, by, units, add, damping, numel, per,
    EPS: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """Form both and note which scores reach the bound, as ``triton_dense._form`` does."""
    pid = tl.program_id(0)
    row = tl.arange(0, TILE // 32)
    lane = tl.arange(0, 32)
    i = row[:, None] * 32 + lane[None, :]
    if NOTES:
        reach = tl.maximum(tl.load(bound), TINY)
        least = _least(power, EPS)
        damp = _damp(power, damping)
    found = tl.zeros((TILE // 32,), tl.int32)  # added up behind the loop; what is not finite, in the upper half
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        start = tile * TILE
        left = numel - start
        vectors = acc + start, second + start, grad + start
        if left >= TILE:
            x, moment, formed = _moments(*vectors, scale, units, add, i, left, SCALED, NOTES, True)
        else:
            x, moment, formed = _moments(*vectors, scale, units, add, i, left, SCALED, NOTES, False)
        noted = ((tl.abs(formed) < float("inf")).to(tl.int32) ^ 1) << 16
        if NOTES:
            reached = (tl.abs(_score(x, moment, least, damp)) >= reach).to(tl.int32)
            tl.store(words + tile * (TILE // 32) + row, tl.sum(reached << lane[None, :], axis=1))
            noted += reached
        found += tl.sum(noted, axis=1)
    if tl.max(found) > 0xFFFF:
        tl.store(verdict, 1 if NOTES else 0)
    if NOTES:
        tl.store(counts + pid, tl.sum(found & 0xFFFF))
        if pid == 0:
            tl.store(acc + numel, 0.0)
            tl.store(second + numel, 0.0)
            tl.store(by, least)
            tl.store(by + 1, damp)


def weigh_(
    acc: Tensor,
    weighed: Weighed,
    grad: Tensor,
    scale: Tensor | None,
    power: Tensor,
    units: Tensor,
    beta2: float,
    eps: float,
    damping: float,
    words: Tensor,
    counts: Tensor,
    broken: Tensor,
    bound: Tensor,
) -> None:
    """Form accumulator and second moment, clear the gradient, and note what will probably be picked; 24 bytes each.

    Args:
        acc: (numel + 1,) float32, changed in place; a coordinate that would not be finite is left as it is, and so is
            its second moment. The last slot becomes zero.
        weighed: second moments are changed in place, the last slot becomes zero; the numbers are overwritten.
        grad: (numel,) or more, float32, bfloat16 or float16; the first numel become zero.
        scale: () float32 that the gradient is divided by, in float32; None: nothing.
        power: () float64 ``beta2^t``, with t the number of the step from 1.
        units: (3,) float32 ``take``, ``carry`` and ``keep``: by which gradient, acc and second moments are multiplied.
        beta2: decay of the second moment.
        eps: Adam's.
        damping: what sums are multiplied by before their squares are added, a number of float32.
        words: int32, a bit for each coordinate, rounded up to tiles: which scores reach the bound, but for
            zeros.
        counts: (programs,) int32, how many do so, by program.
        broken: (1,) int32, set to 1 if some of acc would not be finite, else left as it is.
        bound: () float32.
    """
    numel = acc.numel() - 1
    share = Share.of(numel)
    launch(
        _weigh, share.programs, acc, weighed.second, grad, words, counts, broken, bound,
        bound if scale is None else scale, power, weighed.by, units, 1 - beta2, damping, numel, share.per,
        EPS=eps, TILE=TILE, SCALED=scale is not None, NOTES=True,
    )  # fmt: skip


def form_(acc: Tensor, second: Tensor, grad: Tensor, units: Tensor, beta2: float) -> Tensor:
    """Form accumulator and second moment of (numel,) vectors, and nothing else; 20 bytes a coordinate in float32.

    Args:
        acc: as of :func:`weigh_`, without a slot more.
        second: as acc.
        grad: (numel,) float32, bfloat16 or float16, not written to.
        units: as of :func:`weigh_`, of any precision.
        beta2: decay of the second moment.

    Returns:
        () bool: whether all of acc is finite.
    """
    share, finite = Share.of(acc.numel()), acc.new_ones((), dtype=torch.bool)
    launch(
        _weigh, share.programs, acc, second, grad, acc, acc, finite, acc, acc, acc, acc, units.float(), 1 - beta2, 1.0,
        acc.numel(), share.per, EPS=0.0, TILE=TILE, SCALED=False, NOTES=False,
    )  # fmt: skip
    return finite


@triton.jit(do_not_specialize=["numel", "per"])
def _store_scores(out, acc, second, power, damping, numel, per, EPS: tl.constexpr, TILE: tl.constexpr):
    pid = tl.program_id(0)
    least = _least(power, EPS)
    damp = _damp(power, damping)
    for tile in range(pid * per, tl.minimum((pid + 1) * per, tl.cdiv(numel, TILE))):
        i = tile * TILE + tl.arange(0, TILE)
        if tile * TILE + TILE <= numel:
            _put(out, i, _score(_at(acc, i, numel, True), _at(second, i, numel, True), least, damp), numel, True)
        else:
            _put(out, i, _score(_at(acc, i, numel, False), _at(second, i, numel, False), least, damp), numel, False)


def score_(out: Tensor, acc: Tensor, second: Tensor, power: Tensor, eps: float, damping: float) -> None:
    """Store the scores of (numel,) coordinates; 12 bytes a coordinate. The arguments are those of :func:`weigh_`."""
    share = Share.of(out.numel())
    launch(
        _store_scores, share.programs, out, acc, second, power, damping, out.numel(), share.per, EPS=eps, TILE=TILE
    )  # fmt: skip
