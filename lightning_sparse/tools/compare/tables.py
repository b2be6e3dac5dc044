"""Results of comparisons as tables: markdown for files, and rows of text for other output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean

from lightning_sparse.core.console import Table
from lightning_sparse.tools.compare import recorded
from lightning_sparse.tools.compare.methods import DENSE
from lightning_sparse.tools.compare.training import Result


def compare_tables(results: Sequence[Result]) -> list[Table]:
    """Return a table for each task, number of ranks, length and density, best mean loss first and dense training last.

    Args:
        results: in any order.
    """
    return [_compare_table(group) for group in contests(results)]


def contests(results: Sequence[Result]) -> list[list[Result]]:
    """Group results that are comparable: same task, ranks, steps and density; dense ones, for reference, last."""

    def setting(result: Result) -> tuple[str, int, int]:
        return result.task, result.ranks, result.steps

    groups = []
    for _, some in groupby(sorted(results, key=setting), setting):
        together = list(some)
        dense = [result for result in together if result.method == DENSE.name]
        sparse = [result for result in together if result.method != DENSE.name]
        densities = sorted({result.density for result in sparse}, reverse=True)
        groups += [[*(result for result in sparse if result.density == d), *dense] for d in densities] or [dense]
    return groups


def by_method(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Return the results of each method, in order of seeds."""
    methods: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.seed):
        methods.setdefault(result.method, []).append(result)
    return methods


def title(contest: Sequence[Result]) -> str:
    """Return the common setting of a contest's results."""
    first = contest[0]
    traffic = "" if first.method == DENSE.name else f", bytes of MiCRO at density {first.density:g}"
    return f"{first.task}, {first.ranks} ranks, {first.steps} steps{traffic}"


def _compare_table(contest: list[Result]) -> Table:
    seeds = sorted({result.seed for result in contest})
    numbers = [f"loss, seed {seed}" for seed in seeds] if len(seeds) > 1 else []
    header = ["method", "density given", "MB sent", "training loss", *numbers, contest[0].quality_name]
    rows = []
    for name, runs in by_method(contest).items():
        losses = {run.seed: run.loss for run in runs}
        mean = fmean(losses.values())
        sent, quality = fmean(run.megabytes for run in runs), fmean(run.quality for run in runs)
        each = [_loss(losses.get(seed)) for seed in seeds] if numbers else []
        cells = [name, f"{runs[0].given_density:.3g}", _sent(sent), _loss(mean), *each, _number(quality, 1)]
        rows.append((name == DENSE.name, math.isnan(mean), mean, cells))
    return Table(title(contest), header, [cells for *_, cells in sorted(rows, key=lambda row: row[:3])])


TRAINED = ["method", "seed", "density given", "MB sent", "training loss", "accuracy or perplexity"]
"""Header of :func:`trained`."""


def trained(result: Result) -> tuple[str, list[str]]:
    """Return title and cells of one training."""
    given, sent = f"{result.given_density:.3g}", _sent(result.megabytes)
    cells = [result.method, str(result.seed), given, sent, _loss(result.loss), _number(result.quality, 1)]
    return title([result]), cells


REPLAYED = ["method", "density error / %", "steps to target", "f(t)", "build-up", "estimate", "5 %", "95 %"]
REPLAYED += ["captured", "kB sent"]
"""Header of :func:`replayed`."""


def replayed(row: recorded.Row) -> tuple[str, list[str]]:
    """Return title and cells of one method on one stream."""
    setting = f"{row.stream}, {row.ranks} ranks, density {row.density:g}, {row.steps} steps, seed {row.seed}"
    never = "never" if row.steps >= recorded.STAY else "-"
    return setting, [
        row.method,
        _number(row.relative_density_error, 1),
        never if row.steps_to_target is None else str(row.steps_to_target),
        *(_number(x, 2) for x in (row.padding_ratio, row.build_up, row.estimate, row.estimate_low, row.estimate_high)),
        _number(row.captured, 3),
        _number(row.bytes_sent / 1e3, 1),
    ]


def replay_tables(rows: Sequence[recorded.Row]) -> list[Table]:
    """Return a table for each stream, number of ranks, length, density and seed.

    Args:
        rows: in the order of methods.
    """

    def setting(row: recorded.Row) -> tuple[str, int, float, int, int]:
        return row.stream, row.ranks, -row.density, row.steps, row.seed

    groups = [list(some) for _, some in groupby(sorted(rows, key=setting), setting)]
    return [Table(replayed(group[0])[0], REPLAYED, [replayed(row)[1] for row in group]) for group in groups]


def _sent(megabytes: float) -> str:
    return "diverged" if math.isnan(megabytes) else f"{megabytes:.3g}"


def _loss(loss: float | None) -> str:
    return "" if loss is None else _number(loss, 4)


def _number(x: float, digits: int) -> str:
    if math.isnan(x):
        return "diverged"
    return f"{x:.{digits}f}" if abs(x) < 1e5 else f"{x:.0e}"
