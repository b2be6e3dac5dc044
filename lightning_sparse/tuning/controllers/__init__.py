"""Run-time controllers, which act between two steps: groups by a profile, dense fallback, watchdogs."""

from lightning_sparse.tuning.controllers.dense_fallback import DenseFallback, StayDense
from lightning_sparse.tuning.controllers.planner import Planner

__all__ = ["DenseFallback", "Planner", "StayDense"]
