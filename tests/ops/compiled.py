"""The compiled kernels at each level of instructions, built for the tests, and the reference in torch and numpy."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_sparse.ops.c import library, native

NUMPY = "numpy"
VARIANTS = [NUMPY, *library.LEVELS]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of this source, the installed one if it is; skips where there is no compiler."""
    with contextlib.suppress(OSError):
        library.load()
        return library.LIBRARY
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("kernels") / "libhost.so"
    assert library.build(path) is None
    return path


def load(variant: str, request: pytest.FixtureRequest) -> native.Native | None:
    """The kernels of a variant; skips where this processor lacks the instructions."""
    if variant == NUMPY:
        return None
    if (found := _loaded(request.getfixturevalue("built"), variant)) is None:
        pytest.skip(f"this processor has no {variant}")
    return found


@functools.cache  # the sources are read each time, and kernels change thousands of times
def _loaded(path: Path, variant: str) -> native.Native | None:
    found, level = library.load(path, most=variant)
    return native.Native(found) if level == variant else None


@pytest.fixture(params=VARIANTS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each variant in use, one after another."""
    monkeypatch.setattr(native, "library", load(request.param, request))
    yield request.param


@pytest.fixture
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[str]]:
    """Iterates over the variants that this processor has, each in use in its turn; numpy comes first.

    In use until the next one is asked for: ``product(each_kernel(), ...)`` asks for all of them beforehand.
    """

    def each() -> Iterator[str]:
        for variant in VARIANTS:
            with contextlib.suppress(pytest.skip.Exception):  # tests of `kernel` tell
                monkeypatch.setattr(native, "library", load(variant, request))
                yield variant

    return each
