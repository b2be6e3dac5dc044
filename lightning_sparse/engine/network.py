"""The network of a training: a process group of ``torch.distributed``.

Over gloo, an all-gather is a ring of ``n - 1`` messages, and an all-reduce one of ``2 (n - 1)``. Each message waits for
the one before, and for its receiver to ask for it, a round trip. Here all ranks send to all others at once, see
:attr:`TorchCollective.one_hop`. Where they are far apart, they ask for a message before they send the one before it,
see :class:`.Ahead`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_sparse.core.messages import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Message,
    SendRecv,
    run,
    short,
    summed,
)
from lightning_sparse.engine.ahead import FAR, LOOK, Ahead

# Renamed in torch 2.13, where the old name warns; builds of torch without distributed have neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


LOST = (
    *("connection closed by peer", "connection reset", "connection refused", "connection timed out"),
    *("broken pipe", "socket closed", "timed out waiting", "application timeout"),  # gloo
    *("ncclremoteerror", "communicator was aborted", "collective operation timeout"),
)
"""Error texts of libraries if another rank is gone or late. The type of the error is the same if memory runs out, if
shapes do not match or if two ranks share a GPU."""
BATCHES = "Where no rank has failed, ranks had different numbers of batches."
PAUSE = 5e-5
"""Seconds between two queries of a device."""
LISTEN = 1.0
"""Seconds of waiting after which the store is asked whether another rank has failed."""
TRIALS = 3
"""Messages by which a round trip is measured."""
LATE = "Operation timed out!"
"""What torch says when only that time is over."""
UNSENT = 2
"""Tag of a transfer that no rank sends; see :data:`~lightning_sparse.engine.ahead.TAG`."""
LEAVE = timedelta(seconds=5)
"""Time that a rank with nothing more to exchange waits for the others."""

T = TypeVar("T")


class LostRankError(RuntimeError):
    """Another rank ended, failed or did not come in time, so that this one cannot continue."""


class TorchCollective:
    """A ``torch.distributed`` process group; with one rank, no group is needed and nothing is sent.

    All n ranks call the same operations in the same order with equal shapes. A result that several ranks get is equal
    on all of them, bit for bit.

    Args:
        group: process group, or None for the default one (a single rank where none is initialised).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.timeout: timedelta | None = None
        """Time that this rank waits for the others; None: the group's default."""
        self._asked: timedelta | None = None
        """Timeout of groups that are made later beside a shared one."""
        self._beside: Sequence[Sequence[int]] = ()
        """Ranks of the groups that are made at the same time, see :meth:`of_its_own`."""
        self._owned = self._given_back = False
        self._announced: tuple[Callable[[], Tensor], Callable[[Tensor], None]] | None = None
        """Waits for what was announced, and looks at it. Nothing else keeps it, not even a cycle: a message keeps
        connections open, and other ranks would wait for one that has failed."""
        self._ahead: Ahead | None = None
        self._keys, self._left = "", 0
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank: int = 0 if alone else dist.get_rank(group)
        """This rank."""
        self._number: int = 0 if alone else dist.get_rank()
        """This rank among all, by which users know it."""
        self.world_size: int = 1 if alone else dist.get_world_size(group)
        """Number of ranks."""
        self.one_hop = False
        """True if messages below 4 MiB between CPUs go from each rank to all others at once, over a group that was
        made here: as many bytes as in a ring. So it is over gloo where all ranks are on one host, or each has a host of
        its own. Where several share one of several hosts, a ring crosses a host's card less often."""
        self.far = False
        """True if a round trip then takes 2 ms or more: messages to 1 MiB take the time of one way, see
        :class:`.Ahead`."""

    @classmethod
    def of_one(cls) -> TorchCollective:
        """Return a collective of this rank alone, whatever others there are."""
        made = cls()
        made.rank, made.world_size = 0, 1
        return made

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup | None,
        timeout: timedelta | None,
        device: torch.device,
        beside: Sequence[Sequence[int]] = (),
    ) -> TorchCollective:
        """Return a collective over the ranks of DDP's group. All its ranks must call this.

        NCCL does not promise progress if kernels of two groups wait at the same time. Messages that are sent inside
        hooks on CUDA therefore use the given group, in one order with those of SyncBatchNorm and of DDP itself.
        Exchanges between CPUs, on a thread of their own, get a group of their own.

        Args:
            group: DDP's group.
            timeout: timeout of a new group.
            device: device of the gradients.
            beside: see :meth:`of_its_own`.
        """
        shared = device.type == "cuda" and dist.is_initialized() and dist.get_backend(group) != "gloo"
        if not shared:
            return cls.of_its_own(group, timeout, beside=beside)
        made = cls(group)
        made._asked, made._beside = timeout, beside
        return made

    @classmethod
    def of_its_own(
        cls,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        beside: Sequence[Sequence[int]] = (),
    ) -> TorchCollective:
        """Make a new group over the same ranks, free of other traffic. All its ranks must call this.

        Args:
            group: group with the ranks; None: the default group.
            timeout: timeout of the new group; None: its backend's default.
            backend: backend of the new group; None: that of the default group.
            beside: ranks of all groups that are made at the same time, where together they are all ranks, and all of
                them call this. The names of such groups are never used twice; others, made without the rest of the
                ranks, can have the name of one that has ended, and find its addresses.
        """
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return cls(group)
        if dist.get_world_size(group) == dist.get_world_size():
            made = cls(dist.new_group(timeout=timeout, backend=backend))
        else:
            if not beside:
                _check_names(cls(group))
            return cls.among(beside or [dist.get_process_group_ranks(group)], timeout, backend)
        return made._begin(timeout, beside)

    @classmethod
    def among(
        cls, every: Sequence[Sequence[int]], timeout: timedelta | None = None, backend: str | None = None
    ) -> TorchCollective:
        """Make new groups, and return that of this rank. All ranks that are named must call this.

        Args:
            every: ranks of each group, in order; this one is in one of them. Where they are not all ranks, its own
                group is made alone, see :meth:`of_its_own`.
            timeout: timeout of the new group; None: its backend's default.
            backend: backend of the new group; None: that of the default group.
        """
        if sum(map(len, every)) == dist.get_world_size():
            made = cls(dist.new_subgroups_by_enumeration([*map(list, every)], timeout=timeout, backend=backend)[0])  # type: ignore[no-untyped-call]
        else:
            [own] = [ranks for ranks in every if dist.get_rank() in ranks]
            made = cls(dist.new_group([*own], timeout=timeout, backend=backend, use_local_synchronization=True))
        return made._begin(timeout, every)

    def _begin(self, timeout: timedelta | None, beside: Sequence[Sequence[int]]) -> TorchCollective:
        """Take a new group as its own; collective."""
        self._owned = True
        self.timeout, self._beside = timeout, beside
        if self.world_size > 1 and "cpu:gloo" in dist.get_backend_config(self.group):
            try:
                hosts = self.all_gather_object(socket.gethostname(), torch.device("cpu"))
                self.one_hop = len(set(hosts)) in (1, self.world_size)
                if self.one_hop and len(set(hosts)) > 1:
                    self.far = max(self.all_gather_object(self._round_trip(), torch.device("cpu"))) >= FAR
            except BaseException:
                self.close()
                raise
        return self

    def _round_trip(self) -> float:
        """Return the seconds that a short message takes, the least of several; collective."""
        words, taken = torch.zeros(self.world_size, dtype=torch.int64, device="cpu"), []
        for _ in range(TRIALS):
            begin = time.perf_counter()
            self.all_to_all(words)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    def between_hosts(self) -> TorchCollective:
        """Return a collective for small messages of CPU tensors, which wait for no device. All ranks must call this.

        It is this one if its backend is gloo or it has one rank; else a new group over gloo, which the caller closes.
        """
        if self.world_size == 1 or dist.get_backend(self.group) == "gloo":
            return self
        return self.of_its_own(self.group, self.timeout or self._asked, "gloo", self._beside)

    def another(self) -> TorchCollective:
        """Return a collective over the same ranks, for messages of another thread. All ranks must call this."""
        if self.world_size == 1:
            return self
        return self.of_its_own(self.group, self.timeout or self._asked, beside=self._beside)

    @contextmanager
    def _together(self, operation: str) -> Iterator[Any]:
        """Return the group; explain the error of a collective that fails because of another rank, pass others on.

        Another thread may close this meanwhile, and None would be the default group: it is asked for once.
        """
        group = self.group
        if self._given_back:
            raise RuntimeError(f"The exchange has ended on this rank, which cannot take part in {operation} any more.")
        try:
            yield group
        except RuntimeError as error:
            if not is_loss(error):
                raise
            raise self._lost(operation, f"Here: {error}") from error

    def _lost(self, operation: str, reason: str) -> LostRankError:
        waited = f" within {self.timeout.total_seconds():.6g} s" if self.timeout else ""
        return LostRankError(
            f"Rank {self._number} lost another rank in {operation}: it has ended or failed, or did not come{waited}. "
            f"The first error is the one to look at, most likely another rank's. {BATCHES} {reason}"
        )

    def listen(self, name: str) -> None:
        """Let :meth:`abort` and :meth:`leave` notify other ranks by keys in the group's store.

        Args:
            name: equal on all ranks, and never used before.
        """
        self._keys = f"lightning_sparse/{name}"

    @property
    def _store(self) -> Any:
        if not self._keys or not dist.is_initialized():
            return None
        group = self.group or dist.group.WORLD
        return None if group is None else group.get_group_store()

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a device; its messages may never end if another rank is gone.

        Args:
            done: returns True if the device is done; must not wait.
            what: the operation, for the message.

        Raises:
            LostRankError: if another rank has called :meth:`abort`.
        """
        asked = time.monotonic()
        while not done():
            time.sleep(PAUSE)
            if (now := time.monotonic()) - asked < LISTEN:
                continue
            asked, store = now, self._store
            if store is not None and store.check([f"{self._keys}/failed"]):
                failed = store.get(f"{self._keys}/failed").decode()
                self.abort()
                raise self._lost(what, f"Rank {failed} has failed.")

    def abort(self) -> None:
        """Notify the other ranks immediately that this rank cannot continue.

        Between CPUs, their collectives fail, because the connections of a group of :meth:`of_its_own` end. NCCL does
        not report that: ranks that wait in :meth:`wait_until` find the key in the store, others wait until their
        timeout. A shared group stays as it is.
        """
        store = self._store
        if store is not None:
            with suppress(RuntimeError):  # its rank may have ended
                store.compare_set(f"{self._keys}/failed", "", str(self._number))  # the first rank stays
        if self._owned and self.group is not None and dist.is_initialized():
            if "nccl" in dist.get_backend_config(self.group):  # maybe beside gloo, for tensors on the CPU
                self.group.abort()  # destroy_process_group would wait for it
            self.interrupt()
            self.close()

    def interrupt(self) -> None:
        """Let messages between CPUs fail, here and on other ranks, also those for which another thread waits.

        To close the group is not enough: that thread's message would keep connections open, and other ranks waiting.
        """
        if not self._owned or self.group is None or not dist.is_initialized():
            return
        if "cpu:gloo" in dist.get_backend_config(self.group):
            other, nothing = (self.rank + 1) % self.world_size, torch.empty(1, dtype=torch.uint8, device="cpu")
            with suppress(RuntimeError):  # gloo ends all connections when one message comes too late
                self.group.recv([nothing], other, UNSENT).wait(timedelta(milliseconds=1))

    def leave(self, fact: str) -> list[str]:
        """Collect a fact of each rank, when this one has nothing more to exchange.

        The facts go through the group's store, because in a collective this rank would wait for ranks with more
        batches. These fail when this rank's processes or groups end, as with plain DDP.

        Args:
            fact: fact of this rank.

        Returns:
            The facts in order of ranks; that of this rank alone if the others have not come within some seconds.
        """
        store = self._store
        if store is None or self.world_size == 1:
            return [fact]
        self._left += 1  # a search for a learning rate ends a training, too
        keys = [f"{self._keys}/left/{self._left}/{rank}" for rank in range(self.world_size)]
        try:
            store.set(keys[self.rank], fact)
            store.wait(keys, LEAVE)
            return [store.get(key).decode() for key in keys]
        except RuntimeError:  # maybe because the store has ended with its rank
            self.close()
            return [fact]

    def close(self) -> None:
        """Stop taking part; destroy the group if it was made by :meth:`of_its_own`."""
        if self._ahead is not None:
            self._ahead.close()
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self.group)
        # Threads of a group live as long as there is a reference to it. They abort a process that ends before them. A
        # fork has no such threads, and waits for them for ever when it frees the group.
        self._given_back = True  # before others can find no group
        self.group, self._owned, self._announced, self._ahead = None, False, None, None

    def announce(self, words: Tensor, look: Callable[[Tensor], None]) -> None:
        """Begin to gather words of all ranks on the CPU, which are looked at before any later message is sent.

        Local work goes on meanwhile. Messages of different lengths would meet where ranks do different things, and end
        their processes: gloo gives up on a thread of its own.

        Args:
            words: (length,) of this rank, the same length on all.
            look: is given the (n, length) words of all ranks; may raise.
        """
        self.hear()
        if self.world_size == 1:
            look(words.unsqueeze(0))
            return
        with self._together("all_gather") as group:
            self._announced = self._begun(AllGather(words), group), look

    def hear(self) -> None:
        """Wait for what was announced, if anything was, and let it be looked at.

        A handler of a signal may do so while this waits.
        """
        if (announced := self._announced) is None:
            return
        wait, look = announced
        try:
            with self._together("all_gather"):
                rows = wait()
        finally:
            first = self._announced is announced
            self._announced = None
        if first:
            look(rows)

    def start(self, message: Message) -> Callable[[], Tensor]:
        """Start a message; return what waits for its answer, and may be called again while it waits.

        Transfers between two ranks are over when this returns.
        """
        summing = isinstance(message, AllReduce) and self.one_hop and short(message.x)
        if self.world_size == 1 or summing or isinstance(message, SendRecv):
            answer = send(message, self)
            return lambda: answer
        self.hear()
        with self._together(message.kind) as group:
            wait = self._begun(message, group)

        def finished() -> Tensor:
            with self._together(message.kind):
                return wait()

        return finished

    def _begun(self, message: Message, group: Any) -> Callable[[], Tensor]:
        """Begin a message between several ranks; return what waits for its answer."""
        x, hops = message.x.contiguous(), self.one_hop and short(message.x)
        if hops and isinstance(message, AllGather):
            x = x.expand(self.world_size, *x.shape)
        if self.far and hops and isinstance(message, AllGather | AllToAll) and x.numel():
            ahead = self._ahead = self._ahead or Ahead(group, self.rank, self.world_size)
            if x[0].nbytes <= ahead.most:
                return ahead.send(x, group).wait
        work: Any
        match message:
            case AllReduce():
                out = x
                work = dist.all_reduce(out, group=group, async_op=True)
            case Broadcast(_, src):
                out = x
                work = dist.broadcast(out, group=group, group_src=src, async_op=True)
            case AllGather() if not hops:
                out = x.new_empty(self.world_size, *x.shape)
                work = _all_gather(out.view(-1), x.view(-1), group=group, async_op=True)
            case _:
                x = x.contiguous()
                out = torch.empty_like(x)
                work = dist.all_to_all_single(out, x, group=group, async_op=True)

        def finished() -> Tensor:
            finish(work) if out.device.type == "cpu" else work.wait()
            return out

        return finished

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather ``(*shape)`` of each rank to ``(n, *shape)`` on all."""
        return x.unsqueeze(0) if self.world_size == 1 else self.start(AllGather(x))()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks and return the result; x may be overwritten."""
        if self.one_hop and short(x):
            return run(summed(x, self.world_size), lambda message: self.start(message)())
        return x if self.world_size == 1 else self.start(AllReduce(x))()

    def start_average(self, x: Tensor, wait: bool = False) -> Future[Tensor]:
        """Start the mean over ranks, in place; the future holds x.

        Args:
            x: is overwritten.
            wait: on a CPU, return when it is done; saves a change of threads if there is no other work.
        """
        future: Future[Tensor] = Future(devices=[x.device] if x.is_cuda else None)
        if self.world_size == 1:
            future.set_result(x)
            return future
        # As DDP does without a hook: for three ranks, a division rounds otherwise.
        work = dist.all_reduce(x.mul_(1.0 / self.world_size), group=self.group, async_op=True)
        if wait:
            work.wait()
            future.set_result(x)
            return future
        started: Future[Tensor] = work.get_future()
        return started.then(lambda _: x)

    def end_averages(self, started: Sequence[Future[Tensor]]) -> None:
        """Wait for what :meth:`start_average` has started."""
        with self._together("all_reduce"):
            for each in started:
                each.wait()

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Return x of rank ``src`` on all ranks; in place."""
        return x if self.world_size == 1 else self.start(Broadcast(x, src))()

    def all_to_all(self, x: Tensor) -> Tensor:
        """Exchange rows of ``(n, *shape)``: row j of rank i becomes row i of rank j."""
        return x if self.world_size == 1 else self.start(AllToAll(x))()

    def send_recv(self, x: Tensor, to: int | None, source: int | None) -> Tensor:
        """Send x to rank ``to`` and receive x of rank ``source``, both other ranks or None.

        All ranks call it, also those that neither send nor receive. Senders and receivers must match. Both operations
        are started together, so that rings and swaps do not deadlock.

        Returns:
            The tensor of ``source``, of x's shape and dtype; an empty one without a source.
        """
        self.hear()
        x = x.contiguous()
        out = x[:0] if source is None else torch.empty_like(x)
        with self._together("send_recv") as group:
            moves = [] if to is None else [dist.P2POp(dist.isend, x, group=group, group_peer=to)]
            if source is not None:
                moves.append(dist.P2POp(dist.irecv, out, group=group, group_peer=source))
            works = dist.batch_isend_irecv(moves) if moves else []
            if x.device.type == "cpu" and threading.current_thread() is threading.main_thread():
                finish_transfers(works)
            else:
                for work in works:
                    work.wait()
        return out

    def all_gather_object(self, what: T, device: torch.device) -> list[T]:
        """Return the objects of all ranks, in order of ranks; they must be picklable and small.

        Args:
            what: object of this rank.
            device: used by messages of NCCL.
        """
        if self.world_size == 1:
            return [what]
        self.hear()
        given: list[Any] = [None] * self.world_size
        with self._together("all_gather_object") as group, _current(device):
            dist.all_gather_object(given, what, group=group)
        return given


