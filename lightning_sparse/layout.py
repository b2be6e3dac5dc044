"""The order of a parameter's coordinates: that in which they lie in memory, as in DDP's buckets."""

from __future__ import annotations

import torch
from torch import Tensor


def flattened(parameter: Tensor) -> Tensor:
    """(numel,) coordinates in this order; a view where they lie in memory without gaps."""
    if _fills_memory(parameter):
        return parameter.detach().as_strided((parameter.numel(),), (1,))
    return parameter.detach().flatten()


def shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of (numel,) coordinates that lie in this order, in the parameter's shape."""
    if _fills_memory(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _fills_memory(parameter: Tensor) -> bool:
    """Whether elements neither overlap nor leave gaps; DDP gives gradients of others the shape's usual strides."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
