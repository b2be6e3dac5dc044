"""That recordings are equal where nothing has changed, and that a change of one bit is found and named."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_sparse as ls
from tests.recorder import __main__ as command
from tests.recorder.compare import ALLOWED, Difference, differences
from tests.recorder.compositions import AXES, Composition, chosen, name_of
from tests.recorder.compositions import made as built
from tests.recorder.record import Entry, Plan, Recording, plain, recorded

STEPS = 10
REFUSED = {ls.tuning.OptimalMerge}
"""What no training takes."""
BASICS: Composition = {name: values[0] for name, values in AXES.items()} | {"memory": "None", "ranks": "2"}
COMPOSITIONS: list[Composition] = [
    {"sparsifier": "UnionTopK()", "exchange": "packed_union", **BASICS, "optimizer": "AdamW"},
    {"sparsifier": "TopK()", "exchange": "tree", **BASICS, "optimizer": "momentum"},
]


def made(one: Composition) -> Recording:
    found = recorded(one, STEPS)
    assert isinstance(found, list), found
    return found


def compared(one: Composition, before: Recording, now: Recording) -> list[Difference]:
    return list(differences(name_of(one), before, now))


@pytest.fixture(scope="module")
def recordings() -> Iterator[list[Recording]]:
    yield [made(one) for one in COMPOSITIONS]


def test_equal_code_does_equal_things(recordings: list[Recording]) -> None:
    for one, recording in zip(COMPOSITIONS, recordings, strict=True):
        assert compared(one, recording, made(one)) == []


def test_every_event_is_among_the_steps(recordings: list[Recording]) -> None:
    at = {event: step for step, event in Plan(STEPS).events.items()}
    assert len(at) == 5
    for recording in recordings:
        seen = {entry[:3]: entry.value for entry in recording}
        assert [step for step in range(STEPS) if seen[step, 0, "skipped"]] == [at["skipped"]]
        assert seen[STEPS - 1, 0, "state / skipped_steps"] == 1
        assert not seen[at["flush"], 0, "state / parameters / 0.weight / residual"].any()
        assert seen[at["flush"] - 1, 0, "state / parameters / 0.weight / residual"].any()
        assert (at["flush"], 0, "picks 0") not in seen and (0, 0, "picks 0") in seen
        kept = [seen[step, 0, "state / parameters / 1.weight / residual"] for step in range(STEPS)]
        same = [step for step in range(1, STEPS) if np.array_equal(kept[step], kept[step - 1])]
        assert at["unused"] in same and at["unused on one rank"] not in same
    assert any(entry.what.endswith("(send 0)") for entry in recordings[1])
    sizes = [np.abs(entry.value).max() for entry in recordings[1] if entry.what == "gradient of 3.bias"]
    assert np.nanargmax(sizes[::2]) == at["a hundred times larger"]  # a dense one, in which nothing waits


@pytest.mark.parametrize("what", ["gradient of", r"message \d+ \(all_gather", "picks", "state / parameters", "weight"])
def test_one_changed_bit_is_found_and_named(recordings: list[Recording], what: str) -> None:
    one, before = COMPOSITIONS[0], recordings[0]
    now = copy.deepcopy(before)
    changed = next(e for e in now if e[:2] == (4, 1) and re.match(what, e.what) and e.value.size > 2)
    flat = changed.value.reshape(-1)
    old = flat[2].copy()
    flat.view(np.uint8)[2 * flat.itemsize] ^= 1
    [found] = compared(one, before, now)
    assert found == (name_of(one), 4, 1, changed.what, found.found, "")
    assert found.found == f"[2] is {old!r} before, {flat[2]!r} now; 1 of {flat.size} differ"


def test_a_change_of_the_code_is_found_where_it_begins(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    select = ls.sparsifiers.TopK.select

    def other(self: Any, acc: torch.Tensor, state: Any, ctx: Any) -> Any:
        selection, after = select(self, acc, state, ctx)
        if ctx.step == 2 and ctx.rank == 1:
            first = selection.indices[:1]
            selection.indices[:1] = torch.where(first > 0, first - 1, selection.indices[-1:] + 1)
            selection = selection._replace(indices=selection.indices.sort().values)
        return selection, after

    monkeypatch.setattr(ls.sparsifiers.TopK, "select", other)
    found = compared(COMPOSITIONS[1], recordings[1], made(COMPOSITIONS[1]))
    picks = next(one for one in found if one.what.startswith("picks"))
    assert (found[0].step, picks.step, picks.rank) == (2, 2, 1)
    assert all(one.step >= 2 for one in found)


def test_what_is_missing_and_what_fails_are_differences(recordings: list[Recording]) -> None:
    one, before = COMPOSITIONS[0], recordings[0]
    place = next(n for n, entry in enumerate(before) if entry.what.startswith("message"))
    [found] = compared(one, before, before[:place] + before[place + 1 :])
    assert "one does what the other does not: message 0" in str(found)
    [found] = differences(name_of(one), before, "Traceback\nValueError: no")
    assert "before: runs; now: ValueError: no" in str(found)


def test_floats_of_16_bits_are_told_as_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        [old], [new] = (list(plain(0, 0, "x", torch.tensor([0.0, x], dtype=dtype))) for x in (1.5, -2.0))
        [found] = differences("", [old], [new])
        assert "[1] is np.float" in found.found and "(1.5) before, np" in found.found and "(-2.0) now" in found.found


def test_allowed_differences_are_few_and_small() -> None:
    assert len(ALLOWED) <= 5 and all(one.reason for one in ALLOWED)
    x = np.ones(3, np.float32)
    clipped = name_of({**COMPOSITIONS[0], "also": "norm"})
    for name, step, value, allowed in (
        (clipped, 0, x * np.float32(1 + 1e-6), "norms of clipping"),
        (clipped, 0, x * 1.01, ""),
        (name_of(COMPOSITIONS[0]), 0, x * np.float32(1 + 1e-6), ""),
    ):
        entries = ([Entry(step, 0, "gradient of w", v.astype(np.float32), "float32")] for v in (x, value))
        [found] = differences(name, *entries)
        assert found.allowed == allowed


def test_everything_that_registries_offer_is_recorded() -> None:
    compositions = list(chosen(1))
    for axis, registry in (
        ("sparsifier", ls.sparsifiers.SPARSIFIERS),
        ("memory", ls.memories.MEMORIES),
        ("grouping", ls.grouping.GROUPINGS),
    ):
        used = {text: built(text) for text in {one[axis] for one in compositions} - {"None"}}
        found = {type(registry.resolve(one)) for one in used.values()}
        assert {cls for _, cls in registry.items()} - found <= REFUSED
    assert {one["exchange"] for one in compositions} == {name for name, _ in ls.exchanges.EXCHANGES.items()}
    for axis, values in AXES.items():
        assert {one[axis] for one in compositions} == set(values)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("git") is None or not (command.ROOT / ".git").exists(), reason="no repository")
def test_the_command_compares_the_last_commit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["HEAD", "--steps=10", "--only=^TopK.*tree"]) == 0
    assert "allowed differences: none used" in capsys.readouterr().out
