"""Side files on a file system: their names, which of them are there, and how they are removed."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from fsspec.core import url_to_fs

from lightning_sparse.engine.agreement import reason

Path = str | os.PathLike[str]


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


def side_directory(path: Path) -> str:
    """Return the directory in which the side files of a checkpoint are written."""
    return f"{os.fspath(path)}.sparse"


class SideFileError(Exception):
    """A side file that cannot be used; the text says why."""


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
