"""Fallback to dense exchange: measure sparse and dense steps, keep the faster ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from statistics import median
from typing import Literal

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.methods.grouping import Group, ParameterSize, dense_plan

Mode = Literal["sparse", "dense"]

WARMUP = 4
"""Steps after a change that are not timed: the first dense step sends the residuals."""
STEPS = 6
"""Timed steps in each of two turns."""
TURNS: tuple[Mode, ...] = ("sparse", "dense", "sparse", "dense")
CHECK = 200
"""Steps between checks of the step time, at first."""
CHANGE = 1.5
"""Factor of the step time from which on both are measured again."""


class StayDense:
    """Switches to the averages of DDP's own buckets as soon as residuals are empty; for plans that are all dense."""

    def before_step(self, engine: Engine) -> None:
        """Switch to DDP's buckets, unless the engine has."""
        if not engine.stepper.direct:
            engine._go_direct(for_good=True)

    def close(self) -> None:
        """Do nothing."""


class DenseFallback:
    """Runs a few sparse and a few dense steps in turn, then continues with the faster ones.

    Both are measured again when the step time has changed by a factor of 1.5; if the choice is the same again, the
    interval of the checks is doubled. In dense steps, DDP's own buckets are averaged, in full; residuals are sent in
    the first of them. DDP averages in backward, and sparse gradients are exchanged when the optimizer steps: compared
    are whole steps, from one exchange to the next.

    Args:
        sizes: of all parameters, in order of registration.
        bucket_cap_mb: size of DDP's buckets.
    """

    def __init__(self, sizes: Sequence[ParameterSize], bucket_cap_mb: float) -> None:
        self.mode: Mode = "sparse"
        self.seconds: dict[Mode, float] = {}
        """Median step times of the latest comparison, of the slowest rank."""
        self._plans: dict[Mode, list[Group]] = {"dense": dense_plan(sizes, bucket_cap_mb)}
        self._course: Iterator[None] | None = None
        self._comparing = False
        self._before = self._taken = 0.0

    def before_step(self, engine: Engine) -> None:
        """Take the time of the step that ends here, and change the mode when it is due."""
        if self._comparing and engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        before, self._before = self._before, time.perf_counter()
        self._taken = self._before - before
        if self.mode == "dense" and not engine.stepper.direct:
            engine._go_direct()
        if self._course is None:
            self._course = self._decide(engine)
            next(self._course)
        next(self._course)

    def close(self) -> None:
        """Let go of the engine."""
        self._course = None

    def _decide(self, engine: Engine) -> Iterator[None]:
        """Compare, go on with the faster mode until the step time changes, and compare again; pause for each step."""
        interval, chosen = CHECK, None
        while True:
            choice = yield from self._compare(engine)
            interval = 2 * interval if choice == chosen else CHECK
            chosen = choice
            # Not the time of the comparison, which is short and may have been disturbed.
            usual = now = yield from self._typical(interval, engine)
            while 1 / CHANGE < now / usual < CHANGE:
                now = yield from self._typical(interval, engine)

    def _compare(self, engine: Engine) -> Generator[None, None, Mode]:
        """Return the faster mode, in which training goes on."""
        times: dict[Mode, list[float]] = {"sparse": [], "dense": []}
        self._comparing = True
        for mode in TURNS:
            self._switch(mode, engine)
            for step in range(WARMUP + 1 + STEPS):
                yield
                if step > WARMUP:
                    times[mode].append(self._taken)
        self._comparing = False
        medians = _of_slowest([median(taken) for taken in times.values()], engine)
        self.seconds = dict(zip(times, medians, strict=True))
        sparse, dense = medians
        choice: Mode = "dense" if dense < sparse else "sparse"
        self._switch(choice, engine)
        if engine.comm.rank == 0:
            print(
                f"sparse_ddp: dense steps take {1e3 * dense:.4g} ms and sparse ones {1e3 * sparse:.4g} ms, so that "
                f"training goes on {choice} (fallback=True).",
                flush=True,
            )
        return choice

    def _typical(self, steps: int, engine: Engine) -> Generator[None, None, float]:
        """Return the median time of the last of some steps, of the slowest rank."""
        recent: deque[float] = deque(maxlen=CHECK // 4)
        for _ in range(steps):
            yield
            recent.append(self._taken)
        return _of_slowest([median(recent)], engine)[0]

    def _switch(self, mode: Mode, engine: Engine) -> None:
        if mode == self.mode:
            return
        if mode == "dense":
            self._plans["sparse"] = engine.groups
        self.mode = mode
        engine.regroup(self._plans[mode])


def _of_slowest(seconds: Sequence[float], engine: Engine) -> list[float]:
    """Return the maximum of each number over ranks."""
    own = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    largest: list[float] = engine.comm.all_gather(own.to(engine.device)).amax(0).tolist()
    return largest
