"""Logs of runs, read from the files of Lightning's loggers."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.core.console import LOGGER, Table
from lightning_sparse.tools.report.catalog import DENSE_MB, DENSITY
from lightning_sparse.tools.report.files import KINDS, run_files
from lightning_sparse.tools.report.settings import flat, settings_in
from lightning_sparse.tools.report.tensorboard_file import read_tensorboard_files
from lightning_sparse.tools.report.wandb_file import read_wandb_file
from lightning_sparse.tools.yaml_file import MOST_BYTES, need, text_of

Points = Iterable[tuple[float, str, float]]
"""Steps, names and values, in any order."""
LAST_STEP = 2.0**53
"""Number from which on floats do not count by ones."""
LARGEST = 1e100
"""Largest value; the least one is its reciprocal, so that differences and squares of drawn values are finite."""
LONGEST_NAME = 120
"""Characters of a name."""
MOST_LISTED = 6
"""Names of columns in a sentence."""
WANDB_STEP = "trainer/global_step"
"""Step of Lightning's logger for W&B."""


class NothingLoggedError(ValueError):
    """A run's files exist, but hold no numbers."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"Expected numbers in {file}, but nothing was logged there: the run has not come to its first logging step "
            "(log_every_n_steps of the Trainer), or ended before it."
        )


class Series(NamedTuple):
    """A logged quantity: steps in ascending order, and its values."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    def at(self, steps: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return values at other steps: linear between the logged ones, and beyond them at the mean slope.

        Non-finite values are left out.
        """
        finite = np.isfinite(self.values)
        known, values = self.steps[finite], self.values[finite]
        if not len(known):
            return np.full(len(steps), np.nan)
        found = np.interp(steps, known, values)
        if len(known) > 1 and (length := known[-1] - known[0]):
            slope = (values[-1] - values[0]) / length
            found += slope * (np.maximum(steps - known[-1], 0) - np.maximum(known[0] - steps, 0))
        return found


@dataclass(frozen=True)
class Run:
    """A run's logs.

    Args:
        name: in figures.
        path: of the file that was read.
        series: by their logged names.
        settings: hyper-parameters and configuration, flattened: ``sparse_ddp/density`` to its text.
        clock: seconds since the first logged point, if the logger records them.
        notes: sentences on problems of the logs.
        plan: the groups at the end, if they were logged.
        unread: True if it has settings that could not be read.
    """

    name: str
    path: Path
    series: Mapping[str, Series]
    settings: Mapping[str, str]
    clock: Series | None = None
    notes: Sequence[str] = ()
    plan: Table | None = None
    unread: bool = False

    @property
    def sparse(self) -> bool:
        """True if settings or logs show a sparsified exchange."""

        def says(name: str, value: str) -> bool:
            parts = name.split("/")
            strategy = "strategy" in name and re.search("sparse_?ddp", value, re.IGNORECASE)
            chosen = "sparsifier" in parts[:-1] or (parts[-1] == "sparsifier" and value not in ("", "None", "none"))
            return name.startswith("sparse_ddp/") or chosen or bool(strategy)

        return DENSITY in self.series or any(says(name, value) for name, value in self.settings.items())

    @property
    def steps(self) -> int:
        """Steps of the longest series."""
        return int(max(one.steps[-1] for one in self.series.values())) + self.offset

    @cached_property
    def offset(self) -> int:
        """Difference of a count and a logged step: 1 if steps begin at 0, as the Trainer's do, 0 if they begin at 1.

        Loops with Fabric often begin at 1. It is found from dense traffic, which is the same in all steps, else from
        the divisors of the logged steps.
        """
        total = self.series.get(DENSE_MB)
        if total is not None and len(total.steps) > 1 and np.isfinite(total.values).all():
            growth = (total.values[-1] - total.values[0]) / (total.steps[-1] - total.steps[0])
            before = total.values[-1] / growth - total.steps[-1] if growth > 0 else math.nan
            if near := [count for count in (0, 1) if abs(before - count) < 0.1]:
                return near[0]
        steps = np.unique(np.concatenate([one.steps for one in self.series.values()])).astype(np.int64)
        return int(steps[0] == 0 or np.gcd.reduce(steps) <= np.gcd.reduce(steps + 1))


def read_runs(paths: Sequence[Path], names: Sequence[str] | None = None) -> list[Run]:
    """Read the runs in some files or folders; of several, unreadable ones are left out with a warning.

    Args:
        paths: of runs: folders of ``CSVLogger`` (``metrics.csv``), of W&B offline runs (``offline-run-*``) or of
            TensorBoard events, the files in them, or folders above several ones. If a folder above holds several
            kinds, the first of these kinds is taken: loggers beside each other log the same run.
        names: of all runs, or of the readable ones, in the order in which they are found; None: the parts of their
            paths that differ.

    Raises:
        ValueError: if no run can be read, if names are too few or not distinct, or if a package is missing; in one
            sentence.

    Example:
        >>> read_runs([Path("no_such_folder")])
        Traceback (most recent call last):
        ...
        ValueError: Expected a run in no_such_folder, but there is no such file or folder.
    """
    files = run_files(paths)
    runs: dict[Path, Run] = {}
    broken: dict[Path, ValueError] = {}
    for file in files:
        try:
            runs[file] = _read(file)
        except ValueError as error:
            broken[file] = error
    first = None if runs else next(iter(broken))
    for file, why in broken.items():
        if file != first:
            LOGGER.warning("A run is left out. %s", why)
    if first is not None:
        raise broken[first]
    if names is not None and len(names) == len(files):
        names = [name for name, file in zip(names, files, strict=True) if file in runs]
    if names is not None and (len(names) != len(runs) or len(set(names)) < len(names)):
        listed = ", ".join(str(file) for file in runs)
        raise ValueError(f"Expected {len(runs)} different names, for {listed}, but got {', '.join(names)}.")
    chosen = names or _distinct(list(runs))
    return [replace(run, name=_clean(name)) for run, name in zip(runs.values(), chosen, strict=True)]


def _distinct(files: Sequence[Path]) -> list[str]:
    """Return names of runs: the first part in which all paths differ, else all parts from the first difference on."""
    parts = [file.resolve().parent.parts for file in files]
    if len(files) == 1:
        return [parts[0][-1]]
    for level in zip(*parts, strict=False):
        if len(set(level)) == len(files):
            return list(level)
    start = next((i for i in range(len(min(parts)) + 1) if len({part[: i + 1] for part in parts}) > 1), -1)
    names = ["/".join(part[start:]) or part[-1] for part in parts]
    return [name if names.count(name) == 1 else f"{name}/{f.name}" for name, f in zip(names, files, strict=True)]


def _read(file: Path) -> Run:
    run = next(reader for kind, reader in READERS.items() if file.match(kind))(file)
    if not run.series:
        raise NothingLoggedError(file)
    return run


def _clean(name: str) -> str:
    """Return a name that every page and figure can show."""
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in name) or "(no name)"
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 1]}…"


def _check_step(step: float, where: str, file: Path) -> float:
    """Return a step if it is in the range of an axis, else raise."""
    if not 0 <= step < LAST_STEP:
        raise ValueError(f"Expected steps from 0 on in {file}, but {where} has {step:g}.")
    return step


def _series(points: Points, notes: list[str]) -> dict[str, Series]:
    """Sort points to series; of a step that was logged twice, as after a resumption, the later value counts."""
    found: dict[str, dict[float, float]] = {}
    for step, name, value in points:
        found.setdefault(_clean(name), {})[step] = value
    ordered = {name: sorted(by_step.items()) for name, by_step in found.items()}
    made = {name: Series(*np.array(pairs, dtype=np.float64).T) for name, pairs in ordered.items()}
    for name, (steps, values) in made.items():
        size = np.abs(values)
        huge, tiny = np.isfinite(values) & (size > LARGEST), (size > 0) & (size < 1 / LARGEST)
        if huge.any() or tiny.any():
            far = f"beyond {LARGEST:g} are taken as infinite, or below {1 / LARGEST:g} as zero"
            notes.append(f"{name}: {int(huge.sum() + tiny.sum())} values {far}.")
            made[name] = Series(steps, np.where(huge, np.copysign(np.inf, values), np.where(tiny, 0.0, values)))
    return made


def read_csv(file: Path) -> Run:
    """Read a folder of ``CSVLogger``: ``metrics.csv``, with ``hparams.yaml`` and ``config.yaml`` if they exist."""
    notes = []
    text = text_of(file)
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        notes.append("The last line of metrics.csv was cut off and is left out.")
    lines = _lines(text, file)
    _, header = next(lines, (1, []))
    if header and "step" not in header:
        raise ValueError(f"Expected {file} to have a column step, but its columns are: {_listed(header)}.")
    if twice := [name for name, count in Counter(map(_clean, header)).items() if count > 1]:
        raise ValueError(f"Expected different columns in {file}, but several are called {_listed(twice)}.")

    def points() -> Iterator[tuple[float, str, float]]:
        place = header.index("step")
        for number, cells in lines:
            if len(cells) != len(header):
                raise ValueError(f"Expected {len(header)} cells in line {number} of {file}, but got {len(cells)}.")
            for name, cell in zip(header, cells, strict=True):
                if cell and name != "step":
                    try:
                        step, value = float(cells[place]), float(cell)
                    except ValueError:
                        under = f"{reprlib.repr(cell)} under {reprlib.repr(name)} at step {reprlib.repr(cells[place])}"
                        raise ValueError(f"Expected numbers in {file}, but line {number} has {under}.") from None
                    yield _check_step(step, f"line {number}", file), name, value

    series = _series(points(), notes) if header else {}
    if not series:
        raise NothingLoggedError(file)
    settings, unknown = settings_in(file.parent)
    plan = _plan(file.parent / "sparse" / "plan.csv", _plan_of_csv, notes)
    return Run("", file, series, settings, notes=[*notes, *unknown], plan=plan, unread=bool(unknown))


def _lines(text: str, file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the non-empty lines of a CSV file, with their numbers."""
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        for cells in lines:
            if cells:
                yield lines.line_num, cells
    except csv.Error as error:
        raise ValueError(f"Expected {file} to be CSV, but line {lines.line_num} is not: {error}.") from error


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(_clean(name) for name in names[:MOST_LISTED]) + more


