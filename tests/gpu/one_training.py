"""A small model behind DDP, with or without an engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.gpu.checks import require
from tests.gpu.models import Branches
from tests.trainers import EVERYTHING_SPARSE, flat

LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    # About 30 kB a bucket: three buckets from the second iteration on, one in the first.
    "small_buckets": {"bucket_cap_mb": 0.03},
}
TOPK = {"sparsifier": "top_k", "density": 0.05}
"""Picks alike on all devices, as long as there are no ties."""


class Training:
    """A small model behind DDP; plain if there are no options."""

    def __init__(
        self,
        device: str,
        options: dict[str, Any] | None,
        layout: str = "default",
        dtype: torch.dtype = torch.float64,
        momentum: float = 0.9,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = torch.device(device), dtype
        with torch.device("cpu"):  # the same numbers for all devices
            model = Branches()
        self.ddp = DistributedDataParallel(model.to(dtype).to(device), **LAYOUTS[layout])
        alone = {"rules": EVERYTHING_SPARSE, "single_device": "sparse"}
        if layout == "small_buckets":  # in groups as on a CPU: of a GPU's they are larger by default
            alone["bucket_cap_mb"] = LAYOUTS[layout]["bucket_cap_mb"]
        self.engine = ls.attach(self.ddp, **alone, **options) if options is not None else None
        optimizer = optimizer or partial(torch.optim.SGD, lr=0.1, momentum=momentum)
        self.optimizer = optimizer(self.ddp.parameters())
        self.limit: float | None = None
        """Of the norm of the mean gradient."""
        self.steps = 0

    def batch(self) -> Tensor:
        """The next one of this rank."""
        generator = torch.Generator("cpu").manual_seed(1000 * dist.get_rank() + self.steps)
        self.steps += 1
        x = torch.randn(8, 20, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(self.dtype).to(self.device)

    def step(self, use: str = "both", factor: float = 1.0) -> float:
        """Returns the loss."""
        self.optimizer.zero_grad()
        loss = self.ddp(self.batch(), use).square().mean()
        (loss * factor).backward()
        if self.engine is not None and self.limit is not None:
            self.engine.clip_grad_norm_(self.ddp.parameters(), self.limit)
        self.optimizer.step()
        return loss.item()

    def end(self, losses: list[float]) -> tuple[list[float], Tensor]:
        """Losses and parameters on the CPU; all ranks hold the same, and numbers."""
        parameters = self.parameters()
        if self.engine is not None:
            self.engine.close()
        others = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
        dist.all_gather(others, parameters)
        require(all(torch.equal(other, parameters) for other in others), "ranks hold different parameters")
        require(parameters.isfinite().all(), "parameters are not finite")
        return losses, parameters

    def resumed_by(self, second: Training) -> Training:
        """Let another one go on from this one's state, as after a restart; this one ends."""
        saved = self.ddp.state_dict(), self.optimizer.state_dict(), self.engine.state_dict()
        self.engine.close()
        second.ddp.load_state_dict(saved[0])
        second.optimizer.load_state_dict(saved[1])
        notes = second.engine.load_state_dict(saved[2])
        require(not notes, f"the state does not fit: {notes}")
        second.steps = self.steps
        return second

    def parameters(self) -> Tensor:
        return flat(self.ddp).cpu()


def train(device: str, options: dict[str, Any] | None, layout: str = "default", steps: int = 6, **more: Any) -> Any:
    training = Training(device, options, layout, **more)
    return training.end([training.step() for _ in range(steps)])


def close(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    """Of losses and parameters."""
    torch.testing.assert_close(found[0], expected[0], rtol=rtol, atol=1e-9)
    torch.testing.assert_close(found[1], expected[1], rtol=rtol, atol=rtol)
