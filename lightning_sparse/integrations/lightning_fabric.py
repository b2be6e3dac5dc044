"""The strategy for ``lightning_fabric.Fabric``."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy

from lightning_sparse.integrations.base import register, takes_over
from lightning_sparse.integrations.fabric import FabricSparseDDPMixin
from lightning_sparse.integrations.hsdp import FabricSparseHSDPMixin


@takes_over
class FabricSparseDDPStrategy(FabricSparseDDPMixin, DDPStrategy):
    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning_fabric"


class FabricSparseHSDPStrategy(FabricSparseHSDPMixin, ModelParallelStrategy):
    __doc__ = FabricSparseHSDPMixin.__doc__
    package = "lightning_fabric"


register(STRATEGY_REGISTRY, FabricSparseDDPStrategy)
