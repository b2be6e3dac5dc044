"""The monitor for ``pytorch_lightning.Trainer``."""

from pytorch_lightning import Callback

from lightning_sparse.monitor.mixin import SparsityMonitorMixin


class SparsityMonitor(SparsityMonitorMixin, Callback):
    """See :class:`~lightning_sparse.monitor.mixin.SparsityMonitorMixin`."""

    __doc__ = SparsityMonitorMixin.__doc__
