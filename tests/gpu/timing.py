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
    if device.type != "cuda":
        return host_seconds_of(function, device, repeats, warm_up)

    def once() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end)

    return _median(once, device, repeats, warm_up)


def host_seconds_of(function: Callable[[], Any], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Median seconds until a call returns, when the device has nothing else to do; it may go on working."""

    def once() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return _median(once, device, repeats, warm_up)


def _median(once: Callable[[], float], device: torch.device, repeats: int, warm_up: int) -> float:
    times = []
    for _ in range(warm_up + repeats):
        synchronize(device)
        times.append(once())
    synchronize(device)
    return median(times[warm_up:])
