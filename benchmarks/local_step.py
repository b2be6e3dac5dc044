"""What does a sparse step cost one rank beside its messages, in copies of its gradient?

n ranks reduce one group in this process, side by side and without a network: their messages are real, and carrying them
is not timed. Timed is rank 0's own work, from its gradient to the average in its place and the residual that counts:
accumulate, select, form messages, use the answers, settle, commit. It is given in multiples of `dst.copy_(src)` of the
same vector, measured beside each step, as CPU time of the one thread that does both; medians with quartiles. Moving the
gradient through memory once costs 1.

Gradients are Student's t with 3 degrees of freedom times a scale for each of ten layers, half of each common to all
ranks, a few vectors in turns. Page faults are those of rank 0's work, in the median step. The *fixed cost* is the time
of a step of a group of 2000 coordinates.

Without --numel, sizes are those of 1 M, 4 M, 14 M, 25 M, 100 M, 400 M and 1 B that fit into the memory that is free;
the others are named. Prints a table, writes JSON and a figure.

    OMP_NUM_THREADS=1 python benchmarks/local_step.py
    OMP_NUM_THREADS=1 LIGHTNING_SPARSE_KERNELS=numpy python benchmarks/local_step.py
    OMP_NUM_THREADS=1 python benchmarks/local_step.py --numel 25000000 --density 0.01 --methods union_top_k top_k
    OMP_NUM_THREADS=1 python benchmarks/local_step.py --numel 14000000 --memory second_moment --methods union_top_k
"""

import argparse
import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from machine import about, in_words, memory
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.group import tensors_in
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.methods.exchanges import Exchange, as_exchange
from lightning_sparse.methods.memory import as_memory
from lightning_sparse.tools.style import INK, label_ends, look, panels, plain_numbers, save

SMALL = 2000  # coordinates of the group whose time is the fixed cost
SIZES = (1_000_000, 4_000_000, 14_000_000, 25_000_000, 100_000_000, 400_000_000, 1_000_000_000)
VECTORS = 3
LEFT_OUT = ("everything", "hard_threshold")  # dense, and a threshold that knows nothing of these gradients


class Stopwatch:
    """CPU time and page faults of what runs between `start` and `stop`, on this thread."""

    def __init__(self) -> None:
        self.seconds, self.faults = 0.0, 0
        self.calls, self.given = Counter[str](), Counter[str]()
        """Messages by kind of operation, and the bytes that were brought to it."""

    def start(self) -> None:
        self._faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        self._began = time.thread_time()

    def stop(self) -> None:
        self.seconds += time.thread_time() - self._began
        self.faults += resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - self._faults

    def watch(self, steps: Steps[Any]) -> Steps[Any]:
        answer = None
        while True:
            self.start()
            try:
                message = steps.send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                self.stop()
                return end.value
            self.stop()
            self.calls[message.kind] += 1
            self.given[message.kind] += message.x.nbytes
            answer = yield message


