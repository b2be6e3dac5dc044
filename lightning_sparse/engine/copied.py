"""The place of an engine in a copy of the model or strategy that it belongs to."""

from __future__ import annotations

from typing import Any


class CopiedEngine:
    """Takes the place of an engine in a copy of the model or strategy that it belongs to: closed, and empty.

    A process group and a thread cannot be copied, and residuals belong to the model that trains. The copy of a
    ``DistributedDataParallel`` model averages gradients densely, as DDP does by itself, until an engine is attached.

    Example:
        >>> import copy, tempfile, torch, lightning_sparse as ls
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
        >>> ddp = DistributedDataParallel(torch.nn.Linear(20, 20))
        >>> engine = ls.attach(ddp)
        >>> average = torch.optim.swa_utils.AveragedModel(ddp)
        >>> copy.deepcopy(engine).step
        Traceback (most recent call last):
        ...
        RuntimeError: This is a copy of an engine: it exchanges nothing, and residuals stay with the original. ...
        >>> engine.close()
        >>> dist.destroy_process_group()
    """

    closed = True

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "This is a copy of an engine: it exchanges nothing, and residuals stay with the original. To exchange the "
            "gradients of a copied model, attach an engine to it with lightning_sparse.attach()."
        )
