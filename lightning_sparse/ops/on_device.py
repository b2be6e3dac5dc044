"""The ops on a device: each by a kernel in Triton where that is known to work, else by operations of torch.

Kernels take float32 on CUDA. They give the same bits as :mod:`~lightning_sparse.ops.reference`, but for norms, which
may differ in their last bits, and which only the rank itself sees; of equal magnitudes they pick the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import reference
from lightning_sparse.ops.addresses import vector_of
from lightning_sparse.ops.form import Lanes
from lightning_sparse.ops.on_cuda import compare, on_cuda
from lightning_sparse.ops.reference import Weights

MOST_NUMEL = (1 << 31) - (1 << 13)
"""Longest vector: indices of a tile behind the end must fit into 31 bits."""
MOST_COUNTED = (1 << 30) - 1
"""Longest vector where kernels count twice its coordinates in 31 bits."""
GRADIENTS = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of gradients that kernels write to."""
FEW = 4099
"""Values on which kernels are tried."""


class Twins(NamedTuple):
    """A kernel and operations of torch that compute the same, and on what both are tried before the first use."""

    name: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    examples: Callable[..., list[tuple[Any, ...]]]
    """Makes arguments for both from such that are given."""
    most: int = MOST_COUNTED
    """Longest first vector."""
    rtol: float = 0.0
    """See :func:`.compare`."""
    doubles: bool = False
    """Whether the kernel takes float64, too."""

    def best(
        self, vectors: Sequence[Tensor], given: Sequence[Any], *what: Any, numel: int | None = None
    ) -> Callable[..., Any]:
        """Return the kernel if it takes some vectors and has computed the same as operations of torch; else these.

        Args:
            vectors: of the op, the one that it is about first.
            given: its arguments, of which examples are made.
            what: for what else the kernel is compiled.
            numel: coordinates of a vector that is given in runs; None: of the first vector.
        """
        first, size = vectors[0], vectors[0].numel() if numel is None else numel
        wide = any(x.dtype == torch.float64 for x in vectors)
        fits = (self.doubles or not wide) and 1 < size <= self.most and all(map(Tensor.is_contiguous, vectors))
        if not fits or not on_cuda.takes(first):
            return self.plain
        what = self.name, *what, first.device
        return self.kernel if on_cuda.tried(what, partial(self._try, given, what)) else self.plain

    def _try(self, given: Sequence[Any], what: Any) -> None:
        for example in self.examples(*given):
            made = []
            for form in (self.kernel, self.plain):
                own = [_copied(x) for x in example]
                result = form(*own)
                own += result if isinstance(result, tuple) else [result]
                lists = [x if isinstance(x, list) else [x] for x in own]
                tensors = [x for each in lists for x in each if isinstance(x, Tensor)]
                made.append({f"tensor {number}": x for number, x in enumerate(tensors)})
            compare(made[0], made[1], self.rtol, what=what)


def _copied(x: Any) -> Any:
    """Return a copy of a tensor, or of tensors in a list; anything else as it is."""
    if isinstance(x, list):
        return [_copied(each) for each in x]
    return x.clone() if isinstance(x, Tensor) else x


def _kernel(file: str, name: str) -> Callable[..., Any]:
    """Return a function of a file in ``ops/triton``, which is imported when the function is called."""
    return lambda *given: getattr(import_module(f"lightning_sparse.ops.triton.{file}"), name)(*given)


# ---- Kernels that are called otherwise than the op, and what they are tried against.


def _search_of(candidates: Candidates, x: Tensor) -> Any:
    """Return the buffers of a group's kernels, made in its first step. What they say holds until the next pass."""
    if candidates.on_device is None or candidates.on_device.numel != x.numel():
        candidates.on_device = _kernel("select", "Scratch")(x.numel(), x.device)
    return candidates.on_device


def _accumulate(acc: Tensor, runs: list[Tensor], decay: float, candidates: Candidates) -> Tensor:
    search = _search_of(candidates, acc)
    _kernel("dense", "accumulate_")(acc, vector_of(runs), decay, *search.begin())
    candidates.note(acc, runs, search)
    finite: Tensor = search.finite
    return finite


def _accumulate_and_pick(acc: Tensor, runs: list[Tensor], decay: float, hints: Candidates) -> tuple[Tensor, Tensor]:
    """Search among what has been noted, too."""
    return _accumulate(acc, runs, decay, hints), _pick(acc, 50, hints.take(acc))


def _accumulate_and_pick_in_torch(
    acc: Tensor, runs: list[Tensor], decay: float, _: Candidates
) -> tuple[Tensor, Tensor]:
    finite = reference.accumulate_(acc, runs, decay)
    torch._foreach_zero_(runs)
    return finite, reference.top_k(acc, 50)


