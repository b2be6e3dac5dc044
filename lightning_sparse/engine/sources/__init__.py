"""Sources: they hand gradients to an engine, and averages to optimizers.

A source calls ``engine.entrance``, on all ranks in the same order:

- ``begin_step()`` when the first gradients of a backward are here; ``arrive`` does so by itself;
- ``arrive(gradients)`` with flat gradients by name of the parameter. Groups whose last gradient has come begin to work.
  Averages take the place of the gradients;
- ``finish(gradients)`` with the last ones. Averages are in their places when it returns, or NaN if the step is
  skipped;
- ``unused`` names the parameters that no rank used in the latest backward, and whose gradients nobody has touched;
- ``pass_by(averages)`` where it averages all gradients by itself, and ``direct`` says so.

Every backward passes on all gradients of a group or none; a parameter that this rank did not use has zeros.
The source is :class:`~lightning_sparse.engine.sources.comm_hook.BucketSource` in DDP's communication hook, and the
entrance the engine's router.
"""
