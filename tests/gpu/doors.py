"""Other ways into the step: one step late, nodes, sharded models. Functions of a device's name that fail by raising."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import lightning_sparse as ls
from tests.gpu.checks import Numbers, require
from tests.gpu.one_training import TOPK, Training, close, train
from tests.hsdp import Net, batches, made, weights
from tests.trainers import EVERYTHING_SPARSE

LATE: dict[str, Any] = {**TOPK, "delay": 1}


def one_step_late_trains_as_on_the_cpu(device: str) -> Numbers:
    """With momentum SGD and AdamW; a step is skipped, and what waits at the end is flushed."""
    adam = partial(torch.optim.AdamW, lr=0.01)
    late_adam = {**LATE, "sparsifier": "shared_top_k"}
    for options, optimizer in ((LATE, None), (late_adam, adam), ({**LATE, "grouping": "layer"}, None)):
        results = []
        for where in (device, "cpu"):
            training = Training(where, options, optimizer=optimizer)
            training.engine.bind([training.optimizer])
            losses = [training.step(factor=float("nan") if step == 3 else 1.0) for step in range(8)]
            ls.flush(training.engine, [training.optimizer])
            results.append(training.end(losses))
        close(*results)
    return {"last loss": round(results[0][0][-1], 4)}


def one_step_late_resumes_bit_for_bit(device: str) -> None:
    for optimizer in (None, partial(torch.optim.AdamW, lr=0.01, fused=True)):
        results = []
        for stops in (False, True):
            training = _late(device, optimizer)
            losses = [training.step() for _ in range(4)]
            if stops:
                training = training.resumed_by(_late(device, optimizer))
            losses += [training.step() for _ in range(4)]
            results.append(training.end(losses))
        require(torch.equal(results[0][1], results[1][1]), "the resumed run differs")


def _late(device: str, optimizer: Any) -> Training:
    training = Training(device, {"density": 0.05, "delay": 1}, dtype=torch.float32, optimizer=optimizer)
    training.engine.bind([training.optimizer])
    return training


def nodes_train_as_on_the_cpu(device: str) -> None:
    """All ranks are one node, which rehearses the exchange with others."""
    for options in (TOPK, {**TOPK, "grouping": "layer"}):
        options = {**options, "node_size": dist.get_world_size()}
        close(train(device, options), train("cpu", options))


def a_sharded_model_trains_as_on_the_cpu(device: str) -> None:
    """Each rank is a replica; momentum SGD and AdamW, in time and late."""
    for delay in (0, 1):
        for optimizer in (partial(torch.optim.SGD, lr=0.1, momentum=0.9), partial(torch.optim.AdamW, lr=0.01)):
            found, expected = (_sharded(where, optimizer, delay) for where in (device, "cpu"))
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def _sharded(device: str, optimizer: Any, delay: int) -> dict[str, torch.Tensor]:
    kind = torch.device(device).type
    mesh = init_device_mesh(kind, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(made(Net).to(device), mesh=mesh["shard"])
    settings = {**TOPK, "rules": EVERYTHING_SPARSE, "single_device": "sparse", "watch": None, "delay": delay}
    engine = ls.attach_hsdp(model, mesh, **settings)
    stepped = optimizer(model.parameters())
    engine.bind([stepped])
    for [(x, y)] in batches(6):
        mse_loss(model(x.to(device)), y.to(device)).backward()
        stepped.step()
        stepped.zero_grad()
    ls.flush(engine, [stepped])
    engine.close()
    return {name: value.cpu() for name, value in weights(model).items()}