class Gradients:
    """Those of n ranks, one after another from a few vectors."""

    def __init__(self, numel: int, ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        scales = torch.exp(1.5 * torch.randn(10, generator=generator)).repeat_interleave(-(-numel // 10))[:numel]
        self.ranks, self._vectors = ranks, []
        for _ in range(VECTORS):
            chi = sum(torch.randn(numel, generator=generator).square_() for _ in range(3))
            self._vectors.append(torch.randn(numel, generator=generator).div_((chi / 3).sqrt_()).mul_(scales))

    def fill(self, grads: Sequence[Tensor], step: int) -> None:
        for rank, grad in enumerate(grads):
            own = self._vectors[(step + 1 + rank) % VECTORS]
            shift = (rank * len(grad) // self.ranks + 7919 * step) % len(grad)
            grad[: len(grad) - shift].copy_(own[shift:])
            grad[len(grad) - shift :].copy_(own[:shift])
            grad.add_(self._vectors[step % VECTORS]).mul_(0.5e-3)


def measure(
    name: str,
    gradients: Gradients,
    numel: int,
    density: float,
    warm_up: int,
    steps: int,
    exchange: Exchange | str | None = None,
    kept: str = "residual",
) -> dict[str, Any]:
    """Times of one method, and what rank 0 gives in the median step."""
    n = gradients.ranks
    sparsifier, memory = ls.sparsifiers.SPARSIFIERS.resolve(name), as_memory(kept)
    exchange = as_exchange(exchange, sparsifier)
    if memory.needs_second and not exchange.carries_second:
        exchange = as_exchange("reduce_union", sparsifier)
    parts = {"memory": memory, "sparsifier": sparsifier}
    contexts = [Context(0, density, rank, n) for rank in range(n)]
    states = [init_group(numel, torch.float32, torch.device("cpu"), ctx, **parts) for ctx in contexts]
    grads = [torch.empty(numel) for _ in range(n)]
    source, target = torch.ones(numel), torch.empty(numel)
    ratios, seconds, faults, copies, unions, given = [], [], [], [], [], []
    for step in range(warm_up + steps):
        gradients.fill(grads, step)
        copy = Stopwatch()
        repeats = max(1, 100_000 // numel)
        copy.start()
        for _ in range(repeats):
            target.copy_(source)
        copy.stop()
        own = Stopwatch()
        coroutines = [
            reduce_group(grad, state, ctx._replace(step=step), exchange=exchange, **parts)
            for grad, state, ctx in zip(grads, states, contexts, strict=True)
        ]
        coroutines[0] = own.watch(coroutines[0])
        states, statistics = zip(*drive_ranks(coroutines), strict=True)
        if step >= warm_up:
            seconds.append(own.seconds)
            copies.append(copy.seconds / repeats)
            ratios.append(own.seconds / copies[-1])
            faults.append(own.faults)
            unions.append(int(statistics[0].union))
            given.append(own.given)
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return {
        "method": name,
        "numel": numel,
        "density": density,
        "copies": middle,
        "quartiles": [low, high],
        "ms": 1e3 * median(seconds),
        "copy_ms": 1e3 * median(copies),
        "faults": median(faults),
        "union": median(unions),
        "state_bytes": sum(x.nbytes for x in tensors_in(states[0].memory)),
        "given": {kind: median(step[kind] for step in given) for kind in own.given},
        "calls": dict(own.calls),
    }


def bytes_for(numel: int, ranks: int) -> int:
    """About what a size takes: gradient, residual and room to work of every rank, and the common vectors."""
    return 4 * numel * (3 * ranks + VECTORS + 6)


def draw(rows: list[dict[str, Any]], facts: dict[str, Any], path: Path) -> None:
    """Copies against coordinates, a panel for each density."""
    from matplotlib.ticker import NullLocator

    rows = [row for row in rows if row["numel"] != SMALL]
    densities, methods = (list(dict.fromkeys(row[key] for row in rows)) for key in ("density", "method"))
    figure, places = panels(len(densities), 2, 6.5, 5.0)
    for panel, density in zip(places, densities, strict=True):
        panel.set(title=f"density {density:g}", xlabel="coordinates", ylabel="CPU time of a local step, in copies")
        for place, method in enumerate(methods):
            mine = sorted(
                (row["numel"], row["copies"]) for row in rows if (row["method"], row["density"]) == (method, density)
            )
            panel.plot(*zip(*mine, strict=True), label=method, **look(place).line)
        panel.set(xscale="log", yscale="log")
        sizes = sorted({row["numel"] for row in rows})
        panel.set_xticks(sizes, [f"{numel / 1e6:g} M" for numel in sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.axhline(1, color=INK, linewidth=0.8, label="_copy")
        plain_numbers(panel.yaxis)
        label_ends(panel, bold=["union_top_k"])
    figure.suptitle(f"{facts['ranks']} ranks, one thread, kernels: {facts['kernels']}", fontsize=10)
    save(figure, path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [name for name, _ in ls.sparsifiers.SPARSIFIERS.items() if name not in LEFT_OUT]
    parser.add_argument("--methods", nargs="+", default=names, help="names of sparsifiers (default: all)")
    parser.add_argument("--numel", type=int, nargs="+", help="(default: from 1 M to what fits into memory)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.001], help="(default: 0.01 0.001)")
    parser.add_argument("--ranks", type=int, default=4, help="(default: 4)")
    what = "what a rank remembers: residual, or second_moment as with AdamW (default: residual)"
    parser.add_argument("--memory", choices=["residual", "second_moment"], default="residual", help=what)
    parser.add_argument("--steps", type=int, default=9, help="that are timed, at least 2 (default: 9)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before these (default: 4)")
    parser.add_argument("--json", type=Path, default=Path("local_step.json"), help="(default: local_step.json)")
    parser.add_argument("--figure", type=Path, help="SVG or PNG (default: that of --json with .svg)")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    sizes = arguments.numel or [numel for numel in SIZES if bytes_for(numel, arguments.ranks) < 0.8 * memory()]
    if not sizes:
        parser.error("not even 1 M coordinates fit into the memory that is free: name sizes by --numel")
    rows = []
    for numel in [SMALL, *sizes]:
        gradients = Gradients(numel, arguments.ranks)
        cases = [(name, density) for density in arguments.density for name in arguments.methods]
        for name, density in track(cases, description=f"{numel:,} coordinates"):
            few = numel == SMALL
            steps = 40 if few else arguments.steps
            rows.append(measure(name, gradients, numel, density, arguments.warm_up, steps, kept=arguments.memory))
    facts = about() | {"ranks": arguments.ranks, "steps": arguments.steps, "memory": arguments.memory}
    arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    table = Table("method", title="local step of one rank in copies (quartiles; page faults where there are any)")
    cells: dict[str, list[str]] = defaultdict(list)
    for density in arguments.density:
        table.add_column(f"fixed, ms\nd = {density:g}", justify="right")
        for numel in sizes:
            table.add_column(f"{numel:,}\nd = {density:g}", justify="right")
        for row in sorted((row for row in rows if row["density"] == density), key=lambda row: row["numel"]):
            low, high = row["quartiles"]
            faults = f" {row['faults']:.0f} pf" if row["faults"] > 3 else ""
            text = f"{row['copies']:.2f} ({low:.1f}-{high:.1f}){faults}"
            cells[row["method"]].append(f"{row['ms']:.2f}" if row["numel"] == SMALL else text)
    for name, texts in cells.items():
        table.add_row(name, *texts)
    Console(width=60 + 24 * len(arguments.density) * len(sizes)).print(table)
    if arguments.numel is None and len(sizes) < len(SIZES):
        left_out = ", ".join(f"{numel:,}" for numel in SIZES[len(sizes) :])
        print(f"Too large for the {memory() / 2**30:.1f} GiB that are free: {left_out}. Fewer --ranks take less.")
    print(in_words(facts))
    draw(rows, facts, arguments.figure or arguments.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
