"""How long something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from tests.gpu.checks import synchronize


def seconds_of(function: Callable[[], Any], device: torch.device, repeats: int = 10, warm_up: int = 3) -> float:
    """Median seconds from the first to the last kernel of a call, on the device's clock where there is one."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(1e-3 * begin.elapsed_time(end))
        else:
            began = time.perf_counter()
            function()
            times.append(time.perf_counter() - began)
    return median(times)


def host_seconds_of(function: Callable[[], Any], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Median seconds until a call returns, when the device has nothing else to do; it may go on working."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    synchronize(device)
    return median(times)
