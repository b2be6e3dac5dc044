"""Checkpoints at any moment of a step: what was absorbed and is not in the weights is beside them, exactly."""

from __future__ import annotations

import importlib
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_sparse as ls
from tests.covering import by_default, covering
from tests.integrations.test_checkpoints import saver, strategy_of
from tests.ranks import Ranks
from tests.sums import SPARSE, Sums, check_files, saved_in
from tests.trainers import PACKAGES, make_trainer

HOOKS = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
]
BEFORE_STEP = ["on_after_backward", "on_before_optimizer_step"]


def make_module(package: str) -> Any:
    class Module(importlib.import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.sums = Sums()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.sums(self.global_rank)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    return Module()


def fit(
    package: str,
    options: dict[str, Any],
    callbacks: list[Any],
    steps: int = 5,
    module: Any = None,
    load: str | None = None,
    said: list[str] | None = None,
) -> Any:
    options = {**SPARSE, "bucket_cap_mb": 0.0005, **options}  # small buckets, so that there are several
    plugins = []
    if options.pop("scaled", False):
        mixed = importlib.import_module(package + ".plugins").MixedPrecision
        plugins.append(mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu")))
    trainer = make_trainer(
        package,
        strategy=strategy_of(package, options),
        plugins=plugins,
        devices=dist.get_world_size(),
        max_epochs=1,
        enable_checkpointing=any("Checkpoint" in type(callback).__name__ for callback in callbacks),
        callbacks=callbacks,
        use_distributed_sampler=False,
    )
    with warnings.catch_warnings(
        record=True, action="always"
    ) as caught:  # callbacks that save make Lightning think of an earlier fit
        try:
            trainer.fit(module or make_module(package), DataLoader(torch.zeros(steps, 1), batch_size=1), ckpt_path=load)
        finally:
            if said is not None:
                said.extend(str(warning.message) for warning in caught if "residuals" in str(warning.message))
    return trainer


def calling(package: str, hooks: dict[str, Callable[[Any], None]]) -> Any:
    """A callback that calls these with the Trainer."""
    methods = {name: lambda self, trainer, *_, call=call: call(trainer) for name, call in hooks.items()}
    return type("Calling", (importlib.import_module(package).Callback,), methods)()


def save_in_hooks(package: str, options: dict[str, Any], folder: str) -> None:
    def save_in(hook: str) -> Callable[[Any], None]:
        return lambda trainer: trainer.save_checkpoint(f"{folder}/{hook}-{trainer.fit_loop.total_batch_idx}.ckpt")

    module = make_module(package)
    [in_the_middle] = [p for name, p in module.named_parameters() if name.endswith("second")]
    in_the_middle.register_post_accumulate_grad_hook(lambda _: save_in("backward")(module.trainer))
    fit(package, options, [calling(package, {hook: save_in(hook) for hook in HOOKS})], 3, module)


def resume(package: str, options: dict[str, Any], path: str) -> None:
    trainer = fit(package, {**options, "strict_resume": True}, [], 5, None, path)
    trainer.save_checkpoint(f"{path}.resumed")


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "union": {"sparsifier": "union_top_k", "exchange": "reduce_union", "grouping": "model"},
    "unused": {"find_unused_parameters": True},
    "scaled": {"scaled": True, "gradient_as_bucket_view": True},
}


@pytest.mark.parametrize(
    ("settings", "n"),
    by_default(covering(((one, n) for n in (2, 1) for one in SETTINGS), together=1), 1),
)
def test_what_is_saved_in_a_hook_holds_what_was_absorbed_and_so_do_those_who_load_it(
    alone: Ranks, two_ranks: Ranks, tmp_path: Path, settings: str, n: int
) -> None:
    options = SETTINGS[settings]
    ranks, package = (alone, PACKAGES[0]) if n == 1 else (two_ranks, PACKAGES[1])
    ranks(save_in_hooks, package, options, str(tmp_path))
    for hook in [*HOOKS, "backward"]:
        for batch in range(3):
            path = tmp_path / f"{hook}-{batch}.ckpt"
            assert check_files(path, n) == batch + (hook == "on_train_batch_end"), hook
            assert not any(state["pending"] or state["absorbed"] for state in saved_in(path, n)), hook
    for hook in ("backward", "on_after_backward", "on_train_batch_end"):
        path = tmp_path / f"{hook}-1.ckpt"
        ranks(resume, package, options, str(path))
        assert check_files(f"{path}.resumed", n) == 5, hook  # Lightning repeats a batch whose step was not taken


# ---- Signals


class Sender:
    """Sends this process a signal at random moments, each when the one before has been handled."""

    def __init__(self, number: int, moments: int, seed: int, handle: Callable[[int], None]) -> None:
        self.sent = 0
        self.moments = moments
        self._random = random.Random(seed)
        self._handled = threading.Event()
        self._handle, self._number = handle, number
        self._before = signal.signal(number, self._on_signal)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _on_signal(self, *_: Any) -> None:
        try:
            self._handle(self.sent)
        finally:
            self.sent += 1
            self._handled.set()

    def _send(self) -> None:
        for _ in range(self.moments):
            time.sleep(self._random.uniform(0, 0.01))
            self._handled.clear()
            os.kill(os.getpid(), self._number)
            self._handled.wait(20)

    @property
    def done(self) -> bool:
        return self.sent >= self.moments

    def end(self) -> None:
        self._thread.join(20)
        signal.signal(self._number, self._before)


def save_on_signals(folder: str, moments: int, seed: int) -> int:
    package = "pytorch_lightning"
    senders: list[Sender] = []

    def start(trainer: Any) -> None:
        senders.append(Sender(signal.SIGUSR1, moments, seed, lambda i: trainer.save_checkpoint(f"{folder}/{i}.ckpt")))

    def stop(trainer: Any) -> None:
        trainer.should_stop = senders[0].done

    fit(package, {}, [calling(package, {"on_train_start": start, "on_train_batch_end": stop})], 5000)
    senders[0].end()
    return senders[0].sent


@pytest.mark.parametrize(
    ("seed", "moments"), [(0, 20), *(pytest.param(seed, 100, marks=pytest.mark.thorough) for seed in range(1, 4))]
)
def test_what_a_signal_handler_saves_at_any_moment_holds_what_was_absorbed(
    alone: Ranks, tmp_path: Path, seed: int, moments: int
) -> None:
    assert alone(save_on_signals, str(tmp_path), moments, seed) == [moments]
    assert len({check_files(tmp_path / f"{i}.ckpt", 1) for i in range(moments)}) > moments // 4


def interrupted(folder: str, seed: int) -> str:
    """Ctrl-C at a random moment; Lightning ends the process then, and lets callbacks save."""
    package = "pytorch_lightning"
    emergency = importlib.import_module(package + ".callbacks").OnExceptionCheckpoint(folder, f"{seed}")
    generator = random.Random(seed)

    def start(trainer: Any) -> None:
        if trainer.global_step == 2:  # however long the first steps take
            threading.Timer(generator.uniform(0.0, 0.1), os.kill, (os.getpid(), signal.SIGINT)).start()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
    try:
        with suppress(SystemExit):
            fit(package, {}, [calling(package, {"on_train_batch_start": start}), emergency], 100_000)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return emergency.ckpt_path


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 25))]
)
def test_what_is_saved_after_ctrl_c_holds_what_was_absorbed(alone: Ranks, tmp_path: Path, seed: int) -> None:
    [path] = alone(interrupted, str(tmp_path), seed)
    assert check_files(path, 1) > 0


