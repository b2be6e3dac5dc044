"""The strategy for ``pytorch_lightning.Trainer``."""

from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from lightning_sparse.strategy.door import register
from lightning_sparse.strategy.mixin import SparseDDPMixin


class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    """See :class:`~lightning_sparse.strategy.mixin.SparseDDPMixin`."""

    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


register(StrategyRegistry, SparseDDPStrategy)
