"""Values of many vectors at once: in Triton's interpreter and in torch, against plain indexing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops.sampled import Sampler
from tests.ops.interpreted import in_triton, interpret

interpret()

PLACES = torch.tensor([[0, 5, 2, 3], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]])


def vectors(dtype: torch.dtype) -> list[Tensor | None]:
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    return [x, None, torch.ones(2, dtype=dtype), torch.empty(0, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", [False, True])
def test_values_are_those_of_each_vector(dtype: torch.dtype, kernels: bool) -> None:
    given, sampler = vectors(dtype), Sampler()
    first, ones = given[0], given[2]
    assert first is not None and ones is not None
    for _ in range(2):  # addresses are known the second time
        if kernels:
            with in_triton() as chosen:
                found = sampler.take(given, PLACES)
                assert chosen.trouble is None and chosen._tried and not chosen.refused
        else:
            found = sampler.take(given, PLACES)
        assert found[0].tolist() == [first.double().flatten()[i].item() for i in (0, 5, 2, 3)]
        assert found[2].tolist() == [1.0] * 4
        assert all(math.isnan(x) for row in (found[1], found[3]) for x in row)
        first.mul_(2)
        given[2] = ones.clone()  # elsewhere


def test_vectors_that_lie_apart_are_taken_in_the_order_of_memory() -> None:
    dense = torch.arange(6.0).view(2, 3).t()  # memory is filled, in another order
    apart = torch.arange(12.0).view(3, 4)[:, ::2]
    places = torch.tensor([[1, 2], [1, 2]])
    for kernels in (False, True):
        if kernels:
            with in_triton():
                found = Sampler().take([dense, apart], places)
        else:
            found = Sampler().take([dense, apart], places)
        assert found.tolist() == [[1.0, 2.0], [2.0, 4.0]]
