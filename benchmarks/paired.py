"""Ratios of paired rounds, and the tables of `shaped_links.py`."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from machine import in_words
from rich.console import Console
from rich.table import Table

ALONE = ("compute", "noop")
"""Variants that exchange nothing and train each rank by itself."""
MOST_OVER_COMPUTE, MOST_OVER_DENSE = 1.2, 1.03
"""What a sparse step may take of one without any exchange, and one with a fallback to dense of plain DDP's."""
TIMES = ("step_ms", "select_ms", "exchange_ms", "exposed_ms")
Result = dict[str, Any]
"""What a launch measured: job, machine, parameters, groups of each variant, records, memory."""


class Ratio(NamedTuple):
    """Over paired rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: list[float]) -> Ratio:
        low, middle, high = quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


class Rounds:
    """The records of variants that took turns."""

    def __init__(self, result: Result, **chosen: Any) -> None:
        self.result = result
        self.records = [r for r in result["records"] if all(r[key] == value for key, value in chosen.items())]
        self.variants = list(dict.fromkeys(r["variant"] for r in self.records))
        self.sparse = [name for name in self.variants if name not in ("compute", "dense")]

    def values(self, variant: str, *names: str) -> dict[int, float]:
        """By round, medians over its steps; of several quantities, their sum."""
        steps: dict[int, list[float]] = {}
        for record in self.records:
            if record["variant"] == variant:
                steps.setdefault(record["round"], []).append(sum(record[name] for name in names))
        return {round_: median(found) for round_, found in steps.items()}

    def median(self, variant: str, *names: str) -> float:
        return median(self.values(variant, *names).values())

    def ratio(self, variant: str, names: tuple[str, ...], other: str, other_names: tuple[str, ...]) -> Ratio:
        """Each round of one paired with the nearest round of the other."""
        above, below = self.values(variant, *names), self.values(other, *other_names)
        return Ratio.of([value / below[min(below, key=lambda r: abs(r - round_))] for round_, value in above.items()])

    def steps(self, variant: str, other: str) -> Ratio:
        return self.ratio(variant, ("step_ms",), other, ("step_ms",))


Row = dict[str, Any]


def advice_rows(result: Result) -> list[Row]:
    """In order of the predictions."""
    rounds = Rounds(result)
    predicted = result["advice"]["predicted"]
    return [
        {
            "variant": name,
            "step ms": rounds.median(name, "step_ms"),
            "predicted ms": predicted[name],
            "predicted / measured": Ratio.of([predicted[name] / ms for ms in rounds.values(name, "step_ms").values()]),
        }
        | ({} if name in ("compute", "dense") else {"step / dense": rounds.steps(name, "dense")})
        for name in sorted(rounds.variants, key=predicted.__getitem__)
    ]


def hooks_rows(result: Result) -> list[Row]:
    """`sparse_ddp` and DDP's hooks, beside no exchange and the dense one."""
    rounds = Rounds(result)
    last = min(
        (max(r["number"] for r in rounds.records if r["variant"] == name) for name in rounds.variants), default=0
    )
    rows: list[Row] = []
    for name in rounds.variants:
        own = [r for r in rounds.records if r["variant"] == name]
        received = median(r["received"] for r in own)
        row: Row = {"variant": name, "groups": result["groups"][name], "step ms": rounds.median(name, "step_ms")}
        for other in ("compute", "dense"):
            if other in rounds.variants and name not in ("compute", other):
                row[f"step / {other}"] = rounds.steps(name, other)
        row["cpu ms"] = rounds.median(name, "cpu_ms")
        steady = result.get("steady", {}).get(name, received)
        row["MB received"], row["MB when steady"] = f"{received / 1e6:.3f}", f"{steady / 1e6:.3f}"
        if name not in ALONE and "dense" in rounds.variants:
            dense = median(r["received"] for r in rounds.records if r["variant"] == "dense")
            row["dense / received"], row["dense / steady"] = f"{dense / received:.1f}", f"{dense / steady:.1f}"
        if all("bytes_sent" in r for r in own):
            row["sent / logged"] = f"{median(r['sent'] / r['bytes_sent'] for r in own):.2f}"
        at_last = [r["loss"] for r in own if r["number"] == last]
        if name not in ALONE and at_last:  # a fallback has taken more steps by then, before it is timed
            row[f"loss at step {last}"] = f"{at_last[0]:.3f}"
        row["loses to"] = ", ".join(losses(rounds, name))
        if name in result.get("direct", {}) and name.startswith("fallback"):
            row["goes on"] = "dense" if result["direct"][name] else "sparse"
        rows.append(row)
    return rows


