"""Who picks which coordinates: one file per method."""

from lightning_sparse.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.sparsifiers.clt_k import CLTk
from lightning_sparse.sparsifiers.dgc import DGC
from lightning_sparse.sparsifiers.everything import Everything
from lightning_sparse.sparsifiers.exdyna import ExDyna
from lightning_sparse.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.sparsifiers.gtop_k import GTopK
from lightning_sparse.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.sparsifiers.micro import MiCRO
from lightning_sparse.sparsifiers.ok_topk import OkTopK
from lightning_sparse.sparsifiers.random_k import RandomK
from lightning_sparse.sparsifiers.redsync import RedSync
from lightning_sparse.sparsifiers.shared_topk import SharedTopK
from lightning_sparse.sparsifiers.sidco import SIDCoE, SIDCoGP, SIDCoP
from lightning_sparse.sparsifiers.striped_topk import StripedTopK
from lightning_sparse.sparsifiers.topk import TopK
from lightning_sparse.sparsifiers.union_topk import UnionTopK

__all__ = [
    "SPARSIFIERS",
    "Sparsifier",
    "CLTk",
    "DGC",
    "Everything",
    "ExDyna",
    "GaussianK",
    "GTopK",
    "HardThreshold",
    "MiCRO",
    "OkTopK",
    "RandomK",
    "RedSync",
    "SharedTopK",
    "SIDCoE",
    "SIDCoGP",
    "SIDCoP",
    "StripedTopK",
    "TopK",
    "UnionTopK",
]
