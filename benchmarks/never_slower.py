"""Is fallback=True as fast as plain DDP where dense wins?

Two processes on one machine train multilayer perceptrons over loopback, where bytes are cheap and dense wins. Two
copies of a model take turns, in an order that is reversed from round to round: plain DDP, and DDP with
`attach(fallback=True)` after it has made its choice. A step's time is the slower rank's; ratios are medians of
paired rounds with quartiles, below 1 is faster than DDP. The steps that the fallback compared are printed beside them.

    python benchmarks/never_slower.py
    python benchmarks/never_slower.py --widths [64] --rounds 100
"""

import os
import time
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jsonargparse import CLI
from machine import free_port
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.tuning.controllers import DenseFallback

RANKS = 2


class Variant:
    def __init__(self, width: int, depth: int, fallback: str | None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.engine = ls.attach(self.ddp, fallback=True, watch=None) if fallback else None
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor) -> float:
        begin = time.perf_counter()
        self.ddp(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Arguments:
    """Is fallback=True as fast as plain DDP where dense wins?

    Args:
        widths: of the layers.
        depth: layers.
        batch_size: rows per rank.
        rounds: turns of both.
        steps: per turn.
    """

    widths: tuple[int, ...] = (64, 256, 1024)
    depth: int = 4
    batch_size: int = 32
    rounds: int = 40
    steps: int = 5


def work(rank: int, port: int, arguments: Arguments) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for width in arguments.widths:
        plain, tuned = Variant(width, arguments.depth, None), Variant(width, arguments.depth, "dense")
        batch = torch.randn(arguments.batch_size, width)
        assert tuned.engine is not None
        [chooser] = [one for one in tuned.engine.observers if isinstance(one, DenseFallback)]
        while not chooser.seconds:  # it compares steps that follow each other, as in training
            tuned.step(batch)
        for _ in range(5):
            plain.step(batch)
            tuned.step(batch)
        times: dict[str, list[float]] = {"plain": [], "tuned": []}
        for round_ in range(arguments.rounds):
            for name, variant in [("plain", plain), ("tuned", tuned)][:: 1 if round_ % 2 == 0 else -1]:
                dist.barrier()
                taken = torch.tensor([variant.step(batch) for _ in range(arguments.steps)])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                times[name].append(float(taken.median()))
        if rank == 0:
            report(width, arguments.depth, times, chooser.seconds, tuned.engine._direct)
        tuned.engine.close()
    dist.destroy_process_group()


def report(width: int, depth: int, times: dict[str, list[float]], seconds: dict[Any, float], direct: bool) -> None:
    ratios = [a / b for a, b in zip(times["tuned"], times["plain"], strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    print(
        f"{depth * width * (width + 1):>10,} parameters: plain DDP {1e3 * median(times['plain']):.3f} ms, "
        f"fallback=True {1e3 * median(times['tuned']):.3f} ms, ratio {middle:.3f} ({low:.3f}-{high:.3f}); it chose "
        f"{'dense' if direct else 'sparse'}, having measured sparse {1e3 * seconds['sparse']:.3f} ms, dense "
        f"{1e3 * seconds['dense']:.3f} ms",
        flush=True,
    )


if __name__ == "__main__":
    mp.spawn(work, (free_port(), CLI(Arguments, as_positional=False)), RANKS)