def finish(work: Any) -> None:
    """Wait for a collective between CPUs that has been started; handlers of signals run meanwhile."""
    while True:
        try:
            work.wait(LOOK)
            return
        except RuntimeError as error:
            if LATE not in str(error):
                raise


def finish_transfers(works: Sequence[Any]) -> None:
    """Wait for transfers between two CPUs, which a short wait would end; handlers of signals run meanwhile."""
    done, errors = threading.Lock(), list[BaseException]()
    done.acquire()

    def wait() -> None:
        try:
            for work in works:
                work.wait()
        except BaseException as error:
            errors.append(error)
        done.release()

    threading.Thread(target=wait, daemon=True).start()
    while not done.acquire(timeout=LOOK.total_seconds()):
        pass
    if errors:
        raise errors[0] from None


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with a CUDA device as the current one, which torch uses to send objects."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_loss(error: BaseException) -> bool:
    """Return True if a collective of torch failed because of another rank."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in LOST)


def send(message: Message, comm: TorchCollective) -> Tensor:
    """Send one message between the real ranks and return the answer."""
    if not isinstance(message, Message):
        raise TypeError(f"Expected a message, but got {message!r}.")
    answer: Tensor = getattr(comm, message.kind)(*map(partial(getattr, message), message.__match_args__))
    return answer


def _check_names(ranks: TorchCollective) -> None:
    """Raise on all ranks where they would wait for each other under different names: torch counts groups for these.

    Raises:
        RuntimeError: if ranks are in different numbers of groups.
    """
    if "cpu:gloo" not in dist.get_backend_config(ranks.group):
        return
    counts = ranks.all_gather_object(len(dist.distributed_c10d._world.pg_names), torch.device("cpu"))
    if len(set(counts)) > 1:
        raise RuntimeError(
            "Expected the ranks of the model's process group to be in equally many process groups, which torch names "
            f"new ones by, but they are in {counts}. Give DDP all ranks, or groups that divide them, such as "
            "those of torch.distributed.new_subgroups."
        )
