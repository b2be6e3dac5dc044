"""A prototype: messages travel while the *next forward* runs, for trainings that clip.

With clipping nothing can be sent before the norm of all gradients is known, that is before backward is over. What is
left to hide behind is the forward of the next step. Here the step absorbs, selects and starts to send, in the order in
which forward uses groups, and returns. Each module waits for the averages of its own parameters before it is used, and
only then are its weights stepped. Nothing is stale: weights are those of the plain order, bit for bit, which is looked
at in each run.

Two ranks over a link that waits (see `overlap.py`), SGD, clipping by the norm of the mean gradient. Variants take
turns: `step` exchanges when the optimizer steps, `forward` within the next forward. Steps are taken in a row, without a
barrier. Printed: milliseconds of a step; what messages take in `forward`; what is hidden, as far as steps are shorter.

What reads weights between step and forward sees those of before: evaluation, checkpoints, averages of weights,
callbacks, and all that uses a parameter without calling its module. `finish()` waits for all.

    python benchmarks/next_forward.py
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import about, free_port, in_words
from models14m import MODELS
from overlap import Link
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.console import Table
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import Going, joined
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.overlap import Sender, Sent
from lightning_sparse.engine.step import at_once

RATE = 0.01
DENSITY = 0.01
LIMIT = 1.0


class NextForward:
    """Takes SGD's steps of a model whose engine exchanges nothing by itself.

    Args:
        model: whose modules wait.
        engine: its groups are those of modules.
    """

    def __init__(self, model: nn.Module, engine: ls.Engine) -> None:
        self.stepper, self.comm = engine.stepper, engine.stepper.comm.another()
        self.sender = Sender(self.comm)
        self.waiting: dict[int, tuple[GroupReducer, Sent]] = {}
        # The plan is in the order of backward; groups of small parameters come last there, and are used first.
        self.groups = list(reversed(self.stepper.groups))
        for module in model.modules():
            own = {id(p) for p in module.parameters(recurse=False)}
            if used := [g for g in self.groups if own & {id(self.stepper.parameters[n]) for n in g.spans}]:
                module.register_forward_pre_hook(lambda *_, used=used: self.wait(used))

    @torch.no_grad()
    def step(self) -> None:
        """Absorb and select; messages go on."""
        taken, world = self.stepper.record.counts.step, self.comm.world_size
        for group in self.groups:
            grads = {name: self.stepper.parameters[name].grad for name in group.spans}
            pieces = {name: grad.view(-1) for name, grad in grads.items() if grad is not None}
            ctx = Context(taken, group.density(taken), self.comm.rank, world)
            going = Going(joined([group.exchange_steps(ctx, pieces)], self.comm), self.comm.start, at_once)
            sent = Sent(torch.no_grad()(going.run), self.stepper.failing_together)
            self.sender.send(sent)
            self.waiting[id(group)] = group, sent
        self.stepper.record.count(skipped=False)  # by which sketches of norms differ from step to step

    @torch.no_grad()
    def wait(self, groups: list[GroupReducer]) -> None:
        """Step the weights of groups, once their averages are here."""
        for group in groups:
            if (waiting := self.waiting.pop(id(group), None)) is None:
                continue
            [made] = waiting[1].wait()
            group.settle(made, torch.zeros((), dtype=torch.bool))
            for p in (self.stepper.parameters[name] for name in group.spans):
                assert p.grad is not None
                p.add_(p.grad, alpha=-RATE)
                p.grad = None

    def finish(self) -> None:
        """Wait for all."""
        self.wait(self.groups)

    def close(self) -> None:
        self.sender.close()
        self.comm.close()


class Variant:
    """One copy of the model."""

    def __init__(self, name: str, model: str) -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]()
        self.ddp = DistributedDataParallel(self.model, init_sync=False)
        settings: dict[str, Any] = {"density": DENSITY, "grouping": "layer", "watch": None, "memory": "residual"}
        self.engine = ls.attach(self.ddp, **settings)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=RATE)
        self.later = NextForward(self.model, self.engine) if name == "forward" else None

    def step(self, batch: Any) -> None:
        if self.later is None:
            self.optimizer.zero_grad()
        self.ddp(batch).backward()
        self.engine.clip_grad_norm_(self.ddp.parameters(), LIMIT)
        if self.later is None:
            self.optimizer.step()
        else:
            self.engine.stepper.leave(list(self.engine.stepper.parameters))  # the engine does not exchange them
            self.later.step()

    def turn(self, batch: Any, steps: int, link: Link) -> tuple[float, float]:
        """Milliseconds of a step and of its messages, of some steps in a row."""
        self.step(batch)
        dist.barrier()
        link.taken.clear()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        end = time.perf_counter()
        messages = sum(seconds for _, seconds in link.taken)
        if self.later is not None:
            self.later.finish()
        return 1e3 * (end - begin) / steps, 1e3 * messages / steps

    def close(self) -> None:
        if self.later is not None:
            self.later.close()
        self.engine.close()


def measure(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = []
    for model in arguments.models:
        for mbit in arguments.mbit:
            link = Link(mbit)
            batch = MODELS[model].random_batch(torch.Generator().manual_seed(1 + rank))
            variants = {name: Variant(name, model) for name in ("step", "forward")}
            found: dict[str, list[torch.Tensor]] = {name: [] for name in variants}
            for number in range(arguments.rounds):
                for name in list(variants) if number % 2 == 0 else list(variants)[::-1]:
                    taken = torch.tensor(variants[name].turn(batch, arguments.steps, link))
                    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                    found[name].append(taken)
            flat = [torch.cat([p.detach().flatten() for p in one.model.parameters()]) for one in variants.values()]
            assert torch.equal(*flat), (flat[0] - flat[1]).abs().max()
            saved = [float(a[0] - b[0]) for a, b in zip(found["step"], found["forward"], strict=True)]
            step, forward = (median(float(one[0]) for one in found[name]) for name in variants)
            messages = median(float(one[1]) for one in found["forward"])
            texts = [f"{one:.0f}" for one in (step, forward, messages, median(saved))]
            rows.append([model, f"{mbit:g}", *texts, f"{sum(one > 0 for one in saved)}/{len(saved)}"])
            link.close()
            for variant in variants.values():
                variant.close()
    if rank == 0:
        header = ["model", "Mbit/s", "step ms", "forward ms", "messages ms", "shorter by ms", "rounds"]
        Table("exchange within the next forward, beside that of the step; weights are equal", header, rows).show()
        print(in_words(about()))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["lstm", "vgg"])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    torch.multiprocessing.spawn(measure, (free_port(), parser.parse_args()), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
