"""Momentum of averages that have waited, against dense momentum SGD of torch, and against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.momentum import Momentum, Stepped, has_velocities, spend_, spent

KINDS: list[dict[str, Any]] = [
    {},
    {"nesterov": True},
    {"maximize": True},
    {"foreach": True},
    {"fused": True},
    {"lr": torch.tensor(0.1)},
]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("waited", [1, 2, 7, 100, 100000])
def test_what_is_spent_is_a_mean_over_ages(momentum: float, waited: int) -> None:
    expected = 1 - sum(momentum**age for age in range(waited)) / waited
    assert spent(momentum, 1 / waited) == pytest.approx(expected, abs=1e-12)
    on_device = spent(momentum, torch.tensor(1 / waited, dtype=torch.float64))
    assert float(on_device) == pytest.approx(expected, abs=1e-9)


class Training:
    """A parameter whose gradient is sent every ``waited`` steps, as torch's SGD steps it."""

    def __init__(self, waited: int, settings: dict[str, Any], tensors: bool = False) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], **{"lr": 0.1, "momentum": 0.9, **settings})
        self.share: float | Tensor = torch.tensor(1 / waited, dtype=torch.float64) if tensors else 1 / waited

    @property
    def velocity(self) -> Tensor:
        velocity: Tensor = self.optimizer.state[self.parameter]["momentum_buffer"]
        return velocity

    def step(self, grad: Tensor, skip: Tensor | None = None) -> None:
        self.parameter.grad = grad.double()
        self.optimizer.step()
        by = Momentum.of(self.optimizer.param_groups[0])
        assert by is not None
        spend_([Stepped(self.parameter.detach(), self.parameter.grad, self.velocity)], by, self.share, skip)


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("tensors", [False, True])
def test_gradients_that_stay_the_same_lead_where_dense_training_leads(settings: dict[str, Any], tensors: bool) -> None:
    waited, rounds = 6, 4
    dense, sparse = Training(1, settings), Training(waited, settings, tensors)
    for number in range(rounds):
        grad = torch.tensor([1.0, 0.5, -0.25]) * (number + 1)
        for step in range(waited):
            dense.step(grad)
            sparse.step(waited * grad * (step == waited - 1))
        torch.testing.assert_close(sparse.parameter, dense.parameter, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sparse.velocity, dense.velocity, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [*KINDS, {"dampening": 0.3}])
@pytest.mark.parametrize("share", [0.01, 0.3])
def test_parameters_come_as_far_as_without_it(settings: dict[str, Any], share: float) -> None:
    plain, early = Training(1, settings), Training(1, settings)
    early.share = share
    for step in range(400):
        grad = torch.randn(3, generator=torch.Generator().manual_seed(step)) * (step < 20)
        for training in (plain, early):
            training.step(grad)
        if step == 20:
            assert not torch.allclose(plain.parameter, early.parameter, rtol=1e-3)
    torch.testing.assert_close(early.parameter, plain.parameter, rtol=1e-9, atol=1e-12)


def test_where_everything_arrives_it_is_torchs_step_bit_for_bit() -> None:
    dense, ours = Training(1, {}), Training(1, {})
    ours.share = 1.0
    for step in range(5):
        grad = torch.randn(3, generator=torch.Generator().manual_seed(step))
        dense.parameter.grad = grad.double()
        dense.optimizer.step()
        ours.step(grad)
    assert torch.equal(dense.parameter, ours.parameter) and torch.equal(dense.velocity, ours.velocity)


def test_a_skipped_step_leaves_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparse.momentum.PIECE_BYTES", 8)
    parameters = [torch.ones(size, dtype=dtype) for size, dtype in ((3, torch.float32), (4, torch.bfloat16)) * 2]
    stepped = [Stepped(p, torch.full_like(p, float("nan")), p + 1) for p in parameters]
    by = Momentum(0.1, 0.9, 1.0, False)
    spend_(stepped, by, 0.01, skip=torch.tensor(1.0))
    assert all(bool((each.parameter == 1).all() and (each.velocity == 2).all()) for each in stepped)
    stepped = [each._replace(grad=torch.ones_like(each.grad)) for each in stepped]
    spend_(stepped, by, 0.01, skip=torch.tensor(0.0))
    for each in stepped:
        part = spent(0.9, 0.01)
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[each.grad.dtype]
        torch.testing.assert_close(each.velocity, torch.full_like(each.velocity, 2 - part), rtol=tolerance, atol=0)
        expected = torch.full_like(each.parameter, 1 - part * 0.1 * 9)
        torch.testing.assert_close(each.parameter, expected, rtol=2 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cls", "settings", "has"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.SGD, {}, False),
        (torch.optim.SGD, {"momentum": 1.0}, False),
        (torch.optim.SGD, {"momentum": 0.9, "differentiable": True}, False),
        (torch.optim.RMSprop, {"momentum": 0.9}, False),
        (type("Other", (torch.optim.SGD,), {}), {"momentum": 0.9}, False),
    ],
)
def test_which_optimizers_have_velocities(cls: Any, settings: dict[str, Any], has: bool) -> None:
    served, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = cls([served], lr=0.1, **settings)
    assert has_velocities(optimizer, {id(served)}) == has
    assert not has_velocities(optimizer, {id(other)})
