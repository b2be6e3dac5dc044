"""Does a step of a group ever make the host wait? CUDA itself raises where it does.

All sparsifiers with all exchanges that accept them, and all memories, in float32 and bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.pipeline import init_group
from tests.contract.cases import MEMORIES, PAIR_NAMES, PAIRS, Case, fit
from tests.gpu.checks import Check, Clock, Numbers, SkipError, require, sweep
from tests.gpu.one_training import Training
from tests.gpu.processes import one_rank
from tests.mirror import Mirror, step_that_counts

NUMEL, RANKS = 10_007, 4


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    pairs = list(zip(PAIR_NAMES, PAIRS, strict=True))[:: 1 if device.type == "cuda" else 40]
    yield Check("a wait is noticed", partial(notice, device))
    for memory in (ls.memories.Residual(), ls.memories.NoMemory(), *MEMORIES):
        for dtype in (torch.float32, torch.bfloat16):
            yield Check(
                f"all pairs, {memory!r}, {str(dtype).removeprefix('torch.')}",
                partial(look, device, clock, pairs, memory, dtype),
            )
    for fused in (False, True):
        yield Check(f"steps of AdamW, fused={fused}", partial(steps_of, torch.optim.AdamW, device, fused=fused))
        sgd = {"lr": 0.1, "momentum": 0.9, "fused": fused}
        yield Check(f"steps of momentum SGD, fused={fused}", partial(steps_of, torch.optim.SGD, device, **sgd))


def steps_of(optimizer: type[torch.optim.Optimizer], device: torch.device, **settings: Any) -> None:
    """The optimizer's step behind an exchange, of parameters that are sparsified and of dense ones."""
    with one_rank(device):
        made = partial(optimizer, **settings)
        training = Training(str(device), {"density": 0.05}, dtype=torch.float32, optimizer=made)
        for step in range(4):
            training.optimizer.zero_grad()
            training.ddp(training.batch()).square().mean().backward()
            before = training.parameters()
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")  # the first ones may load kernels
            try:
                training.optimizer.step()
            finally:
                if device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            require(not torch.equal(training.parameters(), before), "the step moved nothing")
        training.end([])


def notice(device: torch.device) -> None:
    if device.type == "cpu":
        raise SkipError("on a CPU nobody waits for a device")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones(3, device=device).sum().item()
    except RuntimeError as error:
        require("synchroniz" in str(error), f"another error: {error}")
    else:
        raise AssertionError("item() was not noticed")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def look(
    device: torch.device,
    clock: Clock,
    pairs: list[tuple[str, tuple[Case, str]]],
    memory: ls.memories.Memory,
    dtype: torch.dtype,
) -> Numbers:
    jobs = {
        name: partial(steps, device, case.sparsifier, exchange, memory, dtype)
        for name, (case, exchange) in pairs
        if fit(memory, exchange)
    }
    return {"pairs": len(sweep(jobs, clock))}


def steps(
    device: torch.device,
    sparsifier: ls.sparsifiers.Sparsifier,
    exchange: str,
    memory: ls.memories.Memory,
    dtype: torch.dtype,
) -> None:
    ctx = Context(step=0, density=0.05, rank=1, world_size=RANKS)
    state = init_group(NUMEL, dtype, device, ctx, memory=memory, sparsifier=sparsifier)
    parts = {"memory": memory, "sparsifier": sparsifier, "exchange": ls.exchanges.EXCHANGES.resolve(exchange)}
    for step in range(3):
        grad = torch.randn(NUMEL, device=device).to(dtype)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step may load kernels
        try:
            state, _ = step_that_counts(grad, state, ctx._replace(step=step), parts, Mirror(1, RANKS))
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
