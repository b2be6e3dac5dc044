"""Advice as tables, files and configurations."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.methods.grouping import GROUPINGS
from lightning_sparse.tools.advisor import Advice, Scenario
from lightning_sparse.tools.advisor.prediction import TRIED, predict, scenarios
from lightning_sparse.tools.advisor.report import (
    across,
    figure,
    markdown,
    overview,
    strategy_config,
    write_configs,
    write_csv,
)
from tests.covering import by_default, covering, in_turns
from tests.tools.advisor.made_up import HERE, advice, measured, predicted

THERE = Scenario(8, 1.0)
MIXED = [
    predicted("fp16", 1.1),
    predicted("bf16", 0.97),
    predicted("powersgd", 0.5),
    predicted("top_k", 1.3, 0.1),
    predicted("top_k", 0.8, 0.01, "layer", 7),
    predicted("top_k", 0.9, 0.01, "model"),
    predicted("union_top_k", 0.82, 0.01, "merge_below", 3),
]


def rows_of(table: Any) -> dict[str, list[str]]:
    return {f"{cells[0]} {cells[1]}".strip(): cells for cells in table.rows}


def test_the_table_marks_what_to_use_and_what_loses() -> None:
    table = overview(advice(MIXED))
    assert table.title == "Predicted step time, 2 ranks, measured"
    assert [cells[0] for cells in table.rows] == [
        "powersgd",
        "top_k",
        "union_top_k <- use this",
        "bf16",
        "dense",
        "fp16 (losing)",
        "top_k (losing)",
    ]
    rows = rows_of(table)
    assert rows["union_top_k <- use this 0.01"][2:] == ["merge_below", "3", "8.2", "1.2", "8.2", "0.82"]
    assert rows["top_k 0.01"][2:] == ["layer", "7", "8", "1", "8", "0.80"]  # of the two groupings the faster one
    assert rows["dense"][1:] == ["", "DDP's buckets", "1", "10", "3", "", "1.00"]


def test_a_short_table_keeps_ddp_and_what_to_use() -> None:
    many = [predicted("top_k", 0.3 + density, density) for density in (0.01, 0.02, 0.04, 0.05)]
    table = overview(advice([*MIXED, *many, predicted("dgc", 2.0)]), rows=1)
    assert [cells[0].split()[0] for cells in table.rows] == ["top_k", "top_k", "powersgd", "bf16", "dense", "fp16"]
    assert sum("<- use this" in cells[0] for cells in table.rows) == 1


def test_the_table_of_all_networks() -> None:
    table = across(advice([*MIXED, predicted("top_k", 1.4, scenario=THERE), predicted("bf16", 0.7, scenario=THERE)]))
    assert table.rows == [
        ["2 ranks, measured", "union_top_k 0.01 (merge_below)", "10", "8.2", "0.80", "1.10", "0.97", "0.50"],
        ["8 ranks, 1 Gbit/s", "stay dense", "10", "10", "1.40", "", "0.70", ""],
    ]
    on_cuda = advice([predicted("top_k", 1.4), predicted("bf16", 0.7)], kind="float32.cuda:0")
    assert across(on_cuda).rows == [["2 ranks, measured", "dense, bf16", "10", "7", "1.40", "", "0.70", ""]]
    in_groups = advice([predicted("top_k", 1.4), predicted("everything", 0.7, 1.0, "layer")])
    assert across(in_groups).rows == [["2 ranks, measured", "dense, layer", "10", "7", "1.40", "", "", ""]]
    assert across(advice([predicted("top_k", 1.4)])).rows[0][1] == "stay dense"
    assert across(advice([predicted("fp16", 1.4)])).rows[0][4] == ""


def test_verdicts() -> None:
    found = advice([*MIXED, predicted("top_k", 1.4, scenario=THERE), predicted("bf16", 0.7, scenario=THERE)])
    assert found.verdict() == (
        "2 ranks, measured: union_top_k at density 0.01, grouping merge_below, takes 0.82 times dense DDP's 10 ms a "
        "step (DDP with 16 bits: 0.97)."
    )
    fastest = "The fastest sparsifier, top_k at 0.01, takes 1.40 times dense DDP's 10 ms a step."
    assert found.verdict(THERE) == f"8 ranks, 1 Gbit/s: stay dense. {fastest}"  # Lightning has hooks on CUDA only
    on_cuda = advice([predicted("top_k", 1.4), predicted("bf16", 0.7)], kind="float32.cuda:0")
    hook = "stay dense, with DDP's bf16 hook (0.70 times dense DDP's 10 ms a step)"
    assert on_cuda.verdict() == f"2 ranks, measured: {hook}. {fastest}"
    in_groups = advice([predicted("top_k", 1.4), predicted("everything", 0.7, 1.0, "layer")])
    groups = "stay dense; sparsifier='everything' with grouping='layer' takes 0.70 times dense DDP's 10 ms a step"
    assert in_groups.verdict() == f"2 ranks, measured: {groups}. {fastest}"
    assert advice([predicted("fp16", 1.4)]).verdict() == "2 ranks, measured: stay dense."


def test_what_is_printed_are_decisions() -> None:
    found = advice(
        [predicted("top_k", 0.9)._replace(overlapped_seconds=7.5e-3), predicted("bf16", 0.7, scenario=THERE)]
    )
    assert str(found).splitlines() == [found.verdict(), *found.remarks(), found.verdict(THERE)]


def test_step_times_by_name() -> None:
    found = advice([*MIXED, predicted("top_k", 1.4, scenario=THERE)])
    assert found.step_seconds("dense") == pytest.approx(10e-3)
    assert found.step_seconds("top_k", 0.01) == pytest.approx(8e-3)
    assert found.step_seconds("top_k", 0.01, "model") == pytest.approx(9e-3)
    assert found.step_seconds("top_k", 0.01, scenario=THERE) == pytest.approx(14e-3)
    with pytest.raises(KeyError, match=r"There is no prediction of dgc at density 0\.5 with grouping layer"):
        found.step_seconds("dgc", 0.5, "layer")


def test_what_overlap_hides_is_said_where_it_shortens_the_step() -> None:
    row = predicted("top_k", 0.9)
    assert advice([row]).remarks() == []
    found = advice([row._replace(overlapped_seconds=7.5e-3)])
    assert found.remarks() == [
        "overlap=True with grouping='model' hides 1.5 ms of the 2 ms of its exchange behind backward: a step of 7.5 "
        "ms. It goes without clipping and loss scaling."
    ]
    header, cells = overview(found).header, overview(found).rows
    assert [row[header.index("with overlap ms")] for row in cells] == ["7.5", ""]


def test_what_many_ranks_may_cost_is_said() -> None:
    def said(found: Advice) -> list[str]:
        return [sentence for sentence in found.assumptions() if "of the loss" in sentence]

    assert len(said(advice([predicted("top_k", 0.5), predicted("top_k", 0.5, scenario=Scenario(8, 1.0))]))) == 1
    assert said(advice([predicted("top_k", 0.5)])) == []


def test_the_page_has_verdicts_tables_and_assumptions() -> None:
    found = advice([*MIXED, predicted("top_k", 1.4, scenario=THERE)])
    page = markdown(found)
    assert found.scenarios == [HERE, THERE]
    for scenario in found.scenarios:
        assert f"- {found.verdict(scenario)}\n" in page
        assert f"### Predicted step time, {scenario.label}\n" in page
    assert "8 ranks, 1 Gbit/s: stay dense" in page
    assert all(f"- {sentence}\n" in page for sentence in found.assumptions())


def test_assumptions_are_about_what_was_done() -> None:
    here = " ".join(advice([predicted("top_k", 1.4)]).assumptions())
    there = " ".join(advice([predicted("top_k", 1.4, scenario=THERE)]).assumptions())
    assert "Measured between 2 ranks" in here
    assert "Other networks" not in here
    assert "fixed prices are those measured here" in there
    alone = measured(ranks=1)
    sentences = " ".join(Advice(alone, tuple(predict(alone, scenarios(1, [8], [10])))).assumptions())
    assert "Measured between" not in sentences
    assert "fixed price of a hop is taken to be 30 us" in sentences


def test_the_file_has_every_prediction(tmp_path: Path) -> None:
    seen = measured()
    found = Advice(seen, tuple(predict(seen, scenarios(2, [8], [10], [20]))))
    write_csv(found, tmp_path / "advice.csv")
    with (tmp_path / "advice.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(found.predictions) == 4 * (4 + 4 * len(TRIED))
    for line, one in zip(lines, found.predictions, strict=True):
        assert (int(line["ranks"]), line["gbit"]) == (one.scenario.ranks, str(one.scenario.gbit or ""))
        assert float(line["rtt_ms"]) == one.scenario.rtt_ms
        assert (line["method"], line["grouping"], line["builtin"]) == (one.method, one.grouping, str(one.builtin))
        for name in ("density", "groups", "step_seconds", "exposed_seconds", "over_dense"):
            assert float(line[name]) == getattr(one, name)


@pytest.mark.parametrize("networks", [1, 7])
def test_the_figure_is_a_picture(tmp_path: Path, networks: int) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    seen = measured()
    found = Advice(seen, tuple(predict(seen, scenarios(2, [2, 8, 64], [1, 10])[:networks])))
    figure(found, tmp_path / "advice.png")
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG\r\n")


# Configurations


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The Trainer that LightningCLI makes of a configuration."""
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    from pytorch_lightning.cli import LightningCLI

    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates
    monkeypatch.setattr("sys.argv", ["train.py"])

    def make(path: Path) -> Any:
        return LightningCLI(run=False, save_config_callback=None, args=["--config", str(path)]).trainer

    return make


