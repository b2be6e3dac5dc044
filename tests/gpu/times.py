"""What does an exchange cost: on the device, on the host, and in a training?

A local step is one rank's work on a group, from the gradient to the average, among 8 ranks that all hold the same: what
travels is answered at once. So it is in the trainings with an exchange, too. The floor of a step is one pass that reads
gradient and residual and writes both, 16 bytes a coordinate in float32, at the rate of a copy on the same machine. With
second moments, these are read and written, too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.pipeline import init_group
from lightning_sparse.methods.memory import MEMORIES
from tests.gpu.checks import Check, Clock, Numbers, synchronize
from tests.gpu.machine import copy_rate, require_memory
from tests.gpu.models import Transformer
from tests.gpu.processes import one_rank
from tests.gpu.timing import host_seconds_of, seconds_of
from tests.mirror import Mirror, mirrored_ranks, step_that_counts

SIZES = {"cuda": {"25M": 25_000_000, "144M": 144_000_000, "1000M": 1_000_000_000}, "cpu": {"20k": 20_000}}
SPARSIFIERS = ["union_top_k", "shared_top_k", "striped_top_k", "top_k", "exdyna", "micro", "dgc", "sidco_e"]
RANKS = 8
MEASURED = {"cuda": {"25M": 25_000_000, "350M": 350_000_000}, "cpu": {"20k": 20_000}}
"""Groups of which each kernel is timed."""
FLOOR = {"residual": 16, "second_moment": 24}
"""Bytes a coordinate."""
STEPS = 5
"""Over which the times of kernels are averaged."""
GROUP = {"cuda": 25 * 2**20 // 4, "cpu": 5_000}
"""Coordinates of a group of DDP's usual bucket."""

TRAININGS: dict[str, dict[str, Any] | None] = {
    "no exchange": None,
    "DDP": None,
    "defaults": {},
    "DDP, AdamW": None,
    "defaults, AdamW": {},
    "defaults, AdamW that is not fused": {},
    "DDP, batch 32": None,
    "defaults, batch 32": {},
    "DDP, AdamW, batch 32": None,
    "defaults, AdamW, batch 32": {},
    "100 MiB groups": {"bucket_cap_mb": 100.0},
    "100 MiB groups, AdamW, batch 32": {"bucket_cap_mb": 100.0},
    "25 MiB groups": {"bucket_cap_mb": 25.0},
}


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    with one_rank(device):
        for name, options in TRAININGS.items():
            yield Check(f"transformer, {name}", partial(time_training, name, options, device))
    for kept, name in (("residual", "union_top_k"), ("second_moment", "union_top_k with Adam")):
        yield Check(f"launches {name}", partial(count_launches, "union_top_k", kept, device))
        for size, numel in MEASURED[device.type].items():
            yield Check(f"kernels of {name} {size}", partial(time_kernels, kept, device, numel, lost=False))
            yield Check(
                f"kernels of {name} {size}, no candidates", partial(time_kernels, kept, device, numel, lost=True)
            )
    for size, numel in SIZES[device.type].items():
        rate: list[float] = []
        yield Check(f"copy {size}", partial(note_rate, rate, device, numel))
        yield Check(f"torch.topk {size} 0.01", partial(time_topk, device, numel))
        for density in (0.01, 0.001):
            yield Check(
                f"local step union_top_k with Adam {size} {density}",
                partial(time_local_step, "union_top_k", "second_moment", density, device, numel, rate),
            )
        for name in SPARSIFIERS if size in ("25M", "144M") else SPARSIFIERS[:2]:
            for density in (0.01, 0.001):
                yield Check(
                    f"local step {name} {size} {density}",
                    partial(time_local_step, name, "residual", density, device, numel, rate),
                )
    for name in SPARSIFIERS[1:] if device.type == "cuda" else SPARSIFIERS[1:2]:
        yield Check(f"launches {name}", partial(count_launches, name, "residual", device))


def note_rate(rate: list[float], device: torch.device, numel: int) -> Numbers:
    rate.append(copy_rate(device, numel))
    return {"GB/s": round(rate[0] / 1e9, 1)}