def _weigh(
    acc: Tensor, second: Tensor, runs: list[Tensor], score: Tensor | InRuns, by: Weights, candidates: Candidates
) -> Tensor:
    search = _search_of(candidates, acc)
    place = None if isinstance(score, InRuns) else score
    _kernel("dense", "weigh_")(acc, second, place, vector_of(runs), by, *search.begin())
    candidates.note(score, [], search)
    finite: Tensor = search.finite
    return finite


def _weigh_in_place(acc: Tensor, second: Tensor, runs: list[Tensor], score: Tensor, *others: Any) -> Tensor:
    """Put scores into the gradient's place, if they fit."""
    return _weigh(acc, second, runs, _place_of_scores(runs, score), *others)


def _weigh_in_torch(
    acc: Tensor, second: Tensor, runs: list[Tensor], score: Tensor, by: Weights, _: Candidates
) -> Tensor:
    return reference.weigh_(acc, second, _place_of_scores(runs, score), runs, by)


def _place_of_scores(runs: list[Tensor], score: Tensor) -> Tensor | InRuns:
    if runs[0].dtype != score.dtype:
        return score
    return runs[0] if len(runs) == 1 else InRuns(Gradient(runs))


def _pick(x: Tensor | InRuns, k: int, search: Any = None) -> Tensor:
    indices: Tensor = _kernel("select", "pick")(x, search, k, k).indices
    return indices


def _pick_with_stripe(
    x: Tensor | InRuns, share: int, spare: Tensor, turn: int, n: int, slots: int, search: Any = None
) -> Any:
    return tuple(_kernel("select", "pick")(x, search, share, slots, spare, turn, n))


def _as_one(x: Tensor | InRuns) -> Tensor:
    """Return a vector; a copy of one in runs."""
    return torch.cat(x.runs) if isinstance(x, InRuns) else x


