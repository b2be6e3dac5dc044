"""Do streams wait for each other where they must?

Looked at in two ways: PyTorch's own sanitizer watches a training for accesses that nothing orders; and the engine's
stream is made slow, so that whatever does not wait for it comes too early and changes numbers.
"""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.step import Absorbed
from lightning_sparse.methods.grouping import make_plan
from tests.gpu.checks import Check, Clock, Numbers, SkipError, require, synchronize
from tests.gpu.one_training import Training
from tests.gpu.parts import ROOT
from tests.gpu.processes import one_rank
from tests.mirror import mirrored_ranks
from tests.trainers import EVERYTHING_SPARSE

CYCLES = 20_000_000
"""About 10 ms at 2 GHz: longer than the host takes for what follows."""
RANKS = 2


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    yield Check("sanitizer notices a planted race", partial(sanitize, "planted_race", device, races=True))
    yield Check("sanitizer notices one in backward", partial(sanitize, "planted_in_backward", device, races=True))
    yield Check("sanitizer: training", partial(sanitize, "watched_training", device, races=False))
    with one_rank(device):
        yield Check("regroup on a slow stream", partial(regroup_slowly, device))
        yield Check("training on a slow stream", partial(train_slowly, device))
        for optimizer in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW):
            name = "AdamW" if optimizer is torch.optim.AdamW else "SGD"
            yield Check(f"kernels on a slow stream, {name}", partial(launch_slowly, device, optimizer))


# ---- The sanitizer


def sanitize(program: str, device: torch.device, races: bool) -> None:
    """Run a function of this file under the sanitizer, which raises where it sees a race."""
    if device.type == "cpu":
        raise SkipError("the sanitizer watches CUDA streams")
    command = [sys.executable, "-c", f"from tests.gpu import races; races.{program}({str(device)!r})"]
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    noticed = "CSAN detected" in done.stdout
    if races:
        require(noticed, f"the race was not noticed:\n{done.stdout[-3000:]}")
    else:
        require(not noticed, f"the sanitizer reports:\n{done.stdout[-6000:]}")
        require(done.returncode == 0, f"the training failed:\n{done.stdout[-3000:]}")


