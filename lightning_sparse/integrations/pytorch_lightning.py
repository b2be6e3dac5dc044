"""The strategy for ``pytorch_lightning.Trainer``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.integrations.base import register
from lightning_sparse.integrations.trainer import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


register(StrategyRegistry, SparseDDPStrategy)
