"""What trainings with FSDP2 do to a model: density 1 is native HSDP, and below it replicas stay equal and learn."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.covering import by_default
from tests.hsdp.model import engine_of, grid, weights, whole
from tests.ranks import Ranks

WORDS = 67


class Block(nn.Sequential):
    """A residual branch."""

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = super().forward(h)
        return h + out


class GPT(nn.Module):
    """Tied embeddings, and rows that ranks do not share equally."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 32)
        parts = [(nn.LayerNorm(32), nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 32)) for _ in range(2)]
        self.blocks = nn.ModuleList(Block(*each) for each in parts)
        self.head = nn.Linear(32, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.again else block(h)
        logits: Tensor = self.head(h)
        return logits.clone()  # FSDP2 warns of views


Trained = tuple[dict[str, Tensor], list[float], list[float]]
"""Weights, losses and norms."""


def train(what: str, density: float | None, steps: int) -> Trained:
    """With this density; None: FSDP2 averages over replicas by itself."""
    with warnings.catch_warnings():
        if what.startswith("compiled"):  # torch warns itself
            warnings.simplefilter("ignore")
        return trained(what, density, steps)


def trained(what: str, density: float | None, steps: int) -> Trained:
    mesh, model = grid(2, 2), GPT(again=what == "checkpointed")
    if what == "frozen":
        model.blocks[0].requires_grad_(False)
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if what == "bf16" else {}
    shard = partial(fully_shard, mesh=mesh if density is None else mesh["shard"], **policy)
    for block in model.blocks:
        if what == "compiled":
            block.compile(backend="eager")
        shard(block, reshard_after_forward=what != "not resharded")
    root: Any = shard(model)
    if what == "compiled whole":
        root.compile(backend="eager")
    engine = None if density is None else engine_of(model, mesh, density=density)
    clip = nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    micro = 3 if what in ("all reduced", "replicas apart", "not reduced") else 1
    losses, norms = [], []
    for _ in range(steps):
        total = 0.0
        for number in range(micro):
            if what == "replicas apart":
                root.set_requires_all_reduce(number == micro - 1)
            if what == "not reduced":
                root.set_requires_gradient_sync(number == micro - 1)
            x = torch.randint(WORDS, (4, 12), generator=generator)
            loss = cross_entropy(model(x).float().view(-1, WORDS), ((x * 3 + 1) % WORDS).view(-1)) / micro
            loss.backward()
            total += float(loss.detach())
        if what == "clipped":
            norms.append(float(whole(clip(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return weights(model), losses, norms


WAYS = [
    "all reduced",
    "replicas apart",
    "frozen",
    "clipped",
    "bf16",
    "not resharded",
    "checkpointed",
    "compiled",
    "compiled whole",
]


@pytest.mark.parametrize("what", WAYS)
def test_density_1_is_native_hsdp(four_ranks: Ranks, what: str) -> None:
    native, ours = (four_ranks(train, what, density, 4) for density in (None, 1.0))
    for (theirs, losses, norms), mine in zip(native, ours, strict=True):
        if what == "all reduced":  # native sums of means are rounded otherwise
            assert mine[1] == pytest.approx(losses, rel=1e-5)
            continue
        assert mine[1:] == (losses, norms)
        assert all(torch.equal(mine[0][name], w) for name, w in theirs.items())


@pytest.mark.parametrize("what", by_default(WAYS, 5))
def test_below_it_replicas_stay_equal_and_learn(four_ranks: Ranks, what: str) -> None:
    of_ranks = four_ranks(train, what, 0.05, 15)
    for found, losses, norms in of_ranks:
        assert all(torch.equal(w, of_ranks[0][0][name]) for name, w in found.items())
        assert norms == of_ranks[0][2]
        assert losses[-1] < 0.6 * losses[0]


def test_micro_batches_train_alike_however_fsdp_reduces_them(four_ranks: Ranks) -> None:
    """Sums of three gradients have other roundings where each is averaged within the replica first."""
    ways = [four_ranks(train, what, 0.05, 10) for what in ("all reduced", "replicas apart", "not reduced")]
    for every, apart, once in zip(*ways, strict=True):
        assert all(torch.equal(every[0][name], w) for name, w in apart[0].items())
        assert every[1] == apart[1]
        assert once[1] == pytest.approx(every[1], rel=0.05)
