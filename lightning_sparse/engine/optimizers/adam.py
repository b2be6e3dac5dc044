"""Adam and AdamW that engines find by themselves.

Imported by the first use of ``lightning_sparse.Adam`` or ``AdamW`` only: from then on, LightningCLI knows two classes
by each of these names, and asks for the whole path where it is told ``--optimizer=AdamW``.
"""

from __future__ import annotations

import torch

from lightning_sparse.engine.optimizers.kinds import Found


class Adam(Found, torch.optim.Adam):
    """``torch.optim.Adam`` that also knows how to step behind a sparse exchange.

    All arguments, parameter groups, states and files are torch's. On one device, in plain DDP, behind a dense exchange
    and for parameters that stay dense, it *is* torch's. Of parameters that an engine of this package sparsifies, the
    engine takes the steps, with this optimizer's learning rate, second beta and eps, see
    :class:`.SecondMoment`; no first moment is kept of them.

    Strategies for the Trainer and for Fabric do the same for torch's own classes. With :func:`~lightning_sparse.attach`
    torch's classes have to be shown to the engine, ``engine.bind([optimizer])``, and these here are found.

    Not served, and left to torch as they are: ``amsgrad``, ``differentiable``, and a ``weight_decay`` of ``Adam``,
    which is added to gradients.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        >>> for weight, optimizer in zip(weights, (ls.Adam([weights[0]]), torch.optim.Adam([weights[1]]))):
        ...     weight.grad = torch.tensor([1.0, -2.0, 3.0])
        ...     optimizer.step()
        >>> torch.equal(*weights)
        True
    """


class AdamW(Found, torch.optim.AdamW):
    """``torch.optim.AdamW`` that also knows how to step behind a sparse exchange; see :class:`Adam`.

    Its weight decay is decoupled from gradients, and acts on all coordinates at every step.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> model = torch.nn.Linear(8, 8)
        >>> optimizer = ls.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        >>> isinstance(optimizer, torch.optim.AdamW)
        True
    """
