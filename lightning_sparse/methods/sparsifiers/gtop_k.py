"""gTop-k: the k largest magnitudes of each rank, merged into k for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS
from lightning_sparse.methods.sparsifiers.top_k import TopK


@SPARSIFIERS.register
@dataclass(frozen=True)
class GTopK(TopK):
    """Global top-k: every rank selects its k largest magnitudes, and k of the sums are kept for all ranks together.

    Selections are those of :class:`.TopK`; the exchange ``"tree"`` merges the ranks'
    selections in pairs and keeps the k largest sums each time. The update has k coordinates and a rank sends k for any
    n, without build-up, while the time grows with log n. The result approximates the k largest of the sum of all
    selections: a coordinate that is dropped early may also be selected in another branch.

    Formula:
        ``S_i = argtop_k |acc_i|``; ``update = (1/n) topk(... topk(x_0 + x_1) + topk(x_2 + x_3) ...)`` with ``x_i =
        scatter(S_i, acc_i[S_i])``, merged in pairs

    Differs from the paper:
        It works with any number of ranks (the released code with powers of two), and dropped values stay in residuals,
        see :class:`.Tree`.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> grads = torch.tensor([[[4.0, 0.0, -1.0, 2.0], [0.0, 8.0, 1.0, 2.0]]])     # one step, two ranks
        >>> step = next(ls.simulate(grads, sparsifier="gtop_k", density=0.25))
        >>> step.counts.tolist(), step.indices.tolist(), step.update.tolist()
        ([1, 1], [1], [0.0, 4.0, 0.0, 0.0])

    References:
        Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
        ICDCS 2019, arXiv 1901.04359, algorithm 4.
    """

    name: ClassVar[str] = "gtop_k"
    exchange: ClassVar[str] = "tree"
    is_its_exchange: ClassVar[bool] = True
