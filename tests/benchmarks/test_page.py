"""The pages of the race say what the results' files hold, and nothing else."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race import plan, report, timed
from benchmarks.race.cells import cells, distance, steps_to
from benchmarks.race.figures import seconds_to
from benchmarks.race.plan import Entry
from benchmarks.race.results import FOLDER, Results
from benchmarks.race.run import Run
from benchmarks.race.tasks import TASKS
from tests.benchmarks import small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Dense at 4 nats, ours a little above with every seed, and averaging by chance now above, now below."""
    monkeypatch.setitem(TASKS, "small", small.SMALL)
    monkeypatch.setattr(plan, "ENTRIES", [Entry("small", name, 1.0) for name in METHODS])
    monkeypatch.setattr("benchmarks.race.cells.ENTRIES", plan.ENTRIES)
    results = Results(tmp_path)
    for name, ends in METHODS.items():
        for rate, loss in ((1.0, 4.0), (2.0, 5.0), (0.5, None)):
            keep(results, Run("small", name, rate), loss)
        for seed, loss in enumerate(ends, start=1):
            keep(results, Run("small", name, 1.0, seed), loss)
    return results


METHODS = {"dense": [4.0, 4.1, 4.2], "ours": [4.05, 4.16, 4.24], "averaging-10": [4.1, 4.0, 4.21], "distro": []}


def keep(results: Results, run: Run, loss: float | None) -> None:
    above = None if loss is None else loss + 1
    curve: list[Any] = [[10, 4.0, 1.0, above], [25, 10.0, 2.5, loss]]
    results.add({"key": run.key, "run": run.described(), "curve": curve, "seconds": 1.0, "processor": "a"})


@pytest.mark.parametrize("name", report.TEMPLATES)
def test_the_pages_are_made_of_the_results(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each number on them is one of these, since all come from there."""
    monkeypatch.setattr(Run, "key", property(cache(Run.key.fget)))  # type: ignore[attr-defined]  # asked for often
    page = (report.REPORTS / f"{name}.md").read_text()
    for part in re.split(r"<!-- .+? -->", report.page(Results(), name)):  # places that docs/site/generate.py fills
        assert part in page, "run python docs/site/generate.py"
    assert "<!--" not in page


def test_results_are_whole() -> None:
    lines = [json.loads(line) for path in FOLDER.glob("race-*.jsonl") for line in path.read_text().splitlines()]
    trained = [line for line in lines if "key" in line]
    assert trained
    for line in trained:
        assert line.keys() >= {"key", "run", "curve", "seconds", "commit", "torch", "processor"}
        steps = [point[0] for point in line["curve"]]
        assert steps == sorted(steps)
        assert steps[-1] == line["run"]["steps"] or line["curve"][-1][-1] is None


def test_two_standard_errors_decide(made_up: Results) -> None:
    dense, ours, averaging, distro = cells(made_up, "small")
    found = distance(ours, dense)
    assert found is not None
    assert (found.mean, found.seeds) == (pytest.approx(0.05), 3)
    assert found.error == pytest.approx(0.01 / math.sqrt(3))
    assert found.verdict == "behind"
    back = distance(dense, ours)
    assert back is not None and back.verdict == "ahead"
    chance = distance(averaging, dense)
    assert chance is not None and chance.verdict == "level"
    assert distance(distro, dense) is None


def test_tables_name_what_is_missing(made_up: Results) -> None:
    table = report.ends(made_up, "small")
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()[2:]}
    assert next(iter(rows)) == "AdamW, dense (DDP)"
    assert "60.3" in rows["AdamW, dense (DDP)"], "the perplexity of the mean loss"
    assert "+5.1 ± 0.6 % | behind" in rows["ours, 0.01"]
    assert rows["averaging, H 10"].endswith("| level |")
    assert "10.00 | 2.50" in rows["ours, 0.01"]
    assert "search done" in rows["DisTrO, k 4, 1 bit"]
    assert re.search(r"0\.5: diverged, 1: 54\.6, 2: 148\.4", report.search(made_up, "small"))


def test_times_are_steps_times_what_a_step_takes(made_up: Results) -> None:
    dense, ours, *_ = cells(made_up, "small")
    assert steps_to(list(ours.lines.values()), 5.2) == 10
    assert steps_to(list(ours.lines.values()), 4.1) is None
    seconds = seconds_to(dense, 4.12, compute=0.1, mbit=50.0)
    assert seconds == pytest.approx(25 * (0.1 + 12.5 / 25 * 8 / 50))


@pytest.mark.thorough
def test_figures_are_drawn(made_up: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "SHORT", ("small",))
    report.draw(made_up, tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {"bytes.svg", "asks.svg", "time-small.svg"}
    text = (tmp_path / "figures" / "time-small.svg").read_text()
    assert "not reached" in text and "1000 Mbit/s" in text


def test_steps_that_were_timed_are_medians_beside_denses(tmp_path: Path) -> None:
    lines = [("dense", 1.0, 3.0), ("ours", 1.0, 0.2), ("ours", 1.2, 0.9), ("ours", 1.1, 0.1)]
    texts = (
        json.dumps({"method": name, "mbit": 50, "compute": compute, "exchange": exchange})
        for name, compute, exchange in lines
    )
    (tmp_path / timed.FILE).write_text("\n".join(texts))
    assert timed.read(tmp_path)["ours", 50] == (1.1, 0.2)
    rows = {line.split(" | ")[0]: line for line in report.measured(Results(tmp_path)).splitlines()}
    assert rows["| ours, 0.01"].startswith("| ours, 0.01 | 1.10 | 0.200 | 0.325 |")
    assert "| 1.000 |" in rows["| AdamW, dense (DDP)"]


def test_times_to_a_loss_are_steps_times_seconds_beside_denses(made_up: Results, tmp_path: Path) -> None:
    lines = [("dense", 1.0, 3.0), ("averaging-10", 1.0, 0.2), ("ours", 1.0, 0.1)]
    texts = (json.dumps({"method": m, "mbit": 100, "compute": a, "exchange": b}) for m, a, b in lines)
    (tmp_path / timed.FILE).write_text("\n".join(texts))
    rows = report.ratios(made_up, "small").splitlines()[2:]
    assert [row.split(" | ")[1:] for row in rows] == [
        ["25", "", "1.000", " |"],
        ["25", "", "0.300", " |"],
        ["never", "", "", " |"],
    ]
