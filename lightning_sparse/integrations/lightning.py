"""The strategies for ``lightning.pytorch.Trainer`` and ``lightning.fabric.Fabric``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_sparse.integrations.base import register, register_hsdp, takes_over
from lightning_sparse.integrations.fabric import FabricSparseDDPMixin
from lightning_sparse.integrations.hsdp import FabricSparseHSDPMixin, SparseHSDPMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


@takes_over
class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):  # type: ignore[misc]  # mypy knows the other package's base
    __doc__ = SparseDDPMixin.__doc__
    package = "lightning.pytorch"


@takes_over
class FabricSparseDDPStrategy(FabricSparseDDPMixin, FabricDDPStrategy):  # type: ignore[misc]  # likewise
    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning.fabric"


class SparseHSDPStrategy(SparseHSDPMixin, ModelParallelStrategy):  # type: ignore[misc]  # likewise
    __doc__ = SparseHSDPMixin.__doc__
    package = "lightning.pytorch"


class FabricSparseHSDPStrategy(FabricSparseHSDPMixin, FabricModelParallelStrategy):  # type: ignore[misc]  # likewise
    __doc__ = FabricSparseHSDPMixin.__doc__
    package = "lightning.fabric"


register(StrategyRegistry, SparseDDPStrategy)
register(STRATEGY_REGISTRY, FabricSparseDDPStrategy)
register_hsdp(StrategyRegistry, SparseHSDPStrategy)
