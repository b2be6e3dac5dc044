"""Error feedback next to checkpoints: what each rank remembers, in a file of its own.

A checkpoint is one file, written by rank 0. What error feedback holds differs from rank to rank and is as large as the
model, or larger, so that every rank writes a *side file* of its own, in a directory beside the checkpoint::

    last.ckpt                                         the checkpoint, with a marker that names the save
    last.ckpt.sparse/rank-0-of-2.<save>.pt            what rank 0 remembers
    last.ckpt.sparse/rank-1-of-2.<save>.pt

Side files are complete on all ranks before the checkpoint is begun, and those of the save before stay: whenever a run
is killed, the checkpoint that lies there finds the files of its own save. On the way back, either all ranks continue
with what they remembered or all of them start empty.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_sparse.core.checks import is_integer
from lightning_sparse.core.console import say
from lightning_sparse.engine.agreement import Note, by_reason, reason
from lightning_sparse.engine.config import Resize
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.state.merging import join_parts, merge_states
from lightning_sparse.engine.state.schema import NOTHING, State, check_state, checksum, with_pending

Path = str | os.PathLike[str]
DENSE = "it is of a training without this exchange"
"""Problem of a rank whose checkpoint nothing waited for: if all ranks have it, it is none."""
DAMAGED = "its content does not have the checksum that was written with it"
FORMAT = 3
"""Version of the format of side files and of the marker; changes when their meaning does."""
MARKER: dict[str, int | str] = {
    "world_size": 1,
    "parts": 1,
    "exchanging": 1,
    "step": 0,
    "global_step": -1,
    "save": r"\w+-\d+",
    "directory": r"[^/\\\0]+\.sparse",
}
"""Fields of the marker: the least number, or the pattern of a text."""


class SideFile(NamedTuple):
    """The facts in the name of a side file."""

    rank: int
    world_size: int
    run: str
    """Drawn anew for each engine."""
    number: int
    """Number of the save within the run."""

    @property
    def save(self) -> str:
        """Equal on all ranks, different for each save."""
        return f"{self.run}-{self.number}"

    @property
    def name(self) -> str:
        """Within the directory."""
        return f"rank-{self.rank}-of-{self.world_size}.{self.save}.pt"

    @classmethod
    def parse(cls, name: str) -> SideFile | None:
        """Read a name; None for any other file.

        Example:
            >>> SideFile.parse("rank-1-of-4.3f2a-17.pt")
            SideFile(rank=1, world_size=4, run='3f2a', number=17)
        """
        match = re.fullmatch(r"rank-(\d+)-of-(\d+)\.(.+)-(\d+)\.pt", name)
        return cls(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None


class SideFileError(Exception):
    """A side file that cannot be used; the text says why."""


MEANS = (
    "Optimizers had states of their own on each rank, and there is another number of ranks now. All of them go on with "
    "the means of floating-point states, and with rank 0's other ones."
)


class Found(NamedTuple):
    """What a rank has read of a save."""

    state: State
    notes: Sequence[str] = ()
    """Sentences about what does not fit."""
    loaded: Callable[[], None] = lambda: None
    """Called when all ranks have loaded their states."""


class SideFiles:
    """The side files that a strategy writes and clears away.

    Writing may go on in the background, as with Lightning's ``AsyncCheckpointIO``, if it is done in the order in which
    it was asked for.
    """

    def __init__(self) -> None:
        self._number = 0
        self._latest: dict[str, str] = {}
        self._late: dict[str, tuple[int, int]] = {}

    @contextmanager
    def beside(
        self,
        path: Path,
        engine: Engine,
        write: Callable[[State, str], None],
        comm: TorchCollective | None,
        global_step: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Write this rank's side file, then let the checkpoint be written, then remove older side files.

        All ranks must enter this together, but may be asked at different moments of a step: all of them save after the
        newest exchange of any rank, and rank 0 adds the averages that its weights do not hold yet. A problem of one
        rank is an error on all of them, before the checkpoint is touched.

        Args:
            path: of the checkpoint, the same on all ranks.
            engine: whose state is saved.
            write: saves a dict at a path or URL.
            comm: the ranks; None: this rank goes ahead alone, because something has failed already and the others may
                not come. It only warns of failures then, removes nothing, and saves what belongs to its own weights.
            global_step: what the checkpoint says about itself; None: nothing.

        Yields:
            The marker, which the checkpoint must carry for :func:`restore`.

        Raises:
            RuntimeError: on all ranks, if any of them could not write.
        """
        self._number += 1
        own = SideFile(engine._rank, engine._world_size, engine.run_id, self._number)
        counted = -1 if global_step is None else global_step
        state, problem = _take(engine)
        if comm is not None:
            # An exchange may end while ranks agree: what was taken before is of before it, and stays so.
            moment = -1 if state is None else state["moment"]
            on_ranks = comm.all_gather(torch.tensor([moment, counted], device=engine.device)).cpu()
            newest, counted = int(on_ranks[:, 0].max()), int(on_ranks[0, 1])
            if not problem and moment < newest:
                state, problem = _take(engine, newest)
        step = 0 if state is None else state["step"]
        if state is not None:
            content = sealed({"save": own.save, "global_step": counted, "state": state})
            problem = self._write(content, own.name, path, write)
        oldest = ""
        if comm is not None:
            waiting = sorted(state["pending"]) if state is not None and engine.comm.rank == 0 else None
            told = comm.all_gather_object((Note(_oldest_needed(path, own), problem), waiting), engine.device)
            notes = [note for note, _ in told]
            notes += _disagreement([names for _, names in told if names is not None])
            oldest = notes[0].fact
            if trouble := by_reason(notes):
                raise RuntimeError(
                    f"The residuals for checkpoint {os.fspath(path)} could not be saved: {trouble.rstrip('.')}. The "
                    "checkpoint was not written; what was there before is unchanged. Set save_residuals=False to do "
                    "without them."
                )
        elif problem:
            warnings.warn(f"Rank {own.rank} could not save its residuals: {problem.rstrip('.')}.", stacklevel=3)
        yield {
            "format": FORMAT,
            "save": own.save,
            "global_step": counted,
            "world_size": own.world_size,
            "parts": engine._parts,
            "exchanging": engine._exchanging,
            "step": step,
            "directory": os.path.basename(side_directory(path)),
        }
        if oldest:
            remove(path, own.rank, own.world_size, lambda file: file.run != own.run or file.number < int(oldest))

    def _write(self, content: State, name: str, path: Path, write: Callable[[State, str], None]) -> str:
        """Write the file; returns what went wrong."""
        target = self._latest[os.fspath(path)] = f"{side_directory(path)}/{name}"
        self._late.pop(os.fspath(path), None)
        try:
            try:
                write(content, target)
            except FileNotFoundError:
                # Another rank has removed the empty directory after it was made and before the file was in it.
                write(content, target)
        except Exception as error:  # of any plugin and any file system
            return reason(error, SideFileError)
        return ""

    def remove(self, path: Path, rank: int, world_size: int) -> None:
        """Remove the side files of a checkpoint that rank 0 has removed; there may be none.

        Callbacks may not agree on what to remove where they follow metrics that differ from rank to rank. As for
        checkpoints, rank 0 decides: it removes the files of all ranks, and others only what it cannot see, on disks of
        their own.

        Args:
            path: of the checkpoint. Of a link, nothing is removed: the files belong to what it points to.
            rank: of this process.
            world_size: number of ranks.
        """
        latest = self._latest.pop(os.fspath(path), None)
        if latest is not None and not exists(latest):
            self._late[os.fspath(path)] = rank, world_size  # still to be written in the background
        clear(path, rank, world_size)

    def sweep(self) -> None:
        """Remove what was written after it had been removed; call this when nothing is written any more."""
        late, self._late = self._late, {}
        for path, (rank, world_size) in late.items():
            clear(path, rank, world_size)


