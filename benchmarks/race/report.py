"""The pages docs/reports/race*.md and their figures, from kept results only.

`docs/site/generate.py` adds the boxes at their heads and the tables that are files of their own.
"""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.race import counted, figures, timed
from benchmarks.race.cells import Cell, cells, distance, shown, steps_to
from benchmarks.race.configurations import CONFIGURATIONS
from benchmarks.race.results import ROOT, Results
from benchmarks.race.tasks import TASKS
from lightning_sparse.core.messages import ring_all_reduce_bytes

TEMPLATES = {path.stem: path for path in sorted(Path(__file__).with_name("pages").glob("*.md"))}
"""Of the pages, by name."""
REPORTS = ROOT / "docs" / "reports"
GENERATOR = ROOT / "docs" / "site" / "generate.py"
SHORT = ("lstm-600", "gpt-300")
LONG = ("lstm-3000", "gpt-3000")
ENDS = {
    "table lstm-600": "Short trainings, LSTM",
    "table gpt-300": "Short trainings, GPT",
    "table lstm-3000": "LSTM",
    "table gpt-3000": "GPT",
}
"""Tables of where methods end, and the headings above them."""
COMPUTE = 0.02
"""Seconds of computing in a step, for the figure of times: a device that is stated, not the one that trained."""
LARGER = 124_000_000
"""Parameters of a model that steps are computed for, with bytes in proportion to those of the LSTM's matrices."""
COMPUTES = (0.03, 0.08)
"""Seconds of computing in its step."""
FASTER = ((1, 0.0), (10, 0.0), (10, 0.01), (100, 0.0))
"""Gbit/s of a link, and seconds that a message takes to the next rank beside its bytes."""
ALLOWED = math.log(1.02)
"""Above dense's loss, in nats: 2 % of a perplexity."""


def write(results: Results) -> None:
    """Write the pages and the figures."""
    draw(results, REPORTS / "race")
    generator = runpy.run_path(str(GENERATOR))
    generator["write"](generator["pages"](), ["reports/race"])


def page(results: Results, name: str) -> str:
    """A page, with every table in its place but those that are files of their own."""
    text = TEMPLATES[name].read_text()
    for place, table in tables(results, name).items():
        text = text.replace(f"<!-- {place} -->", table)
    return text


def tables(results: Results, name: str) -> dict[str, str]:
    """Those of a page by their places in its template: what a table is of, and tasks."""
    places = re.findall(r"<!-- (?:csv )?(.+?) -->", TEMPLATES[name].read_text())
    kinds = {place: place.split() for place in places if place != "box"}
    return {place: TABLES[kind](results, *tasks) for place, (kind, *tasks) in kinds.items()}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown; the first column is text."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ends(results: Results, task: str) -> str:
    """Where methods end, in the order of their means; those whose search goes on come last."""
    every = cells(results, task)
    dense = next((cell for cell in every if cell.entry.method == "dense"), None)
    measured = sorted((cell for cell in every if cell.lines), key=lambda cell: fmean(cell.losses.values()))
    rows = [_end(cell, dense) for cell in measured]
    rows += [_unfinished(cell, task) for cell in every if not cell.lines]
    what = "perplexity" if TASKS[task].perplexity else "loss"
    heads = ["method", "MB, matrices", "MB, vectors", "rate", what, "± s.e.", "seeds", "against dense", ""]
    return table(heads, rows)


def _end(cell: Cell, dense: Cell | None) -> list[str]:
    task, losses = cell.entry.task, list(cell.losses.values())
    assert cell.best is not None and cell.megabytes is not None
    matrices, vectors = cell.megabytes
    apart = distance(cell, dense) if dense is not None and dense is not cell else None
    values = [math.exp(x) for x in losses] if TASKS[task].perplexity else losses
    error = "" if len(values) < 2 else f"{_error(values):.2g}"
    against = ["", ""] if apart is None else [_apart(apart.mean, apart.error, task), apart.verdict]
    settings = " ".join(f"{name} {value:g}" for name, value in cell.best.outer)
    rate = f"{cell.best.rate:g}" + (f", {settings}" if settings else "")
    title = CONFIGURATIONS[cell.entry.method].title
    mean = shown(fmean(losses), task)
    return [title, f"{matrices:.2f}", f"{vectors:.2f}", rate, mean, error, str(len(losses)), *against]


