"""Gradients that lie in runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse import ops
from lightning_sparse.core.layout import Gradient, flattened, laid_out

LENGTHS = [(0, 3), (3, 4), (6, 11), (12, 13)]
"""Pieces in a bucket: the first two touch each other."""
NUMEL = 10


def lying(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Gradient]:
    bucket = torch.arange(14).to(dtype)
    return bucket, Gradient.of(bucket[first:last] for first, last in LENGTHS)


def test_pieces_that_touch_are_one_run() -> None:
    _, grad = lying()
    assert [run.tolist() for run in grad.runs] == [[0, 1, 2, 3], [6, 7, 8, 9, 10], [12]]
    assert [span for span, _ in grad] == [slice(0, 4), slice(4, 9), slice(9, 10)]
    assert grad.numel == NUMEL
    assert grad[slice(3, 4)].tolist() == [3]
    assert grad[slice(4, 9)].tolist() == [6, 7, 8, 9, 10]
    cuts = [(span.start, span.stop, part.tolist()) for span, part in grad.cut(3)]
    assert cuts == [(0, 3, [0, 1, 2]), (3, 4, [3]), (4, 7, [6, 7, 8]), (7, 9, [9, 10]), (9, 10, [12])]
    other = torch.arange(2.0)
    assert len(Gradient.of([other[:1], torch.arange(2.0)[1:]]).runs) == 2  # of different buckets


def test_one_run_is_its_own_room_and_others_keep_one() -> None:
    bucket, grad = lying()
    assert grad.flat().tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 12]
    assert grad.flat().data_ptr() == grad.room(torch.float32).data_ptr()
    later = Gradient.of([bucket[:3], bucket[6:]], grad.rooms)
    assert later.room(torch.float32).data_ptr() == grad.room(torch.float32).data_ptr()
    whole = Gradient.of([bucket[:3], bucket[3:]], grad.rooms)
    assert not grad.rooms  # nobody needs it any more
    assert whole.flat().data_ptr() == whole.room(torch.float32).data_ptr() == bucket.data_ptr()
    wide = whole.room(torch.float64)
    assert wide.shape == (14,)
    assert Gradient.of([bucket], whole.rooms).room(torch.float64) is wide


class Operations(TorchDispatchMode):
    """Names of operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "split" not in func.overloadpacket.__name__:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_runs_are_gathered_and_written_to_at_once() -> None:
    bucket, grad = lying()
    grad.flat()
    with Operations() as operations:
        flat = grad.flat()
        flat.mul_(2)
        grad.spread_(flat)
    assert operations.names == ["_foreach_copy_", "mul_", "_foreach_copy_"]
    assert bucket.tolist() == [0, 2, 4, 6, 4, 5, 12, 14, 16, 18, 20, 11, 24, 13]
    whole = Gradient.of([bucket])
    with Operations() as operations:
        whole.spread_(whole.flat())
    assert not operations.names
    whole.spread_(torch.zeros(14))
    assert not bucket.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indices", [[], [4], [0, 3, 4, 8, 9], [9, 0, 4, 4, 8], [5, 6]])
def test_values_go_to_their_runs_and_nowhere_else(kernel: str, indices: list[int], dtype: torch.dtype) -> None:
    bucket, grad = lying(dtype)
    places, values = torch.tensor(indices, dtype=torch.int64), torch.tensor(indices).to(dtype) - 100
    expected = grad.flat().clone().index_copy_(0, places, values)
    ops.put_in_runs_(grad.runs, places, values)
    assert torch.equal(grad.flat(), expected)
    assert bucket[[4, 5, 11, 13]].tolist() == [4, 5, 11, 13]


@pytest.mark.parametrize("index", [-1, NUMEL])
def test_an_index_outside_is_refused(index: int) -> None:
    _, grad = lying()
    with pytest.raises(IndexError, match=f"outside of a vector of {NUMEL}"):
        ops.put_in_runs_(grad.runs, torch.tensor([0, index]), torch.zeros(2))


def test_what_others_write_to_a_bucket_does_not_count_as_written_to_its_runs() -> None:
    bucket, grad = lying()
    before = [run._version for run in grad.runs]
    bucket[4:6] = 1.0
    assert [run._version for run in grad.runs] == before
    ops.put_in_runs_(grad.runs, torch.tensor([0]), torch.zeros(1))
    assert all(run._version > version for run, version in zip(grad.runs, before, strict=True))


@pytest.mark.parametrize("size", [(3, 4), (3, 1), (1, 1), (4, 3, 2)])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_values_are_laid_out_in_the_order_of_a_parameters_coordinates(size: Any, gaps: bool, turned: bool) -> None:
    whole = torch.zeros(*size[:-1], 2 * size[-1])[..., ::2] if gaps else torch.zeros(size)
    parameter = whole.mT if turned else whole
    plain = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    parameter.copy_(plain)
    for values in (plain, plain.mT.contiguous().mT, plain.repeat_interleave(2, dim=-1)[..., ::2], parameter):
        assert torch.equal(flattened(laid_out(values, parameter)), flattened(parameter))
    assert laid_out(parameter, parameter) is parameter
    assert turned or laid_out(plain, parameter) is plain, "what lies so is not copied"
