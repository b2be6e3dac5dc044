"""From how many ranks on does a sparse exchange cost more than a dense one? Up to 1024 ranks, on fast and slow links.

Measured, on one thread of this machine: the CPU time of one rank's own work (accumulate, select, form messages, use the
answers, settle), with all ranks side by side in this process as in `local_step.py`, between several numbers of ranks
and for groups of two sizes. A straight line through the sizes (`tuning.performance.cost.Line`) gives the
time at `--numel` coordinates, and one through the bytes of the answers that a rank has to go through the time between
more ranks than were measured. The union of what ranks picked is measured in the same steps.

Counted: the messages of a step between any number of ranks (`lightning_sparse.tools.traffic.count_bytes`), in the
lengths that they have on CUDA. On the CPU they are as long as what was found: each kind of message is taken to be
longer or shorter by the factor that the largest measured number of ranks shows, and a sum to be no longer than the
model. UnionTopK sends a quarter less after its first 64 steps, which is not counted.

Computed: seconds of these messages on a network (`between(ring(2, latency, rate), n, rate)`, as in
`lightning-sparse advise --ranks --gbit`): bytes as in a ring; an all-gather pays the latency n - 1 times, an all-reduce
2 log2 n times. Dense is one all-reduce of everything, and its own work counts as nothing. Nothing overlaps with
backward on either side: dense would gain more by it. Memory is what outlives a step, scaled from the measured group,
and the largest answer of a step.

A row *pays* where work and messages together take less than the dense all-reduce.

    OMP_NUM_THREADS=1 python benchmarks/many_ranks.py
    OMP_NUM_THREADS=1 python benchmarks/many_ranks.py --methods [union_top_k,top_k] --gbit [10] --density [0.01]
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import CLI
from local_step import Gradients, measure
from machine import about, in_words
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lightning_sparse as ls
from lightning_sparse.tools.advisor.networks import between, on, ring
from lightning_sparse.tools.style import INK, label_ends, look, panels, plain_numbers, save
from lightning_sparse.tools.traffic import count_bytes
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, Traffic

LEFT_OUT = ("everything", "hard_threshold")  # dense, and one whose messages nothing bounds
OTHER_WAYS = ("top_k+packed_union", "shared_top_k+packed_union")
"""Exchanges that are not the sparsifier's own."""
DENSE = "dense all-reduce"
VALUE = 4.0
"""Bytes of a float32, and of a word in which values travel."""


class Local(NamedTuple):
    """One rank's own part of a step."""

    seconds: Line
    """By bytes of all answers of the step."""
    state: float
    """Bytes for each coordinate that outlive a step."""
    union: float
    """Coordinates of the update / (density x coordinates), between the most ranks that were measured."""
    real: dict[str, tuple[float, float]]
    """Messages, and bytes in them, over those counted, by operation, between the most ranks that were measured."""


def parts_of(method: str) -> tuple[str, str | None]:
    """Sparsifier, and exchange where it is not the sparsifier's own."""
    sparsifier, _, exchange = method.partition("+")
    return sparsifier, exchange or None


@dataclass(frozen=True)
class Arguments:
    """From how many ranks on does a sparse exchange cost more than a dense one? See the top of the file.

    Args:
        methods: sparsifiers, or sparsifier+exchange.
        numel: coordinates of the model.
        density: of the exchange.
        ranks: numbers of ranks.
        gbit: links, in Gbit/s.
        latency: microseconds a hop.
        sample: coordinates of measured groups.
        measured: numbers of ranks that are measured.
        steps: timed for each case, at least 2.
        json: file for the results.
        figure: SVG or PNG; None: beside the results.
    """

    methods: tuple[str, ...] = (
        *(name for name, _ in ls.sparsifiers.SPARSIFIERS.items() if name not in LEFT_OUT),
        *OTHER_WAYS,
    )
    numel: int = 25_000_000
    density: tuple[float, ...] = (0.01, 0.001)
    ranks: tuple[int, ...] = tuple(2**power for power in range(1, 11))
    gbit: tuple[float, ...] = (1.0, 10.0, 100.0)
    latency: float = 50.0
    sample: int = 4_000_000
    measured: tuple[int, ...] = (2, 8, 32)
    steps: int = 5
    json: Path = Path("many_ranks.json")
    figure: Path | None = None


