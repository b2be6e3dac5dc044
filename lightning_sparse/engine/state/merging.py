"""States made of others: merged for another number of ranks, joined from parts, or of another order in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.core.layout import order_from
from lightning_sparse.engine.group import MEASURED
from lightning_sparse.engine.state.schema import State, check_state


def merge_states(states: Iterable[State]) -> State:
    """Make one state for any number of ranks from the states of all ranks of a run.

    Every vector becomes its mean over the old ranks, ``1/W sum_i v_i``, in double precision and then in its own. If all
    of n new ranks load it, their mean residual is that mean again: the update that was still to be sent is unchanged,
    and so are sums of momenta. What was learned about groups, such as thresholds, starts anew. All else is rank 0's.
    Optimizers of weights that drift keep the means of their floats.
    Where ranks have parts, all that have those of the same gradients are one old rank here, see :func:`join_parts`.

    Args:
        states: of ``Engine.state_dict()``, one of each old rank, in any order. Taken one at a time, or all
            parts at a time: a generator need not hold all of them.

    Returns:
        A state for ``Engine.load_state_dict`` on every new rank.

    Raises:
        ValueError: if these are not states, or not those of all ranks at one step.

    Example:
        Plain PyTorch, from 2 ranks to any other number. ``engine`` is what ``ls.attach`` returns.

        >>> import tempfile, torch, lightning_sparse as ls
        >>> from lightning_sparse.engine.state.schema import NOTHING, STATE_FORMAT
        >>> folder = tempfile.mkdtemp()
        >>> def save(engine, rank):                                      # on every rank
        ...     torch.save(engine.state_dict(), f"{folder}/{rank}.pt")
        >>> def resume(engine, world_size):                              # on every rank; world_size: when it was saved
        ...     files = (f"{folder}/{rank}.pt" for rank in range(world_size))
        ...     engine.load_state_dict(ls.merge_states(torch.load(file) for file in files))
        >>> for rank, value in enumerate([1.0, 2.0]):
        ...     state = {**NOTHING, "format": STATE_FORMAT, "step": 7, "skipped_steps": 0, "rank": rank}
        ...     kept = {"weight": {"residual": torch.full((3,), value)}}
        ...     state |= {"world_size": 2, "settings": {}, "parameters": kept}
        ...     torch.save(state, f"{folder}/{rank}.pt")
        >>> merged = ls.merge_states(torch.load(f"{folder}/{rank}.pt") for rank in range(2))
        >>> merged["parameters"]["weight"]["residual"].tolist(), merged["step"]
        ([1.5, 1.5, 1.5], 7)
    """
    expect(isinstance(states, Iterable), "states", "several states of Engine.state_dict()", states)
    own = OptimizerStates()
    sums: dict[str, dict[str, Tensor]] = {}
    dtypes: dict[tuple[str, str], torch.dtype] = {}
    facts: list[Any] = []
    head: State = {"world_size": "old"}
    for state in _whole(map(check_state, states)):
        parameters = state.pop("parameters")
        own.add(state)
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
    return {**head, "parameters": means, "optimizers": own.mean(), "groups": []}


class OptimizerStates:
    """Means over ranks of what optimizers keep of weights that drift.

    Of a parameter of which one keeps more than floats of its size, such as codes of 8 bits or a basis, rank 0's.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], Tensor] = {}
        self._first: dict[tuple[str, str], Tensor] = {}
        self._ranks = 0

    def add(self, state: State) -> None:
        """Add those of a rank's state."""
        self._ranks += 1
        for name, each in state.pop("optimizers").items():
            for path, x in each.items():
                if state["rank"] == 0 or (name, path) not in self._first:
                    self._first[name, path] = x
                if x.is_floating_point():
                    self._sums[name, path] = self._sums.get((name, path), torch.zeros_like(x, dtype=torch.float64)) + x

    def _has_means(self, name: str) -> bool:
        numels = {x.numel() for (of, _), x in self._first.items() if of == name} - {1}
        return len(numels) < 2 and all(x.is_floating_point() for (of, _), x in self._first.items() if of == name)

    def mean(self) -> dict[str, dict[str, Tensor]]:
        """Return the means, each in its own dtype."""
        found: dict[str, dict[str, Tensor]] = {}
        for (name, path), x in self._first.items():
            total = self._sums.get((name, path)) if self._has_means(name) else None
            found.setdefault(name, {})[path] = x if total is None else (total / self._ranks).to(x.dtype)
        return found


