"""The library that the sources in C are compiled into: building it, and loading it.

The build hook of the wheel runs this file, for an editable install, too; nothing is compiled later. It imports nothing
of the package, so that it runs where the package is built, and where its version is asked for. By hand::

    python lightning_sparse/kernels/library.py
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SETTING = "LIGHTNING_SPARSE_KERNELS"
"""Environment variable: ``numpy`` leaves the library alone, ``compiled`` refuses to go on without it. Otherwise it is
used where there is one. Results are the same."""
SOURCES = tuple(Path(__file__).with_name(name) for name in ("host.c", "picks.c", "common.h"))
LIBRARY = Path(__file__).with_name("libhost.so")
LEVELS = ("portable", "AVX2", "AVX-512")
"""Sets of instructions that the library chooses from when it is loaded."""
# Every operation is rounded by itself, as in numpy.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-fvisibility=hidden")


def build(library: Path = LIBRARY) -> str | None:
    """Compile the library with ``$CC``, or else ``cc``; what was there before is replaced.

    Returns:
        Why there is no library now; None if there is one.
    """
    trouble = f"{SETTING} is numpy" if os.environ.get(SETTING) == "numpy" else _compile(library)
    if trouble:
        with suppress(OSError):  # it may lie where nobody may write
            library.unlink(missing_ok=True)
    return trouble


def _compile(library: Path) -> str | None:
    """Put a new library in this place; or why not."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            compiler = shlex.split(os.environ.get("CC", "cc"))
            code = [str(source) for source in SOURCES if source.suffix == ".c"]
            command = [*compiler, *FLAGS, f'-DSOURCE="{_digest()}"', *code, "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                return done.stderr.strip() or f"{command[0]} ended with {done.returncode}"
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def load(library: Path = LIBRARY, most: str = LEVELS[-1]) -> tuple[ctypes.CDLL, str]:
    """Load a library.

    Args:
        library: its file.
        most: the highest of :data:`LEVELS` that it may use.

    Returns:
        The library, and the level that it uses on this processor.

    Raises:
        OSError: if it cannot be loaded, or was built from another source.
    """
    found = ctypes.CDLL(str(library))
    if not hasattr(found, "ls_source"):
        raise OSError(f"{library.name} is another library")
    found.ls_source.restype = ctypes.c_char_p
    if all(source.exists() for source in SOURCES) and found.ls_source() != _digest().encode():
        raise OSError(f"{library.name} was built from other sources; install the package again")
    return found, LEVELS[found.ls_choose(LEVELS.index(most))]


def choose() -> tuple[ctypes.CDLL | None, str]:
    """What the setting asks for.

    Returns:
        The library, None for numpy alone; and that in words.

    Raises:
        ValueError: for a setting that does not exist.
        ImportError: if the setting asks for a library that cannot be had.
    """
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", "numpy", "compiled"):
        raise ValueError(f"Expected {SETTING} to be 'numpy' or 'compiled', or not to be set, but got {wanted!r}.")
    if wanted == "numpy":
        return None, f"numpy, as {SETTING} says"
    try:
        found, level = load()
    except OSError as error:
        if wanted == "compiled":
            raise ImportError(f"{SETTING} asks for the compiled kernels: {error}") from error
        return None, f"numpy: {error}" if LIBRARY.exists() else "numpy, as nothing was compiled at installation"
    return found, f"compiled, {level}"


def _digest() -> str:
    """Of the sources."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()


if __name__ == "__main__":
    sys.exit(build())
