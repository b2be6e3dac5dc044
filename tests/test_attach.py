"""What attach refuses; what it does is tested in tests/hook."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_sparse.attach import refuse_two_orders

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_thread_beside_sync_batchnorm_on_cuda_is_refused() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with pytest.raises(ValueError, match=r"beside SyncBatchNorm \('1'\) on CUDA, but got 'thread'"):
        refuse_two_orders(model, "thread", CUDA)
    for executor, device in (("inline", CUDA), ("auto", CUDA), ("thread", CPU)):
        refuse_two_orders(model, executor, device)
    refuse_two_orders(nn.BatchNorm1d(4), "thread", CUDA)