def _hand_over_in_torch(runs: list[Tensor], *others: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    if len(runs) == 1:
        return reference.hand_over_(runs[0], *others)
    grad = Gradient(runs)
    flat = runs[0].new_empty(grad.numel)
    made = reference.hand_over_(flat, *others)
    grad.spread_(flat)
    return made


def _norm_in_torch(runs: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([reference.norm(run) for run in runs]))  # type: ignore[no-any-return]


# ---- Examples.


def different(x: Tensor) -> Tensor:
    """Return (FEW,) values of different magnitudes, from 1 on."""
    places = torch.arange(FEW, device=x.device)
    return ((1 + places * 1103 % FEW) * (1 - 2 * (places % 2))).float()


def _with_infinity(x: Tensor, grad: Tensor) -> Tensor:
    """Return values as a gradient that is not finite everywhere."""
    given = x.to(grad.dtype, copy=True)
    given[7] = torch.inf
    return given


def _accumulated(acc: Tensor, runs: list[Tensor]) -> list[tuple[Any, ...]]:
    places, hints = torch.arange(FEW, device=acc.device), Candidates()
    x, given = places.float() / 8, _with_infinity(places * 1103 % FEW / 64, runs[0])
    largest = torch.add(x / 2, given).nan_to_num(posinf=0.0).topk(200).values
    _search_of(hints, x).bound.copy_(largest[-1])
    return [
        (x, _cut_as(runs, given), 0.5, hints),
        *([(x, _cut_as(runs, given, 8), 0.5, Candidates())] * _several(runs)),
    ]


def _weighed(acc: Tensor, runs: list[Tensor], by: Weights) -> list[tuple[Any, ...]]:
    x, units = different(acc) / 512, by.units.new_tensor([0.5, 0.75, 0.75 * 0.75 * by.beta2])
    numbers = by._replace(units=units, power=torch.full_like(by.power, 0.5))
    made = []
    for begin in (1, 8)[: 1 + _several(runs)]:
        given = _cut_as(runs, _with_infinity(x, runs[0]), begin)
        made.append((x / 3, x.square() / 7, given, torch.zeros_like(x), numbers, Candidates()))
    return made


def _several(runs: Sequence[Tensor]) -> bool:
    """Return whether kernels read runs, which are compiled for two cases: all runs are aligned, or not."""
    return len(runs) > 1


def _cut_as(runs: Sequence[Tensor], x: Tensor, begin: int = 1) -> list[Tensor]:
    """Return (FEW,) values in one run, or in several that begin at multiples of a number; some are short."""
    if not _several(runs):
        return [x]
    ends = [begin * end for end in (1, 3, FEW // 3 // begin, FEW // 3 // begin + 1, FEW // 2 // begin)] + [FEW]
    return [x[start:end].clone() for start, end in zip([0, *ends], ends, strict=False)]


def _divided(second: Tensor, values: Tensor, power: Tensor, eps: float, damping: float) -> list[tuple[Any, ...]]:
    x = different(values) / 512
    return [(x.square(), x / 8, torch.full_like(power, 0.5), eps, damping)]


def _handed_over(runs: list[Tensor], average: Tensor, scale: Tensor | None) -> list[tuple[Any, ...]]:
    x = runs[0].new_zeros(FEW)
    places = torch.cat([torch.arange(0, FEW, 7, device=x.device), torch.full((3,), FEW, device=x.device)])
    values = different(average)[: len(places)] / 3 * (places < FEW)
    given = None if scale is None else torch.full_like(scale, 2.0)
    wrong = values.masked_fill(places == 7, torch.nan)
    return [(_cut_as(runs, x), places, values, given, True), (_cut_as(runs, x + 1), places, wrong, given, False)]


def _striped(x: Tensor | InRuns, spare: Tensor) -> list[tuple[Any, ...]]:
    return [(_like(x), 9, torch.full_like(spare, 5), 1, 3, 20)]


def _subtracted(x: Tensor, indices: Tensor, values: Tensor | None) -> list[tuple[Any, ...]]:
    vector = x.new_tensor([1.5, -2.0, 3.25, 0.0, 5.0, 0.0])
    taken = None if values is None else x.new_tensor([0.5, 3.0, 3.0, 7.0, 0.0])
    return [(vector, indices.new_tensor([0, 2, 2, 5, 5]), taken)]


def _picked(x: Tensor | InRuns, k: int) -> list[tuple[Any, ...]]:
    return [(_like(x), min(k, FEW))]


def _like(x: Tensor | InRuns) -> Tensor | InRuns:
    """Return different values that lie as others do."""
    return InRuns(Gradient(_cut_as(x.runs, different(x.runs[0])))) if isinstance(x, InRuns) else different(x)


def _whole(runs: list[Tensor]) -> list[tuple[Any, ...]]:
    x = different(runs[0]).to(runs[0].dtype)
    return [(_cut_as(runs, x, begin),) for begin in (1, 8)[: 1 + _several(runs)]]


ACCUMULATE = Twins("accumulate_", _accumulate_and_pick, _accumulate_and_pick_in_torch, _accumulated)
WEIGH = Twins("weigh_", _weigh_in_place, _weigh_in_torch, _weighed, rtol=1e-6)
DIVISORS = Twins("divisors", _kernel("dense", "divisors"), reference.divisors, _divided, MOST_NUMEL)
HAND_OVER = Twins("hand_over_", _kernel("values", "hand_over_"), _hand_over_in_torch, _handed_over, MOST_NUMEL)
STRIPE = Twins(
    "top_k_and_stripe", _pick_with_stripe, lambda x, *others: reference.top_k_and_stripe(_as_one(x), *others), _striped
)
SUBTRACT = Twins(
    "subtract_at_", _kernel("values", "subtract_at_"), reference.subtract_at_, _subtracted, MOST_NUMEL, doubles=True
)
TOP_K = Twins("top_k", _pick, lambda x, k: reference.top_k(_as_one(x), k), _picked)
NORM = Twins("norm", _kernel("sums", "norm"), _norm_in_torch, _whole, rtol=1e-5)


# ---- Ops.


def _listed(runs: Sequence[Tensor]) -> list[Tensor]:
    """Return runs as a list: the one that is given, since it may know where its table is."""
    return runs if isinstance(runs, list) else list(runs)


def accumulate_(acc: Tensor, runs: Sequence[Tensor], decay: float, candidates: Candidates | None) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.accumulate_`; a kernel takes candidates."""
    runs = _listed(runs)
    if candidates is not None:
        best = ACCUMULATE.best((acc, *runs), (acc, runs), runs[0].dtype, len(runs) > 1)
        if best is ACCUMULATE.kernel:
            return _accumulate(acc, runs, decay, candidates)
    return reference.accumulate_(acc, runs, decay)


def weigh_(
    acc: Tensor,
    second: Tensor,
    score: Tensor | InRuns,
    runs: Sequence[Tensor],
    by: Weights,
    candidates: Candidates | None,
) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.weigh_`; a kernel takes candidates."""
    runs = _listed(runs)
    if candidates is not None:
        vectors = acc, second, *(() if isinstance(score, InRuns) else (score,)), *runs
        best = WEIGH.best(vectors, (acc, runs, by), runs[0].dtype, by.eps, len(runs) > 1)
        if best is WEIGH.kernel:
            return _weigh(acc, second, runs, score, by, candidates)
    return reference.weigh_(acc, second, score, runs, by)


def divisors(second: Tensor, values: Tensor, power: Tensor, eps: float, damping: float) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.divisors`."""
    given = second, values, power, eps, damping
    found: Tensor = DIVISORS.best((second, values), given, eps)(*given)
    return found


def hand_over_(
    runs: Sequence[Tensor], indices: Tensor | None, average: Tensor, scale: Tensor | None, cleared: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Put an average into the gradient's place, zeros elsewhere, and NaN everywhere if one of it is not finite.

    Args:
        runs: in which the gradient lies, numel coordinates of any floating dtype, overwritten.
        indices: (u,) int64 coordinates, and maybe the padding index; None: all in order.
        average: (u,) float32 or float64; where a coordinate is repeated, so is its value.
        scale: () float32 that the loss was multiplied by; None: nothing.
        cleared: whether the gradient's place is zero already.

    Returns:
        (u,) what the gradient got, without the scale; (u,) what its dtype has lost of it, None: nothing; and () bool,
        whether the average is not finite.
    """
    runs, dtype = _listed(runs), runs[0].dtype
    scale = None if scale is None else scale.to(average.device, torch.float32)
    best: Any = HAND_OVER.plain
    if indices is not None and dtype in GRADIENTS and average.dtype == torch.float32:
        vectors, what = (average, *runs, indices), (dtype, scale is None, len(runs) > 1)
        best = HAND_OVER.best(vectors, (runs, average, scale), *what)
    found: tuple[Tensor, Tensor | None, Tensor] = best(runs, indices, average, scale, cleared)
    return found


def top_k_and_stripe(
    x: Tensor | InRuns, share: int, spare: Tensor, turn: int, n: int, candidates: Candidates | None, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the work of :func:`lightning_sparse.ops.top_k_and_stripe`; spare ones are at most ``slots - share``."""
    best, given = STRIPE.best(_runs_of(x), (x, spare), *_in_runs(x), numel=x.numel()), (x, share, spare, turn, n, slots)
    found: tuple[Tensor, Tensor, Tensor] = best(*given, *_noted(best, STRIPE, candidates, x))
    return found


def top_k(x: Tensor | InRuns, k: int, candidates: Candidates | None = None) -> Tensor:
    """Do the work of :func:`lightning_sparse.ops.top_k`."""
    best = TOP_K.best(_runs_of(x), (x, k), *_in_runs(x), numel=x.numel())
    found: Tensor = best(x, k, *_noted(best, TOP_K, candidates, x))
    return found


def _runs_of(x: Tensor | InRuns) -> Sequence[Tensor]:
    return x.runs if isinstance(x, InRuns) else [x]


def _in_runs(x: Tensor | InRuns) -> Sequence[str]:
    """Return what tells kernels that read runs from others."""
    return ["in runs"] if isinstance(x, InRuns) else []


def _noted(best: Any, twins: Twins, candidates: Candidates | None, x: Tensor | InRuns) -> list[Any]:
    """Return what a kernel takes beyond the arguments of the op: what a pass has noted, if anything."""
    return [candidates.take(x)] if best is twins.kernel and candidates is not None else []


def norm(runs: Sequence[Tensor]) -> Tensor:
    """Return the () float64 Euclidean norm of a vector in runs; a kernel adds up in the same order in any of them."""
    runs = _listed(runs)
    numel = sum(run.numel() for run in runs)
    found: Tensor = NORM.best(runs, (runs,), runs[0].dtype, len(runs) > 1, numel=numel)(runs)
    return found


def subtract_at_(x: Tensor, indices: Tensor, values: Tensor | None) -> None:
    """Do the work of :func:`lightning_sparse.ops.subtract_at_`; coordinates may be int32, too.

    Values at the padding index count for nothing.

    Example:
        >>> x = torch.tensor([5.0, 6.0, 7.0, 0.0])
        >>> subtract_at_(x, torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0, 9.0]))
        >>> x
        tensor([4., 6., 5., 0.])
    """
    given, best = (x, indices, values), SUBTRACT.plain
    if 0 < indices.numel() < 1 << 31 and (values is None or values.dtype == x.dtype):
        vectors = [x, indices] if values is None else [x, indices, values]
        best = SUBTRACT.best(vectors, given, x.dtype, indices.dtype, values is None)
    best(*given)


def packed(acc: Tensor, second: Tensor | None, lanes: Lanes, rehearse: Callable[[Any], None]) -> Any:
    """Return the kernels for messages of ``packed_union``, see :class:`.packed_union.Plain`; None where there are none.

    Args:
        acc: (numel + 1,) accumulator.
        second: (numel + 1,) second values; None: there are none.
        lanes: of the words.
        rehearse: compares them with operations of torch.
    """
    vectors = [acc] if second is None else [acc, second]
    fits = all(x.dtype == torch.float32 and x.is_contiguous() for x in vectors) and 2 < len(acc) < MOST_NUMEL
    if not fits or not on_cuda.takes(acc):
        return None
    make = _kernel("packed", "Packed")
    what = "packed", acc.device, lanes.low, lanes.wide
    return make() if on_cuda.tried(what, lambda: rehearse(make())) else None
