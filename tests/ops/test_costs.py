"""What a step of a group costs on a device without Triton, held by budgets: nobody adds a pass without noticing.

Each row of the table is what is spent today, rounded up: operations of torch, most of which launch one kernel, for 2, 8
and 64 ranks, and bytes that they read and write for each coordinate, with 8 ranks, float32, the memory ``Residual`` and
the sparsifier's own exchange, in a group of four million coordinates that is one bucket of DDP. The floor is 16 bytes:
a pass that reads gradient and residual and writes both. A dense pass costs at least 4 bytes more, which no row has to
spare. Whoever makes something cheaper lowers its row.

What the bytes are spent on, for UnionTopK at a density of 0.001: 12 to add the gradient, 23 to leave out what is not
finite, 28 for magnitudes and ``top_k``, 8 for magnitudes of the own stripe and their ``top_k``, 4 to clear the
gradient, and some 2000 bytes a pick.

More ranks take more operations in these places: where sums are formed in the order of ranks (gather_pairs, balanced),
one for each rank; in ExDyna, where blocks move, and in the tree of gTop-k, some for each doubling of their number; and
in packed_union, where each rank picks so few that coordinates are told in twelve bits or more, ten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Absorbed
from tests.costs import META, Costs, group_step
from tests.covering import by_default

NUMEL = 1 << 22
BUDGET: dict[str, tuple[ls.sparsifiers.Sparsifier, tuple[int, int, int], tuple[float, float]]] = {
    # operations with 2, 8 and 64 ranks; bytes a coordinate at densities of 0.01 and 0.001
    "union_top_k": (ls.sparsifiers.UnionTopK(), (202, 202, 212), (96, 78)),
    "shared_top_k": (ls.sparsifiers.SharedTopK(), (53, 53, 53), (73, 68)),
    "striped_top_k": (ls.sparsifiers.StripedTopK(), (61, 61, 61), (52, 47)),
    "top_k": (ls.sparsifiers.TopK(), (61, 67, 123), (114, 72)),
    "clt_k": (ls.sparsifiers.CLTK(), (39, 39, 39), (73, 68)),
    "gtop_k": (ls.sparsifiers.GTopK(), (66, 70, 76), (78, 69)),
    "random_k": (ls.sparsifiers.RandomK(), (59, 59, 59), (47, 40)),
    "hard_threshold": (ls.sparsifiers.HardThreshold(), (69, 69, 69), (314, 92)),
    "micro": (ls.sparsifiers.MiCRO(), (134, 134, 134), (51, 44)),
    "micro-published": (ls.sparsifiers.MiCRO(variant="published"), (88, 88, 88), (63, 44)),
    "exdyna": (ls.sparsifiers.ExDyna(), (180, 186, 192), (103, 96)),
    "exdyna-published": (ls.sparsifiers.ExDyna(variant="published"), (146, 152, 158), (100, 81)),
    "ok_top_k": (ls.sparsifiers.OkTopK(), (180, 186, 242), (93, 63)),
    "dgc": (ls.sparsifiers.DGC(), (224, 230, 286), (131, 74)),
    "redsync": (ls.sparsifiers.RedSync(), (406, 412, 468), (170, 85)),
    "gaussian_k": (ls.sparsifiers.GaussianK(), (299, 305, 361), (140, 82)),
    "sidco_e": (ls.sparsifiers.SIDCoE(), (354, 360, 416), (748, 817)),
    "sidco_p": (ls.sparsifiers.SIDCoP(), (452, 458, 514), (748, 817)),
    "sidco_gp": (ls.sparsifiers.SIDCoGP(), (557, 563, 619), (782, 851)),
    "everything": (ls.sparsifiers.Everything(), (25, 25, 25), (68, 68)),
}
VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, float]]] = {
    # of UnionTopK with 8 ranks at a density of 0.001: operations, bytes a coordinate
    "no memory": ({"memory": ls.memories.NoMemory()}, (209, 55)),
    "low pass": ({"memory": ls.memories.LowPass(0.1)}, (217, 106)),
    "momentum": ({"memory": ls.memories.MomentumCorrection(0.9)}, (228, 120)),
    "clipped": ({"memory": ls.memories.ClipByNorm(1.0)}, (224, 90)),
    "adam": ({"memory": ls.memories.AdamCorrection()}, (233, 183)),
    "second moment": ({"memory": ls.memories.SecondMoment()}, (352, 228)),
    "bfloat16": ({"dtype": torch.bfloat16}, (220, 74)),
    "in two buckets": ({"buckets": 2}, (214, 94)),
}


def held(costs: Costs, operations: int, bytes_each: float) -> None:
    found = costs.operations.total(), costs.bytes.total() / NUMEL
    assert found[0] <= operations, dict(costs.operations)
    assert found[1] <= bytes_each, str({name: count / NUMEL for name, count in costs.bytes.most_common(10)})
    assert found[1] > bytes_each - 4, "a dense pass more would go unnoticed: lower the row"


@pytest.mark.parametrize("name", by_default(BUDGET, 5))
def test_a_method_stays_within_its_budget(name: str) -> None:
    sparsifier, operations, bytes_each = BUDGET[name]
    for n, limit in zip((2, 64), operations[::2], strict=True):
        assert group_step(sparsifier, n).operations.total() <= limit
    held(group_step(sparsifier, density=0.01), operations[1], bytes_each[0])
    held(group_step(sparsifier, density=0.001), 2 * operations[1], bytes_each[1])  # SIDCo has more stages there


@pytest.mark.parametrize("name", by_default(VARIANTS, 3))
def test_the_default_stays_within_its_budget_with_other_settings(name: str) -> None:
    options, (operations, bytes_each) = VARIANTS[name]
    held(group_step(density=0.001, **options), operations, bytes_each)


@dataclass(frozen=True)
class OnceMore(ls.memories.Residual):
    """Passes over the accumulator once more than it must."""

    def absorb_(self, *args: Any) -> Absorbed:
        absorbed = super().absorb_(*args)
        absorbed.acc.mul_(1.0)
        return absorbed


def test_one_pass_more_is_noticed() -> None:
    with pytest.raises(AssertionError, match="mul_"):
        held(group_step(density=0.001, memory=OnceMore()), 214, BUDGET["union_top_k"][2][1])


def cost_of(compute: Any, *inputs: Tensor) -> tuple[dict[str, int], int]:
    with Costs(META) as costs:
        compute(*inputs)
    return dict(costs.operations), costs.bytes.total()


def test_bytes_are_those_that_a_kernel_reads_and_writes() -> None:
    x, places = torch.empty(1024, device=META), torch.empty(8, dtype=torch.int64, device=META)
    kib = 1024
    assert cost_of(lambda x: x + x, x) == ({"add": 1}, 8 * kib)
    assert cost_of(lambda x: x[::2].view(2, -1), x) == ({}, 0)
    assert cost_of(lambda x: torch.empty_like(x), x) == ({}, 0)
    assert cost_of(lambda x: x.zero_(), x) == ({"zero_": 1}, 4 * kib)
    assert cost_of(lambda x: x.mul_(2), x) == ({"mul_": 1}, 8 * kib)
    assert cost_of(lambda x: x[::4].abs(), x) == ({"abs": 1}, 4 * kib + kib)  # whole sectors
    assert cost_of(lambda x: x[places], x) == ({"index": 1}, 8 * 8 + 8 * 32 + 8 * 4)
    assert cost_of(lambda x: x.topk(1), x)[1] == 5 * 4 * kib + 4 + 8
    assert cost_of(lambda x: x.copy_(x[0]), x) == ({"copy_": 1}, 4 * kib + 4)
    assert cost_of(lambda x: torch.ones(3), x) == ({}, 0)  # on the host
