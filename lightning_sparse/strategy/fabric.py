"""The strategy for ``lightning.fabric.Fabric``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy

from lightning_sparse.strategy.door import register
from lightning_sparse.strategy.fabric_mixin import FabricSparseDDPMixin


class SparseDDPStrategy(FabricSparseDDPMixin, DDPStrategy):
    """See :class:`~lightning_sparse.strategy.fabric_mixin.FabricSparseDDPMixin`."""

    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning.fabric"


register(STRATEGY_REGISTRY, SparseDDPStrategy)
