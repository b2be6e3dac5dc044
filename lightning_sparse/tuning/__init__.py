"""Observers that change an engine between two steps: cost models, planner, dense fallback, watchdogs."""

from lightning_sparse.tuning.performance.densities import HiddenDensity
from lightning_sparse.tuning.performance.merge import OptimalMerge

__all__ = ["HiddenDensity", "OptimalMerge"]