# ---- Errors


@dataclass(frozen=True)
class FailsOnRank1(ls.sparsifiers.TopK):
    """Top-k with an error on one rank, in the second group of one step."""

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        if ctx.rank == 1 and ctx.step == 3 and acc.numel() == 300:
            raise ZeroDivisionError("only here")
        return super().select(acc, state, ctx)


def fail_in_the_exchange(folder: str) -> str:
    package = "pytorch_lightning"
    emergency = saver(package, dirpath=folder, filename="{step}", save_on_exception=True)
    try:
        fit(package, {"sparsifier": FailsOnRank1()}, [emergency], 6)
    except (RuntimeError, ZeroDivisionError) as error:
        return type(error).__name__
    return "nothing"


def test_what_is_saved_after_an_error_in_the_exchange_holds_what_was_absorbed(two_ranks: Ranks, tmp_path: Path) -> None:
    assert two_ranks(fail_in_the_exchange, str(tmp_path)) == ["LostRankError", "ZeroDivisionError"]
    assert check_files(tmp_path / "step=3.ckpt", 2) == 3


@dataclass(frozen=True)
class FailsWithin(ls.memories.Residual):
    """Has an error in the fourth step while a residual is being changed: rank 1 absorbs, or any rank settles.

    One rank alone that had an error in settling and saved a checkpoint would wait for the others in Lightning's barrier
    behind that, and they for it in Lightning's message at the end of a batch.
    """

    where: str = ""
    steps: list[int] = field(default_factory=list, repr=False, compare=False)

    def absorb_(self, state: Any, grad: Any, ctx: Any) -> Any:
        if self.where == "absorb" and ctx.rank == 1 and ctx.step == 3 and grad.numel == 300:
            state.residual[:100] += 1
            raise ZeroDivisionError("only here")
        return super().absorb_(state, grad, ctx)

    def settle_(self, state: Any, update: Any, *others: Any) -> None:
        if self.where == "settle" and state.residual.numel() == 301:
            self.steps.append(1)
            if len(self.steps) == 8:  # there are two groups of this size
                raise ZeroDivisionError("only here")
        super().settle_(state, update, *others)


