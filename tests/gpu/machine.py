"""What is this machine, and how fast does its memory copy? The denominator of all step times."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import torch

from tests.gpu.checks import Check, Clock, Numbers, SkipError
from tests.gpu.timing import seconds_of

SIZES = {"cuda": {"25M": 25_000_000, "144M": 144_000_000, "1000M": 1_000_000_000}, "cpu": {"100k": 100_000}}


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    yield Check("names and versions", partial(describe, device))
    for name, numel in SIZES[device.type].items():
        yield Check(f"copy {name}", partial(time_copy, device, numel))


def describe(device: torch.device) -> Numbers:
    if device.type == "cpu":
        return {"threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    numbers = {
        "GPU": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "GiB": round(total / 2**30, 1),
        "GiB free": round(free / 2**30, 1),
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "GPUs": torch.cuda.device_count(),
    }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        numbers["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
    return numbers


def time_copy(device: torch.device, numel: int) -> Numbers:
    return {"GB/s": round(copy_rate(device, numel) / 1e9, 1)}


def copy_rate(device: torch.device, numel: int) -> float:
    """Bytes a second that a copy of float32 reads and writes."""
    require_memory(device, 8 * numel)
    source, target = torch.ones(numel, device=device), torch.empty(numel, device=device)
    return 8 * numel / seconds_of(lambda: target.copy_(source), device)


def require_memory(device: torch.device, size: float) -> None:
    """Skip what does not fit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if size > 0.9 * free:
            raise SkipError(f"out of memory: needs {size / 2**30:.1f} GiB, {free / 2**30:.1f} are free")
