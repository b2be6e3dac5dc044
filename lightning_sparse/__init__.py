"""lightning-sparse: PyTorch Lightning strategies that replace DDP's dense all-reduce by a sparsified exchange.

Importing this package registers the strategy names ``sparse_ddp``, with the variants that Lightning has for ``ddp``,
and ``sparse_hsdp``. ``SparseDDPStrategy`` and ``FabricSparseDDPStrategy`` are those of the Lightning package in use,
see :mod:`lightning_sparse.integrations.packages`; those of each package are in ``lightning_sparse.integrations``, in
the file with its name. The callbacks are for the Trainers of all packages.

Methods are in modules: ``sparsifiers``, ``exchanges``, ``memories``, ``density``, ``grouping``, ``metrics`` and
``tuning``, as in ``ls.sparsifiers.ExDyna(alpha=2)``.
"""

import importlib as _importlib
import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING, Any

from lightning_sparse import tuning as tuning
from lightning_sparse.api.attach import attach
from lightning_sparse.api.flush import flush
from lightning_sparse.api.simulation import simulate
from lightning_sparse.core.version import __version__ as __version__
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import Watch
from lightning_sparse.engine.network import LostRankError
from lightning_sparse.engine.state.merging import merge_states
from lightning_sparse.hsdp.attach import attach_hsdp
from lightning_sparse.hsdp.state import load_sharded, save_sharded
from lightning_sparse.integrations import averages as metrics  # noqa: F401
from lightning_sparse.integrations import packages as _packages  # registers the strategy names
from lightning_sparse.integrations.audit import ResidualAudit
from lightning_sparse.integrations.distribution import GradientDistribution
from lightning_sparse.integrations.flushing import FlushResidual
from lightning_sparse.integrations.monitor import SparsityMonitor
from lightning_sparse.integrations.partitions import PartitionMap
from lightning_sparse.methods import density, exchanges, grouping, sparsifiers  # noqa: F401
from lightning_sparse.methods import memory as memories  # noqa: F401
from lightning_sparse.methods.density import Warmup
from lightning_sparse.methods.grouping import Rules

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
    from lightning_sparse.tools.advisor import advise

__all__ = [
    "Engine",
    "FabricSparseDDPStrategy",
    "FabricSparseHSDPStrategy",
    "FlushResidual",
    "GradientDistribution",
    "LostRankError",
    "PartitionMap",
    "ResidualAudit",
    "Rules",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparsityMonitor",
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


def _second_name(name: str, module: _ModuleType) -> _ModuleType:
    """Return a module ``lightning_sparse.<name>`` with the public names of another one, and without its files."""
    found = _ModuleType(f"{__name__}.{name}", module.__doc__)
    vars(found).update({public: getattr(module, public) for public in module.__all__}, __all__=module.__all__)
    return _sys.modules.setdefault(found.__name__, found)


# As `os.path`: `from lightning_sparse.sparsifiers import ExDyna` and class paths of configurations find them, too.
for _name in ("density", "exchanges", "grouping", "memories", "metrics", "sparsifiers"):
    globals()[_name] = _second_name(_name, globals()[_name])

_LATER = {"advise": "tools.advisor"}


def __getattr__(name: str) -> Any:
    """Import tools on first use: training does not need them."""
    if name in _LATER:
        return getattr(_importlib.import_module(f"lightning_sparse.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List names, with those that are imported on first use."""
    return sorted({*globals(), *__all__})
