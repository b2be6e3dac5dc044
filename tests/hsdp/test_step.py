"""Sharded replicas exchange when optimizers step: what users do between backward and step counts."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.optim import SGD

import lightning_sparse as ls
from tests.covering import by_default
from tests.hsdp.model import (
    SHAPES,
    Given,
    batches,
    engine_of,
    given,
    grid,
    made,
    part,
    sharded,
    weights,
    whole,
)
from tests.ranks import Ranks, error_of
from tests.static_path import static_path

WITHIN = 10.0
"""Seconds in which all ranks have to end."""


def mean_of(steps: Any, name: str) -> Tensor:
    """The sum over steps of the mean over all ranks."""
    return sum(given(step, rank)[name] for step in steps for rank in range(4)) / 4  # type: ignore[return-value]


def new(density: float, **settings: Any) -> tuple[Any, ls.Engine, SGD]:
    """A model whose weights are minus the sum of its averages."""
    mesh = grid(2, 2)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    rules = ls.Rules(dense_ndim=0, dense_numel=0)
    engine = engine_of(model, mesh, density=density, sparsifier="top_k", rules=rules, **settings)
    return model, engine, SGD(model.parameters(), lr=1.0)


# ---- Micro-batches


def accumulated(how: str, density: float) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Weights after three steps of three micro-batches each, after a flush, and the steps that were counted."""
    model, engine, optimizer = new(density)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            if how == "replicas apart":
                model.set_requires_all_reduce(micro == 2)
            elif how == "not reduced":
                model.set_requires_gradient_sync(micro == 2)
            model(given(3 * step + micro, dist.get_rank())).backward()
        optimizer.step()
    sparse, steps = weights(model), engine.step
    ls.flush(engine, [optimizer])
    return sparse, weights(model), steps


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_micro_batches_count_once_synchronised_or_not(four_ranks: Ranks, density: float) -> None:
    """Sums of these integers are exact, at density 1 also those of means of sums."""
    ways = [four_ranks(accumulated, how, density) for how in ("all reduced", "replicas apart", "not reduced")]
    expected, _, _ = ways[0][0]
    for sparse, flushed, steps in (found for way in ways for found in way):
        assert steps == 3
        for name in SHAPES:
            assert torch.equal(sparse[f"{name}.weight"], expected[f"{name}.weight"])
            assert torch.equal(flushed[f"{name}.weight"], -mean_of(range(9), name))
            assert density < 1 or torch.equal(sparse[f"{name}.weight"], -mean_of(range(9), name))


# ---- Between backward and step


