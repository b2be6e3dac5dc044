"""What is in the figures, and that there are any."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure

from lightning_sparse.tools.compare import figures
from lightning_sparse.tools.compare.methods import METHODS
from lightning_sparse.tools.compare.recorded import Row
from lightning_sparse.tools.compare.training import CurvePoint, Result

NAN = float("nan")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """Figures by the names of their files; they are laid out and not written."""
    seen: dict[str, Figure] = {}

    def save(figure: Figure, path: Path) -> Path:
        figure.draw_without_rendering()
        seen[path.stem] = figure
        return path

    monkeypatch.setattr(figures, "save", save)
    return seen


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def names(figure: Figure) -> set[str]:
    """What is written at the lines."""
    return {text.get_text() for panel in figure.axes for text in panel.texts}


def result(task: str, density: float, method: str, seed: int, loss: float) -> Result:
    sort = "perplexity" if task == "text" else "accuracy"
    return Result(task, 4, density, method, seed, 20, density, density, 2.0, loss, 50.0, sort)


def curve(run: Result, losses: list[float]) -> list[CurvePoint]:
    return [CurvePoint(*run.key, 10 * (i + 1), 1.0 * (i + 1), loss, 10 * loss) for i, loss in enumerate(losses)]


def judged() -> tuple[list[Result], list[CurvePoint]]:
    results, points = [], []
    for task in ("digits", "text"):
        results.append(result(task, 1.0, "dense", 0, 0.5))
        for density in (0.01, 0.001):
            for method, losses in (("top_k", [4.0, 2.0]), ("union_top_k", [3.0, 1.0]), ("random_k", [4.0, 400.0])):
                for seed in (0, 1):
                    run = result(task, density, method, seed, losses[-1] + seed)
                    results.append(run)
                    points += curve(run, [loss + seed for loss in losses])
    return results, points


def test_the_judges_figures(drawn: dict[str, Figure], tmp_path: Path) -> None:
    files = figures.judge_figures(*judged(), tmp_path)
    assert [file.name for file in files] == ["judge_loss.svg", "judge_quality.svg"]
    loss, quality = drawn["judge_loss"], drawn["judge_quality"]
    titles = [
        f"{task}, 4 ranks, 20 steps, bytes of MiCRO at density {density}"
        for task in ("digits", "text")
        for density in (0.01, 0.001)
    ]
    for figure in (loss, quality):
        assert [panel.get_title() for panel in figure.axes] == titles
        assert {panel.get_xlabel() for panel in figure.axes} == {"megabytes sent by each rank"}
        assert names(figure) == {"dense, at its end", "top_k", "union_top_k", "random_k"}
        assert figure.legends == []
    assert [panel.get_ylabel() for panel in loss.axes] == ["training loss"] * 4
    assert [panel.get_ylabel() for panel in quality.axes] == ["validation accuracy"] * 2 + ["validation perplexity"] * 2
    assert [panel.get_yscale() for panel in quality.axes] == ["linear"] * 2 + ["log"] * 2
    lines = {str(line.get_label()): line for line in loss.axes[0].get_lines()}
    assert lines["top_k"].get_xydata().tolist() == [[1.0, 4.5], [2.0, 2.5]]  # means over seeds
    assert list(lines["_dense"].get_ydata()) == [0.5, 0.5]
    [band, *_] = loss.axes[0].collections
    assert {y for _, y in band.get_paths()[0].vertices} == {4.0, 5.0, 2.0, 3.0}
    # Random-k runs away and does not take the axis with it: 1.5 times the median of 0.5, 3.5, 4.5 and 4.5.
    assert loss.axes[0].get_ylim()[1] == pytest.approx(6.0)
    assert quality.axes[0].get_ylim()[1] > 4000  # percents are all shown


def test_runs_that_diverged_are_counted_at_the_line(drawn: dict[str, Figure], tmp_path: Path) -> None:
    runs = [
        result("text", 0.01, method, seed, NAN if (method, seed) in {("top_k", 0), ("micro", 0), ("micro", 1)} else 1.0)
        for method in ("top_k", "micro", "union_top_k")
        for seed in (0, 1)
    ]
    points = [point for run in runs if not math.isnan(run.loss) for point in curve(run, [2.0, 1.0])]
    figures.judge_figures(runs, points, tmp_path)
    assert names(drawn["judge_loss"]) == {"top_k, 1 of 2 runs", "union_top_k"}
    assert drawn["judge_loss"].axes[0].get_xlabel().endswith("no curve, all runs diverged: micro")


def test_points_that_were_written_twice_are_drawn_once(drawn: dict[str, Figure], tmp_path: Path) -> None:
    run = result("text", 0.01, "top_k", 0, 1.0)
    points = curve(run, [3.0, 2.0])
    figures.judge_figures([run], [*points[:1], *points], tmp_path)
    [line] = drawn["judge_loss"].axes[0].get_lines()
    assert line.get_xydata().tolist() == [[1.0, 3.0], [2.0, 2.0]]


def row(stream: str, n: int, density: float, method: str, **measures: float | None) -> Row:
    values = dict.fromkeys(Row._fields[6:], 1.0) | {"estimate_low": 0.5, "estimate_high": 2.0} | measures
    return Row(stream, n, density, method, 120, 0, **values)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_open_loops_figures(drawn: dict[str, Figure], tmp_path: Path) -> None:
    rows = [
        row(stream, n, density, method, steps_to_target=None if method == "micro" else 7, bytes_sent=1000.0 * n)
        for stream in ("digits", "heavy_tail")
        for n in (4, 8)
        for density in (0.01, 0.001)
        for method in ("top_k", "micro", "union_top_k")
    ]
    files = figures.simulate_figures(rows, tmp_path)
    assert {file.stem for file in files} == {f"simulate_{name}" for name in figures.AXES} == set(drawn)
    measures = set(Row._fields[6:]) - {"estimate_low", "estimate_high"}
    assert set(figures.AXES) == measures  # the interval is drawn with its estimate
    for name, axis in figures.AXES.items():
        figure = drawn[f"simulate_{name}"]
        assert [panel.get_title() for panel in figure.axes] == [
            "digits, density 0.01",
            "digits, density 0.001",
            "heavy_tail, density 0.01",
            "heavy_tail, density 0.001",
        ]
        assert {panel.get_xlabel() for panel in figure.axes} == {axis.label}
        assert legend(figure) == ["4 ranks", "8 ranks"]
        for panel in figure.axes:
            labels = panel.get_yticklabels()
            assert [label.get_text() for label in labels] == ["top_k", "micro", "union_top_k"]
            assert [label.get_fontweight() for label in labels] == ["normal", "normal", "bold"]

    def dots(name: str) -> dict[str, list[float]]:
        return {
            str(line.get_label()): list(line.get_xdata())  # type: ignore[call-overload]
            for line in drawn[f"simulate_{name}"].axes[0].get_lines()
            if str(line.get_label()).endswith("ranks")
        }

    assert dots("bytes_sent") == {"4 ranks": [4000.0] * 3, "8 ranks": [8000.0] * 3}
    assert dots("steps_to_target")["4 ranks"] == [7.0, 120.0, 7.0]  # never: the right edge
    intervals = [
        line.get_xdata() for line in drawn["simulate_estimate"].axes[0].get_lines() if len(line.get_xdata()) == 2
    ]
    assert [list(x) for x in intervals if list(x) != [1.0, 1.0]] == [[0.5, 2.0]] * 6


def test_of_runs_that_are_too_short_to_tell_nothing_is_said_to_be_never(
    drawn: dict[str, Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "AXES", {"steps_to_target": figures.AXES["steps_to_target"]})
    rows = [
        row("digits", 4, 0.1, name, steps_to_target=None)._replace(steps=n) for name, n in (("top_k", 9), ("micro", 10))
    ]
    figures.simulate_figures(rows, tmp_path)
    [line] = [one for one in drawn["simulate_steps_to_target"].axes[0].get_lines() if len(one.get_xdata()) == 2]
    assert repr([float(x) for x in line.get_xdata()]) == "[nan, 10.0]"


@pytest.mark.parametrize("sent", [[0.0, 0.0], [950.0, 1050.0], [3.0, 7e6], [100.0, 700.0]])
def test_logarithmic_axes_always_have_some_numbers(
    drawn: dict[str, Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[float]
) -> None:
    monkeypatch.setattr(figures, "AXES", {"bytes_sent": figures.AXES["bytes_sent"]})
    rows = [row("digits", 4, 0.1, name, bytes_sent=x) for name, x in zip(("top_k", "micro"), sent, strict=True)]
    figures.simulate_figures(rows, tmp_path)
    axis = drawn["simulate_bytes_sent"].axes[0].xaxis
    low, high = axis.get_view_interval()
    shown = [x for x in axis.get_majorticklocs() if low <= x <= high]
    assert 2 <= len(shown) <= 10 or sent == [0.0, 0.0]
    assert all("$" not in text for text in axis.get_major_formatter().format_ticks(shown))


def test_files_are_pictures(tmp_path: Path) -> None:
    run = result("text", 0.01, "top_k", 0, 1.0)
    [file, *_] = figures.judge_figures([run], curve(run, [2.0, 1.0]), tmp_path / "new")
    assert file.parent == tmp_path / "new"
    content = file.read_text()
    assert content.startswith("<?xml")
    assert ">top_k</text>" in content  # letters, not their shapes


def test_every_method_has_a_look_of_its_own() -> None:
    looks = figures.looks()
    assert looks.keys() == {method.name for method in METHODS}
    assert len({(one.colour, one.dash) for one in looks.values()}) == len(METHODS)