def _unfinished(cell: Cell, task: str) -> list[str]:
    title, tried = CONFIGURATIONS[cell.entry.method].title, len(cell.tried)
    if cell.searched is None:
        return [title, *[""] * 7, "not run yet"]
    state = "search done" if cell.best else "search goes on"
    return [title, *[""] * 3, f"({shown(cell.searched, task)}, seed 0)", "", "", "", f"{state}, {tried} trainings"]


def _error(values: Sequence[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def _apart(mean: float, error: float, task: str) -> str:
    if not math.isfinite(mean):
        return "diverged"
    unit, factor = (" %", 100.0) if TASKS[task].perplexity else ("", 1.0)
    digits = 1 if TASKS[task].perplexity else 3
    spread = f" ± {factor * error:.{digits}f}" if math.isfinite(error) else ""
    shift = 100 * (math.exp(mean) - 1) if TASKS[task].perplexity else mean
    return f"{shift:+.{digits}f}{spread}{unit}"


def pairs(results: Results, task: str) -> str:
    """Head to head: methods that send little, each against each, by paired seeds."""
    every = {cell.entry.method: cell for cell in cells(results, task)}
    rows = []
    for one, other in PAIRS:
        if one not in every or other not in every:
            continue
        apart = distance(every[one], every[other])
        names = [CONFIGURATIONS[name].title for name in (one, other)]
        if apart is None:
            rows.append([*names, "", "", "not run yet"])
        else:
            rows.append([*names, _apart(apart.mean, apart.error, task), str(apart.seeds), apart.verdict])
    return table(["method", "against", "difference", "seeds", ""], rows)


PAIRS = (
    ("ours", "dense"),
    ("ours", "top_k"),
    ("ours", "root"),
    ("late", "root"),
    ("late-ahead", "late"),
    ("parts", "ours"),
    ("turned", "root"),
    ("turned-300", "ours-300"),
    ("turned-600", "ours-600"),
    ("chunked-300", "ours-300"),
    ("decay-300", "ours-300"),
    ("whole-600", "ours-600"),
    ("turned-whole-600", "turned-600"),
    *((ours, other) for ours in ("whole-600", "turned-whole-600") for other in ("distro", "sparseloco-10")),
)
"""Compared head to head."""


def search(results: Results, task: str) -> str:
    """All that was tried with seed 0: the grid."""
    rows = []
    for cell in cells(results, task):
        by_outer: dict[str, list[str]] = {}
        for run in cell.tried:
            settings = " ".join(f"{name} {value:g}" for name, value in run.outer) or "as named"
            loss = results.loss(run)
            assert loss is not None
            by_outer.setdefault(settings, []).append(f"{run.rate:g}: {shown(loss, task)}")
        title = CONFIGURATIONS[cell.entry.method].title
        rows += [[title, settings, ", ".join(found)] for settings, found in by_outer.items()]
    return table(["method", "settings", "rate: result with seed 0"], rows)


def times(results: Results, task: str) -> str:
    """Seconds to dense's loss and 2 % on four links: computed."""
    every = cells(results, task)
    dense = next(cell for cell in every if cell.entry.method == "dense")
    target = fmean(dense.losses.values()) + ALLOWED if dense.lines else -math.inf
    rows = []
    for cell in every:
        if not cell.lines or not dense.lines:
            continue
        steps = steps_to(list(cell.lines.values()), target)
        row = [CONFIGURATIONS[cell.entry.method].title, "never" if steps is None else str(steps)]
        for mbit in (*timed.LINKS, 10_000):
            seconds = figures.seconds_to(cell, target, COMPUTE, mbit)
            row.append("" if seconds is None else f"{seconds:.0f}")
        rows.append(row)
    return table(["method", "steps", *(f"{mbit} Mbit/s" for mbit in (*timed.LINKS, 10_000))], rows)


def measured(results: Results) -> str:
    """Seconds of a step between real ranks, and its share of dense training's."""
    known = timed.read(results.folder)
    heads = [head for mbit in timed.LINKS for head in (f"{mbit} Mbit/s", "of dense")]
    rows = []
    for name in timed.METHODS:
        row = [CONFIGURATIONS[name].title, *[""] * (1 + len(heads))]
        for place, mbit in enumerate(timed.LINKS):
            own, dense = known.get((name, mbit)), known.get(("dense", mbit))
            if own is None or dense is None:
                continue
            row[1] = f"{own.compute:.2f}"
            row[2 + 2 * place : 4 + 2 * place] = [f"{own.exchange:.3f}", f"{sum(own) / sum(dense):.3f}"]
        rows.append(row)
    return table(["method", "computing", *heads], rows)


def ratios(results: Results, task: str) -> str:
    """Time to dense's loss and 2 % as a share of dense training's: steps of the task times measured seconds a step."""
    every = {cell.entry.method: cell for cell in cells(results, task) if cell.lines}
    known, rows = timed.read(results.folder), []
    target = fmean(every["dense"].losses.values()) + ALLOWED if "dense" in every else -math.inf
    steps = {name: steps_to(list(cell.lines.values()), target) for name, cell in every.items()}
    for name in timed.METHODS if "dense" in every else ():
        if name not in every:
            continue
        row = [CONFIGURATIONS[name].title, "never" if steps[name] is None else str(steps[name])]
        for mbit in timed.LINKS:
            times = [(steps[one], known.get((one, mbit))) for one in (name, "dense")]
            seconds = [count * sum(step) for count, step in times if count is not None and step is not None]
            row.append(f"{seconds[0] / seconds[1]:.3f}" if len(seconds) == 2 else "")
        rows.append(row)
    return table(["method", "steps", *(f"{mbit} Mbit/s" for mbit in timed.LINKS)], rows)


DENSITIES = ("root", "ours-200", "ours-300", "ours-600")


def gate(results: Results) -> str:
    """Which density ends long trainings with dense's loss: share of its bytes, and difference."""
    rows = [[CONFIGURATIONS[name].title] for name in DENSITIES]
    for task in LONG:
        every = {cell.entry.method: cell for cell in cells(results, task) if cell.lines}
        for row, name in zip(rows, DENSITIES, strict=True):
            if name not in every or "dense" not in every:
                row += ["", "not run yet"]
                continue
            own, dense = every[name], every["dense"]
            apart = distance(own, dense)
            assert apart is not None and own.megabytes is not None and dense.megabytes is not None
            share = dense.megabytes[0] / own.megabytes[0]
            row += [f"1/{share:.0f}", f"{_apart(apart.mean, apart.error, task)}, {apart.verdict}"]
    heads = [head for task in LONG for head in (f"{task}: of dense's bytes", "against dense")]
    return table(["density", *heads], rows)


def bytes_by_ranks(results: Results) -> str:
    """Bytes a parameter and step, for matrices."""
    known = counted.read(results.folder)
    dense = {n: known[("dense", n)][0] for n in counted.RANKS if ("dense", n) in known}
    rows = []
    for method, configuration in CONFIGURATIONS.items():
        row = [configuration.title]
        for n in counted.RANKS:
            if (method, n) in known and dense.get(n):
                sent = known[(method, n)][0]
                row += [f"{sent / 1000:.2f}", f"1/{dense[n] / sent:.0f}"]
            else:
                row += ["", ""]
        rows += [row] if any(row[1:]) else []  # the bytes of the others were not counted
    return table(["method", *(head for n in counted.RANKS for head in (f"kB, n = {n}", "of dense"))], rows)


def faster(results: Results) -> str:
    """A step where all that travels hides behind computing, as a share of dense training's: computed."""
    known, n = counted.read(results.folder), 4
    heads = [f"{1000 * c:.0f} ms, {_link(*link)}" for c in COMPUTES for link in FASTER]
    whole, rows = ring_all_reduce_bytes(4.0 * LARGER, n), []
    for method in timed.METHODS:
        if (method, n) not in known or ("dense", n) not in known:
            continue
        row = [CONFIGURATIONS[method].title]
        for compute in COMPUTES:
            for gbit, hop in FASTER:
                own, dense = (
                    max(compute, 8 * sent / known[("dense", n)][0] * whole / (1e9 * gbit) + hop * hops)
                    for sent, _, hops in (known[(method, n)], known[("dense", n)])
                )
                row.append(f"{own / dense:.2f}")
        rows.append(row)
    return table(["method", *heads], rows)


def _link(gbit: float, hop: float) -> str:
    return f"{gbit:g} Gbit/s" + (f", {1000 * hop:g} ms away" if hop else "")


def machine(results: Results, *tasks: str) -> str:
    """On what the trainings of some tasks ran."""
    kinds: dict[tuple[str, str], list[float]] = {}
    for line in results.known.values():
        if line["run"]["task"][0] not in tasks:
            continue
        kinds.setdefault((line["processor"], line["torch"]), []).append(line["seconds"] / 3600)
    told = [
        f"{len(hours)} trainings, {sum(hours):.1f} hours, on {name} with torch {version}"
        for (name, version), hours in sorted(kinds.items())
    ]
    return "; ".join(told) + "."


ASKED = (
    ("method", "optimizer", "its states", "weights of ranks", "rounds of messages", "settings to search"),
    ("DDP", "any", "equal", "equal after each step", "every step", "rate"),
    ("PowerSGD", "any", "equal", "equal after each step", "every step, two in a row", "rate, rank"),
    ("Top-k, residual", "any", "equal", "equal after each step", "every step", "rate, density"),
    ("averaging", "any", "differ, one set a rank", "equal after each round", "every H steps", "rate, H"),
    (
        "DiLoCo",
        "any, and Nesterov outside",
        "differ",
        "equal after each round",
        "every H",
        "rate, H, outer rate, momentum",
    ),
    ("SparseLoCo", "any, and SGD outside", "differ", "equal after each round", "every H", "rate, H, outer rate, decay"),
    ("DeMo, DisTrO", "replaced: signs", "differ", "equal after each step", "every step", "rate, k, decay"),
    ("ours", "AdamW or momentum SGD", "one vector a rank", "equal after each step", "every step", "rate, density"),
)


def asks(results: Results) -> str:
    """What each method needs, which no result says."""
    return table(ASKED[0], ASKED[1:])


TABLES: dict[str, Callable[..., str]] = {
    "asks": asks,
    "bytes": bytes_by_ranks,
    "faster": faster,
    "gate": gate,
    "machine": machine,
    "measured": measured,
    "pairs": pairs,
    "ratios": ratios,
    "search": search,
    "table": ends,
    "times": times,
}
"""Of results and tasks, by the first word of their places in templates."""


def draw(results: Results, folder: Path) -> None:
    """The three figures."""
    every: Mapping[str, list[Cell]] = {task: cells(results, task) for task in SHORT}
    figures.loss_against_bytes(every, folder / "bytes.svg")
    figures.asked(ASKED[1:], ASKED[0], folder / "asks.svg")
    for task, some in every.items():
        dense = next(cell for cell in some if cell.entry.method == "dense")
        measured = [cell for cell in some if cell.lines]
        if dense.lines:
            target = fmean(dense.losses.values()) + ALLOWED
            figures.time_to_loss(task, measured, target, COMPUTE, folder / f"time-{task}.svg")
