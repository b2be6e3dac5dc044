"""What watches an engine at work and changes its groups: plans from profiles, and the way back to dense."""

from lightning_sparse.tuning.fallback import Fallback
from lightning_sparse.tuning.planner import Planner

__all__ = ["Fallback", "Planner"]
