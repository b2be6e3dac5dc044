"""States go on where parameters lie otherwise in memory, as after `model.to(memory_format=torch.channels_last)`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.layout import is_layout, layout_of, order_from
from lightning_sparse.engine.state.merging import with_layouts
from tests.trainers import EVERYTHING_SPARSE

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


class Training:
    """A convolution behind an engine."""

    def __init__(self, last: bool, kind: Any, **options: Any) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
        if last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = DistributedDataParallel(model)
        chosen: dict[str, Any] = {"density": 0.1, "rules": EVERYTHING_SPARSE, "single_device": "sparse", "watch": None}
        self.engine = ls.attach(self.model, **chosen | options)
        self.optimizer = kind(model.parameters(), lr=0.01)

    def backward(self, seed: int) -> None:
        batch = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()

    def step(self, seed: int) -> None:
        self.backward(seed)
        self.optimizer.step()

    def remembered(self, state: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """What is remembered of each parameter, in its shape."""
        state = self.engine.state_dict() if state is None else state
        found = {}
        for name, vectors in state["parameters"].items():
            parameter = self.engine.stepper.parameters[name]
            for key, vector in vectors.items():
                found[f"{name} {key}"] = vector.as_strided(parameter.shape, parameter.stride()).contiguous()
        return found

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@pytest.mark.parametrize("kind", [SGD, ADAMW])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("within", [False, True])
def test_a_training_goes_on_in_another_memory_format(one_rank: None, kind: Any, last: bool, within: bool) -> None:
    one, alike, other = Training(not last, kind), Training(not last, kind), Training(last, kind)
    for seed in range(4):
        one.step(seed)
    seen = []

    def look(*_: Any) -> None:
        seen.append((one.engine.state_dict(), copy.deepcopy(one.model.state_dict())))

    if within:  # averages that nobody has applied go back into the residuals; Adam's are applied before it steps
        one.engine._binding.watchers.append(look)
        one.step(4)
    else:
        look()
    [(state, weights)] = seen
    assert bool(state["pending"]) == (within and kind is SGD)
    for each in (alike, other):
        each.model.load_state_dict(weights)
        assert each.engine.load_state_dict(state) == []
    expected, found = alike.remembered(), other.remembered()
    assert expected.keys() == found.keys()
    assert any(bool(x.any()) for x in expected.values())
    assert all(torch.equal(x, expected[key]) for key, x in found.items())
    for each in (alike, other):
        assert ls.flush(each.engine, each.optimizer) > 0
    assert torch.equal(alike.weights(), other.weights())


def test_a_part_in_another_order_is_dropped_and_told() -> None:
    plain, last = [4, 3, 2, 2, 12, 4, 2, 1], [4, 3, 2, 2, 12, 1, 6, 3]
    state: dict[str, Any] = {"parameters": {"a": {"residual": torch.ones(24)}, "b": {"residual": torch.ones(3)}}}
    state |= {"spans": {"a": [0, 24, 48], "b": [0, 3, 6]}, "layouts": {"a": plain, "b": [2, 3, 3, 1]}}
    state |= {"pending": {"a": {"values": torch.ones(24)}}}
    found, told = with_layouts(state, {"a": last, "b": [2, 3, 3, 1]})
    assert found["parameters"] == {"a": {}, "b": state["parameters"]["b"]}
    assert not found["pending"]
    assert len(told) == 1 and told[0].startswith("a lies in another order")


def test_layouts_are_those_of_flat_coordinates() -> None:
    conv = torch.arange(48.0).view(4, 3, 2, 2)
    last = conv.to(memory_format=torch.channels_last)
    order = order_from(layout_of(conv), layout_of(last))
    assert order is not None
    assert torch.equal(conv.flatten()[order], last.as_strided((48,), (1,)))
    assert order_from(layout_of(last), layout_of(last)) is None
    assert order_from(layout_of(torch.ones(5, 1, 1, 1)), [5, 1, 1, 1, 1, 5, 5, 5]) is None
    assert order_from([2, 24, 24, 1], layout_of(last)) is None
    assert all(is_layout(layout_of(x)) for x in (conv, last, conv[:, :, 0], conv.transpose(1, 2)))
    assert not any(map(is_layout, ([2, 3, 4, 1], [2, 3, 0, 0], [2, 3, 1], [0, 3, 3, 1])))
