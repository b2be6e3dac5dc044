"""Messages from each rank to all others over gloo, each in the time of one way.

Gloo sends nothing before its receiver has asked for it: a message that two ranks begin at the same time takes a round
trip. Here each rank has always asked for one message more than it has sent. It asks for the next one before it sends
this one, so that who has got this one need not wait before it sends the next.

Gloo tells a thread that waits for such a message of no signal, so that another one waits. That costs about 0.1 ms a
message, and is worth it where ranks are far apart (:data:`FAR`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

FAR = 2e-3
"""Seconds of a round trip from which on messages are asked for ahead."""
MOST = 1 << 20
"""Bytes of a message that is asked for ahead."""
ALTOGETHER = 64 << 20
"""Bytes of those of all ranks; memory that is not written to costs nothing."""
WORD = 16
"""Bytes to whose multiples such a message is cut: the size of the longest dtype."""
TAG = 1
"""Of these messages; transfers between two ranks have 0."""
LOOK = timedelta(seconds=0.05)
"""After so long, a thread that waits looks for signals again."""


class Arrival:
    """A message of each rank that is on its way.

    Args:
        works: of torch, to wait for.
        rows: (n, *shape) that the messages are written to.
        waits: calls :meth:`finish` on a thread of its own.
    """

    def __init__(self, works: Sequence[Any], rows: Tensor, waits: Callable[[Arrival], None]) -> None:
        self._works, self._rows = works, rows
        self._waits: Callable[[Arrival], None] | None = waits
        self._error: BaseException | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self) -> None:
        """Wait on a thread of its own: a work of gloo can be waited for once, and for a short time only at its end."""
        works, self._works = self._works, ()
        try:
            for work in works:
                work.wait()
        except BaseException as error:
            self._error = error.with_traceback(None)  # whose frames would keep connections open
        self._done.release()

    def wait(self) -> Tensor:
        """Return the messages; handlers of signals run meanwhile, and may call this, too."""
        if (waits := self._waits) is not None:  # not before: local work would share the interpreter with that thread
            self._waits = None
            waits(self)
        while not self._done.acquire(timeout=LOOK.total_seconds()):
            pass
        self._done.release()
        if self._error is not None:
            raise self._error
        return self._rows


class Ahead:
    """Sends messages over a group of gloo that nobody else uses. All ranks send as many, of equal shapes, in one order.

    Args:
        group: the group.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, group: Any, rank: int, world_size: int) -> None:
        self._rank, self._n = rank, world_size
        self.most = min(MOST, ALTOGETHER // world_size // WORD * WORD)
        """Bytes of a message; longer ones are not for this."""
        self._room, self._asked = self._ask(group)
        self._leaving: deque[list[Any]] = deque(maxlen=2)
        """What is sent now and was sent before: who has sent a message has received all of the one before. Nothing
        waits for them, since gloo tells nobody of one that fails while its connection ends."""
        self._awaited: SimpleQueue[Arrival | None] = SimpleQueue()
        threading.Thread(target=_finish, args=(self._awaited,), name="sparse-arrivals", daemon=True).start()
        self._end_thread = weakref.finalize(self, self._awaited.put, None)

    def _ask(self, group: Any) -> tuple[Tensor, list[Any]]:
        with torch.inference_mode(False):  # what is asked for in a validation arrives in the training after it
            room = torch.empty(self._n, self.most, dtype=torch.uint8, device="cpu")
        return room, [group.recv([room[other]], other, TAG) for other in range(self._n) if other != self._rank]

    def send(self, rows: Tensor, group: Any) -> Arrival:
        """Send to each rank its row of ``(n, *shape)``; what arrives is the row of each rank for this one.

        What arrives lies in rows that are contiguous, and apart from each other; the receiver owns it. The message
        before has arrived. Rows may be written to when this returns.
        """
        room, asked = self._room, self._asked
        self._room, self._asked = self._ask(group)
        sent = rows.clone() if rows.stride(0) else rows[:1].clone().expand_as(rows)  # the same for all
        self._leaving.append([group.send([sent[i]], i, TAG) for i in range(self._n) if i != self._rank])
        length = rows[0].nbytes
        arrived = room[:, :length].view(rows.dtype).view(rows.shape)
        arrived[self._rank] = rows[self._rank].detach()
        return Arrival(asked, arrived, self._awaited.put)

    def close(self) -> None:
        """Ask for no more messages."""
        self._end_thread()
        self._asked = []
        self._leaving.clear()


def _finish(awaited: SimpleQueue[Arrival | None]) -> None:
    while (arrival := awaited.get()) is not None:
        arrival.finish()
        del arrival  # it has memory
