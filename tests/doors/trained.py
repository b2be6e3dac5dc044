"""A small model and its data, for jobs of real ranks, and comparisons of what becomes of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

INPUTS, WIDTH, CLASSES, SAMPLES = 64, 96, 4, 96


class Samples(Dataset[dict[str, Tensor]]):
    """Random inputs and labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, INPUTS, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Net(Module):
    """Two layers, with the interface of models of transformers. `spoil` makes the loss of a call infinite."""

    def __init__(self, spoil: int = -1) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = Sequential(Linear(INPUTS, WIDTH), ReLU(), Linear(WIDTH, CLASSES))
        self.calls, self.spoil = 0, spoil

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(inputs)
        loss = cross_entropy(logits, labels) * (float("inf") if self.calls == self.spoil else 1.0)
        self.calls += self.training
        return {"loss": loss, "logits": logits}


def weights(model: Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def on_all(results: list[Any]) -> Any:
    """The result of all ranks, which must be one."""
    assert all(repr(result) == repr(results[0]) for result in results)
    return results[0]


def relaxed() -> None:
    """Other libraries warn of their own affairs: those are theirs."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message="(?s).*residuals.*")
    warnings.filterwarnings("ignore", message="A gradient was not finite")
