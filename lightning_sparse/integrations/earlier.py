"""What one fit leaves to the next: residuals belong to weights, and go on for as long as those are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch.nn import Parameter

from lightning_sparse.engine import Engine
from lightning_sparse.engine.state.plain import checksum
from lightning_sparse.engine.state.schema import State
from lightning_sparse.tuning.controllers.checksum import checksum as weights_checksum

SHOWN = 5
"""Names in a message."""


class Left(NamedTuple):
    """What an engine leaves behind, without the engine."""

    state: State
    parameters: dict[str, Parameter]
    """Those that the state is about."""
    changed: list[str]
    """Those of them whose weights somebody has changed since."""

    @classmethod
    def by(cls, engine: Engine) -> Left:
        """All that it remembers now."""
        return cls(engine.state_dict(), _parameters_of(engine), [])


class EarlierFit:
    """Keeps the engine of a fit that ends, and looks at its weights.

    Args:
        engine: when the last step has been taken.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checksums = _checksums(_parameters_of(engine))

    def leave(self) -> Left | None:
        """What it leaves to a fit that begins now; None if it has taken no step."""
        if self._engine.step == 0:
            return None
        left = Left.by(self._engine)
        now = _checksums(left.parameters)
        return left._replace(changed=[name for name in now if now[name] != self._checksums[name]])


def go_on(engine: Engine, left: Left | None) -> str:
    """Let an engine go on where another one was, with the parameters that both have; on all ranks or on none.

    Args:
        engine: before its first step; its ranks call this together.
        left: by the other one; None: there was none.

    Returns:
        What does not go on, for the user; empty where all does.
    """
    now = {id(p) for p in _parameters_of(engine).values()}
    here = {} if left is None else {name: p for name, p in left.parameters.items() if id(p) in now}
    changed = set() if left is None else set(left.changed) & here.keys()
    outline = checksum([left is None, sorted(here), sorted(changed)])
    agreed = len(set(engine.comm.all_gather_object(outline, engine.device))) == 1
    if left is None:
        return ""
    anew = "What was not sent before is dropped, and schedules start anew"
    if not agreed:
        return f"{anew}: the ranks disagree about what has changed since."
    if not here:
        return f"{anew}: it was of another model."
    if changed == here.keys():
        return f"{anew}: the weights have changed since."
    remembered = {name: {} if name in changed else own for name, own in left.state["parameters"].items()}
    try:
        pending = {name: own for name, own in left.state["pending"].items() if name not in changed}
        lost = engine.take_over({**left.state, "parameters": remembered, "pending": pending}, here)
    except ValueError as error:
        return f"{anew}: {error}"
    if changed:
        names = ", ".join(sorted(changed)[:SHOWN]) + (", ..." if len(changed) > SHOWN else "")
        lost = [f"The weights of {names} have changed since.", *lost]
    return f"What was not sent of some parameters is dropped. {' '.join(lost)}" if lost else ""


def _parameters_of(engine: Engine) -> dict[str, Parameter]:
    return {**engine.parameters, **engine.frozen}


def _checksums(parameters: Mapping[str, Parameter]) -> dict[str, int]:
    """One number for the weights of each parameter, and no copy of them."""
    return {name: int(weights_checksum(p)) for name, p in parameters.items() if p.is_floating_point()}
