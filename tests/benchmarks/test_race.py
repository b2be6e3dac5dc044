"""The race searches until the best rate has worse neighbours, keeps what is finished, and goes on where it stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.race import plan, replay, runner
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.counted import Hops
from benchmarks.race.methods.base import Rate
from benchmarks.race.plan import Entry, chosen_entries, fresh, searched, wanted
from benchmarks.race.results import Results
from benchmarks.race.run import Run, Simulation, take
from benchmarks.race.tasks import TASKS
from lightning_sparse.core.messages import AllGather, AllReduce, Meter, Steps
from lightning_sparse.engine.drivers import drive_ranks
from tests.benchmarks import small
from tests.benchmarks.small import ALL, load
from tests.covering import by_default, covering
from tests.static_path import static_path


@pytest.fixture(autouse=True)
def known_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "small", small.SMALL)


def known(results: Results, run: Run, loss: float | None) -> None:
    """As if it had been trained."""
    results.add({"key": run.key, "run": run.described(), "curve": [[25, 1.0, 0.1, loss]], "processor": "a"})


def kind(name: str) -> tuple[str]:
    """The configuration without the number at its end."""
    return (name.rstrip("0123456789"),)


@pytest.mark.parametrize("name", by_default(covering([(name,) for name in ALL], together=1, seen_as=kind), 6))
def test_a_training_goes_on_where_it_was_interrupted(name: str, tmp_path: Path) -> None:
    rate = 1.0 if name == "soap-today" else 4.0  # SOAP's bases hardly fit sparse averages
    run, loaded = Run("small", name, rate), load(Path())
    whole = Simulation(run, loaded)
    assert whole.train(lambda: False, None)
    first = Simulation(run, loaded)
    assert not first.train(lambda: first.done == 11, tmp_path / "state.pt")
    second = Simulation(run, loaded)
    second.load(torch.load(tmp_path / "state.pt", weights_only=False))
    assert second.train(lambda: False, None)
    assert second.curve == whole.curve
    assert [point[0] for point in whole.curve] == [5, 10, 15, 20, 25]
    assert whole.curve[-1][-1] < whole.curve[0][-1] < math.log(60)
    for rank in whole.ranks[1:]:
        for own, other in zip(rank.method.shared(), whole.ranks[0].method.shared(), strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("name", ["averaging-10", "dense", "demo"])
def test_repeated_steps_go_on_from_where_the_one_before_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA graphs, whose recorded steps read and write the same tensors each time."""
    monkeypatch.setattr(replay, "CYCLE", 10)
    run, loaded = Run("small", name, 4.0), load(Path())
    plain, repeated = Simulation(run, loaded), Simulation(run, loaded)
    numbers: list[int] = []

    def step(number: int, rate: Rate, batches: replay.Batches) -> list[Tensor]:
        assert isinstance(rate, Tensor)
        numbers.append(number)
        return take(repeated.ranks, number, float(rate), batches)

    methods = [rank.method for rank in repeated.ranks]
    repeated._step = replay.Replay(step, methods, 25, record=lambda once: once)
    with static_path():  # shapes that do not depend on data, as on CUDA
        assert plain.train(lambda: False, None) and repeated.train(lambda: False, None)
    assert numbers == [*range(20), *range(10, 14), 24]
    for (*counted, loss), (*others, other) in zip(repeated.curve, plain.curve, strict=True):
        assert counted == others
        # Rates are float32 here; steps after 20 take turns of steps before.
        assert loss == pytest.approx(other, abs=1e-4 if counted[0] <= 20 else 0.02)


def test_steps_that_make_the_host_wait_are_not_repeated() -> None:
    run, loaded = Run("small", "chunked-300", 4.0), load(Path())
    plain, taken = Simulation(run, loaded), Simulation(run, loaded)
    methods = [rank.method for rank in taken.ranks]
    assert all(method.waits for method in methods)
    numbers: list[int] = []

    def step(number: int, rate: Rate, batches: replay.Batches) -> list[Tensor]:
        numbers.append(number)
        return take(taken.ranks, number, float(rate), batches)

    taken._step = replay.Replay(step, methods, 25, record=None)
    assert plain.train(lambda: False, None) and taken.train(lambda: False, None)
    assert numbers == list(range(25))
    assert taken.curve[-1][-1] == pytest.approx(plain.curve[-1][-1], abs=1e-3)


def test_sums_take_twice_as_many_hops_as_gathers() -> None:
    def steps() -> Steps[None]:
        yield AllReduce(torch.ones(8))
        yield AllGather(torch.ones(2))

    hops, plain = Hops(4), Meter(4)
    drive_ranks([hops.watch(steps()), plain.watch(steps()), steps(), steps()])
    assert hops.hops == 2 * 3 + 3
    assert hops.bytes_sent == plain.bytes_sent > 0


def test_a_training_that_diverges_ends() -> None:
    simulation = Simulation(Run("small", "dense", 1e38), load(Path()))
    assert simulation.train(lambda: False, None)
    assert simulation.done < 25
    assert simulation.curve[-1][-1] == math.inf


