"""What error feedback costs in memory: bytes of a coordinate, counted where they are allocated."""

from __future__ import annotations

import ctypes
import gc
import math
import time
from collections.abc import Callable
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import covering, in_turns
from tests.ranks import Ranks

WIDTH, LAYERS = 640, 4
NUMEL = WIDTH * WIDTH * LAYERS


def model(dtype: torch.dtype) -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def held() -> float:
    """Bytes a coordinate that the process holds once threads of the process group have let go of what they sent."""
    gc.collect()
    latest = [allocated()]
    while len(latest) < 5 or max(latest[-5:]) - min(latest[-5:]) > 0.01:  # the time limit of the ranks ends this
        time.sleep(0.02)
        latest.append(allocated())
    return latest[-1]


def allocated() -> float:
    """Bytes a coordinate that any thread of the process has allocated, as glibc counts."""
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    assert libc.malloc_info(0, stream) == 0
    libc.fclose(stream)
    assert text.value is not None
    whole = ElementTree.fromstring(text.value.decode())  # of all arenas together, after those of each
    libc.free(text)
    bytes_of = {total.get("type"): int(total.get("size", 0)) for total in whole.findall("total")}
    mapped = next(int(system.get("size", 0)) for system in whole.findall("system") if system.get("type") == "current")
    return (mapped - bytes_of["fast"] - bytes_of["rest"] + bytes_of["mmap"]) / NUMEL


def most(work: Callable[[], Any]) -> float:
    """The most bytes a coordinate that one thread holds while some work goes on, without those before."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    assert profile.kineto_results is not None
    events = profile.kineto_results.events()  # as they are: to make Python objects of all takes seconds
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in changes)) / NUMEL


class Cost(NamedTuple):
    """Bytes a coordinate."""

    attached: float  # what attaching adds
    told: tuple[float, float]  # by the engine, after attaching and after some steps
    held: float  # model, gradients and the rest, after some steps
    peak: float  # the most within a step, beyond what is held


def costs(dtype: torch.dtype, grouping: str | None, adam: bool = False, profiled: bool = True) -> Cost:
    torch.manual_seed(0)  # how many candidates a selection looks at depends on the gradients
    before = held()
    ddp = DistributedDataParallel(model(dtype), gradient_as_bucket_view=True)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4) if adam else None

    def step() -> None:
        ddp.zero_grad(set_to_none=False)
        ddp(batch).square().mean().backward()
        if optimizer is not None:
            optimizer.step()

    attached, engine, told = 0.0, None, 0.0
    if grouping is not None:
        unattached = held()
        engine = ls.attach(ddp, grouping=grouping, density=0.01)
        attached = held() - unattached
        told = engine.memory_bytes / NUMEL
    for _ in range(3):  # DDP cuts its buckets anew in the second one
        step()
    after, peak = held() - before, median(most(step) for _ in range(3)) if profiled else math.nan
    if engine is None:
        return Cost(attached, (told, told), after, peak)
    return Cost(attached, (told, engine.memory_bytes / NUMEL), after, peak)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("grouping", "dtype"),
    covering(in_turns(["bucket", "model"], [torch.float32, torch.bfloat16]), together=1),
)
def test_what_a_residual_costs_beside_model_gradients_and_optimizer(
    two_ranks: Ranks, dtype: torch.dtype, grouping: str
) -> None:
    size = dtype.itemsize
    two_ranks(costs, dtype, grouping, False, False)  # what a process allocates once
    plain = two_ranks(costs, dtype, None)[0]
    assert plain.held == pytest.approx(2 * size, rel=0.05)  # model and gradients
    sparse = two_ranks(costs, dtype, grouping)[0]
    assert sparse.attached == pytest.approx(4, rel=0.02)  # a float32 vector, whatever the gradients are
    assert sparse.attached == pytest.approx(sparse.told[0], rel=0.02)
    # And what was selected. No copy of gradients, also where a group lies in several of DDP's buckets, and nothing of
    # the coordinates that would probably be selected.
    assert -0.3 <= sparse.held - plain.held - 4 <= 0.7
    assert sparse.told[1] == pytest.approx(4, abs=0.01)
    # Within a step: one of a rank's own half of the coordinates, selected coordinates, and messages.
    assert sparse.peak - plain.peak <= 2 + 0.5


@pytest.mark.thorough
def test_adamw_costs_hardly_more_than_behind_ddp(two_ranks: Ranks) -> None:
    """Its own two moments are not made; the residual and a second moment take their place."""
    two_ranks(costs, torch.float32, "bucket", True, False)
    plain = two_ranks(costs, torch.float32, None, True, False)[0]
    assert plain.held == pytest.approx(16, rel=0.05)
    sparse = two_ranks(costs, torch.float32, "bucket", True, False)[0]
    assert sparse.attached == pytest.approx(4, rel=0.02)  # the first step shows that there is an AdamW
    assert sparse.told == pytest.approx((4, 8), abs=0.01)
    assert -0.3 <= sparse.held - plain.held <= 2
