"""Cost of a training step: the cost model, and decisions by it.

One recurrence gives the end of a step (``cost.py``), from the seconds of backward, selection and exchange. A
:class:`Profile` holds them; ``tuning/measuring/`` measures them. ``merge.py`` and ``densities.py`` choose groups and
densities by a profile, for exchanges that hide behind backward, as with ``overlap=True``.
"""
