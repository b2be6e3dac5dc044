"""The strategy and the callbacks for ``pytorch_lightning.Trainer``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.audit import ResidualAudit as ResidualAudit
from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.distribution import GradientDistribution as GradientDistribution
from lightning_sparse.integrations.flushing import FlushResidual as FlushResidual
from lightning_sparse.integrations.monitor import SparsityMonitor as SparsityMonitor
from lightning_sparse.integrations.partitions import PartitionMap as PartitionMap
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


register(StrategyRegistry, SparseDDPStrategy)
