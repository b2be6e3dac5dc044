"""On a device, a step of a group never makes the host wait, until all groups have been exchanged.

The step runs on meta tensors: they have shapes but no content, so that whatever needs content (``.item()``, ``bool()``,
``nonzero``, a boolean index, a copy to the host) raises, on a machine without any device. They take the same path as
CUDA tensors, since only the CPU is special. Copies from pageable host memory, which block the host as well, would go
through silently; :func:`no_waiting` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.pipeline import init_group
from tests.contract.cases import CASES, MEMORIES, PAIRS, Case, fit, kinds
from tests.covering import covering, in_one_test
from tests.mirror import Mirror, step_that_counts

DEVICE = torch.device("meta")
NUMEL = 10_007  # shared by 4 ranks with a remainder of 3


class WaitingError(Exception):
    """The host would have to wait for the device."""


class NoCopies(TorchDispatchMode):
    """Refuses to bring tensors from the host to the device: without pinned memory, torch waits for such a copy.

    A scalar on the host may still be an operand on the device: it travels with the kernel's arguments.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves = []
        for argument in (*args, *(kwargs or {}).values()):  # operators take lists, and nothing deeper
            leaves.extend(argument if isinstance(argument, (list, tuple)) else (argument,))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        to_device = any(tensor.device == DEVICE for tensor in tensors) or DEVICE in leaves
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if to_device and any(t.device != DEVICE and (t.dim() > 0 or copies) for t in tensors):
            raise WaitingError(f"{func} copies from the host")
        return func(*args, **(kwargs or {}))


class NoNumbers(TorchFunctionMode):
    """Refuses to make device tensors of Python numbers: on CUDA they are made on the host and copied."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if made and (kwargs or {}).get("device") == DEVICE:
            raise WaitingError(f"{func} copies from the host")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    with NoCopies(), NoNumbers():
        yield


def steps(
    case: Case,
    exchange: str,
    memory: ls.memories.Memory,
    *,
    rank: int = 1,
    dtype: torch.dtype = torch.float32,
    count: int = 3,
    density: float = 0.05,
) -> None:
    """The first steps of a group; creating its state may wait."""
    ctx = Context(step=0, density=density, rank=rank, world_size=4)
    state = init_group(NUMEL, dtype, DEVICE, ctx, memory=memory, sparsifier=case.sparsifier)
    parts = {"memory": memory, "sparsifier": case.sparsifier, "exchange": ls.exchanges.EXCHANGES.resolve(exchange)}
    for step in range(count):
        grad = torch.zeros(NUMEL, dtype=dtype, device=DEVICE)
        with no_waiting():
            state, statistics = step_that_counts(grad, state, ctx._replace(step=step), parts, Mirror(rank))
        assert grad.device == statistics.union.device == statistics.counts.device == DEVICE


@in_one_test(
    "case, exchange, memory, dtype, rank",
    covering(
        (
            (*pair, memory, dtype, rank)
            for pair in PAIRS
            for memory in (ls.memories.Residual(), ls.memories.NoMemory())
            for dtype in (torch.float32, torch.bfloat16)
            for rank in (0, 3)
        ),
        together=1,
        seen_as=kinds,
    ),
)
def test_a_step_on_a_device_never_waits(
    case: Case, exchange: str, memory: ls.memories.Memory, dtype: torch.dtype, rank: int
) -> None:
    # What methods keep from step to step does not depend on the memory: later steps with one of the two are enough.
    steps(case, exchange, memory, dtype=dtype, rank=rank, count=3 if isinstance(memory, ls.memories.Residual) else 1)


@in_one_test(
    "memory, name, density, dtype",
    covering(
        product(
            MEMORIES,
            ["top_k", "shared_top_k", "exdyna", "gtop_k", "everything"],
            [0.05, 1.0],
            [torch.float32, torch.bfloat16],
        ),
        together=1,
    ),
)
def test_a_step_with_any_memory_never_waits(
    name: str, memory: ls.memories.Memory, density: float, dtype: torch.dtype
) -> None:
    [case] = [case for case in CASES if case.name == name]
    exchange = case.sparsifier.exchange
    if fit(memory, exchange):
        steps(case, exchange, memory, dtype=dtype, density=density)


def on_device(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: on_device(3).sum().item(),
    "float": lambda: float(on_device()),
    "bool": lambda: bool(on_device() > 0),
    "tolist": lambda: on_device(3).tolist(),
    "nonzero": lambda: on_device(3).nonzero(),
    "boolean index": lambda: on_device(3)[on_device(3) > 0],
    "masked_select": lambda: on_device(3).masked_select(on_device(3) > 0),
    "unique": lambda: on_device(3).unique(),
    "slice up to a tensor": lambda: on_device(3)[: on_device().long()],
    "copy to the host": lambda: on_device(3).cpu(),
    "copy to the device": lambda: torch.arange(3).to(DEVICE),
    "copy of a scalar": lambda: torch.tensor(3).to(DEVICE),
    "tensor of a number": lambda: torch.tensor(3, device=DEVICE),
    "tensor of a list": lambda: torch.as_tensor([1, 2], device=DEVICE),
    "index on the host": lambda: on_device(3)[torch.arange(2)],
    "copy_": lambda: on_device(3).copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", WAITS)
def test_whatever_makes_the_host_wait_is_noticed(name: str) -> None:
    with no_waiting(), pytest.raises((WaitingError, RuntimeError)):
        WAITS[name]()


def test_what_needs_no_waiting_passes() -> None:
    with no_waiting():
        x = on_device(3) * torch.tensor(2.0) + torch.full((), 3, device=DEVICE)
        x = x.masked_fill_(x > 0, float("nan"))[torch.arange(2, device=DEVICE)]
        x[1:] = 0
        assert (x.shape, torch.arange(3).tolist()) == ((2,), [0, 1, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@in_one_test("case, exchange", PAIRS)
def test_cuda_itself_sees_no_synchronisation(case: Case, exchange: str) -> None:
    device = torch.device("cuda")
    ctx = Context(step=0, density=0.05, rank=1, world_size=4)
    memory = ls.memories.Residual()
    state = init_group(NUMEL, torch.float32, device, ctx, memory=memory, sparsifier=case.sparsifier)
    parts = {"memory": memory, "sparsifier": case.sparsifier, "exchange": ls.exchanges.EXCHANGES.resolve(exchange)}
    for step in range(3):
        grad = torch.randn(NUMEL, device=device)
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step may load kernels
        try:
            state, _ = step_that_counts(grad, state, ctx._replace(step=step), parts, Mirror(1))
        finally:
            torch.cuda.set_sync_debug_mode("default")
