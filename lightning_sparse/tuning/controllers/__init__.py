"""Run-time controllers, which act between two steps: groups by a profile, dense fallback, watchdogs."""

from lightning_sparse.tuning.controllers.dense_fallback import DenseFallback, StayDense

__all__ = ["DenseFallback", "StayDense"]
