"""Merging of layers, slowly: an event simulation of one iteration, and other ways to the groups.

Layers are given in the order of backward. Costs are plain functions of the number of coordinates.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

Seconds = Callable[[int], float]


def groupings(layers: int) -> Iterator[list[list[int]]]:
    """All ways to cut layers into groups of neighbours."""
    for pattern in range(2 ** (layers - 1)):
        cuts = [0, *(i + 1 for i in range(layers - 1) if pattern >> i & 1), layers]
        yield [list(range(start, end)) for start, end in pairwise(cuts)]


def simulated_seconds(
    groups: list[list[int]], numels: list[int], backward: list[float], select: Seconds, exchange: Seconds
) -> float:
    """End of the last exchange, by events: a processor works off its tasks, a network serves what is waiting."""
    tasks: deque[tuple[float, int]] = deque()  # seconds, and coordinates that are to be sent afterwards (0: nothing)
    for group in groups:
        numel = sum(numels[layer] for layer in group)
        tasks.extend((backward[layer], 0) for layer in group)
        tasks.append((select(numel), numel))
    waiting: deque[int] = deque()
    busy = False
    events: list[tuple[float, int, str, int]] = []
    number = 0  # events at the same time happen in the order in which they were caused
    now = 0.0

    def cause(after: float, kind: str, numel: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + after, number, kind, numel))

    cause(0.0, "idle", 0)
    while events:
        now, _, kind, numel = heapq.heappop(events)
        if kind == "sent":
            busy = False
        else:
            if numel:
                waiting.append(numel)
            if tasks:
                cause(tasks[0][0], "idle", tasks.popleft()[1])
        if waiting and not busy:
            busy = True
            cause(exchange(waiting.popleft()), "sent", 0)
    return now


def pareto_seconds(numels: list[int], backward: list[float], select: Seconds, exchange: Seconds) -> float:
    """Shortest iteration, from the front: for each prefix all pairs (ready, done) of which none is worse in both."""
    fronts: list[list[tuple[float, float]]] = [[(0.0, 0.0)]]
    for end in range(1, len(numels) + 1):
        pairs = []
        for start in range(end):
            numel, computing = sum(numels[start:end]), sum(backward[start:end])
            selecting, sending = select(numel), exchange(numel)
            for ready, done in fronts[start]:
                now = ready + computing + selecting
                pairs.append((now, max(now, done) + sending))
        front: list[tuple[float, float]] = []
        for pair in sorted(pairs):
            if not front or pair[1] < front[-1][1] * (1 - 1e-13):
                front.append(pair)
        fronts.append(front)
    return min(done for _, done in fronts[-1])


def algorithm_1(
    numels: list[int], backward: list[float], select: Seconds, exchange: Seconds, alpha: float, first_test: bool = True
) -> list[list[int]]:
    """OMGS-SGD's algorithm 1: layers L to 1, merging moves a layer into the next, all times computed anew after that.

    ``first_test`` False leaves out the test whether the next message would wait.
    """
    count = len(numels)
    size = {count - i: numels[i] for i in range(count)}
    duration = {count - i: backward[i] for i in range(count)}
    merged: set[int] = set()

    def times() -> tuple[dict[int, float], dict[int, float]]:
        """Start of backward and of the exchange, by layer."""
        computes, sends = {}, {}
        clock = free = 0.0
        for layer in range(count, 0, -1):
            computes[layer] = clock
            clock += duration[layer]
            if size[layer]:
                clock += select(size[layer])
            sends[layer] = max(clock, free)
            if size[layer]:
                free = sends[layer] + exchange(size[layer])
        return computes, sends

    for layer in range(count, 1, -1):
        computes, sends = times()
        x, y = size[layer], size[layer - 1]
        u = computes[layer] + duration[layer] + duration[layer - 1]
        waits = u + select(x) + select(y) < sends[layer] + exchange(x)
        sooner = sends[layer] + alpha > u + select(x + y)
        if sooner and (waits or not first_test):
            merged.add(layer)
            size[layer - 1] += size[layer]
            duration[layer - 1] += duration[layer]
            size[layer] = 0
            duration[layer] = 0.0
    groups: list[list[int]] = [[]]
    for i in range(count):
        groups[-1].append(i)
        if count - i not in merged and i < count - 1:
            groups.append([])
    return groups
