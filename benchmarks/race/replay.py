"""Steps of a training on a GPU as CUDA graphs: the host then only draws batches.

One step of four small ranks is some 1500 kernels of a few microseconds, which a host launches in ten times the time
that they take. Each step of a cycle is recorded once, all ranks and messages in it, and later steps repeat it. Two
numbers are then those of the recorded step: whose turn it is, and the rotation of what a full union leaves out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.race.methods.base import Method, Rate
from lightning_sparse.engine.group import tensors_in

Batches = Sequence[tuple[Tensor, Tensor]]
Step = Callable[[int, Rate, Batches], list[Tensor]]
"""Take the step of this number; return the losses before it."""
Losses = Callable[[], list[Tensor]]
CYCLE = 60
"""Recorded steps: a multiple of the rounds of local methods, and of the numbers of ranks."""


class Recorded(NamedTuple):
    """A step that can be repeated."""

    replay: Losses
    sent: list[float]
    """Bytes, by meter."""


class Replay:
    """Take steps: the first cycle and the last one as they are, and replay all others.

    Args:
        step: takes one.
        methods: of the ranks.
        steps: of the training.
        record: makes of a function what repeats its work on the device. None: no step is replayed.
    """

    def __init__(
        self, step: Step, methods: Sequence[Method], steps: int, record: Callable[[Losses], Losses] | None
    ) -> None:
        self._step, self._methods, self._last, self._record_one = step, methods, steps - 1, record
        self._meters = [meter for method in methods for meter in (method.matrices, method.vectors)]
        self._rate = torch.zeros((), device=methods[0].flat.matrices.device)
        self._texts: Tensor | None = None
        self._taken = 0
        self._recorded: dict[int, Recorded] = {}

    def __call__(self, number: int, rate: Rate, batches: Batches) -> list[Tensor]:
        """Take the step of this number."""
        self._put(rate, batches)
        self._taken += 1
        record = self._record_one
        if record is None or self._taken <= CYCLE or number == self._last:
            return self._take(number)
        place = number % CYCLE
        if place not in self._recorded:
            self._recorded[place] = self._record(number, record)
        replay, sent = self._recorded[place]
        losses = replay()
        for meter, more in zip(self._meters, sent, strict=True):
            meter.bytes_sent += more
        return losses

    def _put(self, rate: Rate, batches: Batches) -> None:
        """Copy what changes from step to step to where recorded steps read it."""
        self._rate.fill_(rate)
        texts = torch.stack([torch.stack(batch) for batch in batches])
        if self._texts is None:
            self._texts = torch.empty_like(texts, device=self._rate.device)
        pinned = texts.pin_memory() if self._rate.is_cuda else texts
        self._texts.copy_(pinned, non_blocking=True)

    def _take(self, number: int) -> list[Tensor]:
        assert self._texts is not None
        return self._step(number, self._rate, [(x, y) for x, y in self._texts])

    def _record(self, number: int, record: Callable[[Losses], Losses]) -> Recorded:
        before = [meter.bytes_sent for meter in self._meters]
        replay = record(lambda: self._in_place(number))
        after = [meter.bytes_sent for meter in self._meters]
        for meter, sent in zip(self._meters, before, strict=True):
            meter.bytes_sent = sent
        return Recorded(replay, [end - begin for begin, end in zip(before, after, strict=True)])

    def _in_place(self, number: int) -> list[Tensor]:
        """Take a step, and copy new tensors to where the old ones lie, from which the next step is to begin."""
        kept = [{name: copy.copy(getattr(method, name)) for name in method.renewed} for method in self._methods]
        losses = self._take(number)
        for method, old in zip(self._methods, kept, strict=True):
            fresh = [x.clone() for name in old for x in _tensors(getattr(method, name))]
            places = [x for value in old.values() for x in _tensors(value)]
            for place, x in zip(places, fresh, strict=True):
                place.copy_(x)
            for name, value in old.items():
                setattr(method, name, value)
        return losses


def graphs() -> Callable[[Losses], Losses]:
    """Record CUDA graphs, which share memory. All that follows in this thread then runs in a stream of its own."""
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.Stream())
    pool = torch.cuda.graph_pool_handle()

    def record(once: Losses) -> Losses:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool)
        try:
            losses = once()
        finally:
            graph.capture_end()

        def replay() -> list[Tensor]:
            graph.replay()
            return losses

        return replay

    return record


def _tensors(value: object) -> list[Tensor]:
    return list(tensors_in(tuple(value) if isinstance(value, list) else value))
