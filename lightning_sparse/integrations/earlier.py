"""State that one fit passes to the next: residuals belong to weights, and continue while these are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn import Parameter

from lightning_sparse.core.layout import own
from lightning_sparse.engine import Engine
from lightning_sparse.engine.agreement import checksum as weights_checksum
from lightning_sparse.engine.state.schema import State, checksum, remembering

SHOWN = 5
"""Names in a message."""


class Left(NamedTuple):
    """State of an engine, without the engine."""

    state: State
    parameters: dict[str, Parameter]
    """Parameters of the state."""
    changed: list[str]
    """Names of parameters whose weights have changed since."""
    broken: str = ""
    """Why there is no state; empty: there is one."""

    @classmethod
    def by(cls, engine: Engine, before: Mapping[str, int] | None = None) -> Left:
        """Return the current state of an engine, if an error has not broken it.

        Args:
            engine: after its last step.
            before: :func:`checksums` of that moment, if weights may have changed since.
        """
        now = {} if before is None else checksums(engine)
        changed = [name for name in now if before is not None and now[name] != before[name]]
        try:
            return cls(engine._hand_over(), parameters_of(engine), changed)
        except RuntimeError as error:
            return cls({}, {}, [], str(error))


def parameters_of(engine: Engine) -> dict[str, Parameter]:
    """Return the parameters of a model by name, frozen ones too."""
    return {**engine.stepper.parameters, **engine.frozen}


def checksums(engine: Engine) -> dict[str, int]:
    """Return a checksum of the weights of each floating-point parameter."""
    return {name: int(weights_checksum(own(p))) for name, p in parameters_of(engine).items() if p.is_floating_point()}


def go_on(engine: Engine, left: Left | None) -> None:
    """Let an engine continue from the state of another one, with common parameters; on all ranks or on none.

    A warning on rank zero says which state is dropped.

    Args:
        engine: before its first step; its ranks call this together.
        left: state of the other one; None: there was none.
    """
    if told := _taken_over(engine, left):
        rank_zero_warn(told)


def _taken_over(engine: Engine, left: Left | None) -> str:
    """Let an engine continue; return a sentence on the dropped state, for the user, empty if all continues."""
    now = {id(p) for p in parameters_of(engine).values()}
    here = {} if left is None else {name: p for name, p in left.parameters.items() if id(p) in now}
    changed = set() if left is None else set(left.changed) & here.keys()
    own_part = left is None or left.broken, sorted(here), sorted(changed)
    found = engine.stepper.within.all_gather_object(own_part, engine.device)
    known = {name for _, names, _ in found for name in names}
    changed_anywhere = {name for _, _, names in found for name in names}
    outline = checksum([[broken for broken, *_ in found], sorted(known), sorted(changed_anywhere)])
    outlines = set(engine.comm.all_gather_object(outline, engine.device))
    agreed = len(outlines) == len({broken for broken, *_ in found}) == 1
    changed = changed_anywhere & here.keys()
    if left is None:
        return ""
    anew = "What was not sent before is dropped, and schedules start anew"
    if left.broken:
        return f"{anew}: {left.broken}"
    if not agreed:
        return f"{anew}: the ranks disagree about what has changed since."
    waits = remembering(left.state)
    if changed_anywhere == known:
        why = "the weights have changed since" if known else "it was of another model"
        return f"{anew}: {why}." if waits else ""
    remembered = {name: {} if name in changed else own for name, own in left.state["parameters"].items()}
    try:
        pending = {name: own for name, own in left.state["pending"].items() if name not in changed}
        lost = engine._take_over({**left.state, "parameters": remembered, "pending": pending}, here)
    except ValueError as error:
        return f"{anew}: {error}"
    if dropped := sorted(changed & waits):
        names = ", ".join(dropped[:SHOWN]) + (", ..." if len(dropped) > SHOWN else "")
        lost = [f"The weights of {names} have changed since.", *lost]
    return f"What was not sent of some parameters is dropped. {' '.join(lost)}" if lost else ""
