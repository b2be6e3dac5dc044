"""What engines of shards remember, saved and loaded by any number of replicas and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import lightning_sparse as ls
from lightning_sparse.engine.state.sharded import load_sharded, save_sharded
from tests.covering import by_default
from tests.hsdp import SHAPES, Given, batches, engine_of, given, grid, made, sharded, summing, weights, whole
from tests.ranks import Ranks

# ---- Resumed with as many replicas and ranks: bit for bit


def straight_and_resumed(path: Path, kind: str, unapplied: bool, delay: int) -> tuple[list[dict[str, Tensor]], ...]:
    """Weights after each of the last steps of a run, and of one that was saved before them and loaded elsewhere."""
    mesh = grid(2, 2)
    steps = list(batches(6))
    kinds: dict[str, Any] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }

    def start(seed: int) -> tuple[Any, ...]:
        model = sharded(made(seed=seed), mesh["shard"])
        engine, optimizer = engine_of(model, mesh, delay=delay), kinds[kind](model.parameters())
        engine.bind([optimizer])
        engine.clip_gradients(1.0)
        return model, engine, optimizer

    def go(run: tuple[Any, ...], steps: list[Any]) -> list[dict[str, Tensor]]:
        model, _, optimizer = run
        seen = []
        for [(x, y)] in steps:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weights(model))
        return seen

    first = start(0)
    go(first, steps[:3])
    if unapplied:  # the average of this backward is lost with the process
        model, engine, _ = first
        [(x, y)] = steps[3]
        mse_loss(model(x), y).backward()
    model, engine, optimizer = first
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(states, checkpoint_id=path / "weights")
    save_sharded(engine, path / "residuals", "one")
    optimizer.zero_grad()
    if unapplied:
        engine.load_state_dict(engine.state_dict())  # gives the average back, as a resumed run has it
    straight = go(first, steps[4:])
    engine.drain()
    engine.close()

    second = model, engine, optimizer = start(1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))  # steps with zeros
    load(states, checkpoint_id=path / "weights")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    notes = load_sharded(engine, path / "residuals", "one")
    assert not notes, notes
    resumed = go(second, steps[4:])
    engine.drain()
    engine.close()
    return straight, resumed


@pytest.mark.parametrize(
    ("kind", "unapplied", "delay"),
    by_default(
        [
            ("momentum", False, 0),
            ("adamw", True, 0),
            ("adamw", False, 1),
            pytest.param("momentum", True, 0, marks=pytest.mark.thorough),
            pytest.param("adamw", False, 0, marks=pytest.mark.thorough),
            pytest.param("adamw", True, 1, marks=pytest.mark.thorough),
            pytest.param("momentum", False, 1, marks=pytest.mark.thorough),
        ],
        2,
    ),
)
def test_a_run_is_resumed_bit_for_bit(
    four_ranks: Ranks, tmp_path: Path, kind: str, unapplied: bool, delay: int
) -> None:
    for straight, resumed in four_ranks(straight_and_resumed, tmp_path, kind, unapplied, delay):
        for one, other in zip(straight, resumed, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


# ---- Resumed with other numbers


def save_some(path: Path) -> dict[str, Tensor]:
    """Sum of all that replicas of 2 x 2 have absorbed and not applied, with the weights."""
    mesh = grid(2, 2)
    model, engine, optimizer = summing(mesh)
    for step in range(6):
        model(given(step, dist.get_rank())).backward()
        if step < 5:  # the last average waits in .grad
            optimizer.step()
            optimizer.zero_grad()
    save_sharded(engine, path, "six")
    absorbed = {
        f"{name}.weight": sum(given(step, rank)[name] for step in range(6) for rank in range(4)) / 4 for name in SHAPES
    }
    found = {name: absorbed[name] + w for name, w in weights(model).items()}
    engine.close()
    return found


@pytest.fixture(scope="module")
def six(four_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Where replicas of 2 x 2 have saved theirs, and what rank 0 has found then."""
    path = tmp_path_factory.mktemp("six")
    return path, four_ranks(save_some, path)[0]


def load_some(path: Path, replicas: int, ranks: int, resize: str = "merge") -> dict[str, Any]:
    """The mean of what replicas remember, as whole parameters, and the notes."""
    mesh = grid(replicas, ranks)
    model = fully_shard(Given(SHAPES), mesh=mesh["shard"])
    engine = engine_of(
        model, mesh, sparsifier="top_k", rules=ls.Rules(dense_ndim=0, dense_numel=0), single_device="sparse"
    )
    engine.bind([torch.optim.SGD(model.parameters(), lr=1.0)])
    notes = load_sharded(engine, path, "six", resize)
    means = {}
    for name, pending in engine._take_pending().items():
        means[name] = whole(pending)
    found = {"means": means, "notes": notes, "step": engine.step}
    engine.close()
    return found


@pytest.mark.parametrize("shape", by_default([((2, 2),), ((1, 4),), ((4, 1),)]))
def test_what_waits_is_the_same_for_other_numbers_of_ranks(
    four_ranks: Ranks, six: tuple[Path, dict[str, Tensor]], shape: tuple[int, int]
) -> None:
    path, waits = six
    for found in four_ranks(load_some, path, *shape):
        assert found["step"] == 6
        for name, mean in waits.items():
            assert mean.any()
            assert torch.equal(found["means"][name], mean)


def test_residuals_are_dropped_where_that_is_asked_for(four_ranks: Ranks, six: tuple[Path, Any]) -> None:
    for found in four_ranks(load_some, six[0], 4, 1, "zero"):
        assert not any(bool(mean.any()) for mean in found["means"].values())


def load_refused(path: Path, name: str) -> str:
    mesh = grid(2, 2)
    engine = engine_of(fully_shard(Given(SHAPES), mesh=mesh["shard"]), mesh)
    try:
        load_sharded(engine, path, name)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_another_save_and_a_missing_folder_are_refused_on_all_ranks(four_ranks: Ranks, six: tuple[Path, Any]) -> None:
    path, _ = six
    assert all("six" in told and "seven" in told for told in four_ranks(load_refused, path, "seven"))
    assert all("cannot be read" in told for told in four_ranks(load_refused, path / "none", "six"))
