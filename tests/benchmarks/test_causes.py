"""Tables of the report on eight ranks."""

from __future__ import annotations

import csv

import pytest

from benchmarks.causes.__main__ import OWN, TABLES, known
from benchmarks.causes.tables import DENSE, Found, Run, csv_tables


def line(*losses: float, density: float = 0.01) -> dict[str, object]:
    return {"curve": [[250 * (i + 1), one] for i, one in enumerate(losses)], "density": density}


def test_committed_tables_are_made_of_the_results() -> None:
    for name, text in csv_tables(known(OWN)).items():
        assert (TABLES / name).read_text() == text, f"python -m benchmarks.causes --report writes {name}"


def test_distances_are_those_from_dense_training_of_the_same_seed_rate_and_length() -> None:
    found: Found = {
        Run(DENSE, 8, 1000): line(2.5, 2.0),
        Run(DENSE, 8, 1000, seed=1): line(2.5, 1.9),
        Run(DENSE, 8, 1000, 4.0): line(1.8),
        Run("density 1", 8, 1000): line(2.6, 2.25, density=1.0),
        Run("density 1", 8, 1000, seed=1): line(2.6, 1.8, density=1.0),
        Run("library, MeanTopK", 8, 1000): line(2.125),
        Run("library, MeanTopK", 8, 1000, 4.0): line(1.775),
        Run("library", 8, 1000, 4.0, 1): line(1.7),
        Run(DENSE, 4, 300, 2.0, 1, "gpt-300"): line(5.0),
        Run("formulas", 4, 300, 2.0, 1, "gpt-300"): line(5.01),
    }
    rows = {name: list(csv.reader(text.splitlines())) for name, text in csv_tables(found).items()}
    assert rows["causes.csv"][1:] == [
        ["dense", "0.01", "2.500", "2.000", "", ""],
        ["density 1", "1", "2.600", "2.250", "+0.250", "-0.100"],
    ]
    assert rows["causes-rates.csv"][1:] == [
        ["dense", "2.000", "", "1.800", "1.900", "", ""],
        ["`MeanTopK`", "2.125 (+0.125)", "", "1.775 (-0.025)", "", "", ""],
        ["`UnionTopK`", "", "", "", "", "1.700", ""],  # no dense training of this seed and rate
    ]
    assert rows["causes-words.csv"][1:] == [
        ["dense", "", "", "148.4", ""],
        ["formulas", "", "", "149.9 (+1.0 %)", ""],
    ]


@pytest.mark.parametrize("task", ["shakespeare-2000", "lstm-600"])
def test_a_training_without_its_dense_one_has_no_distance(task: str) -> None:
    run = Run("density 1", 8, 1000, task=task, seed=1)
    rows = [
        row
        for text in csv_tables(
            {run: line(2.0), run._replace(rate=4.0): line(2.0), run._replace(seed=0): line(2.0)}
        ).values()
        for row in csv.reader(text.splitlines()[1:])
    ]
    assert not any("+" in cell or "%" in cell for row in rows for cell in row)
