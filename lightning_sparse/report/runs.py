"""What runs have logged, read back from what Lightning's loggers leave on disk."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.console import LOGGER, Table
from lightning_sparse.report.catalog import DENSE_MB, DENSITY
from lightning_sparse.report.wandb_file import read_wandb_file

Points = Iterable[tuple[float, str, float]]
"""Steps, names and values, in any order."""


class NothingLoggedError(ValueError):
    """A run's files are there and hold no numbers."""

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
        """Values at other steps, on straight lines between those that were logged, and beyond at the mean slope."""
        if not len(self.steps):
            return np.full(len(steps), np.nan)
        found = np.interp(steps, self.steps, self.values)
        if len(self.steps) > 1 and (length := self.steps[-1] - self.steps[0]):
            slope = (self.values[-1] - self.values[0]) / length
            found += slope * (np.maximum(steps - self.steps[-1], 0) - np.maximum(self.steps[0] - steps, 0))
        return found


@dataclass(frozen=True)
class Run:
    """A run's logs.

    Args:
        name: what figures call it.
        path: of the file that was read.
        series: by the names under which they were logged.
        settings: hyper-parameters and configuration, flattened: ``sparse_ddp/density`` to its text.
        clock: seconds since the first logged point, where the logger notes them.
        notes: what was odd about the logs, in sentences.
        plan: the groups at the end, where they were logged.
    """

    name: str
    path: Path
    series: Mapping[str, Series]
    settings: Mapping[str, str]
    clock: Series | None = None
    notes: Sequence[str] = ()
    plan: Table | None = None

    @property
    def sparse(self) -> bool:
        """Whether settings or logs show that it exchanged gradients sparsely."""

        def says(name: str, value: str) -> bool:
            last = name.rpartition("/")[2]
            strategy = "strategy" in name and re.search("sparse_?ddp", value, re.IGNORECASE)
            chosen = last == "sparsifier" and value not in ("", "None", "none")
            return name.startswith("sparse_ddp/") or chosen or bool(strategy)

        return DENSITY in self.series or any(says(name, value) for name, value in self.settings.items())

    @property
    def steps(self) -> int:
        """Steps of the longest series."""
        return int(max(one.steps[-1] for one in self.series.values())) + self.offset

    @cached_property
    def offset(self) -> int:
        """What makes a logged step a count: 1 where they begin at 0, as the Trainer's do, 0 where they begin at 1.

        Loops with Fabric often begin at 1. Told by dense traffic, which is the same in all steps, else by what the
        logged steps are multiples of.
        """
        if (total := self.series.get(DENSE_MB)) is not None and len(total.steps) > 1:
            growth = (total.values[-1] - total.values[0]) / (total.steps[-1] - total.steps[0])
            before = total.values[-1] / growth - total.steps[-1] if growth > 0 else math.nan
            if near := [count for count in (0, 1) if abs(before - count) < 0.1]:
                return near[0]
        steps = np.unique(np.concatenate([one.steps for one in self.series.values()])).astype(np.int64)
        return int(steps[0] == 0 or np.gcd.reduce(steps) <= np.gcd.reduce(steps + 1))


def read_runs(paths: Sequence[Path], names: Sequence[str] | None = None) -> list[Run]:
    """Read the runs that some files or folders hold; of several, those that logged nothing are named and left out.

    Args:
        paths: of runs: folders of ``CSVLogger`` (``metrics.csv``), of W&B offline runs (``offline-run-*``) or of
            TensorBoard events, the files in them, or folders above several ones. Where a folder above holds several
            kinds, those of the first of these kinds are taken: loggers beside each other log the same run.
        names: of the runs that logged something, in the order in which they are found; None: what distinguishes their
            paths.

    Raises:
        ValueError: where there is no run, its files are broken, names are too few or not distinct, or a package is
            missing that reads them; in one sentence.

    Example:
        >>> read_runs([Path("no_such_folder")])
        Traceback (most recent call last):
        ...
        ValueError: Expected a run in no_such_folder, but there is no such file or folder.
    """
    runs, empty = [], []
    for file in dict.fromkeys(found for path in paths for found in _files(path)):
        try:
            runs.append(_read(file))
        except NothingLoggedError as error:
            empty.append(error)
    if not runs:
        raise empty[0]
    for why in empty:
        LOGGER.warning("A run is left out. %s", why)
    files = [run.path for run in runs]
    if names is not None and (len(names) != len(files) or len(set(names)) < len(names)):
        listed = ", ".join(str(file) for file in files)
        raise ValueError(f"Expected {len(files)} different names, for {listed}, but got {', '.join(names)}.")
    return [replace(run, name=name) for run, name in zip(runs, names or _distinct(files), strict=True)]


