"""Cost of a training step: the cost model, measurements for it between real ranks, and decisions by them.

One recurrence gives the end of a step (``cost.py``), from the seconds of backward, selection and exchange. A
:class:`Profiler` measures them in a run, a :class:`Profile` holds them. ``merge.py`` and ``densities.py`` choose groups
and densities by a profile, for exchanges that hide behind backward, as with ``overlap=True``.
"""