def measured(method: str, density: float, arguments: Arguments) -> tuple[Local, list[dict[str, Any]]]:
    """Lines through what `local_step.measure` finds, and its rows."""
    name, exchange = parts_of(method)
    rows = []
    for n in arguments.measured:
        for numel in (arguments.sample // 16, arguments.sample):
            gradients = gradients_of(numel, n)
            rows.append({"ranks": n, **measure(name, gradients, numel, density, 2, arguments.steps, exchange)})
    last = rows[-1]
    said = counted(method, last["numel"], last["ranks"], density)
    # What is not counted is an all-gather of the lengths of selections, 8 bytes each.
    both = [kind for kind in said if kind in last["calls"]]
    real = {kind: (last["calls"][kind] / said[kind][0], last["given"][kind] / said[kind][1]) for kind in both}
    local = Local(NOTHING, last["state_bytes"] / last["numel"], last["union"] / (density * last["numel"]), real)
    points = []
    for n in arguments.measured:
        mine = [(row["numel"], row["ms"] / 1e3) for row in rows if row["ranks"] == n]
        traffic = traffic_of(method, arguments.numel, n, density, local)
        points.append((sum(answer_bytes(traffic, arguments.numel, n)), Line.through(mine)(arguments.numel)))
    return local._replace(seconds=Line.through(points)), rows


@functools.lru_cache(maxsize=1)
def gradients_of(numel: int, n: int) -> Gradients:
    return Gradients(numel, n)


@functools.cache
def counted(method: str, numel: int, n: int, density: float) -> dict[str, tuple[int, int]]:
    """Messages of a step, and bytes that a rank brings to them, by operation."""
    sparsifier, exchange = parts_of(method)
    calls, nbytes = Counter[str](), Counter[str]()
    for operation, size in count_bytes(sparsifier, numel, n, density, exchange=exchange).messages:
        calls[operation] += 1
        nbytes[operation] += size
    return {operation: (calls[operation], nbytes[operation]) for operation in calls}


def traffic_of(method: str, numel: int, n: int, density: float, local: Local) -> list[Traffic]:
    """What a rank brings in a step, for the library's cost model."""
    parts = []
    for operation, (calls, nbytes) in counted(method, numel, n, density).items():
        more_calls, more_bytes = local.real.get(operation, (1.0, 1.0))
        most = VALUE if operation == "all_reduce" else float("inf")
        parts.append(Traffic(operation, calls * more_calls, Line(0.0, min(most, more_bytes * nbytes / numel))))
    return parts


def transfer_seconds(traffic: Sequence[Traffic], numel: int, network: Network) -> float:
    return on(network, GroupCost(1.0, NOTHING, NOTHING, NOTHING, tuple(traffic))).transfer(numel)


def network_of(n: int, gbit: float, latency: float) -> Network:
    """Between n ranks, as the advisor has it where no network could be measured."""
    return between(ring(2, latency, gbit * 1e9), n, gbit * 1e9)


def answer_bytes(traffic: Sequence[Traffic], numel: int, n: int) -> list[float]:
    """Of the answers, by operation: an all-gather gives what all ranks brought."""
    return [part.nbytes(numel) * (n if part.operation == "all_gather" else 1) for part in traffic]


def rows_of(method: str, density: float, local: Local, arguments: Arguments) -> list[dict[str, Any]]:
    """What a step costs one rank, for all links and numbers of ranks."""
    numel = arguments.numel
    rows = []
    everything = [Traffic("all_reduce", 1, Line(0.0, VALUE))]
    for n in arguments.ranks:
        traffic = traffic_of(method, numel, n, density, local)
        answers = answer_bytes(traffic, numel, n)
        work, brought = local.seconds(sum(answers)), sum(part.nbytes(numel) for part in traffic)
        largest = max(answer / part.calls for answer, part in zip(answers, traffic, strict=True))
        for gbit in arguments.gbit:
            network = network_of(n, gbit, 1e-6 * arguments.latency)
            dense = transfer_seconds(everything, numel, network)
            transfer = transfer_seconds(traffic, numel, network)
            rows.append(
                {
                    "method": method,
                    "density": density,
                    "ranks": n,
                    "gbit": gbit,
                    "local_ms": 1e3 * work,
                    "calls": sum(part.calls for part in traffic),
                    "brought_bytes": brought,
                    "transfer_ms": 1e3 * transfer,
                    "dense_ms": 1e3 * dense,
                    "over_dense": (work + transfer) / dense,
                    "memory_bytes": local.state * numel + largest,
                }
            )
    return rows


def pays(rows: Sequence[dict[str, Any]]) -> str:
    """For which numbers of ranks a method on one link beats dense, in words."""
    won = [row["ranks"] for row in rows if row["over_dense"] < 1]
    if not won:
        return "loses for all n"
    if len(won) == len(rows):
        return "pays for all n"
    lost = [row["ranks"] for row in rows if row["over_dense"] >= 1]
    if max(won) < min(lost):
        return f"loses from n = {min(lost)}"
    if max(lost) < min(won):
        return f"loses to n = {max(lost)}"
    return f"loses but for n = {min(won)} to {max(won)}"


def table_of(density: float, rows: list[dict[str, Any]], locals_: dict[str, Local], arguments: Arguments) -> Table:
    """One line for each method: what one step costs at few and at many ranks."""
    few, many = min(arguments.ranks, key=lambda n: abs(n - 8)), max(arguments.ranks)
    most = max(arguments.measured)
    table = Table(
        "method",
        title=f"density {density:g}, {arguments.numel:,} coordinates, {arguments.latency:g} us a hop; work and "
        f"messages over a dense all-reduce at n = {few} and {many}, and where the method loses",
        caption=f"work: measured to n = {most}, by the bytes of answers beyond; union, given / counted: at n = {most}",
    )
    for heading in (f"work, ms\nn = {few}", f"work, ms\nn = {many}", f"MB given\nn = {few}", f"MB given\nn = {many}"):
        table.add_column(heading, justify="right")
    for heading in ("given /\ncounted", "union\n/ k", f"memory, MB\nn = {many}"):
        table.add_column(heading, justify="right")
    for gbit in arguments.gbit:
        table.add_column(f"{gbit:g} Gbit/s: n = {few}, {many}")
    for method, local in locals_.items():
        mine = [row for row in rows if (row["method"], row["density"]) == (method, density)]
        by = {(row["ranks"], row["gbit"]): row for row in mine}
        first, last = by[few, arguments.gbit[0]], by[many, arguments.gbit[0]]
        said = counted(method, arguments.sample, most, density)
        real = sum(more * said[kind][1] for kind, (_, more) in local.real.items()) / sum(
            nbytes for _, nbytes in said.values()
        )
        cells = [f"{row['local_ms']:.0f}" for row in (first, last)]
        cells += [f"{row['brought_bytes'] / 1e6:.2f}" for row in (first, last)]
        cells += [f"{real:.2f}", f"{local.union:.2f}", f"{last['memory_bytes'] / 1e6:.0f}"]
        for gbit in arguments.gbit:
            words = pays([by[n, gbit] for n in arguments.ranks])
            ratios = ", ".join(f"{by[n, gbit]['over_dense']:.2g}" for n in (few, many))
            cells.append(f"{ratios}; {words}" if "loses" not in words else f"{ratios}; [bold]{words}[/]")
        table.add_row(method, *cells)
    return table


def draw(rows: list[dict[str, Any]], arguments: Arguments, path: Path) -> None:
    """Seconds over dense's against ranks, a panel for each density and link."""
    from matplotlib.ticker import NullLocator

    rooms = [(density, gbit) for density in arguments.density for gbit in arguments.gbit]
    figure, places = panels(len(rooms), len(arguments.gbit), 6.0, 4.6)
    for panel, (density, gbit) in zip(places, rooms, strict=True):
        panel.set(title=f"density {density:g}, {gbit:g} Gbit/s", xlabel="ranks", ylabel="step / dense all-reduce")
        panel.set(xscale="log", yscale="log")
        for place, method in enumerate(arguments.methods):
            mine = [
                (row["ranks"], row["over_dense"])
                for row in rows
                if (row["method"], row["density"], row["gbit"]) == (method, density, gbit)
            ]
            panel.plot(*zip(*mine, strict=True), label=method, **look(place).line)
        panel.axhline(1, color=INK, linewidth=1, label=f"_{DENSE}")
        panel.set_xticks(arguments.ranks, [str(n) for n in arguments.ranks])
        panel.xaxis.set_minor_locator(NullLocator())
        plain_numbers(panel.yaxis)
        label_ends(panel, size=7, bold=["union_top_k"])
    figure.suptitle(
        f"{arguments.numel:,} coordinates, {arguments.latency:g} us a hop; own work measured to "
        f"{max(arguments.measured)} ranks, messages counted, network computed; above the line dense wins",
        fontsize=10,
    )
    save(figure, path)


def main(arguments: Arguments) -> None:
    for name in ("ranks", "measured"):
        arguments = replace(arguments, **{name: tuple(sorted(set(getattr(arguments, name))))})
        if getattr(arguments, name)[0] < 2:
            raise SystemExit(f"Expected --{name} of at least 2.")
    if arguments.steps < 2 or arguments.sample < 16_000:
        raise SystemExit("Expected at least 2 --steps, and a --sample of at least 16000 coordinates.")
    torch.set_num_threads(1)
    cases = [(density, method) for density in arguments.density for method in arguments.methods]
    rows, timed, locals_ = [], [], dict[float, dict[str, Local]]()
    for density, method in track(cases, description="measure and count"):
        local, found = measured(method, density, arguments)
        locals_.setdefault(density, {})[method] = local
        timed += [row | {"method": method} for row in found]
        rows += rows_of(method, density, local, arguments)
    facts = about() | {"numel": arguments.numel, "latency_us": arguments.latency, "sample": arguments.sample}
    arguments.json.write_text(json.dumps({**facts, "rows": rows, "measured": timed}, indent=1))
    console = Console(width=220)
    for density in arguments.density:
        console.print(table_of(density, rows, locals_[density], arguments))
    print(in_words(facts))
    draw(rows, arguments, arguments.figure or arguments.json.with_suffix(".svg"))


if __name__ == "__main__":
    main(CLI(Arguments, as_positional=False))
