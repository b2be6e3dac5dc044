"""The compared methods, each with the cost of a coordinate on the wire."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lightning_sparse.core.registry import unknown
from lightning_sparse.exchanges import Exchange, PackedUnion
from lightning_sparse.memories import Memory, MomentumCorrection
from lightning_sparse.sparsifiers import (
    CLTK,
    DGC,
    SPARSIFIERS,
    Everything,
    ExDyna,
    GaussianK,
    GTopK,
    HardThreshold,
    MeanTopK,
    MiCRO,
    OkTopK,
    RandomK,
    RedSync,
    SharedTopK,
    SIDCoE,
    SIDCoGP,
    SIDCoP,
    Sparsifier,
    StripedTopK,
    TopK,
    UnionTopK,
)
from lightning_sparse.tools.traffic import count_bytes


class Method(NamedTuple):
    """A sparsifier with its exchange, and its traffic.

    In a step, each rank sends the bytes that :func:`~lightning_sparse.tools.traffic.count_bytes` counts. If these are
    only a bound, ``words`` holds a measured number instead: with k = density * numel, each of n ranks sends
    ``(n - 1) / n * (words(n) * k + header(n))`` words of 4 bytes, on the recorded gradients of the tasks and the
    synthetic stream, with 4 and 8 ranks, at densities 0.01 and 0.001. Bytes then agree within 15 percent, most within
    5, except for HardThreshold, and for methods with PackedUnion, which send up to 25 percent less, because indices
    take fewer bits than when the words were measured.
    """

    name: str
    sparsifier: Sparsifier
    words: Callable[[int], float] | None = None
    header: Callable[[int], float] = lambda n: 0.0
    exchange: Exchange | None = None
    memory: Memory | None = None
    early: bool = False
    """True if the momentum of delayed averages is applied at once, as ``sparse_ddp`` does by default."""

    def equal_density(self, density: float, n: int, numel: int) -> float:
        """Return the density at which the method sends the bytes of MiCRO at ``density``, in a group of ``numel``."""
        budget = _exclusive(n) * density * numel + _survey(n)
        if self.words is None:
            allowed = 4 * (n - 1) / n * budget
            return (bisect_right(range(1, numel + 1), allowed, key=lambda k: self._sent(k, n, numel)) or 1) / numel
        return min(1.0, max(1.0, (budget - self.header(n)) / self.words(n)) / numel)

    def _sent(self, k: int, n: int, numel: int) -> float:
        # Half a coordinate more: k / numel times numel may be a little less than k.
        density = min(1.0, (k + 0.5) / numel)
        return count_bytes(self.sparsifier, numel, n, density, exchange=self.exchange).bytes_sent

    @property
    def ours(self) -> bool:
        """True if this package proposes the method, not a paper."""
        return self.early or isinstance(self.sparsifier, (SharedTopK, StripedTopK, UnionTopK))


def _pairs(picks: float) -> Callable[[int], float]:
    """Return the words if every rank sends its own indices and values to all others, padded to the longest selection.

    Args:
        picks: length of the longest selection, in multiples of k.
    """
    return lambda n: 2.0 * n * picks


def _exclusive(n: int) -> float:
    """Return the words if each of k indices is gathered once, padded by f(t), and its value all-reduced.

    f(t) is at its cap of 2 if layers differ, and lower for two ranks.
    """
    return 4.0 if n > 2 else 3.5


def _survey(n: int) -> float:
    """Return the words of the order statistics from which MiCRO and ExDyna derive their threshold, and of a count."""
    return 34.0 * n


def _heads(n: int) -> float:
    """Return the words of PackedUnion's header, and of marks of the upper bits of some 200 000 coordinates."""
    return 6.0 * n


METHODS = [
    Method("top_k", TopK()),
    Method("dgc", DGC(), _pairs(1.15), memory=MomentumCorrection()),
    Method("redsync", RedSync(), _pairs(1.8)),
    Method("gaussian_k", GaussianK(), _pairs(1.22)),
    Method("sidco_e", SIDCoE(), _pairs(1.07)),
    Method("sidco_gp", SIDCoGP(), _pairs(1.07)),
    Method("sidco_p", SIDCoP(), _pairs(1.07)),
    # Its threshold does not follow the density, so that no density gives it a set traffic.
    Method("hard_threshold", HardThreshold(), _pairs(1.0)),
    Method("random_k", RandomK()),
    Method("clt_k", CLTK()),
    Method("gtop_k", GTopK()),
    Method("ok_top_k", OkTopK(), lambda n: 6.0, lambda n: 1.0 * n * n),
    Method("micro", MiCRO(), _exclusive, _survey),
    Method("exdyna", ExDyna(), _exclusive, _survey),
    Method("striped_top_k", StripedTopK()),
    Method("shared_top_k", SharedTopK()),
    Method("shared_top_k+packed", SharedTopK(), lambda n: 1.4, _heads, exchange=PackedUnion()),
    # About half the words of SharedTopK, and up to twice as many indices as its union holds.
    Method("union_top_k", UnionTopK(), lambda n: 1.95, _heads),
    Method("union_top_k+momentum", UnionTopK(), lambda n: 1.95, _heads, memory=MomentumCorrection()),
    Method("union_top_k+early", UnionTopK(), lambda n: 1.95, _heads, early=True),
    # Those of UnionTopK, and 2.1 bits of each coordinate that is looked at: six for each one that is sent.
    Method("mean_top_k", MeanTopK(), lambda n: 2.3, _heads),
    Method("top_k+early", TopK(), early=True),
    Method("exdyna+early", ExDyna(), _exclusive, _survey, early=True),
]
METHODS += [
    Method(name, cls())
    for name, cls in SPARSIFIERS.items()
    if cls not in {Everything, *(type(method.sparsifier) for method in METHODS)}
]
"""Published methods first, then ours from ``striped_top_k`` on, then the default with other sparsifiers. A memory with
momentum needs an optimizer without."""

DENSE = Method("dense", Everything())


def choose(names: Sequence[str] | None) -> list[Method]:
    """Return methods by name; None: all.

    Raises:
        ValueError: for an unknown name.
    """
    known = {method.name: method for method in [*METHODS, DENSE]}
    for name in names or []:
        if name not in known:
            raise unknown("sparsifier", name, known)
    return list(METHODS) if names is None else [known[name] for name in names]
