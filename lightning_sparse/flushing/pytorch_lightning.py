"""The callback for ``pytorch_lightning.Trainer``."""

from pytorch_lightning import Callback

from lightning_sparse.flushing.mixin import FlushResidualMixin


class FlushResidual(FlushResidualMixin, Callback):
    """See :class:`~lightning_sparse.flushing.mixin.FlushResidualMixin`."""

    __doc__ = FlushResidualMixin.__doc__
