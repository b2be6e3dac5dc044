"""Do simulated ranks on the device compute what they compute on the CPU, on the same path?

Every sparsifier with every exchange that accepts it and every memory, four steps of which the third is skipped. Values
are normal: which of equal magnitudes go first is the one thing that a device may decide otherwise. Numbers of ranks are
powers of two, since a device may multiply by a reciprocal where a CPU divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import lightning_sparse as ls
from tests.contract.cases import MEMORIES, PAIR_NAMES, PAIRS, Case, fit
from tests.gpu.checks import Check, Clock, Numbers, require, sweep
from tests.static_path import static_path

NUMEL, DENSITY = 1003, 0.1
STEPS, SKIPPED_STEP = 4, 2
# What is added, multiplied and divided is rounded alike, but for fused multiply-adds and sums formed in another order.
CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    # On a CPU, where this compares a thing with itself, a few show that it runs.
    pairs = list(zip(PAIR_NAMES, PAIRS, strict=True))[:: 1 if device.type == "cuda" else 80]
    others = sorted(
        (ls.memories.NoMemory(), *MEMORIES), key=lambda memory: not isinstance(memory, ls.memories.SecondMoment)
    )
    chosen: list[tuple[ls.memories.Memory, torch.dtype, int]] = [
        (ls.memories.Residual(), torch.float64, 4),
        *((memory, torch.float64, 2) for memory in others[:1]),  # the other default
        (ls.memories.Residual(), torch.float32, 4),
        *((memory, torch.float64, 2) for memory in others[1:]),
    ]
    for memory, dtype, n in chosen:
        yield Check(
            f"all pairs, {memory!r}, {str(dtype).removeprefix('torch.')}",
            partial(compare, device, clock, pairs, memory, dtype, n),
        )


def stream(n: int, dtype: torch.dtype) -> Tensor:
    """(steps, n, numel) gradients on the CPU."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(STEPS, n, NUMEL, dtype=torch.float64, generator=generator)
    gradients[:, :, : NUMEL // 4] *= 3  # for ranges that move
    gradients[SKIPPED_STEP, n - 1, NUMEL // 2] = float("inf")
    return gradients.to(dtype)


def compare(
    device: torch.device,
    clock: Clock,
    pairs: list[tuple[str, tuple[Case, str]]],
    memory: ls.memories.Memory,
    dtype: torch.dtype,
    n: int,
) -> Numbers:
    gradients = stream(n, dtype)
    jobs = {
        name: partial(one, device, case.sparsifier, exchange, memory, gradients)
        for name, (case, exchange) in pairs
        if case.serves(n, NUMEL, DENSITY) and fit(memory, exchange)
    }
    same = sweep(jobs, clock)
    return {"pairs": len(same), "bit for bit": sum(same)}


def one(
    device: torch.device,
    sparsifier: ls.sparsifiers.Sparsifier,
    exchange: str,
    memory: ls.memories.Memory,
    gradients: Tensor,
) -> bool:
    """Compare one pair; returns whether updates are equal bit for bit."""
    # The first direction of Adam is 1 everywhere, and all would tie.
    adam = isinstance(memory, ls.memories.AdamCorrection)
    density = ls.Warmup(1.0, DENSITY, steps=1) if adam else DENSITY
    parts = {"sparsifier": sparsifier, "exchange": exchange, "memory": memory, "density": density}
    with static_path():
        expected = list(ls.simulate(gradients, **parts))
        found = list(ls.simulate(gradients.to(device), **parts))
    return equal(found, expected, **CLOSE[gradients.dtype])


def equal(
    found: list[ls.api.simulation.StepTrace], expected: list[ls.api.simulation.StepTrace], **close: float
) -> bool:
    """Fail unless two runs did the same; returns whether their updates are equal bit for bit."""
    same = True
    for a, b in zip(found, expected, strict=True):
        update = a.update.cpu()
        if a.step == SKIPPED_STEP:
            require(update.isnan().all() and b.update.isnan().all(), "the skipped step is not skipped")
            continue
        require(torch.equal(a.counts, b.counts), f"step {a.step}: counts {a.counts} and {b.counts}")
        require(torch.equal(a.indices, b.indices), f"step {a.step}: other coordinates")
        torch.testing.assert_close(update, b.update, **close)
        torch.testing.assert_close(a.residual_norm, b.residual_norm, **close)
        same &= torch.equal(update, b.update)
        if b.threshold is not None:
            torch.testing.assert_close(a.threshold, b.threshold, rtol=1e-6, atol=0, equal_nan=True)
    return same
