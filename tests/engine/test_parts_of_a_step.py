"""A step made of several backwards: what may be asked for in between, and what a step left out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from tests.engines import exchange
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE


class Pair(nn.Module):
    """Two layers with an output each, so that each may have a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(20, 20, bias=False) for _ in range(2))

    def forward(self, x: Tensor, uses: str = "ab") -> list[Tensor]:
        return [layer(x).square().mean() for name, layer in (("a", self.a), ("b", self.b)) if name in uses]


def attached(options: dict[str, Any], **settings: Any) -> tuple[DistributedDataParallel, Engine]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Pair(), bucket_cap_mb=0.001, **settings)
    engine = ls.attach(ddp, rules=EVERYTHING_SPARSE, density=0.1, sparsifier="top_k", grouping="layer", **options)
    return ddp, engine


def batch(step: int) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def leaving_out() -> list[tuple[dict[str, float], set[str]]]:
    """The summary of each step, and the groups that have one."""
    ddp, engine = attached({}, find_unused_parameters=True)
    seen = []
    for step, uses in enumerate(["ab", "ab", "a", "ab"]):
        ddp.zero_grad()
        sum(ddp(batch(step), uses)).backward()
        exchange(engine)
        seen.append((engine.summary(), set(engine._group_summaries())))
    return seen


def test_a_group_that_no_rank_used_does_not_count_for_what_was_sent(two_ranks: Ranks) -> None:
    for seen in two_ranks(leaving_out):
        pairs = 4 + 8 * 40  # a group's message, beside 13 words of 8 bytes in backward and as many in the step
        assert [summary["traffic/sent_mb"] for summary, _ in seen] == [
            (2 * 112 + n * pairs) / 1e6 for n in (2, 2, 1, 2)
        ]
        assert [names for _, names in seen] == [{"a", "b"}, {"a", "b"}, {"a"}, {"a", "b"}]
        norms = [summary["residual_norm"] for summary, _ in seen]
        assert norms[2] > 0.7 * norms[1]  # of both, as nothing of b is sent
