"""The parameters of a model as two vectors, those of matrices and those of all else, so that methods are short."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn


class Flat:
    """Parameters with two dimensions or more, and the others: each kind is one vector with one gradient.

    The model goes on to work: its parameters and their gradients are views of these vectors.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        names: dict[bool, list[str]] = {True: [], False: []}
        for name, parameter in model.named_parameters():
            kinds[parameter.dim() > 1].append(parameter)
            names[parameter.dim() > 1].append(name)
        self.names, self.vector_names = names[True], names[False]
        self.shapes = [tuple(p.shape) for p in kinds[True]]
        self.vector_shapes = [tuple(p.shape) for p in kinds[False]]
        self.matrices, self.vectors = _joined(kinds[True]), _joined(kinds[False])

    @property
    def both(self) -> list[nn.Parameter]:
        """Matrices, then vectors."""
        return [self.matrices, self.vectors]

    def views(self) -> dict[str, nn.Parameter]:
        """Each parameter of the model once more, by name: an optimizer that steps these moves the two vectors."""
        kinds = (self.matrices, self.names, self.shapes), (self.vectors, self.vector_names, self.vector_shapes)
        found: dict[str, nn.Parameter] = {}
        for whole, names, shapes in kinds:
            for name, value, grad in zip(names, pieces(whole.data, shapes), pieces(whole.grad, shapes), strict=True):
                found[name] = nn.Parameter(value)
                found[name].grad = grad
        return found

    def coordinates(self, names: Collection[str]) -> Tensor:
        """Where some matrices lie in the vector of all."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        every = torch.arange(sum(sizes), device=self.matrices.device).split(sizes)
        chosen = [part for part, name in zip(every, self.names, strict=True) if name in names]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device=self.matrices.device), *chosen])

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
