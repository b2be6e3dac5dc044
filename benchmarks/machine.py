"""On what a benchmark ran: machine and versions, the same words in all results."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

import numpy
import torch

import lightning_sparse as ls
from lightning_sparse.ops.c import native


def about() -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "lightning_sparse": ls.__version__,
        "kernels": native.description,
    }


def in_words(facts: dict[str, Any]) -> str:
    """One line below a table."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def free_port() -> int:
    """A port of this machine at which ranks can meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def processor(device: torch.device | str = "cpu") -> str:
    """The model's name, as the system gives it; of a GPU as CUDA does."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    found = [line for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return found[0].split(":")[1].strip() if found else platform.processor()


def memory(kind: str = "MemAvailable") -> int:
    """Bytes of the machine's memory: ``MemAvailable`` for new programs, or ``MemTotal``; 0 where Linux does not say."""
    found = [line for line in _lines("/proc/meminfo") if line.startswith(f"{kind}:")]
    return 1024 * int(found[0].split()[1]) if found else 0


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
