"""lightning-sparse: PyTorch Lightning strategies that replace DDP's dense all-reduce by a sparsified exchange.

Importing this package registers the strategy names ``sparse_ddp``, ``sparse_ddp_<sparsifier>`` and their variants.
``SparseDDPStrategy`` and ``FabricSparseDDPStrategy`` are those of the Lightning package in use, see
:mod:`lightning_sparse.integrations.packages`; those of each package are in ``lightning_sparse.integrations``, in the
file with its name. The callbacks are for the Trainers of all packages.
"""

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from lightning_sparse.api.attach import attach
from lightning_sparse.api.flush import flush
from lightning_sparse.api.hsdp import attach_hsdp
from lightning_sparse.api.simulation import StepTrace, simulate
from lightning_sparse.core.version import __version__ as __version__
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import SparsificationConfig, Watch
from lightning_sparse.engine.network import LostRankError
from lightning_sparse.engine.state.merging import merge_states
from lightning_sparse.engine.state.sharded import load_sharded, save_sharded
from lightning_sparse.integrations import packages as _packages  # registers the strategy names
from lightning_sparse.integrations.audit import ResidualAudit
from lightning_sparse.integrations.averages import BuildUp, DensityError, PaddingRatio, Traffic
from lightning_sparse.integrations.distribution import GradientDistribution
from lightning_sparse.integrations.flushing import FlushResidual
from lightning_sparse.integrations.monitor import SparsityMonitor
from lightning_sparse.integrations.partitions import PartitionMap
from lightning_sparse.methods import exchanges as _exchanges
from lightning_sparse.methods import memory as _memory
from lightning_sparse.methods import sparsifiers as _sparsifiers
from lightning_sparse.methods.density import Constant, DensitySchedule, Warmup
from lightning_sparse.methods.exchanges import *  # noqa: F403
from lightning_sparse.methods.grouping import GROUPINGS, Grouping, MergeBelow, Rules
from lightning_sparse.methods.memory import *  # noqa: F403
from lightning_sparse.methods.sparsifiers import *  # noqa: F403
from lightning_sparse.tuning.performance import HiddenDensity, OptimalMerge

if _packages.preferred() == _packages.PYTORCH_LIGHTNING:
    from lightning_sparse.integrations.lightning_fabric import FabricSparseDDPStrategy, FabricSparseHSDPStrategy
    from lightning_sparse.integrations.pytorch_lightning import SparseDDPStrategy, SparseHSDPStrategy
else:
    from lightning_sparse.integrations.lightning import (  # type: ignore[assignment]
        FabricSparseDDPStrategy,
        FabricSparseHSDPStrategy,
        SparseDDPStrategy,
        SparseHSDPStrategy,
    )

if TYPE_CHECKING:
    from lightning_sparse.engine.optimizers.adam import Adam, AdamW
    from lightning_sparse.tools.advisor import advise

__all__ = [
    "GROUPINGS",
    "Adam",
    "AdamW",
    "BuildUp",
    "Constant",
    "DensityError",
    "DensitySchedule",
    "Engine",
    "FabricSparseDDPStrategy",
    "FabricSparseHSDPStrategy",
    "FlushResidual",
    "GradientDistribution",
    "Grouping",
    "HiddenDensity",
    "LostRankError",
    "MergeBelow",
    "OptimalMerge",
    "PaddingRatio",
    "PartitionMap",
    "ResidualAudit",
    "Rules",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparsificationConfig",
    "SparsityMonitor",
    "StepTrace",
    "Traffic",
    "Warmup",
    "Watch",
    "advise",
    "attach",
    "attach_hsdp",
    "flush",
    "load_sharded",
    "merge_states",
    "save_sharded",
    "simulate",
]
__all__ += [*_sparsifiers.__all__, *_exchanges.__all__, *_memory.__all__]


_LATER = {"Adam": "engine.optimizers.adam", "AdamW": "engine.optimizers.adam", "advise": "tools.advisor"}


def __getattr__(name: str) -> Any:
    """Import on first use optimizers, which LightningCLI would offer, and tools, which training does not need."""
    if name in _LATER:
        return getattr(_importlib.import_module(f"lightning_sparse.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List names, with those that are imported on first use."""
    return sorted({*globals(), *__all__})
