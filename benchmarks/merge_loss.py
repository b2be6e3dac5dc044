"""How much time do the published rules for merging layers lose against the best groups?

Draws models (sizes of layers log-uniform, times of backward uniform, independent of the sizes), asks each rule for its
groups, and evaluates these with the model of an iteration that the rules themselves assume: arithmetic, nothing is run.

Held fixed: 8 ranks in a ring, sizes of 1000 to 3 million coordinates, backward of 50 ms on average for the whole model,
density 0.001 where the exchange is sparse, 4-byte values, the seed. Rate and latency of the links vary, and what
travels: everything (dense), pairs that a full sort has found in 2.19e-10 s x log2 x (as OMGS-SGD models Top-k), or
pairs that a linear search has found in 20 us + 1 ns x.

Columns: how long the best groups take, and how many there are, on average; then by how much the rule takes longer, in
% of the best time: mean and, in brackets, the worst over all models. Forward is not counted; with it, all losses are
smaller. "omgs" and "mg-wfbp" are the published greedy rules, with and
without regard to selections; "layers" merges nothing, "8192" is the fixed threshold of
MGS-SGD, "model" is one message.

    python benchmarks/merge_loss.py
    python benchmarks/merge_loss.py --layers [9] --models 500
"""

import math
import random
from collections.abc import Callable
from statistics import mean

from jsonargparse import CLI
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_sparse.methods.grouping import merge_below
from lightning_sparse.tools.advisor.networks import ring
from lightning_sparse.tuning.performance.cost import CostModel, Curve, Line
from lightning_sparse.tuning.performance.merge import greedy_merge, iteration_seconds, optimal_merge
from lightning_sparse.tuning.performance.network import Network

RANKS, DENSITY, BACKWARD = 8, 0.001, 50e-3
LINKS = {
    "1 Gbit/s, 100 us": (1e9, 100e-6),
    "10 Gbit/s, 200 us": (10e9, 200e-6),
    "10 Gbit/s, 30 us": (10e9, 30e-6),
    "100 Gbit/s, 5 us": (100e9, 5e-6),
}
SORT = Curve(*zip(*((2**i, 2.19e-10 * i * 2**i) for i in range(31)), strict=True))
COSTS: dict[str, Callable[[Network], CostModel]] = {
    "dense": lambda network: CostModel(network.all_reduce.per(4)),
    "sorted": lambda network: CostModel(network.all_gather.per(8 * DENSITY), SORT),
    "searched": lambda network: CostModel(network.all_gather.per(8 * DENSITY), Line(20e-6, 1e-9)),
}
Groups = list[list[int]]
RULES: dict[str, Callable[[list[int], list[float], CostModel], Groups]] = {
    "omgs": lambda numels, backward, cost: greedy_merge(numels, backward, cost),
    "mg-wfbp": lambda numels, backward, cost: greedy_merge(numels, backward, CostModel(cost.exchange)),
    "layers": lambda numels, backward, cost: merge_below(numels, 0),
    "8192": lambda numels, backward, cost: merge_below(numels, 8192),
    "model": lambda numels, backward, cost: merge_below(numels, math.inf),
}


def draw(generator: random.Random, layers: int) -> tuple[list[int], list[float]]:
    numels = [round(math.exp(generator.uniform(math.log(1e3), math.log(3e6)))) for _ in range(layers)]
    return numels, [generator.uniform(0, 2) * BACKWARD / layers for _ in range(layers)]


def main(layers: tuple[int, ...] = (9, 60, 160), models: int = 200, seed: int = 0) -> None:
    """Draw models, and compare the rules.

    Args:
        layers: of models.
        models: drawn for each line of the table.
        seed: of the models.
    """
    table = Table(title=f"time beyond the best groups in %, mean (worst) of {models} models, {RANKS} ranks")
    for heading in ("layers", "link", "exchange", "best ms", "groups", *RULES):
        table.add_column(heading, justify="left" if heading in ("link", "exchange") else "right", no_wrap=True)
    cases = [(number, link, kind) for number in layers for link in LINKS for kind in COSTS]
    for number, link, kind in track(cases, description="drawing"):
        rate, latency = LINKS[link]
        cost = COSTS[kind](ring(RANKS, latency, rate))
        generator = random.Random(seed)
        times, sizes = [], []
        losses: dict[str, list[float]] = {rule: [] for rule in RULES}
        for _ in range(models):
            model = draw(generator, number)
            groups = optimal_merge(*model, cost)
            best = iteration_seconds(groups, *model, cost)
            times.append(1e3 * best)
            sizes.append(len(groups))
            for rule, merge in RULES.items():
                ratio = iteration_seconds(merge(*model, cost), *model, cost) / best
                losses[rule].append(100 * max(0.0, ratio - 1))  # below 1 by rounding only
        cells = [f"{mean(loss):.1f} ({max(loss):.1f})" for loss in losses.values()]
        last = kind == list(COSTS)[-1]
        table.add_row(str(number), link, kind, f"{mean(times):.0f}", f"{mean(sizes):.1f}", *cells, end_section=last)
    Console(width=140).print(table)


if __name__ == "__main__":
    CLI(main, as_positional=False)
