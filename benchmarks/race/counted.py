"""Bytes of each method for numbers of ranks that are not trained here: from its messages in a few steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.run import Rank, Run, take
from benchmarks.race.tasks import TASKS
from lightning_sparse.core.messages import AllReduce, Message, Meter

FILE = "race-bytes.jsonl"
STEPS = 30
"""Counted ones, after as many that are not."""
RANKS = (4, 8, 32)


class Hops(Meter):
    """Counts how often a rank hears of its neighbour in a ring, too: twice as often in sums as in all-gathers."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.hops = 0

    def count(self, message: Message) -> None:
        super().count(message)
        self.hops += (1 + isinstance(message, AllReduce)) * (self.world_size - 1)


def count(task: str, data: Path, folder: Path) -> None:
    """Write a line for each method and number of ranks: bytes that a rank sends in a step, on average."""
    loaded, lines = TASKS[task].load(data), []
    for n in RANKS:
        known = replace(TASKS[task], ranks=n, batch=1)
        for method in CONFIGURATIONS:
            ranks = [Rank(Run(task, method, 1.0), known, loaded, rank) for rank in range(n)]
            ranks[0].method.matrices = hops = Hops(n)
            meters = hops, ranks[0].method.vectors
            before, generator = [0.0, 0.0, 0.0], torch.Generator().manual_seed(1)
            for step in range(2 * STEPS):
                if step == STEPS:
                    before = [*(meter.bytes_sent for meter in meters), hops.hops]
                take(ranks, step, known.rate_at(step, 1.0), [loaded.draw(generator, 1) for _ in ranks])
            ends = *(meter.bytes_sent for meter in meters), hops.hops
            sent = [round((end - begin) / STEPS, 1) for end, begin in zip(ends, before, strict=True)]
            names = ("matrices", "vectors", "hops")
            lines.append({"task": task, "method": method, "ranks": n} | dict(zip(names, sent, strict=True)))
            print(json.dumps(lines[-1]), flush=True)
    (folder / FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(folder: Path) -> dict[tuple[str, int], tuple[float, float, float]]:
    """Bytes of matrices, of vectors, and hops a step, by method and number of ranks; empty: nothing is counted."""
    path = folder / FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(line["method"], line["ranks"]): (line["matrices"], line["vectors"], line["hops"]) for line in lines}
