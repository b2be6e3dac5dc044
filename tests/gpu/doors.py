"""Other ways into the step: nodes, sharded models. Functions of a device's name that fail by raising."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import lightning_sparse as ls
from tests.gpu.one_training import TOPK, close, train
from tests.hsdp.model import Net, batches, made, weights
from tests.trainers import EVERYTHING_SPARSE


def nodes_train_as_on_the_cpu(device: str, size: int | None = None) -> None:
    """Nodes of so many ranks. None: all ranks are one node, which rehearses the exchange with others."""
    for options in (TOPK, {**TOPK, "grouping": "layer"}):
        options = {**options, "node_size": size or dist.get_world_size()}
        close(train(device, options), train("cpu", options))


def a_sharded_model_trains_as_on_the_cpu(device: str, ranks: int = 1) -> None:
    """Each replica has so many ranks; momentum SGD and AdamW."""
    for optimizer in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)):
        found, expected = (_sharded(where, optimizer, ranks) for where in (device, "cpu"))
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def _sharded(device: str, optimizer: Any, ranks: int) -> dict[str, torch.Tensor]:
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(made(Net).to(device), mesh=mesh["shard"])
    settings = {**TOPK, "rules": EVERYTHING_SPARSE, "single_device": "sparse", "watch": None}
    engine = ls.attach_hsdp(model, mesh, **settings)
    stepped = optimizer(model.parameters())
    for [(x, y)] in batches(6):
        mse_loss(model(x.to(device)), y.to(device)).backward()
        stepped.step()
        stepped.zero_grad()
    ls.flush(engine, [stepped])
    engine.close()
    return {name: value.cpu() for name, value in weights(model).items()}
