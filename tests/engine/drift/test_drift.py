"""Ranks that train copies of the weights: on real ranks, against the rule in plain loops."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default
from tests.engine.drift.models import OPTIONS, Reference, batch, flat, is_sparse, loss_of, net, optimizers
from tests.ranks import Ranks
from tests.static_path import static_path

STEPS = 20


def train(kind: str, gain: bool, on_device: bool = False) -> tuple[Tensor, Tensor]:
    """Return this rank's weights, and the agreed ones of what is sparsified, in the order of the groups.

    Args:
        kind: of the optimizer.
        gain: see Drift.
        on_device: take the path of devices.
    """
    if on_device:
        with static_path():
            return train(kind, gain)
    torch.set_num_threads(1)
    model = net()
    ddp = DistributedDataParallel(model)
    memory = None if gain and kind != "sgd" else ls.memories.Drift(gain, "averages" if kind == "muon" else "steps")
    engine = ls.attach(ddp, **OPTIONS, exchange="reduce_union", memory=memory, watch=None)
    chosen = optimizers(kind, model.parameters())
    for step in range(STEPS):
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        for one in chosen:
            one.step()
            one.zero_grad()
    mine = flat(model.parameters())
    with engine.agreed():
        agreed = flat([p for p in model.parameters() if is_sparse(p)][::-1])
    return mine, agreed


@pytest.mark.filterwarnings("ignore:Lion|Muon")
@pytest.mark.parametrize(
    ("kind", "gain", "n"),
    by_default(
        [
            ("lion", True, 2),
            ("muon", True, 4),
            ("sgd", False, 2),
            ("lion", False, 4),
            ("muon", True, 2),
            ("sgd", True, 4),
            ("lion", True, 4),
        ],
        3,
    ),
)
def test_real_ranks_equal_the_rule_in_loops_bit_for_bit(
    request: pytest.FixtureRequest, kind: str, gain: bool, n: int
) -> None:
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[n])
    torch.set_num_threads(1)
    reference = Reference(kind, n, gain)
    reference.train(range(STEPS))
    found = ranks(train, kind, gain)
    for rank, (mine, agreed) in enumerate(found):
        assert torch.equal(agreed, reference.agreed)
        assert torch.equal(mine, reference.weights()[rank])
    assert not torch.equal(found[0][0], found[1][0])


@pytest.mark.filterwarnings("ignore:Lion|Muon")
@pytest.mark.parametrize("kind", ["lion", "muon"])
def test_the_path_of_devices_finds_the_same(two_ranks: Ranks, kind: str) -> None:
    host, device = two_ranks(train, kind, True), two_ranks(train, kind, True, True)
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(one[0], other[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(one[1], other[1], atol=1e-6, rtol=0)
