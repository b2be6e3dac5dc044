"""Trainings in half precision, and with AdamW; functions of a device's name that fail by raising, on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch

from lightning_sparse.ops.on_cuda import on_cuda
from tests.gpu.checks import Numbers, require
from tests.gpu.one_training import Training, close, train


def half_precision_trains(device: str) -> Numbers:
    """Autocast in bfloat16, and in float16 with a scaler; and a model in bfloat16."""
    return _in_half_precision(device)


def steps_of_adam_are_those_of_the_cpu(device: str) -> Numbers:
    """AdamW, fused and not, with second moments that travel; a step is skipped, and gradients are clipped."""
    options = {"sparsifier": "shared_top_k", "density": 0.05}
    for fused in (False, True):
        results = []
        for where in (device, "cpu"):
            adam = partial(torch.optim.AdamW, lr=0.01, fused=fused)
            training = Training(where, options, optimizer=adam)
            training.limit = 5.0
            losses = [training.step(factor=float("nan") if step == 3 else 1.0) for step in range(8)]
            require(training.engine.skipped_steps == 1, f"{training.engine.skipped_steps} skipped steps instead of 1")
            results.append(training.end(losses))
        close(*results)
    return {"last loss": round(results[0][0][-1], 4)}


def adam_trains_in_half_precision(device: str) -> Numbers:
    """AdamW with the default sparsifier: autocast to bfloat16, to float16 with a scaler, and a model in bfloat16."""
    return _in_half_precision(device, optimizer=partial(torch.optim.AdamW, lr=0.01, fused=True))


def adam_trains_alike_with_and_without_kernels(device: str) -> Numbers:
    """AdamW with the default sparsifier: kernels in Triton, and operations of torch. Second moments may differ in their
    last bits, and picks that hang on these.
    """
    results = []
    for trouble in (on_cuda.trouble, "compared with torch"):
        with mock.patch.object(on_cuda, "trouble", trouble):
            adam = partial(torch.optim.AdamW, lr=0.01, fused=True)
            results.append(train(device, {"density": 0.05}, dtype=torch.float32, steps=10, optimizer=adam))
    close(*results, rtol=1e-2)
    kernels = on_cuda.trouble or "; ".join(on_cuda.refused.values()) or "used"
    return {"bit for bit": torch.equal(results[0][1], results[1][1]), "kernels": kernels}


def _in_half_precision(device: str, **options: Any) -> Numbers:
    """The last loss of each way."""
    kind, last = torch.device(device).type, {}
    for dtype in (torch.bfloat16, torch.float16):
        scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
        training = Training(device, {"density": 0.05}, dtype=torch.float32, **options)
        losses = []
        for _ in range(20):
            training.optimizer.zero_grad()
            with torch.autocast(kind, dtype):
                loss = training.ddp(training.batch()).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            losses.append(loss.item())
        training.end(losses)
        require(sum(losses[-3:]) < sum(losses[:3]), f"losses do not fall in {dtype}: {losses}")
        last[str(dtype).removeprefix("torch.")] = round(losses[-1], 4)
    losses, _ = train(device, {"density": 0.05}, dtype=torch.bfloat16, steps=20, **options)
    require(sum(losses[-3:]) < sum(losses[:3]), f"losses do not fall in a bfloat16 model: {losses}")
    return last
