"""What engines of shards remember, saved and loaded by any number of replicas and ranks."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
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
from lightning_sparse.engine.state.schema import checksum
from lightning_sparse.hsdp.state import load_sharded, save_sharded
from tests.covering import by_default
from tests.hsdp.model import SHAPES, Given, batches, engine_of, given, grid, made, sharded, summing, weights, whole
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

# ---- Resumed with as many replicas and ranks: bit for bit


def straight_and_resumed(path: Path, kind: str, between: bool) -> tuple[list[dict[str, Tensor]], ...]:
    """Weights after each of the last steps of a run, and of one that was saved before them and loaded elsewhere."""
    mesh = grid(2, 2)
    steps = list(batches(6))
    kinds: dict[str, Any] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    }

    def start(seed: int) -> tuple[Any, ...]:
        model = sharded(made(seed=seed), mesh["shard"])
        engine, optimizer = engine_of(model, mesh), kinds[kind](model.parameters())
        return model, engine, optimizer

    def go(run: tuple[Any, ...], steps: list[Any]) -> list[dict[str, Tensor]]:
        model, engine, optimizer = run
        seen = []
        for [(x, y)] in steps:
            mse_loss(model(x), y).backward()
            engine.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(weights(model))
        return seen

    first = start(0)
    go(first, steps[:3])
    if between:  # the gradient of this backward is lost with the process
        model, engine, _ = first
        [(x, y)] = steps[3]
        mse_loss(model(x), y).backward()
    model, engine, optimizer = first
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    save(states, checkpoint_id=path / "weights")
    save_sharded(engine, path / "residuals", "one")
    optimizer.zero_grad()
    straight = go(first, steps[4:])
    engine.close()

    second = model, engine, optimizer = start(1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))  # steps with zeros
    load(states, checkpoint_id=path / "weights")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    notes = load_sharded(engine, path / "residuals", "one")
    assert not notes, notes
    resumed = go(second, steps[4:])
    return straight, resumed


@pytest.mark.parametrize(
    ("kind", "between"),
    by_default(
        [
            ("momentum", False),
            ("adamw", True),
            pytest.param("momentum", True, marks=pytest.mark.thorough),
            pytest.param("adamw", False, marks=pytest.mark.thorough),
        ],
        2,
    ),
)
def test_a_run_is_resumed_bit_for_bit(four_ranks: Ranks, tmp_path: Path, kind: str, between: bool) -> None:
    for straight, resumed in four_ranks(straight_and_resumed, tmp_path, kind, between):
        for one, other in zip(straight, resumed, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


# ---- Resumed with other numbers


def save_some(path: Path) -> dict[str, Tensor]:
    """Sum of all that replicas of 2 x 2 have absorbed and not applied, with the weights."""
    mesh = grid(2, 2)
    model, engine, optimizer = summing(mesh)
    for step in range(6):
        model(given(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    save_sharded(engine, path, "six")
    absorbed = {
        f"{name}.weight": sum(given(step, rank)[name] for step in range(6) for rank in range(4)) / 4 for name in SHAPES
    }
    return {name: absorbed[name] + w for name, w in weights(model).items()}


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
    with warnings.catch_warnings(record=True, action="always") as warned:
        notes = load_sharded(engine, path, "six", resize)
    means = {}
    for name, pending in engine._take_pending().items():
        means[name] = whole(pending)
    return {"means": means, "notes": notes, "step": engine.step, "warned": [str(one.message) for one in warned]}


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


def uneven(step: int) -> dict[str, Tensor]:
    """Gradients of the same length in each step, whose first rows are far longer than the last ones."""
    signs = {name: given(step, 0)[name].sign() + 0.5 for name in ("first", "third")}
    return {name: torch.where(torch.arange(len(x))[:, None] < 3, 100 * x.sign(), x.sign()) for name, x in signs.items()}


def lengths(path: Path, before: tuple[int, int], after: tuple[int, int], steps: int) -> list[float]:
    """How often lengths were found to change, before and after the grid of ranks has changed."""

    def train(shape: tuple[int, int], steps: range) -> tuple[float, float]:
        mesh = grid(*shape)
        model = fully_shard(Given({name: SHAPES[name] for name in ("first", "third")}), mesh=mesh["shard"])
        engine = engine_of(model, mesh, rules=EVERYTHING_SPARSE, grouping="model", single_device="sparse")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        if steps.start:
            load_sharded(engine, path)
        for step in steps:
            model(uneven(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not steps.start:
            save_sharded(engine, path)
        counted = engine.state_dict()["counters"]["first.weight"]
        engine.close()
        return counted["clipped"], counted["measured_anew"]

    return [*train(before, range(steps)), *train(after, range(steps, 3 * steps))]


@pytest.mark.parametrize(
    ("before", "after"), by_default([((4, 1), (2, 2)), ((2, 2), (4, 1)), ((2, 2), (1, 4)), ((1, 4), (2, 2))], 2)
)
def test_lengths_are_those_of_this_ranks_part(
    four_ranks: Ranks, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Else what waits would be multiplied to match the gradients of another part."""
    assert four_ranks(lengths, tmp_path / "saved", before, after, 8) == [[0.0] * 4] * 4


