"""What does it cost one rank to choose its coordinates?

Calls `select` of each sparsifier on one group, as one of n ranks that all hold the same values, and prints its time as
a multiple of Top-k's. No exchange, no memory: what a method does before it talks. Values are Student's t with 3 degrees
of freedom times a scale for each of ten layers, new ones in each step, on top of what the method left unsent: the
residual of its own picks, as of a single rank.

Held fixed: values, density and one compute thread. Methods take turns, and each time is divided by Top-k's of the same
turn; medians of these ratios with their quartiles. Below 1 is cheaper than Top-k; milliseconds are of this machine.

CLT-k's cost is the leader's, at every n-th step. What ranks ask each other while choosing (MiCRO and ExDyna) is
answered at once here: on a network it takes the time of one small all-gather.

    OMP_NUM_THREADS=1 python benchmarks/selection_cost.py
    OMP_NUM_THREADS=1 python benchmarks/selection_cost.py --numel 25000000 --ranks [8] --density 0.01
"""

import time
from collections import defaultdict
from statistics import median, quantiles

import torch
from jsonargparse import CLI
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import resolve
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.tools.compare.tasks import heavy_tail

BASELINE = "top_k"
WARM_UP = 4  # turns that are not counted: first thresholds, first buffers


class Chooser:
    """One method as rank 0 of n."""

    def __init__(self, name: str, n: int, numel: int, density: float) -> None:
        self.sparsifier, self.n, self.density = ls.sparsifiers.SPARSIFIERS.resolve(name), n, density
        self.state = self.sparsifier.init(numel, n, density, torch.device("cpu"))
        self.residual = torch.zeros(numel)
        self.counts: Tensor | None = None

    def turn(self, gradient: Tensor, step: int) -> float:
        """Seconds of one selection."""
        acc = self.residual + gradient
        n = self.n
        ctx = Context(
            step=step * n,  # rank 0 is the leader at these
            density=self.density,
            rank=0,
            world_size=n,
            counts=self.counts,
            union=None if self.counts is None else self.counts.sum(),
        )
        began = time.perf_counter()
        (selection, self.state), _ = drive_mirrored(resolve(self.sparsifier.select(acc, self.state, ctx)), n)
        seconds = time.perf_counter() - began
        picks = selection.indices[: int(selection.count)]
        self.residual = acc.index_fill_(0, picks, 0.0)
        self.counts = selection.count.expand(n).clone()
        return seconds


def main(
    sparsifiers: tuple[str, ...] = tuple(
        name for name, _ in ls.sparsifiers.SPARSIFIERS.items() if name != "everything"
    ),
    numel: int = 4_000_000,
    density: float = 0.01,
    ranks: tuple[int, ...] = (2, 8, 32),
    turns: int = 12,
) -> None:
    """Time each, in turns.

    Args:
        sparsifiers: names.
        numel: coordinates of the group.
        density: of the selection.
        ranks: numbers of ranks.
        turns: of every method, at least 2.
    """
    torch.set_num_threads(1)
    others = [name for name in sparsifiers if name != BASELINE]
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for n in ranks:
        choosers = {name: Chooser(name, n, numel, density) for name in [BASELINE, *others]}
        # As many different gradients as turns would not fit into memory; a few in turns do not repeat their residuals.
        gradients = [rows[0] for rows in heavy_tail(ranks=1, numel=numel, steps=4)]
        for step in track(range(WARM_UP + turns), description=f"{n} ranks"):
            for name, chooser in choosers.items():
                seconds = chooser.turn(gradients[step % len(gradients)], step)
                if step >= WARM_UP:
                    times[name, n].append(seconds)
    title = f"selection among {numel:,} coordinates, density {density:g}, 1 thread, Top-k = 1"
    table = Table("sparsifier", title=title)
    for n in ranks:
        table.add_column(f"{n} ranks", justify="right")
        table.add_column("ms", justify="right")
    for name in [BASELINE, *others]:
        cells = []
        for n in ranks:
            ratios = [own / base for own, base in zip(times[name, n], times[BASELINE, n], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            cells += [f"{median(ratios):.2f} ({low:.2f}-{high:.2f})", f"{1e3 * median(times[name, n]):.1f}"]
        table.add_row(name, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    CLI(main, as_positional=False)
