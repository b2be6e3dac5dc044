"""The state of an engine: taken at any moment, and loaded between two steps as a plan that all ranks can follow."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.layout import layout_of, own
from lightning_sparse.core.step import GroupState
from lightning_sparse.engine.agreement import Note, by_reason, name_ranks, reason
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.diversity import Diversity
from lightning_sparse.engine.group import MEASURED, GroupReducer
from lightning_sparse.engine.optimizers.binding import OptimizerBinding
from lightning_sparse.engine.regrouping import cut_alike
from lightning_sparse.engine.share import Place
from lightning_sparse.engine.state.merging import with_layouts
from lightning_sparse.engine.state.schema import (
    STATE_FORMAT,
    State,
    changes_between,
    check_state,
    checksum,
    from_plain,
    in_units_of_rates,
    outline,
    remembering,
    to_plain,
    with_pending,
)
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.memory import Memory
from lightning_sparse.ops import static_shapes

COPY = "copy"
"""Key of a rank's own weights, which are no vector of a memory."""


class LoadPlan(NamedTuple):
    """The engine that a state makes; nothing of it counts before all ranks have a plan."""

    state: State
    """This rank's own, checked and with all fields."""
    settings: SparsificationConfig
    memories: Mapping[str, Memory]
    """Of parameters that need others than that of the settings, by name."""
    groups: list[GroupReducer]
    """New ones, which remember what the state does."""
    learned: list[GroupState | None]
    """The state of each group, with what was learned about it; None: nothing that fits."""
    apart: list[dict[str, Any]]
    """What was learned of groups that there will be when other parameters need gradients."""
    misfits: list[str]
    """Sentences about what was learned of groups and does not fit."""
    lost: list[str]
    """Sentences about what was remembered of gradients and does not fit."""
    whole: State
    """The state, with averages that nobody has applied in the residuals again."""

    def begin_anew(self, group: GroupReducer, why: str = "") -> None:
        """Note that a group takes nothing of what was learned; one that leaves nothing out needs nothing of it."""
        if group.leaves_out:
            self.misfits.append(f"What was learned about the group {group.plan.name} starts anew{why}.")


