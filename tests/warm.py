"""A Python for what tests start: torch and Lightning are imported already, which takes a new one seven seconds.

`warm_python()` is the path of a program to call as one calls ``python``: with a script, ``-m`` or ``-c``. It asks this
module, running as a server, for a fork that does it: with the caller's environment, folder and open files. The fork
ends like its caller, which passes signals on to it, and has the same program as `sys.executable`. Programs that are to
import some packages by themselves begin with :func:`forgetting` them.

One server is enough for a run of all tests: pytest-xdist's workers are such programs, and so is what they start.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).parent.parent

CALLER = """#!{python} -IS
import json, os, signal, socket, sys

numbers = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        numbers.append(number)
    except OSError:  # the one that listed them
        pass
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
for passed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(passed_on, lambda number, frame: link.sendall(bytes([number])))
told = json.dumps([sys.argv, dict(os.environ), os.getcwd(), numbers]).encode()
socket.send_fds(link, [len(told).to_bytes(4, "big")], numbers)
link.sendall(told)
status = int(link.makefile().read() or 1)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@functools.cache
def warm_python() -> str:
    """The program's path; `sys.executable` where the system lacks what it needs."""
    if "WARM_PYTHON" in os.environ:
        return os.environ["WARM_PYTHON"]
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    program = Path(tempfile.mkdtemp(prefix="warm-")) / "python"  # the server removes it
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", str(program)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    atexit.register(end, server)  # so does the end of this process
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"ready\n"
    os.environ["WARM_PYTHON"] = str(program)  # for all that this process starts
    return str(program)


def end(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()  # for it alone: processes that multiprocessing keeps end when this one has


def forgetting(*packages: str) -> str:
    """The first line of a warm program that is to import these packages again: from elsewhere, or in another order."""
    return f"import sys; [sys.modules.pop(name) for name in [*sys.modules] if name.split('.')[0] in {packages}]\n"


def serve(program: str) -> list[str]:
    """Fork for each call; only the forks return, with the caller's arguments."""
    address = f"{program}.socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    Path(program).write_text(CALLER.format(python=sys.executable, address=address))
    Path(program).chmod(0o700)
    paths = sys.path[1:]
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # who started this has ended
            shutil.rmtree(Path(program).parent)
            reap(seconds=1)
            sys.exit()
        link, _ = listener.accept()
        if not os.fork():
            break
        link.close()
        reap()
    length, files, _, _ = socket.recv_fds(link, 4, 250)
    told = b""
    while len(told) < int.from_bytes(length, "big"):
        told += link.recv(65536)
    arguments, environment, folder, numbers = json.loads(told)
    child = os.fork()
    if child:
        for file in (*files, 0, 1):
            os.close(file)
        wait_for(child, link)
    for number, file in zip(numbers, [fcntl.fcntl(file, fcntl.F_DUPFD, 512) for file in files], strict=True):
        os.dup2(file, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(number)
    listener.detach()
    link.detach()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.executable = program
    sys.path[:] = ["", *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    return list(arguments[1:])


def reap(seconds: float = 0) -> None:
    """Wait for forks that have ended, whose time then counts as this process's, and for others as long as is said."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] or time.monotonic() < deadline:
            time.sleep(0.001)


def wait_for(child: int, link: socket.socket) -> None:
    """Pass signals on to the child, and how it ends to the caller; if the caller is killed, kill it."""
    ended = os.pidfd_open(child)
    while ended not in select.select([link, ended], [], [])[0]:
        passed_on = link.recv(1)
        os.kill(child, passed_on[0] if passed_on else signal.SIGKILL)
        if not passed_on:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(str(status).encode())
    os._exit(0)


def run(arguments: list[str]) -> None:
    """What Python does with these arguments."""
    while arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        del arguments[: 2 if arguments[0] in ("-X", "-W") else 1]
    what, *rest = arguments
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif what == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(what).resolve().parent)
        sys.argv = arguments
        runpy.run_path(what, run_name="__main__")


def end_now(status: int) -> None:
    """End without giving back piece by piece what thousands of modules hold: that takes a fork 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by now, or never there
            file.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    import pytorch_lightning.cli  # noqa: F401
    import torch.distributed.elastic.agent.server.api  # noqa: F401

    import lightning_sparse  # noqa: F401
    import tests.trainers  # noqa: F401

    gc.freeze()  # else each fork looks at all of it when it ends, which takes seconds
    try:
        run(serve(sys.argv[1]))
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):
            raise
        end_now(asked.code or 0)
    end_now(0)
