"""The monitor for ``lightning.pytorch.Trainer``."""

from lightning.pytorch import Callback

from lightning_sparse.monitor.mixin import SparsityMonitorMixin


class SparsityMonitor(SparsityMonitorMixin, Callback):
    """See :class:`~lightning_sparse.monitor.mixin.SparsityMonitorMixin`."""

    __doc__ = SparsityMonitorMixin.__doc__
