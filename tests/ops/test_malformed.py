"""Messages that no rank has written: the compiled kernels and operations of torch read them alike, or refuse them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.ops.c import library, native
from tests.ops.test_variants import bits, values

N, SLOTS = 3, 21
ROOT = Path(library.__file__).parents[3]


def rank_step(exchange: str, numel: int, spare: bool, beside: bool) -> Iterator[object]:
    """One rank's part in an exchange, up to its end."""
    acc = values(numel + 1, "normal", 1)
    acc[numel] = 0
    indices = torch.randperm(numel, generator=torch.Generator().manual_seed(2))[:SLOTS].sort().values
    named = torch.arange(SLOTS) % 3 == 0 if spare else None
    selection = Selection(indices, torch.tensor(SLOTS), None, spare=named, limit=N * SLOTS // 2, aligned=True)
    second = acc.square() if beside else None
    ctx = Context(1, SLOTS / numel, 0, N, second=second)
    return ls.exchanges.EXCHANGES.resolve(exchange)(acc, selection, ctx)  # type: ignore[return-value]


def corrupted(message: Tensor, seed: int) -> Tensor:
    """The message of each rank: a few words of the real one replaced, or all of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = message.repeat(N, 1)
    words = torch.randint(-(2**31), 2**31, rows.shape, generator=generator)
    small = torch.randint(-3, 2 * SLOTS, rows.shape, generator=generator)
    words = torch.where(torch.rand(rows.shape, generator=generator) < 0.5, words, small).int()
    share = (0.0, 0.01, 0.05, 1.0)[seed % 4]
    chosen = torch.rand(rows.shape, generator=generator) < share
    if seed % 8 == 1:  # the header alone
        chosen = torch.zeros_like(chosen)
        chosen[:, : 1 + seed // 8 % 2] = True
    if seed % 8 == 5:  # a level that no number has
        rows[seed // 8 % N, 1] = 4096 + 37_123 * seed % (1 << 20)
    return torch.where(chosen, words, rows)


def outcome(exchange: str, numel: int, spare: bool, beside: bool, seed: int) -> list[bytes | str]:
    """What comes of such messages: the sentence of an error, or bits of what is sent and made of it."""
    steps = rank_step(exchange, numel, spare, beside)
    rows = corrupted(next(steps).x, seed)  # type: ignore[attr-defined]
    found: list[bytes | str] = []
    try:
        message = steps.send(rows)  # type: ignore[attr-defined]
        found.append(bits(message.x))
        steps.send(message.x)  # type: ignore[attr-defined]
    except StopIteration as end:
        parts = end.value
        found += [bits(x.contiguous()) for x in parts if isinstance(x, Tensor)]
    except ValueError as error:
        found.append(str(error))
    return found


def fuzz(seeds: Sequence[int]) -> int:
    """How many messages were read, and not refused."""
    read = 0
    for seed in seeds:
        for exchange in ("packed_union", "reduce_union", "gather_pairs"):
            for numel in (300, 100_000):
                beside = exchange == "packed_union" and seed % 3 == 0  # second values
                cell = exchange, numel, seed // 4 % 2 == 0, beside, seed
                compiled, native.library = outcome(*cell), None
                try:
                    assert compiled == outcome(*cell), cell
                finally:
                    native.library = LOADED[0]
                refused = isinstance(compiled[0], str)
                assert not refused or "cannot be" in str(compiled[0]), compiled[0]
                assert not refused or seed % 4, cell
                read += not refused
    return read


LOADED: list[native.Native | None] = []


@pytest.mark.parametrize(
    "seeds", [[*range(24), 326], pytest.param(range(24, 500), marks=pytest.mark.thorough)], ids=len
)
def test_messages_of_any_bytes_are_read_alike_or_refused(
    built: Path, monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    LOADED[:] = [native.Native(library.load(built)[0])]
    monkeypatch.setattr(native, "library", LOADED[0])
    read = fuzz(seeds)
    assert len(seeds) < read < 5 * len(seeds)


@pytest.mark.thorough
def test_no_bytes_make_the_library_leave_its_memory(tmp_path: Path) -> None:
    """Under AddressSanitizer, which ends the process."""
    path, options = tmp_path / "libhost.so", [*library.FLAGS, "-fsanitize=address", "-g"]
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    # The second one is what AddressSanitizer looks for exceptions in, when it is loaded.
    asked = [["gcc", f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    preloaded = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() for words in asked]
    if not all(Path(name).is_file() for name in preloaded):
        pytest.skip("gcc has no AddressSanitizer here")
    program = f"""
import pathlib
from lightning_sparse.ops.c import library, native
library.FLAGS = {tuple(options)!r}
path = pathlib.Path({str(path)!r})
assert library.build(path) is None
from tests.ops import test_malformed as here
here.LOADED[:] = [native.Native(library.load(path)[0])]
native.library = here.LOADED[0]
print("read", here.fuzz(range(400)))
"""
    environment = os.environ | {
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(ROOT),
        "LIGHTNING_SPARSE_KERNELS": "",
        "CC": "env LD_PRELOAD= gcc",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "read" in done.stdout, done.stderr[:3000]
