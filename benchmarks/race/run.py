"""One training: what identifies it, n simulated ranks, and a state that a later process can go on from."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adam import loss_of
from benchmarks.race.configurations import ALL
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Method, Place, Rate
from benchmarks.race.replay import Batches, Replay, Step, graphs
from benchmarks.race.tasks import TASKS, Loaded, Task
from lightning_sparse.core.messages import AllReduce, Steps
from lightning_sparse.engine.drivers import drive_ranks

EVERY = 200
"""Steps between two states on disk."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """What is trained."""

    task: str
    method: str
    rate: float
    """In multiples of the task's."""
    seed: int = 0
    outer: tuple[tuple[str, float], ...] = ()
    """Searched settings that are not where the search begins."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the method."""
        return {**ALL[self.method].settings, **dict(self.outer)}

    def described(self) -> dict[str, Any]:
        """All that decides the result but code and machine."""
        task, make = TASKS[self.task], ALL[self.method].make
        return {
            "task": [self.task, task.version],
            "method": [self.method, make.version],  # type: ignore[attr-defined]
            "settings": self.settings,
            "rate": self.rate,
            "seed": self.seed,
            "steps": task.steps,
        }

    @property
    def key(self) -> str:
        """A hash of that."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[:16]


class Rank:
    """One rank of a training."""

    def __init__(self, run: Run, task: Task, loaded: Loaded, rank: int) -> None:
        self.loaded, self.rank = loaded, rank
        with torch.random.fork_rng(devices=[]), CPU:
            torch.manual_seed(run.seed)
            model = loaded.model()
        self.model = model.to(torch.get_default_device())
        self.flat = Flat(self.model)
        make = ALL[run.method].make
        at = Place(rank, task.ranks, task.steps, task.betas, task.decay, task.clip_of_averages)
        self.method: Method = make(self.flat, at, **run.settings)
        self.clip = task.clip_of_ranks(self.method.clips_averages, self.method.local)

    def step(self, step: int, rate: Rate, x: Tensor, y: Tensor) -> Steps[Tensor]:
        """Take a step; return this rank's loss before it, ()."""
        self.flat.zero_()
        loss = loss_of(self.model, x, y)
        loss.backward()
        if self.method.clips_jointly:
            yield from self._clip_jointly()
        elif self.clip is not None:
            nn.utils.clip_grad_norm_(self.flat.both, self.clip)
        yield from self.method.step(rate, step)
        return loss.detach()

    def _clip_jointly(self) -> Steps[None]:
        """Clip by the norm of the mean gradient, whose messages are not counted: the library estimates it by 16 KB."""
        assert self.clip is not None
        squares = []
        for p in self.flat.both:
            mean = (yield AllReduce(p.grad.clone())) / self.method.at.ranks
            squares.append(mean.double().square().sum())
        limit = min(1.0, self.clip / (float(torch.stack(squares).sum().sqrt()) + 1e-6))
        for p in self.flat.both:
            p.grad.mul_(limit)

    def validate(self) -> float:
        """Loss of the parameters that all ranks agree on, on what is not trained on."""
        own = [parameter.data.clone() for parameter in self.flat.both]
        self.flat.load(self.method.shared())
        self.model.eval()
        with torch.no_grad():
            found = self.loaded.evaluate(self.model)
        self.model.train()
        self.flat.load(own)
        return found


def take(ranks: Sequence[Rank], number: int, rate: Rate, batches: Batches) -> list[Tensor]:
    """Take a step of all ranks; return their losses before it."""
    return drive_ranks([rank.step(number, rate, *batch) for rank, batch in zip(ranks, batches, strict=True)])


class Simulation:
    """A training with all its ranks in this process, on torch's default device.

    Parameters begin, and batches are drawn, on a CPU, so that a seed means the same everywhere.
    """

    def __init__(self, run: Run, loaded: Loaded) -> None:
        self.run, self.task = run, TASKS[run.task]
        self.ranks = [Rank(run, self.task, loaded, rank) for rank in range(self.task.ranks)]
        self.device = self.ranks[0].flat.matrices.device
        self.generator = torch.Generator().manual_seed(run.seed + 1)
        self._draw = functools.partial(loaded.draw, self.generator, self.task.batch)
        self._step: Step = functools.partial(take, self.ranks)
        if self.device.type == "cuda":
            methods = [rank.method for rank in self.ranks]
            record = None if any(method.waits for method in methods) else graphs()
            self._step = Replay(self._step, methods, self.task.steps, record)
        self.done, self.seconds = 0, 0.0
        self.curve: list[list[float]] = []

    def train(self, stop: Callable[[], bool], save: Path | None) -> bool:
        """Train to the end, or until somebody says stop; return whether it has ended."""
        begin, before = time.process_time(), self.seconds
        while self.done < self.task.steps and not self._diverged:
            with CPU:
                batches = [self._draw() for _ in self.ranks]
            losses = self._step(self.done, self.task.rate_at(self.done, self.run.rate), batches)
            self.done += 1
            self.seconds = before + time.process_time() - begin
            mean = float(sum(losses)) / len(losses)
            if not math.isfinite(mean):
                self.curve.append([self.done, *self._megabytes(), math.inf])
            elif self.done % self.task.every == 0 or self.done == self.task.steps:
                self.curve.append([self.done, *self._megabytes(), self.ranks[0].validate()])
            pause = self.done % EVERY == 0 or stop()
            if save is not None and pause and self.done < self.task.steps:
                _save(self.state(), save)
            if stop():
                break
        return self.done == self.task.steps or self._diverged

    @property
    def _diverged(self) -> bool:
        return bool(self.curve) and not math.isfinite(self.curve[-1][-1])

    def _megabytes(self) -> tuple[float, float]:
        """Sent by a rank: for matrices, and for vectors."""
        method = self.ranks[0].method
        return method.matrices.bytes_sent / 1e6, method.vectors.bytes_sent / 1e6

    def state(self) -> dict[str, Any]:
        """All that a later process needs."""
        return {
            "run": self.run.described(),
            "done": self.done,
            "seconds": self.seconds,
            "curve": self.curve,
            "ranks": [rank.method.state() for rank in self.ranks],
            "generator": self.generator.get_state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.done, self.seconds, self.curve = state["done"], state["seconds"], state["curve"]
        self.generator.set_state(state["generator"])
        for rank, method in zip(self.ranks, state["ranks"], strict=True):
            rank.method.load(method)


def _save(state: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    torch.save(state, beside)
    beside.replace(path)
