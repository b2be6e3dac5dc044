"""One entry per sparsifier configuration: a new method is tested by adding a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

import lightning_sparse as ls


class Case(NamedTuple):
    name: str
    sparsifier: ls.sparsifiers.Sparsifier
    serves: Callable[[int, int, float], bool] = lambda n, numel, density: True
    """Whether the method can serve a group: n ranks, numel coordinates, density."""
    numbered: bool = False
    """True if what is picked depends on the number of the step, and not only on state and gradients."""
    private: bool = False
    """True if each rank keeps its own state and threshold, found from its own data alone."""

    def is_dense(self, numel: int, density: float) -> bool:
        """Whether the density asks for all coordinates, so that neither the sparsifier nor the exchange is asked."""
        return self.name not in ("hard_threshold", "everything") and max(1, int(density * numel)) == numel


def _published_micro_serves(n: int, numel: int, density: float) -> bool:
    """Its k = int(density * numel) must not be 0, and no rank's range may be empty."""
    return numel >= n and int(density * numel) >= 1


def _published_exdyna_serves(n: int, numel: int, density: float) -> bool:
    """Eight blocks of at least 32 coordinates, and at least one block for each rank."""
    return numel >= 8 * 32 and n <= 8 and int(density * numel) >= 1


CASES = [
    Case("top_k", ls.sparsifiers.TopK()),
    # 2 standard deviations of the test streams: few coordinates at first, none in some steps.
    Case("hard_threshold", ls.sparsifiers.HardThreshold(2.0)),
    Case("micro", ls.sparsifiers.MiCRO(), numbered=True),
    Case("micro-published", ls.sparsifiers.MiCRO(variant="published"), _published_micro_serves, numbered=True),
    Case("exdyna", ls.sparsifiers.ExDyna(), numbered=True),
    Case("exdyna-few-blocks", ls.sparsifiers.ExDyna(num_blocks=8), numbered=True),
    Case(
        "exdyna-published",
        ls.sparsifiers.ExDyna(num_blocks=8, variant="published"),
        _published_exdyna_serves,
        numbered=True,
    ),
    Case("shared_top_k", ls.sparsifiers.SharedTopK(), numbered=True),
    Case("union_top_k", ls.sparsifiers.UnionTopK(), numbered=True),
    Case("union_top_k-bounded", ls.sparsifiers.UnionTopK(max_factor=1.1), numbered=True),
    Case("mean_top_k", ls.sparsifiers.MeanTopK(), numbered=True),
    Case("striped_top_k", ls.sparsifiers.StripedTopK(), numbered=True),
    Case("striped_top_k-single", ls.sparsifiers.StripedTopK(block=1), numbered=True),
    Case("dgc", ls.sparsifiers.DGC(), private=True),
    Case("dgc-sampled", ls.sparsifiers.DGC(exact_below=1), numbered=True, private=True),
    Case("published-dgc", ls.sparsifiers.DGC(variant="published"), numbered=True, private=True),
    Case("redsync", ls.sparsifiers.RedSync(), private=True),
    Case("published-redsync", ls.sparsifiers.RedSync(variant="published"), private=True),
    Case("gaussian_k", ls.sparsifiers.GaussianK(), private=True),
    Case("published-gaussian_k", ls.sparsifiers.GaussianK(variant="published"), private=True),
    Case("sidco_e", ls.sparsifiers.SIDCoE(), private=True),
    Case("sidco_gp", ls.sparsifiers.SIDCoGP(), private=True),
    Case("sidco_p", ls.sparsifiers.SIDCoP(), private=True),
    Case("published-sidco_gp", ls.sparsifiers.SIDCoGP(variant="published"), private=True),
    Case("clt_k", ls.sparsifiers.CLTK(), numbered=True),
    Case("random_k", ls.sparsifiers.RandomK(), numbered=True),
    Case("gtop_k", ls.sparsifiers.GTopK()),
    # Estimates in steps 0 and 3, and steps that follow.
    Case("ok_top_k", ls.sparsifiers.OkTopK(interval=3, gain=1.2), numbered=True, private=True),
    Case("everything", ls.sparsifiers.Everything()),
]

