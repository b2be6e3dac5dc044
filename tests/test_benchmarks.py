"""Benchmarks run with small numbers, write what they say, and name what loses."""

from __future__ import annotations

import csv
import importlib
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.warm import warm_python

ROOT = Path(__file__).parent.parent
ABOUT = {"processor", "cores", "python", "torch", "lightning_sparse", "kernels"}


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Benchmarks import what lies beside them, write to the current folder, and set the number of threads."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_local_steps_are_timed_beside_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark("local_step").main(
        ["--methods", "union_top_k", "top_k", "--numel", "20000", "--density", "0.01", "--steps", "2", "--ranks", "2"]
    )
    found = json.loads((tmp_path / "local_step.json").read_text())
    assert found.keys() >= ABOUT
    assert [(row["method"], row["numel"]) for row in found["rows"]] == [
        (method, numel) for numel in (2000, 20000) for method in ("union_top_k", "top_k")
    ]
    for row in found["rows"]:
        assert 0 < row["quartiles"][0] <= row["copies"] <= row["quartiles"][1]
    assert found["rows"][3]["given"] == {"all_gather": 4 + 8 * 200}
    assert found["rows"][3]["state_bytes"] == 4 * 20001
    assert found["kernels"] in capsys.readouterr().out
    assert "union_top_k" in (tmp_path / "local_step.svg").read_text()


def test_local_steps_are_timed_with_second_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--methods", "union_top_k", "top_k", "--memory", "second_moment", "--numel", "20000", "--density", "0.01"]
    benchmark("local_step").main([*words, "--steps", "2", "--ranks", "2"])
    found = json.loads((tmp_path / "local_step.json").read_text())
    assert found["memory"] == "second_moment"
    assert [row["state_bytes"] for row in found["rows"][2:]] == 2 * [2 * 4 * 20001 + 8 + 5 * 8 + 8]


def test_clipping_is_compared_with_dense_training(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "clipping.jsonl"
    text.write_text(" ".join(f"word{i * i % 97}" for i in range(30_000)))
    clipping = benchmark("clipping")
    for _ in range(2):  # the second time, nothing is missing
        clipping.main(text, limits=[0.25], densities=[0.01], ranks=2, steps=2, out=out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["run"][0] for row in rows] == ["dense", "averages", "ranks", "mean"]
    assert all(math.isfinite(row["perplexity"]) for row in rows)


def test_norms_of_sketches_are_divided_by_those_of_means(capsys: pytest.CaptureFixture[str]) -> None:
    class Model(torch.nn.Linear):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch).square().mean()

        @staticmethod
        def optimizer(parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, 0.01)

    sketch, model, batches = benchmark("sketch"), Model(90, 100), torch.randn(3, 5, 90)
    found = sketch.ratios(model, iter(batches).__next__, [1, 3], range(2))
    for n in (1, 3):
        model.zero_grad()
        model(batches[:n].flatten(0, 1)).backward()
        gradients = [model.weight.grad, model.bias.grad]
        norm = math.sqrt(sum(float(x.norm()) ** 2 for x in gradients))
        expected = [float(sketch.sketch(gradients, seed).norm()) / norm for seed in range(2)]
        assert found[n].tolist() == pytest.approx(expected, rel=1e-5)
    sketch.train("small", model, lambda generator: batches[0], steps=[0, 1], ranks=[1, 3], seeds=2, batches=1)
    assert capsys.readouterr().out.count("RMS") == 4
    assert sketch.cost(1, 10_000) in (True, False)


