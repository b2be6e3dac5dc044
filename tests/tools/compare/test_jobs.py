"""Many trainings."""

from __future__ import annotations

import math
import multiprocessing
import os
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch

from lightning_sparse.tools.compare import tasks, training
from lightning_sparse.tools.compare.methods import choose
from lightning_sparse.tools.compare.training import CurvePoint, Job, execute, execute_all, plan


@pytest.fixture
def small_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "digits", partial(tasks.digits, width=2))


def test_a_plan_has_dense_once_for_each_task_and_seed() -> None:
    jobs = plan(
        tasks=["digits"],
        ranks=[2],
        densities=[0.1, 0.01, 0.1],
        methods=["top_k", "dense"],
        seeds=[1, 0],
        steps=9,
        every=4,
    )
    each = [(1.0, "dense"), (0.1, "top_k"), (0.01, "top_k")]
    assert [(job.seed, job.density, job.method) for job in jobs] == [(seed, *one) for seed in (1, 0) for one in each]
    assert {(job.ranks, job.steps, job.every, job.text) for job in jobs} == {(2, 9, 4, None)}


def test_without_names_all_methods_are_planned() -> None:
    jobs = plan(tasks=["digits"], ranks=[2], densities=[0.1], methods=None, seeds=[0], steps=9)
    assert [job.method for job in jobs] == ["dense", *(method.name for method in choose(None))]


GOOD = {"tasks": ["digits"], "ranks": [2], "densities": [0.1], "methods": ["top_k"], "seeds": [0], "steps": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tasks": ["digit", "heavy_tail"]},
            r"Unknown task 'digit'\. Did you mean 'digits'\? Known names: digits, text",
        ),
        ({"ranks": []}, r"Expected at least one of ranks, but got none\."),
        ({"methods": ["tpok"]}, r"Unknown sparsifier 'tpok'\. Did you mean 'top_k'"),
        ({"ranks": [1]}, r"Expected ranks to be at least 2, but got 1\."),
        ({"ranks": [1000]}, r"Expected at least 16000 examples to train on"),
        ({"steps": 0}, r"Expected steps to be at least 1, but got 0\."),
        ({"every": 0}, r"Expected every to be at least 1, but got 0\."),
        ({"densities": [0.0]}, r"Expected density to be a number in \(0, 1\]"),
        ({"tasks": []}, r"Expected at least one of tasks, but got none\."),
        ({"text": "no/such/file"}, r"Expected text to be a file in UTF-8, but got no/such/file: No such file"),
    ],
)
def test_impossible_plans_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**(GOOD | settings))


@pytest.mark.usefixtures("small_digits")
def test_a_result_is_the_end_of_its_curve() -> None:
    job = Job("digits", 2, 0.05, "top_k", 3, 6, every=4)
    result, points = execute(job)
    assert result.key == job.key
    assert [point.step for point in points] == [4, 6]
    assert {point[:6] for point in points} == {job.key}
    assert (result.megabytes, result.loss, result.quality) == points[-1][-3:]
    numel = tasks.make("digits", ranks=2).numel
    assert result.given_density == choose(["top_k"])[0].equal_density(0.05, 2, numel)
    assert result.quality_name == "accuracy"
    assert execute(job) == (result, points)
    other, _ = execute(job._replace(seed=4))
    assert other.loss != result.loss


def test_the_label_of_a_text_is_part_of_the_key() -> None:
    job = Job("text", 2, 0.05, "top_k", 0, 6, 4, text="some/wiki.txt")
    assert job.key == ("text:wiki", 2, 0.05, "top_k", 0, 6)


def test_a_memory_with_momentum_gets_an_optimizer_without(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def train(task: tasks.Task, method: object, *_: object, **__: object) -> None:
        seen[method.name] = task.optimizer.param_groups[0]["momentum"]  # type: ignore[attr-defined]
        raise FloatingPointError

    monkeypatch.setattr(training, "train", train)
    for method in choose(["top_k", "dgc", "union_top_k", "union_top_k+momentum", "dense"]):
        execute(Job("digits", 2, 0.05, method.name, 0, 6, every=4))
    assert seen == {"top_k": 0.9, "dgc": 0.0, "union_top_k": 0.9, "union_top_k+momentum": 0.0, "dense": 0.9}


def test_a_run_that_diverges_is_a_result_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    explosive = partial(tasks.digits, width=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    monkeypatch.setitem(tasks.TASKS, "digits", explosive)
    result, points = execute(Job("digits", 2, 0.1, "top_k", 0, 10, every=1))
    assert points == []
    assert result.key == ("digits", 2, 0.1, "top_k", 0, 10)
    assert result.given_density == choose(["top_k"])[0].equal_density(0.1, 2, tasks.make("digits", ranks=2).numel)
    assert all(math.isnan(x) for x in (result.actual_density, result.megabytes, result.loss, result.quality))


@pytest.mark.usefixtures("small_digits")
def test_one_process_gives_its_threads_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        jobs = [Job("digits", 2, 0.1, name, 0, 2, every=1) for name in ("top_k", "micro")]
        seen = [(result.method, torch.get_num_threads()) for result, _ in execute_all(jobs, 1)]
        assert seen == [("top_k", 1), ("micro", 1)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_at_least_one_process_is_needed() -> None:
    with pytest.raises(ValueError, match="at least 1 process, but got 0"):
        next(execute_all([], 0))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("warm_spawn")
def test_two_processes_find_what_one_finds() -> None:
    jobs = [Job("text", 2, 0.01, name, seed, 3, every=2) for name in ("top_k", "micro") for seed in (0, 1)]

    def by_key(processes: int) -> dict:
        return {result.key: (result, points) for result, points in execute_all(jobs, processes)}

    one, two = by_key(1), by_key(2)
    assert len(one) == 4
    assert one == two
    assert all(isinstance(point, CurvePoint) for _, points in two.values() for point in points)


@pytest.mark.usefixtures("warm_spawn")
def test_trainings_end_with_whoever_waits_for_them() -> None:
    short, *long = [Job("digits", 2, 1.0, "dense", seed, steps) for seed, steps in enumerate((1, 10**6, 10**6))]
    before = set(multiprocessing.active_children())
    found = execute_all([short, *long], 2)
    next(found)
    workers = set(multiprocessing.active_children()) - before
    found.close()  # as after Ctrl-C
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)


def begin_a_training(alive: Connection) -> None:
    heard, said = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("spawn").Process(target=train_on, args=(said, alive)).start()
    assert heard.recv() == "begun"
    os._exit(0)  # without a word to its processes, as when it is killed


def train_on(said: Connection, alive: Connection) -> None:
    training.serve()
    said.send("begun")
    execute(Job("digits", 2, 1.0, "dense", 0, 10**6))


@pytest.mark.thorough
@pytest.mark.usefixtures("warm_spawn")
def test_a_training_ends_with_the_process_that_wants_it() -> None:
    heard, alive = multiprocessing.Pipe(duplex=False)
    parent = multiprocessing.get_context("spawn").Process(target=begin_a_training, args=(alive,))
    parent.start()
    alive.close()
    parent.join()
    assert heard.poll(10)  # the training had the other end
    with pytest.raises(EOFError):
        heard.recv()
