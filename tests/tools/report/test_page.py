"""The page in a browser, and the figures as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_sparse.tools.report.page import write_page
from lightning_sparse.tools.report.runs import Run, read_runs
from lightning_sparse.tools.report.static import write_figures
from tests.tools.report.made_up import compared, rows, write_csv

for needed in ("plotly", "matplotlib"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

MANY = 19


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return read_runs(compared(tmp_path_factory.mktemp("few")))


DATA = """() => plots.map(plot => ({
  title: plot.layout.title.text,
  names: plot.data.map(one => one.name),
  points: plot.calcdata.map((points, place) => plot.data[place].mode === "text" ? 2 : points.length),
  drawn: plot.querySelectorAll(".scatterlayer path.js-line, .scatterlayer .point, .barlayer .point").length,
  shown: plot.data.filter(one => one.visible).length,
}))"""


@pytest.mark.slow
def test_every_figure_has_data_and_nothing_is_fetched(few: list[Run], chromium: Any, tmp_path: Path) -> None:
    page = write_page(few, tmp_path / "report.html", "A comparison").as_uri()
    chromium.goto(page)
    assert chromium.title() == "A comparison"
    before = chromium.evaluate("plots.filter(one => one.drawn).length")
    chromium.evaluate("plots.forEach(draw)")
    figures = chromium.evaluate(DATA)
    assert 0 < before < len(figures)  # those in view only
    assert all(min(one["points"]) > 1 and one["drawn"] > 0 for one in figures), figures
    titles = [one["title"] for one in figures]
    assert titles[:6] == [
        f"{name} against {axis}"
        for name in ("train/loss", "val/accuracy")
        for axis in ("steps", "MB sent by a rank", "seconds of training")
    ]
    assert {"Density of the update", "Padding ratio f(t)", "Times of a step / ms", "Threshold"} <= set(titles)
    chromium.locator(".runs input").first.uncheck()
    fewer = chromium.evaluate(DATA)
    assert fewer[0]["shown"] == figures[0]["shown"] - 2  # dense: its line and its name
    chromium.set_viewport_size({"width": 390, "height": 800})
    chromium.wait_for_function("!plots[0].data.some(one => one.visible && one.mode === 'text')")
    chromium.wait_for_function("document.documentElement.scrollWidth === 390")  # plots follow one after the other
    assert chromium.noted == [f"request: {page}"]


def test_the_page_says_what_matters(few: list[Run], tmp_path: Path) -> None:
    text = write_page(few, tmp_path / "report.html").read_text()
    assert "<li>top_k sent 1.72 MB a rank in 300 steps; dense all-reduces would have sent 75 MB, 43.5 times" in text
    assert "<li>val/accuracy ended at 0.9681 in all runs.</li>" in text
    assert (
        "<li>Settings that differ: sparse_ddp/sparsifier.</li><li>1 setting is there in some of the runs only" in text
    )
    assert "<li>dense logged no traffic and is drawn as if" in text
    assert text.count('type="checkbox"') == 3
    body = text.split("<body>")[1]
    assert "http" not in body and "src=" not in body


def test_names_from_logs_are_text(tmp_path: Path) -> None:
    logged = [{"step": step, "loss</script><b>": 1.0 + step} for step in range(3)]
    [run] = read_runs([write_csv(tmp_path / "run", logged, note="</script><i>")])
    text = write_page([run], tmp_path / "report.html").read_text()
    assert "<b>" not in text.split("</style>")[1].split("<body>")[1]
    assert "<i>" not in text.split("<body>")[1]


def test_many_runs_are_told_apart_by_one_list(tmp_path: Path) -> None:
    folders = [write_csv(tmp_path / f"run{i:02}", rows(100, seed=i)) for i in range(MANY)]
    text = write_page(read_runs(folders), tmp_path / "report.html").read_text()
    body = text.split("<body>")[1]
    assert body.count('type="checkbox"') == MANY
    assert '"mode":"text"' not in body
    assert len({part.split("/>")[0] for part in body.split("stroke=")[1 : MANY + 1]}) == MANY


@pytest.mark.thorough
def test_figures_as_files(few: list[Run], tmp_path: Path) -> None:
    names = (
        "train/loss",
        "sparse/density",
        "sparse/target_density",
        "sparse/traffic/total_mb",
        "sparse/time/select_ms",
    )
    some = [replace(run, series={name: run.series[name] for name in names}) for run in few[1:]]
    figures = write_figures(some, tmp_path / "figures")
    assert {file.stem for file in figures} == {
        "train_loss_against_steps",
        "train_loss_against_mb_sent_by_a_rank",
        "density_of_the_update",
        "sent_by_a_rank_so_far_mb",
        "times_of_a_step_ms",
        "selection_ms",
    }
    loss = next(file for file in figures if file.stem == "train_loss_against_steps").read_text()
    assert ">top_k</text>" in loss and ">union_top_k</text>" in loss


@pytest.mark.thorough
def test_names_in_figures_are_texts_and_files_do_not_collide(tmp_path: Path) -> None:
    names = ["val/loss", "val_loss", "VAL/LOSS", "$x_1$ loss", r"$\frac{1$ loss", "损失 acc", "x" * 400, "?", "$"]
    for folder in "ab":
        logged = [{"step": step, **dict.fromkeys(names, 1.0 + step), "sparse/time/select_ms": 1.0} for step in range(3)]
        write_csv(tmp_path / folder, logged)
    found = read_runs([tmp_path / "a", tmp_path / "b"], ["_fast", "$a$ & <b>"])
    files = write_figures(found, tmp_path / "figures")
    assert len({file.name.casefold() for file in files}) == len(files) == len(list((tmp_path / "figures").iterdir()))
    texts = [" ".join(ElementTree.parse(file).getroot().itertext()) for file in files]
    for shown in ("_fast", "$a$ & <b>"):
        assert all(shown in text for text in texts), "of all lines and bars"
    titles = ["$x_1$ loss against steps", r"$\frac{1$ loss against steps", "损失 acc against steps"]
    assert all(sum(title in text for text in texts) == 1 for title in titles)


def test_a_page_that_cannot_be_written_is_one_sentence(few: list[Run], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Expected out to be a file to write to, but got .*file/report.html: "):
        write_page(few, tmp_path / "file" / "report.html")
    with pytest.raises(ValueError, match=r"Expected a folder to write to, but got .*file"):
        write_figures(few[:1], tmp_path / "file" / "figures")