PAIRS = [
    (case, exchange)
    for case in CASES
    for exchange, cls in ls.exchanges.EXCHANGES.items()
    if case.sparsifier.agreement in cls.accepts
]
"""Every configuration with every exchange that accepts it."""


def kinds(case: Case, exchange: str, *rest: Any) -> tuple[Any, ...]:
    """What has to meet where not all of :data:`PAIRS` are run: all sparsifiers and, with every exchange, all kinds of
    selections that it accepts and all values of what else there is. Of which kind theirs are, sparsifiers say."""
    return case, (case.sparsifier.agreement, exchange), *((exchange, one) for one in rest)


PAIR_NAMES = [f"{case.name}-{exchange}" for case, exchange in PAIRS]


class Offer(NamedTuple):
    """What a rank knows when it forms its accumulator."""

    before: dict[str, Tensor]
    """What it remembers of each coordinate, by name."""
    gradient: Tensor
    number: int
    """Steps that counted, this one included."""
    n: int

    @property
    def residual(self) -> Tensor:
        return self.before["residual"]


def not_sent(residual: Tensor, acc: Tensor, gradient: Tensor, given: Tensor) -> Tensor:
    return acc - given


class Law(NamedTuple):
    """What a memory does, by the formulas of the papers."""

    offered: Callable[[Offer], Tensor]
    """The accumulator that a rank brings to the exchange."""
    kept: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = not_sent
    """The residual after the step, from residual before, accumulator, gradient and what was given. Linear: of sums over
    ranks, it is the sum of residuals."""


def clipped(offer: Offer, limit: float) -> Tensor:
    return offer.residual + offer.gradient * min(1, limit / offer.n**0.5 / offer.gradient.square().sum().sqrt())


def adam(offer: Offer, beta1: float = 0.0, beta2: float = 0.999, eps: float = 1e-8) -> Tensor:
    m = beta1 * offer.before.get("first", 0) + (1 - beta1) * offer.gradient
    v = beta2 * offer.before["second"] + (1 - beta2) * offer.gradient**2
    m, v = m / (1 - beta1**offer.number), v / (1 - beta2**offer.number)
    return offer.residual + offer.n**0.5 * (m / (v**0.5 + eps))


MEMORIES = {
    ls.memories.Residual(decay=0.5): Law(lambda offer: 0.5 * offer.residual + offer.gradient),
    ls.memories.LowPass(0.25): Law(
        lambda offer: offer.residual + offer.gradient,
        lambda residual, acc, gradient, given: residual + 0.25 * (gradient - given),
    ),
    ls.memories.MomentumCorrection(0.5): Law(
        lambda offer: offer.residual + 0.5 * offer.before["momentum"] + offer.gradient
    ),
    ls.memories.MomentumCorrection(0.5, nesterov=True, masking=False): Law(
        lambda offer: offer.residual + 0.5 * (offer.before["momentum"] + offer.gradient) + offer.gradient
    ),
    ls.memories.ClipByNorm(4.0): Law(lambda offer: clipped(offer, 4.0)),
    ls.memories.AdamCorrection(): Law(adam),
    ls.memories.SecondMoment(beta2=0.5): Law(
        lambda offer: offer.before["carry"] * offer.residual + offer.before["take"] * offer.gradient
    ),
    ls.memories.AdamCorrection(beta1=0.75): Law(lambda offer: adam(offer, beta1=0.75)),
}
"""Memories beside the plain residual, with settings that are exact in sums of a few small binary fractions."""


def fit(memory: ls.memories.Memory, exchange: str) -> bool:
    """Whether a memory and an exchange go together."""
    return not memory.needs_second or dict(ls.exchanges.EXCHANGES.items())[exchange].carries_second