def planted_race(device: str) -> None:
    x = torch.rand(10_000, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.mul(x, 5, out=x)


def planted_in_backward(device: str) -> None:
    """Autograd has threads of its own: the sanitizer must watch there, too."""

    def touch(p: torch.Tensor) -> None:
        """On a stream that has not waited for the gradient."""
        with torch.cuda.stream(torch.cuda.Stream(p.device)):
            p.grad.mul_(1.0)

    with one_rank(torch.device(device)):
        training = Training(device, {"density": 0.05})
        for p in training.ddp.parameters():
            p.register_post_accumulate_grad_hook(touch)
        training.step()


def watched_training(device: str) -> None:
    """What happens in trainings: groups of several kinds, a skipped step, other groups, summaries, a state."""
    with one_rank(torch.device(device)):
        for options in (
            {"density": 0.05},
            {"sparsifier": "exdyna", "density": 0.05, "memory": ls.memories.Residual(rates=True)},
        ):
            training = Training(device, options, "small_buckets", dtype=torch.float32)
            for step in range(6):
                training.step(factor=float("nan") if step == 3 else 1.0)
                if step == 2:
                    sizes = [p for group in training.engine.groups for p in group.parameters][::-1]
                    training.engine.regroup(make_plan(sizes, "layer", EVERYTHING_SPARSE))
                if step == 4:
                    training.optimizer.param_groups[0]["lr"] /= 2
            training.engine.summary()
            training.engine.state_dict()
            ls.flush(training.engine, [training.optimizer])
            training.end([])


# ---- A slow stream


@dataclass(frozen=True)
class Slow(ls.memories.Residual):
    """Plain error feedback on a stream that is busy with something else before it gets to it."""

    cycles: int = CYCLES

    def _sleep(self) -> None:
        if torch.cuda.is_available() and self.cycles:
            torch.cuda._sleep(self.cycles)

    def absorb_(self, *args: Any, **options: Any) -> Absorbed:
        self._sleep()
        return super().absorb_(*args, **options)

    def settle_(self, *args: Any, **options: Any) -> None:
        self._sleep()
        super().settle_(*args, **options)

    def carry_(self, *args: Any, **options: Any) -> None:
        self._sleep()
        super().carry_(*args, **options)


def scribble(device: torch.device, sizes: list[int]) -> list[Tensor]:
    """Take what memory has just been given back on this stream, and write something else there."""
    return [torch.full((size,), 1e30, device=device) for size in sizes for _ in range(4)]


def regroup_slowly(device: torch.device) -> None:
    """Residuals arrive in other groups although the old ones' memory is taken at once.

    The very first groups, and groups that came from groups: they may have been allocated on different streams.
    """
    width = 512 if device.type == "cuda" else 16
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    ddp = DistributedDataParallel(nn.Sequential(*layers).to(device))
    alone = {"rules": EVERYTHING_SPARSE, "single_device": "sparse"}
    engine = ls.attach(ddp, memory=Slow(), grouping="model", watch=None, **alone)
    batch = torch.randn(8, width, device=device)
    for grouping in ("layer", "model", "layer"):
        ddp(batch).square().mean().backward()
        synchronize(device)
        sizes = [p for group in engine.groups for p in group.parameters][::-1]
        before = {p.name: engine.residual(p.name).clone() for p in sizes}
        synchronize(device)
        engine.regroup(make_plan(sizes, grouping, EVERYTHING_SPARSE))
        numel = width * width
        taken = scribble(device, [numel, numel + 1, 4 * numel, 4 * numel + 1])
        synchronize(device)
        changed = [name for name, residual in before.items() if not torch.equal(engine.residual(name), residual)]
        require(not changed, f"to {grouping!r}: the residuals of {changed} have been overwritten")
        del taken
    engine.close()


def trained(training: Training, device: torch.device) -> Any:
    """Losses and parameters of some steps, of which one is skipped; in between, others write to memory that is free."""
    losses = []
    for step in range(6):
        losses.append(training.step(factor=float("nan") if step == 3 else 1.0))
        scribble(device, [1_000, 5_000, 8_000])
    return training.end(losses)


def require_equal(fast: Any, slow: Any, layout: str) -> None:
    require(fast[0] == slow[0], f"{layout}: other losses on a slow stream")
    require(torch.equal(fast[1], slow[1]), f"{layout}: other parameters on a slow stream")


def train_slowly(device: torch.device) -> None:
    """A training does not notice that its exchanges come late."""
    for layout in ("default", "small_buckets", "find_unused", "view"):
        results = []
        for cycles in (0, CYCLES):
            training = Training(str(device), {"density": 0.05, "memory": Slow(cycles=cycles)}, layout)
            results.append(trained(training, device))
        require_equal(*results, layout)


def launch_slowly(device: torch.device, optimizer: Callable[..., torch.optim.Optimizer]) -> Numbers:
    """As one of several ranks that bring the same: a training does not notice that kernels in Triton begin late."""
    for layout in ("default", "small_buckets"):
        results = []
        for cycles in (0, CYCLES // 10):
            with mirrored_ranks(RANKS), launches_after(cycles) as launched:
                options: dict[str, Any] = {"dtype": torch.float32, "optimizer": optimizer}
                training = Training(str(device), {"density": 0.05}, layout, **options)
                results.append(trained(training, device))
        require_equal(*results, layout)
    return {"launches": launched[0]}


@contextmanager
def launches_after(cycles: int) -> Iterator[list[int]]:
    """Before each launch of a kernel in Triton, the stream is busy for so long; gives the number of launches."""
    launched = [0]
    with ExitStack() as patches:
        if find_spec("triton") is not None:
            from lightning_sparse.ops import triton
            from lightning_sparse.ops.triton import launch as triton_launch

            launch = triton_launch.launch

            def late(*args: Any, **options: Any) -> None:
                launched[0] += 1
                if torch.cuda.is_available() and cycles:
                    torch.cuda._sleep(cycles)
                launch(*args, **options)

            for found in pkgutil.iter_modules(triton.__path__, f"{triton.__name__}."):
                if hasattr(module := import_module(found.name), "launch"):
                    patches.enter_context(patch.object(module, "launch", late))
        yield launched