def time_topk(device: torch.device, numel: int) -> Numbers:
    x = torch.randn(numel, device=device)
    return {"ms": round(1e3 * seconds_of(lambda: torch.topk(x, numel // 100, sorted=False), device), 3)}


def local_step(
    name: str, kept: str, density: float, device: torch.device, numel: int, lost: bool = False
) -> Callable[[], None]:
    """A function that takes the next step of a group; if ``lost``, without the candidates of the step before."""
    require_memory(device, (60 if kept == "residual" else 80) * numel)
    sparsifier, memory = ls.sparsifiers.SPARSIFIERS.resolve(name), MEMORIES.resolve(kept)
    ctx = Context(step=0, density=density, rank=1, world_size=RANKS)
    state = [init_group(numel, torch.float32, device, ctx, memory=memory, sparsifier=sparsifier)]
    exchange, comm = ls.exchanges.EXCHANGES.resolve(sparsifier.exchange), Mirror(1, RANKS)
    grad = torch.randn(numel, device=device) ** 3
    step = [0]

    def take() -> None:
        if lost and state[0].candidates is not None and state[0].candidates.on_device is not None:
            state[0].candidates.on_device.bound.fill_(math.inf)
        parts = {"memory": memory, "sparsifier": sparsifier, "exchange": exchange}
        # The average of one step is the gradient of the next, so that no time is spent on making another.
        state[0], _ = step_that_counts(grad, state[0], ctx._replace(step=step[0]), parts, comm)
        step[0] += 1

    return take


def time_local_step(
    name: str, kept: str, density: float, device: torch.device, numel: int, rate: list[float]
) -> Numbers:
    seconds = seconds_of(local_step(name, kept, density, device, numel), device, repeats=7)
    numbers: Numbers = {"ms": round(1e3 * seconds, 3)}
    if rate:
        numbers["times the floor"] = round(seconds * rate[0] / (FLOOR[kept] * numel), 1)
    return numbers


def count_launches(name: str, kept: str, device: torch.device) -> Numbers:
    """Of a group of usual size: milliseconds of the host, kernels and copies that it starts, operations of torch."""
    take = local_step(name, kept, 0.01, device, GROUP[device.type])
    host = host_seconds_of(take, device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as profiler:  # 2.11 warns without
        take()
        synchronize(device)
    events = profiler.events()
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    numbers: Numbers = {"host ms": round(1e3 * host, 3)}
    if device.type == "cuda":
        numbers["launches"] = sum(event.name.startswith(launches) for event in events)
    # Those that call others count as one.
    outermost = [e for e in events if e.name.startswith("aten::") and e.cpu_parent is None]
    return {**numbers, "operations": len(outermost)}


def time_kernels(kept: str, device: torch.device, numel: int, lost: bool) -> Numbers:
    """Milliseconds of each kernel of a step of the default on the device, by name, the longest first."""
    take = local_step("union_top_k", kept, 0.01, device, numel, lost)
    for _ in range(3):
        take()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(STEPS):
            take()
        synchronize(device)
    found = [each for each in profiler.key_averages() if each.device_type == DeviceType.CUDA]
    found.sort(key=lambda each: -each.self_device_time_total)
    times: Numbers = {}
    for each in found[:40]:  # of several kernels of torch, names begin alike
        times[each.key[:60]] = round(times.get(each.key[:60], 0.0) + each.self_device_time_total / 1e3 / STEPS, 4)
    return {"ms": round(sum(each.self_device_time_total for each in found) / 1e3 / STEPS, 3), **times}


def time_training(name: str, options: dict[str, Any] | None, device: torch.device) -> Numbers:
    """Milliseconds of a step with forward, backward and optimizer, bfloat16 autocast, 8 or 32 texts of 511 words."""
    on_cuda = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        model = Transformer() if on_cuda else Transformer(layers=1, width=32, heads=2, words=50, length=9)
    ddp = DistributedDataParallel(model)
    with mirrored_ranks(RANKS):
        engine = None if options is None else ls.attach(ddp, single_device="sparse", **options)
    optimizer: torch.optim.Optimizer
    if "AdamW" in name:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=on_cuda and "not fused" not in name)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9, fused=on_cuda)
    tokens = torch.randint(model.words, (32 if "batch 32" in name else 8, model.length), device=device)
    times = []
    for _ in range(4 + (15 if on_cuda else 3)):
        synchronize(device)
        began = time.perf_counter()
        with ddp.no_sync() if name == "no exchange" else nullcontext():
            with torch.autocast(device.type, torch.bfloat16):
                loss = ddp(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize(device)
        times.append(time.perf_counter() - began)
    numbers: Numbers = {"ms": round(1e3 * median(times[4:]), 2)}
    if engine is not None:
        numbers["groups"] = len(engine.groups)
        engine.close()
    return numbers
