"""lightning-sparse: PyTorch Lightning strategies that replace DDP's dense all-reduce by a sparsified exchange.

Importing this package registers the strategy names ``sparse_ddp``, ``sparse_ddp_<sparsifier>`` and their variants.
``SparseDDPStrategy``, ``FabricSparseDDPStrategy`` and the callbacks are those of the Lightning package in use, see
:mod:`lightning_sparse.packages`; those of all packages are in ``lightning_sparse.strategy``, ``.monitor`` and
``.flushing``.
"""

from lightning_sparse import packages as _packages
from lightning_sparse import sparsifiers as _sparsifiers
from lightning_sparse import strategy as _strategy  # noqa: F401  # registers the strategy names
from lightning_sparse.advisor import advise
from lightning_sparse.attach import attach
from lightning_sparse.checkpoint import merge_states
from lightning_sparse.collective import LostRankError
from lightning_sparse.density import Accordion, Constant, DensitySchedule, HiddenDensity, TimeBudget, Warmup
from lightning_sparse.exchanges import (
    EXCHANGES,
    Balanced,
    Dense,
    Exchange,
    FollowLeader,
    GatherPairs,
    PackedUnion,
    ReduceShared,
    ReduceUnion,
    Tree,
)
from lightning_sparse.flushing import flush
from lightning_sparse.grouping import GROUPINGS, Grouping, MergeBelow, OptimalMerge, Rules
from lightning_sparse.hook import Engine
from lightning_sparse.memory import (
    AdamCorrection,
    ClipByNorm,
    LowPass,
    Memory,
    MomentumCorrection,
    NoMemory,
    Residual,
    WeightDecay,
)
from lightning_sparse.simulation import StepTrace, simulate
from lightning_sparse.sparsifiers import *  # noqa: F403
from lightning_sparse.watch import Watch

if _packages.preferred() == _packages.PYTORCH_LIGHTNING:
    from lightning_sparse.flushing.pytorch_lightning import FlushResidual
    from lightning_sparse.monitor.pytorch_lightning import SparsityMonitor
    from lightning_sparse.strategy.lightning_fabric import SparseDDPStrategy as FabricSparseDDPStrategy
    from lightning_sparse.strategy.pytorch_lightning import SparseDDPStrategy
else:
    from lightning_sparse.flushing.lightning import FlushResidual  # type: ignore[assignment]
    from lightning_sparse.monitor.lightning import SparsityMonitor  # type: ignore[assignment]
    from lightning_sparse.strategy.fabric import (  # type: ignore[assignment]
        SparseDDPStrategy as FabricSparseDDPStrategy,
    )
    from lightning_sparse.strategy.lightning import SparseDDPStrategy  # type: ignore[assignment]

__version__ = "0.1.0"

__all__ = [
    "EXCHANGES",
    "GROUPINGS",
    "Accordion",
    "AdamCorrection",
    "Balanced",
    "ClipByNorm",
    "Constant",
    "Dense",
    "DensitySchedule",
    "Engine",
    "Exchange",
    "FabricSparseDDPStrategy",
    "FlushResidual",
    "FollowLeader",
    "GatherPairs",
    "Grouping",
    "HiddenDensity",
    "LostRankError",
    "LowPass",
    "Memory",
    "MergeBelow",
    "MomentumCorrection",
    "NoMemory",
    "OptimalMerge",
    "PackedUnion",
    "ReduceShared",
    "ReduceUnion",
    "Residual",
    "Rules",
    "SparseDDPStrategy",
    "SparsityMonitor",
    "StepTrace",
    "TimeBudget",
    "Tree",
    "Warmup",
    "WeightDecay",
    "Watch",
    "advise",
    "attach",
    "flush",
    "merge_states",
    "simulate",
]
__all__ += _sparsifiers.__all__
