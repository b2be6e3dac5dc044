"""lightning-sparse: PyTorch Lightning strategies that replace DDP's dense all-reduce by a sparsified exchange.

Importing this package registers the strategy names ``sparse_ddp``, ``sparse_ddp_<sparsifier>`` and their variants.
``SparseDDPStrategy``, ``FabricSparseDDPStrategy`` and the callbacks are those of the Lightning package in use, see
:mod:`lightning_sparse.integrations.packages`; those of each package are in ``lightning_sparse.integrations``, in the
file with its name.
"""

from typing import TYPE_CHECKING, Any

from lightning_sparse import exchanges as _exchanges
from lightning_sparse import memory as _memory
from lightning_sparse import sparsifiers as _sparsifiers
from lightning_sparse.advisor import advise
from lightning_sparse.attach import attach
from lightning_sparse.averages import BuildUp, DensityError, PaddingRatio, Traffic
from lightning_sparse.collective import LostRankError
from lightning_sparse.config import SparsificationConfig, Watch
from lightning_sparse.density import Accordion, Constant, DensitySchedule, Warmup
from lightning_sparse.exchanges import *  # noqa: F403
from lightning_sparse.flush import flush
from lightning_sparse.integrations import packages as _packages  # registers the strategy names
from lightning_sparse.memory import *  # noqa: F403
from lightning_sparse.performance import HiddenDensity, OptimalMerge, TimeBudget
from lightning_sparse.plan import GROUPINGS, Grouping, MergeBelow, Rules
from lightning_sparse.reducer import Engine
from lightning_sparse.reducer.merging import merge_states
from lightning_sparse.simulation import StepTrace, simulate
from lightning_sparse.sparsifiers import *  # noqa: F403

if _packages.preferred() == _packages.PYTORCH_LIGHTNING:
    from lightning_sparse.integrations.lightning_fabric import FabricSparseDDPStrategy
    from lightning_sparse.integrations.pytorch_lightning import (
        FlushResidual,
        GradientDistribution,
        PartitionMap,
        ResidualAudit,
        SparseDDPStrategy,
        SparsityMonitor,
    )
else:
    from lightning_sparse.integrations.lightning import (  # type: ignore[assignment]
        FabricSparseDDPStrategy,
        FlushResidual,
        GradientDistribution,
        PartitionMap,
        ResidualAudit,
        SparseDDPStrategy,
        SparsityMonitor,
    )

if TYPE_CHECKING:
    from lightning_sparse.adam import Adam, AdamW

__version__ = "0.1.0"

__all__ = [
    "GROUPINGS",
    "Accordion",
    "Adam",
    "AdamW",
    "BuildUp",
    "Constant",
    "DensityError",
    "DensitySchedule",
    "Engine",
    "FabricSparseDDPStrategy",
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
    "SparsificationConfig",
    "SparsityMonitor",
    "StepTrace",
    "TimeBudget",
    "Traffic",
    "Warmup",
    "Watch",
    "advise",
    "attach",
    "flush",
    "merge_states",
    "simulate",
]
__all__ += [*_sparsifiers.__all__, *_exchanges.__all__, *_memory.__all__]


def __getattr__(name: str) -> Any:
    """Optimizers, imported when they are used: see :mod:`lightning_sparse.adam`."""
    if name in ("Adam", "AdamW"):
        from lightning_sparse import adam

        return getattr(adam, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """With the optimizers."""
    return sorted({*globals(), *__all__})
