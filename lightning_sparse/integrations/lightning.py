"""The strategies and the callbacks for ``lightning.pytorch.Trainer`` and ``lightning.fabric.Fabric``."""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.audit import ResidualAuditMixin
from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.distribution import GradientDistributionMixin
from lightning_sparse.integrations.fabric import FabricSparseDDPMixin
from lightning_sparse.integrations.flushing import FlushResidualMixin
from lightning_sparse.integrations.monitor import SparsityMonitorMixin
from lightning_sparse.integrations.partitions import PartitionMapMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):  # type: ignore[misc]  # mypy knows the other package's base
    __doc__ = SparseDDPMixin.__doc__
    package = "lightning.pytorch"


class FabricSparseDDPStrategy(FabricSparseDDPMixin, FabricDDPStrategy):  # type: ignore[misc]  # likewise
    __doc__ = FabricSparseDDPMixin.__doc__
    package = "lightning.fabric"


class SparsityMonitor(SparsityMonitorMixin, Callback):
    __doc__ = SparsityMonitorMixin.__doc__


class FlushResidual(FlushResidualMixin, Callback):
    __doc__ = FlushResidualMixin.__doc__


class GradientDistribution(GradientDistributionMixin, Callback):
    __doc__ = GradientDistributionMixin.__doc__


class PartitionMap(PartitionMapMixin, Callback):
    __doc__ = PartitionMapMixin.__doc__


class ResidualAudit(ResidualAuditMixin, Callback):
    __doc__ = ResidualAuditMixin.__doc__


register(StrategyRegistry, SparseDDPStrategy)
register(STRATEGY_REGISTRY, FabricSparseDDPStrategy)
