"""Parameters that no rank uses in a step: they do not compete, and what is remembered of them stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.engines import exchange
from tests.ranks import Ranks


class Twins(nn.Module):
    """Two equal layers, of which some steps use one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = (nn.Linear(20, 20, bias=False) for _ in range(2))
        with torch.no_grad():
            self.used.weight.fill_(0.1)
            self.other.weight.fill_(100.0)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.used(x)
        return y + self.other(x) if both else y


def train(
    memory: ls.memories.Memory, both: list[bool], spoilt: int | None = None
) -> tuple[list[tuple[int, int]], Any, Any, Tensor]:
    """Picks in each layer at each step; the state before the last step and after it; the last average.

    In the step with the number ``spoilt``, the gradients of rank 1 are not finite.
    """
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Twins(), find_unused_parameters=True)
    rules = ls.Rules(dense_ndim=0, dense_numel=0)
    options = {"sparsifier": "top_k", "exchange": "reduce_union", "density": 0.1, "grouping": "model", "rules": rules}
    engine = ls.attach(ddp, **options, memory=memory, watch=None)
    picks, before, after = [], {}, {}
    for step, uses_both in enumerate(both):
        ddp.zero_grad()
        before = after
        generator = torch.Generator().manual_seed(step)  # equal on all ranks: so are their picks
        loss = ddp(torch.randn(4, 20, generator=generator), uses_both).square().mean()
        (loss * float("nan") if step == spoilt and dist.get_rank() == 1 else loss).backward()
        assert exchange(engine) == (step != spoilt)
        grads = [layer.weight.grad for layer in (ddp.module.used, ddp.module.other)]
        picks.append(tuple(0 if grad is None else int(grad.count_nonzero()) for grad in grads))
        after = engine.state_dict()
    assert dist.get_world_size() == 2
    return picks, before, after, ddp.module.used.weight.grad.clone()


@pytest.mark.parametrize(
    "memory",
    [
        ls.memories.WeightDecay(0.1),
        ls.memories.ClipByNorm(1e6, ls.memories.WeightDecay(0.1)),
        ls.memories.WeightDecay(0.1, ls.memories.ClipByNorm(1e6)),
    ],
)
def test_the_decay_of_an_unused_parameter_takes_no_picks(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    for picks, *_ in two_ranks(train, memory, [False] * 3):
        assert picks == [(80, 0)] * 3


MEMORIES = [
    ls.memories.Residual(),
    ls.memories.WeightDecay(0.1),
    ls.memories.WeightDecay(0.1, ls.memories.MomentumCorrection(0.9)),
    ls.memories.MomentumCorrection(0.9),
    ls.memories.AdamCorrection(beta1=0.5),
    ls.memories.ClipByNorm(0.5, ls.memories.MomentumCorrection(0.5)),
]


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
def test_what_is_remembered_of_an_unused_parameter_stays(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    for picks, before, after, _ in two_ranks(train, memory, [True, True, False]):
        assert picks[-1] == (80, 0)
        for name, vector in before["parameters"]["other.weight"].items():
            assert vector.any(), name
            assert torch.equal(after["parameters"]["other.weight"][name], vector), name
            assert not torch.equal(after["parameters"]["used.weight"][name], before["parameters"]["used.weight"][name])


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
def test_in_a_skipped_step_it_stays_too(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    for _, before, after, average in two_ranks(train, memory, [True, True, False], 2):
        assert not average.any()
        for layer in ("other.weight", "used.weight"):  # of a backward that is not finite nothing is absorbed
            for name, vector in before["parameters"][layer].items():
                assert torch.equal(after["parameters"][layer][name], vector), name


def clipped(decay: float) -> Tensor:
    memory = ls.memories.WeightDecay(decay, ls.memories.ClipByNorm(0.01)) if decay else ls.memories.ClipByNorm(0.01)
    return train(memory, [False])[-1]


def test_the_decay_of_an_unused_parameter_does_not_make_a_norm_longer(two_ranks: Ranks) -> None:
    """What is used decays hardly, what is not would decay a thousand times as much."""
    for without, decaying in zip(two_ranks(clipped, 0.0), two_ranks(clipped, 1e-6), strict=True):
        torch.testing.assert_close(decaying, without, rtol=1e-3, atol=1e-8)
