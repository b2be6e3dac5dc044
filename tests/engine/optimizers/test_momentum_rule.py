"""Momentum SGD for parameters that are sparsified: on real ranks, against loops in float64 and against torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.methods.grouping import make_plan
from tests.covering import by_default
from tests.engine.optimizers import test_adam_rule
from tests.engine.optimizers.test_adam_rule import Around, assert_near, batch, loss_of, model, sharded
from tests.ranks import Ranks

N, STEPS, DENSITY = 2, 12, 0.1
HYPER: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}
OPTIONS: dict[str, Any] = {"density": DENSITY, "grouping": "model", "sparsifier": "shared_top_k"}
MADE: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "wrapped": lambda parameters, **settings: Around(torch.optim.SGD(parameters, **settings)),
    "sharded": lambda parameters, **settings: sharded(parameters, torch.optim.SGD, **settings),
}


class Training(test_adam_rule.Training):
    classes, hyper, options = MADE, HYPER, OPTIONS

    def __init__(self, kind: str = "sgd", **options: Any) -> None:
        super().__init__(kind, **options)


def reference(hyper: dict[str, Any], spends: bool = True) -> list[Tensor]:
    """Two ranks in loops, SharedTopK and SGD by hand."""
    module = model().double()
    replicas = [copy.deepcopy(module) for _ in range(N)]
    parameters = list(module.parameters())
    sparse = [i for i, p in enumerate(parameters) if p.dim() == 2][::-1]  # groups are in reverse order
    sizes = [parameters[i].numel() for i in sparse]
    k = round(DENSITY * sum(sizes))
    acc, waited = torch.zeros(N, sum(sizes), dtype=torch.float64), torch.zeros(sum(sizes), dtype=torch.float64)
    velocities = [torch.zeros_like(p) for p in parameters]
    lr, beta, decay, nesterov = hyper["lr"], hyper["momentum"], hyper["weight_decay"], hyper.get("nesterov", False)
    for step in range(STEPS):
        rows, others = [], []
        for rank, replica in enumerate(replicas):
            replica.load_state_dict(module.state_dict())
            replica.zero_grad()
            (replica(batch(step, rank).double()) - 1).square().mean().backward()
            grads = [p.grad for p in replica.parameters()]
            rows.append(torch.cat([grads[i].flatten() for i in sparse]))
            others.append({i: g for i, g in enumerate(grads) if i not in sparse})
        acc += torch.stack(rows)
        union = torch.tensor(sorted({i for row in acc for i in row.abs().topk(k // N).indices.tolist()}))
        average = torch.zeros(sum(sizes), dtype=torch.float64)
        average[union] = acc[:, union].mean(0)
        acc[:, union] = 0
        waited += 1
        left = (1 - beta**waited) / (waited * (1 - beta)) if spends else torch.ones_like(waited)
        waited[union] = 0
        averages = dict(zip(sparse, average.split(sizes), strict=True))
        lefts = dict(zip(sparse, left.split(sizes), strict=True))
        with torch.no_grad():
            for i, p in enumerate(parameters):
                g = averages[i].view_as(p) if i in averages else torch.stack([each[i] for each in others]).mean(0)
                kept = lefts[i].view_as(p) if i in averages else torch.ones(())
                loaded = g + decay * p
                velocities[i] = beta * velocities[i] + loaded
                p.sub_(lr * (loaded + beta * velocities[i] if nesterov else velocities[i]))
                velocities[i] -= (1 - kept) * g
                p.sub_(lr * (1 - kept) * g * beta ** (2 if nesterov else 1) / (1 - beta))
    return [p.detach() for p in parameters]


def train(kind: str, closure: bool, hyper: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    training = Training(kind, hyper=hyper, **options)
    for step in range(STEPS):
        training.step(step, closure)
    assert all(p.grad is not None for p in training.module.parameters())
    if kind == "sgd":
        counted = {p for p, state in training.optimizer.state.items() if "waited" in state}
        chosen = "memory" in options
        assert counted == {p for p in training.module.parameters() if p.dim() == 2 and not chosen}
    return training.weights()


@pytest.mark.parametrize(
    ("kind", "closure", "extra"),
    by_default(
        [
            ("sgd", False, {}),
            ("sgd", True, {"nesterov": True}),
            ("wrapped", False, {"fused": True}),
            ("sharded", True, {}),
            ("sgd", False, {"nesterov": True, "foreach": True, "weight_decay": 0.0}),  # torch then writes to .grad
        ],
        2,
    ),
)
def test_the_steps_are_those_of_the_rule(two_ranks: Ranks, kind: str, closure: bool, extra: dict[str, Any]) -> None:
    expected, left_alone = (reference({**HYPER, **extra}, spends) for spends in (True, False))
    assert not torch.allclose(expected[0], left_alone[0], rtol=1e-3, atol=1e-4)
    for weights in two_ranks(train, kind, closure, {**HYPER, **extra}, {}):
        assert_near(weights, expected)


@pytest.mark.parametrize("options", [{"memory": "residual"}, {"memory": ls.memories.Residual()}])
def test_a_memory_that_was_chosen_leaves_momentum_to_the_optimizer(two_ranks: Ranks, options: dict[str, Any]) -> None:
    expected = reference(HYPER, spends=False)
    for weights in two_ranks(train, "sgd", False, HYPER, options):
        assert_near(weights, expected)


def another_was_shown(of_nothing: bool) -> list[Tensor]:
    """An engine serves optimizers that step, also where it was shown others."""
    training = Training()
    parameters = [torch.nn.Parameter(torch.ones(1))] if of_nothing else list(training.ddp.parameters())
    training.engine._show([torch.optim.SGD(parameters, lr=0.1, momentum=0.9)])
    for step in range(STEPS):
        training.step(step)
    return training.weights()


@pytest.mark.parametrize("of_nothing", [True, False])
def test_an_optimizer_that_was_not_shown_is_found(two_ranks: Ranks, of_nothing: bool) -> None:
    expected = reference(HYPER)
    for weights in two_ranks(another_was_shown, of_nothing):
        assert_near(weights, expected)


def resumed() -> tuple[list[Tensor], list[Tensor]]:
    whole = Training()
    for step in range(STEPS):
        whole.step(step)
        if step == 4:
            saved = whole.saved()
    again = Training()
    again.load(saved)
    for step in range(5, STEPS):
        again.step(step)
    return whole.weights(), again.weights()


def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Ranks) -> None:
    for whole, again in two_ranks(resumed):
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def replaced(at: int | None) -> list[Tensor]:
    """Weights, where another optimizer takes the place of the first one, with its state."""
    training = Training()
    for step in range(STEPS):
        if step == at:
            first, training.optimizer = training.optimizer, torch.optim.SGD(training.ddp.parameters(), **HYPER)
            training.optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
        training.step(step)
    return training.weights()


def test_an_optimizer_with_the_state_of_another_one_goes_on_bit_for_bit(two_ranks: Ranks) -> None:
    for expected, weights in zip(two_ranks(replaced, None), two_ranks(replaced, 5), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def without_residuals(between: str) -> list[Tensor]:
    """Steps of a run whose optimizer has waits of an earlier one, or none, and whose residuals start empty."""
    before = Training()
    for step in range(5):
        before.step(step)
    again = Training()
    again.module.load_state_dict(before.module.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    if between == "nothing waits":
        for state in again.optimizer.state.values():
            state.pop("waited", None)
    elif between == "a state without residuals":  # as where side files are lost
        again.engine.load_state_dict({**before.engine.state_dict(), "parameters": {}, "counters": {}})
    elif between == "memory='residual'":
        again.engine.close()
        again.ddp = DistributedDataParallel(again.module)
        again.engine = ls.attach(again.ddp, **OPTIONS, memory="residual")
        again.engine.load_state_dict(before.engine.state_dict())
    for step in range(5, STEPS):
        again.step(step)
    counted = ["waited" in again.optimizer.state[p] for p in again.module.parameters() if p.dim() == 2]
    assert counted == [between != "memory='residual'"] * 2
    return again.weights()


def test_what_has_waited_is_counted_as_long_as_its_residual_is_kept(two_ranks: Ranks) -> None:
    expected = two_ranks(without_residuals, "nothing waits")
    for between in ("no state", "a state without residuals"):  # other training, such as DDP's, may lie in between
        for wanted, weights in zip(expected, two_ranks(without_residuals, between), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(wanted, weights, strict=True)), between
    two_ranks(without_residuals, "memory='residual'")


def two_engines(dense: bool) -> list[Tensor]:
    """An engine that was not closed must not act beside the one that came after it."""
    training = Training()
    old = training.ddp, training.engine
    if not dense:
        training.ddp = DistributedDataParallel(training.module)
        training.engine = ls.attach(training.ddp, **OPTIONS)
    for step in range(STEPS):
        training.step(step)
    del old
    return training.weights()


def test_the_latest_engine_of_a_parameter_acts_alone(two_ranks: Ranks) -> None:
    for expected, weights in zip(two_ranks(two_engines, True), two_ranks(two_engines, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def at_full_density(density: Any, attached: bool) -> list[Tensor]:
    module = model()
    ddp = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(ddp.parameters(), **HYPER)
    if attached:
        ls.attach(ddp, density=density, grouping="model")
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = batch(step, dist.get_rank())
        inputs[:, step % 3 :: 3] = 0.0  # gradients of zero have not waited
        (ddp(inputs) - 1).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("density", [1.0, ls.Warmup(1.0, 1.0, steps=10)])
def test_at_full_density_it_is_ddp_bit_for_bit(two_ranks: Ranks, density: Any) -> None:
    for expected, weights in zip(
        two_ranks(at_full_density, density, False), two_ranks(at_full_density, density, True), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def what_is_said(hyper: dict[str, Any], options: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparse.engine.optimizers.choice.say", lines.append)
        training = Training(hyper=hyper, **options)
        for _ in range(2):
            training.engine._show([training.optimizer])
        training.step(0)
        training.engine.close()
    return lines


def test_it_is_said_once_on_rank_zero_where_it_is_done(two_ranks: Ranks) -> None:
    first, second = two_ranks(what_is_said, HYPER, {})
    assert len(first) == 1 and "docs/momentum.md" in first[0] and second == []
    first, second = two_ranks(what_is_said, HYPER, {"memory": ls.memories.ClipByNorm(1.0)})
    assert len(first) == 1 and "left to the optimizer, because memory=ClipByNorm(" in first[0] and second == []
    for hyper, options in (
        ({"lr": 0.1}, {}),
        ({"lr": 0.1}, {"memory": ls.memories.MomentumCorrection()}),
        (HYPER, {"memory": "no_memory"}),
        (HYPER, {"memory": "residual"}),
        (HYPER, {"density": 1.0}),
        (HYPER, {"dense": ["*"]}),
        (HYPER, {"sparsifier": "everything"}),
    ):
        assert two_ranks(what_is_said, hyper, options) == [[], []], (hyper, options)


def with_a_scaler(fused: bool) -> tuple[list[Tensor], list[Tensor]]:
    """A constant loss scale, which fused optimizers take out of the gradients themselves."""
    found = []
    for scale in (None, 1024.0):
        training = Training(hyper={**HYPER, "fused": fused})
        scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(STEPS):
            training.optimizer.zero_grad()
            loss = loss_of(training.ddp, step, training.rank)
            if scaler is None:
                loss.backward()
                training.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(training.optimizer)
                scaler.update()
        found.append(training.weights())
    return found[0], found[1]


@pytest.mark.parametrize("fused", [False, True])
def test_the_scale_of_a_loss_is_not_in_it(two_ranks: Ranks, fused: bool) -> None:
    for plain, scaled in two_ranks(with_a_scaler, fused):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-6)


def plan_of(engine: Any, grouping: str, **options: Any) -> Any:
    return make_plan([p for group in engine.groups for p in group.parameters][::-1], grouping, **options)


def when_everything_arrives(how: str) -> tuple[float, float, list[bool]]:
    """Share of the averages of coordinates that have waited that is spent; and whether anything is counted after it."""
    training = Training(hyper={"lr": 0.02, "momentum": 0.9})
    for step in range(40):
        training.step(step)
    weights = [p for p in training.module.parameters() if p.dim() == 2]
    waited = torch.cat([training.optimizer.state[p]["waited"].flatten() for p in weights])
    before = torch.cat([training.optimizer.state[p]["momentum_buffer"].flatten() for p in weights])
    if how == "flush":
        training.engine._flush_next_step()
    elif how == "dense":
        training.engine.regroup(plan_of(training.engine, "model", rules=ls.Rules(dense=["*"])))
    training.step(40)
    grads = torch.cat([p.grad.flatten() for p in weights])  # type: ignore[union-attr]
    after = torch.cat([training.optimizer.state[p]["momentum_buffer"].flatten() for p in weights])
    late = (waited > 20) & (grads.abs() > 1e-6)
    assert int(late.sum()) > 50
    spent = 1 - (after - 0.9 * before)[late] / grads[late]
    counted = [bool(training.optimizer.state[p].get("waited", torch.zeros(1)).any()) for p in weights]
    for step in range(41, 60 if how == "dense" else 41):
        training.step(step)
    fresh = 0.0
    if how == "dense":
        assert training.engine._go_direct()
        training.step(60)
        training.engine.regroup(plan_of(training.engine, "model"))
        training.step(61)
        fresh = float(max(training.optimizer.state[p]["waited"].max() for p in weights))
    return float(spent.median()), fresh, counted


@pytest.mark.parametrize("how", ["flush", "dense"])
def test_what_has_waited_is_spent_where_everything_arrives(two_ranks: Ranks, how: str) -> None:
    for spent, fresh, counted in two_ranks(when_everything_arrives, how):
        assert spent > 0.55, spent  # 21 steps: 0.58
        assert not any(counted)
        assert fresh <= 1


def two_optimizers(make: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """What two optimizers of the same parameters keep of those that are sparsified."""
    training = Training()
    training.optimizer, other = (make(training.module.parameters()) for _ in range(2))
    for step in range(STEPS):
        training.step(step)
        other.step()
    sparse = [p for p in training.module.parameters() if p.dim() == 2]
    return [(training.optimizer.state.get(p, {}), other.state.get(p, {})) for p in sparse]


def flushed_between_steps() -> list[tuple[Tensor, Tensor]]:
    """Velocities after a flush, by the rule and as they are."""
    training = Training(hyper={"lr": 0.02, "momentum": 0.9})
    for step in range(40):
        training.step(step)
    weights = {name: p for name, p in training.module.named_parameters() if p.dim() == 2}
    state = {name: training.optimizer.state[p] for name, p in weights.items()}
    before = {name: (one["momentum_buffer"].clone(), one["waited"].clone()) for name, one in state.items()}
    residuals = {name: training.engine.residual(name).view_as(p).clone() for name, p in weights.items()}  # type: ignore[union-attr]
    for residual in residuals.values():
        dist.all_reduce(residual)
    ls.flush(training.engine, [training.optimizer])
    found = []
    for name, (velocity, waited) in before.items():
        ages = waited.clamp(min=1)
        expected = 0.9 * velocity + residuals[name] / N * (1 - 0.9**ages) / (ages * (1 - 0.9))
        found.append((expected, state[name]["momentum_buffer"]))
        assert not state[name]["waited"].any()
    return found


def test_a_flush_between_two_steps_counts_no_step(two_ranks: Ranks) -> None:
    for result in two_ranks(flushed_between_steps):
        for expected, velocity in result:
            torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-7)


def with_a_hook_of_the_optimizer(to_none: bool) -> bool:
    """A hook of the optimizer's own comes before those of all optimizers."""
    training = Training()
    training.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(set_to_none=to_none))
    for step in range(3):
        training.step(step)
    return any("waited" in state for state in training.optimizer.state.values())


def test_gradients_that_a_hook_has_taken_away_count(two_ranks: Ranks) -> None:
    assert two_ranks(with_a_hook_of_the_optimizer, True) == [True, True]


class ByKeyword(torch.optim.SGD):
    def step(self, *, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def stepped_by_keyword() -> bool:
    training = Training()
    optimizer = ByKeyword(training.module.parameters(), lr=0.1)
    seen = optimizer.step(closure=lambda: 3.0)
    return bool(seen == 3.0)


def test_a_closure_given_by_keyword_stays_one(two_ranks: Ranks) -> None:
    assert all(two_ranks(stepped_by_keyword))
