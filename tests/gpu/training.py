"""Does the engine behind DistributedDataParallel train on the device as it does on the CPU?

Lightning's Trainer, with one rank; then every job with one rank over NCCL, and with two processes on the one device
over gloo, which copies through the host. Jobs are functions of a device's name; they fail by raising, on all ranks.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.methods.grouping import make_plan
from tests.gpu.checks import Check, Clock, Numbers, SkipError, require
from tests.gpu.doors import (
    a_sharded_model_trains_as_on_the_cpu,
    nodes_train_as_on_the_cpu,
)
from tests.gpu.models import Branches
from tests.gpu.one_training import LAYOUTS, TOPK, Training, close, train
from tests.gpu.precision import (
    adam_trains_alike_with_and_without_kernels,
    adam_trains_in_half_precision,
    half_precision_trains,
    steps_of_adam_are_those_of_the_cpu,
)
from tests.gpu.processes import one_rank
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    name = str(device)
    with one_rank(device):
        for package in PACKAGES:
            for lightning_job in LIGHTNING_JOBS:
                yield Check(
                    f"{package}: {title(lightning_job)}",
                    partial(in_lightning, lightning_job, package, device),
                )
        for job in JOBS:
            yield Check(f"1 rank: {title(job)}", partial(job, name))
    ranks = Ranks(2)
    try:
        for job in JOBS:
            yield Check(f"2 ranks: {title(job)}", partial(on_two_ranks, ranks, job, name))
    finally:
        ranks.stop()


def title(job: Callable[..., Any]) -> str:
    return job.__name__.replace("_", " ")


def on_two_ranks(ranks: Ranks, job: Callable[[str], Numbers | None], device: str) -> Numbers | None:
    return ranks(quietly, job, device)[0]


def quietly(job: Callable[[str], Numbers | None], device: str) -> Numbers | None:
    """Warnings of other versions of torch than the tested ones are no errors here, which they are in tests."""
    with warnings.catch_warnings(action="default"):
        if device != "cpu":
            torch.cuda.set_device(device)
        return job(device)


# ---- Jobs


def alike(device: str, run: Callable[[Training], list[float]], layout: str = "default") -> None:
    """A training with top-k ends on the device as on the CPU."""
    trainings = (Training(where, TOPK, layout) for where in (device, "cpu"))
    close(*(training.end(run(training)) for training in trainings))


def density_1_is_plain_ddp(device: str) -> None:
    """Bit for bit, in all layouts, with up to two ranks, where a sum has one order."""
    for layout in LAYOUTS:
        _, plain = train(device, None, layout, dtype=torch.float32)
        for sparsifier in ("top_k", "exdyna"):
            _, sparse = train(device, {"sparsifier": sparsifier, "density": 1.0}, layout, dtype=torch.float32)
            alike = torch.equal(sparse, plain) if dist.get_world_size() <= 2 else torch.allclose(sparse, plain)
            require(alike, f"{sparsifier} differs from DDP, {layout}")


def losses_are_those_of_the_cpu(device: str) -> Numbers:
    for options in (
        TOPK,
        {**TOPK, "exchange": "reduce_union"},
        {**TOPK, "grouping": "layer"},
        {**TOPK, "memory": ls.memories.ClipByNorm(1.0, ls.memories.Residual())},
        {**TOPK, "memory": ls.memories.LowPass(0.25)},
        {"sparsifier": "exdyna", "density": 0.05},
    ):
        close(train(device, options), train("cpu", options))
    for layout in LAYOUTS:
        close(train(device, TOPK, layout), train("cpu", TOPK, layout))
    momentum = {**TOPK, "memory": ls.memories.MomentumCorrection(0.5)}
    close(train(device, momentum, momentum=0.0), train("cpu", momentum, momentum=0.0))
    single = {"dtype": torch.float32}
    close(train(device, TOPK, **single), train("cpu", TOPK, **single), rtol=1e-2)  # picks may differ
    losses, _ = train(device, {}, steps=20, **single)  # messages of the default have another length on devices
    expected, _ = train("cpu", {}, steps=20, **single)
    torch.testing.assert_close(losses[-1], expected[-1], rtol=0.1, atol=0.0)
    return {"last loss": round(losses[-1], 4), "on the CPU": round(expected[-1], 4)}


def a_skipped_step_moves_nothing(device: str) -> None:
    def run(training: Training) -> list[float]:
        losses = [training.step() for _ in range(3)]
        before = training.parameters()
        training.optimizer.zero_grad()
        last = dist.get_rank() == dist.get_world_size() - 1
        losses.append(training.step(factor=float("inf") if last else 1.0))
        require(training.engine.stepper.record.latest_skipped, "nobody noticed the infinite loss")
        require(torch.equal(training.parameters(), before), "a skipped step moved parameters")
        losses += [training.step() for _ in range(3)]
        require(training.engine.step == 6 and training.engine.skipped_steps == 1, "steps were miscounted")
        return losses

    for layout in ("default", "find_unused"):
        alike(device, run, layout)


def a_scaled_loss_trains_like_an_unscaled_one(device: str) -> None:
    """Factors are powers of two: in float32 nothing is rounded otherwise. One step overflows and is skipped by both."""
    kind, results = torch.device(device).type, []
    for scaled in (True, False):
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**10, growth_interval=3, enabled=scaled)
        training = Training(device, TOPK, dtype=torch.float32)
        for step in range(8):
            training.optimizer.zero_grad()
            loss = training.ddp(training.batch()).square().mean() * (float("inf") if step == 4 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
        require(training.engine.skipped_steps == 1, f"{training.engine.skipped_steps} skipped steps instead of 1")
        results.append(training.end([]))
    require(torch.equal(results[0][1], results[1][1]), "scaled and unscaled losses train differently")


def unused_parameters_keep_their_residual(device: str) -> None:
    def run(training: Training) -> list[float]:
        losses = []
        for use in ("both", "left", "right", "left", "both", "right"):
            before = training.engine.residual("right.weight").clone()
            losses.append(training.step(use))
            if use == "left":
                kept = torch.equal(training.engine.residual("right.weight"), before)
                require(kept, "the residual of a parameter that nobody used has changed")
        return losses

    alike(device, run, "find_unused")


def accumulated_gradients_are_exchanged_once(device: str) -> None:
    def run(training: Training) -> list[float]:
        losses = []
        for _ in range(4):
            training.optimizer.zero_grad()
            with training.ddp.no_sync():
                training.ddp(training.batch()).square().mean().backward()
            loss = training.ddp(training.batch()).square().mean()
            loss.backward()
            training.optimizer.step()
            losses.append(loss.item())
        require(training.engine.step == 4, f"{training.engine.step} exchanges instead of 4")
        return losses

    alike(device, run)


def groups_change_between_steps(device: str) -> None:
    order = {name: place for place, (name, _) in enumerate(Branches().named_parameters())}
    plans: list[tuple[Any, list[str]]] = [("bucket", []), ("layer", []), ("model", ["*.bias"]), ("layer", ["*"])]

    def run(training: Training) -> list[float]:
        losses = []
        for grouping, dense in [*plans, *plans]:
            losses.append(training.step())
            sizes = [p for group in training.engine.groups for p in group.parameters]
            sizes.sort(key=lambda p: order[p.name])
            training.engine.regroup(make_plan(sizes, grouping, EVERYTHING_SPARSE.also_dense(dense)))
        return losses

    alike(device, run, "small_buckets")


def a_fallback_comes_to_an_end(device: str) -> None:
    train(device, {**TOPK, "fallback": True}, steps=50)


def flushing_leaves_no_residual(device: str) -> None:
    training = Training(device, TOPK)
    losses = [training.step() for _ in range(4)]
    norm = ls.flush(training.engine, [training.optimizer])
    require(norm > 0, "nothing was pending")
    left = [name for name in training.engine.stepper.parameters if training.engine.residual(name).any()]
    require(not left, f"{left} still have a residual")
    training.end(losses)


def a_resumed_training_goes_on_bit_for_bit(device: str) -> None:
    for options in (TOPK, {"density": 0.05}, {"sparsifier": "exdyna", "density": 0.05}):
        _, straight = train(device, options, steps=8)
        first = Training(device, options)
        for _ in range(4):
            first.step()
        second = first.resumed_by(Training(device, options))
        _, resumed = second.end([second.step() for _ in range(4)])
        require(torch.equal(resumed, straight), f"{options}: the resumed run differs")


def a_default_device_changes_nothing(device: str) -> None:
    options = {**TOPK, "memory": ls.memories.Residual(rates=True)}
    results = []
    for by_default in (True, False):
        with torch.device(device) if by_default else nullcontext():
            training = Training(device, options)
            losses = [training.step() for _ in range(3)]
            training.optimizer.param_groups[0]["lr"] = 0.05
            losses.append(training.step(factor=float("nan")))
            losses += [training.step() for _ in range(3)]
            training.engine.summary()
        results.append(training.end(losses))
    require(torch.equal(results[0][1], results[1][1]), "a default device changes the training")


JOBS: list[Callable[[str], Numbers | None]] = [
    density_1_is_plain_ddp,
    losses_are_those_of_the_cpu,
    a_skipped_step_moves_nothing,
    a_scaled_loss_trains_like_an_unscaled_one,
    half_precision_trains,
    steps_of_adam_are_those_of_the_cpu,
    adam_trains_in_half_precision,
    adam_trains_alike_with_and_without_kernels,
    unused_parameters_keep_their_residual,
    accumulated_gradients_are_exchanged_once,
    groups_change_between_steps,
    flushing_leaves_no_residual,
    a_resumed_training_goes_on_bit_for_bit,
    a_default_device_changes_nothing,
    nodes_train_as_on_the_cpu,
    a_sharded_model_trains_as_on_the_cpu,
    a_fallback_comes_to_an_end,
]


# ---- Lightning


def in_lightning(job: Callable[[str, str], None], package: str, device: torch.device) -> None:
    if find_spec(package.split(".")[0]) is None:
        raise SkipError(f"package missing: {package.split('.')[0]}")
    with warnings.catch_warnings(action="ignore"):
        logging.disable(logging.WARNING)  # greetings and advice in every run
        try:
            job(package, "gpu" if device.type == "cuda" else "cpu")
        finally:
            logging.disable(logging.NOTSET)


def fit(package: str, accelerator: str, strategy: Any, load: Path | None = None, **options: Any) -> tuple[Tensor, Any]:
    trainer = make_trainer(package, strategy=strategy, accelerator=accelerator, devices=1, **options)
    module = make_module(package)
    trainer.fit(module, make_data(), ckpt_path=load)
    return flat(module).cpu(), trainer


def strategy_of(**options: Any) -> dict[str, Any]:
    return {"rules": EVERYTHING_SPARSE, "single_device": "sparse", **options}


def the_strategy_at_density_1_is_ddp(package: str, accelerator: str) -> None:
    plain, _ = fit(package, accelerator, "ddp")
    for sparsifier in ("top_k", "exdyna"):
        sparse, trainer = fit(package, accelerator, strategy_of(sparsifier=sparsifier, density=1.0))
        require(trainer.strategy.engine.step > 0, "nothing went through the engine")
        require(torch.equal(sparse, plain), f"{sparsifier} at density 1 differs from DDP")


def the_strategy_trains_in_any_precision(package: str, accelerator: str) -> None:
    precisions = ["32-true", "bf16-mixed", "bf16-true"] + ["16-mixed"] * (accelerator == "gpu")
    for precision in precisions:
        parameters, trainer = fit(package, accelerator, strategy_of(), precision=precision)
        require(parameters.isfinite().all(), f"{precision}: parameters are not finite")
        require(trainer.strategy.engine.step > 0, f"{precision}: no step counted")


def the_strategy_resumes_bit_for_bit(package: str, accelerator: str) -> None:
    straight, _ = fit(package, accelerator, strategy_of(), max_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        _, trainer = fit(package, accelerator, strategy_of(), max_epochs=1)
        trainer.save_checkpoint(Path(folder) / "last.ckpt")
        resumed, _ = fit(package, accelerator, strategy_of(), Path(folder) / "last.ckpt", max_epochs=2)
    require(torch.equal(resumed, straight), "the resumed run differs")


LIGHTNING_JOBS: list[Callable[[str, str], None]] = [
    the_strategy_at_density_1_is_ddp,
    the_strategy_trains_in_any_precision,
    the_strategy_resumes_bit_for_bit,
]
