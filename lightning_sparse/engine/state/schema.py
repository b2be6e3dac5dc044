"""The plain data that an engine saves: its fields, what must be equal on all ranks, and renamed parameters."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import is_integer, is_number
from lightning_sparse.engine.optimizers.clipping import ALGORITHMS
from lightning_sparse.methods.memory import SecondMoment

STATE_FORMAT = 2
"""Version of the format of ``Engine.state_dict()``; changes when its meaning does."""
READABLE = 1, 2
"""Formats that are understood. In the first one, there is nothing pending: what was saved between an exchange and the
optimizer's step is of before the exchange."""
State = dict[str, Any]
"""The result of ``Engine.state_dict()``."""


class Kind(NamedTuple):
    """The kind of value that a field must have."""

    words: str
    test: Callable[[Any], bool]


def _is_int(value: Any, least: int) -> bool:
    return is_integer(value) and least <= value < 2**62


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_vector(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() == 1
    return dense and value.is_floating_point() and bool(value.isfinite().all())


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


COUNT = Kind("an integer from 0 on", lambda x: _is_int(x, 0))
SIZE = Kind("an integer from 1 on", lambda x: _is_int(x, 1))
TEXT = Kind("a string", lambda x: isinstance(x, str))
NUMBER = Kind("a finite number", _is_number)
RATE = Kind("a finite number above 0", lambda x: _is_number(x) and x > 0)
VECTOR = Kind("a vector of finite floating-point numbers", _is_vector)
SURPLUS = Kind(
    "a list of a number from 1 on and a step",
    lambda x: _is_pair(x) and _is_number(x[0]) and x[0] >= 1 and _is_int(x[1], 0),
)
LENGTH = Kind(
    "a list of a number from -1 on and one from 0 to 1",
    lambda x: _is_pair(x) and all(map(_is_number, x)) and x[0] >= -1 and 0 <= x[1] <= 1,
)
SPAN = Kind(
    "a list of a start, a length and a number of coordinates",
    lambda x: (
        isinstance(x, (list, tuple)) and len(x) == 3 and all(_is_int(one, 0) for one in x) and x[0] + x[1] <= x[2]
    ),
)
INDICES = Kind(
    "a vector of ascending int32 coordinates",
    lambda x: (
        isinstance(x, Tensor)
        and x.dtype == torch.int32
        and x.dim() == 1
        and (not len(x) or (int(x[0]) >= 0 and bool((x[1:] > x[:-1]).all())))
    ),
)
NAMED = Kind("a dict with names as keys", lambda x: isinstance(x, dict) and all(isinstance(name, str) for name in x))
LIST = Kind("a list", lambda x: isinstance(x, list))
NAMES = Kind("a list of names", lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x))
FLAG = Kind("True or False", lambda x: isinstance(x, bool))
ALGORITHM = Kind("'norm' or 'value'", lambda x: isinstance(x, str) and x in ALGORITHMS)
FIELDS = {
    "step": COUNT,
    "void_steps": COUNT,
    "rank": COUNT,
    "world_size": SIZE,
    "settings": TEXT,
    "parameters": NAMED,
    "counters": NAMED,
    "groups": LIST,
    "rates": NAMED,
}
CLIPPING_FIELDS = {"limit": RATE, "algorithm": ALGORITHM, "parameters": NAMES}
GROUP_FIELDS = {"name": TEXT, "parameters": NAMES, "numel": SIZE, "state": NAMED}
MISSING = object()


def check_state(state: Any) -> None:
    """Raise unless this is what ``Engine.state_dict()`` gives, of whatever model.

    What was learned about groups depends on settings, and is only looked at where it is used.

    Raises:
        ValueError: naming what is missing or not as expected.
    """
    if not isinstance(state, Mapping) or not _is_int(found := state.get("format"), 0) or found not in READABLE:
        raise ValueError(f"Expected a state of format {STATE_FORMAT}, as Engine.state_dict() gives it.")
    _check_fields(state, FIELDS, "the state's")
    if state["rank"] >= state["world_size"]:
        raise ValueError(f"Expected a rank below {state['world_size']} in the state, but got {state['rank']}.")
    for field, kind in (("parameters", VECTOR), ("counters", NUMBER)):
        for name, values in state[field].items():
            _check(values, NAMED, f"the state's {field} of {name}")
            for key, value in values.items():
                _check(value, kind, f"the state's {key} of {name}")
    for name, rate in state["rates"].items():
        _check(rate, RATE, f"the state's learning rate of {name}")
    _check(state.get("surplus", {}), NAMED, "the state's surplus")
    for name, noted in state.get("surplus", {}).items():
        _check(noted, SURPLUS, f"the state's surplus of {name}")
        if noted[1] > state["step"]:
            raise ValueError(
                f"Expected the surplus of {name} to be of step {state['step']} at most, but got {noted[1]}."
            )
    _check(state.get("spans", {}), NAMED, "the state's spans")
    for name, span in state.get("spans", {}).items():
        _check(span, SPAN, f"the state's span of {name}")
        for key, vector in state["parameters"].get(name, {}).items():
            if vector.numel() != span[1]:
                raise ValueError(f"Expected {span[1]} coordinates of {name} in {key}, but got {vector.numel()}.")
    _check(state.get("pending", {}), NAMED, "the state's pending averages")
    for name, pending in state.get("pending", {}).items():
        _check_pending(state, name, pending)
    _check(state.get("absorbed", []), NAMES, "the state's absorbed parameters")
    _check(state.get("lengths", {}), NAMED, "the state's lengths")
    for name, pair in state.get("lengths", {}).items():
        _check(pair, LENGTH, f"the state's length of {name}")
    _check(state.get("clippings", []), LIST, "the state's clippings")
    for number, clipping in enumerate(state.get("clippings", [])):
        _check(clipping, NAMED, f"the state's clipping {number}")
        _check_fields(clipping, CLIPPING_FIELDS, f"in clipping {number} of the state the")
    for number, group in enumerate(state["groups"]):
        _check(group, NAMED, f"the state's group {number}")
        _check_fields(group, GROUP_FIELDS, f"in group {number} of the state the")
        _check(group.get("dense", False), FLAG, f"in group {number} of the state dense")
        _check(group["state"].get("density", MISSING), NAMED, f"the state's density of group {number}")


