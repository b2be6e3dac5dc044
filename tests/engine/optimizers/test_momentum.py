"""Momentum of averages that have waited, against dense momentum SGD of torch, and against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops.momentum import Momentum, Spending, Stepped, has_velocities, spent
from tests.covering import by_default
from tests.fake_cuda import CUDA, fake_cuda

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
    assert spent(momentum, waited) == pytest.approx(expected, abs=1e-12)


class Training:
    """A parameter, as torch's SGD steps it; ``hosted=False``: by the operations of a device."""

    def __init__(self, settings: dict[str, Any], hosted: bool = True, early: bool = True) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], **{"lr": 0.1, "momentum": 0.9, **settings})
        self.waited = torch.zeros_like(self.parameter, dtype=torch.uint8)
        self.hosted, self.early = hosted, early

    @property
    def velocity(self) -> Tensor:
        velocity: Tensor = self.optimizer.state[self.parameter]["momentum_buffer"]
        return velocity

    def step(self, grad: Tensor, skip: Tensor | None = None) -> None:
        self.parameter.grad = grad.double()
        self.optimizer.step()
        by = Momentum.of(self.optimizer.param_groups[0])
        assert by is not None
        if not self.hosted:
            skip = torch.zeros(())
        if self.early:
            Spending().spend_(
                [Stepped(self.parameter.detach(), self.parameter.grad, self.velocity, self.waited)], by, skip
            )


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("hosted", [False, True])
def test_gradients_that_stay_the_same_lead_where_dense_training_leads(settings: dict[str, Any], hosted: bool) -> None:
    """Each coordinate is sent after a time of its own, and then is where it would be."""
    every = torch.tensor([[1, 2], [3, 6]])
    dense, sparse = Training(settings, early=False), Training(settings, hosted)
    kept = torch.zeros(2, 2)
    for step in range(24):
        grad = torch.tensor([[1.0, 0.5], [-0.25, 2.0]]) * (step // 6 + 1)
        kept += grad
        arrives = (step + 1) % every == 0
        dense.step(grad)
        sparse.step(kept * arrives)
        kept[arrives] = 0
        here = arrives & ((step % 6 == 5) | (every < 4))
        torch.testing.assert_close(sparse.parameter[here], dense.parameter[here], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(sparse.velocity[here], dense.velocity[here], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "hosted"),
    by_default(
        [
            pytest.param(settings, hosted, marks=[pytest.mark.thorough] * (number % 2 == hosted))
            for number, settings in enumerate([*KINDS, {"dampening": 0.3}])
            for hosted in (False, True)
        ],
        4,
    ),
)
def test_parameters_come_as_far_as_without_it(settings: dict[str, Any], hosted: bool) -> None:
    plain, early = Training(settings, early=False), Training(settings, hosted)
    for step in range(420):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(2, 2, generator=generator) * (torch.rand(2, 2, generator=generator) < 0.2) * (step < 40)
        for training in (plain, early):
            training.step(grad)
        if step == 40:
            assert not torch.allclose(plain.parameter, early.parameter, rtol=1e-3)
    torch.testing.assert_close(early.parameter, plain.parameter, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("hosted", [False, True])
def test_where_everything_arrives_it_is_torchs_step_bit_for_bit(hosted: bool) -> None:
    dense, ours = Training({}, early=False), Training({}, hosted)
    for step in range(5):
        grad = torch.randn(2, 2, generator=torch.Generator().manual_seed(step))
        dense.step(grad)
        ours.step(grad)
    assert torch.equal(dense.parameter, ours.parameter) and torch.equal(dense.velocity, ours.velocity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["plain", "channels_last", "transposed", "gapped", "other_grad"])
def test_both_ways_do_the_same_in_any_layout(dtype: torch.dtype, form: str) -> None:
    def laid(x: Tensor) -> Tensor:
        if form == "channels_last":
            return x.to(memory_format=torch.channels_last)
        if form == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return torch.stack([x, x], -1)[..., 0] if form == "gapped" else x

    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, 3, 5, 2, generator=generator).to(dtype) for _ in range(3)]
    values[1] *= torch.rand(values[1].shape, generator=generator) < 0.3
    waited = torch.randint(0, 256, (4, 3, 5, 2), generator=generator, dtype=torch.uint8)
    found = []
    for skip in (None, torch.zeros(())):
        parameter, grad, velocity = (laid(x.clone()) for x in values)
        one = Stepped(parameter, values[1].clone() if form == "other_grad" else grad, velocity, laid(waited.clone()))
        Spending().spend_([one], Momentum(0.1, 0.9, 1.0, False), skip)
        found.append(one)
    for host, device in zip(*found, strict=True):
        assert torch.equal(host, device)
    arrived = values[1] != 0
    expected = torch.where(arrived, 0, waited.int().clamp(max=254) + 1)
    assert torch.equal(found[0].waited.int(), expected.to(torch.int32))
    shares = torch.tensor([spent(0.9, max(1, t)) for t in range(256)])[waited.long().clamp(max=254) + 1]
    moved = values[1].float() * shares
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found[0].velocity.float(), values[2].float() - moved, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        found[0].parameter.float(), values[0].float() - 0.9 * moved, rtol=tolerance, atol=tolerance
    )


def test_devices_work_in_pieces_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(3,), (2, 2), (5,), (1,), (0,), (4,)]
    kinds = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float64]
    found = []
    for piece in (1 << 24, 5, 1):
        monkeypatch.setattr("lightning_sparse.ops.momentum.PIECE", piece)
        generator = torch.Generator().manual_seed(1)
        stepped = []
        for size, kind in zip(sizes, kinds, strict=True):
            values = [torch.randn(size, generator=generator).to(kind) for _ in range(3)]
            waited = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
            stepped.append(Stepped(*values, waited))
        Spending().spend_(stepped, Momentum(torch.tensor(0.1), 0.9, 1.0, True), torch.zeros(()))
        found.append(stepped)
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(x, y) for other in others for x, y in zip(one, other, strict=True))
        assert not one.grad.numel() or not bool(one.waited.any())


@pytest.mark.parametrize("skips", [False, True])
def test_on_a_device_the_host_waits_for_nothing(skips: bool) -> None:
    with fake_cuda():
        stepped = []
        for size in ((3,), (4, 5)):
            parameter, grad, velocity = (torch.empty(size, device=CUDA) for _ in range(3))
            stepped.append(Stepped(parameter, grad, velocity, torch.empty(size, dtype=torch.uint8, device=CUDA)))
        for rate in (0.1, torch.empty((), device=CUDA)):
            skip = torch.empty((), device=CUDA) if skips else None
            Spending().spend_(stepped, Momentum(rate, 0.9, 1.0, False), skip)


def test_at_a_rate_of_zero_nothing_is_spent() -> None:
    training = Training({"lr": 0.0})
    for step in range(5):
        training.step(torch.ones(2, 2) * (step == 3))
    assert torch.equal(training.velocity, torch.full_like(training.velocity, 0.9))
    assert torch.equal(training.waited, torch.ones_like(training.waited))


def test_a_skipped_step_leaves_everything() -> None:
    parameter = torch.ones(3)
    waited = torch.tensor([0, 4, 255], dtype=torch.uint8)
    one = Stepped(parameter, torch.full((3,), float("nan")), parameter + 1, waited.clone())
    Spending().spend_([one], Momentum(0.1, 0.9, 1.0, False), skip=torch.tensor(1.0))
    assert bool((one.parameter == 1).all() and (one.velocity == 2).all()) and torch.equal(one.waited, waited)


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
