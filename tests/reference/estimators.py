"""Slow transcriptions of three published ways to estimate a threshold, for whole vectors in numpy and scipy.

Each looks at one rank's accumulator and returns the coordinates picked and the threshold. They are written from the
rules, one line each, and share nothing with the library. Magnitudes are compared in the accumulator's precision;
moments and thresholds are float64.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats


def accumulator(kind: str, numel: int, dtype: type = np.float64) -> np.ndarray:
    """What an accumulator may look like: light and heavy tails, zeros, ties."""
    generator = np.random.default_rng(numel)
    x = {
        "normal": lambda: generator.normal(size=numel),
        "laplace": lambda: generator.laplace(size=numel),
        "student-3": lambda: generator.standard_t(3, size=numel),
        "gamma-0.3": lambda: generator.gamma(0.3, size=numel) * generator.choice([-1, 1], size=numel),
        "lognormal-laplace": lambda: generator.lognormal(size=numel) * generator.laplace(size=numel),
        "uniform": lambda: generator.uniform(-1, 1, size=numel),
        "shifted": lambda: generator.normal(-5, 0.1, size=numel),
        "half zeros": lambda: generator.normal(size=numel) * (generator.random(numel) < 0.5),
        "few": lambda: generator.normal(size=numel) * (generator.random(numel) < 0.0005),
        "ties": lambda: generator.integers(-2, 3, size=numel).astype(np.float64),
        "constant": lambda: np.full(numel, -0.5),
        "single": lambda: np.eye(1, numel, numel // 3)[0] * 7,
        "zeros": lambda: np.zeros(numel),
        "outlier": lambda: np.concatenate([generator.normal(size=numel - 1), [1e20]]),
    }[kind]()
    return x.astype(dtype)


SMOOTH = ["normal", "laplace", "student-3", "gamma-0.3", "lognormal-laplace", "uniform", "shifted", "half zeros"]
ROUGH = ["few", "ties", "constant", "single", "zeros", "outlier"]


def reference_redsync(acc: np.ndarray, k: int) -> tuple[list[int], float]:
    """Bisection of the share of the way from the mean to the maximum, until it is known to 0.2."""
    magnitudes = np.abs(acc)
    mean, largest = float(magnitudes.astype(np.float64).mean()), float(magnitudes.max())
    left, right = 0.0, 1.0
    while right - left > 0.2:
        share = left + (right - left) / 2
        threshold = mean + share * (largest - mean)
        picked = np.flatnonzero(magnitudes > acc.dtype.type(threshold))
        if k < picked.size < 2 * k:
            break
        if picked.size < k / 2:
            right = share
        else:  # also where k / 2 to k were found, which are too few already
            left = share
    return picked.tolist(), threshold


def reference_gaussian_k(acc: np.ndarray, k: int) -> tuple[list[int], float]:
    """The upper bound of a normal distribution's central interval, corrected by factors; three trials."""
    magnitudes, values = np.abs(acc), acc.astype(np.float64)
    threshold = float(values.mean() + stats.norm.ppf(1 - k / acc.size / 2) * values.std(ddof=1))
    for _ in range(3):
        picked, tried = np.flatnonzero(magnitudes > acc.dtype.type(threshold)), threshold
        if picked.size < 2 * k / 3:
            threshold *= 0.5
        elif picked.size > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return picked.tolist(), tried  # not `threshold`: the last correction comes to nothing


def reference_dgc(acc: np.ndarray, k: int, *, start: int, sample: float = 0.01) -> tuple[list[int], float]:
    """Threshold from a strided sample, at most ten lower ones, Top-k of too many, and a cut in the order of indices.

    Args:
        acc: accumulator.
        k: picks wanted.
        start: which coordinate is sampled first, before the remainder by the stride is taken.
        sample: share of coordinates that is sampled.
    """
    magnitudes, density = np.abs(acc), k / acc.size
    wanted = min(acc.size, max(math.ceil(sample * acc.size), math.ceil(2 / density)))
    stride = max(s for s in range(1, acc.size + 1, 2) if acc.size // s >= wanted)
    size = acc.size // stride
    sampled = np.sort(magnitudes[start % stride :: stride][:size])[::-1]
    threshold = float(sampled[math.ceil(size * density - 1e-9) - 1])
    for lowered in range(11):
        picked = np.flatnonzero(magnitudes >= acc.dtype.type(threshold))
        if 10 * picked.size > 13 * k:
            order = np.argsort(-magnitudes[picked], kind="stable")
            picked = np.sort(picked[order[:k]])
            threshold = float(magnitudes[picked].min())
            break
        if 10 * picked.size >= 8 * k or lowered == 10:
            break
        threshold *= 0.8
    return picked[:k].tolist(), threshold
