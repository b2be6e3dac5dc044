"""Bytes a parameter that sparse_ddp takes beyond plain DDP, in each phase of a training: what stays, and the most.

    python -m benchmarks.memory [--numel 40000000] [--ranks 2] [--biases]

Each row is a training of its own, in processes of its own, on the CPU: linear layers, ``gradient_as_bucket_view=True``,
the library imported on both sides. With ``--biases``, layers have biases, and norms between them, as models have:
gradients of a group then lie in several runs. *Stays* is resident memory behind the optimizer's step, *most* the
largest within the steps of the phase; both are of rank 0, less that of plain DDP with the same optimizer in steady
steps.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.methods.grouping import make_plan

LAYERS, BATCH, STEPS = 8, 4, 5
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
PHASES: dict[str, dict[str, Any]] = {
    "steady at 0.01": {},
    "steady at 0.001": {"density": 0.001},
    "warm-up at 0.25": {"density": 0.25},
    "density 1": {"density": 1.0},
    "one group": {"grouping": "model"},
}


class Taken(NamedTuple):
    """Bytes of a process."""

    stays: float
    most: float


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def now() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident("VmRSS")


@contextmanager
def measured(found: dict[str, Taken], name: str) -> Iterator[None]:
    now()
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak is this one's
    yield
    most = resident("VmHWM")
    found[name] = Taken(now(), most)


def model(width: int, biases: bool, dtype: torch.dtype) -> torch.nn.Module:
    """Return layers of weights alone, or each with a bias and a norm behind it."""
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers.append(torch.nn.Linear(width, width, bias=biases, dtype=dtype))
        if biases:
            layers.append(torch.nn.LayerNorm(width, dtype=dtype))
    return torch.nn.Sequential(*layers)


def train(
    rank: int,
    ranks: int,
    numel: int,
    biases: bool,
    optimizer: str,
    dtype: str,
    options: dict[str, Any] | None,
    out: str,
) -> None:
    """One training; rank 0 writes what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store", ranks), rank=rank, world_size=ranks)
    width = math.isqrt(numel // LAYERS)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(width, biases, getattr(torch, dtype)), gradient_as_bucket_view=True)
    chosen = OPTIMIZERS[optimizer](ddp.parameters())
    batch = torch.randn(BATCH, width, dtype=getattr(torch, dtype))
    found: dict[str, Taken] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            chosen.zero_grad(set_to_none=False)
            ddp(batch).square().mean().backward()
            chosen.step()

    if options is None:
        steps(3)
        with measured(found, "plain"):
            steps(STEPS)
    else:
        with measured(found, "attach"):
            engine = ls.attach(ddp, **options, watch=None)
        with measured(found, "first step"):
            steps(1)
        steps(2)
        with measured(found, "steady"):
            steps(STEPS)
        with measured(found, "flush"):
            engine._flush_next_step()
            steps(1)
        with measured(found, "steps after it"):
            steps(STEPS)
        with measured(found, "regroup"):
            engine.regroup(make_plan([p for group in engine.groups for p in group.parameters][::-1], "layer"))
        with measured(found, "steps then"):
            steps(STEPS)
        with measured(found, "save"):
            engine.state_dict()
        engine.close()
    if rank == 0:
        torch.save({name: tuple(taken) for name, taken in found.items()}, f"{out}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, *args: Any) -> dict[str, Taken]:
    """The bytes of each phase of a training."""
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(train, (ranks, *args, out), ranks)
        found: dict[str, tuple[float, float]] = torch.load(f"{out}/found.pt")
    return {name: Taken(*taken) for name, taken in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=40_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--biases", action="store_true", help="layers with biases and norms")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    numel = LAYERS * math.isqrt(args.numel // LAYERS) ** 2
    for dtype in args.dtypes:
        table = Table("phase", *(f"{name}: {which}" for name in OPTIMIZERS for which in Taken._fields))
        table.title = f"{numel / 1e6:.1f} M parameters, {dtype}, {args.ranks} ranks: bytes a parameter beyond plain DDP"
        rows: dict[str, list[str]] = {}
        for optimizer in OPTIMIZERS:
            plain = run(args.ranks, args.numel, args.biases, optimizer, dtype, None)["plain"]
            for phase, options in PHASES.items():
                found = run(args.ranks, args.numel, args.biases, optimizer, dtype, options)
                shown = found if not options else {"steady": found["steady"]}
                for name, taken in shown.items():
                    row = rows.setdefault(phase if name == "steady" else name, [])
                    row += [f"{(a - b) / numel:.1f}" for a, b in zip(taken, plain, strict=True)]
        for name, row in rows.items():
            table.add_row(name, *row)
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
