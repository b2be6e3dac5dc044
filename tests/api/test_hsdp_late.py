"""Sparse HSDP with ``delay=1``: the averages of replicas that FSDP2 shards, one step later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import lightning_sparse as ls
from lightning_sparse.engine.state.sharded import load_sharded, save_sharded
from tests.covering import by_default
from tests.hsdp import SHAPES, Given, backward, batches, engine_of, given, grid, made, part, sharded, weights, whole
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE

OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


# ---- The shift


def averages(shape: tuple[int, int], settings: dict[str, Any], delay: int) -> list[dict[str, Tensor]]:
    """What ``.grad`` holds on this rank after each backward, for gradients that do not depend on weights."""
    mesh = grid(*shape)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, rules=EVERYTHING_SPARSE, delay=delay, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine.bind([optimizer])
    found = []
    for step in range(5):
        optimizer.zero_grad()
        gradients = given(step, dist.get_rank())
        if step == 2 and dist.get_rank() == 1:
            gradients["first"][0, 0] = torch.nan
        model(gradients).backward()
        found.append({name: part(p.grad).clone() for name, p in model.named_parameters()})
        optimizer.step()
    engine.drain()
    engine.close()
    return found


SETTINGS: list[dict[str, Any]] = [{"sparsifier": "top_k"}, {"memory": ls.memories.SecondMoment()}, {"density": 1.0}]


def shifted(shape: tuple[int, int], every: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for settings in every:
        now, late = averages(shape, settings, 0), averages(shape, settings, 1)
        zeros = not any(bool(x.any()) for x in late[0].values())
        same = all(
            torch.equal(one[name], other[name]) or bool(one[name].isnan().all() and other[name].isnan().all())
            for one, other in zip(now, late[1:], strict=False)
            for name in one
        )
        if not zeros or not same:
            wrong.append(f"{settings}: {zeros=} {same=}")
    return wrong


# At density 1, see below.
@pytest.mark.parametrize(
    ("shape", "settings"), by_default([((2, 2), SETTINGS[:2]), ((2, 2), SETTINGS[2:]), ((4, 1), SETTINGS)])
)
def test_averages_are_those_without_a_delay_one_step_later(
    four_ranks: Ranks, shape: tuple[int, int], settings: list[dict[str, Any]]
) -> None:
    assert four_ranks(shifted, shape, settings) == [[]] * 4


def old_gradients(kind: str, each: int, ours: bool) -> list[dict[str, Tensor]]:
    """Weights after each step of training with gradients that are one step old, and after the last of them."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"] if ours else mesh)
    optimizer = OPTIMIZERS[kind](model.parameters())
    engine = engine_of(model, mesh, density=1.0, delay=1) if ours else None
    if engine is not None:
        engine.bind([optimizer])
    before: list[Any] | None = None
    found = []
    for step in batches(3, each):
        optimizer.zero_grad()
        backward(model, step, engine)
        if engine is None:
            now = [p.grad for p in model.parameters()]
            for p, grad in zip(model.parameters(), before or [None] * len(now), strict=True):
                p.grad = grad
            before = now
        optimizer.step()
        found.append(weights(model))
    if engine is None:
        for p, grad in zip(model.parameters(), before or (), strict=True):
            p.grad = grad
        optimizer.step()
    else:
        assert engine.drain()
        assert not engine.drain()
        engine.close()
    return [*found, weights(model)]


@pytest.mark.parametrize(("kind", "each"), by_default([("momentum", 1), ("adamw", 2)]))
def test_density_1_is_native_hsdp_with_old_gradients(four_ranks: Ranks, kind: str, each: int) -> None:
    ours, native = (four_ranks(old_gradients, kind, each, one) for one in (True, False))
    for mine, theirs in zip(ours, native, strict=True):
        for now, then in zip(mine, theirs, strict=True):
            assert all(torch.equal(now[name], then[name]) for name in then)
        assert any(not torch.equal(mine[-1][name], w) for name, w in mine[-2].items())  # the last average


# ---- Checkpoints


