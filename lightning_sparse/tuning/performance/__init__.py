"""Cost of a training step: the cost model, measurements for it between real ranks, and decisions by them.

One recurrence gives the end of a step (``cost.py``), from the seconds of backward, selection and exchange. A
:class:`Profiler` measures them in a run, a :class:`Profile` holds them. ``merge.py`` and ``densities.py`` choose groups
and densities by a profile.
"""

from lightning_sparse.tuning.performance.cost import NOTHING, CostModel, Curve, Line
from lightning_sparse.tuning.performance.densities import HiddenDensity, hidden_densities
from lightning_sparse.tuning.performance.merge import OptimalMerge, greedy_merge, iteration_seconds, optimal_merge
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Overlap, Plain, Profile, Traffic
from lightning_sparse.tuning.performance.profiler import Profiler
from lightning_sparse.tuning.performance.rank_sync import measure

__all__ = [
    "CostModel",
    "Curve",
    "GroupCost",
    "HiddenDensity",
    "LayerTime",
    "Line",
    "NOTHING",
    "Network",
    "OptimalMerge",
    "Overlap",
    "Plain",
    "Profile",
    "Profiler",
    "Traffic",
    "greedy_merge",
    "hidden_densities",
    "iteration_seconds",
    "measure",
    "optimal_merge",
]
