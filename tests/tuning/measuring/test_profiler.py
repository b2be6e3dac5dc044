"""When backward reaches each layer: sleeps in backward are found where they are, alone and between real ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.measuring.profiler import BackwardTimer, _by_module
from lightning_sparse.tuning.performance.profile import LayerTime
from tests.ranks import Ranks

CPU = torch.device("cpu")
NAP = 0.05
"""Seconds; everything else here takes microseconds. Clocks differ: a nap may be measured as a little less."""


class Sleepy(torch.autograd.Function):
    """The identity, whose backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Registered as head, trunk, spare, body; used as trunk, body, head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 4)
        self.trunk = nn.Linear(4, 4, bias=False)
        self.spare = nn.Linear(4, 2)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor, nap: float = 0.0, swap: bool = False) -> Tensor:
        first, second = (self.body, self.trunk) if swap else (self.trunk, self.body)
        return self.head(Sleepy.apply(second(first(x)), nap))


def timed(module: nn.Module) -> BackwardTimer:
    return BackwardTimer(module, dict(module.named_parameters()), CPU)


def step(net: nn.Module, **options: Any) -> None:
    net(torch.ones(2, 4), **options).sum().backward()


def profiled(timer: BackwardTimer, net: nn.Module, steps: int = 5, **options: Any) -> tuple[list[LayerTime], float]:
    for _ in range(steps):
        step(net, **options)
        timer.keep()
    return timer.result(TorchCollective())


def seconds(layers: list[LayerTime]) -> dict[str, float]:
    return {layer.name: layer.backward_seconds for layer in layers}


def test_layers_are_found_in_the_order_of_backward_with_the_slow_one_slow() -> None:
    net = Net()
    layers, rest = profiled(timed(net), net, nap=NAP)
    # Within a layer, in the order of gradients; what was never used comes last, in reverse order of registration.
    assert [layer.name for layer in layers] == ["head", "body", "trunk", "spare"]
    assert {layer.name: set(layer.parameters) for layer in layers} == {
        "head": {"head.weight", "head.bias"},
        "body": {"body.weight", "body.bias"},
        "trunk": {"trunk.weight"},
        "spare": {"spare.weight", "spare.bias"},
    }
    assert layers[-1].parameters == ("spare.bias", "spare.weight")
    assert [layer.numel for layer in layers] == [20, 20, 16, 10]
    found = seconds(layers)
    assert found["body"] >= NAP * 0.9
    assert found["spare"] == 0
    assert 0 < found["head"] < NAP / 2
    assert 0 < found["trunk"] < NAP / 2
    assert 0 <= rest < NAP


def test_what_is_not_backward_is_the_rest() -> None:
    net = Net()
    timer = timed(net)
    for _ in range(4):
        step(net)
        timer.keep()
        time.sleep(NAP)
    layers, rest = timer.result(TorchCollective())
    assert rest >= NAP * 0.9
    assert sum(seconds(layers).values()) < NAP / 2


def test_only_the_last_backward_counts_where_gradients_accumulate() -> None:
    net = Net()
    timer = timed(net)
    for _ in range(4):
        step(net, nap=NAP)
        step(net)
        timer.keep()
    layers, rest = timer.result(TorchCollective())
    assert sum(seconds(layers).values()) < NAP / 2
    assert rest >= NAP * 0.9


def test_a_backward_may_be_kept_when_it_has_just_begun() -> None:
    net = Net()
    timer = timed(net)
    hook = net.head.weight.register_post_accumulate_grad_hook(lambda _: timer.keep())
    for _ in range(4):
        step(net, nap=NAP)
    hook.remove()
    layers, _ = timer.result(TorchCollective())
    assert [layer.name for layer in layers] == ["head", "body", "trunk", "spare"]
    assert seconds(layers)["body"] >= NAP * 0.9


def test_a_backward_that_was_cut_short_leaves_the_others_as_they_are() -> None:
    net = Net()
    timer = timed(net)
    for _ in range(3):
        step(net, nap=NAP)
        timer.keep()

    def end(_: Tensor) -> None:
        timer.keep()
        timer.close()

    net.head.weight.register_post_accumulate_grad_hook(end)
    step(net)
    assert len(timer._steps[-1]) < len(timer._steps[0])
    layers, _ = timer.result(TorchCollective())
    assert [layer.name for layer in layers] == ["head", "body", "trunk", "spare"]
    assert seconds(layers)["body"] >= NAP * 0.9


def test_forwards_without_gradients_do_not_count() -> None:
    net = Net()
    timer = timed(net)
    for _ in range(3):
        loss = net(torch.ones(2, 4)).sum()
        time.sleep(NAP)
        with torch.no_grad():
            net(torch.ones(2, 4))
        loss.backward()
        timer.keep()
    layers, _ = timer.result(TorchCollective())
    assert seconds(layers)["head"] >= NAP  # from the end of the forward that backward belongs to


def test_nothing_is_watched_after_the_end() -> None:
    net = Net()
    timer = timed(net)
    step(net)
    assert len(timer._marks) == 6  # the end of forward, and five parameters
    timer.close()
    timer.close()
    step(net)
    assert len(timer._marks) == 6
    assert not net._forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_fewer_than_two_backward_passes_are_no_profile() -> None:
    net = Net()
    timer = timed(net)
    with pytest.raises(RuntimeError, match=r"at least 2 backward passes to profile, but the ranks have seen \[0\]"):
        timer.result(TorchCollective())
    with pytest.raises(RuntimeError, match=r"seen \[1\]\. Does training_step return a loss that depends on"):
        profiled(timer, net, 1)
    assert len(profiled(timer, net, 1)[0]) == 4


def test_a_layer_is_done_with_the_last_of_its_parameters() -> None:
    numels = {"a.w": 1, "a.b": 2, "b.w": 4, "b.b": 8, "c": 16, "b.x.w": 32}
    order = ["a.w", "b.w", "a.b", "c", "b.b", "b.x.w"]
    assert _by_module(order, numels, [1, 2, 4, 8, 16, 32]) == [
        LayerTime("a", ("a.w", "a.b"), 3, 7),
        LayerTime("c", ("c",), 16, 8),
        LayerTime("b", ("b.w", "b.b"), 12, 16),
        LayerTime("b.x", ("b.x.w",), 32, 32),
    ]


def on_ranks(naps: list[float], swapped: list[bool]) -> tuple[list[LayerTime], float]:
    rank, net = dist.get_rank(), Net()
    timer = timed(net)
    for _ in range(5):
        step(net, nap=naps[rank], swap=swapped[rank])
        timer.keep()
    return timer.result(TorchCollective())


def test_ranks_get_the_mean_of_their_times_in_the_order_of_the_first(two_ranks: Ranks) -> None:
    first, second = two_ranks(on_ranks, [0.0, 2 * NAP], [False, False])
    assert first == second
    assert NAP * 0.9 <= seconds(first[0])["body"] < 2 * NAP
    for swapped, order in (([False, True], ["head", "body", "trunk"]), ([True, False], ["head", "trunk", "body"])):
        first, second = two_ranks(on_ranks, [0.0, 0.0], swapped)
        assert first == second
        assert [layer.name for layer in first[0]][:3] == order


def without_backward() -> str:
    net = Net()
    timer = timed(net)
    for _ in range(3):
        if dist.get_rank() == 0:
            step(net)
            timer.keep()
    try:
        timer.result(TorchCollective())
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_without_backward_is_an_error_on_all(two_ranks: Ranks) -> None:
    for told in two_ranks(without_backward):
        assert "Expected at least 2 backward passes to profile, but the ranks have seen [3, 0]" in told
