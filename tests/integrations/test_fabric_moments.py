"""Checkpoints of Fabric before a step: whoever loads them has all that was absorbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.covering import covering, in_turns
from tests.integrations.test_fabric import FABRICS, make_fabric
from tests.ranks import Ranks
from tests.sums import SPARSE, Sums, check_sums

Look = tuple[dict[str, Tensor], dict[str, Any]]


class Run:
    def __init__(self, package: str) -> None:
        # Small buckets, so that there are several.
        self.fabric = make_fabric(package, {**SPARSE, "bucket_cap_mb": 0.0005}, 1024.0)
        module = Sums()
        self.parameters = dict(module.named_parameters())
        self.model, self.optimizer = self.fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.fabric.backward(self.model(dist.get_rank()))

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def look(self) -> Look:
        return {
            name: p.detach().clone() for name, p in self.parameters.items()
        }, self.fabric.strategy.engine.state_dict()

    def close(self) -> None:
        self.fabric.strategy.engine.close()


def go_on(package: str, path: str, within: bool) -> list[Look]:
    """What is seen after a checkpoint was loaded, and after two more steps."""
    run = Run(package)

    def save(*_: Any) -> None:
        run.fabric.save(path, run.state)

    for _ in range(3):
        run.step()
    if within:
        hook = run.parameters["in_second.second"].register_post_accumulate_grad_hook(save)
        run.backward()
        hook.remove()
    else:
        run.backward()
        save()
    run.close()
    run = Run(package)
    run.fabric.load(path, run.state)
    looks = [run.look()]
    for _ in range(2):
        run.step()
    looks.append(run.look())
    run.close()
    return looks


@pytest.mark.parametrize(("within", "package"), covering(in_turns([True, False], FABRICS), together=1))
def test_what_fabric_loads_from_within_a_step_is_all_that_was_absorbed(
    two_ranks: Ranks, tmp_path: Path, package: str, within: bool
) -> None:
    loaded, later = zip(*two_ranks(go_on, package, str(tmp_path / "x.ckpt"), within), strict=True)
    states = [torch.load(file)["state"] for file in sorted((tmp_path / "x.ckpt.sparse").iterdir())]
    check_sums(loaded[0][0], states, 3)
    assert not any(state["pending"] or state["absorbed"] for state in states)
    for looks, steps in ((loaded, 3), (later, 5)):
        check_sums(looks[0][0], [state for _, state in looks], steps)
