"""The doors' examples, as a new user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import forgetting, warm_python

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(folder: Path, *command: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def ranks(folder: Path, name: str, *arguments: str) -> str:
    script = str(ROOT / "examples" / name)
    return run(folder, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *arguments)


def test_transformers_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    told = ranks(tmp_path, "huggingface_digits.py", "--fast")
    assert "sparse/density" in told
    assert "eval_accuracy" in told
    assert (tmp_path / "huggingface_digits" / "checkpoint-60" / "lightning_sparse.json").exists()
    ranks(tmp_path, "huggingface_digits.py", "--fast", "--resume")


def test_accelerate_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    first = ranks(tmp_path, "accelerate_digits.py", "--fast", "--checkpoint", "state")
    assert "step 40: accuracy" in first
    assert (tmp_path / "state" / "lightning_sparse.json").exists()
    ranks(tmp_path, "accelerate_digits.py", "--fast", "--checkpoint", "state")


def test_ray_trains(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    told = run(tmp_path, sys.executable, str(ROOT / "examples" / "ray_digits.py"), "--fast")
    assert "after epoch 1" in told


def test_the_package_imports_none_of_them() -> None:
    """But for those that torchmetrics and Lightning import by themselves, where they are installed."""
    looks = """
import lightning.pytorch, pytorch_lightning, torchmetrics
before = set(sys.modules)
import lightning_sparse
print([name for name in ("accelerate", "ray", "transformers") if name in set(sys.modules) - before])
"""
    first = forgetting("lightning_sparse", "accelerate", "ray", "transformers")
    assert run(ROOT, warm_python(), "-c", first + looks).strip() == "[]"
