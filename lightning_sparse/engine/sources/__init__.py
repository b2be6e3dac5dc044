"""Sources: they hand gradients to an engine's router, and averages to optimizers.

A source calls ``engine.router``, on all ranks in the same order:

- ``begin_step()`` when the first gradients of a backward have arrived; ``arrive`` calls it otherwise;
- ``arrive(gradients)`` with flat gradients by parameter name. A group starts when its last gradient has arrived.
  Averages overwrite the gradients;
- ``finish(gradients, mark)`` with the last gradients. All averages are written when it returns. Before that, the router
  calls ``mark(skipped, unused)``, which writes NaN into gradients if the step is skipped;
- ``finish(..., late=True)`` if optimizers apply these averages at a later step, and ``hand_over()`` when they are in
  ``.grad``. Until then, checkpoints contain them as pending averages;
- ``unused``, the names of the parameters that no rank used in the latest backward; their gradients are unchanged;
- ``pass_by(names, skipped)`` if the source has averaged all gradients without the router.

Every backward passes on all gradients of a group or none; a parameter that this rank did not use has zeros.
:class:`~lightning_sparse.engine.sources.comm_hook.BucketSource` is the source in DDP's communication hook.
"""