def restore(
    engine: Engine,
    path: Path,
    marker: dict[str, Any] | str | None,
    load: Callable[[str], Any],
    resize: Resize = "merge",
    strict: bool = False,
    dense: bool = False,
) -> None:
    """Let a new engine continue with what the ranks remembered when a checkpoint was written; collective.

    With the same number of ranks, each reads its own file and continues bit for bit. With another number, all files are
    read: see ``resize``. If any rank cannot, none does: error feedback starts empty on all of them, at the step at
    which the checkpoint was written.

    Args:
        engine: before its first step.
        path: of the checkpoint; links are followed.
        marker: from the checkpoint; None: it has none; a sentence: why it has none.
        load: reads a file that ``write`` of :meth:`SideFiles.beside` has written.
        resize: with another number of ranks, "merge" gives each the mean of what all remembered, which leaves the
            pending update ``1/n sum_i residual_i`` unchanged; "flush" sends all of that in the first step, densely;
            "zero" drops it, and says how much that is.
        strict: raise where something is in the way, instead of starting empty.
        dense: whether the checkpoint is of a training that did not sparsify, so that nothing waited. Error feedback
            starts empty, and nothing is in the way.

    Raises:
        RuntimeError: on all ranks, if ``strict`` and not everything fits.
    """

    def read(marker: dict[str, Any]) -> Found:
        state = _read_state(path, marker, engine, load)
        if marker["exchanging"] == engine._exchanging:
            return Found(state)
        if resize == "merge" and state["optimizers"] and engine._rank == 0:
            return Found(state, loaded=partial(say, MEANS))
        if resize == "merge":
            return Found(state)
        if resize == "flush":
            return Found(state, loaded=engine._flush_next_step)
        state, square = emptied(state)
        kinds = ("group of ranks", "groups of ranks") if engine.settings.node_size else ("rank", "ranks")
        now = f"{engine._exchanging} {kinds[engine._exchanging > 1]}"
        warn = partial(warn_of_dropped, now, state["world_size"], square)
        return Found(state, loaded=warn if engine._rank == 0 else lambda: None)

    resume(engine, path, marker, MARKER, side_directory(path), read, strict, dense)


