"""Can a step be captured in a CUDA graph, and does a compiled model train the same?

A captured step repeats one and the same operations, numbers of ranks and steps included. What is captured here is a
step of a group, as one of several ranks that all bring the same.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.step import Context, GroupState
from lightning_sparse.engine.group import tensors_in
from lightning_sparse.engine.pipeline import init_group
from tests.gpu.checks import Check, Clock, Numbers, SkipError, require, synchronize
from tests.gpu.models import Transformer
from tests.gpu.processes import one_rank
from tests.gpu.timing import seconds_of
from tests.mirror import Mirror, step_that_counts
from tests.static_path import static_path

NUMEL = {"cuda": 25 * 2**20 // 4, "cpu": 5_000}
RANKS, REPLAYS = 4, 3
SPARSIFIERS = ["union_top_k", "shared_top_k", "top_k", "micro", "exdyna", "dgc"]


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    for name in SPARSIFIERS:
        yield Check(f"graph of a step, {name}", partial(capture, name, ls.memories.Residual(), device))
    yield Check(
        "graph of a step, union_top_k with Adam", partial(capture, "union_top_k", ls.memories.SecondMoment(), device)
    )
    with one_rank(device):
        for options in ({}, {"grouping": "model"}):
            yield Check(f"compiled model, {options or 'defaults'}", partial(compile_model, options, device))


class OneStep:
    """A step of a group whose state is always in the same memory."""

    def __init__(self, name: str, memory: ls.memories.Memory, device: torch.device, numel: int) -> None:
        self.sparsifier, self.memory = ls.sparsifiers.SPARSIFIERS.resolve(name), memory
        self.exchange = ls.exchanges.EXCHANGES.resolve(self.sparsifier.exchange)
        self.ctx = Context(step=1, density=0.01, rank=1, world_size=RANKS)
        self.state = init_group(numel, torch.float32, device, self.ctx, memory=self.memory, sparsifier=self.sparsifier)
        generator = torch.Generator("cpu").manual_seed(0)
        self.gradient = torch.randn(numel, generator=generator, device="cpu").to(device)
        self.grad = torch.empty(numel, device=device)
        self.state = self.after(self.state)  # a first step has no counts of a step before
        self.state = self.after(self.state)

    def after(self, state: GroupState) -> GroupState:
        self.grad.copy_(self.gradient)
        parts: dict[str, Any] = {"memory": self.memory, "sparsifier": self.sparsifier, "exchange": self.exchange}
        return step_that_counts(self.grad, state, self.ctx, parts, Mirror(1, RANKS))[0]

    def __call__(self) -> None:
        found = self.after(self.state)
        # What the memory keeps has changed in place. Everything else is small, and new.
        for kept, new in zip(self.small(self.state), self.small(found), strict=True):
            kept.copy_(new)

    def small(self, state: GroupState) -> list[Tensor]:
        return list(tensors_in((state.selector, state.counts, state.union)))

    def outcome(self) -> list[Tensor]:
        memory = self.state.memory
        remembered = *self.memory.vectors(memory).values(), *self.memory.counters(memory).values()
        return [self.grad, *remembered, *self.small(self.state)]


def captured(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays the step; on a CPU the step itself stands in for that."""
    if device.type == "cpu":
        return step
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()  # loads kernels
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def capture(name: str, memory: ls.memories.Memory, device: torch.device) -> Numbers:
    """Replays do what the step does."""
    with static_path():
        numel = NUMEL[device.type]
        eager, step = (OneStep(name, memory, device, numel) for _ in range(2))
        replay = captured(step, device)
        if device.type == "cuda":
            eager()  # as the stream above; capturing itself computes nothing
        for _ in range(REPLAYS):
            eager()
            replay()
        synchronize(device)
        for one, other in zip(eager.outcome(), step.outcome(), strict=True):
            require(torch.equal(one, other), f"a replay of {name} gives other numbers")
        few = {"repeats": 1, "warm_up": 0} if device.type == "cpu" else {}  # such times say nothing
        numbers = {"ms": seconds_of(eager, device, **few), "ms in a graph": seconds_of(replay, device, **few)}
    return {what: round(1e3 * seconds, 3) for what, seconds in numbers.items()}


def compile_model(options: dict[str, Any], device: torch.device) -> Numbers:
    """A compiled model trains as one that is not; the pieces into which DDP's buckets cut it are counted."""
    on_cuda = device.type == "cuda"
    torch._dynamo.reset()  # what was compiled before in this process counts for nothing
    losses, pieces = {}, [0]

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        pieces[0] += 1
        if not on_cuda:
            return module.forward
        # As a compiler sees it, backward included; Inductor's own code is not in question, and takes long to make.
        compiled: Callable[..., Any] = aot_eager(module, inputs)
        return compiled

    torch.manual_seed(0)
    size = {"layers": 4} if on_cuda else {"layers": 1, "width": 32, "heads": 2, "words": 50, "length": 9}
    with device:
        model = Transformer(**size)
    tokens = torch.randint(model.words, (4, model.length), device=device)
    for compiled in (False, True):
        ddp = DistributedDataParallel(copy.deepcopy(model))
        engine = ls.attach(ddp, density=0.05, single_device="sparse", **options)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        forward = torch.compile(ddp, backend=backend) if compiled else ddp
        losses[compiled] = []
        for _ in range(4):
            try:
                with warnings.catch_warnings():
                    # torch's tracer looks at .grad of all tensors, and hides this where warnings are no errors only.
                    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
                    loss = forward(tokens)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                raise SkipError(f"nothing is compiled here: {str(error).splitlines()[0]}") from error
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(loss.item())
        engine.close()
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-2, atol=1e-3)
    return {"pieces": pieces[0], "loss": round(losses[True][-1], 4), "not compiled": round(losses[False][-1], 4)}