def _plan(file: Path | None, read: Callable[[Path], Table | None], notes: list[str]) -> Table | None:
    """Read the table of groups; a run can be shown without it."""
    if file is None or not (file.is_file() or file.is_symlink()):
        return None
    try:
        return read(file)
    except ValueError as error:
        notes.append(f"Its plan of groups is not known. {error}")
        return None


def _plan_of_csv(file: Path) -> Table | None:
    rows = [cells for _, cells in _lines(text_of(file, MOST_BYTES), file)]
    return Table("", rows[0], rows[1:]) if rows else None


def read_wandb(file: Path) -> Run:
    """Read a folder of a W&B offline run: ``run-*.wandb``."""
    need("wandb", "wandb", "wandb", file)
    config, rows, notes = read_wandb_file(file)
    points, clock = [], []
    for place, row in enumerate(rows):
        at = _check_step(row.get(WANDB_STEP, row.get("_step", place)), f"row {place + 1} of the history", file)
        clock.append((at, "clock", row.get("_timestamp", math.nan)))
        for name, value in row.items():
            if name != WANDB_STEP and not name.startswith("_"):
                points.append((at, name, value))
    series = _series(points, notes)
    try:
        settings = flat(config)
    except (RecursionError, ValueError):
        settings = None
        notes.append(
            f"Not all of its settings are known. Expected {file} to hold settings by name, nested a few levels deep."
        )
    tables = file.parent.glob("files/media/table/sparse/plan_*.table.json")
    latest = max(tables, key=lambda one: one.lstat().st_mtime, default=None)
    plan = _plan(latest, _plan_of_wandb, notes)
    return Run("", file, series, settings or {}, _clock(clock), notes, plan, unread=settings is None)