@pytest.mark.parametrize("shape", by_default([((4, 1),), ((1, 4),)]))
def test_residuals_are_dropped_with_a_warning_where_that_is_asked_for(
    four_ranks: Ranks, six: tuple[Path, Any], shape: tuple[int, int]
) -> None:
    norm = torch.cat([mean.flatten() for mean in six[1].values()]).norm()
    replicas = "1 replica" if shape[0] == 1 else "4 replicas"
    sentence = (
        f"Training continues with {replicas} instead of 2 and resize='zero': the residuals, an update of norm "
        f"{norm:.4g} that was still to be sent, are dropped."
    )
    for rank, found in enumerate(four_ranks(load_some, six[0], *shape, "zero")):
        assert not any(bool(mean.any()) for mean in found["means"].values())
        assert found["notes"] == []
        assert found["warned"] == ([sentence] if rank == 0 else [])


def mistyped(path: Path, rank: int) -> str:
    """What a rank is told where one of them, or all, ask for a treatment of residuals that there is not."""
    mesh = grid(4, 1)
    engine = engine_of(fully_shard(Given(SHAPES), mesh=mesh["shard"]), mesh)
    here = dist.get_rank() == rank or rank < 0
    return error_of(lambda: load_sharded(engine, path, "six", "flsuh" if here else "flush"))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", by_default([-1, 2], 2))
def test_another_word_for_resize_is_refused_on_all_ranks(four_ranks: Ranks, six: tuple[Path, Any], rank: int) -> None:
    for text in four_ranks(mistyped, six[0], rank):
        assert "Expected resize to be one of 'merge', 'flush', 'zero', but got 'flsuh'. Did you mean 'flush'?" in text


# ---- Damaged folders


class Runs:
    """An object whose reading would leave a trace."""

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path("unpickled"),)


def first_of(folder: Path) -> Path:
    return min(folder.glob("*.distcp"))


def forge(metadata: Any) -> Callable[[Path], None]:
    """Another object in the place of torch's metadata, with a checksum that fits."""

    def damage(folder: Path) -> None:
        (folder / ".metadata").write_bytes(content := pickle.dumps(metadata))
        files = json.loads((folder / "checksums.json").read_text())["files"]
        files[".metadata"] = checksum(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        (folder / "checksums.json").write_text(json.dumps({"files": files, "checksum": checksum({"files": files})}))

    return damage


def in_place_of(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "no metadata": lambda folder: (folder / ".metadata").unlink(),
    "metadata empty": lambda folder: (folder / ".metadata").write_bytes(b""),
    "metadata cut": lambda folder: os.truncate(folder / ".metadata", 300),
    "metadata is text": lambda folder: (folder / ".metadata").write_text("hello"),
    "metadata is another object": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})),
    "forged: another object": forge({"a": 1}),
    "forged: code": forge(Runs()),
    "no checksums": lambda folder: (folder / "checksums.json").unlink(),
    "checksums empty": lambda folder: (folder / "checksums.json").write_text(""),
    "checksums nested deeply": lambda folder: (folder / "checksums.json").write_text("[" * 100_000),
    "a file is missing": lambda folder: first_of(folder).unlink(),
    "a file is cut": lambda folder: os.truncate(first_of(folder), 500),
    "a file is empty": lambda folder: os.truncate(first_of(folder), 0),
    "no folder": shutil.rmtree,
    "a file in its place": in_place_of,
}


def flip(number: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        generator = random.Random(number)
        file = generator.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        file.write_bytes(content)

    return damage


def load_damaged(path: Path, room: Path, names: list[str | int]) -> list[tuple[str | int, str, bool]]:
    """What loading says after each damage, and whether residuals are those of before."""
    _, engine, _ = summing(grid(2, 2))
    load_sharded(engine, path, "six")
    good = [engine.residual(name).clone() for name in engine.stepper.parameters]  # type: ignore[union-attr]
    told = []
    for number, name in enumerate(names):
        if dist.get_rank() == 0:
            shutil.copytree(path, room / str(number))
            (flip(name) if isinstance(name, int) else DAMAGES[name])(room / str(number))
        dist.barrier()
        try:
            said = str(load_sharded(engine, room / str(number), "six"))
        except ValueError as error:
            said = str(error)
        told.append((name, said, all(map(torch.equal, good, map(engine.residual, engine.stepper.parameters)))))
    return told


@pytest.mark.parametrize(
    "names",
    [[*DAMAGES, *range(10)], pytest.param([*range(10, 60)], marks=pytest.mark.thorough)],
    ids=["damages", "bits"],
)
def test_a_damaged_folder_is_one_sentence_on_all_ranks(
    four_ranks: Ranks, six: tuple[Path, Any], tmp_path: Path, names: list[str | int]
) -> None:
    of_ranks = four_ranks(load_damaged, six[0], tmp_path, names)
    assert all(told == of_ranks[0] for told in of_ranks)
    for name, said, unchanged in of_ranks[0]:
        assert said.startswith("The residuals in ") and "\n" not in said and len(said) < 1500, (name, said)
        assert unchanged, name
    assert not Path("unpickled").exists()


def load_refused(path: Path, name: str) -> str:
    mesh = grid(2, 2)
    engine = engine_of(fully_shard(Given(SHAPES), mesh=mesh["shard"]), mesh)
    return error_of(load_sharded, engine, path, name)


def test_another_save_and_a_missing_folder_are_refused_on_all_ranks(four_ranks: Ranks, six: tuple[Path, Any]) -> None:
    path, _ = six
    assert all("six" in told and "seven" in told for told in four_ranks(load_refused, path, "seven"))
    assert all("none cannot be loaded" in told for told in four_ranks(load_refused, path / "none", "six"))
