"""Who picks which coordinates: one file per method."""

from lightning_sparse.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.sparsifiers.everything import Everything
from lightning_sparse.sparsifiers.exdyna import ExDyna
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.sparsifiers.micro import MiCRO
from lightning_sparse.sparsifiers.shared_topk import SharedTopK
from lightning_sparse.sparsifiers.striped_topk import StripedTopK
from lightning_sparse.sparsifiers.topk import TopK

__all__ = [
    "SPARSIFIERS",
    "Everything",
    "ExDyna",
    "HardThreshold",
    "MiCRO",
    "SharedTopK",
    "Sparsifier",
    "StripedTopK",
    "TopK",
]