def test_keys_tell_apart_what_decides_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        Run("small", "dense", 1.0),
        Run("small", "ours", 1.0),
        Run("small", "dense", 2.0),
        Run("small", "dense", 1.0, seed=1),
        Run("small", "diloco-30", 1.0),
        Run("small", "diloco-30", 1.0, outer=(("outer", 0.35),)),
    ]
    assert len({run.key for run in runs}) == len(runs)
    before = runs[0].key
    assert Run("small", "dense", 1.0).key == before
    small.small_task(version=2)
    assert runs[0].key != before


@pytest.mark.parametrize("best", [0.25, 1.0, 8.0])
def test_rates_are_searched_until_the_best_has_worse_neighbours(tmp_path: Path, best: float) -> None:
    results, entry, count = Results(tmp_path), Entry("small", "dense", 1.0), 0
    while not (search := searched(entry, results)).best:
        for run in search.missing:
            known(results, run, 3.0 + abs(math.log2(run.rate / best)))
            count += 1
    assert search.best.rate == best
    assert count <= 6
    assert all(results.of(Run("small", "dense", best * factor)) for factor in (0.5, 2.0))
    assert [run.seed for run in fresh(entry, search.best)] == [1, 2, 3]


def test_a_diverged_training_is_worse_than_all_others(tmp_path: Path) -> None:
    results, entry = Results(tmp_path), Entry("small", "dense", 1.0)
    for rate, loss in ((1.0, 4.0), (2.0, None), (0.5, 5.0)):
        known(results, Run("small", "dense", rate), loss)
    assert searched(entry, results).best == Run("small", "dense", 1.0)


def test_outer_settings_are_searched_at_the_best_rate_and_rates_once_more(tmp_path: Path) -> None:
    results, entry = Results(tmp_path), Entry("small", "diloco-30", 2.0)
    rounds = 0
    while not (search := searched(entry, results)).best:
        rounds += 1
        for run in search.missing:
            settings = run.settings
            optimum = 4.0 if settings["momentum"] == 0.6 else 2.0  # another momentum wants another rate
            distance = abs(math.log2(run.rate / optimum)) + abs(settings["outer"] - 0.7)
            known(results, run, 3.0 + distance + (0.0 if settings["momentum"] == 0.6 else 2.0))
    assert rounds > 2
    assert search.best.rate == 4.0
    assert search.best.settings == {"every": 30, "outer": 0.7, "momentum": 0.6}
    tried = {json.dumps(line["run"]["settings"]) for line in results.known.values()}
    size = math.prod(len(values) for values in CONFIGURATIONS["diloco-30"].outer.values())
    assert len(tried) == size


def test_what_is_known_is_not_wanted_and_long_ones_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ENTRIES", [Entry("lstm-600", "ours", 8.0), Entry("lstm-3000", "ours", 4.0)])
    results = Results(tmp_path)
    every = wanted(results, chosen_entries())
    assert [run.task for run in every] == ["lstm-3000"] * 3 + ["lstm-600"] * 3
    known(results, every[0], 4.0)
    assert wanted(results, chosen_entries()) == every[1:]
    assert wanted(results, chosen_entries(["lstm-600"])) == every[3:]
    assert wanted(Results(tmp_path), chosen_entries()) == every[1:], "from the file"


def test_what_fits_is_trained_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, scratch = Run("small", "ours", 2.0), tmp_path / "scratch"
    assert runner.train(run, Path(), scratch, deadline=0.0) is None
    assert [path.name for path in scratch.iterdir()] == [f"{run.key}.pt"]
    line = runner.train(run, Path(), scratch, deadline=math.inf)
    assert line is not None and not list(scratch.iterdir())
    assert line.keys() == {"key", "run", "curve", "seconds", "commit", "torch", "processor"}
    results = Results(tmp_path / "results")
    results.add(line)
    assert json.loads((tmp_path / "results" / "race-small.jsonl").read_text()) == line
    assert Results(tmp_path / "results").loss(run) == line["curve"][-1][-1]
    assert line["run"]["settings"] == {"density": 0.01} and line["run"]["method"] == ["ours", 2]


def test_processors_are_not_mixed(tmp_path: Path) -> None:
    results, run = Results(tmp_path), Run("small", "dense", 1.0)
    known(results, run, 4.0)
    results.add({"key": Run("small", "dense", 2.0).key, "run": run.described(), "curve": [], "processor": "b"})
    results.add({"key": Run("small", "dense", 4.0).key, "run": run.described(), "curve": [], "processor": "a"})
    assert len(Results(tmp_path).known) == 2, "most are of a"
    assert list(Results(tmp_path, on="b").known) == [Run("small", "dense", 2.0).key]
    assert not Results(tmp_path, on="c").known
    other = Run("shift-300", "dense", 1.0)
    results.add({"key": other.key, "run": other.described(), "curve": [[25, 1.0, 0.1, 5.0]], "processor": "c"})
    assert other.key in Results(tmp_path).known, "each task by itself"
