"""Expectations on networks of known prices, and the command with made-up links and between two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rich", reason="rich is not installed")

import lightning_sparse_cli as cli
from lightning_sparse.tools import probe
from lightning_sparse.tools.advisor.networks import ring, seconds_of
from lightning_sparse.tools.links import Link, Links
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.profile import GroupCost, Traffic

LATENCY, RATE = 1e-4, 1e9
NETWORK = ring(4, LATENCY, RATE)
BYTES = 0.02
"""Of an all-gather, for each coordinate."""
COMPUTE = 2e-9
TRAFFIC = Traffic("all_gather", 1, Line(0.0, BYTES))
SPARSE = GroupCost(0.01, NOTHING, Line(0.0, COMPUTE), seconds_of(TRAFFIC, NETWORK), (TRAFFIC,))
LINKS = Links(
    tuple(Link(f"node{rank // 2}", f"node{(rank + 1) % 4 // 2}", 2e-4, RATE) for rank in range(4)), NETWORK, SPARSE
)
P = 10_000_000


def step(computation: float, exchange: float, hidden: float) -> float:
    return computation + max(0.0, exchange - hidden)


@pytest.mark.parametrize(
    ("dense", "sparse"), [(1.0, 0.1), (1.0, 0.01), (0.2, 0.15), (3.0, 2.9), (1.0, 1.5), (1.0, 0.0)]
)
def test_sparse_pays_below_the_computation_that_is_told_and_not_above(dense: float, sparse: float) -> None:
    limit = probe.pays_below(dense, sparse)

    def pays(computation: float) -> bool:
        return computation + sparse < 0.95 * step(computation, dense, 2 / 3 * computation)

    assert not pays(limit * 1.01 + 1e-6)
    assert limit == 0 or pays(limit * 0.99)


def test_on_the_measured_network_a_ring_gives_the_times() -> None:
    [one] = probe.expect_on(LINKS, 0.01, [P])
    assert (one.ranks, one.gbit, one.rtt_ms, one.parameters) == (4, None, 0.0, P)
    assert one.dense_seconds == pytest.approx(6 * LATENCY + 2 * 3 / 4 * 32 * P / RATE)
    assert one.half_seconds == pytest.approx(6 * LATENCY + 2 * 3 / 4 * 16 * P / RATE)
    assert one.sparse_seconds == pytest.approx(COMPUTE * P + 3 * LATENCY + 3 * 8 * BYTES * P / RATE)
    assert one.pays_below_seconds == probe.pays_below(one.dense_seconds, one.sparse_seconds)


def test_round_trips_are_added_to_each_hop() -> None:
    near, far = probe.expect_on(LINKS, 0.01, [P], rtt=[40])
    assert far.rtt_ms == 40
    assert far.dense_seconds - near.dense_seconds == pytest.approx(4 * 20e-3)  # 2 log2 n hops
    assert far.sparse_seconds - near.sparse_seconds == pytest.approx(3 * 20e-3)  # of its all-gather


def test_other_rates_and_numbers_of_ranks() -> None:
    found = list(probe.expect_on(LINKS, 0.01, [P], ranks=[8], gbit=[10]))
    assert [(one.ranks, one.gbit) for one in found] == [(4, None), (8, 10)]
    assert found[1].dense_seconds == pytest.approx(6 * LATENCY * 3 / 2 + 2 * 7 / 8 * 32 * P / 10e9)


def test_sentences_say_both_outcomes() -> None:
    slow, fast = probe.Probe(LINKS, 0.01, tuple(probe.expect_on(LINKS, 0.01, [P], gbit=[10_000]))).verdicts()
    assert "sparse pays" in slow
    assert "stay dense" in fast


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"parameters": [0.0]}, "parameters"),
        ({"parameters": [P, 0.5]}, "at least 1, such as 14e6 for 14 million, but got 0.5"),
        ({"parameters": [float("inf")]}, "parameters"),
        ({"rtt": [-1.0]}, "rtt"),
        ({"gbit": [0.0]}, "gbit"),
        ({"ranks": [0]}, "ranks"),
    ],
)
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        list(probe.expect_on(LINKS, 0.01, **{"parameters": [P], **wrong}))


@pytest.mark.parametrize("density", [2.0, 0.0, "1 %"])
def test_a_density_that_cannot_be_is_refused_before_anything_starts(density: Any) -> None:
    with pytest.raises(ValueError, match="density"):
        probe.probe(devices=1, accelerator="cpu", density=density)


@pytest.mark.parametrize("accelerator", ["tpu", "abacus"])
def test_devices_that_this_machine_has_not_are_refused(accelerator: str) -> None:
    with pytest.raises(ValueError, match="Expected an accelerator and devices that this machine has"):
        probe.probe(devices=2, accelerator=accelerator)


def test_many_links_are_told_by_kind() -> None:
    hosts = [rank // 10 for rank in range(20)]
    following = [hosts[(rank + 1) % 20] for rank in range(20)]
    many = tuple(
        Link(f"n{host}", f"n{other}", 1e-3 if host == other else 30e-3, RATE / (1 + rank))
        for rank, (host, other) in enumerate(zip(hosts, following, strict=True))
    )
    table = probe.Probe(LINKS._replace(links=many), 0.01, ()).tables()[0]
    assert [row[2] for row in table.rows] == ["1", "30"]
    assert [row[3] for row in table.rows] == [f"{1 / 19:.3g}", "0.05"]


def test_launchers_are_found_by_what_they_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Fabric:
        device, global_rank = None, 1

        def __init__(self, **keywords: Any) -> None:
            asked.append(keywords)

        def launch(self) -> None:
            pass

    class Package:
        pass

    Package.Fabric = Fabric  # type: ignore[attr-defined]
    monkeypatch.setattr(probe.importlib, "import_module", lambda name: Package)
    monkeypatch.setattr(probe, "measure_links", lambda *_: LINKS)
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    assert probe.probe(accelerator="cpu") is None  # not the first rank
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    probe.probe()
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "6")):
        monkeypatch.setenv(name, value)
    probe.probe()
    probe.probe(devices=3, nodes=1)
    assert [(one["devices"], one["num_nodes"]) for one in asked] == [(2, 1), (4, 2), (2, 3), (3, 1)]


def test_the_command_writes_tables_or_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = probe.Probe(LINKS, 0.01, tuple(probe.expect_on(LINKS, 0.01, [P])))
    monkeypatch.setattr(probe, "probe", lambda *given: found)
    cli.main(["probe", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("node0 to node1", *found.verdicts()))
    assert "node0 to node1" in (tmp_path / "probe.md").read_text()
    cli.main(["probe", "--out", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["links"][1] == {"source": "node0", "target": "node1", "round_trip": 2e-4, "bits_per_second": RATE}
    assert told["expected"][0]["parameters"] == P


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_two_processes_on_this_machine(tmp_path: Path) -> None:
    import subprocess
    import sys

    words = ["probe", "--devices", "2", "--accelerator", "cpu", "--parameters", "1e6", "--json", "--out", str(tmp_path)]
    code = f"import sys, lightning_sparse_cli; lightning_sparse_cli.main({words!r})"
    script = tmp_path / "start.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(told["links"]) == 2
    assert told["expected"][0]["ranks"] == 2
