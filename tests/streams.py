"""Who waits for whom on a device, without one: vector clocks over streams, while CPU tensors do the work.

On a device, operations of one stream run in order, those of two streams in any order unless one waits for the other,
and memory that is given back is handed out again at once, to the stream that it was allocated on. :class:`Streams`
plays that on the CPU. Every stream counts its operations and knows how far it has waited for the others; every storage
knows where it was allocated, last written and last used. It notes

- an operation that reads what another stream has written, or writes what another one has used, without having waited;
- an allocation on a stream that has memory back which another stream may still be using;
- a host that reads a pinned flag without having waited for the copy into it.

Kernels in Triton count as operations, too: their interpreter says what each launch reads and writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_sparse.core.layout import own


class FakeEvent:
    """How far a stream, and all that it had waited for, had come."""

    def __init__(self, streams: Streams, clock: dict[str, int]) -> None:
        self.streams, self.clock = streams, clock

    def synchronize(self) -> None:
        self.streams.host_waits += 1
        self.streams.host.wait_for(self.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


class FakeStream:
    """What this repository uses of ``torch.cuda.Stream``."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name
        self.clock: dict[str, int] = {}

    def wait_for(self, clock: dict[str, int]) -> None:
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def advance(self) -> int:
        """An operation is launched: the host had come this far, too."""
        self.wait_for(self.streams.host.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def has_waited_for(self, name: str, count: int) -> bool:
        return self.clock.get(name, 0) >= count

    def record_event(self) -> FakeEvent:
        return FakeEvent(self.streams, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        self.wait_for(event.clock)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_for(other.clock)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Life:
    """Of a storage."""

    def __init__(self, storage: torch.UntypedStorage, allocated_on: str, place: str) -> None:
        self.reference = StorageWeakRef(storage)
        self.allocated_on, self.place = allocated_on, place
        self.start = storage.data_ptr()
        self.end = self.start + storage.nbytes()
        self.pinned = False
        self.uses: dict[str, tuple[int, str]] = {}
        """Number and place of the latest operation on each stream."""
        self.written: tuple[str, int, str] | None = None


expired = torch.UntypedStorage._expired
"""Of a weak reference to a storage: asked for all of them at each allocation, without the calls around it."""


class Accesses:
    """Addresses that a kernel in Triton's interpreter has read and written."""

    def __init__(self) -> None:
        self.read: list[NDArray[Any]] = []
        self.written: list[NDArray[Any]] = []


class Streams(TorchDispatchMode):
    """A main stream and the host, and whatever streams are made; collects what went wrong in ``findings``."""

    def __init__(self) -> None:
        super().__init__()
        self.host, self.main = FakeStream(self, "host"), FakeStream(self, "main")
        self.current = self.main
        self.made: dict[str, FakeStream] = {"main": self.main}
        self.lives: dict[int, Life] = {}
        self.findings: list[str] = []
        self.host_waits = 0
        """Times that the host waited for a device, so far."""
        self.launched: list[tuple[str, str]] = []
        """Kernels, and the streams that they were launched on."""

    def new(self, name: str) -> FakeStream:
        self.made[name] = FakeStream(self, name)
        return self.made[name]

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made_like = "empty" in func.overloadpacket.__name__  # which reads and writes nothing
        given = {life_key(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        new = {life_key(t): t for t in results if life_key(t) not in given}
        written = {life_key(t) for t in written_by(func, args, kwargs)}
        reads_scalar = func is torch.ops.aten._local_scalar_dense.default
        if not new and not written and results:  # views
            return out
        place, stream = where(func), self.current
        if reads_scalar and all(self._life(t).pinned for t in given.values()):
            self._check(self.host, {key: self._life(t) for key, t in given.items()}, written, place)
            return out
        count = self._enter(stream, {} if made_like else given, written, place)
        if new:
            self._allocate(stream, place)
        for key, tensor in new.items():
            life = self.lives[key] = Life(own(tensor).untyped_storage(), stream.name, place)
            life.uses[stream.name] = count, place
            if not made_like:
                life.written = stream.name, count, place
        to_host = func is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
        if reads_scalar or to_host:
            self.host_waits += 1
            self.host.wait_for(stream.clock)
        return out

    @contextmanager
    def launch(self, name: str, tensors: Iterable[Tensor]) -> Iterator[Accesses]:
        """A kernel is launched on the current stream; what it reads and writes is noted by address.

        Args:
            name: of the kernel.
            tensors: that it is given; it may have addresses of others, which must have been seen before.
        """
        lives = {life_key(tensor): self._life(tensor) for tensor in tensors}
        with _disable_current_modes():
            yield (accesses := Accesses())
        lives = {key: life for key, life in {**self.lives, **lives}.items() if not life.reference.expired()}
        read, written = (self._at(addresses, lives, name) for addresses in (accesses.read, accesses.written))
        self.launched.append((name, self.current.name))
        self._enter(self.current, {key: lives[key] for key in read | written}, written, name)

    def _at(self, parts: list[NDArray[Any]], lives: dict[int, Life], name: str) -> set[int]:
        """Whose memory some addresses are."""
        keys = sorted((key for key in lives if lives[key].end > lives[key].start), key=lambda key: lives[key].start)
        addresses = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)
        place = np.searchsorted(np.array([lives[key].start for key in keys], np.uint64), addresses, side="right") - 1
        inside = (place >= 0) & (addresses < np.array([lives[key].end for key in keys], np.uint64)[place])
        if not inside.all():
            self.findings.append(f"{name} reads or writes memory of nobody")
        return {keys[index] for index in np.unique(place[inside])}

    def _enter(self, stream: FakeStream, given: Mapping[int, Tensor | Life], written: set[int], place: str) -> int:
        """An operation reads some memory and writes some of it; returns its number on its stream."""
        count = stream.advance()
        lives = {key: one if isinstance(one, Life) else self._life(one) for key, one in given.items()}
        self._check(stream, lives, written, place)
        for key, life in lives.items():
            life.uses[stream.name] = count, place
            if key in written:
                life.written = stream.name, count, place
        return count

    def _life(self, tensor: Tensor) -> Life:
        """Of a storage; one that nobody saw being made was there before, or is a number on the host."""
        key = life_key(tensor)
        life = self.lives.get(key)
        if life is None:
            stream = self.main if tensor.dim() else self.current
            life = self.lives[key] = Life(own(tensor).untyped_storage(), stream.name, "before")
        return life

    def _check(self, stream: FakeStream, lives: Mapping[int, Life], written: set[int], place: str) -> None:
        for key, life in lives.items():
            if key in written:
                hazards = [(name, count, site) for name, (count, site) in life.uses.items()]
            else:
                hazards = [] if life.written is None else [life.written]
            for name, count, site in hazards:
                if name != stream.name and not stream.has_waited_for(name, count):
                    self.findings.append(f"{place} on {stream.name} has not waited for {site} on {name}")

    def _allocate(self, stream: FakeStream, place: str) -> None:
        """Memory that this stream has back may be what it hands out."""
        own = [(key, life) for key, life in self.lives.items() if life.allocated_on == stream.name]
        for key, life in own:
            if not expired(life.reference.cdata):
                continue
            del self.lives[key]
            for name, (count, site) in life.uses.items():
                if name != stream.name and not stream.has_waited_for(name, count):
                    self.findings.append(
                        f"{place} on {stream.name} may be given memory of {life.place} that {site} on {name} uses"
                    )

    def pin(self, tensor: Tensor) -> Tensor:
        self._life(tensor).pinned = True
        return tensor


def life_key(tensor: Tensor) -> int:
    """Not used again while a weak reference to the storage is kept."""
    return own(tensor).untyped_storage()._cdata


def written_by(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors that an operation writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_leaves(value) if isinstance(t, Tensor)]
    return found


def where(func: Any) -> str:
    """An operation and the latest lines of the package that led to it."""
    frame, lines = sys._getframe(2), []
    while frame is not None and len(lines) < 2:
        _, found, file = frame.f_code.co_filename.partition("lightning_sparse/")
        if found:
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return f"{func.overloadpacket.__name__} ({' < '.join(lines) or 'outside'})"


def play(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let engines that are made from now on take the CPU for a device with streams.

    Their collectives must be those of one rank: messages take no part in this.
    """
    from lightning_sparse.engine import stream

    streams = Streams()
    plain_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = plain_empty(*args, **kwargs)
        return streams.pin(made) if pin_memory else made

    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_sparse") and "static_shapes" in vars(module):
            monkeypatch.setattr(module, "static_shapes", lambda device: True)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
    monkeypatch.setattr(stream, "side_stream", lambda device, priority=0: streams.new("side"))
    return streams


def play_kernels(monkeypatch: pytest.MonkeyPatch, streams: Streams) -> None:
    """Enter launches of kernels that Triton interprets."""
    from triton.runtime import interpreter

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    run = executor.__call__
    running: list[Accesses] = []

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with streams.launch(self.fn.__name__, [x for x in tree_leaves(args) if isinstance(x, Tensor)]) as accesses:
            running.append(accesses)
            run(self, *args, **kwargs)
            running.pop()

    def noting(name: str, pointers: int, mask: int, reads: bool, writes: bool) -> None:
        function = getattr(builder, name)

        def call(self: Any, *args: Any) -> Any:
            addresses = args[pointers].data[args[mask].data.astype(bool)].ravel()
            if reads:
                running[-1].read.append(addresses)
            if writes:
                running[-1].written.append(addresses)
            return function(self, *args)

        monkeypatch.setattr(builder, name, call)

    monkeypatch.setattr(executor, "__call__", launch)
    noting("create_masked_load", 0, 1, reads=True, writes=False)
    noting("create_masked_store", 0, 2, reads=False, writes=True)
    noting("create_atomic_rmw", 1, 3, reads=True, writes=True)
