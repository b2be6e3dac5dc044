"""Order of streams and lifetime of memory where kernels in Triton do the work, by vector clocks: :mod:`tests.streams`.

The engine's own steps, as one of two ranks that bring the same, in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import group
from lightning_sparse.methods.grouping import make_plan
from lightning_sparse.ops.on_cuda import on_cuda
from tests.integrations.test_telling import Lines
from tests.mirror import mirrored_ranks
from tests.ops.interpreted import in_triton, interpret
from tests.streams import FakeStream, Streams, play_kernels

interpret()

pytestmark = pytest.mark.usefixtures("silent")
RULES = ls.Rules(dense_numel=0)
"""Weights are sparse, biases between them dense: what is sparse lies in several runs."""
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)


@pytest.fixture
def kernels(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    """Streams that see launches, too."""
    from lightning_sparse.ops import adam, momentum

    for module in (adam, momentum):  # rehearsals have tests of their own
        monkeypatch.setattr(module, "_rehearse", lambda *_: None)
    monkeypatch.setattr(adam, "_rehearse_at", lambda *_: None)
    monkeypatch.setattr(adam, "HOST", "nowhere")  # where steps are taken one by one
    play_kernels(monkeypatch, streams)
    with in_triton() as chosen:
        yield streams
    assert chosen.trouble is None


def train(optimizer: Callable[..., torch.optim.Optimizer], biases: bool = True, **options: Any) -> None:
    """Steps, of which one is skipped, and other groups; without biases, a gradient is one run."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(12, 10, biases), nn.ReLU(), nn.Linear(10, 9, biases)))
    with mirrored_ranks(2):
        engine = ls.attach(ddp, density=0.1, rules=RULES, watch=None, single_device="sparse", **options)
    made = optimizer(ddp.parameters())
    for step in range(4):
        loss = ddp(torch.randn(4, 12)).square().mean()
        (loss * (float("inf") if step == 1 else 1.0)).backward()
        made.step()
        made.zero_grad()
        if step == 2:
            sizes = [p for each in engine.groups for p in each.parameters][::-1]
            engine.regroup(make_plan(sizes, "layer", RULES))
    assert engine.skipped_steps == 1


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda case: case.func.__name__)
def test_kernels_wait_for_each_other_and_memory_is_not_given_back_in_use(
    kernels: Streams, optimizer: Callable[..., torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "rehearse", lambda *_: None)  # on the main stream, before the first step
    train(optimizer)
    on = {stream: {name for name, where in kernels.launched if where == stream} for stream in ("side", "main")}
    assert {"_hear", "_list", "_average", "_subtract_at", "_form" if optimizer is SGD else "_weigh"} <= on["side"]
    assert on["main"] == ({"_spend"} if optimizer is SGD else {"_step_at"})
    assert not kernels.findings, "\n".join(dict.fromkeys(kernels.findings))


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_kernel_that_does_not_wait_is_noticed(kernels: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "wait_stream", lambda *_: None)
    train(SGD, biases=False, grouping="model")
    names = {name for name, _ in kernels.launched}
    assert any(finding.split()[0] in names for finding in kernels.findings)


@pytest.mark.thorough
@pytest.mark.parametrize(("memory", "prepared"), [(None, "follow"), ("second_moment", "attach")])
def test_kernels_are_compiled_before_the_first_step_with_a_line_that_says_so(
    kernels: Streams, memory: str | None, prepared: str
) -> None:
    ddp = DistributedDataParallel(nn.Linear(12, 10))
    with Lines() as lines:
        with mirrored_ranks(2):
            engine = ls.attach(ddp, density=0.1, rules=RULES, memory=memory, single_device="sparse")
        assert bool(on_cuda._tried) == (prepared == "attach")
        engine._show([ADAMW(ddp.parameters())])
        tried = set(on_cuda._tried)
        assert {"weigh_", "top_k_and_stripe", "packed", "divisors", "hand_over_"} <= {what[0] for what in tried}
        assert [line for line in lines if "kernels in Triton are compiled" in line] == lines
        ddp(torch.randn(4, 12)).square().mean().backward()
        assert not any(isinstance(what[0], str) for what in on_cuda._tried - tried)  # of the exchange
        engine.close()
