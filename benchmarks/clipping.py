"""Clipping with SGD behind a sparse exchange: of averages, or of gradients before they wait.

n simulated ranks in one process, on the code that trains: an LSTM of 223 208 parameters on text, UnionTopK, momentum
spent early as `sparse_ddp` does (`docs/momentum.md`), warm-up over 30 steps and cosine to a tenth. Parameters with
fewer than 2 dimensions stay dense. Ways to clip:

- `dense`: averages, without sparsification.
- `averages`: after the exchange, as with `memory="residual"`.
- `ranks`: each rank's own gradients, before the exchange; to `sqrt(n)` times the limit.
- `mean`: by norm, before the exchange, all ranks by one factor, from the norm of the mean, as `sparse_ddp` does.

Every finished training is a line of JSON in `--out`; the same command again does only what is missing.

    OMP_NUM_THREADS=1 python benchmarks/clipping.py --text wiki.valid.tokens --rate 4 --limits=[0.05]
    OMP_NUM_THREADS=1 python benchmarks/clipping.py --text wiki.valid.tokens --rate 2 --limits=[0.0003] \
        --algorithm value
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jsonargparse import CLI
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped
from lightning_sparse.tools.compare.tasks import text as text_task

WARM = 30
Way = Literal["dense", "averages", "ranks", "mean"]


class Run(NamedTuple):
    """A training, but for its text."""

    way: Way
    algorithm: str
    limit: float
    rate: float
    momentum: float
    density: float
    ranks: int
    seed: int
    steps: int


def clip_(gradient: Tensor, limit: float, algorithm: str) -> None:
    """Clip a rank's gradient in place."""
    if algorithm == "value":
        gradient.clamp_(-limit, limit)
    else:
        gradient.mul_((limit / gradient.norm()).clamp(max=1.0))


def train(run: Run, path: Path) -> dict[str, float]:
    """Perplexity on text that was not seen, and the share of steps, or of values, that dense training would clip."""
    task = text_task(ranks=run.ranks, seed=run.seed, batch=8, path=path, momentum=run.momentum)
    optimizer, parameters = task.optimizer, task.parameters
    sparse = [p.dim() > 1 and run.way != "dense" for p in parameters]
    sizes = [p.numel() for p in parameters]
    chosen = torch.cat([torch.full((size,), own) for size, own in zip(sizes, sparse, strict=True)])
    waited = [torch.zeros_like(p, dtype=torch.uint8) for p in parameters]
    spending = Spending()
    rows = torch.empty(0)
    clipped = 0.0

    def gradients() -> Iterator[Tensor]:
        nonlocal rows, clipped
        for _ in range(run.steps):
            rows = task.gradients()
            mean = rows.mean(0)
            over = mean.norm() > run.limit if run.algorithm == "norm" else (mean.abs() > run.limit).double().mean()
            clipped += float(over) / run.steps
            if run.way == "ranks" and run.algorithm == "value":
                rows.clamp_(-run.limit * math.sqrt(run.ranks), run.limit * math.sqrt(run.ranks))
            elif run.way in ("ranks", "mean"):
                norms = mean.norm() if run.way == "mean" else rows.norm(dim=1, keepdim=True) / math.sqrt(run.ranks)
                rows.mul_((run.limit / norms).clamp(max=1.0))
            yield rows[:, chosen] if run.way != "dense" else torch.zeros(run.ranks, 1)

    for trace in ls.simulate(gradients(), sparsifier="union_top_k", density=run.density, memory=ls.memories.Residual()):
        average = rows.mean(0)
        if run.way != "dense":
            average[chosen] = trace.update
        for p, part in zip(parameters, average.split(sizes), strict=True):
            p.grad = part.view_as(p)
        if run.way in ("dense", "averages"):
            clip_ = nn.utils.clip_grad_norm_ if run.algorithm == "norm" else nn.utils.clip_grad_value_
            clip_(parameters, run.limit)
        group = optimizer.param_groups[0]
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * trace.step / run.steps))
        group["lr"] = run.rate * min(1.0, (trace.step + 1) / WARM) * cosine
        optimizer.step()
        if by := Momentum.of(group):
            found = [
                Stepped(p, p.grad, optimizer.state[p]["momentum_buffer"], since)
                for p, since, own in zip(parameters, waited, sparse, strict=True)
                if own and p.grad is not None
            ]
            spending.spend_(found, by)
        if not math.isfinite(task.loss):
            return {"perplexity": math.inf, "clipped": clipped}
    return {"perplexity": task.evaluate(), "clipped": clipped}


def main(
    text: Path,
    ways: list[Way] | None = None,
    limits: list[float] | None = None,
    algorithm: Literal["norm", "value"] = "norm",
    rate: float = 4.0,
    momentum: float = 0.9,
    densities: list[float] | None = None,
    ranks: int = 4,
    seeds: list[int] | None = None,
    steps: int = 300,
    out: Path = Path("clipping.jsonl"),
) -> None:
    """Train what is missing.

    Args:
        text: UTF-8, such as WikiText-2's.
        ways: None: all that the algorithm has.
        limits: None: 0.25.
        algorithm: clip by norm or value.
        rate: the largest learning rate.
        momentum: of SGD.
        densities: None: 0.01 and 0.001.
        ranks: number of simulated ranks.
        seeds: None: 0.
        steps: of each training.
        out: where results are kept, a line each.
    """
    torch.set_num_threads(1)
    known: list[dict[str, Any]] = []
    if out.exists():
        known = [json.loads(line) for line in out.read_text().splitlines()]
    for limit in limits or [0.25]:
        for seed in seeds or [0]:
            for way in ways or ["dense", "averages", "ranks", *["mean"][: algorithm == "norm"]]:
                for density in [1.0] if way == "dense" else densities or [0.01, 0.001]:
                    run = Run(way, algorithm, limit, rate, momentum, density, ranks, seed, steps)
                    if not any(row["run"] == list(run) for row in known):
                        row = {"run": list(run), **train(run, text)}
                        print(json.dumps(row), flush=True)
                        with out.open("a") as file:
                            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    CLI(main, as_positional=False)
