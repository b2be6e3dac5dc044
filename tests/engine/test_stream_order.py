"""Order of streams and lifetime of memory in the engine's real steps, by vector clocks; see :mod:`tests.streams`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from lightning_sparse.engine.drivers import Going
from lightning_sparse.methods.grouping import make_plan
from tests.covering import by_default
from tests.streams import FakeStream, Streams

SPARSE = ls.Rules(dense_ndim=0, dense_numel=0)


class Branches(nn.Module):
    """A trunk and two branches, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 30)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        x = self.trunk(x).relu()
        return sum(getattr(self, name)(x) for name in branches.split("+"))


class Training:
    """DDP with an engine and an optimizer."""

    def __init__(self, ddp: dict[str, Any] | None = None, momentum: float = 0.0, **options: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(Branches(), **(ddp or {}))
        chosen = {"density": 0.05, "grouping": "layer", "rules": SPARSE}
        self.engine = ls.attach(self.ddp, single_device="sparse", **chosen | options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.1, momentum=momentum)
        self.max_norm: float | None = None

    def step(self, branches: str = "left+right", scale: float = 1.0) -> None:
        (scale * self.ddp(torch.randn(4, 30), branches).square().mean()).backward()
        if self.max_norm is not None:
            self.engine.clip_grad_norm_(self.ddp.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 4) -> None:
        for _ in range(count):
            self.step()


class Regrouping:
    """Changes groups within the first hook of a step."""

    def __init__(self, *groupings: str) -> None:
        self.left = list(groupings)

    def before_step(self, engine: Engine) -> None:
        if self.left and engine.step > 0:
            regroup(engine, self.left.pop(0))

    def close(self) -> None:
        pass


def regroup(engine: Engine, grouping: str) -> None:
    sizes = [p for group in engine.groups for p in group.parameters][::-1]
    engine.regroup(make_plan(sizes, grouping, SPARSE))


def plain_steps() -> None:
    Training().steps()


def every_memory() -> None:
    of = ls.memories
    settled = of.LowPass(0.25), of.MomentumCorrection(0.5), of.ClipByNorm(4.0), of.WeightDecay(1e-2)
    for memory in (of.NoMemory(), *settled, of.AdamCorrection()):
        Training(memory=memory).steps(2)


def other_sparsifiers() -> None:
    for sparsifier in ("top_k", "exdyna", "micro", "ok_top_k", "sidco_e", "everything"):
        Training(sparsifier=sparsifier).steps(2)


def a_skipped_step() -> None:
    training = Training(momentum=0.9)
    for scale in (1.0, float("inf"), 1.0, 1.0):
        training.step(scale=scale)
    assert training.engine.skipped_steps == 1


def a_skipped_step_of_a_fused_optimizer() -> None:
    training = Training()
    training.optimizer = torch.optim.Adam(training.ddp.parameters(), betas=(0.0, 0.999), fused=True)
    for scale in (1.0, float("inf"), 1.0, 1.0):
        training.step(scale=scale)
    assert training.engine.skipped_steps == 1


def steps_of_adam() -> None:
    for fused in (False, True):
        training = Training()
        training.optimizer = torch.optim.AdamW(training.ddp.parameters(), fused=fused)
        for scale in (1.0, float("inf"), 1.0):
            training.step(scale=scale)
        assert training.engine.skipped_steps == 1
        training.engine.state_dict()


def sharded_replicas() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Branches(), mesh=mesh["shard"])
    engine = ls.attach_hsdp(model, mesh, density=0.05, grouping="layer", rules=SPARSE, single_device="sparse")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for branches in ("left+right", "left", "left+right"):
        model(torch.randn(4, 30), branches).square().mean().backward()
        engine.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def clipped_gradients() -> None:
    training = Training()
    training.max_norm = 0.1
    training.steps(3)


def skipped_second_moments() -> None:
    training = Training(memory=ls.memories.SecondMoment())
    for scale in (1.0, float("inf"), 1.0):
        training.step(scale=scale)


def several_buckets_of_a_group() -> None:
    Training({"bucket_cap_mb": 0.004}, grouping="model").steps()


def loss_scale() -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    for _ in range(4):
        scaler.scale(training.ddp(torch.randn(4, 30), "left+right").square().mean()).backward()
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()


def regroup_in_the_first_hook() -> None:
    training = Training({"bucket_cap_mb": 0.004}, observers=[Regrouping("model", "layer", "bucket")], bucket_cap_mb=25)
    training.steps(6)
    assert [group.name for group in training.engine.groups] == ["bucket0"]


