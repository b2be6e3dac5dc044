"""Sparsifiers, which select the coordinates to send: one file per method."""

from lightning_sparse.methods.sparsifiers.base import SPARSIFIERS, Sparsifier
from lightning_sparse.methods.sparsifiers.clt_k import CLTK
from lightning_sparse.methods.sparsifiers.dgc import DGC
from lightning_sparse.methods.sparsifiers.everything import Everything
from lightning_sparse.methods.sparsifiers.exdyna import ExDyna
from lightning_sparse.methods.sparsifiers.gaussian_k import GaussianK
from lightning_sparse.methods.sparsifiers.gtop_k import GTopK
from lightning_sparse.methods.sparsifiers.hard_threshold import HardThreshold
from lightning_sparse.methods.sparsifiers.mean_top_k import MeanTopK
from lightning_sparse.methods.sparsifiers.micro import MiCRO
from lightning_sparse.methods.sparsifiers.ok_top_k import OkTopK
from lightning_sparse.methods.sparsifiers.random_k import RandomK
from lightning_sparse.methods.sparsifiers.redsync import RedSync
from lightning_sparse.methods.sparsifiers.shared_top_k import SharedTopK
from lightning_sparse.methods.sparsifiers.sidco import SIDCoE, SIDCoGP, SIDCoP
from lightning_sparse.methods.sparsifiers.striped_top_k import StripedTopK
from lightning_sparse.methods.sparsifiers.top_k import TopK
from lightning_sparse.methods.sparsifiers.union_top_k import UnionTopK

__all__ = [
    "SPARSIFIERS",
    "Sparsifier",
    "CLTK",
    "DGC",
    "Everything",
    "ExDyna",
    "GaussianK",
    "GTopK",
    "HardThreshold",
    "MeanTopK",
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
