"""What an engine saves, and how it goes on from there: remembered by parameters, learned by groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_sparse.engine.agreement import Note, by_reason, name_ranks, reason
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.state.plain import from_plain, to_plain
from lightning_sparse.engine.state.schema import STATE_FORMAT, State, check_state, outline, with_pending
from lightning_sparse.methods.density import GroupDensity
from lightning_sparse.methods.grouping import Group


class Shard(NamedTuple):
    """A part of a parameter, flat."""

    start: int
    length: int
    numel: int
    """Coordinates of the whole parameter."""

    @classmethod
    def whole(cls, numel: int) -> Shard:
        """All of a parameter."""
        return cls(0, numel, numel)


Parked = Mapping[str, tuple[Mapping[str, Tensor], Mapping[str, float]]]
"""What is remembered of parameters that need no gradient now: vectors and counters, by name."""


def capture(
    reducer: Reducer, names: Sequence[str], shards: Mapping[str, Shard], parked: Parked, comm: TorchCollective
) -> State:
    """The state of an engine after its newest exchange: plain data and tensors on the CPU; copies.

    Rank 0, whose weights are saved, adds the averages that its optimizers have not applied.

    Args:
        reducer: of the engine; nothing of it changes meanwhile.
        names: of all parameters, in order.
        shards: of parameters of which the engine has a part.
        parked: of the engine.
        comm: the ranks.
    """
    record, group_of = reducer.record, reducer.group_of
    remembered = {name: _remembered(group_of[name], name) for name in names}
    counters = {group.plan.name: _counters(group) for group in reducer.groups}
    pending = record.pending
    for name, (indices, values) in record.taken.items():  # which another rank may not have absorbed, so that they wait
        residual = remembered[name]["residual"]
        residual[slice(None) if indices is None else indices] -= values
    lengths = reducer.lengths.state(pending.keys())
    return {
        "format": STATE_FORMAT,
        "moment": record.counts.number,
        "step": record.counts.step,
        "void_steps": record.counts.void,
        "rank": comm.rank,
        "world_size": comm.world_size,
        "settings": reducer.settings.algorithm,
        "parameters": remembered | {name: dict(vectors) for name, (vectors, _) in parked.items()},
        "spans": {name: list(_shard(group_of[name], name, shards)) for name in names},
        "pending": {
            name: {"values": values} | ({} if indices is None else {"indices": indices.int()})
            for name, (indices, values) in (pending.items() if comm.rank == 0 else ())
        },
        "absorbed": sorted(record.absorbed),
        "counters": {name: counters[group_of[name].plan.name] for name in names}
        | {name: dict(counted) for name, (_, counted) in parked.items()},
        "groups": [_plain_learned(group) for group in reducer.groups],
        "rates": dict(reducer.rates.latest),
        "surplus": {name: list(noted) for name, noted in reducer.rates.surplus.items()},
        "clippings": [
            {**clipping._asdict(), "parameters": sorted(held)} for clipping, held in reducer.clipping.in_place
        ],
        "lengths": dict(lengths),
    }


def parked(state: Mapping[str, Any], frozen: Mapping[str, Any]) -> Parked:
    """What a state remembers of parameters that need no gradient now."""
    return {
        name: (dict(vectors), dict(state["counters"].get(name, {})))
        for name, vectors in state["parameters"].items()
        if name in frozen
    }


class Misfits(NamedTuple):
    """Sentences about what of a state did not fit."""

    learned: list[str]
    """What was learned about groups."""
    remembered: list[str]
    """What is remembered of gradients: this is lost."""


class Learned(NamedTuple):
    """What is known of a group but for what it remembers of gradients."""

    selector: Any
    counts: Tensor | None
    union: Tensor | None
    density: GroupDensity


class Draft(NamedTuple):
    """What a state makes of an engine, before it counts."""

    groups: list[GroupReducer]
    learned: list[Learned | None]
    """About each group; None: nothing that fits."""
    misfits: Misfits
    clippings: list[Any]
    """What gradients were clipped to in place of their averages, as a state holds it."""
    lengths: Mapping[str, Sequence[float]]
    """Of averages, as optimizers got them."""


class Form(Protocol):
    """Makes a group of an engine, with nothing remembered."""

    def __call__(self, group: Group, flush: bool = False, step: int | None = None) -> GroupReducer:
        """As :class:`GroupReducer`; ``flush``: whether it must be able to send what it will remember."""


def load(draft: Callable[[], Draft], state: Mapping[str, Any], comm: TorchCollective, device: torch.device) -> Draft:
    """What all ranks agree on; collective.

    What has been learned about a group is in it where it fits on all ranks, and else a misfit. Clippings and lengths
    are those of rank 0: others that saved the state in the middle of a step may not have been asked for theirs yet, or
    not have known the step's factors.

    Args:
        draft: makes this rank's own of the state, see :func:`draft_of`.
        state: any.
        comm: the ranks.
        device: for the messages.

    Raises:
        ValueError: on all ranks, if the state is none or cannot be understood on one of them, or if the states of the
            ranks do not belong together.
    """
    note, own = Note("", ""), None
    try:
        check_state(state)
        own = draft()
        note = Note(outline(state), "")
    except Exception as error:  # whatever a damaged state makes of a memory
        note = Note("", reason(error, ValueError))
    fits = [] if own is None else [known is not None for known in own.learned]
    shared = None if own is None else (own.clippings, own.lengths)
    notes, on_ranks, shared_on_ranks = zip(*comm.all_gather_object((note, fits, shared), device), strict=True)
    trouble = by_reason(notes)
    if not trouble and len({note.fact for note in notes}) > 1:
        trouble = "the states of the ranks do not belong together"
    if trouble or own is None:
        raise ValueError(f"The state cannot be loaded, and no rank has loaded it: {trouble}")
    for group, known, fitting in zip(own.groups, own.learned, zip(*on_ranks, strict=True), strict=True):
        if known is not None and all(fitting):
            group.state = group.state._replace(selector=known.selector, counts=known.counts, union=known.union)
            group.density = known.density
        elif known is not None:
            others = [rank for rank, fit in enumerate(fitting) if not fit]
            own.misfits.learned.append(f"{_anew(group)}, because it does not fit on {name_ranks(others)}.")
    clippings, lengths = shared_on_ranks[0]
    return own._replace(clippings=clippings, lengths=lengths)


def draft_of(
    state: Mapping[str, Any],
    plan: Sequence[Group],
    form: Form,
    frozen: Mapping[str, Any],
    algorithm: str,
    comm: TorchCollective,
    shards: Mapping[str, Shard],
    remembering: Set[str],
) -> Draft:
    """The groups as they will be if all ranks can load their states.

    Args:
        state: of this rank, checked.
        plan: the groups.
        form: makes them.
        frozen: parameters that need no gradient now, by name.
        algorithm: see :attr:`SparsificationConfig.algorithm`.
        comm: the ranks.
        shards: of parameters of which the engine has a part.
        remembering: parameters of which the state of any rank remembers something.
    """
    misfits, world_size = Misfits([], []), comm.world_size
    if comm.rank == 0:
        state = with_pending(state, world_size)
    holds = state["groups"] or any(state["parameters"].values())  # one device may have left nothing that must fit
    if state["settings"] != algorithm and holds:
        misfits.learned.append(f"The settings were {state['settings']}, and are {algorithm}.")
    alike = state["settings"] == algorithm and state["world_size"] == world_size
    given = {group["name"]: group for group in state["groups"]} if alike else {}
    here = {p.name for group in plan for p in group.parameters}
    # Of dense groups nothing is learned that others could use, and fallback="dense" begins with sparse ones again.
    known_of = {name for group in state["groups"] if not group.get("dense", False) for name in group["parameters"]}
    groups: list[GroupReducer] = []
    learned: list[Learned | None] = []
    for one in plan:
        parts = {p.name: state["parameters"].get(p.name, {}) for p in one.parameters}
        group = form(one, flush=not remembering.isdisjoint(parts), step=state["step"])
        spans = {name: state.get("spans", {}).get(name) for name in parts}
        counters = {name: state["counters"].get(name, {}) for name in parts}
        misfits.remembered.extend(_fill(group, parts, spans, counters, shards))
        groups.append(group)
        learned.append(None)
        known = given.get(one.name)
        if known is None or known["parameters"] != [p.name for p in one.parameters]:
            if not known_of.isdisjoint(parts):
                misfits.learned.append(f"{_anew(group)}.")
            continue
        try:
            learned[-1] = _understand(group, known, world_size)
        except ValueError as error:
            misfits.learned.append(f"{_anew(group)}, because it does not fit: {reason(error, ValueError)}")
    misfits.remembered.extend(
        f"There is no parameter {name} any more." for name in state["parameters"] if name not in here | frozen.keys()
    )
    return Draft(groups, learned, misfits, list(state.get("clippings", ())), state.get("lengths", {}))


def _anew(group: GroupReducer) -> str:
    return f"What was learned about the group {group.plan.name} starts anew"


def _shard(group: GroupReducer, name: str, shards: Mapping[str, Shard]) -> Shard:
    """The part of a parameter that the engine has: as a rule all of it."""
    span = group.spans[name]
    return shards.get(name) or Shard.whole(span.stop - span.start)


def _remembered(group: GroupReducer, name: str) -> dict[str, Tensor]:
    """What is remembered of a parameter: copies on the CPU, by name of the vector."""
    vectors, span = group.memory.vectors(group.state.memory), group.spans[name]
    return {vector: buffer[span].to("cpu", copy=True) for vector, buffer in vectors.items()}


def _counters(group: GroupReducer) -> dict[str, float]:
    """What is remembered of the group as a whole, and with it of each of its parameters."""
    return {name: float(counter) for name, counter in group.memory.counters(group.state.memory).items()}


def _fill(
    group: GroupReducer,
    remembered: Mapping[str, Mapping[str, Tensor]],
    spans: Mapping[str, Sequence[int] | None],
    counters: Mapping[str, Mapping[str, float]],
    shards: Mapping[str, Shard],
) -> list[str]:
    """Fill a group that has just been formed with what is remembered of its parameters.

    Args:
        group: is changed.
        remembered: of each parameter, see :func:`_remembered`.
        spans: the first coordinate, how many there are, and how many the parameter has; None: all of it.
        counters: of each parameter, see :func:`_counters`; of different ones, the largest count.
        shards: of parameters of which the engine has a part.

    Returns:
        Sentences about what did not fit.
    """
    notes = []
    memory, state = group.memory, group.state.memory
    vectors = memory.vectors(state)
    for name, span in group.spans.items():
        own = _shard(group, name, shards)
        for vector, values in remembered[name].items():
            start, length, numel = spans[name] or Shard.whole(values.numel())
            first, last = max(start, own.start), min(start + length, own.start + own.length)
            if vector in vectors and numel == own.numel:
                kept = values[first - start : last - start]
                vectors[vector][span][first - own.start : last - own.start].copy_(kept)
                if len(kept) < own.length:
                    notes.append(f"Of {name}, the {vector} of {len(kept)} of {own.length} coordinates is known.")
            elif vector in vectors:
                notes.append(f"{name} had {numel} coordinates and has {own.numel}: its {vector} is dropped.")
            elif bool(values.any()):
                notes.append(f"The memory keeps no {vector}: that of {name} is dropped.")
        memory.complete_(state, span, remembered[name].keys())
    for name, counter in memory.counters(state).items():
        counter.fill_(max(counters[p].get(name, 0.0) for p in group.spans))
    return notes


def _plain_learned(group: GroupReducer) -> dict[str, Any]:
    """What has been learned about a group, as plain data and tensors on the CPU."""
    plan, state = group.plan, group.state
    return {
        "name": plan.name,
        "dense": plan.dense,
        "parameters": [p.name for p in plan.parameters],
        "numel": plan.numel,
        "state": {
            "selector": to_plain((state.selector, state.counts, state.union)),
            "density": group.density.state_dict(),
        },
    }


def _understand(group: GroupReducer, learned: Mapping[str, Any], world_size: int) -> Learned:
    """What :func:`_plain_learned` gave about a group like this one; changes nothing.

    Raises:
        ValueError: if it does not fit.
    """
    state = learned["state"]
    given = state.get("selector")
    if learned["numel"] != group.plan.numel or not isinstance(given, list) or len(given) != 3:
        raise ValueError(f"Expected what {group.plan.numel} coordinates have taught, but got {learned['numel']}.")
    selector = from_plain(given[0], group.state.selector)
    if isinstance(selector, Tensor):
        selector = selector.to(group.device)
    counts, union = (
        None
        if plain is None
        else from_plain(plain, torch.zeros(shape, dtype=torch.int64, device="cpu")).to(group.device)
        for plain, shape in zip(given[1:], ((world_size,), ()), strict=True)
    )
    if (counts is None) != (union is None):
        raise ValueError("Expected counts and a union, or neither.")
    density = group.density.schedule.for_group()
    density.load_state_dict(state["density"], group.plan.numel, group.device)
    return Learned(selector, counts, union, density)