class EngineState:
    """Takes the state of an engine, and gives it one.

    Args:
        stepper: of the engine.
        binding: of the engine.
        frozen: parameters that need no gradient, by name. A state may remember something of them, which is kept.
    """

    def __init__(self, stepper: Stepper, binding: OptimizerBinding, frozen: Mapping[str, Parameter]) -> None:
        self.loads = 0
        """Number of states that were loaded."""
        self._stepper, self._binding, self._names = stepper, binding, list(stepper.parameters)
        self._comm, self._device, self._frozen = stepper.comm, stepper.device, frozen
        self._places = stepper.share.places
        self._parked: State = {"parameters": {}, "counters": {}, "spans": {}}
        """Remembered of frozen parameters."""
        self._apart: tuple[int, list[dict[str, Any]]] = 0, []
        """What was learned of groups that a change of frozen parameters may make, up to so many exchanges."""

    def take(self, moment: Tensor | None) -> State:
        """See :meth:`.Engine.state_dict`."""
        stepper, record = self._stepper, self._stepper.record
        if moment is not None:
            stepper.wait_for(int(moment[0]))
        with record.lock:
            stepper.on_stream.synchronize()
            record.check_whole()
            if moment is not None and record.counts.number > int(moment[0]):
                raise RuntimeError(
                    f"The state after exchange {int(moment[0])} is asked for, and this rank has settled "
                    f"{record.counts.number}. All ranks save after the newest exchange of any rank: take a state on "
                    "each of them, and another one where the moment of the first one is not the largest."
                )
            return self._take()

    def _take(self) -> State:
        stepper, record, rank = self._stepper, self._stepper.record, self._comm.rank
        parameters: dict[str, dict[str, Tensor]] = {}
        counters: dict[str, dict[str, float]] = {}
        for group in stepper.groups:
            memory, kept = group.memory, group.state.memory
            counted = {key: float(counter) for key, counter in memory.counters(kept).items()}
            counted.update(group.counters())
            for name, span in group.spans.items():
                vectors = memory.vectors(kept).items()
                parameters[name] = {key: vector[span].to("cpu", copy=True) for key, vector in vectors}
                if group.drifts:
                    parameters[name][COPY] = stepper.copies.mine(name).to("cpu", copy=True)
                counters[name] = dict(counted)
        pending = stepper.pending()
        return {
            "format": STATE_FORMAT,
            "moment": record.counts.number,
            "step": record.counts.step,
            "skipped_steps": record.counts.skipped,
            "rank": rank,
            "world_size": self._comm.world_size,
            "part": [stepper.within.rank, stepper.within.world_size] if self._places else [],
            "settings": stepper.settings.algorithm,
            "parameters": {name: parameters[name] for name in self._names} | self._parked["parameters"],
            "counters": {name: counters[name] for name in self._names} | self._parked["counters"],
            "spans": {name: list(self._place(stepper.group_of[name], name)) for name in self._names}
            | self._parked["spans"],
            "layouts": self._layouts(),
            "pending": {name: _plain(*each) for name, each in pending.items() if rank == 0},  # whose weights are saved
            "optimizers": self._binding.own_states(
                {id(p): name for name, p in self._frozen.items() if COPY in self._parked["parameters"].get(name, {})}
            ),
            "absorbed": sorted(record.absorbed),
            "groups": [_plain_learned(group) for group in stepper.groups]
            + (self._apart[1] if self._apart[0] == record.counts.number else []),
        }

    def _layouts(self) -> dict[str, list[int]]:
        """Return in which order coordinates are remembered, of parameters that this rank has as a whole."""
        every = {**self._stepper.parameters, **self._frozen}
        return {name: layout_of(p) for name, p in every.items() if p.dim() > 1 and p.numel() and own(p) is p}

    def load(self, given: Mapping[str, Any]) -> LoadPlan:
        """Go on with a state, between two steps; collective. See :meth:`.Engine.load_state_dict`.

        All ranks make a plan of their states first. What has been learned about a group is taken where it fits on all
        ranks.

        Args:
            given: the state of this rank, which may be anything.

        Raises:
            ValueError: on all ranks, with nothing changed, if the state is none or cannot be understood on one of them,
                or if the states of the ranks do not belong together.
        """
        state, plan, filled = None, None, set[str]()
        try:
            state = check_state(given)
            note, filled = Note(outline(state), ""), remembering(state)
        except Exception as error:  # whatever a damaged state makes of a check
            note = Note("", reason(error, ValueError))
        # All ranks must form groups alike: averages of different memories are messages of different lengths.
        filled = self._stepper.anywhere(filled)
        try:
            plan = None if state is None else self._plan(state, filled)
        except Exception as error:  # whatever a damaged state makes of a memory
            note = Note("", reason(error, ValueError))
        fits = [] if plan is None else [_in_common(known) for known in plan.learned]
        on_ranks = self._comm.all_gather_object((note, fits), self._device)
        trouble = by_reason([note for note, _ in on_ranks])
        if not trouble and len({note.fact for note, _ in on_ranks}) > 1:
            trouble = "the states of the ranks do not belong together"
        # Ranks that have other parts load theirs, or none does.
        trouble = next(filter(None, self._stepper.within.all_gather_object(trouble, self._device)), "")
        if trouble or plan is None:
            raise ValueError(f"The state cannot be loaded, and no rank has loaded it: {trouble}")
        for number, (group, known) in enumerate(zip(plan.groups, plan.learned, strict=True)):
            if known is None:
                continue
            common = [fitting[number] for _, fitting in on_ranks]
            if others := [rank for rank, one in enumerate(common) if not one]:
                plan.begin_anew(group, f", because it does not fit on {name_ranks(others)}")
            elif len(set(common)) > 1:  # messages get their length from it
                plan.begin_anew(group, ", because ranks bring states of different runs")
            else:
                group.state = known
        self._apply(plan)
        self._stepper.go_on_with(filled)
        return plan

    def _plan(self, state: State, filled: Set[str]) -> LoadPlan:
        """Make the groups as they will be, of this rank's state alone.

        Args:
            state: checked.
            filled: names of the parameters of which the state of any rank remembers something.
        """
        stepper, world_size = self._stepper, self._comm.world_size
        state, lost = with_layouts(state, self._layouts())
        settings, memories = self._binding.settings_for(state), self._binding.memories_for(state)
        alike = state["settings"] == settings.algorithm
        whole = with_pending(state, world_size) if self._comm.rank == 0 else state
        if in_units_of_rates(state["settings"]) != settings.memory_in_use.reads_rates:
            vectors = whole["parameters"].items()
            if any(bool(each["residual"].any()) for _, each in vectors if "residual" in each):
                lost.append("Residuals had other units, by rates of Residual: they are dropped.")
            rest = {name: {k: v for k, v in each.items() if k != "residual"} for name, each in vectors}
            whole = {**whole, "parameters": rest}
        plan = LoadPlan(state, settings, memories, [], [], [], [], lost, whole)
        if not alike and (state["groups"] or any(state["parameters"].values())):  # one device may have left nothing
            changes = changes_between(state["settings"], settings.algorithm)
            plan.misfits.append(f"The settings have changed: {'; '.join(changes)}.")
        known = state["groups"] if alike and state["world_size"] == world_size else []
        given = {(one.get("dense", False), *one["parameters"]): one for one in known}
        earlier = {one["name"]: one["parameters"] for one in given.values()}
        # Of dense groups nothing is learned that others could use, and fallback=True begins with sparse ones again.
        known_of = {name for one in state["groups"] if not one.get("dense", False) for name in one["parameters"]}
        trained = {name for one in state["groups"] for name in one["parameters"]}
        trains = stepper.group_of.keys()
        with stepper.on_stream.between_steps():
            changed = set(stepper.copies.changed())
            for cut in stepper.uniform(cut_alike([group.plan for group in stepper.groups], earlier), memories):
                names = tuple(p.name for p in cut.parameters)
                group = stepper.form(cut, not filled.isdisjoint(names), state["step"], settings, memories)
                for name in group.spans.keys() - changed if group.drifts else ():  # weights here are those of this rank
                    group.state.memory.agreed[group.spans[name]] = stepper.copies.common(name)
                plan.groups.append(group)
                plan.lost.extend(self._fill(group, whole))
                if (same := given.pop((cut.dense, *names), None)) is not None:
                    try:
                        plan.learned.append(_understand(group, same, world_size))
                        continue
                    except ValueError as error:
                        plan.begin_anew(group, f", because it does not fit: {reason(error, ValueError).rstrip('.')}")
                elif trains == trained and not known_of.isdisjoint(names):
                    plan.begin_anew(group)
                plan.learned.append(None)
        # Layers may be frozen or thawed before the first step as they were when the state was taken.
        plan.apart.extend(given.values() if trains != trained else ())
        here = self._frozen.keys() | set(self._names)
        plan.lost.extend(f"There is no parameter {name} any more." for name in whole["parameters"] if name not in here)
        return plan

    def _apply(self, plan: LoadPlan) -> None:
        """Let a plan count: all ranks have one."""
        stepper, state = self._stepper, plan.state
        counts = stepper.record.counts._replace(step=state["step"], skipped=state["skipped_steps"])
        if stepper.flush_at is not None:
            stepper.flush_at = counts.step if stepper.flush_at == stepper.step else None
        stepper.settings, stepper.memories = plan.settings, plan.memories
        stepper.copies.back()
        stepper.adopt(plan.groups, counts)
        stepper.copies.take({name: vectors.get(COPY) for name, vectors in plan.whole["parameters"].items()})
        stepper.forget_averages()
        self._parked = self._parked_of(plan.whole)
        self._apart = counts.number, plan.apart
        self.loads += 1
        self._binding.go_on(state)
        stepper.on_stream.synchronize()

    def _parked_of(self, state: State) -> State:
        """Return what a state remembers of frozen parameters, of the part that the engine has, if that is in it."""
        parked = {field: {n: one for n, one in state[field].items() if n in self._frozen} for field in self._parked}
        for name, vectors in parked["parameters"].items():
            whole = Place.whole(max((len(vector) for vector in vectors.values()), default=0))
            start, length, numel = state["spans"].get(name) or whole
            part = self._places.get(name, whole)
            first = part.start - start
            if numel == part.numel and 0 <= first <= length - part.length:
                cut = {key: vector[first : first + part.length].clone() for key, vector in vectors.items()}
                parked["parameters"][name], parked["spans"][name] = cut, list(part)
        return parked

    def _place(self, group: GroupReducer, name: str) -> Place:
        """Return the part of a parameter that the engine has: as a rule all of it."""
        span = group.spans[name]
        return self._places.get(name) or Place.whole(span.stop - span.start)

    def _fill(self, group: GroupReducer, state: State) -> list[str]:
        """Fill a group that has just been formed with what a state remembers of its parameters.

        Counters that differ between parameters become the largest. Returns sentences about what did not fit.
        """
        notes = []
        memory, kept = group.memory, group.state.memory
        vectors = memory.vectors(kept)
        for name, span in group.spans.items():
            own, remembered = self._place(group, name), state["parameters"].get(name, {})
            for key, values in remembered.items():
                start, length, numel = state["spans"].get(name) or Place.whole(values.numel())
                first = max(start, own.start)
                last = max(first, min(start + length, own.start + own.length))
                if key in vectors and numel == own.numel:
                    part = values[first - start : last - start]
                    if len(part):
                        vectors[key][span][first - own.start : last - own.start].copy_(part)
                    if len(part) < own.length:
                        notes.append(f"Of {name}, the {key} of {len(part)} of {own.length} coordinates is known.")
                elif key in vectors:
                    notes.append(f"{name} had {numel} coordinates and has {own.numel}: its {key} is dropped.")
                elif key == COPY and group.drifts:
                    continue
                elif bool(values.any()) and not (group.always_whole and key == "second"):  # which nobody reads
                    notes.append(f"The memory keeps no {key}: that of {name} is dropped.")
            memory.complete_(kept, span, remembered.keys())
        known = [state["counters"].get(name, {}) for name in group.spans]
        for key, counter in memory.counters(kept).items():
            counter.fill_(max(counted.get(key, 0.0) for counted in known))
        group.turn = int(max(counted.get("turn", state["step"]) for counted in known))
        group.measured = max(counted.get(MEASURED, 0.0) for counted in known)
        if state["world_size"] == self._comm.world_size:  # means over other ranks tell nothing of these
            group.diversity = Diversity.of(known)
        return notes


