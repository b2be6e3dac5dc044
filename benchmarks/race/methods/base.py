"""A method of training on n ranks: what each rank does with its gradients, as a coroutine that yields messages.

The same text runs simulated (`drive_ranks`) and between processes (`drive`), and its bytes are those of its messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.race.flat import Flat
from lightning_sparse.core.messages import AllReduce, Meter, Steps

Rate = float | Tensor
"""A learning rate; () on a device, where steps are recorded."""


class Place(NamedTuple):
    """Where a method runs, and how the task trains."""

    rank: int
    ranks: int
    steps: int
    """Of the whole training."""
    betas: tuple[float, float] = (0.9, 0.95)
    decay: tuple[float, float] = (0.1, 0.1)
    """Weight decay of matrices and of vectors."""
    clip: float | None = None
    """Norm that averages are clipped to where a method forms dense ones; None: each rank has clipped its gradients."""
    seed: int = 0


class Method(ABC):
    """One rank's side of a method."""

    version: ClassVar[int] = 1
    """Raise it when results change; older ones are then not shown any more."""
    kept: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that an interrupted training needs, beside parameters and optimizers."""
    renewed: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that a step sets to new tensors; all others change in place."""
    clips_averages: ClassVar[bool] = False
    """Whether norms are those of averages, as in DDP, and not of each rank's gradients."""
    local: ClassVar[bool] = False
    """Whether ranks train alone for several steps."""
    clips_jointly: bool = False
    """Whether each rank clips its gradients by the norm of their mean, as the library does, and not by its own."""
    waits: bool = False
    """Whether its steps make the host wait for a device, so that no CUDA graph can repeat them."""

    def __init__(self, flat: Flat, at: Place) -> None:
        self.flat, self.at = flat, at
        self.matrices, self.vectors = Meter(at.ranks), Meter(at.ranks)
        self.optimizers: list[torch.optim.Optimizer] = []

    @abstractmethod
    def step(self, rate: Rate, step: int) -> Steps[None]:
        """Exchange what the gradients ask for, and move the parameters."""

    def shared(self) -> list[Tensor]:
        """Parameters that all ranks agree on: matrices and vectors."""
        return [parameter.data for parameter in self.flat.both]

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on."""
        return {
            "parameters": [parameter.data for parameter in self.flat.both],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "sent": [self.matrices.bytes_sent, self.vectors.bytes_sent],
            **{name: getattr(self, name) for name in self.kept},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.flat.load(state["parameters"])
        for optimizer, one in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(one)
        self.matrices.bytes_sent, self.vectors.bytes_sent = state["sent"]
        for name in self.kept:
            setattr(self, name, state[name])

    def adamw(self, *parameters: nn.Parameter) -> torch.optim.AdamW:
        """AdamW of the task, over some of the two vectors; its state is kept."""
        decays = dict(zip(map(id, self.flat.both), self.at.decay, strict=True))
        groups = [{"params": [p], "weight_decay": decays[id(p)]} for p in parameters]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=self.at.betas, capturable=self.flat.matrices.is_cuda)
        self.optimizers.append(optimizer)
        return optimizer

    def mean(self, x: Tensor, meter: Meter) -> Generator[Any, Tensor, Tensor]:
        """Mean over ranks by an all-reduce."""
        return (yield from meter.watch(_mean(x, self.at.ranks)))

    def average_vectors(self) -> Steps[None]:
        """Put the mean into the gradient of the parameters with fewer than two dimensions."""
        grad = self.flat.vectors.grad
        grad.copy_((yield from self.mean(grad, self.vectors)))

    def clip_averages_(self) -> None:
        """Clip averages, where the task asks for it."""
        if self.at.clip is not None:
            nn.utils.clip_grad_norm_(self.flat.both, self.at.clip)


def _mean(x: Tensor, ranks: int) -> Generator[Any, Tensor, Tensor]:
    return (yield AllReduce(x.clone())) / ranks


def move_(x: Tensor, by: Tensor, rate: Rate) -> None:
    """``x -= rate by``."""
    if isinstance(rate, Tensor):
        x.sub_(by * rate)
    else:
        x.sub_(by, alpha=rate)


def step_with(optimizer: torch.optim.Optimizer, rate: Rate) -> None:
    """Take a step with this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