def resume(
    engine: Engine,
    path: Path,
    marker: Any,
    fields: Mapping[str, int | str],
    place: Path,
    read: Callable[[dict[str, Any]], Found],
    strict: bool = False,
    dense: bool = False,
) -> None:
    """Do the work of :func:`restore` for any kind of files; collective.

    Args:
        engine: before its first step, or between two.
        path: of the checkpoint.
        marker: as in :func:`restore`.
        fields: of the marker, see :data:`MARKER`.
        place: of the files that belong to the checkpoint.
        read: gives what this rank goes on with, as a checked marker says; raises where it cannot. It is not collective.
        strict: as in :func:`restore`.
        dense: as in :func:`restore`.

    Raises:
        RuntimeError: on all ranks, if ``strict`` and not everything fits.
    """

    def checked() -> Found:
        if dense or marker is None or isinstance(marker, str):
            raise SideFileError(DENSE if dense else marker or "it was saved without them")
        return read(check_marker(marker, fields))

    try:
        remarks = load_together(engine, checked)
    except ValueError as error:  # on all ranks
        text = (
            f"The residuals of the sparsified exchange were not restored from checkpoint {os.fspath(path)}: "
            f"{str(error).rstrip('.')}."
        )
        facts = engine._all_gather_object((dense, _step_of(marker, fields)))
        lost = not all(waited_for_nothing for waited_for_nothing, _ in facts)
        if strict and lost:
            where = f"{os.fspath(place)} belongs to the checkpoint and must be where that is. " if marker else ""
            raise RuntimeError(f"{text} {where}With strict_resume=False, error feedback starts empty.") from error
        if engine._rank == 0 and lost:
            warnings.warn(
                f"{text} Error feedback starts empty on all ranks, and what was not sent before the checkpoint was "
                "written is lost. Expect a small dent in the curve.",
                stacklevel=3,
            )
        engine.load_state_dict({**engine.state_dict(), **NOTHING, "step": facts[0][1]})
        return
    notes = engine._all_gather_object(Note("", " ".join(remarks)))
    if trouble := by_reason(notes):
        text = f"The residuals in checkpoint {os.fspath(path)} do not fit in every respect. On {trouble}"
        if strict:
            raise RuntimeError(f"{text} With strict_resume=False, training continues with what fits.")
        if engine._rank == 0:
            warnings.warn(text, stacklevel=3)


def load_together(engine: Engine, read: Callable[[], Found]) -> list[str]:
    """Let all ranks go on with what they have read, or none of them; collective.

    Args:
        engine: before its first step, or between two.
        read: gives what this rank goes on with; raises where it cannot. It is not collective.

    Returns:
        Sentences about what does not fit, on this rank.

    Raises:
        ValueError: on all ranks, with one text and nothing changed, if any of them could not read or load its state.
    """
    found, problem = None, ""
    try:
        found = read()
    except Exception as error:  # of any plugin and any file system
        problem = reason(error, SideFileError)
    trouble = by_reason(engine._all_gather_object(Note("", problem)))
    if trouble or found is None:
        raise ValueError(trouble)
    notes = [*found.notes, *engine.load_state_dict(found.state)]
    found.loaded()
    return notes


