"""Tables, letter by letter."""

from __future__ import annotations

import pytest

from lightning_sparse.tools.compare.recorded import Row
from lightning_sparse.tools.compare.tables import Table, by_method, contests, judge_tables, simulate_tables, title
from lightning_sparse.tools.compare.training import Result

NAN = float("nan")


def result(method: str, seed: int, loss: float, *, density: float = 0.01, task: str = "text", **other: float) -> Result:
    values = {"given_density": density, "actual_density": density, "megabytes": 1.25, "quality": 50.0} | other
    sort = "perplexity" if task == "text" else "accuracy"
    return Result(task, 4, density, method, seed, 100, loss=loss, quality_name=sort, **values)


def test_a_table_is_markdown() -> None:
    table = Table("Title", ["method", "loss"], [["top_k", "1.0"], ["micro", "diverged"]])
    assert table.markdown() == (
        "### Title\n\n| method | loss |\n| --- | ---: |\n| top_k | 1.0 |\n| micro | diverged |\n"
    )


def test_the_judges_table_has_the_best_mean_first_and_dense_last() -> None:
    results = [
        result("dense", 0, 0.5, density=1.0, megabytes=1234.5),
        result("top_k", 1, 2.0, quality=20.0),
        result("top_k", 0, 1.0, quality=10.0, given_density=0.00123456),
        result("random_k", 0, 3.0),
        result("random_k", 1, NAN, megabytes=NAN, quality=NAN),
        result("micro", 0, 1.25),
        result("micro", 1, 1.25),
    ]
    [table] = judge_tables(results)
    assert table.markdown() == (
        "### text, 4 ranks, 100 steps, bytes of MiCRO at density 0.01\n\n"
        "| method | density given | MB sent | training loss | loss, seed 0 | loss, seed 1 | perplexity |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| micro | 0.01 | 1.25 | 1.2500 | 1.2500 | 1.2500 | 50.0 |\n"
        "| top_k | 0.00123 | 1.25 | 1.5000 | 1.0000 | 2.0000 | 15.0 |\n"
        "| random_k | 0.01 | diverged | diverged | 3.0000 | diverged | diverged |\n"
        "| dense | 1 | 1.23e+03 | 0.5000 | 0.5000 |  | 50.0 |\n"
    )


def test_a_perplexity_beyond_all_measure_is_short() -> None:
    [table] = judge_tables([result("random_k", 0, 25.0, quality=70359430887328.0)])
    assert table.rows[0][-1] == "7e+13"


def test_one_seed_needs_no_column_of_its_own() -> None:
    [table] = judge_tables([result("top_k", 7, 1.0)])
    assert table.header == ["method", "density given", "MB sent", "training loss", "perplexity"]


def test_contests_share_their_dense_runs() -> None:
    text = [result("top_k", 0, 1.0, density=d) for d in (0.001, 0.01)]
    dense = result("dense", 0, 1.0, density=1.0)
    digits = result("dense", 0, 1.0, density=1.0, task="digits")
    assert contests([*text, dense, digits]) == [[digits], [text[1], dense], [text[0], dense]]
    assert title([digits]) == "digits, 4 ranks, 100 steps"


def test_runs_of_a_method_are_in_order_of_seeds() -> None:
    runs = [result("top_k", seed, 1.0) for seed in (2, 0, 1)]
    assert [run.seed for run in by_method(runs)["top_k"]] == [0, 1, 2]


@pytest.mark.parametrize(("steps", "said"), [(9, "-"), (10, "never")])
def test_runs_too_short_to_stay_near_the_target_do_not_say_never(steps: int, said: str) -> None:
    [table] = simulate_tables(
        [Row("text", 8, 0.01, "top_k", steps, 0, 12.34, None, 1.5, 2.3, 0.9, 0.5, 1.0, 0.9, 12.0)]
    )
    assert table.rows[0][2] == said


def test_the_open_loops_tables() -> None:
    def row(stream: str, n: int, density: float, method: str, steps: int | None) -> Row:
        return Row(stream, n, density, method, 120, 0, 12.34, steps, 1.5, 2.345, 0.98765, 0.5, NAN, 0.98765, 12345.6)

    rows = [
        row("text", 8, 0.001, "top_k", 0),
        row("text", 8, 0.01, "top_k", None),
        row("text", 8, 0.01, "micro", 17),
        row("text", 4, 0.01, "top_k", 3),
    ]
    tables = simulate_tables(rows)
    assert [table.title for table in tables] == [
        "text, 4 ranks, density 0.01, 120 steps, seed 0",
        "text, 8 ranks, density 0.01, 120 steps, seed 0",
        "text, 8 ranks, density 0.001, 120 steps, seed 0",
    ]
    assert tables[1].markdown() == (
        "### text, 8 ranks, density 0.01, 120 steps, seed 0\n\n"
        "| method | density error / % | steps to target | f(t) | build-up | estimate | 5 % | 95 % | captured |"
        " kB sent |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| top_k | 12.3 | never | 1.50 | 2.35 | 0.99 | 0.50 | diverged | 0.988 | 12.3 |\n"
        "| micro | 12.3 | 17 | 1.50 | 2.35 | 0.99 | 0.50 | diverged | 0.988 | 12.3 |\n"
    )
