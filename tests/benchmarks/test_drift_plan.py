"""The plan of drift's trainings searches all alike, and the verdict is that of its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from benchmarks.drift import plan
from benchmarks.drift.plan import ENTRIES, FRESH, OTHER_ENTRIES, SEED, Entry, searched, wanted
from benchmarks.drift.report import report, verdict
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.run import Run


@pytest.fixture(autouse=True)
def keys_are_formed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "key", property(cache(Run.key.fget)))  # type: ignore[attr-defined]  # asked for often


def known(results: Results, run: Run, loss: float | None) -> None:
    """As if it had been trained."""
    line = {"key": run.key, "run": run.described(), "curve": [[run.described()["steps"], 8.0, 1.0, loss]]}
    results.add(line | {"processor": "a", "seconds": 1.0, "commit": "c", "torch": "t"})


def test_grids_grow_to_where_the_best_rate_lies_and_fresh_seeds_follow(tmp_path: Path) -> None:
    results, entry = Results(tmp_path), Entry("gpt-300", "muon-dense", (4.0, 8.0, 16.0, 32.0))
    while not (search := searched(entry, results)).best:
        for run in search.missing:
            known(results, run, 4.0 + abs(math.log2(run.rate / 2.0)))
    assert search.best == Run("gpt-300", "muon-dense", 2.0, SEED)
    assert [run.rate for run in search.tried] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert plan.missing(entry, results) == [Run("gpt-300", "muon-dense", 2.0, seed) for seed in FRESH]


def test_what_decides_comes_first_and_wide_trainings_take_rates_over(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for run in plan.KNOWN:
        known(results, run, 5.0)
    every = wanted(results)
    assert [(run.task, run.method, run.rate) for run in every[:4]] == [
        ("gpt-300", "muon-dense", rate) for rate in (4.0, 8.0, 16.0, 32.0)
    ]
    assert not any(run.task == "gpt-3000-wide" for run in every)
    for rate, loss in ((4.0, 4.0), (8.0, 3.9), (16.0, None)):
        known(results, Run("gpt-3000", "muon-dense", rate, SEED), loss)
    [wide] = [run for run in wanted(results) if run.task == "gpt-3000-wide"]
    assert wide == Run("gpt-3000-wide", "muon-dense", 8.0, SEED)


def made_up(
    results: Results, end: dict[str, float], tasks: tuple[str, ...], entries: Sequence[Entry] = ENTRIES
) -> None:
    """All trainings of some tasks, ending at what is given for a kind of method, best at the second rate."""
    for entry in entries:
        if entry.task not in tasks:
            continue
        kind = entry.method.split("-", 1)[1]
        loss = end.get(kind, end["drift"])
        while work := plan.missing(entry, results):
            for run in work:
                second = entry.rates[1] if entry.rates else run.rate
                known(results, run, loss + 0.001 * run.seed + abs(math.log2(run.rate / second)))


def test_the_verdict_is_that_of_its_numbers(tmp_path: Path) -> None:
    every = tuple(dict.fromkeys(entry.task for entry in ENTRIES))
    for drift, warm, passes in ((4.05, 4.2, True), (4.08, 4.2, False), (4.08, 4.02, True)):
        results = Results(tmp_path / f"{drift}-{warm}")
        assert "not decided" in verdict(results)
        ends = {"dense": 4.0, "today": 4.3, "drift": drift, "average-warm": warm, "steps-warm": warm}
        made_up(results, ends, every)
        told = verdict(results)
        assert told.startswith("Gate passed") == passes and told.startswith("Gate not passed") != passes
        if drift == 4.05:
            assert "Muon, drift: average-gain: +5.1 ± 0.0 % on gpt-300 (83 % of today's gap closed)" in told
        for run in plan.KNOWN:
            known(results, run, 5.0)
        text = report(results)
        assert "| Muon, today | 8 | 73.9 |" in text and "## Missing\n\nNothing." in text


def test_a_gap_that_is_not_closed_fails_and_missing_cells_are_named(tmp_path: Path) -> None:
    results = Results(tmp_path)
    made_up(results, {"dense": 4.0, "today": 4.1, "drift": 4.05}, plan.SHORT)
    assert verdict(results).startswith("Gate not decided: 8 of")
    text = report(results)
    assert "- gpt-3000: muon-dense (search, 0 trainings known)" in text
    assert "50 %" in text


def test_other_optimizers_are_searched_alike_apart_from_the_gate(tmp_path: Path) -> None:
    results = Results(tmp_path)
    before = verdict(results)
    made_up(results, {"dense": 4.0, "today": 4.2, "drift": 4.05}, ("lstm-600",), OTHER_ENTRIES)
    assert wanted(results, OTHER_ENTRIES) == []
    assert verdict(results) == before and not {entry.method for entry in ENTRIES} & {e.method for e in OTHER_ENTRIES}
    text = report(results)
    assert "| SGD with momentum, drift: steps-gain | 400 | 57.5 | 0.029 | 2 | +5.1 ± 0.0 % | 75 % |" in text
    assert "| AdamW, by its own rule, sqrt(n) | 8 |" in text


def test_results_are_whole() -> None:
    paths = list((FOLDER / "optimizers").glob("race-*.jsonl"))
    for line in (json.loads(text) for path in paths for text in path.read_text().splitlines()):
        assert line.keys() >= {"key", "run", "curve", "seconds", "commit", "torch", "processor"}
        assert line["curve"][-1][0] == line["run"]["steps"] or line["curve"][-1][-1] is None
