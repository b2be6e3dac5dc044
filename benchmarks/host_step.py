"""Where the host's time of a step goes, on the path of a device: CPU time beside DDP alone. And what memory it takes.

    python -m benchmarks.host_step [--groups 1] [--optimizers sgd momentum adamw] [--steps 12]
    python -m benchmarks.host_step --memory

An engine is one of 8 ranks that all bring the same, on tiny CPU tensors that take the path of a GPU, and launches of
Triton do nothing: what is left is what the host does until the device has all of its work. What counts are the parts,
and how many operations of torch and launches they take; parts that are indented lie within the one above. Memory is
what the allocator gives in the same steps, of a larger model: *stays* what error feedback and optimizer keep, *most*
what a step takes on top at its peak, gradients included. Run it from the root of a clone: its tests have the ranks and
the path.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_sparse as ls
from benchmarks.memory import Taken
from benchmarks.memory import model as layers
from lightning_sparse.engine.backward import BackwardEnd
from lightning_sparse.engine.optimizers.binding import OptimizerBinding
from lightning_sparse.engine.optimizers.rules import AdamRule, MomentumRule
from lightning_sparse.engine.step import Stepper
from lightning_sparse.ops import adam
from lightning_sparse.ops.on_cuda import OnCuda, on_cuda
from lightning_sparse.ops.triton import dense, numbers, packed, select, sums, tables, union, values
from tests.mirror import MirroredRanks, mirrored_ranks
from tests.static_path import static_path

WIDTH, BLOCKS, RANKS, WIDE = 16, 12, 8, 512
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}
PARTS: dict[str, list[tuple[Any, str]]] = {
    "backward's end": [(BackwardEnd, "receive")],
    "hook before the optimizer's step": [(OptimizerBinding, "before")],
    "  exchange": [(Stepper, "_exchange")],
    "    start, to the first message": [(Stepper, "_start")],
    "      absorb": [(ls.memories.Residual, "absorb_"), (ls.memories.SecondMoment, "absorb_")],
    "      select": [(ls.sparsifiers.UnionTopK, "select")],
    "    messages": [(MirroredRanks, "start"), (MirroredRanks, "announce")],
    "    settle": [(Stepper, "_settle")],
    "  rule": [(AdamRule, "before"), (MomentumRule, "before")],
    "hook after it": [(OptimizerBinding, "after")],
}
VIEWS = "view slice select expand unsq as_strided split unbind detach alias t."
FREE = tuple(f"empty new_zeros zeros_like {VIEWS}".split())
"""Beginnings of operations that run nothing on a device; zeros stand for memory that nobody has written."""


class Host(TorchDispatchMode):
    """Counts operations of torch and launches where it is entered, and adds up what parts take of these and of time."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: Counter[str] = Counter()
        self.parts: dict[str, Counter[str]] = {name: Counter() for name in PARTS}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.whole["operations"] += not func.overloadpacket.__name__.startswith(FREE)
        return func(*args, **(kwargs or {}))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, begin = self.whole.copy(), time.process_time_ns()
            made = function(*args, **kwargs)
            self.parts[part].update(ns=time.process_time_ns() - begin, **(self.whole - before))
            return made

        return call


@contextmanager
def on_a_device(host: Host) -> Iterator[None]:
    """The path of a GPU, where kernels write nothing and all that they would have written is zero."""
    new, launch = torch.empty_like, lambda *_, **__: host.whole.update(launches=1)
    like = lambda x, **given: (new if given.get("device") == "meta" else torch.zeros_like)(x, **given)  # noqa: E731
    changed: list[tuple[Any, str, Any]] = [(OnCuda, name, lambda *_: True) for name in ("tried", "takes", "knows")]
    changed += [(on_cuda, "trouble", None), (adam, "HOST", "nowhere"), (torch, "empty_like", like)]
    changed += [(Tensor, "new_empty", lambda x, *sizes, **given: x.new_zeros(*sizes, **given))]
    changed += [(at, "launch", launch) for at in (dense, numbers, packed, select, sums, tables, union, values)]
    changed += [(o, name, host.timed(part, getattr(o, name))) for part, called in PARTS.items() for o, name in called]
    with static_path(), ExitStack() as stack:
        for one in changed:
            stack.enter_context(patch.object(*one))
        yield