def _files(path: Path) -> list[Path]:
    """The run's file, or files of all runs below."""
    try:
        there = path.exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"Expected a run in {path}, but got: {error.strerror}.") from error
    if not there:
        raise ValueError(f"Expected a run in {path}, but there is no such file or folder.")
    if path.is_file():
        if not any(path.match(pattern) for pattern in READERS):
            raise ValueError(f"Expected {path} to be one of {', '.join(READERS)}.")
        return [path]
    for found in (Path.glob, Path.rglob):  # what lies in the folder itself is meant before what lies deeper
        for pattern in READERS:
            if files := sorted(found(path, pattern)):
                return files
    raise ValueError(
        f"Expected a run in {path}, but found none of {', '.join(READERS)} there or below: "
        "name a folder that a CSVLogger, an offline WandbLogger or a TensorBoardLogger has written."
    )


def _distinct(files: Sequence[Path]) -> list[str]:
    """Names of runs: the first part in which all their paths differ, else all parts from where they begin to differ."""
    parts = [file.resolve().parent.parts for file in files]
    if len(files) == 1:
        return [parts[0][-1]]
    for level in zip(*parts, strict=False):
        if len(set(level)) == len(files):
            return list(level)
    start = next(i for i in range(len(min(parts)) + 1) if len({part[: i + 1] for part in parts}) > 1)
    names = ["/".join(part[start:]) or part[-1] for part in parts]
    return [name if names.count(name) == 1 else f"{name}/{f.name}" for name, f in zip(names, files, strict=True)]


def _read(file: Path) -> Run:
    run = next(reader for pattern, reader in READERS.items() if file.match(pattern))(file)
    if not run.series:
        raise NothingLoggedError(file)
    return run


def _series(points: Points) -> dict[str, Series]:
    """Of a step that was logged twice, as after a resumption, the later value counts."""
    found: dict[str, dict[float, float]] = {}
    for step, name, value in points:
        found.setdefault(name, {})[step] = value
    ordered = {name: sorted(by_step.items()) for name, by_step in found.items()}
    return {name: Series(*np.array(pairs, dtype=np.float64).T) for name, pairs in ordered.items()}


def read_csv(file: Path) -> Run:
    """A folder of ``CSVLogger``: ``metrics.csv``, with ``hparams.yaml`` and ``config.yaml`` where they are."""
    notes = []
    text = _text(file)
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        notes.append("The last line of metrics.csv was cut off and is left out.")
    header, *lines = list(csv.reader(io.StringIO(text, newline=""))) or [[]]
    if header and "step" not in header:
        raise ValueError(f"Expected {file} to have a column step, but its columns are: {', '.join(header)}.")
    if not lines:
        raise NothingLoggedError(file)
    place = header.index("step")

    def points() -> Iterator[tuple[float, str, float]]:
        for number, cells in enumerate(lines, 2):
            if len(cells) != len(header):
                raise ValueError(f"Expected {len(header)} cells in line {number} of {file}, but got {len(cells)}.")
            for name, cell in zip(header, cells, strict=True):
                if cell and name != "step":
                    try:
                        yield float(cells[place]), name, float(cell)
                    except ValueError:
                        wrong = f"but line {number} has {cell!r} under {name!r} at step {cells[place]!r}"
                        raise ValueError(f"Expected numbers in {file}, {wrong}.") from None

    plan = file.parent / "sparse" / "plan.csv"
    rows = list(csv.reader(io.StringIO(_text(plan), newline=""))) if plan.exists() else []
    table = Table("", rows[0], rows[1:]) if rows else None
    return Run("", file, _series(points()), _settings(file.parent), notes=notes, plan=table)


