"""What threshold does SIDCo find, and what does every rank hold after each step?

Plain NumPy with SciPy's distributions, whole vectors, one rank after the other; nothing is shared with the library.

Symbols: `a` magnitudes, `k` the target of one rank, `M` stages, `delta` the ratio of the first stage, `eta` the
threshold so far. Zeros take no part in any fit.

References:
    An Efficient Statistical-based Gradient Compression Technique for Distributed Training Systems (SIDCo), MLSys 2021,
    arXiv 2101.10761, https://arxiv.org/abs/2101.10761: algorithm 1 with the formulas of its equations and appendix,
    where these differ.
"""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.floating]
Name = Literal["E", "GP", "P"]


class ReferenceStep(NamedTuple):
    """What one step selected and what it left behind."""

    counts: list[int]
    thresholds: list[float]
    stages: list[int]  # used in this step
    update: Array
    residual: Array


def exponential_quantile(z: Array, ratio: float) -> float:
    return float(stats.expon.isf(ratio, scale=z.mean()))


def pareto_quantile(z: Array, ratio: float) -> float:
    # Moments of SciPy's generalised Pareto with shape c: mean B / (1 - c), variance B^2 / ((1 - c)^2 (1 - 2 c)).
    mean, variance = z.mean(), z.var()
    shape = 0.5 * (1 - mean**2 / variance)
    return float(stats.genpareto.isf(ratio, shape, scale=mean * (1 - shape)))


def gamma_quantile(z: Array, ratio: float) -> float:
    s = math.log(z.mean()) - np.log(z).mean()
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return float(stats.gamma.isf(ratio, shape, scale=z.mean() / shape))


QUANTILES = {
    "E": (exponential_quantile, exponential_quantile),
    "GP": (gamma_quantile, pareto_quantile),
    "P": (pareto_quantile, pareto_quantile),
}


def reference_threshold(
    magnitudes: Array, k: float, stages: int, name: Name, *, delta: float = 0.25, recount: bool = False
) -> float:
    """The threshold after all stages, 0 if everything but zeros is wanted.

    Args:
        magnitudes: not negative.
        k: number wanted.
        stages: M.
        name: which SIDCo.
        delta: ratio of the first of several stages.
        recount: False: ratios as published, multiplying to k / len(a). True: the last stage asks for k of the survivors
            it sees, those between the first and it for the square root of that ratio, but for no less than delta.
    """
    pool = magnitudes[magnitudes > 0].astype(np.float64)
    if len(pool) <= k:
        return 0.0
    density = k / len(pool)
    if stages == 1 or density >= delta:
        ratios = [density]
    else:
        ratios = [delta] + [(density / delta) ** (1 / (stages - 1))] * (stages - 1)
    eta = 0.0
    for stage, planned in enumerate(ratios):
        ratio = planned
        if recount and stage > 0:
            ratio = k / max(len(pool), 1e-9)
            if stage < len(ratios) - 1:
                ratio = max(math.sqrt(ratio), delta)
        if len(pool) < 2 or np.ptp(pool) == 0 or ratio >= 1:
            break
        eta += QUANTILES[name][stage > 0](pool - eta, ratio)
        pool = pool[pool >= eta]
    return eta


def reference_sidco(
    gradients: Iterable[Array],
    density: float,
    name: Name,
    variant: Literal["corrected", "published"],
    *,
    delta: float = 0.25,
    tolerance: float = 0.2,
    interval: int = 5,
    capacity: int = 4,
) -> list[ReferenceStep]:
    """Run SIDCo with error feedback on (n, numel) gradients in float64, each rank for itself.

    Published: M starts at 1; the mean of picks / k over `interval` steps, if more than 1 + tolerance, takes a stage
    away, and if less than 1 - tolerance adds one. Corrected: M starts where the last stage has 3/4 to keep, either adds
    one, and the fits aim for c k.
    """
    records: list[ReferenceStep] = []
    most = max(1, math.ceil(math.log(density) / math.log(0.5)))
    fewest = 1
    if variant == "corrected" and density < delta:
        missing, fewest = density / delta, 2
        while missing < 0.75:
            missing /= max(math.sqrt(missing), delta)
            fewest += 1
        fewest = min(fewest, most)
    for gradient in gradients:
        if not records:
            n, numel = gradient.shape
            k = max(1, math.floor(density * numel + 1e-9))
            residual = np.zeros((n, numel))
            stages, aims, seen = [fewest] * n, [1.0] * n, [[] for _ in range(n)]
        acc = residual + gradient
        update, residual = np.zeros(numel), acc.copy()
        used, counts, thresholds = list(stages), [], []
        for rank in range(n):
            magnitudes = np.abs(acc[rank])
            eta = reference_threshold(
                magnitudes, aims[rank] * k, stages[rank], name, delta=delta, recount=variant == "corrected"
            )
            picks = np.flatnonzero((magnitudes >= eta) & (magnitudes > 0))
            update[picks] += acc[rank, picks] / n
            residual[rank, picks] = 0
            counts.append(len(picks))
            thresholds.append(eta)
            available = min(k, int(np.count_nonzero(magnitudes)))
            quality = min(capacity, len(picks) / available) if available else 1.0
            seen[rank].append(quality)
            if variant == "corrected":
                aims[rank] = min(max(aims[rank] * math.exp(-0.1 * (quality - 1)), 1 / capacity), numel / k)
            if len(seen[rank]) == interval:
                mean = sum(seen[rank]) / interval
                if mean > 1 + tolerance:
                    stages[rank] += 1 if variant == "corrected" else -1
                elif mean < 1 - tolerance:
                    stages[rank] += 1
                stages[rank] = min(max(stages[rank], 1), most)
                seen[rank] = []
        records.append(ReferenceStep(counts, thresholds, used, update, residual))
    return records
