"""The strategy for ``pytorch_lightning.Trainer``."""

from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, StrategyRegistry

from lightning_sparse.integrations.base import register, register_hsdp, takes_over
from lightning_sparse.integrations.hsdp import SparseHSDPMixin
from lightning_sparse.integrations.trainer import SparseDDPMixin


@takes_over
class SparseDDPStrategy(SparseDDPMixin, DDPStrategy):
    __doc__ = SparseDDPMixin.__doc__
    package = "pytorch_lightning"


class SparseHSDPStrategy(SparseHSDPMixin, ModelParallelStrategy):
    __doc__ = SparseHSDPMixin.__doc__
    package = "pytorch_lightning"


register(StrategyRegistry, SparseDDPStrategy)
register_hsdp(StrategyRegistry, SparseHSDPStrategy)
