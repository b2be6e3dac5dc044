"""The default's step in Triton on a GPU, against the one in torch on the same GPU, bit for bit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from lightning_sparse.kernels.on_cuda import on_cuda
from tests.kernels.fused_steps import walk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("n", "numel", "density"),
    [(2, 5003, 0.05), (3, 70_001, 0.001), (3, 3_000_017, 0.01), (8, 1_000_000, 0.3)],
)
def test_the_step_equals_that_of_torch(n: int, numel: int, density: float, scaled: bool) -> None:
    found = walk(n, numel, density, torch.float32, scaled, "cuda", count=4)
    assert on_cuda.trouble is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_cuda, "trouble", "compared with torch")
        expected = walk(n, numel, density, torch.float32, scaled, "cuda", count=4)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