def _plan_of_wandb(file: Path) -> Table:
    """Read the latest table of groups."""
    try:
        found = json.loads(text_of(file, MOST_BYTES))
        rows = [["" if cell is None else str(cell) for cell in row] for row in found["data"]]
        return Table("", [str(name) for name in found["columns"]], rows)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"Expected {file} to be a table of W&B, but got a {type(error).__name__}.") from error


def read_tensorboard(file: Path) -> Run:
    """Read a folder of ``TensorBoardLogger``: scalars of all its event files, with ``hparams.yaml`` if it exists."""
    need("tensorboard", "tensorboard", None, file)
    scalars, notes = read_tensorboard_files(file.parent)
    for one in scalars:
        _check_step(one.step, _clean(one.name), file)
    series = _series(((float(one.step), one.name, one.value) for one in scalars), notes)
    clock = _clock((float(one.step), "clock", one.seconds) for one in scalars)
    settings, unknown = settings_in(file.parent)
    return Run("", file, series, settings, clock, [*notes, *unknown], unread=bool(unknown))


def _clock(points: Points) -> Series | None:
    """Return the seconds since the first point with a known time."""
    clock = _series((point for point in points if abs(point[2]) <= LARGEST), []).get("clock")
    return clock and Series(clock.steps, clock.values - clock.values[0])


READERS: dict[str, Callable[[Path], Run]] = dict(zip(KINDS, (read_csv, read_wandb, read_tensorboard), strict=True))
"""Readers of the files of each kind."""
