"""Search for the files of runs.

It needs the standard library only: the command runs this file by itself, to answer before it imports the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

KINDS = ("metrics.csv", "run-*.wandb", "events.out.tfevents.*")
"""Patterns of files of runs, in the order of the search."""
MOST_LETTERS = 500
"""Letters of a path that a message shows, of one that may be no path."""
EVENTS = KINDS[2]
"""Pattern of event files; all in a folder are one run."""


def run_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of all runs in some files or folders, each run once.

    Args:
        paths: of runs or of folders above several ones.

    Raises:
        ValueError: if there is none, in one sentence.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for file in _below(path):
            found.setdefault(file.resolve().parent if file.match(EVENTS) else file.resolve(), file)
    return list(found.values())


def _below(path: Path) -> list[Path]:
    """Return the run's file, or files of all runs below."""
    try:
        there = path.exists()
    except OSError as error:  # such as a name that is too long
        raise ValueError(f"Expected a run in {str(path)[:MOST_LETTERS]}, but got: {error.strerror}.") from error
    if not there:
        raise ValueError(f"Expected a run in {path}, but there is no such file or folder.")
    if path.is_file():
        if not any(path.match(kind) for kind in KINDS):
            raise ValueError(f"Expected {path} to be one of {', '.join(KINDS)}.")
        return [path]
    for look in (Path.glob, Path.rglob):  # files in the folder itself come before deeper ones
        for kind in KINDS:
            # Folders, pipes and devices may have such names, too; reading the last two might never end.
            if files := sorted(file for file in look(path, kind) if file.is_file()):
                return files
    raise ValueError(
        f"Expected a run in {path}, but found none of {', '.join(KINDS)} there or below: "
        "name a folder that a CSVLogger, an offline WandbLogger or a TensorBoardLogger has written."
    )
