"""What does a sparse step cost where dense wins, and is fallback=True as fast as plain DDP there?

Two processes on one machine train multilayer perceptrons over loopback, where bytes are cheap and dense wins. Three
copies of a model take turns, in an order that is reversed from round to round: plain DDP, DDP with `attach()`, and DDP
with `attach(fallback=True)` after it has made its choice. A step's time is the slower rank's; ratios are medians of
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
    def __init__(self, width: int, depth: int, fallback: bool | None) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.ddp = DistributedDataParallel(nn.Sequential(*layers))
        self.engine = None if fallback is None else ls.attach(self.ddp, fallback=fallback, watch=None)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor) -> float:
        begin = time.perf_counter()
        self.ddp(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Arguments:
    """What does a sparse step cost where dense wins, and is fallback=True as fast as plain DDP there?

    Args:
        widths: of the layers.
        depth: layers.
        batch_size: rows per rank.
        rounds: turns of each.
        steps: per turn.
    """

    widths: tuple[int, ...] = (64, 256, 1024, 1620)
    depth: int = 4
    batch_size: int = 32
    rounds: int = 40
    steps: int = 5


def work(rank: int, port: int, arguments: Arguments) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for width in arguments.widths:
        plain, sparse, tuned = (Variant(width, arguments.depth, fallback) for fallback in (None, False, True))
        batch = torch.randn(arguments.batch_size, width)
        assert tuned.engine is not None and sparse.engine is not None
        [chooser] = [one for one in tuned.engine.observers if isinstance(one, DenseFallback)]
        while not chooser.seconds:  # it compares steps that follow each other, as in training
            tuned.step(batch)
        variants = {"plain": plain, "sparse": sparse, "tuned": tuned}
        for variant in variants.values():
            for _ in range(5 if variant is plain else 70):  # messages become shorter after 64 steps
                variant.step(batch)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for round_ in range(arguments.rounds):
            for name, variant in list(variants.items())[:: 1 if round_ % 2 == 0 else -1]:
                dist.barrier()
                taken = torch.tensor([variant.step(batch) for _ in range(arguments.steps)])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                times[name].append(float(taken.median()))
        if rank == 0:
            report(width, arguments.depth, times, chooser.seconds, tuned.engine.stepper.direct)
        tuned.engine.close()
        sparse.engine.close()
    dist.destroy_process_group()


def report(width: int, depth: int, times: dict[str, list[float]], seconds: dict[Any, float], direct: bool) -> None:
    parts = [f"{depth * width * (width + 1):>10,} parameters: plain DDP {1e3 * median(times['plain']):.3f} ms"]
    for name, title in {"sparse": "sparse", "tuned": "fallback=True"}.items():
        low, middle, high = quantiles([a / b for a, b in zip(times[name], times["plain"], strict=True)], n=4)
        parts.append(f"{title} {1e3 * median(times[name]):.3f} ms, ratio {middle:.3f} ({low:.3f}-{high:.3f})")
    kept = "dense" if direct else "sparse"
    took = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in ("sparse", "dense"))
    print(f"{'; '.join(parts)}; it chose {kept}, having measured {took}", flush=True)


if __name__ == "__main__":
    mp.spawn(work, (free_port(), CLI(Arguments, as_positional=False)), RANKS)