def join_parts(states: Iterable[State]) -> State:
    """Make one state of the states of ranks that have parts of the same gradients.

    Vectors and averages that nobody has applied are put one behind the other. What was learned about groups of parts,
    such as thresholds, starts anew, and so do lengths, which are those of parts. All else is that of the first part.

    Args:
        states: checked; of all parts, in any order; or one state that is whole, of which nothing else changes.

    Raises:
        ValueError: if these are not the parts of the same gradients at one step.
    """
    parts = sorted(states, key=lambda state: state["part"])
    first, facts = parts[0], [(state["rank"], state["step"], state["world_size"]) for state in parts]
    expected = [[number, len(parts)] for number in range(len(parts))] if first["part"] else [[]]
    if [state["part"] for state in parts] != expected or len(set(facts)) > 1:
        raise ValueError(f"Expected the states of all parts of the same gradients at one step, but got {facts}.")
    parameters: dict[str, dict[str, Tensor]] = {}
    for name, vectors in first["parameters"].items():
        whole = all(state["parameters"].get(name, {}).keys() == vectors.keys() for state in parts)
        if not whole:
            raise ValueError(f"Expected all parts of the same gradients to remember the same of {name}.")
        parameters[name] = {key: torch.cat([state["parameters"][name][key] for state in parts]) for key in vectors}
    pending = {name: _joined([(s["pending"].get(name), s["spans"][name]) for s in parts]) for name in first["pending"]}
    spans = {name: [0, numel, numel] for name, (*_, numel) in first["spans"].items()}
    counters = {
        name: {key: max(state["counters"][name][key] for state in parts) for key in counted if key != MEASURED}
        for name, counted in first["counters"].items()
    }
    joined = {"parameters": parameters, "pending": pending, "spans": spans, "counters": counters}
    return check_state({**first, **joined, "part": [], "groups": []})


def _joined(parts: Sequence[tuple[Mapping[str, Tensor] | None, Sequence[int]]]) -> dict[str, Tensor]:
    """Return averages of a whole parameter, given those of its parts, and the first coordinate and length of each."""
    indices, values = [], []
    for averages, (start, length, _) in parts:
        if averages is None:
            raise ValueError("Expected averages of all parts, or of none, to wait for optimizers.")
        places = averages.get("indices", torch.arange(length, dtype=torch.int32, device="cpu"))
        indices.append(places + start)
        values.append(averages["values"])
    return {"indices": torch.cat(indices).int(), "values": torch.cat(values)}


def _whole(states: Iterable[State]) -> Iterator[State]:
    """Return states of ranks, of which those of parts are joined as soon as all of them are there."""
    waiting: dict[int, list[State]] = {}
    for state in states:
        if not state["part"]:
            yield state
            continue
        parts = waiting.setdefault(state["rank"], [])
        parts.append(state)
        if len(parts) == state["part"][1]:
            yield join_parts(waiting.pop(state["rank"]))
    if waiting:
        raise ValueError(
            f"Expected the states of all parts, but those of some parts of rank {min(waiting)} are missing."
        )


def with_layouts(state: State, layouts: Mapping[str, Sequence[int]]) -> tuple[State, list[str]]:
    """Return a state whose coordinates are in the order in which parameters lie now.

    They may have lain otherwise when it was saved, such as those of convolutions that were ``channels_last``.

    Args:
        state: checked; not modified.
        layouts: of parameters, see :func:`~lightning_sparse.core.layout.layout_of`.

    Returns:
        The state, and a sentence for each parameter of which it has a part only: others have the rest of its order.
    """
    orders = {name: order_from(state["layouts"].get(name, now), now) for name, now in layouts.items()}
    moved = {name: order for name, order in orders.items() if order is not None}
    parts = {name for name in moved if name in state["spans"] and state["spans"][name][1] < state["spans"][name][2]}
    changed: State = {"parameters": {**state["parameters"]}}
    for name in moved.keys() & state["parameters"].keys():
        vectors = state["parameters"][name]
        changed["parameters"][name] = {} if name in parts else {key: x[moved[name]] for key, x in vectors.items()}
    changed["pending"] = {
        name: _in_order(averages, moved[name]) if name in moved else averages
        for name, averages in state["pending"].items()
        if name not in parts
    }
    lost = [
        f"{name} lies in another order in memory than when its parts were saved: what waited is dropped."
        for name in sorted(parts)
        if state["parameters"].get(name)
    ]
    return {**state, **changed}, lost


def _in_order(averages: Mapping[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Return averages of a parameter in another order, with ascending coordinates."""
    if "indices" not in averages:
        return {"values": averages["values"][order]}
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    indices, chosen = places[averages["indices"].long()].sort()
    return {"indices": indices.int(), "values": averages["values"][chosen]}
