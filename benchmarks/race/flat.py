"""The parameters of a model as two vectors, those of matrices and those of all else, so that methods are short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


class Flat:
    """Parameters with two dimensions or more, and the others: each kind is one vector with one gradient.

    The model goes on to work: its parameters and their gradients are views of these vectors.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in model.parameters():
            kinds[parameter.dim() > 1].append(parameter)
        self.shapes = [tuple(p.shape) for p in kinds[True]]
        self.vector_shapes = [tuple(p.shape) for p in kinds[False]]
        self.matrices, self.vectors = _joined(kinds[True]), _joined(kinds[False])

    @property
    def both(self) -> list[nn.Parameter]:
        """Matrices, then vectors."""
        return [self.matrices, self.vectors]

    def zero_(self) -> None:
        """Forget gradients."""
        for parameter in self.both:
            parameter.grad.zero_()

    def load(self, values: Sequence[Tensor]) -> None:
        """Set both vectors."""
        for parameter, value in zip(self.both, values, strict=True):
            parameter.data.copy_(value)


def _joined(parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    whole = nn.Parameter(torch.cat([torch.zeros(0), *(p.detach().flatten() for p in parameters)]))
    whole.grad = torch.zeros_like(whole)
    sizes = [p.numel() for p in parameters]
    for p, value, grad in zip(parameters, whole.data.split(sizes), whole.grad.split(sizes), strict=True):
        p.data = value.view(p.shape)
        p.grad = grad.view(p.shape)
    return whole


def pieces(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> Iterator[Tensor]:
    """The parts of a vector, as views in their shapes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    for part, shape in zip(flat.split(sizes), shapes, strict=True):
        yield part.view(shape)
