"""n ranks as threads of one process, behind ``torch.distributed``: a backend that notes every tensor that is sent.

The package is not asked what it sends: whatever it is called inside, in the end it calls ``torch.distributed``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import reduce
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d
from torch.futures import Future
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

T = TypeVar("T")
SECONDS = 60.0
"""How long a rank waits for the others."""


class Meeting:
    """Where n ranks put what they bring and take what all have brought."""

    def __init__(self, n: int) -> None:
        self.rows: list[Any] = [None] * n
        self.barrier = threading.Barrier(n, timeout=SECONDS)
        self.given: dict[tuple[int, int], SimpleQueue[Tensor]] = {
            (a, b): SimpleQueue() for a in range(n) for b in range(n)
        }

    def exchange(self, rank: int, brought: Any) -> list[Any]:
        self.rows[rank] = brought
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class Threads:
    """The threads of a run."""

    def __init__(self, n: int) -> None:
        self.n, self.lock = n, threading.Lock()
        self.meetings: dict[str, Meeting] = {}
        self.sent: list[list[tuple[str, Tensor]]] = [[] for _ in range(n)]
        """What each rank has sent since this was emptied: kind of message, and a copy."""

    def meeting(self, name: str) -> Meeting:
        with self.lock:
            return self.meetings.setdefault(name, Meeting(self.n))

    def run(self, job: Callable[[int], T]) -> list[T]:
        """The job on all ranks; the first error of one of them ends all."""
        results: list[Any] = [None] * self.n
        errors: list[BaseException] = []
        store = dist.HashStore()

        def rank_runs(rank: int) -> None:
            try:
                dist.init_process_group("recorder", rank=rank, world_size=self.n, store=store)
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = job(rank)
                dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)
                for meeting in list(self.meetings.values()):
                    meeting.barrier.abort()

        global _running
        before, distributed_c10d._world, _running = distributed_c10d._world, World(), self
        start, threading.Thread.start = threading.Thread.start, _start  # type: ignore[method-assign]
        _set_thread_isolation_mode(True)  # of names of groups
        try:
            ranks = [threading.Thread(target=rank_runs, args=(rank,)) for rank in range(self.n)]
            for rank in ranks:
                start(rank)
            for rank in ranks:
                rank.join()
        finally:
            distributed_c10d._world, threading.Thread.start = before, start  # type: ignore[method-assign]
            _set_thread_isolation_mode(False)
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


_running = Threads(0)
_thread_start = threading.Thread.start


class World(ThreadLocalWorld):
    """What ``torch.distributed`` knows of groups, for each rank its own."""


def _start(thread: threading.Thread) -> None:
    """Threads of a rank are of its world, too."""
    world, run = World()._get_world(), thread.run

    def inherit() -> None:
        World._world.world = world
        run()

    thread.run = inherit  # type: ignore[method-assign]
    _thread_start(thread)


class Group(dist.ProcessGroup):
    """A process group of threads: sums are formed in the order of ranks."""

    def __init__(self, name: str, rank: int, n: int) -> None:
        super().__init__(rank, n)
        self.name, self.rank_here, self.n, self.threads, self.meeting = name, rank, n, _running, _running.meeting(name)

    def getBackendName(self) -> str:
        return "recorder"

    @property
    def group_name(self) -> str:
        return self.name

    def _meet(self, kind: str, x: Tensor, noted: bool = True) -> list[Tensor]:
        brought = x.detach().clone()
        if noted:
            self.threads.sent[self.rank_here].append((kind, brought))
        rows = self.meeting.exchange(self.rank_here, (kind, brought))
        asked = {(kind, tuple(row.shape), row.dtype) for kind, row in rows}
        assert len(asked) == 1, f"ranks ask for different things: {asked}"
        return [row for _, row in rows]

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        name = next(name for name in ("SUM", "AVG", "MAX", "MIN") if op == getattr(dist.ReduceOp, name))
        add = {"MAX": torch.maximum, "MIN": torch.minimum}.get(name, torch.add)
        for x in tensors:
            total = reduce(add, self._meet(f"all_reduce {name}", x))
            x.detach().copy_(total / self.n if name == "AVG" else total)
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Of ``all_gather_object`` alone: facts that ranks compare, and not what a step sends."""
        for out, row in zip(outputs[0], self._meet("all_gather of objects", inputs[0], noted=False), strict=True):
            out.detach().copy_(row)
        return Done(outputs)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any = None) -> Any:
        output.detach().view(-1).copy_(torch.cat([row.view(-1) for row in self._meet("all_gather", x)]))
        return Done(output)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for x in tensors:
            x.detach().copy_(self._meet(f"broadcast {opts.rootRank}", x)[opts.rootRank])
        return Done(tensors)

    def all_to_all_single(self, output: Tensor, x: Tensor, *sizes: Any) -> Any:
        rows = self._meet("all_to_all", x)
        output.detach().copy_(torch.cat([row.chunk(self.n)[self.rank_here] for row in rows]))
        return Done(output)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        for x in tensors:
            self.threads.sent[self.rank_here].append((f"send {to}", x.detach().clone()))
            self.meeting.given[self.rank_here, to].put(x.detach().clone())
        return Done(tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        for x in tensors:
            x.detach().copy_(self.meeting.given[source, self.rank_here].get(timeout=SECONDS))
        return Done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.ones(1)])

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single


class Done(dist.Work):
    """A collective that is over when it begins: ranks have met in it."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.future: Future[Any] = Future()
        self.future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self.future


def _create(options: Any, _: Any) -> Group:
    return Group(options.group_id, options.group_rank, options.group_size)


dist.Backend.register_backend("recorder", _create, extended_api=True, devices=["cpu"])
