"""Which executor is faster on a CPU, and what does the exchange cost next to plain DDP?

Two processes (gloo over loopback) train a multilayer perceptron on random data. Each process holds one copy of the
model per variant and runs them in turns, a few steps each, in an order that is reversed from round to round
(A B C D, D C B A, ...): what disturbs the machine disturbs all variants alike. Variants:

- compute: forward, backward and optimizer step without any exchange (`no_sync`), the floor;
- dense: plain DDP, which overlaps its all-reduce with backward;
- inline: sparsified, groups are exchanged inside DDP's hook while backward waits, no overlap;
- thread: sparsified, groups are exchanged on a communication thread while backward goes on.

Held fixed: model, batch, optimizer, buckets (DDP's default of 25 MiB, after a first one of 1 MiB) and one compute
thread per process. Step times are of whole training steps, the slower rank's; the first step of a turn is thrown away.

Columns: median step time; what it adds to that of compute; `exposed_ms`, the time that backward waited as the library
counts it (a backward that is slowed down by the thread does not wait, hence both columns); ratios to inline and to
dense, medians over rounds with the quartiles, below 1 means faster. A variant that is slower than what it is compared
with in most rounds is marked. The last lines call it a tie where the quartiles include 1.

Where all cores compute, a communication thread has no core to run on and can only fill the time that ranks wait for
each other or for the network; loopback makes that time short. The number of cores is printed with the results.

    OMP_NUM_THREADS=1 python benchmarks/executor.py
    OMP_NUM_THREADS=1 python benchmarks/executor.py --rounds 40 --models [10M] --bucket_cap_mb 4 --csv executor.csv
"""

import csv
import os
import pickle
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from jsonargparse import CLI
from machine import free_port
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls

MODELS = {"2M": (512, 8), "10M": (1024, 10)}  # width and number of square layers
SPARSIFIERS = ("union_top_k", "exdyna", "top_k")
EXECUTORS = ("inline", "thread")
TIMEOUT = timedelta(minutes=2)


class Case(NamedTuple):
    model: str
    sparsifier: str


@dataclass(frozen=True)
class Arguments:
    """Where should exchanges run on CPUs: inside DDP's hook, or on a thread?

    Args:
        models: that are trained.
        sparsifiers: names.
        density: of the exchange.
        ranks: processes.
        batch_size: rows per rank.
        bucket_cap_mb: of DDP, and of the groups.
        rounds: turns of every variant, at least 2.
        steps: per turn, besides one to warm up.
        csv: file for one row per line of the table; None: none.
    """

    models: tuple[Literal[tuple(MODELS)], ...] = tuple(MODELS)
    sparsifiers: tuple[str, ...] = tuple(SPARSIFIERS)
    density: float = 0.01
    ranks: int = 2
    batch_size: int = 64
    bucket_cap_mb: float = 25
    rounds: int = 16
    steps: int = 4
    csv: Path | None = None


