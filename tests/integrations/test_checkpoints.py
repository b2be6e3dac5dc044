"""Checkpoints behind `Trainer`, on real processes: a run that is resumed goes on bit for bit."""

from __future__ import annotations

import functools
import importlib
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.engine.drift.models import Lion
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, flat, make_data, make_module, make_trainer

LEFT_OUT = {"traffic/total_mb"}
"""Sums of floats, which a resumed run begins with the mean over ranks."""
SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "density": 0.05}


def strategy_of(package: str, options: dict[str, Any]) -> Any:
    name = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}[package]
    return importlib.import_module(f"lightning_sparse.integrations.{name}").SparseDDPStrategy(**options)


def saver(package: str, **options: Any) -> Any:
    return importlib.import_module(package + ".callbacks").ModelCheckpoint(**options)


def listener(package: str) -> Any:
    """Notes what is logged in every step."""

    class Listener(importlib.import_module(package).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.losses: list[Any] = []

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            summary = trainer.strategy.engine.summary() if hasattr(trainer.strategy, "engine") else {}
            metrics = {
                name: value for name, value in summary.items() if name not in LEFT_OUT and not name.startswith("time/")
            }
            self.losses.append((float(trainer.callback_metrics["loss"]), metrics))

    return Listener()


def looker(package: str, seen: list[Tensor]) -> Any:
    """Notes residuals before and after the first step."""

    class Looker(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *args: Any) -> None:
            seen.append(residuals_in(trainer.strategy.engine.state_dict()))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if len(seen) == 1:
                self.on_train_start(trainer)

    return Looker()


def residuals_in(state: dict[str, Any]) -> Tensor:
    """In the order of registration; empty where nothing is remembered."""
    vectors = [vectors["residual"] for _, vectors in sorted(state["parameters"].items()) if "residual" in vectors]
    return torch.cat(vectors) if vectors else torch.zeros(0)


class Fit:
    """A run, from the start or from a checkpoint."""

    def __init__(
        self,
        options: dict[str, Any],
        epochs: int,
        load: str | None = None,
        callbacks: Any = (),
        package: str = "pytorch_lightning",
        memory: Any = None,
        samples: int = 48,
        wrap: Callable[[Any], Any] = lambda net: net,
        **trainer_options: Any,
    ) -> None:
        listening = listener(package)
        world_size = torch.distributed.get_world_size()
        self.pending: list[Tensor] = []
        """Residuals of this rank before the first step and after it."""
        looking = looker(package, self.pending)
        self.trainer = make_trainer(
            package,
            strategy=strategy_of(package, options),
            max_epochs=epochs,
            devices=world_size,
            enable_checkpointing=any("Checkpoint" in type(callback).__name__ for callback in callbacks),
            callbacks=[listening, looking, *callbacks],
            **trainer_options,
        )
        self.module = make_module(package)
        self.module.net = wrap(self.module.net)
        if isinstance(options.get("memory"), (ls.memories.AdamCorrection, ls.memories.MomentumCorrection)):
            self.module.configure_optimizers = lambda: torch.optim.SGD(self.module.parameters(), lr=0.1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            self.trainer.fit(self.module, make_data(samples), ckpt_path=load)
        self.warnings = [str(w.message) for w in caught if "residuals" in str(w.message)]
        self.losses = listening.losses
        self.engine = self.trainer.strategy.engine
        self.parameters = flat(self.module)


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def goes_on(options: dict[str, Any], folder: str, package: str = "pytorch_lightning", **other: Any) -> bool:
    """Two epochs in one go, then the last one again from the checkpoint after the first; whether there is memory."""
    every = saver(package, dirpath=folder, filename="{epoch}", save_top_k=-1)
    steps = 3
    other["samples"] = 2 * 8 * steps
    whole = Fit(options, 2, None, [every], package, **other)
    again = Fit(options | {"strict_resume": True}, 2, f"{folder}/epoch=0.ckpt", (), package, **other)
    assert again.warnings == []
    assert torch.equal(whole.parameters, again.parameters)
    assert whole.losses[steps:] == again.losses
    assert len(again.losses) == steps
    before, after = whole.engine.state_dict(), again.engine.state_dict()
    assert same(before, after), (before, after)
    assert again.engine.step == 2 * steps
    return any(bool(v.any()) for vectors in before["parameters"].values() for v in vectors.values())


PLANS: list[dict[str, Any]] = [
    {"grouping": "bucket", "bucket_cap_mb": 0.001},
    {"grouping": "layer"},
    {"grouping": "model"},
    {"grouping": ls.grouping.MergeBelow(100)},
    {"rules": None},
    {"rules": ls.Rules(densities={"net.0.weight": 0.2})},
    {"memory": ls.memories.Residual(decay=0.9)},
    {"memory": ls.memories.MomentumCorrection(0.9)},
    {"memory": ls.memories.AdamCorrection()},
    {"memory": ls.memories.AdamCorrection(beta1=0.9)},
    {"memory": ls.memories.LowPass(0.5)},
    {"memory": ls.memories.ClipByNorm(0.1)},
    {"memory": ls.memories.NoMemory()},
    {"density": ls.Warmup(0.5, 0.05, steps=12)},
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"memory": ls.memories.Residual(rates=True)},
]


OF_ENGINES = (ls.memories.Residual, ls.memories.AdamCorrection, ls.memories.LowPass, ls.memories.NoMemory)
"""With these, tests of the engine go on from its state, too."""
NAMES = [name for name, _ in ls.sparsifiers.SPARSIFIERS.items()]


@pytest.mark.parametrize(
    ("plan", "name"),
    by_default(
        covering(
            [pair for number, pair in enumerate(in_turns(range(len(PLANS)), NAMES)) if number % len(NAMES) < 6],
            together=1,
            seen_as=lambda plan, name: (plan, ls.sparsifiers.SPARSIFIERS.resolve(name).agreement),
            thorough={n for n, plan in enumerate(PLANS) if isinstance(plan.get("memory"), OF_ENGINES)} | {1, 2, 3, 16},
        ),
        2,
    ),
)
def test_whatever_is_chosen_a_resumed_run_goes_on_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, plan: int, name: str
) -> None:
    options = {**SPARSE, "sparsifier": name, **PLANS[plan]}
    remembers = two_ranks(goes_on, options, str(tmp_path))
    memory = options.get("memory", ls.memories.Residual())
    kept = memory.for_dense() if name == "everything" else memory  # memories with momentum keep it there, too
    kept = getattr(kept, "memory", kept)  # inside one that is around it
    assert remembers == [not isinstance(kept, ls.memories.NoMemory)] * 2


