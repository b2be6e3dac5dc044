"""Copies of a model whose gradients are exchanged sparsely: deep copies, averaged models, pickles."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from tests.covering import covering, in_turns
from tests.engines import exchange
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "sparsifier": "top_k", "density": 0.1}


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


def gradient(model: Any, batch: Tensor, engine: Engine | None = None) -> Tensor:
    model.zero_grad()
    model(batch).square().mean().backward()
    if engine is not None:
        exchange(engine)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def copies(way: str, ddp: dict[str, Any]) -> tuple[list[bool], str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 20), **ddp)
    batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
    plain = gradient(DistributedDataParallel(copy.deepcopy(model.module)), batch)
    engine = ls.attach(model, **SPARSE)
    gradient(model, batch, engine)
    residual = engine.residual("weight").clone()
    other = WAYS[way](model)
    found = [
        torch.equal(other(batch), model(batch)),
        torch.equal(gradient(other, batch), plain),  # as DDP does by itself
        torch.equal(engine.residual("weight"), residual),
    ]
    engine_of_other = ls.attach(other, **SPARSE)
    sparse = gradient(other, batch, engine_of_other)
    found += [0 < int(sparse.count_nonzero()) < sparse.numel() // 2, engine_of_other.step == 1]
    gradient(model, batch, engine)
    found.append(engine.step == 2)
    try:
        copy.deepcopy(engine).summary()
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    copy.deepcopy(engine).close()
    for one in (engine, engine_of_other):
        one.close()
    return found, said


@pytest.mark.parametrize(("way", "unused"), covering(in_turns(list(WAYS), [False, True]), together=1))
def test_a_copied_model_averages_densely_until_an_engine_is_attached(two_ranks: Ranks, way: str, unused: bool) -> None:
    for found, said in two_ranks(copies, way, {"find_unused_parameters": unused}):
        assert found == [True] * 6
        assert said.startswith("This is a copy of an engine: it exchanges nothing")
        assert "lightning_sparse.attach()" in said


def with_a_fallback() -> float:
    model = DistributedDataParallel(nn.Linear(20, 20))
    ls.attach(model, **SPARSE, fallback=True)
    batch = torch.ones(2, 20)
    gradient(model, batch)
    gradient(saved_and_loaded(model), batch)
    gradient(AveragedModel(model), batch)
    return float(model.module.weight.grad.sum())


def test_a_model_is_copied_while_steps_are_timed(two_ranks: Ranks) -> None:
    first, second = two_ranks(with_a_fallback)
    assert first == second