def discarded(kind: str, throw_away: bool) -> tuple[Tensor, Tensor]:
    """Weights after a large gradient that is thrown away, and after 10 steps with gradients of zero."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    engine_of(model, mesh)
    every = model.parameters()
    optimizer = torch.optim.AdamW(every, lr=0.01) if kind == "adamw" else SGD(every, lr=0.1, momentum=0.9)
    flat = lambda: torch.cat([w.flatten() for w in weights(model).values()])  # noqa: E731
    [[(x, y)]] = batches(1)
    if throw_away:
        (1000 * mse_loss(model(x), y)).backward()
    before = flat()
    for _ in range(10):
        optimizer.zero_grad()
        (0 * mse_loss(model(x), y)).backward()
        optimizer.step()
    return before, flat()


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_gradient_that_is_thrown_away_moves_nothing(four_ranks: Ranks, kind: str) -> None:
    without = four_ranks(discarded, kind, False)
    for (before, after), (_, expected) in zip(four_ranks(discarded, kind, True), without, strict=True):
        assert torch.equal(after, expected)
        assert kind == "adamw" or torch.equal(after, before)


def two_optimizers(density: float, bad: bool) -> tuple[dict[str, Tensor], int, int, list[list[int]]]:
    """Weights after steps of two optimizers, of which one holds a parameter that only one rank of a replica has."""
    logged = []
    model, engine, _ = new(density)
    few = [p for name, p in model.named_parameters() if name == "few.weight"]
    rest = [p for name, p in model.named_parameters() if name != "few.weight"]
    optimizers = [SGD(few, lr=1.0), SGD(rest, lr=1.0)]
    for step in range(4):
        gradients = given(step, dist.get_rank())
        if bad and step == 2 and dist.get_rank() == 3:
            gradients["few"][0, 0] = math.nan
        model(gradients).backward()
        for optimizer in optimizers[:: -1 if step % 2 else 1]:
            optimizer.step()
            optimizer.zero_grad()
            logged.append([len(engine.summary()), *map(len, engine._group_summaries().values())])
    ls.flush(engine, optimizers)
    return weights(model), engine.step, engine.skipped_steps, logged


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("density", [0.05, 1.0])
@pytest.mark.parametrize("bad", [False, True])
def test_two_optimizers_over_one_sharded_model_lose_nothing(four_ranks: Ranks, density: float, bad: bool) -> None:
    of_ranks = four_ranks(two_optimizers, density, bad)
    for found, steps, skipped, logged in of_ranks:
        assert (steps, skipped, logged) == of_ranks[0][1:] and (skipped > 0) == bad
        for name in SHAPES:  # as with one optimizer for each, the other one takes its step
            taken = [0, 1, 3] if bad and name == "few" else range(4)
            assert torch.equal(found[f"{name}.weight"], -mean_of(taken, name))


def overflowing(density: float) -> tuple[int, int, bool]:
    """Steps that counted, those that were skipped, and whether weights are finite, on the path of a device."""
    with static_path():
        model, engine, optimizer = new(density)
        for step in range(4):
            optimizer.zero_grad()
            model(given(step, dist.get_rank())).backward()
            if step == 1 and dist.get_rank() % 2:  # one part of each replica
                for p in model.parameters():
                    part(p.grad).fill_(3e38)  # finite on each rank, and the sum is not
            optimizer.step()
        return engine.step, engine.skipped_steps, all(bool(w.isfinite().all()) for w in weights(model).values())


def test_parts_whose_sum_overflows_skip_one_step_everywhere(four_ranks: Ranks) -> None:
    assert four_ranks(overflowing, 0.05) == [(3, 1, True)] * 4


def scaled(kind: str, density: float, unscales: bool) -> tuple[int, int, float, list[Tensor]]:
    """With a `GradScaler`, and a loss that is not finite on one rank."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    engine = engine_of(model, mesh, density=density)
    every = model.parameters()
    optimizer: Any = {"sgd": SGD(every, lr=0.1, momentum=0.9)}.get(kind) or torch.optim.AdamW(
        model.parameters(), lr=0.01, fused=kind == "fused"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for number, [(x, y)] in enumerate(batches(5)):
        loss = mse_loss(model(x), y) * (math.inf if number == 3 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            engine.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return engine.step, engine.skipped_steps, scaler.get_scale(), list(weights(model).values())


@pytest.mark.parametrize(
    ("kind", "density", "unscales"),
    by_default([("sgd", 0.05, True), ("fused", 0.05, False), ("adamw", 1.0, True), ("adamw", 0.05, False)], 3),
)
def test_a_scaler_finds_the_same_on_all_parts(four_ranks: Ranks, kind: str, density: float, unscales: bool) -> None:
    of_ranks = four_ranks(scaled, kind, density, unscales)
    for steps, skipped, scale, found in of_ranks:
        assert (steps, skipped, scale) == (4, 1, 32.0)
        assert all(w.isfinite().all() and torch.equal(w, first) for w, first in zip(found, of_ranks[0][3], strict=True))


def unused_on_one_replica(density: float) -> list[dict[str, Tensor]]:
    """Weights after steps in which one replica leaves out a parameter."""
    model, engine, optimizer = new(density)
    for step in range(3):
        gradients = given(step, dist.get_rank())
        if dist.get_rank() >= 2:
            del gradients["third"]
        model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
    ls.flush(engine, [optimizer])
    return [weights(model)]


@pytest.mark.parametrize("density", [0.05, 1.0])
def test_a_parameter_that_one_replica_leaves_out_counts_as_zeros(four_ranks: Ranks, density: float) -> None:
    for [found] in four_ranks(unused_on_one_replica, density):
        for name in SHAPES:
            ranks = range(2) if name == "third" else range(4)
            expected = -sum(given(step, rank)[name] for step in range(3) for rank in ranks) / 4
            assert torch.equal(found[f"{name}.weight"], expected)


def paused() -> tuple[bool, bool, int, dict[str, Tensor]]:
    """What a backward within `engine.paused()` leaves alone, and steps that follow it."""
    model, engine, optimizer = new(0.05)
    with engine.paused():
        model(given(0, dist.get_rank())).backward()
        mine = whole(model.get_submodule("first").weight.grad)
    replica = sum(given(0, rank)["first"] for rank in ((0, 1) if dist.get_rank() < 2 else (2, 3))) / 2
    optimizer.step()
    stepped = torch.equal(weights(model)["first.weight"], -replica)
    backwards = engine.step
    for p in model.parameters():  # what somebody else would have averaged
        part(p).zero_()
    optimizer.zero_grad()
    model(given(1, dist.get_rank())).backward()
    optimizer.step()
    ls.flush(engine, [optimizer])
    return torch.equal(mine, replica), stepped, backwards, weights(model)


def test_backwards_that_are_paused_are_left_to_the_user(four_ranks: Ranks) -> None:
    for mine, stepped, backwards, found in four_ranks(paused):
        assert mine and stepped and backwards == 0
        assert all(torch.equal(found[f"{name}.weight"], -mean_of([1], name)) for name in SHAPES)


# ---- Ranks that do different things


def alone(who: str) -> tuple[str, float]:
    """One replica, or one rank, skips its step."""
    model, _, optimizer = new(0.05, timeout=timedelta(seconds=60))
    odd = dist.get_rank() >= 2 if who == "replica" else dist.get_rank() == 3

    def steps() -> None:
        for step in range(4):
            model(given(step, dist.get_rank())).backward()
            if not (odd and step == 2):
                optimizer.step()
            optimizer.zero_grad()

    begin = time.monotonic()
    return error_of(steps), time.monotonic() - begin


@pytest.mark.parametrize("who", ["replica", "rank"])
def test_a_step_that_some_skip_ends_on_all_ranks_with_a_sentence(who: str) -> None:
    """FSDP would let a rank wait for its neighbour in the next forward, which comes to no end in its step."""
    with Ranks(4) as ranks:
        for rank, (said, seconds) in enumerate(ranks(alone, who)):
            drifted = who == "replica" or rank >= 2
            assert said.startswith("RuntimeError: The ranks have drifted apart" if drifted else "LostRankError"), said
            assert seconds < WITHIN
            assert who == "replica" or not drifted or "rank 3 begins a forward" in said


# ---- Signals


def signalled(folder: str) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
    """Rank 0 is late: the others save in a handler while they wait in the exchange, and it does before its step."""
    model, engine, optimizer = new(0.05)
    saved: list[Any] = []

    def handle(*_: Any) -> None:
        state = engine.state_dict()
        saved.append((state["step"], sorted(state["pending"]), weights(model)))
        ls.save_sharded(engine, folder)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for step in range(3):
            optimizer.zero_grad()
            model(given(step, dist.get_rank())).backward()
            if step == 1:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                while dist.get_rank() == 0 and not saved:
                    time.sleep(0.01)
            optimizer.step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    found = weights(model)
    engine.close()
    model, engine, optimizer = new(0.05)
    ls.load_sharded(engine, folder)
    return saved, found, {name: whole(x) for name, x in engine._take_pending().items()}


def test_states_of_handlers_hold_all_that_was_given(four_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = four_ranks(signalled, str(tmp_path / "saved"))
    for saved, found, pending in of_ranks:
        [(_, waiting, then)] = saved
        assert not waiting
        for name in SHAPES:
            assert torch.equal(found[f"{name}.weight"], of_ranks[0][1][f"{name}.weight"])
            total = pending[f"{name}.weight"] - then[f"{name}.weight"]
            # Rank 0 and maybe others have not absorbed the second gradient, which is lost with the process.
            without = mean_of([0], name)
            extra = total - without
            replicas = [sum(given(1, rank)[name] for rank in pair) / 4 for pair in ((0, 1), (2, 3))]
            assert any(torch.equal(extra, x) for x in _possible(replicas, name))


def _possible(replicas: list[Tensor], name: str) -> list[Tensor]:
    """Sums of parts of the second gradient that ranks may have absorbed."""
    rows = -(-SHAPES[name][0] // 2)
    parts = []
    for x in replicas:
        for rows_of in (slice(0, rows), slice(rows, None)):
            one = torch.zeros_like(x)
            one[rows_of] = x[rows_of]
            parts.append(one)
    return [
        sum((p for number, p in enumerate(parts) if mask >> number & 1), torch.zeros_like(parts[0]))
        for mask in range(16)
    ]