def regroup_between_steps() -> None:
    training = Training(memory=ls.memories.MomentumCorrection(0.5))
    for grouping in ("model", "layer"):
        training.steps(2)
        training.engine.summary()
        regroup(training.engine, grouping)
    training.steps(2)


def learning_rates() -> None:
    # So few are sent that parameters wait, whose residuals are then looked at.
    training = Training(
        memory=ls.memories.Residual(rates=True), watch=ls.Watch(every=1), grouping="model", density=0.001
    )
    for lr in (0.1, 0.05, 0.02, 0.2):
        training.optimizer.param_groups[0]["lr"] = lr
        training.step()


def watchdogs() -> None:
    Training(watch=ls.Watch(every=1)).steps()


def summaries() -> None:
    training = Training()
    for _ in range(3):
        training.step()
        assert training.engine.summary()["density"] > 0
        training.engine._group_summaries()
        assert training.engine.residual("trunk.weight") is not None


def flush() -> None:
    training = Training()
    training.steps(2)
    training.engine.summary()  # looks at what is then taken
    ls.flush(training.engine, [training.optimizer])
    training.steps(2)
    training.engine._flush_next_step()
    training.steps(2)


def states() -> None:
    training = Training(memory=ls.memories.MomentumCorrection(0.5))
    training.steps(2)
    state = training.engine.state_dict()
    training.steps(2)
    training.engine.summary()
    training.engine.load_state_dict(state)
    training.steps(2)


def unused_parameters() -> None:
    training = Training({"find_unused_parameters": True})
    for branches in ("left+right", "left", "right", "left+right", "left"):
        training.step(branches)


def static_graph() -> None:
    Training({"static_graph": True}).steps()


def bucket_views() -> None:
    Training({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.004}).steps()


def as_ddp_does() -> None:
    training = Training(density=1.0, sparsifier="everything", rules=ls.Rules(["*"]), grouping="bucket")
    training.steps(2)
    assert training.engine._go_direct()
    training.step()
    training.step(scale=float("inf"))
    training.steps(2)


HIDDEN: dict[str, Any] = {"overlap": True, "ddp": {"bucket_cap_mb": 0.004}}


def within_backward() -> None:
    for memory in (None, ls.memories.NoMemory(), ls.memories.MomentumCorrection(0.5)):
        training = Training(memory=memory, **HIDDEN)
        training.steps()
        assert training.engine.stepper._waiting is None


def within_backward_with_adam() -> None:
    training = Training(overlap=True, ddp={"bucket_cap_mb": 0.004, "gradient_as_bucket_view": True})
    training.optimizer = torch.optim.AdamW(training.ddp.parameters(), fused=True)
    for scale in (1.0, 1.0, float("inf"), 1.0, 1.0):
        training.step(scale=scale)
    assert training.engine.skipped_steps == 1


def states_within_backward() -> None:
    training = Training(watch=ls.Watch(every=1), grouping="model", **HIDDEN)
    training.steps(2)
    for _ in range(2):
        training.ddp(torch.randn(4, 30), "left+right").square().mean().backward()
        training.engine.state_dict()
        training.optimizer.step()
        training.engine.summary()
        training.optimizer.zero_grad()


def regroup_within_backward() -> None:
    training = Training(observers=[Regrouping("model", "layer", "bucket")], bucket_cap_mb=25, **HIDDEN)
    training.steps(6)
    assert [group.name for group in training.engine.groups] == ["bucket0"]


RUNS: list[Callable[[], None]] = [
    other_sparsifiers,
    steps_of_adam,
    sharded_replicas,
    clipped_gradients,
    every_memory,
    plain_steps,
    a_skipped_step,
    a_skipped_step_of_a_fused_optimizer,
    skipped_second_moments,
    several_buckets_of_a_group,
    loss_scale,
    regroup_in_the_first_hook,
    regroup_between_steps,
    learning_rates,
    watchdogs,
    summaries,
    flush,
    states,
    unused_parameters,
    static_graph,
    bucket_views,
    as_ddp_does,
    within_backward,
    within_backward_with_adam,
    states_within_backward,
    regroup_within_backward,
]


@pytest.mark.filterwarnings("ignore:Nothing is sparsified")
@pytest.mark.parametrize(
    "run",
    by_default(RUNS[-4:] + RUNS[:-4], 5),
    ids=lambda run: run.__name__,
)
def test_streams_wait_for_each_other_and_memory_is_not_given_back_in_use(
    streams: Streams, run: Callable[[], None]
) -> None:
    run()
    beside = any(life.uses.keys() >= {"main", "side"} for life in streams.lives.values())
    assert beside != (run is as_ddp_does)  # where DDP averages alone
    assert not streams.findings, "\n".join(dict.fromkeys(streams.findings))


