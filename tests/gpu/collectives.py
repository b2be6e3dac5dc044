"""Does NCCL take every operation and type that the package hands to it, in the way it does?

With one rank the package itself sends nothing. The calls here are those of ``lightning_sparse/collective.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.checks import Check, Clock, SkipError, require, synchronize
from tests.gpu.processes import one_rank

WORDS = [torch.uint8, torch.int32, torch.int64]
"""Of counts, indices, packed values, digests and flags."""
VALUES = [torch.float32, torch.float64]
"""Of accumulators."""
GRADIENTS = [torch.bfloat16, torch.float16, *VALUES]
"""Averaged as they are, where groups are dense."""

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    with one_rank(device):
        operations: list[tuple[Callable[[Tensor], Tensor], list[torch.dtype]]] = [
            (all_gather, WORDS + VALUES),
            (all_reduce, WORDS + GRADIENTS),
            (broadcast, WORDS + VALUES),
            (all_to_all, WORDS + VALUES),
            (send_recv, WORDS + VALUES),
            (average, GRADIENTS),
            (average_later, GRADIENTS),
        ]
        for operation, dtypes in operations:
            for dtype in dtypes:
                yield Check(
                    f"{operation.__name__} {str(dtype).removeprefix('torch.')}",
                    partial(alike, operation, dtype, device),
                )
        yield Check("on a stream of its own", partial(on_a_stream, device))
        yield Check("abort of a group", partial(abort, device))


def alike(operation: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """With one rank, every operation gives what it was given."""
    x = torch.arange(100, device=device).to(dtype)
    result = operation(x.clone())
    synchronize(device)
    require(torch.equal(result.view(-1), x), f"{operation.__name__} of {dtype} changes values")


def all_gather(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _all_gather(out, x)
    return out


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, group_src=0)
    return x


def all_to_all(x: Tensor) -> Tensor:
    out = torch.empty_like(x).unsqueeze(0)
    dist.all_to_all_single(out, x.unsqueeze(0))
    return out


def send_recv(x: Tensor) -> Tensor:
    if not x.is_cuda:
        raise SkipError("gloo sends nothing to the same rank")
    out = torch.empty_like(x)
    moves = [dist.P2POp(dist.isend, x, group_peer=0), dist.P2POp(dist.irecv, out, group_peer=0)]
    for move in dist.batch_isend_irecv(moves):
        move.wait()
    return out


def average(x: Tensor) -> Tensor:
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x


def average_later(x: Tensor) -> Tensor:
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda _: x).wait()


def on_a_stream(device: torch.device) -> None:
    """Collectives that are waited for on a side stream, as groups use them, order that stream and no other."""
    if device.type == "cpu":
        raise SkipError("no streams on a CPU")
    x = torch.zeros(1_000_000, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.add_(1)
        dist.all_reduce(x)
        out = all_gather(x)
    torch.cuda.current_stream(device).wait_stream(side)
    require(bool((out == 1).all()), "a collective did not wait for the stream that it was called on")


def abort(device: torch.device) -> None:
    """A group that is given up, and the default one goes on."""
    if device.type == "cpu":
        raise SkipError("gloo groups are closed, not aborted")
    group = dist.new_group(backend="nccl")
    x = torch.ones(10, device=device)
    dist.all_reduce(x, group=group)
    synchronize(device)
    group.abort()
    dist.destroy_process_group(group)
    require(bool((all_reduce(x) == 1).all()), "the default group does not work any more")
