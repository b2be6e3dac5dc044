"""Summary of a report before its figures: results and traffic of each run, and differences of settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.core.console import Table, amount, plain
from lightning_sparse.tools.report.catalog import DENSE_MB, EXPOSED, TOTAL_MB, is_result
from lightning_sparse.tools.report.figures import clock_of, dense_rates, megabytes, typical
from lightning_sparse.tools.report.repeats import MOST_NAMED, compared, repeated
from lightning_sparse.tools.report.runs import Run

ASSUMED = "≈"
"""Mark before traffic that was not logged."""


class Total(NamedTuple):
    """Numbers of a run; None: not known."""

    run: str
    steps: int
    results: dict[str, float]
    """Final values of results: medians of the last thirtieth of the points, at least of one."""
    sent_mb: float | None
    dense_mb: float | None
    """MB that dense ring all-reduces would have sent."""
    assumed: bool
    """True if the run logged no traffic, and that of dense all-reduces of the other runs is assumed."""
    seconds: float | None
    exposed_ms: float | None
    """Median of a step."""

    @property
    def ratio(self) -> float | None:
        """Dense traffic / sent traffic."""
        return self.dense_mb / self.sent_mb if self.dense_mb is not None and self.sent_mb else None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON, which has no NaN."""
        values = {**self._asdict(), "dense_over_sent": self.ratio}
        values["results"] = {name: value if math.isfinite(value) else None for name, value in self.results.items()}
        return values


def totals(runs: Sequence[Run]) -> list[Total]:
    """Return the numbers of each run, in the order of the runs."""

    def last(run: Run, name: str) -> float | None:
        return _only(run.series[name].values[-1:]) if name in run.series else None

    found, clocks = [], clock_of(runs)
    for run in runs:
        end = np.array([float(run.steps - run.offset)])
        results = {name: _end(series.values) for name, series in run.series.items() if is_result(name)}
        assumed = TOTAL_MB not in run.series
        sent = _only(megabytes(runs, run, end)) if assumed else last(run, TOTAL_MB)
        assumed &= sent is not None
        found.append(
            Total(
                run.name,
                run.steps,
                results,
                sent,
                sent if assumed else last(run, DENSE_MB),
                assumed,
                next((known for clock in clocks if (known := _only(clock.at(run, end))) is not None), None),
                typical(run, EXPOSED),
            )
        )
    return found


def _only(x: NDArray[np.float64] | None) -> float | None:
    """Return the number of an array of one, or None if it is not known."""
    return float(x[0]) if x is not None and math.isfinite(x[0]) else None