def regions_rows(result: Result) -> list[Row]:
    """The sparse exchange, beside no exchange, the dense one and PowerSGD."""
    rounds = Rounds(result)
    rows: list[Row] = []
    for name in rounds.variants:
        row: Row = {"variant": name, "step ms": rounds.median(name, "step_ms")}
        for other in ("compute", "dense"):
            if name not in ("compute", other):
                row[f"step / {other}"] = rounds.steps(name, other)
        own = [r for r in rounds.records if r["variant"] == name]
        if all("exposed_ms" in r for r in own):
            row["waits ms"] = rounds.median(name, "exposed_ms")
            row["waits / step"] = rounds.ratio(name, ("exposed_ms",), name, ("step_ms",))
        rows.append(row)
    return rows


def nodes_rows(result: Result) -> list[Row]:
    """Exchanges between all ranks, and with nodes; bytes are those on a node's cable, in both directions."""
    rounds = Rounds(result)
    rows: list[Row] = []
    for name in rounds.variants:
        sent, received = (rounds.median(name, kind) / 1e6 for kind in ("sent", "received"))
        row: Row = {"variant": name, "step ms": rounds.median(name, "step_ms"), "cpu ms": rounds.median(name, "cpu_ms")}
        row |= {"MB sent by a node": f"{sent:.3f}", "MB received": f"{received:.3f}"}
        flat = name.removesuffix(" nodes")
        if flat != name and flat in rounds.variants:
            row["step / flat"] = rounds.steps(name, flat)
            row["sent / flat"] = rounds.ratio(name, ("sent",), flat, ("sent",))
        if name not in ("compute", "dense"):
            row["step / dense"] = rounds.steps(name, "dense")
        rows.append(row)
    return rows


def losses(rounds: Rounds, name: str) -> list[str]:
    """What a sparse variant is slower than: plain DDP, its hooks, and no exchange at all with a fifth on top.

    A fallback to dense may be 3 % slower than plain DDP. Other variants are held against plain DDP only.
    """
    allowed = {"dense": MOST_OVER_DENSE if name.startswith("fallback") else 1.0}
    if name.startswith("sparse"):
        hooks = [other for other in rounds.variants if other.split()[0] in ("fp16", "powersgd")]
        allowed |= {"compute": MOST_OVER_COMPUTE} | dict.fromkeys(hooks, 1.0)
    if name in ALONE:
        return []
    found = []
    for other, most in allowed.items():
        if other != name and other in rounds.variants and rounds.steps(name, other).middle > most:
            found.append(other if most == 1 else f"{most:g} x {other}")
    return found


ROWS: dict[str, Callable[[Result], list[Row]]] = {
    "hooks": hooks_rows,
    "regions": regions_rows,
    "nodes": nodes_rows,
    "advice": advice_rows,
}


def show(results: list[Result], csv_path: Path | None) -> None:
    console = Console(width=190)
    flat: list[Row] = []
    for result in results:
        job, machine = result["job"], result.get("machine", {})
        rows = ROWS[job["part"]](result)
        headings = list(dict.fromkeys(key for row in rows for key in row))
        rounds = 1 + max((record["round"] for record in result["records"]), default=-1)
        table = Table(
            title=f"{job['part']}: {job['model']}, {result['parameters']:,} parameters, {job['mbit']} Mbit/s"
            f"{', round trips {:g} ms longer'.format(job['rtt']) if job.get('rtt') else ''}; "
            f"{job['ranks']} ranks on {machine.get('cores', os.cpu_count())} cores, gloo, density {job['density']:g}",
            caption=f"{rounds} rounds{'' if result['finished'] else ', interrupted'}, up to {result['memory_mib']} MiB "
            "a rank; times: medians; ratios: medians (quartiles) of paired rounds, below 1 is faster",
        )
        for heading in headings:
            wide = heading in ("variant", "loses to") or " / " in heading
            table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=wide)
        for row in rows:
            table.add_row(*(text(heading, row.get(heading)) for heading in headings))
            settings = {key: job[key] for key in ("part", "model", "mbit", "ranks", "density", "rounds")}
            flat.append({**settings, "parameters": result["parameters"], **machine})
            for heading, value in row.items():
                flat[-1] |= spread(heading, value)
        console.print(table)
        print(in_words(machine))
    if csv_path and flat:
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat for key in row)))
            writer.writeheader()
            writer.writerows(flat)


def text(heading: str, value: Any) -> str:
    if isinstance(value, Ratio):
        slower = heading.startswith("step") and heading != "step / compute" and value.middle > 1
        return f"{value}{' slower' if slower else ''}"
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def spread(heading: str, value: Any) -> Row:
    """For the CSV file: a ratio as three columns."""
    name = heading.replace("'s", "").replace(" / ", "_over_").replace(" ", "_")
    if isinstance(value, Ratio):
        return {name: value.middle, f"{name}_lower_quartile": value.low, f"{name}_upper_quartile": value.high}
    return {name: value}