def fail_within(where: str, folder: str) -> tuple[str, list[str]]:
    package, said = "pytorch_lightning", list[str]()
    emergency = saver(package, dirpath=folder, filename="saved", save_on_exception=True)
    try:
        fit(package, {"memory": FailsWithin(where=where)}, [emergency], 6, said=said)
    except (RuntimeError, ZeroDivisionError) as error:
        return type(error).__name__, said
    return "nothing", said


def resume_without(path: str) -> list[str]:
    said: list[str] = []
    fit("pytorch_lightning", {}, [], 7, load=path, said=said)
    return said


@pytest.mark.parametrize("where", ["absorb", "settle"])
def test_residuals_that_an_error_has_left_half_changed_are_not_saved(
    two_ranks: Ranks, tmp_path: Path, where: str
) -> None:
    kinds, said = zip(*two_ranks(fail_within, where, str(tmp_path)), strict=True)
    broken = range(2) if where == "settle" else [1]
    assert kinds == tuple("ZeroDivisionError" if rank in broken else "LostRankError" for rank in range(2))
    sentence = (
        "could not save its residuals: An error has ended a step while residuals were being changed: some of them are "
        "of before it and some of after it. They cannot be saved; go on from an earlier checkpoint."
    )
    assert list(said) == [[f"Rank {rank} {sentence}"] * (rank in broken) for rank in range(2)]
    whole = [rank for rank in range(2) if rank not in broken]
    files = tmp_path / "saved.ckpt.sparse"
    assert [file.name[:6] for file in files.glob("*")] == [f"rank-{rank}" for rank in whole]
    told, nothing = two_ranks(resume_without, str(tmp_path / "saved.ckpt"))
    assert len(told) == 1 and nothing == []
    assert ("rank 1: rank-1-of-2." if whole else "ranks 0, 1: there are no side files in") in told[0]


# ---- Ranks at different moments


def save_apart(first: str, other: str, folder: str) -> None:
    """Rank 0 saves in one hook of batch 2, rank 1 in another one; both wait for each other there."""

    def save(trainer: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 2:
            trainer.save_checkpoint(f"{folder}/apart.ckpt")

    package = "pytorch_lightning"
    fit(package, {}, [calling(package, {(first, other)[dist.get_rank()]: save})])


@pytest.mark.parametrize("first", BEFORE_STEP)
def test_ranks_may_save_at_different_moments_before_the_step(two_ranks: Ranks, tmp_path: Path, first: str) -> None:
    [other] = {*BEFORE_STEP} - {first}
    two_ranks(save_apart, first, other, str(tmp_path))
    assert check_files(tmp_path / "apart.ckpt", 2) == 2


@dataclass(frozen=True)
class SlowOnRank1(ls.memories.Residual):
    """Takes a while after all communication is over."""

    def settle_(self, *args: Any) -> None:
        super().settle_(*args)
        if dist.get_rank() == 1:
            time.sleep(0.1)


def save_while_the_other_ends_its_exchange(folder: str) -> None:
    package = "pytorch_lightning"
    path = f"{folder}/late.ckpt"
    trainer: Any = None

    def save(given: Any) -> None:
        if given.fit_loop.total_batch_idx == 2:
            given.save_checkpoint(path)

    def ask(given: Any) -> None:
        if given.fit_loop.total_batch_idx == 2:
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: save(trainer))
    module = make_module(package)
    if dist.get_rank() == 0:
        callbacks = [calling(package, {"on_train_batch_end": save})]
    else:  # while the main thread is within the exchange
        callbacks = []
        [last] = [p for name, p in module.named_parameters() if name.endswith("first")]

        def later(_: Tensor) -> None:
            nonlocal trainer
            trainer = module.trainer
            threading.Timer(0.05, ask, (trainer,)).start()

        last.register_post_accumulate_grad_hook(later)
    fit(package, {"memory": SlowOnRank1(), "grouping": "model"}, callbacks, 4, module)
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_waits_for_the_end_of_an_exchange_that_rank_0_has_concluded(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(save_while_the_other_ends_its_exchange, str(tmp_path))
    assert check_files(tmp_path / "late.ckpt", 2) == 3
