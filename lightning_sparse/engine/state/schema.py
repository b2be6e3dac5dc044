"""The plain data that an engine saves: its fields, what must be equal on all ranks, what waits, and its checksum."""

from __future__ import annotations

import hashlib
import inspect
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import is_integer, is_number
from lightning_sparse.core.layout import is_layout, sum_dtype
from lightning_sparse.engine.diversity import NAMES as COMPARED

STATE_FORMAT = 4
"""Version of the format of ``Engine.state_dict()``; changes when its meaning does."""
State = dict[str, Any]
"""The result of ``Engine.state_dict()``."""
MISSING = object()


class Kind(NamedTuple):
    """The kind of value that a field must have."""

    words: str
    test: Callable[[Any], bool]


def _numbers(words: str, fits: Callable[..., bool]) -> Kind:
    """Return the kind of a list of as many finite numbers as the function takes."""
    length = len(inspect.signature(fits).parameters)

    def test(value: Any) -> bool:
        return (
            isinstance(value, (list, tuple)) and len(value) == length and all(map(_is_number, value)) and fits(*value)
        )

    return Kind(f"a list of {words}", test)


def _is_int(value: Any, least: int = 0) -> bool:
    return is_integer(value) and least <= value < 2**62


def _is_number(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return NAMED.test(value) and all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, (int, float, str, type(None)))