@pytest.mark.thorough
def test_seconds_of_training_steps_stand_beside_perplexities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, words in (("train", 9000), ("valid", 3000)):
        (tmp_path / f"{split}.txt").write_text(" ".join(f"word{i * i % 97}" for i in range(words)))
    adam_seconds, found = benchmark("adam_seconds"), tmp_path / "found.json"
    monkeypatch.setattr(adam_seconds, "WORDS", 100)
    monkeypatch.setattr(adam_seconds, "VALIDATIONS", 2)
    adam_seconds.train("auto", 8, 0, 1, tmp_path, found)
    seen = json.loads(found.read_text())
    (half, after, before), (whole, total, perplexity) = seen["curve"]
    assert (half, whole) == (4, 8)
    assert 0 < seen["step"] < after < total == pytest.approx(seen["seconds"])
    assert perplexity < before < 100
    out = tmp_path / "adam_seconds.jsonl"
    rows = [{"run": ["auto", 8, seed, 1, 100], **seen, **adam_seconds.about()} for seed in (0, 1)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(adam_seconds, "why_not", lambda: "no namespaces")
    assert adam_seconds.main(tmp_path) == 0
    assert "skipped: no namespaces" in capsys.readouterr().out
    assert adam_seconds.main(tmp_path, table=True) == 0
    printed = capsys.readouterr().out
    assert printed.count(f"{seen['curve'][-1][2]:.1f}") == 3  # the mean, and two seeds
    assert "auto" in printed


def test_local_steps_take_the_sizes_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    local_step = benchmark("local_step")
    monkeypatch.setattr(local_step, "memory", lambda: local_step.bytes_for(1_000_000, 4))
    with pytest.raises(SystemExit, match="2"):  # four fifths of it are not enough
        local_step.main([])
    monkeypatch.setattr(local_step, "memory", lambda: 1.3 * local_step.bytes_for(1_000_000, 4))
    sizes: list[int] = []

    def stop(numel: int, ranks: int) -> None:
        sizes.append(numel)
        if numel > 2000:
            raise KeyboardInterrupt

    monkeypatch.setattr(local_step, "Gradients", stop)
    monkeypatch.setattr(local_step, "measure", lambda *_, **__: {})
    with pytest.raises(KeyboardInterrupt):
        local_step.main([])
    assert sizes == [2000, 1_000_000]


def test_many_ranks_cost_what_the_network_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numel, density, latency = 1_000_000, 0.01, 50e-6
    words = ["--methods=[union_top_k,top_k]", f"--numel={numel}", f"--density=[{density}]", "--steps=2"]
    words += ["--ranks=[4,256]", "--measured=[2,4]", "--sample=32000", "--gbit=[0.1]"]
    many_ranks = benchmark("many_ranks")
    many_ranks.main(many_ranks.CLI(many_ranks.Arguments, as_positional=False, args=words))
    found = json.loads((tmp_path / "many_ranks.json").read_text())
    assert found.keys() >= ABOUT
    rows = {(row["method"], row["ranks"]): row for row in found["rows"]}
    for n in (4, 256):
        byte = 8 / 0.1e9
        dense = 2 * latency * math.log2(n) + 2 * (n - 1) / n * 4 * numel * byte
        pairs = (n - 1) * (latency + (4 + 8 * density * numel) * byte)
        assert rows["top_k", n]["dense_ms"] == pytest.approx(1e3 * dense)
        assert rows["top_k", n]["transfer_ms"] == pytest.approx(1e3 * pairs)
        assert rows["top_k", n]["memory_bytes"] == pytest.approx(4 * numel + 8 * density * numel * n, rel=1e-3)
    assert rows["top_k", 256]["over_dense"] > 1 > rows["top_k", 4]["over_dense"]
    assert rows["union_top_k", 256]["over_dense"] < 1
    printed = capsys.readouterr().out
    assert "loses from n = 256" in printed
    assert "pays for all n" in printed
    assert "top_k" in (tmp_path / "many_ranks.svg").read_text()


@pytest.mark.parametrize(
    ("over_dense", "words"),
    [
        ([0.5, 0.9, 2.0], "loses from n = 8"),
        ([2.0, 0.9, 0.5], "loses to n = 2"),
        ([2.0, 0.9, 2.0], "loses but for n = 4 to 4"),
        ([0.5, 0.5, 0.5], "pays for all n"),
        ([1.0, 1.0, 1.0], "loses for all n"),
    ],
)
def test_losing_numbers_of_ranks_are_said(over_dense: list[float], words: str) -> None:
    rows = [{"ranks": n, "over_dense": ratio} for n, ratio in zip((2, 4, 8), over_dense, strict=True)]
    assert benchmark("many_ranks").pays(rows) == words


def hooks_result(**milliseconds: float) -> dict[str, Any]:
    """As a launch of the part hooks leaves it."""
    records = [
        {
            "variant": name.replace("_", " "),
            "round": step,
            "number": 5 + step,
            "step_ms": ms,
            "cpu_ms": ms,
            "received": 1000,
            "sent": 1000,
            "loss": 2.0 - 0.1 * step,
        }
        for step in range(6)
        for name, ms in milliseconds.items()
    ]
    job = {"part": "hooks", "model": "lstm", "mbit": 1000, "ranks": 2, "density": 0.01, "rounds": 6}
    names = [name.replace("_", " ") for name in milliseconds]
    return {
        "job": job,
        "machine": {"cores": 2},
        "parameters": 14_018_000,
        "groups": dict.fromkeys(names),
        "direct": {"fallback 0.01": True},
        "records": records,
        "finished": True,
        "memory_mib": 1,
    }


def test_the_table_of_hooks_names_what_a_variant_loses_to() -> None:
    result = hooks_result(
        **{"compute": 100.0, "noop": 101.0, "dense": 130.0, "fp16": 110.0, "powersgd 1": 140.0},
        **{"sparse 0.01": 135.0, "sparse 0.001": 105.0, "fallback 0.01": 133.0},
    )
    rows = {row["variant"]: row for row in benchmark("paired").hooks_rows(result)}
    assert {name: row["loses to"] for name, row in rows.items()} == {
        "compute": "",
        "noop": "",
        "dense": "",
        "fp16": "",
        "powersgd 1": "dense",
        "sparse 0.01": "dense, 1.2 x compute, fp16",
        "sparse 0.001": "",
        "fallback 0.01": "",  # 2.3 % slower, of 3 %
    }
    assert rows["fallback 0.01"]["goes on"] == "dense"
    assert rows["sparse 0.01"]["step / compute"].middle == 1.35
    assert "step / compute" not in rows["compute"]
    result["steady"] = {"sparse 0.01": 250.0}
    received = {r["received"] for r in result["records"]}
    assert len(received) == 1
    for row in benchmark("paired").hooks_rows(result):
        steady = row["variant"] == "sparse 0.01"
        assert row["MB when steady"] == f"{(250.0 if steady else min(received)) / 1e6:.3f}"
    slow = hooks_result(dense=100.0, **{"fallback 0.01": 104.0})
    assert benchmark("paired").hooks_rows(slow)[1]["loses to"] == "1.03 x dense"


def test_figures_of_hooks_show_every_variant(tmp_path: Path) -> None:
    result = hooks_result(**{"compute": 100.0, "dense": 130.0, "sparse 0.01": 120.0, "fallback 0.01": 133.0})
    draw = benchmark("hooks_figure").draw
    assert draw([], tmp_path) == []
    times, losses = (path.read_text() for path in draw([result], tmp_path))
    assert [name in times for name in ("dense", "sparse 0.01", "fallback 0.01")] == [True] * 3
    assert [name in losses for name in ("dense", "sparse 0.01", "fallback 0.01")] == [True, True, False]


def test_variants_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shaped_links = benchmark("shaped_links")
    job = {"model": "lstm", "mbit": 1000, "ranks": 8, "variants": None}
    monkeypatch.setattr(shaped_links, "memory", lambda: 1 << 40)
    assert shaped_links.too_large(job) is None
    monkeypatch.setattr(shaped_links, "memory", lambda: 20 << 30)
    assert "name some by --variants" in shaped_links.too_large(job)
    assert shaped_links.too_large(job | {"variants": ["compute", "dense", "sparse 0.01"]}) is None


def test_a_fallback_is_compared_where_it_takes_no_minutes() -> None:
    specs = benchmark("shaped_rank").hook_specs
    assert [spec.fallback for spec in specs(1.0, 100)].count(True) == 0
    assert [spec.fallback for spec in specs(1.0, 1000)].count(True) == 1


def test_curves_of_the_examples_are_means_of_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_sparse.tools.report.runs import read_runs
    from tests.tools.report.made_up import rows, write_csv

    examples = benchmark("examples")
    for density in (1, 0.01):
        for seed in (0, 1):
            write_csv(tmp_path / "logs" / f"gpt_{density}_seed{seed}", rows(seed=seed, density=density))
    examples.draw(read_runs([tmp_path / "logs"]), tmp_path / "curves.svg")
    drawn = (tmp_path / "curves.svg").read_text()
    for text in ("gpt: training loss, seeds 0 1", "dense", "0.01", "MB sent by a rank"):
        assert f">{text}<" in drawn
    with pytest.raises(SystemExit, match="Expected --logs"):
        examples.main(table=True, figure=tmp_path / "none.svg")
    assert not capsys.readouterr().out


@pytest.mark.thorough
def test_figures_of_the_documentation_are_drawn_from_its_tables(tmp_path: Path) -> None:
    benchmark("step_time_figure").main(ROOT / "docs/step_time.csv", tmp_path / "step_time.svg")
    drawn = (tmp_path / "step_time.svg").read_text()
    assert "plain DDP" in drawn
    assert "100 Mbit/s, 4 ranks" in drawn
    rows = csv.DictReader((ROOT / "docs/step_time.csv").read_text().splitlines())
    [dense] = [r for r in rows if (r["model"], r["mbit"], r["variant"]) == ("lstm", "100", "dense")]
    assert f">{float(dense['step_ms']) / 1000:.2g}<" in drawn
    for name, some in (
        ("compare", ("dense", "top_k", "union_top_k", "random_k")),
        ("replay", ("top_k", "union_top_k", "hard_threshold")),
    ):
        with (ROOT / f"benchmarks/results/reports/{name}.csv").open(newline="") as file:
            head, *lines = csv.reader(file)
        kept = [line for line in lines if line[0] == "text" and line[3] in some]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([head, *kept])
    figures = benchmark("compare_figures")
    figures.main(tmp_path / "compare.csv", tmp_path / "replay.csv")
    names = [*(f"compare_end_{name}" for name in ("loss", "quality")), *(f"replay_{name}" for name in figures.AXES)]
    assert {path.stem for path in tmp_path.glob("*_*.svg")} == {*names, "step_time"}
    for name in names:
        assert ">union_top_k</text>" in (tmp_path / f"{name}.svg").read_text()  # letters, not their shapes


def test_figures_of_the_comparison_say_what_diverged_and_what_was_never_reached(tmp_path: Path) -> None:
    figures = benchmark("compare_figures")
    result, row = figures.Result, figures.recorded.Row
    ends = [("dense", 0.5), ("top_k", 1.0), ("micro", float("nan"))]
    runs = [result("text", 4, 0.01, name, 0, 20, 0.01, 0.01, 2.0, loss, 50.0, "perplexity") for name, loss in ends]
    figures.draw_ends(runs, "loss", tmp_path / "ends.svg")
    assert "micro (diverged)" in (tmp_path / "ends.svg").read_text()
    rows = [row("text", 4, 0.1, "top_k", steps, 0, 1.0, None, *[1.0] * 7) for steps in (9, 10)]
    assert [repr(figures._value(one, "steps_to_target")) for one in rows] == ["nan", "10.0"]  # too few to tell
    assert len({(one.colour, one.dash) for one in figures.looks().values()}) == len(figures.METHODS)


def test_a_gpt_as_a_new_user_writes_it_is_trained_densely_and_behind_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_gpt, text = benchmark("plain_gpt"), tmp_path / "text"
    text.write_text("a b c d e f g " * 400)
    monkeypatch.setattr(plain_gpt, "WORDS", 50)
    monkeypatch.setattr(plain_gpt, "FIRST_BUCKET", 1 << 16)
    plain_gpt.main(text, text, seeds=[1], beta2=[0.9], clips=[1.0], steps=3, out=tmp_path / "out")
    [line] = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert 1 < line["sparse"] < 100 and 1 < line["dense"] < 100


def test_the_hosts_time_of_a_step_is_told_by_parts() -> None:
    pytest.importorskip("triton")
    words = [warm_python(), "-m", "benchmarks.host_step", "--optimizers", "momentum", "--steps", "1", "--groups", "2"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    rows = {cells[1].strip(): cells[2:5] for line in said.splitlines() if len(cells := line.split("│")) == 6}
    whole, exchange = ([float(cell) for cell in rows[name]] for name in ("ours", "exchange"))
    assert all(0 < part < all_of_it for part, all_of_it in zip(exchange, whole, strict=True))
    assert rows.keys() >= {"DDP alone", "backward's end", "absorb", "select", "messages", "settle", "rule"}
    assert int(rows["DDP alone"][2]) == 0 < int(rows["select"][2])


def test_on_a_device_a_residual_is_all_that_stays_and_gradients_are_not_copied() -> None:
    """Beside DDP: 4 bytes a parameter with SGD, none with AdamW, and a byte of picks and messages within a step."""
    pytest.importorskip("triton")
    words = [warm_python(), "-m", "benchmarks.host_step", "--memory"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=100).stdout
    rows = {
        cells[1].strip(): [float(x) for x in cells[2:7]] for x in said.splitlines() if len(cells := x.split("│")) == 8
    }
    assert len(rows) == 6
    for name, (plain, most, stays, at_most, _) in rows.items():
        assert stays - plain <= {"sgd": 4.0, "momentum": 5.0, "adamw": 0.1}[name.split(",")[0]]
        assert at_most - most <= 1.1


def test_models_with_biases_lie_in_several_runs() -> None:
    layers = benchmark("memory").model(8, True, torch.float32)
    assert [type(layer).__name__ for layer in layers] == 8 * ["Linear", "LayerNorm"]
    assert all(parameter.requires_grad for parameter in layers.parameters()) and layers[0].bias is not None


def test_bits_of_messages_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark("message_bits").main(["--numel", "40000", "--steps", "3"])
    told = capsys.readouterr().out
    assert all(part in told for part in ("coordinate", "class, spare", "second value's power", "entropy"))
