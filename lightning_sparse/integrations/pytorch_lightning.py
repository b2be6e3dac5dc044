"""The strategy and the callbacks for ``pytorch_lightning.Trainer``."""

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.audit import ResidualAuditMixin
from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.distribution import GradientDistributionMixin
from lightning_sparse.integrations.flushing import FlushResidualMixin
from lightning_sparse.integrations.monitor import SparsityMonitorMixin
from lightning_sparse.integrations.partitions import PartitionMapMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


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
