"""Layers that are compiled or checkpointed in one run and not in the next: names, and what goes on from a state."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default
from tests.hsdp.model import grid
from tests.integrations.test_checkpoints import Fit, saver
from tests.ranks import Ranks
from tests.trainers import flat

RULES = ls.Rules(["*.bias"], densities={"2.w*": 0.1}, dense_numel=0)
SPARSE: dict[str, Any] = {"density": 0.05, "grouping": "layer", "rules": RULES}
KINDS = ["plain", "compiled", "compiled layers", "checkpointed", "both"]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def wrapped(net: Any, kind: str) -> Any:
    torch._dynamo.reset()
    for layer in (0, 2):
        if kind in ("compiled layers", "both"):
            net[layer] = torch.compile(net[layer], backend="eager")
        if kind in ("checkpointed", "both"):
            net[layer] = checkpoint_wrapper(net[layer])
    return torch.compile(net, backend="eager") if kind == "compiled" else net


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return wrapped(nn.Sequential(nn.Linear(13, 60), nn.Tanh(), nn.Linear(60, 5)), kind)


def train(kind: str, rule: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Four steps, from the start or from where another run has ended."""
    model = made(kind)
    ddp, optimizer = DistributedDataParallel(model), rule(model.parameters(), lr=0.05)
    engine = ls.attach(ddp, **SPARSE)
    engine._show([optimizer])
    remarks: list[str] = []
    if before is not None:
        before = copy.deepcopy(before)  # loading makes them the optimizer's own
        nn.utils.vector_to_parameters(before["weights"], model.parameters())
        optimizer.load_state_dict(before["optimizer"])
        remarks = engine.load_state_dict(before["state"])
    generator = torch.Generator().manual_seed(engine.step + 100 * torch.distributed.get_rank())
    for _ in range(4):
        ddp(torch.randn(8, 13, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, p in model.named_parameters():  # as the user sees them
        assert (engine.residual(name) is None) == (p.ndim == 1)
    kept = {"weights": flat(model), "optimizer": optimizer.state_dict(), "state": engine.state_dict()}
    groups = [(group.name, group.density) for group in engine.groups]
    found = copy.deepcopy(kept) | {"remarks": remarks, "names": list(engine.stepper.parameters), "groups": groups}
    engine.close()
    return found


def train_all_ways(rule: Any) -> list[dict[str, Any]]:
    """The second halves of runs that begin or end plain."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # by torch's compiler
        plain = train("plain", rule)
        ends = [train(kind, rule, plain) for kind in KINDS]
        return ends + [train("plain", rule, train(kind, rule)) for kind in ("compiled", "both")]


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [torch.optim.AdamW, torch.optim.SGD])
def test_a_run_goes_on_with_layers_wrapped_otherwise(two_ranks: Ranks, rule: Any) -> None:
    for plain, *others in two_ranks(train_all_ways, rule):
        assert plain["names"] == NAMES and ("density0.1.2", 0.1) in plain["groups"]
        for run in others:
            assert run["remarks"] == []
            assert (run["names"], run["groups"]) == (plain["names"], plain["groups"])
            assert torch.equal(run["weights"], plain["weights"])


def goes_on_in_a_trainer(folder: str) -> list[Tensor]:
    """Weights of runs of two epochs, of which the second is resumed with layers wrapped or not."""
    found = []
    for first, second in (("plain", "plain"), ("plain", "checkpointed"), ("checkpointed", "plain")):
        every = saver("pytorch_lightning", dirpath=f"{folder}/{first}{second}", filename="{epoch}", save_top_k=-1)
        options = {**SPARSE, "rules": ls.Rules(["net.*.bias"], dense_numel=0), "strict_resume": True}
        Fit(options, 1, None, [every], wrap=lambda net, kind=first: wrapped(net, kind))
        run = Fit(
            options, 2, f"{folder}/{first}{second}/epoch=0.ckpt", wrap=lambda net, kind=second: wrapped(net, kind)
        )
        assert run.warnings == []
        found.append(run.parameters)
    return found


def test_checkpoints_of_a_trainer_go_on_strictly(two_ranks: Ranks, tmp_path: Path) -> None:
    for plain, *others in two_ranks(goes_on_in_a_trainer, str(tmp_path)):
        assert all(torch.equal(weights, plain) for weights in others)


def names_of_shards(kind: str) -> tuple[list[str], list[str]]:
    mesh, model = grid(2, 1), made(kind)
    fully_shard(model, mesh=mesh["shard"])
    engine = ls.attach_hsdp(model, mesh, **SPARSE)
    found = list(engine.stepper.parameters), [group.name for group in engine.groups]
    engine.close()
    return found


@pytest.mark.parametrize("kind", by_default(KINDS[:0:-1], 2))
def test_shards_have_the_same_names(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks(names_of_shards, kind) == two_ranks(names_of_shards, "plain")


def test_patterns_may_have_names_of_wrappers() -> None:
    rules = ls.Rules(["_orig_mod.0.bias"], ["a._orig_mod.b"], {"b._checkpoint_wrapped_module._orig_mod.w": 0.5})
    assert (rules.dense, rules.sparse, rules.densities) == (("0.bias",), ("a.b",), {"b.w": 0.5})
    assert ls.Rules(["*._orig_mod.*"]).dense == ("*._orig_mod.*",)  # which means some parameters, not all
