"""Fallback to dense exchange: measure sparse and dense steps, keep the faster ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

import torch

from lightning_sparse.engine import Engine
from lightning_sparse.methods.grouping import Group, ParameterSize, dense_plan
from lightning_sparse.tuning.controllers.planner import Planner
from lightning_sparse.tuning.performance.rank_sync import slowest

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
        if not engine.direct:
            engine.go_direct(for_good=True)

    def close(self) -> None:
        """Do nothing."""


class DenseFallback:
    """Runs a few sparse and a few dense steps in turn, then continues with the faster ones.

    Both are measured again when the step time has changed by a factor of 1.5; if the choice is the same again, the
    interval of the checks is doubled. In dense steps, DDP's own buckets are averaged, in full; residuals are sent in
    the first of them.

    Args:
        sizes: of all parameters, in order of registration.
        bucket_cap_mb: size of DDP's buckets.
        planner: the comparison waits for its profile.
    """

    def __init__(self, sizes: Sequence[ParameterSize], bucket_cap_mb: float, planner: Planner | None = None) -> None:
        self.mode: Mode = "sparse"
        self.seconds: dict[Mode, float] = {}
        """Median step times of the latest comparison, of the slowest rank."""
        self._dense_plan = dense_plan(sizes, bucket_cap_mb)
        self._sparse_plan: list[Group] = []
        self._planner = planner
        self._turn: int | None = 0
        self._times: dict[Mode, list[float]] = {"sparse": [], "dense": []}
        self._in_turn = 0
        self._before: float | None = None
        self._recent: deque[float] = deque(maxlen=CHECK // 4)
        self._interval, self._since_check = CHECK, 0
        self._usual: float | None = None
        self._chosen: Mode | None = None

    def before_step(self, engine: Engine) -> None:
        """Record the time of the step that ends here, and change the mode when it is due."""
        if self._planner is not None and self._planner.profile is None:
            return
        taken = self._clock(engine)
        if self.mode == "dense" and not engine.direct:
            engine.go_direct()
        if self._turn is not None:
            self._compare(self._turn, taken, engine)
        elif taken is not None:
            self._watch(taken, engine)

    def close(self) -> None:
        """Do nothing."""

    def _clock(self, engine: Engine) -> float | None:
        """Return the seconds since the previous call; waits for the device while both modes are compared."""
        if engine.device.type == "cuda" and self._turn is not None:
            torch.cuda.synchronize(engine.device)
        before, self._before = self._before, time.perf_counter()
        return None if before is None else self._before - before

    def _compare(self, turn: int, taken: float | None, engine: Engine) -> None:
        if self._in_turn > WARMUP and taken is not None:
            self._times[self.mode].append(taken)
        self._in_turn += 1
        if self._in_turn <= WARMUP + STEPS:
            return
        self._in_turn = 0
        if turn + 1 < len(TURNS):
            self._turn = turn + 1
            self._switch(TURNS[turn + 1], engine)
            return
        self._turn = None
        sparse, dense = slowest([median(self._times[mode]) for mode in ("sparse", "dense")], engine.comm, engine.device)
        self.seconds = {"sparse": sparse, "dense": dense}
        self._times = {"sparse": [], "dense": []}
        choice: Mode = "dense" if dense < sparse else "sparse"
        self._interval = 2 * self._interval if choice == self._chosen else CHECK
        self._chosen, self._usual = choice, None
        self._switch(choice, engine)
        if engine.comm.rank == 0:
            print(
                f"sparse_ddp: dense steps take {1e3 * dense:.4g} ms and sparse ones {1e3 * sparse:.4g} ms, so that "
                f"training goes on {self.mode} (fallback='dense').",
                flush=True,
            )

    def _watch(self, taken: float, engine: Engine) -> None:
        self._recent.append(taken)
        self._since_check += 1
        if self._since_check < self._interval:
            return
        self._since_check = 0
        [now] = slowest([median(self._recent)], engine.comm, engine.device)
        if self._usual is None:  # not from the comparison, which is short and may have been disturbed
            self._usual = now
        elif not 1 / CHANGE < now / self._usual < CHANGE:
            self._turn = 0
            self._switch(TURNS[0], engine)

    def _switch(self, mode: Mode, engine: Engine) -> None:
        if mode == self.mode:
            return
        if mode == "dense":
            self._sparse_plan = engine.plan
        self.mode = mode
        engine.regroup(self._dense_plan if mode == "dense" else self._sparse_plan)