def test_a_step_of_adam_hardly_waits(streams: Streams) -> None:
    training = Training()
    training.optimizer = torch.optim.AdamW(training.ddp.parameters(), fused=True)
    training.steps(3)
    before = streams.host_waits
    training.ddp(torch.randn(4, 30), "left+right").square().mean().backward()
    begun = streams.host_waits
    training.optimizer.step()
    assert (begun - before, streams.host_waits - begun) == (1, 1)  # whether gradients are finite, and averages


def test_a_backward_that_exchanges_waits_once(streams: Streams) -> None:
    training = Training(**HIDDEN)
    training.steps(3)
    before = streams.host_waits
    training.ddp(torch.randn(4, 30), "left+right").square().mean().backward()
    begun = streams.host_waits
    training.optimizer.step()
    # Whether gradients are finite, whether some were changed, and averages.
    assert (begun - before, streams.host_waits - begun) == (1, 2)


def test_who_waits_for_the_device_hears_of_a_rank_that_has_failed(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, asked = Training(), list[str]()
    training.steps(2)
    monkeypatch.setattr(training.engine.stepper.comm, "wait_until", lambda done, what: asked.append(what))
    training.step()
    assert asked == ["the exchange"] * 2  # whether gradients are finite, and whether averages are


@pytest.mark.parametrize("device", ["streams", "one_rank"])
def test_no_handler_runs_between_messages_that_share_a_group_with_others(
    device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(device)
    training, stepped, go_on = Training(), list[bool](), Going._go_on
    weight = training.ddp.module.trunk.weight
    training.step()
    before = weight.detach().clone()

    def then_signal(self: Going[Any], answer: Tensor | None) -> None:
        go_on(self, answer)
        if answer is not None:  # before the first message, ranks wait for headers, and handlers may run
            os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(Going, "_go_on", then_signal)
    handler = signal.signal(signal.SIGUSR1, lambda *_: stepped.append(not torch.equal(weight, before)))
    try:
        training.step()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert all(stepped) == (device == "streams")
    assert stepped


# Each of these is what the engine relies on; without it something must be found.
@pytest.mark.parametrize(
    ("forgotten", "run"),
    [
        ("wait_stream", plain_steps),
        ("wait_stream", unused_parameters),
        ("wait_stream", flush),
        ("wait_stream", sharded_replicas),
        ("wait_stream", within_backward),
    ],
)
def test_an_engine_that_forgets_to_wait_is_noticed(
    streams: Streams, forgotten: str, run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStream, forgotten, lambda *_: None)
    run()
    assert streams.findings


class TestTheDetectorItself:
    """On two streams and three operations."""

    def test_reading_what_another_stream_writes(self) -> None:
        with Streams() as streams:
            side = streams.new("side")
            x = torch.ones(3)
            with streams.on(side):
                y = x + 1
            [finding] = streams.findings
            assert "add" in finding
            streams.main.wait_stream(side)
            _ = y + 1
            assert len(streams.findings) == 1

    def test_writing_what_another_stream_reads(self) -> None:
        with Streams() as streams:
            side = streams.new("side")
            x = torch.ones(3)
            side.wait_stream(streams.main)
            with streams.on(side):
                _ = x + 1
            assert not streams.findings
            x.zero_()
            assert len(streams.findings) == 1

    def test_two_streams_may_read(self) -> None:
        with Streams() as streams:
            side = streams.new("side")
            x = torch.ones(3)
            side.wait_event(streams.main.record_event())
            with streams.on(side):
                _ = x + 1
            _ = x + 2
            assert not streams.findings

    @pytest.mark.parametrize("waits", [True, False])
    def test_memory_given_back_in_use(self, waits: bool) -> None:
        with Streams() as streams:
            side = streams.new("side")
            x = torch.ones(3)
            side.wait_stream(streams.main)
            with streams.on(side):
                _ = x[1:] + 1  # through a view, which keeps nothing
            del x
            with streams.on(side):
                _ = torch.ones(3)  # from the side stream's own memory
            if waits:
                streams.main.wait_stream(side)
            _ = torch.ones(3)
            assert len(streams.findings) == (not waits)

    def test_the_host_orders_what_it_has_waited_for(self) -> None:
        with Streams() as streams:
            side = streams.new("side")
            with streams.on(side):
                x = torch.ones(3)
            side.synchronize()
            _ = x + 1
            assert not streams.findings
            side.wait_stream(streams.main)
            with streams.on(side):
                x.add_(1).sum().item()
            _ = x + 1
            assert not streams.findings
            assert streams.host_waits == 2
