"""What a report says before its figures: results and traffic of each run, and what differs in their settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_sparse.console import Table
from lightning_sparse.report.catalog import DENSE_MB, EXPOSED, TOTAL_MB, is_better_low, is_result
from lightning_sparse.report.figures import clock_of, dense_rates
from lightning_sparse.report.runs import Run

MOST_NAMED = 6
"""Settings that a sentence names."""


class Total(NamedTuple):
    """A run in numbers; None: not known."""

    run: str
    steps: int
    results: dict[str, float]
    """Ends of what says how well training goes: medians of the last thirtieth of the points, at least of one."""
    sent_mb: float | None
    dense_mb: float | None
    """What dense ring all-reduces would have sent, as logged."""
    seconds: float | None
    exposed_ms: float | None
    """Median of a step."""

    @property
    def ratio(self) -> float | None:
        """Dense traffic / sent."""
        return self.dense_mb / self.sent_mb if self.dense_mb is not None and self.sent_mb else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN."""
        values = {**self._asdict(), "dense_over_sent": self.ratio}
        values["results"] = {name: value if math.isfinite(value) else None for name, value in self.results.items()}
        return values


def totals(runs: Sequence[Run]) -> list[Total]:
    """Each run in numbers, in the order of the runs."""

    def last(run: Run, name: str) -> float | None:
        return float(run.series[name].values[-1]) if name in run.series else None

    found, clocks = [], clock_of(runs)
    for run in runs:
        end = np.array([float(run.steps - run.offset)])
        results = {name: _end(series.values) for name, series in run.series.items() if is_result(name)}
        exposed = run.series[EXPOSED].values if EXPOSED in run.series else None
        found.append(
            Total(
                run.name,
                run.steps,
                results,
                last(run, TOTAL_MB),
                last(run, DENSE_MB),
                next((float(x[0]) for clock in clocks if (x := clock.at(run, end)) is not None), None),
                None if exposed is None else float(np.median(exposed)),
            )
        )
    return found


def _end(values: NDArray[np.float64]) -> float:
    return float(np.median(values[-max(1, len(values) // 30) :]))


def totals_table(runs: Sequence[Run]) -> Table:
    """A line for each run."""
    found = totals(runs)
    names = list(dict.fromkeys(n for one in found for n in one.results))[:4]
    header = ["run", "steps", *names, "MB sent by a rank", "MB if dense", "dense / sent", "seconds", "exposed ms"]
    rows = [
        [
            one.run,
            str(one.steps),
            *(_number(one.results.get(name)) for name in names),
            *(_number(x) for x in (one.sent_mb, one.dense_mb, one.ratio, one.seconds, one.exposed_ms)),
        ]
        for one in found
    ]
    return Table("Runs", header, rows)


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:,.0f}" if 1e4 <= abs(x) < 1e9 else f"{x:.4g}"


def differing(runs: Sequence[Run]) -> list[str]:
    """Settings that runs do not share; first those of which runs have different values."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    different = [name for name in names if len({run.settings.get(name) for run in runs}) > 1]
    return sorted(different, key=lambda name: _values(runs, name) < 2)


def _values(runs: Sequence[Run], name: str) -> int:
    return len({run.settings[name] for run in runs if name in run.settings})


def settings_table(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """Settings in lines, runs in columns."""
    rows = [[name, *(run.settings.get(name, "") for run in runs)] for name in names]
    return Table("Settings", ["setting", *(run.name for run in runs)], rows, left=tuple(range(len(runs) + 1)))


def sentences(runs: Sequence[Run]) -> list[str]:
    """The short version, and what was odd."""
    found = totals(runs)
    said = []
    saving = sorted((one for one in found if one.ratio is not None), key=lambda one: -(one.ratio or 0.0))
    if len(saving) > 3:
        said.append(f"Of {len(saving)} runs that logged their traffic, these sent most and least against dense:")
        saving = [saving[-1], saving[0]]
    for one in saving:
        said.append(
            f"{one.run} sent {one.sent_mb:.3g} MB a rank in {one.steps} steps; "
            f"dense all-reduces would have sent {one.dense_mb:.3g} MB, {one.ratio:.3g} times as much."
        )
    for name in sorted({n for one in found for n in one.results}, key=lambda n: ("val" not in n, n))[:2]:
        ends = [(one.results[name], one.run) for one in found if math.isfinite(one.results.get(name, math.nan))]
        if len(ends) > 1:
            first, last = sorted(ends, reverse=not is_better_low(name))[:: len(ends) - 1]
            best, worst = _number(first[0]), _number(last[0])
            apart = f"{name} ended best in {first[1]}, at {best}, worst in {last[1]}, at {worst}."
            said.append(f"{name} ended at {best} in all runs." if best == worst else apart)
        elif ends:
            said.append(f"{name} ended at {_number(ends[0][0])}.")
    known = [run for run in runs if run.settings]
    if len(known) > 1:
        different = [name for name in differing(known) if _values(known, name) > 1]
        more = f" and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
        named, others = ", ".join(different[:MOST_NAMED]), "" if len(known) == len(runs) else " among the other runs"
        said.append(f"Settings that differ{others}: {named}{more}." if different else f"No setting differs{others}.")
        if some := len(differing(known)) - len(different):
            said.append(f"{some} settings are there in some of the runs only; all are in the table at the end.")
    if known and (unknown := ", ".join(run.name for run in runs if not run.settings)):
        said.append(f"Settings of {unknown} are not known: there are none beside the logs.")
    said += _assumptions(runs)
    said += [f"{run.name}: {note}" for run in runs for note in run.notes]
    return said


def _assumptions(runs: Sequence[Run]) -> list[str]:
    """What is not known of some runs."""
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
    if dense := [name for name in bare if name not in sparse]:
        names, (verb, they) = ", ".join(dense), ("is", "it") if len(dense) == 1 else ("are", "they")
        if len(rates) == 1:
            said.append(
                f"{names} logged no traffic and {verb} drawn as if {they} had sent what dense all-reduces of the "
                f"others would have sent: {rates[0]:.4g} MB a step. "
                "That holds for plain DDP with the same model and ranks."
            )
        else:
            why = "dense steps of the others differ in size" if rates else "the others logged no dense traffic"
            said.append(f"Traffic of {names} is not known: {they} logged none, and {why}.")
    return said
