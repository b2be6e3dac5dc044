"""The strategy for ``lightning_fabric.Fabric``, which comes with ``pytorch_lightning``."""

from lightning_fabric.strategies import STRATEGY_REGISTRY
from lightning_fabric.strategies.ddp import DDPStrategy

from lightning_sparse.strategy.door import register
from lightning_sparse.strategy.fabric_mixin import FabricSparseDDPMixin


class SparseDDPStrategy(FabricSparseDDPMixin, DDPStrategy):
    """See :class:`~lightning_sparse.strategy.fabric_mixin.FabricSparseDDPMixin`."""

    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning_fabric"


register(STRATEGY_REGISTRY, SparseDDPStrategy)
