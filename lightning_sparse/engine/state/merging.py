"""States of all ranks of a run, merged for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.engine.state.schema import STATE_FORMAT, State, check_state


def merge_states(states: Iterable[State]) -> State:
    """Make one state for any number of ranks from the states of all ranks of a run.

    Every vector becomes its mean over the old ranks, ``1/W sum_i v_i``, in double precision and then in its own. If all
    of n new ranks load it, their mean residual is that mean again: the update that was still to be sent is unchanged,
    and so are sums of momenta. What was learned about groups, such as thresholds, starts anew. All else is rank 0's.

    Args:
        states: of ``Engine.state_dict()``, one of each old rank, in any order. Taken one at a time: a
            generator need not hold all of them.

    Returns:
        A state for ``Engine.load_state_dict`` on every new rank.

    Raises:
        ValueError: if these are not states, or not those of all ranks at one step.

    Example:
        Plain PyTorch, from 2 ranks to any other number. ``engine`` is what ``ls.attach`` returns.

        >>> import tempfile, torch, lightning_sparse as ls
        >>> folder = tempfile.mkdtemp()
        >>> def save(engine, rank):                                      # on every rank
        ...     torch.save(engine.state_dict(), f"{folder}/{rank}.pt")
        >>> def resume(engine, world_size):                              # on every rank; world_size: when it was saved
        ...     files = (f"{folder}/{rank}.pt" for rank in range(world_size))
        ...     engine.load_state_dict(ls.merge_states(torch.load(file) for file in files))
        >>> for rank, value in enumerate([1.0, 2.0]):
        ...     state = {"format": 1, "step": 7, "void_steps": 0, "rank": rank, "world_size": 2, "settings": "",
        ...              "parameters": {"weight": {"residual": torch.full((3,), value)}}, "counters": {},
        ...              "groups": [], "rates": {}}
        ...     torch.save(state, f"{folder}/{rank}.pt")
        >>> merged = ls.merge_states(torch.load(f"{folder}/{rank}.pt") for rank in range(2))
        >>> merged["parameters"]["weight"]["residual"].tolist(), merged["step"]
        ([1.5, 1.5, 1.5], 7)
    """
    expect(isinstance(states, Iterable), "states", "several states of Engine.state_dict()", states)
    sums: dict[str, dict[str, Tensor]] = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    facts: list[Any] = []
    head: State = {"world_size": "old"}
    for state in map(check_state, states):
        parameters = state.pop("parameters")
        shapes = {name: {key: v.shape for key, v in vectors.items()} for name, vectors in parameters.items()}
        facts.append((state["rank"], state["step"], state["world_size"], shapes))
        if facts[-1][1:] != facts[0][1:]:
            raise ValueError(
                "Expected states of one run at one step, but those of ranks "
                f"{facts[0][0]} and {state['rank']} differ in step, number of ranks or parameters."
            )
        if state["rank"] == 0 or len(facts) == 1:
            head = state  # rank 0's in the end, whose weights were saved
        for name, vectors in parameters.items():
            so_far = sums.setdefault(name, {})
            for key, vector in vectors.items():
                dtypes.setdefault((name, key), vector.dtype)
                so_far[key] = so_far.get(key, torch.zeros_like(vector, dtype=torch.float64)) + vector
    ranks = [rank for rank, *_ in facts]
    if sorted(ranks) != list(range(len(ranks))) or len(ranks) != head["world_size"]:
        raise ValueError(f"Expected the states of all {head['world_size']} ranks, each once, but got those of {ranks}.")
    means = {
        name: {key: (total / len(ranks)).to(dtypes[name, key]) for key, total in vectors.items()}
        for name, vectors in sums.items()
    }
    return {**head, "format": STATE_FORMAT, "parameters": means, "groups": []}