def measure(optimizer: str, groups: int, steps: int, sparse: bool) -> dict[str, Counter[str]]:
    """Return what a step and its parts cost, with an engine or of DDP alone: ns, operations and launches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 1, 4 * WIDTH, dropout=0.0) for _ in range(BLOCKS)))
    cap = 1.02 * 4 * sum(p.numel() for p in model.parameters()) / groups / 2**20
    ddp, batch, host = DistributedDataParallel(model, bucket_cap_mb=cap), torch.randn(4, 2, WIDTH), Host()
    chosen = OPTIMIZERS[optimizer](ddp.parameters(), foreach=True)

    def step() -> int:
        begin = time.process_time_ns()
        ddp(batch).square().mean().backward()
        chosen.step()
        chosen.zero_grad()
        return time.process_time_ns() - begin

    with on_a_device(host) if sparse else nullcontext(), mirrored_ranks(RANKS):
        options: dict[str, Any] = {"rules": ls.Rules(dense_numel=0), "bucket_cap_mb": cap, "single_device": "sparse"}
        engine = ls.attach(ddp, density=0.05, watch=None, **options) if sparse else None
        found: list[dict[str, Counter[str]]] = []
        for counted, repeated in ((False, 4), (True, 1), (False, steps)):  # the first ones warm up
            host.whole, host.parts = Counter(), {name: Counter() for name in PARTS}
            with host if counted else nullcontext():
                times = sorted(step() for _ in range(repeated))
            found.append({"whole": host.whole, **host.parts})
        if engine is not None:
            engine.close()
    for name, cost in found[1].items():
        cost["ns"] = times[steps // 2] if name == "whole" else found[2][name]["ns"] // steps
    return found[1]


def memory(optimizer: str, sparse: bool, views: bool) -> Taken:
    """Return bytes a parameter of a steady step, with an engine or of DDP alone; biases and norms between matrices.

    Args:
        optimizer: one of :data:`OPTIMIZERS`, fused: it takes no room on the way.
        sparse: with an engine.
        views: whether gradients are views of DDP's buckets.
    """
    torch.manual_seed(0)
    ddp = DistributedDataParallel(layers(WIDE, True, torch.float32), gradient_as_bucket_view=views)
    numel, batch = sum(p.numel() for p in ddp.parameters()), torch.randn(2, WIDE)
    chosen = OPTIMIZERS[optimizer](ddp.parameters(), fused=True)

    def step() -> None:
        ddp(batch).square().mean().backward()
        chosen.step()
        chosen.zero_grad()

    with on_a_device(Host()) if sparse else nullcontext(), mirrored_ranks(RANKS):
        options: dict[str, Any] = {"density": 0.01, "watch": None, "single_device": "sparse", "bucket_cap_mb": 1024}
        engine = ls.attach(ddp, **options) if sparse else None
        for _ in range(4):
            step()
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            step()
        stays = sum(x.nbytes for known in chosen.state.values() for x in known.values() if isinstance(x, Tensor))
        if engine is not None:
            stays += engine.memory_bytes
            engine.close()
    assert profile.kineto_results is not None
    events = [(e.start_ns(), e.nbytes()) for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return Taken(stays / numel, max(accumulate(size for _, size in sorted(events))) / numel)


def show_memory(console: Console) -> None:
    table = Table("bytes a parameter", "DDP: stays", "most", "ours: stays", "most", "more")
    for optimizer in OPTIMIZERS:
        for views in (False, True):
            alone, ours = (memory(optimizer, sparse, views) for sparse in (False, True))
            more = sum(ours) - sum(alone)
            name = optimizer + ", gradients in buckets" * views
            table.add_row(name, *(f"{x:.1f}" for x in (*alone, *ours, more)))
    console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        if args.memory:
            show_memory(Console(width=100))
        for optimizer in args.optimizers if not args.memory else ():
            table = Table(f"{optimizer}, {args.groups} groups", "ms", "operations", "launches")
            alone, ours = (measure(optimizer, args.groups, args.steps, sparse) for sparse in (False, True))
            for name, cost in {"DDP alone": alone["whole"], "ours": ours.pop("whole"), **ours}.items():
                table.add_row(name, f"{cost['ns'] / 1e6:.2f}", str(cost["operations"]), str(cost["launches"]))
            Console(width=100).print(table)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