class Variant:
    """One copy of the model, with its own way to exchange gradients."""

    def __init__(self, name: str, case: Case, arguments: Arguments) -> None:
        self.name = name
        torch.manual_seed(0)
        width, depth = MODELS[case.model]
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers[:-1])
        self.numel = sum(p.numel() for p in model.parameters())
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb)
        self.engine: ls.Engine | None = None
        if name in EXECUTORS:
            # Biases, too: the sparsified exchange alone is to be measured, without a dense group beside it.
            every = ls.Rules(dense_ndim=0, dense_numel=0)
            self.engine = ls.attach(
                self.ddp,
                sparsifier=case.sparsifier,
                density=arguments.density,
                executor=name,
                rules=every,
                watch=None,
            )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.exposed: list[float] = []

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Seconds of one training step on this rank; the ranks start together."""
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        with self.ddp.no_sync() if self.name == "compute" else nullcontext():
            nn.functional.mse_loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()
        return time.perf_counter() - begin

    def note_exposed(self) -> None:
        """Outside the clock: asks all ranks."""
        if self.engine is not None:
            self.exposed.append(self.engine.summary()["time/exposed_ms"])

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def measure(case: Case, arguments: Arguments) -> dict[str, Any]:
    """All rounds of one case: per variant the step times (rounds, steps) in ms, maxima over ranks."""
    variants = [Variant(name, case, arguments) for name in ("compute", "dense", *EXECUTORS)]
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    inputs = torch.randn(arguments.batch_size, MODELS[case.model][0], generator=generator)
    targets = torch.randn(inputs.shape, generator=generator)
    for variant in variants:  # DDP rebuilds its buckets after the first iteration
        for _ in range(3):
            variant.step(inputs, targets)
    seconds = torch.zeros(len(variants), arguments.rounds, arguments.steps)
    for round_ in range(arguments.rounds):
        order = range(len(variants)) if round_ % 2 == 0 else range(len(variants) - 1, -1, -1)
        for index in order:
            variants[index].step(inputs, targets)
            for step in range(arguments.steps):
                seconds[index, round_, step] = variants[index].step(inputs, targets)
            variants[index].note_exposed()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    engine = variants[-1].engine
    assert engine is not None
    result = {
        "case": case,
        "numel": variants[0].numel,
        "groups": len(engine.plan),
        "milliseconds": {v.name: (1e3 * times).tolist() for v, times in zip(variants, seconds, strict=True)},
        "exposed": {v.name: median(v.exposed) for v in variants if v.exposed},
    }
    for variant in variants:
        variant.close()
    return result


def run_rank(rank: int, port: int, cases: list[Case], arguments: Arguments, results: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks, timeout=TIMEOUT)
    collected = []
    for number, case in enumerate(cases, start=1):
        begin = time.perf_counter()
        collected.append(measure(case, arguments))
        if rank == 0:
            seconds = time.perf_counter() - begin
            print(f"{number}/{len(cases)} {case.model} parameters, {case.sparsifier}: {seconds:.0f} s", flush=True)
    if rank == 0:
        Path(results).write_bytes(pickle.dumps(collected))
    dist.destroy_process_group()


class Ratio(NamedTuple):
    """Of the step times of two variants, over rounds."""

    low: float
    middle: float
    high: float
    slower: float  # share of the rounds in which the first one is slower

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f}){' slower' if self.slower > 0.5 else ''}"


def compare(rounds: list[list[float]], base: list[list[float]]) -> Ratio:
    """Pair the rounds: both were measured next to each other."""
    ratios = [median(a) / median(b) for a, b in zip(rounds, base, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive")
    return Ratio(low, middle, high, mean(ratio > 1 for ratio in ratios))


def summarize(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per variant."""
    times, case = result["milliseconds"], result["case"]
    middle = {name: median(step for round_ in rounds for step in round_) for name, rounds in times.items()}
    return [
        {
            "model": case.model,
            "parameters": result["numel"],
            "groups": result["groups"],
            "sparsifier": case.sparsifier,
            "variant": name,
            "step_ms": middle[name],
            "to_inline": compare(rounds, times["inline"]) if name == "thread" else None,
            "to_dense": compare(rounds, times["dense"]) if name in EXECUTORS else None,
            "added_ms": None if name == "compute" else middle[name] - middle["compute"],
            "exposed_ms": result["exposed"].get(name),
        }
        for name, rounds in times.items()
    ]


def make_table(rows: list[dict[str, Any]], arguments: Arguments) -> Table:
    table = Table(
        title=f"{arguments.ranks} ranks on {os.cpu_count()} cores, gloo over loopback, 1 thread a rank, batch "
        f"{arguments.batch_size}, density {arguments.density:g}, buckets of {arguments.bucket_cap_mb:g} MiB",
        caption=f"{arguments.rounds} rounds of {arguments.steps} steps; ratios: median (quartiles) over rounds",
    )
    for heading in ("model", "sparsifier", "variant", "overlap"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step ms", "added ms", "exposed ms", "step time / inline", "step time / dense"):
        table.add_column(heading, justify="right", no_wrap=True)
    overlap = {"compute": "-", "dense": "yes", "inline": "no", "thread": "yes"}
    for row in rows:
        table.add_row(
            f"{row['parameters'] / 1e6:.1f} M, {row['groups']} groups",
            row["sparsifier"],
            row["variant"],
            overlap[row["variant"]],
            f"{row['step_ms']:.1f}",
            *("-" if row[name] is None else f"{row[name]:.1f}" for name in ("added_ms", "exposed_ms")),
            str(row["to_inline"] or "-"),
            str(row["to_dense"] or "-"),
            end_section=row["variant"] == EXECUTORS[-1],
        )
    return table


def print_verdicts(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["variant"] == "thread":
            ratio: Ratio = row["to_inline"]
            verdict = "thread is faster" if ratio.high < 1 else "inline is faster" if ratio.low > 1 else "a tie"
            print(
                f"{row['model']}, {row['sparsifier']}: {verdict}; thread takes {ratio.middle - 1:+.1%} against inline "
                f"and is slower in {ratio.slower:.0%} of the rounds"
            )


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    def flat(row: dict[str, Any]) -> dict[str, Any]:
        ratios = {name: value and value.middle for name, value in row.items() if name in ("to_inline", "to_dense")}
        return row | ratios

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(map(flat, rows))


def main(arguments: Arguments) -> None:
    if arguments.rounds < 2 or arguments.steps < 1:
        raise SystemExit("Expected at least 2 --rounds of at least 1 --steps.")
    cases = [Case(model, sparsifier) for model in arguments.models for sparsifier in arguments.sparsifiers]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.pickle"
        torch.multiprocessing.spawn(run_rank, (free_port(), cases, arguments, str(results)), nprocs=arguments.ranks)
        rows = [row for result in pickle.loads(results.read_bytes()) for row in summarize(result)]
    Console(width=145).print(make_table(rows, arguments))
    if arguments.csv:
        write_csv(arguments.csv, rows)
    print_verdicts(rows)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main(CLI(Arguments, as_positional=False))
