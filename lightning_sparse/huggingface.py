"""``transformers.Trainer``: one line before ``trainer.train()`` replaces the dense gradient all-reduce.

Example::

    from transformers import Trainer
    from lightning_sparse.huggingface import prepare_trainer

    trainer = prepare_trainer(Trainer(model=model, args=arguments, train_dataset=data), density=0.01)
    trainer.train()
"""

from lightning_sparse.integrations.transformers import SparseDDPCallback, prepare_trainer

__all__ = ["SparseDDPCallback", "prepare_trainer"]