def _disagreement(waiting: Sequence[Sequence[str]]) -> list[Note]:
    """Return a problem where the first ranks near each other are before an optimizer's step and behind it.

    Each of them has the averages of its part that the weights do not hold, which are those of one of them.

    Args:
        waiting: names of the parameters with such averages, on each of these ranks.
    """
    if all(names == waiting[0] for names in waiting):
        return []
    return [Note("", "the ranks around rank 0 are at different moments of a step; save a moment later")]


def _take(engine: Engine, moment: int | None = None) -> tuple[State | None, str]:
    """Take the state of an engine, see :meth:`.Engine.state_dict`; return it, and what went wrong."""
    try:
        return engine.state_dict(None if moment is None else torch.tensor([moment], device="cpu")), ""
    except Exception as error:  # of any memory
        return None, reason(error, RuntimeError)


def check_marker(marker: Any, fields: Mapping[str, int | str]) -> dict[str, Any]:
    """Raise unless the marker is one: a checkpoint may come from anywhere, and some fields become parts of paths.

    Args:
        marker: whatever lies in the marker's place.
        fields: see :data:`MARKER`.

    Returns:
        The marker.

    Raises:
        SideFileError: if anything is not as it was saved.
    """
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        kind = repr(marker.get("format")) if isinstance(marker, dict) else f"a {type(marker).__name__}"
        raise SideFileError(f"they are in format {kind}, and this version of lightning-sparse knows {FORMAT}")
    for field, expected in fields.items():
        value = marker.get(field)
        if isinstance(expected, int):
            fits = is_integer(value) and expected <= value < 2**62
        else:
            fits = isinstance(value, str) and re.fullmatch(expected, value, re.ASCII) is not None
        if not fits:
            raise SideFileError(f"the checkpoint names the {field} {value!r}, which is none")
    for field in {"parts", "exchanging"} & fields.keys():
        if marker["world_size"] % (value := marker[field]):
            raise SideFileError(
                f"the checkpoint names the {field} {value!r} of {marker['world_size']} ranks, which is none"
            )
    return marker


def _step_of(marker: Any, fields: Mapping[str, int | str]) -> int:
    """Return the step at which a checkpoint was written; 0 if its marker is none."""
    try:
        return int(check_marker(marker, fields)["step"])
    except SideFileError:
        return 0


