"""Programs that start warm are called like Python, and end like their callers."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.warm import warm_python


@pytest.mark.parametrize(
    ("program", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_a_program_ends_its_caller(program: str, status: int) -> None:
    assert subprocess.run([warm_python(), "-u", "-c", program], capture_output=True, timeout=60).returncode == status


def test_a_script_has_the_folder_the_environment_and_the_arguments_of_its_caller(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    (tmp_path / "script.py").write_text("import beside, os, sys\nprint(sys.argv[1:], os.getenv('HERE'), os.getcwd())\n")
    command = [warm_python(), str(tmp_path / "script.py"), "-m", "x"]
    environment = os.environ | {"HERE": "there"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", env=environment)
    assert done.stdout == "['-m', 'x'] there /\n", done.stderr


def test_signals_are_passed_on() -> None:
    program = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(5))\nprint(flush=True)\nsignal.pause()"
    with subprocess.Popen([warm_python(), "-c", program], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        caller.send_signal(signal.SIGTERM)
        assert caller.wait(60) == 5


def test_a_caller_that_is_killed_takes_its_program_with_it() -> None:
    program = "import time\nprint(flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([warm_python(), "-c", program], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        caller.kill()
        assert caller.stdout.read() == b""  # once nobody holds the other end
