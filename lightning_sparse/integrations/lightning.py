"""The strategies for ``lightning.pytorch.Trainer`` and ``lightning.fabric.Fabric``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.fabric import FabricSparseDDPMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):  # type: ignore[misc]  # mypy knows the other package's base
    __doc__ = SparseDDPMixin.__doc__
    package = "lightning.pytorch"


class FabricSparseDDPStrategy(FabricSparseDDPMixin, FabricDDPStrategy):  # type: ignore[misc]  # likewise
    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning.fabric"


register(StrategyRegistry, SparseDDPStrategy)
register(STRATEGY_REGISTRY, FabricSparseDDPStrategy)
