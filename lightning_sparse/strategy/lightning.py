"""The strategy for ``lightning.pytorch.Trainer``."""

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.strategy.door import register
from lightning_sparse.strategy.mixin import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    """See :class:`~lightning_sparse.strategy.mixin.SparseDDPMixin`."""

    __doc__ = SparseDDPMixin.__doc__
    package = "lightning.pytorch"


register(StrategyRegistry, SparseDDPStrategy)
