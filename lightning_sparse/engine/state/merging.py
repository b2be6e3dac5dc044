"""States of all ranks of a run, merged for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.engine.state.schema import STATE_FORMAT, State, check_state


def merge_states(states: Iterable[State]) -> State:
    """One state for any number of ranks, from the states of all ranks of a run.

    Every vector becomes its mean over the old ranks, ``1/W sum_i v_i``, in double precision and then in its own. If all
    of n new ranks load it, their mean residual is that mean again: the update that was still to be sent is unchanged,
    and so are sums of momenta. What was learned about groups, such as thresholds, starts anew.

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
    head: State = {}
    sums: dict[str, dict[str, Tensor]] = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    ranks: list[int] = []
    pending: State = {}
    absorbed: list[str] = []
    for state in states:
        check_state(state)
        shapes = {name: {key: v.shape for key, v in vectors.items()} for name, vectors in state["parameters"].items()}
        if not ranks:
            head = {key: value for key, value in state.items() if key not in ("parameters", "groups", "pending")}
            sums = {
                name: {key: torch.zeros(shape, dtype=torch.float64, device="cpu") for key, shape in vectors.items()}
                for name, vectors in shapes.items()
            }
            dtypes = {(name, key): v.dtype for name, vs in state["parameters"].items() for key, v in vs.items()}
        known = {name: {key: v.shape for key, v in vectors.items()} for name, vectors in sums.items()}
        if (state["step"], state["world_size"], shapes) != (head["step"], head["world_size"], known):
            raise ValueError(
                "Expected states of one run at one step, but those of ranks "
                f"{head['rank']} and {state['rank']} differ in step, number of ranks or parameters."
            )
        ranks.append(state["rank"])
        if state["rank"] == 0:  # whose weights were saved
            pending = dict(state.get("pending", {}))
            absorbed = list(state.get("absorbed", ()))
        for name, vectors in state["parameters"].items():
            for key, vector in vectors.items():
                sums[name][key] += vector
    if not ranks or len(ranks) != head["world_size"] or sorted(ranks) != list(range(len(ranks))):
        raise ValueError(
            f"Expected the states of all {head.get('world_size', 'old')} ranks, each once, but got those of {ranks}."
        )
    means = {
        name: {key: (total / len(ranks)).to(dtypes[name, key]) for key, total in vectors.items()}
        for name, vectors in sums.items()
    }
    return {**head, "format": STATE_FORMAT, "parameters": means, "groups": [], "pending": pending, "absorbed": absorbed}
