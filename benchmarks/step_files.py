"""Which files of the package does a gradient pass, from DDP's hook to the end of the optimizer's step?

One model is trained behind DDP and the default exchange for some steps, on one rank in this process (the executor is
then inline) or on several processes with gloo between them (then also on the communication thread). In a steady step,
`sys.setprofile` notes each function of the package that is entered, on all threads that the package uses, from the
first call of the communication hook to the end of `optimizer.step()`. A generator is entered each time it goes on.

Counted are files whose code runs. A record that is made (`Context`, `Update`) is no call of a function of its file,
and code in C is not seen: it is called by `ops/c/native.py`. Files differ where nothing was compiled, and on CUDA.

    OMP_NUM_THREADS=1 python benchmarks/step_files.py
    OMP_NUM_THREADS=1 python benchmarks/step_files.py --optimizers [adamw] --functions true
    OMP_NUM_THREADS=1 python benchmarks/step_files.py --ranks 2
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jsonargparse import CLI
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls

PACKAGE = f"{Path(ls.__file__).parent}{os.sep}"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
HOOK = "engine/sources/comm_hook.py", "_hook"
"""DDP calls it: noting begins there."""

Entered = dict[str, Counter[str]]
"""Files in the order of their first entry, and how often each of their functions was entered."""


class Notes:
    """Notes functions of the package that are entered between :meth:`start` and :meth:`stop`."""

    def __init__(self) -> None:
        self.entered: Entered = {}
        self._on = self._begun = False

    def start(self) -> None:
        """Note from the next call of the hook on."""
        self.entered, self._begun, self._on = {}, False, True
        sys.setprofile(self.note)

    def stop(self) -> Entered:
        """Note no more; what was noted."""
        sys.setprofile(None)
        self._on = False
        return self.entered

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Called by `sys.setprofile`, on each thread."""
        code = frame.f_code
        if not self._on or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        place = code.co_filename.removeprefix(PACKAGE).replace(os.sep, "/"), code.co_qualname
        self._begun = self._begun or place == HOOK
        if self._begun:
            self.entered.setdefault(place[0], Counter())[place[1]] += 1


class Step(NamedTuple):
    """Files that a step enters."""

    usual: Entered
    """In a step whose files are those of most steps."""
    rare: list[str]
    """Further files, which other steps enter."""

    @classmethod
    def of(cls, steps: list[Entered]) -> Step:
        """That of several steps."""
        [(files, _)] = Counter(frozenset(one) for one in steps).most_common(1)
        usual = next(one for one in reversed(steps) if one.keys() == files)
        return cls(usual, sorted({file for one in steps for file in one} - files))


def entered(optimizer: str, before: int = 8, steps: int = 12) -> Step:
    """Train, within a process group, and note what is entered.

    Args:
        optimizer: one of `OPTIMIZERS`.
        before: steps that nobody looks at, in which bounds for the selection settle.
        steps: that are noted after them.
    """
    notes = Notes()
    torch.manual_seed(0)
    threading.setprofile(notes.note)  # for a communication thread, which begins when the engine is attached
    try:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
        engine = ls.attach(ddp, single_device="sparse")
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    chosen = OPTIMIZERS[optimizer](ddp.parameters())
    engine.bind([chosen])
    found = []
    for batch in torch.randn(before + steps, 16, 64, generator=torch.Generator().manual_seed(dist.get_rank())):
        chosen.zero_grad()
        loss = ddp(batch).square().mean()
        notes.start()
        try:
            loss.backward()
            chosen.step()
        finally:
            found.append(notes.stop())
    engine.close()
    return Step.of(found[before:])


def _work(rank: int, ranks: int, optimizers: list[str], folder: str) -> None:
    """Be a rank; the first one writes down its notes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(f"{folder}/store", ranks))
    found = {name: entered(name) for name in optimizers}
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def main(optimizers: list[str] | None = None, ranks: int = 1, functions: bool = False) -> dict[str, Step]:
    """Print the files of a step, in the order of their first entry, and how often functions in them are entered.

    Args:
        optimizers: of sgd, momentum and adamw; None: all.
        ranks: processes; 1: this one.
        functions: also print each function.
    """
    names = optimizers or list(OPTIMIZERS)
    with tempfile.TemporaryDirectory() as folder:
        if ranks > 1:
            spawn(_work, (ranks, names, folder), ranks)
        else:
            _work(0, 1, names, folder)
        found: dict[str, Step] = torch.load(f"{folder}/found", weights_only=False)
    console = Console(width=120)
    for name, step in found.items():
        table = Table(title=f"{name}, ranks: {ranks}, files: {len(step.usual)}")
        for heading in ("", "file", "functions", "entries"):
            table.add_column(heading, justify="left" if heading == "file" else "right")
        for number, (file, counts) in enumerate(step.usual.items(), 1):
            table.add_row(str(number), file, str(len(counts)), str(counts.total()))
            for function, times in counts.items() if functions else ():
                table.add_row("", f"    {function}", "", str(times))
        console.print(table)
        console.print(f"in some steps also: {', '.join(step.rare) or 'none'}")
    return found


if __name__ == "__main__":
    CLI(main, as_positional=False)
