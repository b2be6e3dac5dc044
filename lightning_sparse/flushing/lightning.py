"""The callback for ``lightning.pytorch.Trainer``."""

from lightning.pytorch import Callback

from lightning_sparse.flushing.mixin import FlushResidualMixin


class FlushResidual(FlushResidualMixin, Callback):
    """See :class:`~lightning_sparse.flushing.mixin.FlushResidualMixin`."""

    __doc__ = FlushResidualMixin.__doc__