def given(**trainer: Any) -> dict[str, Any]:
    return {
        "seed_everything": 3,
        "trainer": {"accelerator": "cpu", "devices": 2, "logger": False} | trainer,
        "model": {"class_path": "tests.tools.advisor.toys.Toy", "init_args": {"width": 6}},
    }


@pytest.mark.parametrize("name", by_default(TRIED, 2))
def test_a_configuration_for_each_grouping(trainer_of: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    found = advice([predicted("shared_top_k", 0.5, 0.003, name)])
    write_configs(found, tmp_path, given(max_steps=7))
    assert path.read_text().startswith(f"# {found.verdict()}\n")
    trainer = trainer_of(path)
    strategy = trainer.strategy
    assert type(strategy).__name__ == "SparseDDPStrategy"
    assert type(strategy.config.sparsifier).__name__ == "SharedTopK"
    assert strategy.config.density(0) == 0.003
    assert strategy.config.grouping == GROUPINGS.resolve(name)
    assert trainer.max_steps == 7


def test_a_configuration_for_each_network(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    others = THERE, THERE._replace(gbit=None), THERE._replace(rtt_ms=20.0)
    found = advice([predicted("top_k", 1.5), *(predicted("dgc", 0.5, scenario=one) for one in others)])
    paths = write_configs(found, tmp_path, given())
    ways = ("-1-gbit", "", "-1-gbit-20-ms")
    assert [path.name for path in paths] == ["config.yaml", *(f"config-8-ranks{way}.yaml" for way in ways)]
    strategies = [yaml.safe_load(path.read_text())["trainer"]["strategy"] for path in paths]
    assert strategies[0] == "ddp"
    assert strategies[1] == strategies[2]
    assert strategies[1]["init_args"]["sparsifier"] == "dgc"
    for path, scenario in zip(paths, found.scenarios, strict=True):
        assert path.read_text().startswith(f"# {found.verdict(scenario)}\n")


@pytest.mark.parametrize("before", [None, "ddp", "auto", {"class_path": "DDPStrategy"}])
def test_where_dense_wins_the_configuration_is_plain_ddp(before: Any) -> None:
    assert strategy_config(advice([predicted("top_k", 1.5)]), given=before) == "ddp"
    assert strategy_config(advice([predicted("bf16", 0.5)]), given=before) == "ddp"  # Lightning has hooks on CUDA only


UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True, "gradient_as_bucket_view": True, "broadcast_buffers": False}


TOLD: list[tuple[Any, dict[str, Any]]] = [
    ("ddp_find_unused_parameters_true", UNUSED),
    ("ddp_spawn_find_unused_parameters_true", UNUSED | {"start_method": "spawn"}),
    ("sparse_ddp_fork_find_unused_parameters_false", {"start_method": "fork"}),
    ({"class_path": "DDPStrategy", "init_args": STATIC | {"bucket_cap_mb": 3}}, STATIC),
    ({"class_path": "DDPStrategy", "dict_kwargs": UNUSED}, UNUSED),
    (
        {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": {"sparsifier": "dgc"} | UNUSED},
        UNUSED,
    ),
]


@pytest.mark.parametrize(
    ("number", "best"), covering(in_turns(range(len(TOLD)), ["dense", "bf16", "top_k"]), together=1)
)
def test_what_ddp_is_told_stays(trainer_of: Any, tmp_path: Path, number: int, best: str) -> None:
    before, kept = TOLD[number]
    path = tmp_path / "config.yaml"
    found = advice([predicted("top_k", 1.5), predicted(best, 0.5)], kind="float32.cuda:0")
    assert write_configs(found, tmp_path, given(strategy=before)) == [path]
    strategy = trainer_of(path).strategy
    sparse = "lightning_sparse.integrations.pytorch_lightning"
    assert type(strategy).__module__ == (sparse if best == "top_k" else "pytorch_lightning.strategies.ddp")
    seen = strategy._ddp_kwargs | {"start_method": strategy._start_method}
    assert {name: seen[name] for name in kept} == kept
    assert seen.get("find_unused_parameters", False) == kept.get("find_unused_parameters", False)
    hook = strategy._ddp_comm_hook
    assert getattr(hook, "__name__", None) == ("bf16_compress_hook" if best == "bf16" else None)


def test_other_sections_stay_as_they_were(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    path = tmp_path / "config.yaml"
    before = given(max_epochs=2, strategy="ddp", callbacks=[{"class_path": "X"}]) | {
        "ckpt_path": None,
        "mine": {"a": 1},
    }
    for nested in (False, True):
        config = {"fit": before, "top": 5} if nested else before
        write_configs(advice([predicted("top_k", 0.5)]), tmp_path, config)
        after = yaml.safe_load(path.read_text())
        section = after["fit"] if nested else after
        assert section["trainer"].pop("strategy")["init_args"]["sparsifier"] == "top_k"
        expected = {name: value for name, value in before["trainer"].items() if name != "strategy"}
        assert section == before | {"trainer": expected}
        assert list(section) == list(before)
        assert after.get("top") == (5 if nested else None)
    assert before["trainer"]["strategy"] == "ddp"


def test_without_a_configuration_there_is_the_strategy(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    write_configs(advice([predicted("top_k", 1.5)]), tmp_path)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"trainer": {"strategy": "ddp"}}


def test_what_stays_dense_and_what_becomes_of_residuals_is_left_as_it_is() -> None:
    own = {"rules": {"dense_numel": 1000}, "dense": ["*.bias"], "resize": "flush", "watch": None}
    before = {"class_path": "lightning_sparse.SparseDDPStrategy", "init_args": own | {"sparsifier": "dgc"}}
    other = {"class_path": "DDPStrategy", "init_args": own}
    found = advice([predicted("shared_top_k", 0.5, 0.003, "layer")])
    chosen = {"sparsifier": "shared_top_k", "density": 0.003, "grouping": "layer"}
    assert strategy_config(found, given=before)["init_args"] == chosen | own
    assert strategy_config(found, given=other)["init_args"] == chosen