def _is_vector(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() == 1
    return dense and value.is_floating_point() and bool(value.isfinite().all())


def _is_ascending(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype != torch.int32 or value.dim() != 1:
        return False
    return not len(value) or (int(value[0]) >= 0 and bool((value[1:] > value[:-1]).all()))


COUNT = Kind("an integer from 0 on", _is_int)
SIZE = Kind("an integer from 1 on", lambda x: _is_int(x, 1))
TEXT = Kind("a string", lambda x: isinstance(x, str))
NUMBER = Kind("a finite number", _is_number)
RATE = Kind("a finite number above 0", lambda x: _is_number(x) and x > 0)
VECTOR = Kind("a vector of finite floating-point numbers", _is_vector)
INDICES = Kind("a vector of ascending int32 coordinates", _is_ascending)
TENSOR = Kind("a tensor", lambda x: isinstance(x, Tensor) and x.layout == torch.strided)
FLAG = Kind("True or False", lambda x: isinstance(x, bool))
NAMED = Kind("a dict with names as keys", lambda x: isinstance(x, dict) and all(isinstance(name, str) for name in x))
SETTINGS = Kind("a dict of settings as plain data", lambda x: isinstance(x, dict) and _is_plain(x))
LIST = Kind("a list", lambda x: isinstance(x, list))
LAYOUT = Kind("sizes and as many strides", lambda x: isinstance(x, list) and all(map(_is_int, x)) and is_layout(x))
SPAN = _numbers(
    "a start, a length and a number of coordinates",
    lambda start, length, numel: all(map(_is_int, (start, length, numel))) and start + length <= numel,
)
FIELDS: dict[str, Any] = {
    "step": COUNT,
    "skipped_steps": COUNT,
    "rank": COUNT,
    "world_size": SIZE,
    "settings": SETTINGS,
    "parameters": {str: {str: VECTOR}},
    "counters": {str: {str: NUMBER}},
    "groups": [{"name": TEXT, "parameters": [TEXT], "numel": COUNT, "dense?": FLAG, "state": NAMED}],
    "part": [COUNT],
    "spans": {str: SPAN},
    "layouts": {str: LAYOUT},
    "pending": {str: {"values": VECTOR, "indices?": INDICES}},
    "optimizers": {str: {str: TENSOR}},
    "absorbed": [TEXT],
}
"""The fields of a state, with the kind of each: ``{str: kind}`` is a dict by name, in the top level by name of the
parameter; ``[kind]`` is a list; and of ``{"name": kind}``, a name with a question mark may be missing."""
NOTHING: State = {name: type(kind)() for name, kind in FIELDS.items() if not isinstance(kind, Kind)}
"""The fields of a state that remembers nothing."""


def check_state(state: Any) -> State:
    """Raise unless this is what ``Engine.state_dict()`` gives, of whatever model; return a copy.

    States of sparsifiers and schedules depend on settings, and are only checked where they are used.

    Raises:
        ValueError: naming what is missing or not as expected.
    """
    if not isinstance(state, Mapping) or not is_integer(state.get("format")) or state["format"] != STATE_FORMAT:
        got = f"format {_brief(state.get('format', MISSING))}" if isinstance(state, Mapping) else _brief(state)
        raise ValueError(f"Expected a state of format {STATE_FORMAT}, as Engine.state_dict() gives it, but got {got}.")
    whole: State = dict(state)
    for name, kind in FIELDS.items():
        _check(whole.get(name, MISSING), kind, f"the state's {name}")
    if whole["part"] and (len(whole["part"]) != 2 or whole["part"][0] >= whole["part"][1]):
        raise ValueError(f"Expected the state's part to be a number below that of all, but got {whole['part']}.")
    if whole["rank"] >= whole["world_size"]:
        raise ValueError(f"Expected a rank below {whole['world_size']} in the state, but got {whole['rank']}.")
    for name, (_, length, _) in whole["spans"].items():
        for key, vector in whole["parameters"].get(name, {}).items():
            if vector.numel() != length:
                raise ValueError(f"Expected {length} coordinates of {name} in {key}, but got {vector.numel()}.")
    for name, pending in whole["pending"].items():
        _check(whole["spans"].get(name, MISSING), SPAN, f"the state's span of {name}, of which averages are pending,")
        numel, indices = whole["spans"][name][1], pending.get("indices")
        if indices is not None and len(indices) and int(indices[-1]) >= numel:
            raise ValueError(f"Expected an average below {numel} in {name}, but got {int(indices[-1])}.")
        expected = numel if indices is None else len(indices)
        if (found := len(pending["values"])) != expected:
            raise ValueError(f"Expected {expected} pending averages of {name}, but got {found}.")
    return whole


def _check(value: Any, kind: Any, where: str) -> None:
    """Raise unless a value is of a kind, see :data:`FIELDS`."""
    whole = NAMED if isinstance(kind, dict) else LIST if isinstance(kind, list) else kind
    if not whole.test(value):
        raise ValueError(f"Expected {where} to be {whole.words}, but got {_brief(value)}.")
    if isinstance(kind, list):
        for number, one in enumerate(value):
            _check(one, kind[0], f"number {number} of {where}")
    for name, of_name in kind.items() if isinstance(kind, dict) else ():
        if name is str:
            for key, one in value.items():
                _check(one, of_name, f"{key} of {where}")
        elif not name.endswith("?") or name[:-1] in value:
            _check(value.get(name.rstrip("?"), MISSING), of_name, f"{name.rstrip('?')} of {where}")


def _brief(value: Any) -> str:
    if value is MISSING:
        return "nothing"
    if not isinstance(value, Tensor):
        text = repr(value)
        return text if len(text) <= 40 else f"a {type(value).__name__}"
    finite = not value.is_floating_point() or bool(value.isfinite().all())
    numbers = "" if finite else " with numbers that are not finite"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}{numbers}"


def with_pending(state: Mapping[str, Any], world_size: int) -> State:
    """Return a state in which averages that nobody has applied have gone back into the residuals.

    ``residual[indices] += n average`` on one rank of n leaves the sum over ranks as it was before the exchange.

    Args:
        state: checked; not modified.
        world_size: n; 1 for a mean over ranks.
    """
    parameters = dict(state["parameters"])
    for name, pending in state["pending"].items():
        vectors = parameters.get(name, {})
        values, numel = pending["values"], state["spans"][name][1]
        if "residual" in vectors:
            residual = vectors["residual"].clone()
        else:
            residual = torch.zeros(numel, dtype=sum_dtype(values.dtype), device="cpu")
        where = pending["indices"].long() if "indices" in pending else slice(None)
        residual[where] += world_size * values.to(residual.dtype)  # no index is there twice
        parameters[name] = {**vectors, "residual": residual}
    return {**state, "parameters": parameters, "pending": {}}


def outline(state: Mapping[str, Any]) -> str:
    """Return a digest of what must be equal on all ranks that go on together."""
    sizes = {
        name: {key: (vector.numel(), str(vector.dtype)) for key, vector in sorted(vectors.items())}
        for name, vectors in sorted(state["parameters"].items())
    }
    groups = [(group["name"], group["parameters"], group["numel"]) for group in state["groups"]]
    spans = sorted((name, list(span)) for name, span in state["spans"].items())
    keys = (*COMPARED, "turn")
    compared = sorted((name, [counted.get(key) for key in keys]) for name, counted in state["counters"].items())
    facts = state["step"], state["world_size"], checksum(state["settings"]), sizes, groups, spans, compared
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def remembering(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the parameters of which a state remembers something."""
    filled = {name for name, vectors in state["parameters"].items() if any(bool(v.any()) for v in vectors.values())}
    return filled | set(state["pending"])


def renamed(state: Mapping[str, Any], names: Mapping[str, str]) -> tuple[State, list[str]]:
    """Return a state of parameters that have other names now.

    Args:
        state: that of an engine.
        names: the new name of each parameter that there still is, by its old one.

    Returns:
        The state, and a sentence for each parameter that is gone and had something to remember.
    """

    def new(old: Iterable[str]) -> list[str]:
        return [names[one] for one in old if one in names]

    changed: State = {
        field: {names[old]: value for old, value in state[field].items() if old in names}
        for field, empty in NOTHING.items()
        if isinstance(empty, dict)
    }
    whole = [group for group in state["groups"] if all(old in names for old in group["parameters"])]
    changed["groups"] = [{**one, "parameters": new(one["parameters"])} for one in whole]
    remembered = remembering(state)
    gone = [
        f"There is no parameter {old} any more."
        for old in state["parameters"]
        if old not in names and old in remembered
    ]
    return {**state, **changed, "absorbed": new(state["absorbed"])}, gone


def in_units_of_rates(settings: object) -> bool:
    """Return whether residuals are sums of gradients times learning rates, by a state's settings."""
    if not isinstance(settings, Mapping):
        return False
    return settings.get("rates") is True or any(map(in_units_of_rates, settings.values()))


def changes_between(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield which settings differ, in words, see :attr:`SparsificationConfig.algorithm`; of one class, by fields."""
    if isinstance(before, dict) and isinstance(now, dict) and before.get("class") == now.get("class"):
        for field in {**before, **now}:
            path = f"{name}.{field}" if name else field
            yield from changes_between(before.get(field), now.get(field), path)
    elif before != now:
        yield f"{name} was {_in_words(before)}, and is {_in_words(now)}"


def _in_words(plain: Any) -> str:
    """Return settings as the call that makes them."""
    if not isinstance(plain, dict):
        return repr(plain)
    own = (f"{key}={_in_words(value)}" for key, value in plain.items() if key != "class")
    return f"{plain.get('class', 'dict')}({', '.join(own)})"


def to_plain(state: Any) -> Any:
    """Make lists of (named) tuples, and copies on the CPU of tensors."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, (tuple, list)):
        return [to_plain(part) for part in state]
    return state


def from_plain(plain: Any, like: Any) -> Any:
    """Undo :func:`to_plain`.

    Args:
        plain: what it gave.
        like: a state of the same kind, whose types, dtypes and devices are taken; None stands for a scalar as well, of
            which nothing was known yet.

    Raises:
        ValueError: if the two are not alike: other tuples, tensors of another shape, numbers of another type.
    """
    if isinstance(like, tuple):
        if not isinstance(plain, list) or len(plain) != len(like):
            raise ValueError(f"Expected {len(like)} parts, but got {plain!r}.")
        parts = [from_plain(one, other) for one, other in zip(plain, like, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    # Numbers are () tensors where only a device knew them, and in states of earlier versions.
    if isinstance(like, float) and isinstance(plain, Tensor) and plain.dim() == 0 and plain.is_floating_point():
        return float(plain)
    if isinstance(like, Tensor) and isinstance(plain, float):
        plain = torch.tensor(plain, dtype=torch.float64, device="cpu")
    if isinstance(like, Tensor):
        if not isinstance(plain, Tensor) or plain.shape != like.shape or _kind(plain) != _kind(like):
            raise ValueError(f"Expected a tensor of shape {tuple(like.shape)} and {like.dtype}, but got {plain!r}.")
        return plain.to(like.device, like.dtype, copy=True)
    if like is None and isinstance(plain, Tensor) and plain.dim() == 0:
        return plain.clone()
    if isinstance(plain, list):
        raise ValueError(f"Expected {like!r}, but got {len(plain)} parts.")
    if type(plain) is not type(like):
        raise ValueError(f"Expected something like {like!r}, but got {plain!r}.")
    return plain


def _kind(x: Tensor) -> tuple[bool, bool, bool]:
    return x.is_floating_point(), x.is_complex(), x.dtype == torch.bool


def checksum(plain: Any) -> str:
    """Return a digest of names, numbers and tensors that does not depend on the file or container that held them.

    A CRC-32 stands for the bytes of each tensor: it takes a fraction of the time in which they are written, and any
    wrong bit changes it. Lists and tuples count as the same, and so do dicts in another order.

    Raises:
        TypeError: for anything that is no plain data.

    Example:
        >>> state = {"step": 3, "residual": torch.tensor([1.0, 2.0])}
        >>> checksum(state) == checksum(dict(reversed(state.items())))
        True
        >>> checksum(state) == checksum(state | {"residual": torch.tensor([1.0, -2.0])})
        False
    """
    return hashlib.sha256(_spelled(plain).encode()).hexdigest()


def _spelled(plain: Any) -> str:
    if isinstance(plain, Tensor):
        flat = plain.detach().cpu().reshape(-1)
        if flat.numel() < 2:  # counts as contiguous whatever its stride is, which views of its bytes do not take
            flat = flat.clone(memory_format=torch.contiguous_format)
        content = flat.contiguous().view(torch.uint8).numpy().data
        return f"tensor({plain.dtype}, {tuple(plain.shape)}, {zlib.crc32(content)})"
    if isinstance(plain, Mapping):
        return "{" + ", ".join(sorted(f"{key!r}: {_spelled(value)}" for key, value in plain.items())) + "}"
    if isinstance(plain, (list, tuple)):
        return "[" + ", ".join(map(_spelled, plain)) + "]"
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return repr(plain)
    raise TypeError(f"Expected plain data, but got {type(plain).__name__}.")