def _check_pending(state: Mapping[str, Any], name: str, pending: Any) -> None:
    _check(pending, NAMED, f"the state's pending averages of {name}")
    values = pending.get("values", MISSING)
    _check(values, VECTOR, f"the state's pending averages of {name}")
    span = state.get("spans", {}).get(name, MISSING)
    _check(span, SPAN, f"the state's span of {name}, of which averages are pending,")
    expected = numel = span[1]
    if "indices" in pending:
        indices = pending["indices"]
        _check(indices, INDICES, f"the state's coordinates of pending averages of {name}")
        expected = indices.numel()
        if expected and int(indices[-1]) >= numel:
            raise ValueError(f"Expected an average below {numel} in {name}, but got {int(indices[-1])}.")
    if values.numel() != expected:
        raise ValueError(f"Expected {expected} pending averages of {name}, but got {values.numel()}.")


def with_pending(state: Mapping[str, Any], world_size: int) -> State:
    """Return a state in which averages that nobody has applied have gone back into the residuals.

    ``residual[indices] += n average`` on one rank of n leaves the sum over ranks as it was before the exchange.

    Args:
        state: checked; not modified.
        world_size: n; 1 for a mean over ranks.
    """
    parameters = dict(state["parameters"])
    for name, pending in state.get("pending", {}).items():
        vectors = parameters.get(name, {})
        values, wide = pending["values"], torch.promote_types(pending["values"].dtype, torch.float32)
        residual = (
            vectors["residual"].clone()
            if "residual" in vectors
            else values.new_zeros(state["spans"][name][1], dtype=wide)
        )
        values = world_size * values.to(residual.dtype)
        if "indices" in pending:
            residual.index_add_(0, pending["indices"].long(), values)
        else:
            residual += values
        parameters[name] = {**vectors, "residual": residual}
    return {**state, "parameters": parameters, "pending": {}}


def _check_fields(found: Mapping[str, Any], fields: Mapping[str, Kind], where: str) -> None:
    for field, kind in fields.items():
        _check(found.get(field, MISSING), kind, f"{where} {field}")


def _check(value: Any, kind: Kind, where: str) -> None:
    if not kind.test(value):
        raise ValueError(f"Expected {where} to be {kind.words}, but got {_brief(value)}.")


def _brief(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if len(text) <= 40 else f"a {type(value).__name__}"
    finite = not value.is_floating_point() or bool(value.isfinite().all())
    numbers = "" if finite else " with numbers that are not finite"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}{numbers}"


def outline(state: Mapping[str, Any]) -> str:
    """A digest of what must be equal on all ranks that go on together."""
    sizes = {
        name: {key: (vector.numel(), str(vector.dtype)) for key, vector in sorted(vectors.items())}
        for name, vectors in sorted(state["parameters"].items())
    }
    groups = [(group["name"], group["parameters"], group["numel"]) for group in state["groups"]]
    facts = (state["step"], state["world_size"], state["settings"], sizes, groups)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> tuple[State, list[str]]:
    """A state of parameters that have other names now.

    Args:
        state: that of an engine.
        names: the new name of each parameter that there still is, by its old one.

    Returns:
        The state, and a sentence for each parameter that is gone and had something to remember.
    """
    by_name = {
        field: {names[old]: value for old, value in state.get(field, {}).items() if old in names}
        for field in ("parameters", "counters", "rates", "surplus", "lengths", "spans", "pending")
    }
    groups = [
        {**group, "parameters": [names[old] for old in group["parameters"]]}
        for group in state["groups"]
        if all(old in names for old in group["parameters"])
    ]
    clippings = [
        {**clipping, "parameters": [names[old] for old in clipping["parameters"] if old in names]}
        for clipping in state.get("clippings", ())
    ]
    gone = [
        f"There is no parameter {old} any more."
        for old, vectors in state["parameters"].items()
        if old not in names and (old in state.get("pending", {}) or any(bool(v.any()) for v in vectors.values()))
    ]
    absorbed = [names[old] for old in state.get("absorbed", ()) if old in names]
    return {**state, **by_name, "groups": groups, "clippings": clippings, "absorbed": absorbed}, gone


def second_moment_in(settings: object) -> SecondMoment | None:
    """The memory of this kind that a state's settings name, see :attr:`SparsificationConfig.algorithm`; or None."""
    found = re.search(r"\bSecondMoment\(beta2=([^,()]+), eps=([^,()]+)\)", str(settings))
    return None if found is None else SecondMoment(float(found[1]), float(found[2]))
