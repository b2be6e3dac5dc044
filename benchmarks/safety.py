"""What do skipped steps that can be taken back, and the watchdogs, cost?

Two processes on one machine train over loopback. Two copies of a model take turns, in an order that is reversed from
round to round: "guarded" with the defaults, and "bare" with `watch=None`, which skips steps as well. A turn's time is
the slower rank's; ratios are medians of paired turns with quartiles. Looks of the watchdog come once in a hundred steps
and miss most turns, so that the time inside what exists for safety is also added up with a clock: agreements at the end
of backward whether gradients are finite, and looks.

    python benchmarks/safety.py
    python benchmarks/safety.py --models [digits] --rounds 100
"""

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from jsonargparse import CLI
from machine import free_port
from models14m import VGG, LSTMLanguageModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls

RANKS = 2


class Digits(nn.Module):
    """The network of examples/train_digits.py: 58 thousand parameters, images of 8 x 8."""

    batch_size = 32

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @classmethod
    def random_batch(cls, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(cls.batch_size, 1, 8, 8, generator=generator)
        return x, torch.randint(10, (cls.batch_size,), generator=generator)


MODELS: dict[str, Any] = {"digits": Digits, "lstm": LSTMLanguageModel, "vgg": VGG}


class Variant:
    def __init__(self, model: type, guarded: bool, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(model())
        bare = {} if guarded else {"watch": None}
        self.engine = ls.attach(self.ddp, **options, **bare)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.guarded = guarded
        self.inside = 0.0
        if guarded:
            for owner, name in [
                (self.engine.stepper, "end_backward"),
                (self.engine.observers[0], "before_step"),
            ]:
                setattr(owner, name, self.timed(getattr(owner, name)))

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.inside += time.perf_counter() - begin

        return run

    def step(self, batch: Any) -> None:
        self.ddp(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Arguments:
    """What do skipped steps that can be taken back, and the watchdogs, cost?

    Args:
        models: that are trained.
        sparsifier: name.
        density: of the exchange.
        rounds: turns of both.
        steps: per turn.
    """

    models: tuple[Literal[tuple(MODELS)], ...] = tuple(MODELS)
    sparsifier: str = "union_top_k"
    density: float = 0.01
    rounds: int = 40
    steps: int = 10


def work(rank: int, port: int, arguments: Arguments) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for name in arguments.models:
        options = {"sparsifier": arguments.sparsifier, "density": arguments.density}
        variants = [Variant(MODELS[name], guarded, options) for guarded in (True, False)]
        batch = MODELS[name].random_batch(torch.Generator().manual_seed(rank))
        for variant in variants * 3:
            variant.step(batch)
        variants[0].inside = 0.0
        times: list[list[float]] = [[], []]
        for round_ in range(arguments.rounds):
            for i in (0, 1) if round_ % 2 == 0 else (1, 0):
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(arguments.steps):
                    variants[i].step(batch)
                taken = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                times[i].append(float(taken))
        if rank == 0:
            ratios = [guarded / bare for guarded, bare in zip(*times, strict=True)]
            low, middle, high = quantiles(ratios, n=4)
            steps = arguments.rounds * arguments.steps
            print(
                f"{name}: guarded {1e3 * median(times[0]) / arguments.steps:.3f} ms a step, bare "
                f"{1e3 * median(times[1]) / arguments.steps:.3f} ms, ratio {middle:.3f} ({low:.3f}-{high:.3f}); inside "
                f"guards {1e3 * variants[0].inside / steps:.4f} ms a step, {variants[0].inside / sum(times[0]):.2%} of "
                f"it, {steps // 100} looks included",
                flush=True,
            )
        for variant in variants:
            variant.engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (free_port(), CLI(Arguments, as_positional=False)), RANKS)
