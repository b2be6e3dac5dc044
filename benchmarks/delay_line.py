"""A line of some length between two network devices: each frame that enters at one end leaves the other a time later.

A line joins two TAP devices. A TAP device is one whose frames a program reads and writes; the kernel hands large TCP
segments over in one piece. Frames wait in a queue in memory, in order, until they are due. One process serves all lines
of a network (`links.py`), and is a part of what the machine's cores do.

    python benchmarks/delay_line.py MILLISECONDS DEVICE DEVICE [DEVICE DEVICE ...]

The devices are made here, in pairs; whoever has started this moves them to where they belong when it prints "ready".
They are gone when this ends. Needs root.
"""

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_INFORMATION, VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUMS_AND_SEGMENTS = 0x01 | 0x02
"""The reader takes segments of TCP over IPv4 that are larger than a frame, and computes no checksums."""
FRAME = 1 << 17
MOST = 64
"""Frames that are read from a device before others have their turn."""


def tap(name: str) -> int:
    """Make a TAP device; return what its frames are read from and written to."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_INFORMATION | VIRTIO_HEADER))
    fcntl.ioctl(device, TUNSETOFFLOAD, CHECKSUMS_AND_SEGMENTS)
    return device


def serve(pairs: list[tuple[int, int]], seconds: float) -> None:
    """Carry frames between the two devices of each pair, each of them for some seconds, for ever."""
    selector = selectors.DefaultSelector()
    for one, other in pairs:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
    waiting: deque[tuple[float, int, bytes]] = deque()  # all of them wait equally long: due in order
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, device, frame = waiting.popleft()
            with suppress(OSError):  # the device is not up yet or any more: a frame is lost, as on a cable
                os.write(device, frame)
        until = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in selector.select(until):
            due = time.monotonic() + seconds
            for _ in range(MOST):
                try:
                    waiting.append((due, key.data, os.read(key.fd, FRAME)))
                except BlockingIOError:
                    break


def main() -> None:
    milliseconds, *names = sys.argv[1:]
    devices = [tap(name) for name in names]
    print("ready", flush=True)
    serve(list(zip(devices[::2], devices[1::2], strict=True)), float(milliseconds) / 1000)


if __name__ == "__main__":
    main()