def _plain(indices: Tensor | None, values: Tensor) -> dict[str, Tensor]:
    return {"values": values} if indices is None else {"values": values, "indices": indices.int()}


def _in_common(learned: GroupState | None) -> str:
    """Return a digest of what ranks have learned alike of a group: counts, union and numbers; empty of nothing."""
    if learned is None:
        return ""
    numbers = isinstance(learned.selector, tuple) and all(isinstance(x, float) for x in learned.selector)
    return checksum(to_plain((learned.selector if numbers else None, learned.counts, learned.union)))


def _plain_learned(group: GroupReducer) -> dict[str, Any]:
    """Return what has been learned about a group, as plain data and tensors on the CPU."""
    plan, state = group.plan, group.state
    return {
        "name": plan.name,
        "dense": plan.dense,
        "parameters": [p.name for p in plan.parameters],
        "numel": plan.numel,
        "state": {"selector": to_plain((state.selector, state.counts, state.union))},
    }


def _understand(group: GroupReducer, learned: Mapping[str, Any], world_size: int) -> GroupState:
    """Read what :func:`_plain_learned` gave about a group like this one; changes nothing.

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
    counts, union = given[1:]
    told = int(union) if isinstance(union, Tensor) and static_shapes(group.device) else None
    if (counts is None) != (union is None):
        raise ValueError("Expected counts and a union, or neither.")
    if counts is not None:
        like = torch.zeros(world_size, dtype=torch.int64, device=group.device)
        counts, union = from_plain(counts, like), from_plain(union, like[0])
    return group.state._replace(selector=selector, counts=counts, union=union, told=told)
