"""A part's checks, run one after another in this process; one that fails does not stop the others."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

Numbers = dict[str, Any]
"""What a check found, by name; goes into the JSON file as it is."""


class SkipError(Exception):
    """This cannot be looked at here; the message says why."""


class Clock:
    """Seconds that a part may still take."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    @property
    def over(self) -> bool:
        return self.left < 0


class Check(NamedTuple):
    name: str
    job: Callable[[], Numbers | None]


class Outcome(NamedTuple):
    check: str
    result: str
    """passed, failed or skipped."""
    seconds: float
    numbers: Numbers
    why: str
    """Why it failed or was skipped."""


def run(checks: Iterable[Check], clock: Clock, device: torch.device, begin: Callable[[str], None]) -> Iterator[Outcome]:
    """Do the checks while there is time; ``begin`` hears the name of each before it starts."""
    lost = ""
    for check in checks:
        began = time.monotonic()
        numbers, result, why = None, "passed", ""
        if lost or clock.over:
            result, why = "skipped", lost or "out of time"
        else:
            begin(check.name)
            try:
                numbers = check.job()
            except Exception as error:
                why = _why_skipped(error)
                result, why = ("skipped", why) if why else ("failed", traceback.format_exc())
                lost = _lost(device)
        if device.type == "cuda" and not lost:
            gc.collect()  # engines and their models refer to each other
            torch.cuda.empty_cache()
        yield Outcome(check.name, result, time.monotonic() - began, numbers or {}, why)


def _why_skipped(error: Exception) -> str:
    """What is missing here; empty if the error is one of the code under test."""
    if isinstance(error, SkipError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError) or "OutOfMemoryError" in str(error):  # the latter: on another rank
        return f"out of memory: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in ("tests", "lightning_sparse"):
        return f"package missing: {error.name}"
    return ""


def _lost(device: torch.device) -> str:
    """Why the device is of no use to this process any more; empty if it still is."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return f"the device has failed before: {str(error).splitlines()[0]}"
    return ""


def sweep(jobs: Mapping[str, Callable[[], T]], clock: Clock) -> list[T]:
    """Results of many small jobs, as far as there is time; fails with the names of all that raised."""
    wrong, results = {}, []
    for name, job in jobs.items():
        if clock.over:
            break
        try:
            results.append(job())
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}".split("\n\n")[0]
            if "CUDA error" in str(error):  # the device will answer no more
                break
    require(not wrong, f"{len(wrong)} of {len(wrong) + len(results)} are wrong: {wrong}")
    if len(results) < len(jobs):
        raise SkipError(f"out of time after {len(results)} of {len(jobs)}, which are right")
    return results


def require(condition: object, sentence: str) -> None:
    """Fail unless something holds, in words."""
    if not condition:
        raise AssertionError(sentence)


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