def _end(values: NDArray[np.float64]) -> float:
    return float(np.median(values[-max(1, len(values) // 30) :]))


def totals_table(runs: Sequence[Run]) -> Table:
    """Return a table with a line for each run."""
    found = totals(runs)
    names = list(dict.fromkeys(n for one in found for n in one.results))[:4]
    header = ["run", "steps", *names, "MB sent by a rank", "MB if dense", "dense / sent", "seconds", "exposed ms"]
    rows = [
        [
            one.run,
            str(one.steps),
            *(_number(one.results.get(name)) for name in names),
            *((ASSUMED if one.assumed else "") + _number(x) for x in (one.sent_mb, one.dense_mb, one.ratio)),
            *(_number(x) for x in (one.seconds, one.exposed_ms)),
        ]
        for one in found
    ]
    return Table("Runs", header, rows)


def _number(x: float | None) -> str:
    return "" if x is None else plain(x, 4)


def differing(runs: Sequence[Run]) -> list[str]:
    """Return settings that runs do not share; first those with different values."""
    return [name for names in _differing(runs) for name in names]


def _differing(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Return settings with different values, and all others that are not in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings[name] for run in runs if name in run.settings] for name in names}
    different = [name for name in names if len(set(values[name])) > 1]
    return different, [name for name in names if name not in set(different) and len(values[name]) < len(runs)]


def settings_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Return a table with settings in lines, runs in columns."""
    rows = [[name, *(run.settings.get(name, "") for run in runs)] for name in names]
    return Table("Settings", ["setting", *(run.name for run in runs)], rows, left=tuple(range(len(runs) + 1)))


def sentences(runs: Sequence[Run]) -> list[str]:
    """Return sentences on results, traffic and settings, and on problems of the logs."""
    found = totals(runs)
    said = []
    saving = [one for one in found if one.ratio is not None and not one.assumed]
    saving.sort(key=lambda one: -(one.ratio or 0.0))
    if len(saving) > 3:
        said.append(f"Of {len(saving)} runs that logged their traffic, these sent most and least against dense:")
        saving = [saving[-1], saving[0]]
    for one in saving:
        sent, dense = (amount(1e6 * (x or 0.0)) for x in (one.sent_mb, one.dense_mb))
        said.append(
            f"{one.run} sent {sent} a rank in {one.steps:,} steps; "
            f"dense all-reduces would have sent {dense}, {plain(one.ratio or 0.0)} times as much."
        )
    for name in sorted({n for one in found for n in one.results}, key=lambda n: ("val" not in n, n))[:2]:
        if groups := repeated(runs, [one.results.get(name, math.nan) for one in found]):
            said.append(" ".join(compared(name, groups)))
        if lost := [one.run for one in found if not math.isfinite(one.results.get(name, 0.0))]:
            said.append(f"{name} is not finite at the end of {', '.join(lost)}.")
    known = [run for run in runs if run.settings]
    if len(known) > 1:
        of_all, of_some = _differing(known)
        others = "" if len(known) == len(runs) else " among the other runs"
        if of_all:
            more = f" and {len(of_all) - MOST_NAMED} more" if len(of_all) > MOST_NAMED else ""
            said.append(f"Settings that differ{others}: {', '.join(of_all[:MOST_NAMED])}{more}.")
        if of_some:
            first = "" if of_all else f"No setting that all of them have differs{others}. "
            there = "1 setting is" if len(of_some) == 1 else f"{len(of_some)} settings are"
            said.append(f"{first}{there} there in some of the runs only, such as {of_some[0]}: see the settings.")
        if not of_all and not of_some:
            said.append(f"No setting differs{others}.")
    if known and (unknown := ", ".join(run.name for run in runs if not run.settings)):
        said.append(f"Settings of {unknown} are not known: none could be read beside the logs.")
    said += _assumptions(runs)
    said += [f"{run.name}: {note}" for run in runs for note in run.notes]
    return said


def _assumptions(runs: Sequence[Run]) -> list[str]:
    """Return sentences on unknown or assumed traffic of runs."""
    bare = [run.name for run in runs if TOTAL_MB not in run.series]
    if not bare:
        return []
    if len(bare) == len(runs):
        return ["No run has logged its traffic: for that, give the Trainer the callback SparsityMonitor."]
    said, rates = [], dense_rates(runs)
    if sparse := [run.name for run in runs if run.name in bare and run.sparse]:
        verb, whose = ("is", "its") if len(sparse) == 1 else ("are", "their")
        said.append(
            f"{', '.join(sparse)} trained sparsely, logged no traffic and {verb} not drawn against MB: "
            f"for that, give {whose} Trainer the callback SparsityMonitor."
        )
    if unread := [run.name for run in runs if run.name in bare and run.unread and not run.sparse]:
        said.append(f"Traffic of {', '.join(unread)} is not known: nothing that could be read says how it trained.")
    if dense := [name for name in bare if name not in (*sparse, *unread)]:
        names, (verb, they) = ", ".join(dense), ("is", "it") if len(dense) == 1 else ("are", "they")
        if len(rates) == 1:
            said.append(
                f"{names} logged no traffic and {verb} drawn as if {they} had sent what dense all-reduces of the "
                f"others would have sent: {amount(1e6 * rates[0])} a step, marked {ASSUMED} in the table. "
                "That holds for plain DDP with the same model and ranks."
            )
        else:
            why = "dense steps of the others differ in size" if rates else "the others logged no dense traffic"
            said.append(f"Traffic of {names} is not known: {they} logged none, and {why}.")
    return said