def goes_on_scaled(options: dict[str, Any], folder: str) -> bool:
    plugins = importlib.import_module("pytorch_lightning.plugins")
    whole, again = ([plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))] for _ in range(2))
    every = saver("pytorch_lightning", dirpath=folder, filename="{epoch}", save_top_k=-1)
    before = Fit(options, 3, None, [every], plugins=whole)
    after = Fit(options | {"strict_resume": True}, 3, f"{folder}/epoch=0.ckpt", plugins=again)
    assert torch.equal(before.parameters, after.parameters)
    return same(before.engine.state_dict(), after.engine.state_dict())


def test_in_the_other_package_and_with_half_precision(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(functools.partial(goes_on, precision="bf16-mixed"), SPARSE, str(tmp_path / "bf16"), "lightning.pytorch")
    assert two_ranks(goes_on_scaled, SPARSE, str(tmp_path / "fp16")) == [True, True]


WITHOUT_RESIDUALS = SPARSE | {"save_residuals": False}


@functools.cache
def in_one_go(options: str) -> Tensor:
    """Parameters after three epochs, with settings as they are printed."""
    [chosen] = [chosen for chosen in (SPARSE, WITHOUT_RESIDUALS) if str(chosen) == options]
    return Fit(chosen, 3).parameters


def fit_and_resume_from(
    how: str, folder: str, options: dict[str, Any] = SPARSE, again: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Two epochs with checkpoints of some kind, then a third one from the last; and three in one go."""
    package = "pytorch_lightning"
    ours: dict[str, dict[str, Any]] = {
        "one": {"filename": "{epoch}", "save_top_k": 1},
        "link": {"filename": "{epoch}", "save_last": "link"},
        "last": {"filename": "{epoch}", "save_last": True, "save_top_k": -1},
        "async": {"filename": "{epoch}", "save_top_k": 1},
        # A metric that differs from rank to rank: they save under different names, and remove different ones.
        "metric": {"filename": "{epoch}-{loss:.4f}", "monitor": "loss", "save_top_k": 1, "every_n_train_steps": 1},
    }
    callbacks = [saver(package, dirpath=folder, **ours[how])] if how in ours else []
    plugins = [slow_io(package)] if how == "async" else []
    first = Fit(options, 2, None, callbacks, plugins=plugins)
    if how in ("manual", "weights"):
        first.trainer.save_checkpoint(f"{folder}/manual.ckpt", weights_only=how == "weights")
    torch.distributed.barrier()
    found = sorted(f"{root}/{file}".removeprefix(folder) for root, _, files in os.walk(folder) for file in files)
    torch.distributed.barrier()
    if how in ("weights", "metric"):
        return {"files": found}
    path = {"one": "epoch=1.ckpt", "link": "last.ckpt", "last": "last.ckpt", "async": "epoch=1.ckpt"}.get(how)
    resumed = Fit(options | (again or {}), 3, f"{folder}/{path or 'manual.ckpt'}")
    return {
        "files": found,
        "equal": torch.equal(in_one_go(str(options)), resumed.parameters),
        "warnings": resumed.warnings,
        "pending": resumed.pending,
        "step": resumed.engine.step,
    }


def slow_io(package: str) -> Any:
    """Writes in the background, on rank 0 so slowly that everything is late."""
    plugins = importlib.import_module(package + ".plugins.io")

    class Slow(plugins.TorchCheckpointIO):  # type: ignore[misc, name-defined]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.02 if torch.distributed.get_rank() else 0.1)
            super().save_checkpoint(*args, **kwargs)

    return plugins.AsyncCheckpointIO(Slow())


def sides(found: list[str], name: str) -> list[int]:
    """Ranks of the side files beside a checkpoint."""
    return sorted(int(file.split("rank-")[1].split("-of-2.")[0]) for file in found if f"/{name}.sparse/" in file)


@pytest.mark.parametrize("how", by_default(["link", "last", "manual", "async", "one"], 4))
def test_checkpoints_of_all_kinds(two_ranks: Ranks, tmp_path: Path, how: str) -> None:
    for result in two_ranks(fit_and_resume_from, how, str(tmp_path), SPARSE, {"strict_resume": True}):
        assert result["equal"]
        assert result["warnings"] == []
        directories = {file.split("/")[1] for file in result["files"] if ".sparse/" in file}
        if how == "last":
            assert directories == {"epoch=0.ckpt.sparse", "epoch=1.ckpt.sparse", "last.ckpt.sparse"}
            assert sides(result["files"], "last.ckpt") == [0, 0, 1, 1]  # this save and the one before
        elif how == "manual":
            assert directories == {"manual.ckpt.sparse"}
        else:
            assert directories == {"epoch=1.ckpt.sparse"}  # that of the first epoch was removed, on both ranks
            assert sides(result["files"], "epoch=1.ckpt") == [0, 1]


def test_ranks_that_see_other_metrics_save_and_remove_what_rank_0_does(two_ranks: Ranks, tmp_path: Path) -> None:
    found, _ = two_ranks(fit_and_resume_from, "metric", str(tmp_path))
    [checkpoint] = [file for file in found["files"] if ".sparse/" not in file]
    assert sides(found["files"], checkpoint[1:]) == [0, 1]
    assert len(found["files"]) == 3


def test_checkpoints_of_weights_alone_have_no_side_files(two_ranks: Ranks, tmp_path: Path) -> None:
    for result in two_ranks(fit_and_resume_from, "weights", str(tmp_path)):
        assert result["files"] == ["/manual.ckpt"]


def test_without_residuals_a_run_goes_on_otherwise_and_says_so(two_ranks: Ranks, tmp_path: Path) -> None:
    first, other = two_ranks(fit_and_resume_from, "manual", str(tmp_path), WITHOUT_RESIDUALS)
    assert first["files"] == ["/manual.ckpt"]
    assert "ranks 0, 1: it was saved without them. Error feedback starts empty" in first["warnings"][0]
    assert (len(first["warnings"]), len(other["warnings"])) == (1, 0)
    for result in (first, other):
        assert not result["equal"]
        assert not result["pending"][0].any()


DENSE_OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def resume_dense(path: str, kind: str, strict: bool) -> tuple[list[str], dict[str, float], list[set[str]]]:
    """Warnings, what is counted, and what the optimizer keeps, where three sparse steps follow three dense ones."""
    package = "pytorch_lightning"
    for strategy, load in (("ddp", None), (strategy_of(package, SPARSE | {"strict_resume": strict}), path)):
        module = make_module(package)
        module.configure_optimizers = lambda module=module: DENSE_OPTIMIZERS[kind](module.parameters())
        trainer = make_trainer(package, strategy=strategy, max_epochs=2 if load else 1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            trainer.fit(module, make_data(), ckpt_path=load)
        if load is None:
            trainer.save_checkpoint(path)
    told = [str(w.message) for w in caught if "resid" in str(w.message) or "lost" in str(w.message)]
    states = trainer.optimizers[0].state
    counters = trainer.strategy.engine.state_dict()["counters"]["net.0.weight"]
    return told, counters, [set(states.get(p, {})) for p in module.parameters()]


@pytest.mark.parametrize(("kind", "strict"), [("adamw", True), ("sgd", False)])
def test_of_a_checkpoint_of_plain_ddp_nothing_is_lost(
    two_ranks: Ranks, tmp_path: Path, kind: str, strict: bool
) -> None:
    for told, counters, states in two_ranks(resume_dense, str(tmp_path / "dense.ckpt"), kind, strict):
        assert told == []
        assert counters.get("steps") == (6.0 if kind == "adamw" else None)
        assert states == [set() if kind == "adamw" else {"momentum_buffer", "waited"}] * 4


BACK = {
    **DENSE_OPTIMIZERS,
    "lion": lambda parameters: Lion(parameters, lr=0.001),
}


def go_back(path: str, kind: str) -> tuple[list[str], bool, dict[int, Any], list[float]]:
    """Of a run with plain DDP: warnings, whether it has the weights, the states it was given, and steps it counts."""
    package, seen = "pytorch_lightning", list[Tensor]()
    for strategy, load in ((strategy_of(package, SPARSE), None), ("ddp", path)):
        module = make_module(package)
        module.configure_optimizers = lambda module=module: BACK[kind](module.parameters())
        module.on_train_start = lambda module=module: seen.append(flat(module))  # with the weights of the checkpoint
        flushes = [] if load else [ls.FlushResidual()]
        trainer = make_trainer(package, strategy=strategy, max_epochs=2 if load else 1, callbacks=flushes)
        with warnings.catch_warnings(record=True, action="always") as caught:
            trainer.fit(module, make_data(), ckpt_path=load)
        if load is None:
            trainer.save_checkpoint(path)
            seen.append(flat(module))
    told = [str(w.message) for w in caught if "sparse" in str(w.message) or "resid" in str(w.message)]
    states = [trainer.optimizers[0].state[parameter] for parameter in module.parameters()]
    saved = torch.load(path, weights_only=False)["optimizer_states"][0]["state"]
    return told, torch.equal(seen[1], seen[2]), saved, [float(one["step"]) for one in states if "step" in one]


@pytest.mark.parametrize("kind", by_default(list(BACK), 1))
def test_plain_ddp_goes_on_from_a_checkpoint_after_a_flush(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for told, equal, saved, steps in two_ranks(go_back, str(tmp_path / "sparse.ckpt"), kind):
        assert told == [] and equal
        assert len(saved) == (0 if kind == "adamw" else 4)
        assert steps == ([3.0] * 4 if kind == "adamw" else [])


def error_of(options: dict[str, Any], path: str) -> str:
    try:
        Fit(options, 3, path)
    except RuntimeError as error:
        return str(error)
    return ""


def save(folder: str, options: dict[str, Any] = SPARSE) -> None:
    Fit(options, 2).trainer.save_checkpoint(f"{folder}/x.ckpt")


def resume(folder: str, options: dict[str, Any]) -> tuple[list[str], list[Tensor], int]:
    fit = Fit(options, 3, f"{folder}/x.ckpt")
    assert len(fit.losses) == -(-6 // torch.distributed.get_world_size())  # batches of 8
    return fit.warnings, fit.pending, fit.engine.step


def test_what_one_rank_cannot_restore_no_rank_does(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(save, str(tmp_path))
    [file] = (tmp_path / "x.ckpt.sparse").glob("rank-1-*")
    file.write_bytes(file.read_bytes()[:1000])
    first, other = two_ranks(resume, str(tmp_path), SPARSE)
    assert [len(told) for told, _, _ in (first, other)] == [1, 0]
    assert "rank 1: rank-1-of-2." in first[0][0] and "cannot be read" in first[0][0]
    for _, pending, step in (first, other):
        assert not pending[0].any() and pending[1].any()
        assert step == 9
    for error in two_ranks(error_of, SPARSE | {"strict_resume": True}, f"{tmp_path}/x.ckpt"):
        assert "rank 1: rank-1-of-2." in error and "cannot be read" in error


@pytest.mark.parametrize(
    "entry", by_default([("x",), ({"residuals": 7},), ({"totals": "x"},), ([1],), ({"residuals": ["global_step"]},)], 3)
)
def test_an_entry_that_is_none_is_one_sentence_on_all_ranks(two_ranks: Ranks, tmp_path: Path, entry: Any) -> None:
    two_ranks(save, str(tmp_path))
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=False)
    changed = {**checkpoint["lightning_sparse"], **entry} if isinstance(entry, dict) else entry
    torch.save({**checkpoint, "lightning_sparse": changed}, tmp_path / "x.ckpt")
    told = two_ranks(resume, str(tmp_path), SPARSE)
    assert [len(warned) for warned, _, _ in told] == [1, 0]
    errors = two_ranks(error_of, SPARSE | {"strict_resume": True}, f"{tmp_path}/x.ckpt")
    for sentence in (told[0][0][0], *errors):
        assert "were not restored" in sentence and "ranks 0, 1: " in sentence
    assert errors[0] == errors[1]


def test_other_settings_keep_residuals_and_are_told(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(save, str(tmp_path))
    saved = pending_on_disk(tmp_path)
    results = two_ranks(resume, str(tmp_path), SPARSE | {"sparsifier": "top_k"})
    told = "On ranks 0, 1: The settings have changed: sparsifier was UnionTopK(max_factor=2.0), and is TopK()"
    assert f"do not fit in every respect. {told}" in results[0][0][0]
    assert torch.equal(torch.stack([pending[0] for _, pending, _ in results]), saved)


def pending_on_disk(folder: Path) -> Tensor:
    """(ranks, coordinates)."""
    files = sorted((folder / "x.ckpt.sparse").iterdir())
    return torch.stack([residuals_in(torch.load(file)["state"]) for file in files])


def change_ranks(before: Ranks, after: Ranks, folder: Path, resize: str) -> None:
    before(save, str(folder))
    saved = pending_on_disk(folder).double().mean(0)
    assert saved.any()
    results = after(resume, str(folder), SPARSE | {"resize": resize, "strict_resume": True})
    steps = 2 * -(-6 // before.world_size) + -(-6 // after.world_size)
    assert [step for _, _, step in results] == [steps] * after.world_size
    found = torch.stack([pending[0] for _, pending, _ in results]).double().mean(0)
    left = torch.stack([pending[1] for _, pending, _ in results])
    if resize == "zero":
        assert not found.any()
        assert f"the residuals, an update of norm {saved.norm():.4g} that was still to be sent" in results[0][0][0]
    else:
        torch.testing.assert_close(found, saved, rtol=2**-23, atol=1e-30)
        assert [told for told, _, _ in results] == [[]] * after.world_size
        assert bool(left.any()) == (resize == "merge")


@pytest.mark.parametrize("resize", by_default(["merge", "flush", "zero"]))
def test_two_ranks_become_three(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path, resize: str) -> None:
    change_ranks(two_ranks, three_ranks, tmp_path, resize)


def test_two_ranks_become_one_node_that_trains_densely(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(save, str(tmp_path))
    saved = pending_on_disk(tmp_path).double().mean(0)
    results = two_ranks(resume, str(tmp_path), SPARSE | {"node_size": 2, "resize": "zero", "strict_resume": True})
    [told] = results[0][0]
    assert "1 group of ranks instead of 2 and resize='zero'" in told
    assert f"an update of norm {saved.norm():.4g} " in told
    assert not any(bool(x.any()) for _, pending, _ in results for x in pending)


def test_three_ranks_become_two(two_ranks: Ranks, three_ranks: Ranks, tmp_path: Path) -> None:
    change_ranks(three_ranks, two_ranks, tmp_path, "merge")


@pytest.mark.thorough
def test_two_ranks_become_four_and_two_again(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path) -> None:
    change_ranks(two_ranks, four_ranks, tmp_path / "up", "merge")
    change_ranks(four_ranks, two_ranks, tmp_path / "down", "merge")


def fail_and_resume(folder: str) -> tuple[list[str], list[str], int]:
    """An error on all ranks in the second epoch, with a checkpoint of the moment; then on from there."""
    package = "pytorch_lightning"

    class Failing(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                raise RuntimeError("on purpose")

    emergency = importlib.import_module(package + ".callbacks").OnExceptionCheckpoint(folder)
    with pytest.raises(RuntimeError, match="on purpose"):
        Fit(SPARSE, 2, None, [Failing(), emergency])
    torch.distributed.barrier()
    found = sorted(os.listdir(f"{folder}/on_exception.ckpt.sparse"))
    after = Fit(SPARSE | {"strict_resume": True}, 2, f"{folder}/on_exception.ckpt")
    return found, after.warnings, int(after.pending[0].count_nonzero())


def test_a_checkpoint_that_is_saved_after_an_error(two_ranks: Ranks, tmp_path: Path) -> None:
    for found, told, remembered in two_ranks(fail_and_resume, str(tmp_path)):
        assert [file[:11] for file in found] == ["rank-0-of-2", "rank-1-of-2"]
        assert told == []
        assert remembered > 0


def evaluate(folder: str) -> list[str]:
    save(folder)
    trainer = make_trainer("pytorch_lightning", strategy=strategy_of("pytorch_lightning", SPARSE))
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.validate(make_module("pytorch_lightning"), make_data(16), f"{folder}/x.ckpt", verbose=False)
        trainer.fit(make_module("pytorch_lightning"), make_data())
    return [str(w.message) for w in caught if "residuals" in str(w.message)]


def test_evaluation_needs_no_residuals_and_a_fit_after_it_starts_anew(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(evaluate, str(tmp_path)) == [[], []]
