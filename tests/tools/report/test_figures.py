"""What is drawn, before any library draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_sparse.tools.report.figures import MOST_POINTS, Bars, Panel, dense_rates, parts_of
from lightning_sparse.tools.report.runs import Run, Series, read_runs
from lightning_sparse.tools.report.summary import differing, sentences, totals, totals_table
from lightning_sparse.tools.style import place_labels, robust_range, wants_log
from tests.tools.report.made_up import DENSE_STEP_MB, compared


def run(name: str, **series: list[float]) -> Run:
    made = {key: Series(np.arange(len(y), dtype=float), np.array(y)) for key, y in series.items()}
    return Run(name, Path(name), made, {})


def panel(runs: list[Run], title: str) -> Panel:
    [found] = [one for part in parts_of(runs) for one in part.panels if one.title == title]
    assert isinstance(found, Panel)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return read_runs(compared(tmp_path_factory.mktemp("runs")))


def test_results_are_drawn_against_steps_traffic_and_time(runs: list[Run]) -> None:
    steps = panel(runs, "val/accuracy against steps")
    assert [list(curve.x) for curve in steps.curves] == [[100.0, 200.0, 300.0]] * 3
    sent = panel(runs, "val/accuracy against MB sent by a rank")
    assert sent.curves[0].x == pytest.approx(DENSE_STEP_MB * np.array([100, 200, 300]))  # as the others would have
    assert sent.curves[1].x == pytest.approx(2.3 * 0.01 * DENSE_STEP_MB * np.array([100, 200, 300]))
    assert sent.x_log
    seconds = panel(runs, "val/accuracy against seconds of training")
    assert [curve.run for curve in seconds.curves] == [1, 2]
    assert seconds.curves[0].x == pytest.approx([2.0, 4.0, 6.0])
    assert seconds.remarks == ["Not known for dense."]


def test_a_dense_run_is_placed_only_where_the_others_agree_on_dense_traffic(runs: list[Run]) -> None:
    other = run("other", **{"sparse/traffic/total_mb": [0.1, 0.2], "sparse/traffic/dense_total_mb": [7.0, 14.0]})
    sent = panel([*runs, other], "val/accuracy against MB sent by a rank")
    assert [curve.run for curve in sent.curves] == [1, 2]
    assert any("Traffic of dense is not known" in sentence for sentence in sentences([*runs, other]))


@pytest.mark.parametrize(
    "settings",
    [
        {"sparse_ddp/density": "0.01"},
        {"trainer/strategy": "sparse_ddp_top_k"},
        {"trainer/strategy/class_path": "lightning_sparse.SparseDDPStrategy"},
        {"sparsifier": "union_top_k"},
        {"sparsifier/class": "UnionTopK"},
    ],
)
def test_a_sparse_run_without_traffic_is_not_taken_as_dense(runs: list[Run], settings: dict[str, str]) -> None:
    accuracy = {"val/accuracy": [0.5, 0.6]}
    sparse = replace(run("nomon", **accuracy), settings=settings)
    dense = replace(run("ddp", **accuracy), settings={"strategy": "ddp", "dir": "sparse_ddp", "sparsifier": "None"})
    sent = panel([*runs, sparse, dense], "val/accuracy against MB sent by a rank")
    assert [curve.run for curve in sent.curves] == [0, 1, 2, 4]
    assert "Not known for nomon." in sent.remarks
    said = sentences([*runs, sparse, dense])
    assert any(one.startswith("nomon trained sparsely, logged no traffic and is not drawn against MB") for one in said)
    assert any(one.startswith("dense, ddp logged no traffic and are drawn as if they had sent") for one in said)


def test_a_run_whose_settings_cannot_be_read_is_not_taken_as_dense(runs: list[Run]) -> None:
    compared = [replace(runs[0], unread=True), *runs[1:]]
    assert [curve.run for curve in panel(compared, "val/accuracy against MB sent by a rank").curves] == [1, 2]
    assert totals(compared)[0].sent_mb is None
    assert "Traffic of dense is not known: nothing that could be read says how it trained." in sentences(compared)


def test_one_target_lies_behind_the_densities(runs: list[Run]) -> None:
    density = panel(runs, "Density of the update")
    assert [(curve.run, curve.behind) for curve in density.curves] == [(1, True), (1, False), (2, False)]
    assert set(density.curves[0].y) == {0.01}


def test_times_are_medians(runs: list[Run]) -> None:
    [bars] = [one for part in parts_of(runs) for one in part.panels if isinstance(one, Bars)]
    assert [row[0] for row in bars.rows] == [1, 2]
    assert bars.rows[0][1] == np.median(runs[1].series["sparse/time/select_ms"].values)
    assert "Not known for dense." in bars.remarks


def test_runs_without_anything_of_ours_show_their_results() -> None:
    parts = parts_of([run("plain", val_loss=[3.0, 2.0], lr=[0.1, 0.1])])
    assert [(part.title, [one.title for one in part.panels]) for part in parts] == [
        ("val_loss", ["val_loss against steps"]),
        ("Other logged numbers", ["lr"]),
    ]
    assert any("give the Trainer the callback SparsityMonitor" in s for s in sentences([run("plain", loss=[1.0])]))


def test_what_is_not_finite_is_left_out_and_said() -> None:
    loss = panel([run("bad", loss=[1.0, float("nan"), 2.0, float("inf")])], "loss against steps")
    assert list(loss.curves[0].y) == [1.0, 2.0]
    assert "bad: 2 of 4 points are not finite." in loss.remarks


def test_outliers_leave_the_axis_and_are_said() -> None:
    many = panel([run("a", x=[*np.linspace(1, 2, 50), 1e9])], "x")
    assert many.y_range.high < 2.1
    assert "The axis leaves out 1 point, up to 1e+09; a double click shows it." in many.remarks


def test_long_curves_keep_their_peaks() -> None:
    values = np.zeros(100_000)
    values[12_345] = 5.0
    [curve] = panel([run("a", x=list(values))], "x").curves
    assert len(curve.x) <= MOST_POINTS + 1
    assert curve.y.max() == 5.0
    assert curve.x[-1] == 100_000


def test_of_many_runs_the_extremes_of_traffic_are_named() -> None:
    traffic = [("a", 1.0), ("b", 4.0), ("c", 2.0), ("d", 8.0)]
    dense = {"sparse/traffic/dense_total_mb": [16.0]}
    said = sentences([run(name, **{"sparse/traffic/total_mb": [sent]}, **dense) for name, sent in traffic])
    assert [one.partition(" sent ")[0] for one in said[1:3]] == ["d", "a"]


@pytest.mark.parametrize(
    ("at", "logged", "steps"),
    [
        ([9, 19, 29], {}, 30),  # the Trainer's
        ([10, 20, 30], {}, 30),  # counts
        ([0, 10, 20], {}, 21),
        ([15], {}, 16),
        ([9, 99], {}, 100),
        ([1, 2, 3], {"sparse/traffic/dense_total_mb": [2.0, 4.0, 6.0]}, 3),
        ([1, 2, 3], {"sparse/traffic/dense_total_mb": [4.0, 6.0, 8.0]}, 4),
        ([10, 20, 30], {"sparse/traffic/dense_total_mb": [9.0, 9.0, 9.0]}, 30),  # tells nothing
    ],
)
def test_steps_are_counted_wherever_logs_begin(at: list[int], logged: dict[str, list[float]], steps: int) -> None:
    values = {"loss": [1.0] * len(at), **logged}
    made = Run("a", Path("a"), {k: Series(np.array(at, dtype=float), np.array(y)) for k, y in values.items()}, {})
    assert totals([made])[0].steps == steps
    assert panel([made], "loss against steps").curves[0].x[-1] == steps
    assert [made.series[name].values[-1] / steps for name in logged] == dense_rates([made])


def test_settings_that_are_not_known_are_not_taken_as_equal(runs: list[Run]) -> None:
    known, unknown = replace(runs[0], settings={"lr": "0.1"}), [run("a", loss=[1.0]), run("b", loss=[1.0])]
    told = "Settings of a, b are not known: none could be read beside the logs."
    assert told in sentences([known, *unknown])
    assert not any("No setting differs" in one for one in sentences([known, *unknown]) + sentences(unknown))
    assert "No setting differs among the other runs." in sentences([known, known, *unknown])
    assert "No setting differs." in sentences([known, known])
    assert any(
        one.startswith("Settings that differ among the other runs: lr")
        for one in sentences([known, replace(known, settings={"lr": "1"}), *unknown])
    )


def test_settings_that_some_runs_lack_are_not_called_equal(runs: list[Run]) -> None:
    shared = replace(runs[0], settings={"lr": "0.1"})
    more = replace(runs[1], settings={"lr": "0.1", **{f"sparse_ddp/{i}": "1" for i in range(27)}})
    said = sentences([shared, more])
    assert not any(one.startswith("No setting differs") for one in said)
    assert (
        "No setting that all of them have differs. "
        "27 settings are there in some of the runs only, such as sparse_ddp/0: see the settings."
    ) in said


def seeds(name: str, results: list[float], **settings: str) -> list[Run]:
    """Runs of one setting with different seeds."""
    made = [run(f"{name}/seed{seed}", **{"val/loss": [9.0, end]}) for seed, end in enumerate(results)]
    return [
        replace(one, settings={**settings, "seed_everything": str(seed), "trainer/logger/save_dir": one.name})
        for seed, one in enumerate(made)
    ]


SPREAD = "given how runs of one setting differ (standard deviation 0.1)"


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([*seeds("a", [1.0], m="a"), *seeds("b", [2.0], m="b")], ["best in a/seed0, at 1, worst in b", "cannot tell"]),
        (
            [*seeds("a", [1.0, 1.1, 0.9], m="a"), *seeds("b", [1.2, 1.3, 1.1], m="b"), *seeds("c", [3.0], m="c")],
            ["best in a (3 runs), at 1.", f"Level with it, {SPREAD}: b (3 runs), at 1.2.", "Worse by more than"],
        ),
        (
            [*seeds("a", [1.0, 1.1, 0.9], m="a"), *seeds("b", [1.5, 1.6, 1.4], m="b")],
            ["best in a (3 runs)", "differ (standard deviation 0.1): b (3 runs), at 1.5."],
        ),
        ([*seeds("a", [1.0, 1.0], m="a"), *seeds("b", [2.0, 2.0], m="b")], ["best in a (2 runs)", "different seeds."]),
        (seeds("a", [1.0, 1.1, 0.9], m="a"), ["ended at 1 on average of 3 runs that differ in their seeds at most"]),
        ([run("a", val_loss=[1.0]), run("b", val_loss=[2.0])], ["best in a, at 1, worst in b", "cannot tell whether"]),
        ([run("a", val_loss=[1.0]), run("b", val_loss=[1.0])], ["val_loss ended at 1 in all runs."]),
        ([run("a", val_loss=[1.0]), run("b", val_loss=[np.nan])], ["ended at 1.", "not finite at the end of b."]),
    ],
)
def test_words_say_whether_results_differ_by_more_than_seeds_do(runs: list[Run], said: list[str]) -> None:
    found = " ".join(one for one in sentences(runs) if "loss" in one)
    assert all(part in found for part in said)
    assert found.count(". ") + 1 == len(said), "and nothing else"


def test_sizes_are_plain_numbers_and_what_figures_know_is_in_the_table() -> None:
    traffic = {"sparse/traffic/total_mb": [0.5, 1.2], "sparse/traffic/dense_total_mb": [675.0, 1350.0]}
    both = [run("sparse", **traffic, loss=[1.0, 1.0]), run("dense", loss=[1.0, 1.0])]
    said = sentences(both)
    assert said[0] == (
        "sparse sent 1.2 MB a rank in 2 steps; dense all-reduces would have sent 1.35 GB, 1,125 times as much."
    )
    assert any("would have sent: 675 MB a step, marked ≈ in the table." in one for one in said)
    assert [row[3:6] for row in totals_table(both).rows] == [["1.2", "1350", "1125"], ["≈1350", "≈1350", "≈1"]]
    sent = panel(both, "loss against MB sent by a rank")
    assert sent.curves[1].x[-1] == totals(both)[1].sent_mb


def test_the_first_and_the_last_points_are_within_the_frame(runs: list[Run]) -> None:
    for part in parts_of(runs):
        for one in part.panels:
            if isinstance(one, Panel):
                x, y = (np.concatenate([getattr(curve, axis) for curve in one.curves]) for axis in "xy")
                ends = np.array([one.x_range.low, x.min(), x.max(), one.x_range.high])
                low, first, last, high = np.log10(ends) if one.x_log else ends
                assert min(first - low, high - last) > 0.02 * (high - low)
                assert one.y_range.outside or (one.y_range.low < y.min() and y.max() < one.y_range.high)


def test_sparsifiers_that_look_on_are_lines_of_their_own() -> None:
    looked = {f"sparse/shadow/{name}/density": [0.01, 0.02] for name in ("top_k", "exdyna")}
    [part, others] = parts_of([run("dense", **looked, **{"sparse/residual/norm": [1.0, 2.0]})])
    assert part.title == "Sparsifiers that looked on"
    [density] = part.panels
    assert isinstance(density, Panel)
    assert [(curve.name, curve.run, curve.look) for curve in density.curves] == [("top_k", 0, 0), ("exdyna", 0, 1)]
    assert [one.title for one in others.panels] == ["sparse/residual/norm"]


def test_totals(runs: list[Run]) -> None:
    dense, union, _ = totals(runs)
    assert (dense.sent_mb, dense.ratio, dense.assumed) == (pytest.approx(300 * DENSE_STEP_MB), 1.0, True)
    assert (dense.seconds, union.seconds) == (None, pytest.approx(6.0))
    assert union.dense_mb == pytest.approx(300 * DENSE_STEP_MB)
    assert union.ratio == pytest.approx(1 / 0.023)
    assert differing(runs) == ["sparse_ddp/sparsifier", "sparse_ddp/density"]


def test_a_reference_is_within_the_frame_on_a_logarithmic_axis_too() -> None:
    traffic = {"sparse/traffic/total_mb": [0.0, 0.1, 0.2], "sparse/traffic/dense_total_mb": [0.0, 50.0, 100.0]}
    for steps in (traffic, {name: values[1:] for name, values in traffic.items()}):
        found = panel([run("a", **steps)], "Sent by a rank so far / MB")
        assert found.y_range.high > 100.0
        assert not found.y_log or found.y_range.low > 0


@pytest.mark.parametrize("values", [[], [5.0], [5.0, 5.0], [float("nan")], [0.0, 0.0]])
def test_ranges_have_a_length(values: list[float]) -> None:
    for log in (False, True):
        found = robust_range(values, log)
        assert found.low < found.high
        assert found.outside == 0


def test_ranges_of_few_or_spread_values_leave_out_nothing() -> None:
    assert robust_range([1.0, 2.0, 1000.0]).outside == 0
    assert robust_range(np.geomspace(1, 1e6, 100), log=True).outside == 0
    assert wants_log(np.geomspace(1, 1e6, 100))
    assert not wants_log([0.0, 1e6])


def test_labels_keep_apart_and_inside() -> None:
    ends = [(1.0, 0.99 + 0.001 * i) for i in range(19)]
    heights = place_labels(ends, 0.05)
    assert min(np.diff(heights)) == pytest.approx(0.05)
    assert max(heights) <= 1.0
    assert place_labels([(0.1, 0.5), (0.9, 0.5)], 0.1) == [0.5, 0.5]  # they do not meet
