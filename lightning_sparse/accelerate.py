"""Accelerate: one line after ``accelerator.prepare`` replaces the dense gradient all-reduce.

Example::

    from accelerate import Accelerator
    from lightning_sparse.accelerate import attach

    accelerator = Accelerator()
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    attach(accelerator, model, optimizer, density=0.01)
"""

from lightning_sparse.integrations.accelerate import attach

__all__ = ["attach"]
