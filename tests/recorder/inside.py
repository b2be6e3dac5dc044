"""All that the recorder knows of the inside of the package. Everything else it does through public names.

A recording is made in trees of different commits by the files of this folder: where a redesign renames something that
is named here, the new name is tried beside the old one.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

SWITCH = "LIGHTNING_SPARSE_KERNELS"
OFF = ("numpy", "reference")
"""What the switch is set to where the C library is to be left alone; the first one that the tree knows."""
UNTIMED = ("format", "settings", "spans", "pending", "absorbed", "moment", "late", "late_skipped", "sent", "clippings")
"""Of states: how they are written, and not what they hold."""
RENAMED = {"void_steps": "skipped_steps", "sparse/steps/void": "sparse/steps/skipped", "steps/void": "steps/skipped"}
"""Names of earlier trees, of what states and logs hold."""
LIMIT = 3.0
"""Where gradients are clipped."""
TIMES = "time/"
"""Begins the names of logged quantities that are times."""


def builder(tree: Path) -> Path:
    """The file of a tree that compiles its C library when it is run."""
    return next(
        path for path in sorted(tree.glob("lightning_sparse/**/library.py")) if "def build(" in path.read_text()
    )


def import_package(compiled: bool) -> None:
    """Import the package with its C library or without; fails where it was asked for and is not there."""
    for setting in ("compiled",) if compiled else OFF:
        os.environ[SWITCH] = setting
        try:
            import lightning_sparse  # noqa: F401
        except ValueError:
            continue
        return
    raise ValueError(f"Expected {SWITCH} to know one of {OFF}. Add the new word to OFF.")


def pin_digest() -> None:
    """Let headers not depend on how settings are written: on names of classes and on settings that are new."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_sparse") and hasattr(module, "digest_of"):
            module.digest_of = lambda *_: 0x0123_4567_89AB_CDEF >> 2  # type: ignore[attr-defined]


class OfRank(MutableSequence[Any]):
    """A list of each thread: ranks are threads here, and see nothing of each other."""

    def __init__(self) -> None:
        self._lists = threading.local()

    @property
    def _mine(self) -> list[Any]:
        return self._lists.__dict__.setdefault("mine", [])

    def __getitem__(self, place: Any) -> Any:
        return self._mine[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._mine[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._mine[place]

    def __len__(self) -> int:
        return len(self._mine)

    def insert(self, place: int, value: Any) -> None:
        self._mine.insert(place, value)


@contextmanager
def ranks_apart() -> Iterator[None]:
    """Let steps of optimizers find the engine of their own rank, and no other one of the process."""
    names = "_called", "_bindings"  # _bindings: of earlier trees
    modules = [module for name, module in sys.modules.items() if name.startswith("lightning_sparse.engine.optimizers.")]
    before = [(module, name, getattr(module, name)) for module in modules for name in names if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, OfRank())
    try:
        yield
    finally:
        for module, name, called in before:
            setattr(module, name, called)


def in_steps(engine: Any) -> bool:
    """Whether gradients are exchanged when an optimizer steps, and not in backward, as in earlier trees."""
    return not hasattr(engine, "bind") or getattr(engine._binding, "exchanges", False)


def attached(ddp: Any, optimizer: Any, scaler: Any, settings: Mapping[str, Any], clip: str) -> Any:
    """Attach an engine, and tell earlier ones what they need to know.

    Args:
        ddp: the model.
        optimizer: its own.
        scaler: of the loss, or None.
        settings: keywords.
        clip: "norm" or "value" of gradients, before an exchange in backward; anything else: nothing.
    """
    import lightning_sparse as ls

    attach: Any = ls.attach
    if "scaler" in inspect.signature(attach).parameters:
        settings = {**settings, "scaler": scaler}
    engine = attach(ddp, **settings)
    getattr(engine, "bind", lambda optimizers: None)([optimizer])
    if clip in ("norm", "value") and not in_steps(engine):
        engine.clip_gradients(LIMIT, clip)
    return engine


def ignore_skipped(engine: Any, optimizer: Any) -> None:
    """Let an optimizer pass over a step that is skipped, where earlier trees do not do so by themselves."""
    if not in_steps(engine):
        member(engine, "ignore_skipped")(optimizer)


def public_names() -> dict[str, Any]:
    """All public names of the tree, those of its modules of methods included."""
    import lightning_sparse as ls

    found = dict(vars(ls))
    for module in ("sparsifiers", "exchanges", "memories", "density", "grouping"):
        found |= vars(found[module]) if module in found else {}
    return {"CLTK": found.get("CLTk"), **found}


def watch_picks(note: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``note`` with the ascending coordinates of every selection of a registered sparsifier, without padding.

    Where everything is sent nobody selects, and nothing is noted.

    Returns:
        What ends that.
    """
    known = public_names()
    classes = [cls for _, cls in known["SPARSIFIERS"].items() if cls is not known["Everything"]]
    chosen = {cls: cls.select for cls in classes}
    own = {cls: "select" in vars(cls) for cls in classes}

    def watched(select: Any) -> Any:
        def noted(self: Any, *args: Any, **keywords: Any) -> Any:
            result = select(self, *args, **keywords)
            if inspect.isgenerator(result):
                return _through(result, lambda found: note(indices_of(found[0])))
            note(indices_of(result[0]))
            return result

        return noted

    def end() -> None:
        for cls, select in chosen.items():
            if own[cls]:
                cls.select = select  # type: ignore[method-assign]
            else:
                del cls.select

    for cls, select in chosen.items():
        cls.select = watched(select)  # type: ignore[method-assign]
    return end


def _through(steps: Generator[Any, Any, Any], note: Callable[[Any], None]) -> Generator[Any, Any, Any]:
    result = yield from steps
    note(result)
    return result


def indices_of(picks: Any) -> Any:
    """Of a ``Selection``."""
    return picks.indices[: int(picks.count)]


def member(engine: Any, name: str) -> Any:
    """Return a member of the engine by its present name."""
    earlier = {
        "ignore_skipped": ["skip_void"],
        "stepper.record.latest_skipped": ["_skipped", "skipped", "void"],
        "_flush_next_step": ["flush_next_step"],
        "groups": ["plan"],
    }
    # A present name may have been that of something else.
    return attrgetter(next((one for one in earlier[name] if hasattr(engine, one)), name))(engine)


def state_of(engine: Any) -> dict[str, Any]:
    """What an engine would save, but for how that is written."""
    return {RENAMED.get(name, name): value for name, value in engine.state_dict().items() if name not in UNTIMED}


def logged_by(engine: Any) -> dict[str, float]:
    """What a Trainer would log, but for times; collective."""
    found = {name: value for name, value in engine.summary().items() if not name.startswith(TIMES)}
    return {RENAMED.get(name, name): value for name, value in found.items()}