def straight_and_resumed(path: Path) -> tuple[list[dict[str, Tensor]], ...]:
    """Weights of the last steps of a run that was saved before them, and of another one that has loaded it."""
    mesh, steps = grid(2, 2), list(batches(6))

    def start() -> tuple[Any, ...]:
        model = sharded(made(), mesh["shard"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = engine_of(model, mesh, delay=1)
        engine.bind([optimizer])
        engine.clip_gradients(1.0)
        return model, engine, optimizer

    def go(run: tuple[Any, ...], steps: list[Any]) -> list[dict[str, Tensor]]:
        model, _, optimizer = run
        seen = []
        for [(x, y)] in steps:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            seen.append(weights(model))
        return seen

    first = model, engine, _ = start()
    go(first, steps[:3])
    save_sharded(engine, path / "residuals", "one")
    kept = [part(p).clone() for p in model.parameters()]
    straight = go(first, steps[3:])
    engine.drain()
    straight.append(weights(model))
    engine.close()
    second = model, engine, _ = start()
    with torch.no_grad():
        for p, values in zip(model.parameters(), kept, strict=True):
            part(p).copy_(values)
    assert not load_sharded(engine, path / "residuals", "one")
    resumed = go(second, steps[3:])
    engine.drain()
    resumed.append(weights(model))
    engine.close()
    return straight, resumed


def test_a_run_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path) -> None:
    for straight, resumed in four_ranks(straight_and_resumed, tmp_path):
        assert len(straight) == len(resumed) == 4
        for one, other in zip(straight, resumed, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def save_some(path: Path) -> dict[str, Tensor]:
    """The mean of all that replicas of 2 x 2 have absorbed, without what is in the weights."""
    mesh = grid(2, 2)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(model, mesh, sparsifier="top_k", rules=EVERYTHING_SPARSE, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.bind([optimizer])
    for step in range(6):
        optimizer.zero_grad()
        model(given(step, dist.get_rank())).backward()
        optimizer.step()
    save_sharded(engine, path, "six")
    left = {
        f"{name}.weight": sum(given(step, rank)[name] for step in range(6) for rank in range(4)) / 4 for name in SHAPES
    }
    found = {name: left[name] + w for name, w in weights(model).items()}
    engine.drain()
    engine.close()
    return found


def load_some(path: Path, replicas: int, ranks: int, delay: int) -> dict[str, Tensor]:
    """What replicas would still apply: averages that are late, and the mean of residuals; as whole parameters."""
    mesh = grid(replicas, ranks)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    settings: dict[str, Any] = {"single_device": "sparse", "delay": delay}
    engine = engine_of(model, mesh, sparsifier="top_k", rules=EVERYTHING_SPARSE, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine.bind([optimizer])
    assert not load_sharded(engine, path, "six")
    engine.drain()
    drained = weights(model)
    means = {name: whole(pending) for name, pending in engine._take_pending().items()}
    engine.close()
    return {name: mean - drained[name] for name, mean in means.items()}


@pytest.mark.parametrize(("shape", "delay"), by_default([((2, 2), 0), ((2, 2), 1), ((1, 4), 0), ((4, 1), 1)]))
def test_nothing_is_lost_with_other_numbers_of_ranks(
    four_ranks: Ranks, tmp_path: Path, shape: tuple[int, int], delay: int
) -> None:
    [left, *_] = four_ranks(save_some, tmp_path)
    for found in four_ranks(load_some, tmp_path, *shape, delay):
        for name, mean in left.items():
            assert mean.any()
            assert torch.equal(found[name], mean)


# ---- Refusals


def twice() -> str:
    """Two backwards, and no step between them."""
    mesh = grid(2, 2)
    model = sharded(made(), mesh["shard"])
    engine = engine_of(model, mesh, density=1.0, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.bind([optimizer])
    try:
        for number, [(x, y)] in enumerate(batches(4)):
            mse_loss(model(x), y).backward()
            if number < 2:
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_a_gradient_on_top_of_an_average_is_an_error(four_ranks: Ranks) -> None:
    for told in four_ranks(twice):
        assert "first.weight" in told and "no_sync" in told


def inline() -> str:
    mesh = grid(2, 2)
    try:
        engine_of(sharded(made(), mesh["shard"]), mesh, delay=1, executor="inline").close()
    except ValueError as error:
        return str(error)
    return ""


def test_the_inline_executor_is_refused(four_ranks: Ranks) -> None:
    assert all("inline" in told for told in four_ranks(inline))
