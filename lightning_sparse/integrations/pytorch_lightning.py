"""The strategy and the callbacks for ``pytorch_lightning.Trainer``."""

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.callbacks import FlushResidualMixin, SparsityMonitorMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


class SparsityMonitor(SparsityMonitorMixin, Callback):
    __doc__ = SparsityMonitorMixin.__doc__


class FlushResidual(FlushResidualMixin, Callback):
    __doc__ = FlushResidualMixin.__doc__


register(StrategyRegistry, SparseDDPStrategy)
