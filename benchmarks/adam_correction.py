"""What is left of Adam behind a sparsified exchange, and which remedy helps?

Trains the word model of the judge's text task (LSTM, 223 208 parameters at 1000 words) densely and behind an exchange,
with several ways to combine Adam and error feedback. The ranks are threads of one process (`simulate`), on the code
that trains.

Held fixed: model, text, number of ranks, batch, number of steps, weight decay 0.01, beta2 0.999, and a constant rate.
Sparsifier, density, method, rate and seed vary. A seed decides the initial parameters and the order of sequences.

A method at a wrong rate says nothing, and behind an exchange the best rate is another one than in dense training. Every
method therefore has a search of its own, on the first seed: from a start its rate is doubled or halved until both
neighbours of the best rate are worse. Dense AdamW starts at `--rate`, everything else at the best rate of dense AdamW,
so that the result at that rate is known, too. The other seeds are trained at the best rate only.

Columns: the best rate; validation perplexity after the last step, mean over seeds and each seed; its gap to dense
AdamW, both at their best rates, mean over seeds; the gap on the first seed, both at the best rate of dense AdamW.
Density 1 stands for dense training.

What is finished is kept in `--csv`; the same command again does only what is missing.

    OMP_NUM_THREADS=1 python benchmarks/adam_correction.py --csv adam.csv
    OMP_NUM_THREADS=1 python benchmarks/adam_correction.py --csv adam.csv --text wiki.train.tokens --seeds [0,1]
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
from jsonargparse import CLI
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import lightning_sparse as ls
from lightning_sparse.tools.compare.methods import Method
from lightning_sparse.tools.compare.sheets import Sheet
from lightning_sparse.tools.compare.tasks import Optimizer, check, label, text
from lightning_sparse.tools.compare.training import train

DECAY = 0.01
RATES = 2.0**-14, 4.0  # the search stays between them


class Way(NamedTuple):
    """How Adam and error feedback are combined."""

    memory: ls.memories.Memory
    optimizer: Callable[[float], Optimizer]


def adamw(beta1: float = 0.9) -> Callable[[float], Optimizer]:
    return lambda rate: partial(torch.optim.AdamW, lr=rate, betas=(beta1, 0.999), weight_decay=DECAY)


def sgd(rate: float) -> Optimizer:
    return partial(torch.optim.SGD, lr=rate, weight_decay=DECAY)


WAYS = {
    "AdamW": Way(ls.memories.Residual(), adamw()),
    "AdamW, beta1 0": Way(ls.memories.Residual(), adamw(0.0)),
    "momentum, AdamW, beta1 0": Way(ls.memories.MomentumCorrection(0.9, masking=False), adamw(0.0)),
    "AdamCorrection, SGD": Way(ls.memories.AdamCorrection(beta1=0.9), sgd),
    "AdamCorrection, beta1 0, SGD": Way(ls.memories.AdamCorrection(beta1=0.0), sgd),
}
REFERENCE = "AdamW"


class Row(NamedTuple):
    task: str
    ranks: int
    steps: int
    sparsifier: str
    density: float
    method: str
    rate: float
    seed: int
    actual_density: float
    loss: float
    """Mean training loss of the last steps."""
    perplexity: float
    """On the validation text; infinite where the training diverged."""

    @property
    def key(self) -> tuple[str, int, int, str, float, str, float, int]:
        return self[:8]


class Contest(NamedTuple):
    """What methods are compared at."""

    sparsifier: str
    density: float


@dataclass(frozen=True)
class Arguments:
    """How far is Adam corrected on each rank from Adam behind the exchange, and from dense AdamW?

    Args:
        csv: results; grows while this runs.
        text: text file in UTF-8; None: the reference that comes with Python.
        densities: of the exchange.
        sparsifiers: names; each with its own exchange.
        methods: what is compared.
        seeds: of trainings.
        rate: where the search of dense AdamW starts.
        ranks: that are simulated.
        steps: of a training.
    """

    csv: Path
    text: str | None = None
    densities: tuple[float, ...] = (0.01, 0.001)
    sparsifiers: tuple[str, ...] = ("shared_top_k", "union_top_k")
    methods: tuple[Literal[tuple(WAYS)], ...] = tuple(WAYS)
    seeds: tuple[int, ...] = (0, 1, 2)
    rate: float = 0.016
    ranks: int = 8
    steps: int = 300


class Bench:
    """Trains, unless the result is in the sheet."""

    def __init__(self, arguments: Arguments, ways: dict[str, Way], say: Callable[[str], None]) -> None:
        self.arguments, self.ways, self.say = arguments, ways, say
        self.sheet = Sheet(arguments.csv, Row)
        self.rows = {row.key: row for row in self.sheet.read()}

    def perplexity(self, contest: Contest, method: str, rate: float, seed: int) -> float:
        a = self.arguments
        key = label("text", a.text), a.ranks, a.steps, *contest, method, rate, seed
        if key not in self.rows:
            self.say(f"{contest.sparsifier} {contest.density:g}, {method}, rate {rate:g}, seed {seed}")
            way = self.ways[method]
            task = text(ranks=a.ranks, seed=seed, path=a.text, optimizer=way.optimizer(rate))
            exchanged = Method(
                method, ls.sparsifiers.SPARSIFIERS.resolve(contest.sparsifier), lambda n: 0.0, memory=way.memory
            )
            try:
                run = train(task, exchanged, contest.density, steps=a.steps, every=a.steps)
                row = Row(*key, run.actual_density, run.last.loss, run.last.quality)
            except (FloatingPointError, OverflowError):
                row = Row(*key, math.nan, math.inf, math.inf)
            if math.isnan(row.perplexity):
                row = row._replace(perplexity=math.inf)
            self.sheet.append([row])
            self.rows[key] = row
        return self.rows[key].perplexity

    def best_rate(self, contest: Contest, method: str, start: float) -> float:
        """Where both neighbours are worse, on the first seed; on the way there, perplexity only falls."""

        def at(rate: float) -> float:
            if not RATES[0] < rate < RATES[1]:
                raise RuntimeError(f"{method} at {contest} has no best rate between {RATES[0]:g} and {RATES[1]:g}.")
            return self.perplexity(contest, method, rate, self.arguments.seeds[0])

        best = start
        for factor in (2.0, 0.5):
            while at(best * factor) < at(best):
                best *= factor
            if best != start:
                break
        return best


class Result(NamedTuple):
    rate: float
    perplexities: list[float]
    at_dense_rate: float


def compete(
    bench: Bench, contest: Contest, methods: Iterable[str], start: float, done: Callable[[], None]
) -> dict[str, Result]:
    seeds = bench.arguments.seeds
    results = {}
    for method in methods:
        rate = bench.best_rate(contest, method, start)
        each = [bench.perplexity(contest, method, rate, seed) for seed in seeds]
        results[method] = Result(rate, each, bench.perplexity(contest, method, start, seeds[0]))
        done()
    return results


def make_table(contest: Contest, results: dict[str, Result], dense: Result, arguments: Arguments) -> Table:
    name = "dense" if contest.density == 1 else f"{contest.sparsifier}, density {contest.density:g}"
    table = Table(
        title=f"{label('text', arguments.text)}, {arguments.ranks} ranks, {arguments.steps} steps, {name}",
        caption=f"perplexity; gaps: to dense AdamW, {fmean(dense.perplexities):.1f} at its best rate {dense.rate:g}",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("best rate", "mean", *(f"seed {seed}" for seed in arguments.seeds), "gap", "gap at dense's rate"):
        table.add_column(heading, justify="right", no_wrap=True)
    for method, result in results.items():
        mean = fmean(result.perplexities)
        table.add_row(
            method,
            f"{result.rate:g}",
            f"{mean:.1f}",
            *(f"{perplexity:.1f}" for perplexity in result.perplexities),
            f"{mean - fmean(dense.perplexities):+.1f}",
            f"{result.at_dense_rate - dense.perplexities[0]:+.1f}",
        )
    return table


def main(arguments: Arguments) -> None:
    try:
        check(["text"], ranks=arguments.ranks, text=arguments.text)
        for name in arguments.sparsifiers:
            ls.sparsifiers.SPARSIFIERS.resolve(name)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    torch.set_num_threads(1)
    started = time.perf_counter()
    console = Console(width=130)
    contests = [Contest(name, density) for name in arguments.sparsifiers for density in arguments.densities]
    dense = Contest("everything", 1.0)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=(1 + len(contests)) * len(arguments.methods) + 1)
        bench = Bench(arguments, WAYS, lambda what: progress.update(bar, description=what))

        def done() -> None:
            progress.advance(bar)

        reference = compete(bench, dense, [REFERENCE], arguments.rate, done)[REFERENCE]
        for contest in (dense, *contests):
            results = compete(bench, contest, arguments.methods, reference.rate, done)
            console.print(make_table(contest, results, reference, arguments))
    print(f"{time.perf_counter() - started:.0f} s; all trainings are in {arguments.csv}")


if __name__ == "__main__":
    main(CLI(Arguments, as_positional=False))
