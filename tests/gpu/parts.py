"""The parts of the command; each runs in a process of its own, which may hang or crash without harm to the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
GRACE = 25
"""Seconds that a part has to end the check under way when its time is over; after them it counts as hung."""
TOO_SHORT = 15
"""Seconds with which no part is started: importing everything takes most of them."""


class Part(NamedTuple):
    name: str
    """Also of the module in this folder."""
    title: str
    seconds: float
    """It may take so many; more where the command has more time than the parts that are chosen need."""
    keys: tuple[tuple[str, str], ...] = ()
    """Numbers for the table: name of the check, name of the number."""
    cuda_only: str = ""
    """Why there is nothing to do on a CPU; empty where there is."""
    alone: bool = False
    """Whether nothing else may run meanwhile, since it measures."""


# First what is measured, alone; then what others wait for least.
PARTS = [
    Part(
        "machine",
        "copy rate",
        15,
        (("copy 25M", "GB/s"), ("copy 144M", "GB/s"), ("copy 1000M", "GB/s")),
        alone=True,
    ),
    Part(
        "kernels",
        "passes over a group",
        35,
        (
            ("accumulate_ 144M", "times the bound"),
            ("accumulate_ in 64 runs 144M", "times the bound"),
            ("top_k in one go 144M", "times the bound"),
            ("top_k 144M", "times the bound"),
        ),
        alone=True,
    ),
    Part(
        "times",
        "step times",
        90,
        (
            ("local step union_top_k 25M 0.01", "times the floor"),
            ("local step union_top_k with Adam 25M 0.01", "times the floor"),
            ("launches union_top_k", "launches"),
            ("launches union_top_k with Adam", "launches"),
            ("transformer, DDP", "ms"),
            ("transformer, defaults", "ms"),
            ("transformer, DDP, AdamW", "ms"),
            ("transformer, defaults, AdamW", "ms"),
        ),
        alone=True,
    ),
    Part(
        "memory",
        "memory",
        25,
        (("grouping bucket", "bytes per parameter"), ("AdamW", "bytes per parameter")),
        alone=True,
    ),
    Part(
        "ranks",
        "several ranks over NCCL",
        170,
        (("steps beside DDP", "SGD: DDP ms"), ("steps beside DDP", "SGD: ms")),
    ),
    Part("training", "DDP end to end", 150),
    Part("marked", "tests marked gpu", 150, (("pytest -m gpu", "tests"),), "those tests need a CUDA device"),
    Part("equality", "equal to the CPU", 105, (("all pairs, Residual(decay=1.0), float64", "pairs"),)),
    Part("races", "races", 50),
    Part("syncs", "host never waits", 50),
    Part(
        "graphs",
        "CUDA graph, torch.compile",
        40,
        (
            ("graph of two steps, union_top_k", "ms"),
            ("graph of two steps, union_top_k", "ms in a graph"),
            ("compiled model, defaults", "pieces"),
        ),
    ),
    Part("collectives", "NCCL, one rank", 20),
]
TOGETHER = 4
"""Parts that run at once, of those that measure nothing."""

NEEDED = ["torch", "numpy", "cattrs", "fsspec", "lightning_utilities", "torchmetrics"]
LIGHTNING = ["pytorch_lightning", "lightning"]
"""One of them is enough."""


def missing_packages() -> list[str]:
    """What the package itself cannot do without."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not any(find_spec(name) for name in LIGHTNING):
        missing.append(" or ".join(LIGHTNING))
    return missing


class PartResult(NamedTuple):
    name: str
    title: str
    result: str
    """passed (some checks may have been skipped), failed or skipped."""
    seconds: float
    why: str
    checks: list[dict[str, Any]]
    keys: str
    """The numbers that are worth a look."""


def skipped(part: Part, why: str) -> PartResult:
    return PartResult(part.name, part.title, "skipped", 0.0, why, [], "")


def run_part(part: Part, device: str, seconds: float, folder: Path) -> PartResult:
    """Run a part in a process of its own, for this long and a little longer; its lines stay in the folder."""
    lines = folder / f"{part.name}.jsonl"
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.gpu", "--part", part.name, "--lines", str(lines)]
    command += ["--device", device, "--seconds", str(seconds)]
    return watch(part, command, seconds + GRACE, lines)


def watch(part: Part, command: Sequence[str], limit: float, lines: Path) -> PartResult:
    """Run a command that writes a line of JSON before and after each check, and end it when its time is over."""
    began = time.monotonic()
    # Repeatable matrix products: some checks compare bit for bit.
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    trouble = ""
    try:
        if code := process.wait(limit):
            trouble = f"its process ended with exit code {code}"
    except subprocess.TimeoutExpired:
        trouble = f"no answer within {limit:.0f} s"
    finally:  # the ranks that it has started, too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    written = lines.read_text() if lines.exists() else ""
    found = [json.loads(line) for line in written.split("\n")[:-1]]  # the last one may be cut off
    checks = [line for line in found if "begin" not in line]
    if trouble:
        trouble += f", in {found[-1]['begin']!r}" if found and "begin" in found[-1] else ""
    return summarize(part, checks, trouble, time.monotonic() - began)


def summarize(part: Part, checks: list[dict[str, Any]], trouble: str, seconds: float) -> PartResult:
    """One row of what the checks of a part have found."""
    failed = [check["check"] for check in checks if check["result"] == "failed"]
    reasons = sorted({check["why"].splitlines()[0] for check in checks if check["result"] == "skipped"})
    passed = sum(check["result"] == "passed" for check in checks)
    if failed or trouble:
        why = "; ".join([trouble] * bool(trouble) + failed)
        result = "failed"
    else:
        result = "passed" if passed else "skipped"
        why = "; ".join(reasons) if checks else "nothing was checked"
    by_name = {check["check"]: check["numbers"] for check in checks}
    keys = [f"{passed} of {len(checks)} checks"]
    keys += [f"{check}: {by_name[check][name]} {name}" for check, name in part.keys if name in by_name.get(check, {})]
    return PartResult(part.name, part.title, result, seconds, why, checks, ", ".join(keys))