def read_wandb(file: Path) -> Run:
    """A folder of a W&B offline run: ``run-*.wandb``."""
    _need("wandb", "wandb", "wandb", file)
    config, rows, notes = read_wandb_file(file)
    step = "trainer/global_step"
    points, clock = [], []
    for place, row in enumerate(rows):
        at = float(row.get(step, row.get("_step", place)))
        if "_timestamp" in row:
            clock.append((at, "clock", float(row["_timestamp"])))
        for name, value in row.items():
            if name != step and not name.startswith("_"):
                points.append((at, name, float(value)))
    clock_of_run = _since_start(_series(clock).get("clock"))
    return Run("", file, _series(points), _flat(config), clock_of_run, notes, _wandb_plan(file.parent))


def _wandb_plan(folder: Path) -> Table | None:
    """The last table of groups that was logged."""
    files = sorted(folder.glob("files/media/table/sparse/plan_*.table.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return None
    found = json.loads(_text(files[-1]))
    return Table("", found["columns"], [["" if cell is None else str(cell) for cell in row] for row in found["data"]])


def read_tensorboard(file: Path) -> Run:
    """A folder of ``TensorBoardLogger``: scalars of all its event files, with ``hparams.yaml`` where it is."""
    _need("tensorboard", "tensorboard", None, file)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0})
    events.Reload()
    points, clock = [], []
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            points.append((float(event.step), name, float(event.value)))
            clock.append((float(event.step), "clock", float(event.wall_time)))
    return Run("", file, _series(points), _settings(file.parent), _since_start(_series(clock).get("clock")))


def _since_start(clock: Series | None) -> Series | None:
    return clock and Series(clock.steps, clock.values - clock.values[0])


READERS: dict[str, Callable[[Path], Run]] = {
    "metrics.csv": read_csv,
    "run-*.wandb": read_wandb,
    "events.out.tfevents.*": read_tensorboard,
}
"""Files of runs, in the order in which they are looked for, and what reads them."""


def _need(module: str, package: str, extra: str | None, file: Path) -> None:
    if find_spec(module) is None:
        install = f"'lightning-sparse[{extra}]'" if extra else package
        raise ValueError(f"Expected {package} to be installed, to read {file}: pip install {install}.")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Expected {file} to be a readable text file, but got: {error}.") from error


def _settings(folder: Path) -> dict[str, str]:
    """Of ``hparams.yaml``, and, where LightningCLI has written it, of ``config.yaml``."""
    found: dict[str, str] = {}
    for name in ("config.yaml", "hparams.yaml"):
        file = folder / name
        if file.exists():
            _need("yaml", "pyyaml", "cli", file)
            import yaml

            class Loader(yaml.SafeLoader):  # type: ignore[misc]
                """Objects that were written down are settings of no more than their names."""

            Loader.add_multi_constructor("", lambda _, tag, node: tag.rsplit(":", 1)[-1])
            try:
                loaded = yaml.load(_text(file), Loader)
            except yaml.YAMLError as error:
                place = getattr(getattr(error, "problem_mark", None), "line", -1) + 1
                raise ValueError(f"Expected {file} to be YAML, but it is broken in line {place}.") from error
            if isinstance(loaded, dict):
                found |= _flat(loaded.get("fit") or loaded)
    return found


def _flat(settings: Any, prefix: str = "") -> dict[str, str]:
    """Nested settings as texts by names with slashes."""
    if isinstance(settings, Mapping) and (settings or not prefix):
        parts = [_flat(value, f"{prefix}/{name}" if prefix else str(name)) for name, value in settings.items()]
        return {name: text for part in parts for name, text in part.items()}
    if isinstance(settings, list) and any(isinstance(one, Mapping) for one in settings):
        return _flat(dict(enumerate(settings)), prefix)
    return {prefix: str(settings)}
