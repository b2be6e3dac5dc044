"""A training step by events: a processor, DDP's buckets and a network, each of which does one thing at a time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

Seconds = Callable[[int], float]


def simulated_step(
    layers: Sequence[tuple[Sequence[str], int, float]],
    groups: Sequence[tuple[Sequence[str], int]],
    buckets: tuple[float, float],
    select: Seconds,
    send: Seconds,
    joined: float = 0.0,
) -> float:
    """Seconds from the start of backward until everything is computed and sent.

    Args:
        layers: parameters, coordinates and seconds of backward, in the order of backward.
        groups: parameters and coordinates.
        buckets: coordinates that fill DDP's first bucket, and each of the others.
        select: seconds of the processor for a group; backward waits meanwhile.
        send: seconds of the network for a group.
        joined: seconds of one more message, for all groups, sent when everything else is over.
    """
    to_compute = deque(enumerate(layers))
    to_select: deque[int] = deque()
    to_send: deque[int] = deque()
    bucket: list[str] = []
    filled, first = 0, True
    here: set[str] = set()
    waiting = list(groups)
    computing = sending = False
    now = 0.0
    events: list[tuple[float, int, str, int]] = []
    number = 0

    def later(seconds: float, what: str, which: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + seconds, number, what, which))

    def hand_over() -> None:
        nonlocal filled, first
        here.update(bucket)
        bucket.clear()
        filled, first = 0, False
        for group in [group for group in waiting if here >= set(group[0])]:
            waiting.remove(group)
            to_select.append(group[1])

    while True:
        if not computing and to_select:
            computing = True
            later(select(to_select[0]), "selected", to_select.popleft())
        elif not computing and to_compute:
            computing = True
            which, (_, _, seconds) = to_compute.popleft()
            later(seconds, "computed", which)
        if not sending and to_send:
            sending = True
            later(send(to_send.popleft()), "sent", 0)
        if not events:
            return now + joined
        now, _, what, which = heapq.heappop(events)
        if what == "sent":
            sending = False
            continue
        computing = False
        if what == "selected":
            to_send.append(which)
            continue
        names, numel, _ = layers[which]
        bucket += names
        filled += numel
        if filled >= buckets[0 if first else 1] or not to_compute:
            hand_over()
