"""Ranks as processes in network namespaces of this machine, joined by a bridge, over cables of a limited rate.

A namespace is a node: it has one rank, or several, which then reach each other past the cable.

A virtual cable leads from each namespace to a bridge in one more namespace, and a token bucket filter at both ends of
every cable limits what a rank sends and what it receives to the given rate each. The latency of virtual cables is far
below a real network's, unless a round trip is given: each cable is a line then that delays frames (`delay_line.py`).
All ranks share the cores of one machine.

Needs root and the commands ip and tc (iproute2).
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST = 16  # ranks
NAMESPACES = [f"shaped-{os.getpid()}-{rank}" for rank in range(MOST)]
MIDDLE = f"shaped-{os.getpid()}-bridge"
CABLE = "cable"
PORTS = [f"port{rank}" for rank in range(MOST)]
LINE = Path(__file__).with_name("delay_line.py")
ADDRESSES = [f"10.78.0.{rank + 1}" for rank in range(MOST)]
NAMED = ("unshare", "--uts", "sh", "-c", 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"')
"""Starts a program with a host name, by which ranks know who shares a cable with them."""


# Not by pyroute2: a namespace, a cable and a limit are one line of ip or tc each, ranks are started by ip in any case,
# and whoever wants to check what was built does so by the same commands.
def command(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stderr=subprocess.PIPE, text=True)


def build(ranks: int, rtt: float, processes: list[subprocess.Popen[bytes]]) -> None:
    """Namespaces, a bridge and cables; lines of cables that delay are put into the list."""
    for name in (MIDDLE, *NAMESPACES[:ranks]):
        command("ip", "netns", "add", name)
        command("ip", "-n", name, "link", "set", "lo", "up")
    command("ip", "-n", MIDDLE, "link", "add", "bridge", "type", "bridge")
    command("ip", "-n", MIDDLE, "link", "set", "bridge", "up")
    cables = list(zip(NAMESPACES, PORTS, ADDRESSES, strict=True))[:ranks]
    if rtt:
        processes.append(delayed(rtt, cables))
    for name, port, address in cables:
        if not rtt:
            ends = f"{CABLE} type veth peer name {port} netns {MIDDLE}"
            command("ip", "-n", name, "link", "add", *ends.split())
        command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
        command("ip", "-n", name, "link", "set", CABLE, "up")
        command("ip", "-n", MIDDLE, "link", "set", port, "master", "bridge", "up")


def delayed(rtt: float, cables: Sequence[tuple[str, str, str]]) -> subprocess.Popen[bytes]:
    """Cables on which a round trip between two ranks takes longer by this time; each trip is one of two cables."""
    own = f"sh{os.getpid()}-"  # names are of 15 letters at most, and devices are made outside of the namespaces
    ends = [f"{own}{side}{i}" for i in range(len(cables)) for side in "ab"]
    words = [sys.executable, LINE, f"{rtt / 4}", *ends]
    line = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert line.stdout is not None
    if line.stdout.readline() != b"ready\n":
        raise subprocess.CalledProcessError(line.wait(), [str(word) for word in words], stderr="no TAP devices")
    for i, (name, port, _) in enumerate(cables):
        for end, device, namespace in ((ends[2 * i], CABLE, name), (ends[2 * i + 1], port, MIDDLE)):
            command("ip", "link", "set", end, "netns", namespace)
            command("ip", "-n", namespace, "link", "set", end, "name", device, "txqueuelen", "10000")
    return line


def limit(mbit: int, ranks: int) -> None:
    """Both ends of every cable: a rank's own end limits what it sends, the bridge's end what it receives."""
    # A bucket of 1 ms at full rate: less and the kernel's timer decides the rate, more and messages that fit into the
    # bucket are as good as free. At least some frames.
    burst = max(16 * 1024, mbit * 1_000_000 // 8 // 1000)
    shape = f"tbf rate {mbit}mbit burst {burst} latency 100ms"
    for name, device in [*((name, CABLE) for name in NAMESPACES[:ranks]), *((MIDDLE, port) for port in PORTS[:ranks])]:
        command("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape.split())


@contextmanager
def network(ranks: int, rtt: float = 0.0) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Builds the namespaces; ends the processes that were put into the list and removes the namespaces at the end.

    Args:
        ranks: number of them.
        rtt: milliseconds that a round trip between two of them takes longer.
    """
    processes: list[subprocess.Popen[bytes]] = []
    lines: list[subprocess.Popen[bytes]] = []
    try:
        build(ranks, rtt, lines)
        yield processes
    finally:
        end(processes)
        end(lines)
        for name in (*NAMESPACES[:ranks], MIDDLE):
            command("ip", "netns", "del", name, check=False)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    processes.clear()


def stop(number: int, frame: Any) -> None:
    """A signal ends the program once, through all `finally`; a second one must not interrupt them."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def launch(
    words: Sequence[str | Path],
    ranks: int,
    processes: list[subprocess.Popen[bytes]],
    seconds: float,
    node_size: int = 1,
) -> str | None:
    """Run a command as ranks, so many in a namespace, as torchrun would start them; what went wrong, if anything."""
    for rank in range(ranks):
        name = NAMESPACES[rank // node_size]
        local = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "ROLE_WORLD_SIZE": ranks,
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": 29400,
            "TORCHELASTIC_RUN_ID": NAMESPACES[0],
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": CABLE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # warns that addresses have no names
        }
        environment = os.environ | {key: str(value) for key, value in local.items()}
        processes.append(subprocess.Popen(["ip", "netns", "exec", name, *NAMED, name, *words], env=environment))
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes):
                return f"ranks ended with {codes}"
            if None not in codes:
                return None
            time.sleep(0.1)
        return f"not finished after {seconds:.0f} s"
    finally:
        end(processes)


def interface_bytes() -> tuple[int, int]:
    """What this process's cable has received and sent so far, with all headers."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    numbers = next(line.split(":")[1].split() for line in lines if line.strip().startswith(f"{CABLE}:"))
    return int(numbers[0]), int(numbers[8])


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need root, and the commands ip and tc (iproute2)"
    return None
