"""Fingerprints of vectors: any one element that changes is noticed, and many that change together are."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops.fingerprint import WIDTH, fingerprint, same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of as many bytes."""


def weights(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 2, 3, WIDTH - 1, WIDTH, WIDTH + 1, 2 * WIDTH + 1, 4 * WIDTH + 3])
def test_any_element_that_changes_is_noticed(
    numel: int, dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    for kernel in each_kernel():
        x = weights(numel, dtype)
        before = fingerprint(x)
        assert bool(same(fingerprint(x.clone()), before)), kernel
        for place in {0, numel // 2, numel - 1}:
            for change in (-x[place], 2 * x[place], torch.tensor(torch.nan)):
                other = x.clone()
                other[place] = change
                assert not bool(same(fingerprint(other), before)), (kernel, place, change)
            other = x.clone()
            other.view(INTEGERS[x.element_size()])[place] += 1  # the last bit
            assert not bool(same(fingerprint(other), before)), (kernel, place)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 2,
        lambda x: -x,
        lambda x: x.flip(0),
        lambda x: x.roll(1),
        lambda x: x.clamp(-1, 1),
        torch.zeros_like,
        lambda x: torch.cat([x[1000:2000], x[:1000], x[2000:]]),
        lambda x: torch.where(torch.arange(len(x)) % 2 > 0, -x, x),
    ],
)
def test_many_that_change_are_noticed(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype, each_kernel: Callable[[], Iterator[str]]
) -> None:
    x = weights(5000, dtype)
    for kernel in each_kernel():
        assert not bool(same(fingerprint(change(x)), fingerprint(x))), kernel


def test_weights_that_are_not_a_number_stay_the_same(each_kernel: Callable[[], Iterator[str]]) -> None:
    x = weights(3000, torch.float32)
    x[7] = torch.nan
    for kernel in each_kernel():
        assert bool(same(fingerprint(x), fingerprint(x.clone()))), kernel


def test_nothing_has_a_fingerprint(each_kernel: Callable[[], Iterator[str]]) -> None:
    for kernel in each_kernel():
        assert bool(same(fingerprint(torch.empty(0)), fingerprint(torch.empty(0)))), kernel
