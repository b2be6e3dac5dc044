"""Two recordings side by side, and the closed list of what may differ between them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from tests.recorder.record import EXCHANGES, Entry, Recording


class Allowed(NamedTuple):
    """A difference that a redesign may make; everything else is an error."""

    name: str
    reason: str
    composition: str = ""
    """Regular expression that is found in the composition."""
    what: str = ""
    """Regular expression that is found in the name of the tensor or number."""
    within: float | None = None
    """Largest distance, as a share of the tensor's largest magnitude; None: any."""
    moved: bool = False
    """Only where one tree exchanges in backward and the other one when the optimizer steps."""


ALLOWED = (
    Allowed(
        "thresholds from sums",
        "Sums of torch take the place of those in numpy, of GaussianK and RedSync also of those in C: another order.",
        composition=r"^(GaussianK|RedSync|SIDCo)",
        what=r"^logged / threshold",
        within=1e-6,
    ),
    Allowed(
        "norms of clipping",
        "The norm is taken run by run, so that its squares are summed in another order.",
        composition=r"ClipByNorm|\| norm \|",
        what=r"^(gradient|message|weight|state|logged)",
        within=1e-5,
    ),
    Allowed(
        "words of the exchange in a step",
        "Ranks say in messages of their own what they are about to do.",
        what=rf"^{EXCHANGES}$|^logged / traffic/",
        moved=True,
    ),
    Allowed(
        "as with plain DDP",
        "DDP averages by itself at a density of 1, and gradients are clipped by the norm of their mean.",
        composition=r"^Everything|\| (1\.0|norm|value) \|",
        moved=True,
    ),
    Allowed(
        "scaled averages",
        "Averages of clipped gradients were rounded once more with a loss scale; they are those without one now.",
        composition=r"ClipByNorm.*bfloat16.*\| scaler \|",
        moved=True,
    ),
)
"""To be made shorter, not longer. Used differences are counted in the summary."""


ON_THE_WAY = ("message ", "state / squares / ")
"""Of messages, and of averages between the exchange and the optimizer's step."""


class Difference(NamedTuple):
    """Where two recordings part."""

    composition: str
    step: int
    rank: int
    what: str
    found: str
    """The first place and both values."""
    allowed: str
    """Name of the entry of :data:`ALLOWED` that covers it; empty: none does."""

    def __str__(self) -> str:
        return f"{self.composition}\n    step {self.step}, rank {self.rank}, {self.what}: {self.found}"


def differences(composition: str, before: Recording | str, now: Recording | str) -> Iterator[Difference]:
    """All differences, in the order in which they came about.

    Where the exchange has moved from backward to the optimizer's step, messages are not compared, and nothing from the
    skipped step on: it loses its batch, and what was finite of that waited before.
    """
    if isinstance(before, str) or isinstance(now, str):
        ends = [found.strip().splitlines()[-1] if isinstance(found, str) else "runs" for found in (before, now)]
        yield Difference(composition, 0, 0, "error", f"before: {ends[0]}; now: {ends[1]}", "")
        return
    moved = _where(before) != _where(now)
    if moved:
        before, now = _comparable(before), _comparable(now)
    for old, new in zip_longest(before, now):
        if old is None or new is None or old[:3] != new[:3]:
            at = old or new
            names = " and ".join("nothing" if one is None else f"{one.what} of rank {one.rank}" for one in (old, new))
            found = f"one does what the other does not: {names}"
            yield Difference(composition, *at[:3], found, _allowed(composition, at, None, moved))
            return
        if (differs := _differs(old, new)) is not None:
            found, distance = differs
            yield Difference(composition, *old[:3], found, _allowed(composition, old, distance, moved))


def _where(recording: Recording) -> Any:
    """Return where gradients are exchanged; None where that is not recorded."""
    return next((entry.value for entry in recording[:1] if entry.what == EXCHANGES), None)


def _comparable(recording: Recording) -> Recording:
    """Return what may be compared with a tree that exchanges elsewhere."""
    end = next((entry.step for entry in recording if entry.what == "skipped" and entry.value), math.inf)
    return [entry for entry in recording if entry.step < end and not entry.what.startswith(ON_THE_WAY)]


def _differs(old: Entry, new: Entry) -> tuple[str, float | None] | None:
    """What differs in words, and how much; None: nothing."""
    a, b = old.value, new.value
    if old.dtype != new.dtype:
        return f"{old.dtype} before, {new.dtype} now", None
    if not isinstance(a, np.ndarray):
        return None if repr(a) == repr(b) else (f"{a!r} before, {b!r} now", _distance(np.array([a]), np.array([b])))
    if a.shape != b.shape:
        return f"shape {a.shape} before, {b.shape} now", None
    if a.tobytes() == b.tobytes():
        return None
    words = (x.reshape(-1).view(np.uint8).reshape(x.size, -1) for x in (a, b))
    unequal = np.flatnonzero((np.not_equal(*words)).any(axis=1))
    first, x, y = int(unequal[0]), _numbers(a, old.dtype).reshape(-1), _numbers(b, new.dtype).reshape(-1)
    found = f"[{first}] is {x[first]!r} before, {y[first]!r} now; {unequal.size} of {a.size} differ"
    return found, _distance(x, y)


def _numbers(x: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (x.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return x.view(np.float16) if dtype == "float16" else x


def _distance(x: Any, y: Any) -> float | None:
    """The largest one as a share of the largest magnitude; None where there is no such thing."""
    if x.dtype.kind != "f" or not (np.isfinite(x).all() and np.isfinite(y).all()):
        return None
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(np.abs(x - y).max() / max(np.abs(x).max(), np.abs(y).max()))


def _allowed(composition: str, entry: Entry, distance: float | None, moved: bool) -> str:
    for one in ALLOWED if moved else (one for one in ALLOWED if not one.moved):
        near = one.within is None or (distance is not None and distance <= one.within)
        if near and re.search(one.composition, composition) and re.search(one.what, entry.what):
            return one.name
    return ""