def _read_state(path: Path, marker: dict[str, Any], engine: Engine, load: Callable[[str], Any]) -> State:
    """Read this rank's own state; join those of all parts if these were others; merge all if more than that was."""
    size = marker["parts"]
    alike = (marker["world_size"] // size, marker["exchanging"]) == (engine.comm.world_size, engine._exchanging)
    if alike and size == engine._parts:
        return _read(path, marker, engine._rank, load)
    if alike:
        first = engine.comm.rank * size
        return {**join_parts(_read(path, marker, rank, load) for rank in range(first, first + size)), "groups": []}
    return merge_states(_read(path, marker, rank, load) for rank in range(marker["world_size"]))


def _read(path: Path, marker: dict[str, Any], rank: int, load: Callable[[str], Any]) -> State:
    run, _, number = marker["save"].rpartition("-")
    file = SideFile(rank, marker["world_size"], run, int(number))
    location = _locate(path, marker["directory"], file)
    try:
        content = load(location)
        whole = is_whole(content, "save", "global_step", "state")
    except Exception as error:  # whatever a damaged file makes of a plugin
        raise SideFileError(f"{file.name} cannot be read ({reason(error)})") from error
    if not whole:
        raise SideFileError(f"{file.name} is damaged: {DAMAGED}")
    state: State = content["state"]
    try:
        check_state(state)
    except ValueError as error:
        raise SideFileError(f"{file.name} holds no state: {error}") from error
    place, size = state.get("part") or (0, 1)
    numbers = {"rank": state["rank"] * size + place, "world_size": state["world_size"] * size}
    said = {**state, **numbers, "save": content["save"], "global_step": content["global_step"]}
    expected = {key: marker[key] for key in ("save", "global_step", "world_size", "step")} | {"rank": rank}
    if any(said[key] != value for key, value in expected.items()):
        raise SideFileError(f"{file.name} holds something else than its name says")
    return state


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return content with a checksum of it: those of file formats are not looked at, torch.load takes any bits."""
    return {**content, "checksum": checksum(content)}


def is_whole(content: Mapping[str, Any], *fields: str) -> bool:
    """Return True if sealed content, of these fields, is what was written.

    Raises:
        KeyError: if a field is missing.
    """
    return bool(content["checksum"] == checksum({field: content[field] for field in fields}))


def _locate(path: Path, directory: str, file: SideFile) -> str:
    """Find a side file beside the checkpoint, beside what it links to, or where it was copied from in its folder."""
    places = [side_directory(path)]
    file_system, local = url_to_fs(os.fspath(path))
    if isinstance(file_system, LocalFileSystem):
        places.append(side_directory(os.path.realpath(local)))
    places.append(os.path.join(os.path.dirname(os.fspath(path)), os.path.basename(directory)))
    for place in places:
        if exists(f"{place}/{file.name}"):
            return f"{place}/{file.name}"
    others = sorted({other.save for _, other in listing(path)})
    if not others:
        raise SideFileError(f"there are no side files in {places[0]}")
    raise SideFileError(
        f"{file.name} is missing from {places[0]}, where there are files of the saves {', '.join(others)}"
    )


def emptied(state: State) -> tuple[State, float]:
    """Return a merged state without what it remembered, and the square of the norm of the update that is lost."""
    whole = with_pending(state, 1)["parameters"].values()
    residuals = [vectors["residual"].double() for vectors in whole if "residual" in vectors]
    residuals += [v["agreed"].double() - v["copy"].double() for v in whole if {"agreed", "copy"} <= v.keys()]
    empty: State = {name: {} for name in state["parameters"]}
    square = sum(float(residual.square().sum()) for residual in residuals)
    return {**state, "optimizers": {}, "parameters": empty, "counters": {}, "pending": {}}, square


def warn_of_dropped(now: str, before: int, square: float) -> None:
    """Warn that residuals are dropped because there are other ranks, or replicas, as was asked for.

    Args:
        now: how many of which there are.
        before: how many there were.
        square: of the norm of the update that is lost.
    """
    warnings.warn(
        f"Training continues with {now} instead of {before} and resize='zero': the residuals, an "
        f"update of norm {square**0.5:.4g} that was still to be sent, are dropped.",
        stacklevel=2,
    )


def _oldest_needed(path: Path, own: SideFile) -> str:
    """Return the number of the oldest save of this run that may still be needed; empty: keep everything.

    Rank 0 writes side file, checkpoint, side file, checkpoint, ... of a path one after the other. Where its newest side
    file is there, complete or not, the checkpoint of the one before is complete.
    """
    if own.rank != 0:
        return ""
    numbers = sorted(file.number for _, file in listing(path) if (file.rank, file.run) == (own.rank, own.run))
    return str(numbers[-2]) if len(numbers) > 1 else ""


def side_directory(path: Path) -> str:
    """Return the directory in which the side files of a checkpoint are written."""
    return f"{os.fspath(path)}.sparse"


def listing(path: Path) -> list[tuple[str, SideFile]]:
    """List the side files of a checkpoint, with their paths."""
    directory = side_directory(path)
    try:
        file_system, root = url_to_fs(directory)
        file_system.invalidate_cache(root)
        names = [os.path.basename(found) for found in file_system.ls(root, detail=False)]
    except (OSError, NotImplementedError):  # none, or where files cannot be listed
        return []
    parsed = [(f"{directory}/{name}", SideFile.parse(name)) for name in names]
    return [(location, file) for location, file in parsed if file is not None]


def clear(path: Path, rank: int, world_size: int) -> None:
    """Remove all that rank 0 sees; on other ranks their own, where there is no checkpoint any more."""
    if rank == 0:
        remove(path, 0, 1)
    elif not exists(os.fspath(path)):
        remove(path, rank, world_size)


def remove(path: Path, rank: int, world_size: int, which: Callable[[SideFile], bool] = lambda file: True) -> None:
    """Remove this rank's share, which is that of ranks that no longer exist, too; and the directory with the last file.

    Failures must not stop one rank alone: they are warnings.
    """
    places = [place for place, file in listing(path) if file.rank % world_size == rank and which(file)]
    for place in places:
        file_system, root = url_to_fs(place)
        try:
            with suppress(FileNotFoundError):
                file_system.rm_file(root)
        except (OSError, NotImplementedError) as error:
            warnings.warn(f"Could not remove {place}: {reason(error, SideFileError)}.", stacklevel=2)
    for directory in {os.path.dirname(place) for place in places}:
        file_system, root = url_to_fs(directory)
        with suppress(OSError, ValueError, NotImplementedError):  # not empty, or there are no directories
            file_system.rmdir(root)


def exists(place: str) -> bool:
    """Return True if there is a file at a path or URL now."""
    file_system, root = url_to_fs(place)
    file_system.invalidate_cache(os.path.dirname(root))
    return bool(file_system.exists(root))
