"""The library that the sources in C are compiled into: building it, and loading it.

The build hook of the wheel runs this file, for an editable install, too; nothing is compiled later. It imports nothing
of the package, so that it runs where the package is built, and where its version is asked for. By hand::

    python lightning_sparse/ops/c/library.py
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

SETTING = "LIGHTNING_SPARSE_KERNELS"
"""Environment variable. On CPUs, ``numpy`` leaves the library alone (torch does its work, with numpy
where that is quicker), ``compiled`` refuses to go on without it, and otherwise it is used where there is one; on CUDA,
``torch`` and ``triton`` say the same of the kernels in Triton. One of each kind may be named, with a comma between
them. Results are the same, but for the last bits of norms on CUDA."""
CHOICES = ("numpy", "compiled"), ("torch", "triton")
"""Names that the setting may have, on CPUs and on CUDA."""
INSTEAD = "numpy, which takes several times as long: "
"""Begins the words on a library that is there and cannot be used."""
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))
"""All of them, headers, too; none where only the library was installed."""
CONSTANTS = ("CLASSES", "CLASS_BITS", "SILENT", "LEVELS", "TROUBLE", "LOWEST", "MARKS", "CODE_ZERO")
"""Of messages: what C takes from ``form.py``."""
LIBRARY = Path(__file__).with_name("libhost.so")
INSTRUCTIONS = {
    "portable": (),
    "AVX2": ("-mavx2",),
    "AVX-512": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mpopcnt", "-mbmi", "-mbmi2"),
        "-mprefer-vector-width=512",
    ),
}
"""Sets of instructions, for each of which there is a library of the same source, and what compilers are told."""
LEVELS = tuple(INSTRUCTIONS)
"""Names of these sets, in the order of ``ls_level`` in ``library.c``."""
# Every operation is rounded by itself, as in numpy.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-fvisibility=hidden")


def files(library: Path = LIBRARY, machine: str = "") -> list[Path]:
    """Return the library, which all processors can use, and those for further instructions of an architecture.

    Args:
        library: its file.
        machine: the architecture; empty: that of this machine.
    """
    further = LEVELS[1:] if (machine or platform.machine()) in ("x86_64", "AMD64") else ()
    return [library, *(library.with_stem(f"{library.stem}-{level.lower()}") for level in further)]


def build(library: Path = LIBRARY, machine: str = "") -> str | None:
    """Compile the library with ``$CC``, or else ``cc``; what was there before is replaced.

    Args:
        library: its file.
        machine: the architecture that the compiler compiles for; empty: that of this machine.

    Returns:
        Why there is no library now; None if there is one.
    """
    trouble = f"{SETTING} is numpy" if _asked(CHOICES[0]) == "numpy" else _compile(library, machine)
    if trouble:
        for file in files(library, machine):
            with suppress(OSError):  # it may lie where nobody may write
                file.unlink(missing_ok=True)
    return trouble


def _compile(library: Path, machine: str) -> str | None:
    """Put new libraries in this place; or why not."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiler = shlex.split(os.environ.get("CC", "cc"))
            code = [str(source) for source in SOURCES if source.suffix == ".c"]
            for file, instructions in zip(files(library, machine), INSTRUCTIONS.values(), strict=False):
                made = str(Path(folder) / file.name)
                told = [*FLAGS, *instructions, *_definitions(), f'-DSOURCE="{_digest()}"']
                command = [*compiler, *told, *code, "-o", made, "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                if done.returncode:
                    return done.stderr.strip() or f"{command[0]} ended with {done.returncode}"
            for file in files(library, machine):
                (Path(folder) / file.name).replace(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


def load(library: Path = LIBRARY, most: str = LEVELS[-1]) -> tuple[ctypes.CDLL, str]:
    """Load a library.

    Args:
        library: its file.
        most: the highest of :data:`LEVELS` that it may use.

    Returns:
        The library for this processor, and its level.

    Raises:
        OSError: if it cannot be loaded, or was built from another source.
    """
    level = min(_opened(library).ls_level(), LEVELS.index(most))
    return _opened(files(library)[level]), LEVELS[level]


def _opened(library: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library))
    if not hasattr(found, "ls_source"):
        raise OSError(f"{library.name} is another library")
    found.ls_source.restype = ctypes.c_char_p
    if SOURCES and found.ls_source() != _digest().encode():
        raise OSError(f"{library.name} was built from other sources")
    return found


def choose() -> tuple[ctypes.CDLL | None, str]:
    """Return the choice that the setting asks for.

    Returns:
        The library, None for numpy alone; and that in words.

    Raises:
        ValueError: for a setting that does not exist.
        ImportError: if the setting asks for a library that cannot be had.
    """
    wanted = _asked(CHOICES[0])
    if wanted == "numpy":
        return None, f"numpy, as {SETTING} says"
    try:
        found, level = load()
    except OSError as error:
        if wanted == "compiled":
            raise ImportError(f"{SETTING} asks for the compiled kernels: {error}") from error
        if not LIBRARY.exists():
            return None, f"{INSTEAD}nothing was compiled at installation"
        return None, f"{INSTEAD}{error}. To compile it again: python {__file__}"
    return found, f"compiled, {level}"


def choose_on_cuda() -> str | None:
    """Why the kernels in Triton are not to be used on CUDA; None if they are.

    Raises:
        ValueError: for a setting that does not exist.
        ImportError: if the setting asks for them, and triton is not installed.
    """
    wanted = _asked(CHOICES[1])
    if wanted == "torch":
        return f"as {SETTING} says"
    if find_spec("triton") is not None:
        return None
    if wanted == "triton":
        raise ImportError(f"{SETTING} asks for the kernels in Triton, but triton is not installed")
    return "as triton is not installed"


def _asked(choices: tuple[str, ...]) -> str:
    """Which of these the setting names, if any."""
    setting = os.environ.get(SETTING, "")
    names = [name.strip() for name in setting.split(",")] if setting else []
    known = [name for choice in CHOICES for name in choice]
    named = [name for name in names if name in choices]
    if not set(names) <= set(known) or any(len({*names} & {*choice}) > 1 for choice in CHOICES):
        words = [" or ".join(map(repr, choice)) for choice in CHOICES]
        raise ValueError(
            f"Expected {SETTING} to be {words[0]}, for CUDA {words[1]}, or not to be set, but got {setting!r}."
        )
    return named[0] if named else ""


def _definitions() -> list[str]:
    """Tell the compiler the constants of messages."""
    known = run_path(str(Path(__file__).parents[1] / "form.py"))
    return [f"-D{name}=({known[name]})" for name in CONSTANTS]


def _digest() -> str:
    """Of the sources, and of the constants in them."""
    text = b"".join(source.read_bytes() for source in SOURCES) + " ".join(_definitions()).encode()
    return hashlib.sha256(text).hexdigest()


if __name__ == "__main__":
    sys.exit(build())
