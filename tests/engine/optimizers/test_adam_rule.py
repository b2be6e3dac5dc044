"""Adam's steps for parameters that are sparsified: on real ranks, against loops in float64 and against torch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.state.schema import NOTHING, STATE_FORMAT
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks, error_of
from tests.reference.length import Length

HYPER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
N, WIDTH, STEPS = 2, 24, 12
CLASSES: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "wrapped": lambda parameters, **settings: Around(torch.optim.AdamW(parameters, **settings)),
    "sharded": lambda parameters, **settings: sharded(parameters, torch.optim.AdamW, **settings),
    "sharded_nadam": lambda parameters, **settings: sharded(parameters, torch.optim.NAdam, **settings),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(module: nn.Module, step: int, rank: int) -> Tensor:
    loss: Tensor = (module(batch(step, rank)) - 1).square().mean()
    return loss


class Around:
    """As Lightning and Fabric wrap optimizers that they hand out."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__class__ = type("Around", (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, *args: Any) -> Any:
        return self.optimizer.step(*args)


def sharded(parameters: Any, cls: type[torch.optim.Optimizer], **settings: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(parameters, cls, **settings)


class Training:
    classes: Mapping[str, Any] = CLASSES
    hyper: Mapping[str, Any] = HYPER
    options: Mapping[str, Any] = {"density": 0.1, "grouping": "model"}

    def __init__(self, kind: str = "adamw", *, shown: bool = False, hyper: Any = None, **options: Any) -> None:
        self.module = model()
        self.ddp = DistributedDataParallel(self.module)
        self.engine = ls.attach(self.ddp, **{**self.options, **options})
        self.optimizer = self.classes[kind](self.ddp.parameters(), **(hyper or self.hyper))
        if shown:
            self.engine._show([self.optimizer])
        self.rank = dist.get_rank()
        self.limit: float | None = None
        """Of the norm of the mean gradient."""

    def step(self, number: int, closure: bool = False) -> None:
        def backward() -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.ddp, number, self.rank)
            loss.backward()
            if self.limit is not None:
                self.engine.clip_grad_norm_(self.ddp.parameters(), self.limit)
            return loss

        if closure:
            assert self.optimizer.step(backward) is not None
        else:
            backward()
            self.optimizer.step()

    def set(self, beta2: float, eps: float) -> None:
        for group in self.optimizer.param_groups:
            group.update(betas=(0.9, beta2), eps=eps)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]

    def saved(self) -> tuple[Any, Any, Any]:
        return copy.deepcopy((self.module.state_dict(), self.optimizer.state_dict(), self.engine.state_dict()))

    def load(self, saved: tuple[Any, Any, Any]) -> list[str]:
        """What of a saved state does not fit."""
        self.module.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])
        return self.engine.load_state_dict(saved[2])


def assert_near(weights: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


def rising(step: int) -> tuple[float, float]:
    """A schedule of the second beta and eps."""
    return 0.5 + 0.04 * step, 1e-8 if step < 6 else 1e-3


Schedule = Callable[[int], tuple[float, float]]


def reference(schedule: Schedule = lambda step: (HYPER["betas"][1], 1e-8)) -> tuple[list[Tensor], list[Tensor]]:
    """Two ranks in loops, SharedTopK by hand; dense parameters by torch's AdamW on the mean gradient."""
    module = model().double()
    replicas = [copy.deepcopy(module) for _ in range(N)]
    sparse = [i for i, p in enumerate(module.parameters()) if p.dim() == 2][::-1]  # groups are in reverse order
    parameters = list(module.parameters())
    sizes = [parameters[i].numel() for i in sparse]
    total = sum(sizes)
    k = round(0.1 * total)
    acc, v = (torch.zeros(N, total, dtype=torch.float64) for _ in range(2))
    lengths = [Length() for _ in range(N)]
    lr, decay = HYPER["lr"], HYPER["weight_decay"]
    left = 1.0
    """Of what a second moment began with."""
    dense = torch.optim.AdamW([p for i, p in enumerate(parameters) if i not in sparse], **HYPER)
    for step in range(STEPS):
        beta2, eps = schedule(step)
        left *= beta2
        dense.param_groups[0].update(betas=(HYPER["betas"][0], beta2), eps=eps)
        rows, others = [], []
        for rank, replica in enumerate(replicas):
            replica.load_state_dict(module.state_dict())
            replica.zero_grad()
            output = replica(batch(step, rank).double())
            (output - 1).square().mean().backward()
            grads = [p.grad for p in replica.parameters()]
            rows.append(torch.cat([grads[i].flatten() for i in sparse]))
            others.append([g for i, g in enumerate(grads) if i not in sparse])
        g = torch.stack(rows)
        units = torch.tensor(
            [length(row.tolist()) for length, row in zip(lengths, g, strict=True)], dtype=torch.float64
        )
        take, carry = units[:, :1], units[:, 1:]
        g = g * take
        acc = acc * carry + g
        v = beta2 * carry**2 * v + (1 - beta2) * g * g
        corrected = v / (1 - left)
        union: set[int] = set()
        for rank in range(N):
            score = acc[rank].square() / ((corrected[rank] + (acc[rank] / 2.5).square()).sqrt() + eps)
            union |= set(score.topk(k // N).indices.tolist())
        u = torch.tensor(sorted(union))
        with torch.no_grad():
            move = torch.zeros(total, dtype=torch.float64)
            average = acc[:, u].mean(0)
            divisor = (corrected[:, u].mean(0) + (average / 2.5).square()).sqrt() + eps
            move[u] = lr * math.sqrt(N) * average / divisor
            acc[:, u] = 0
            for i, part in zip(sparse, move.split(sizes), strict=True):
                parameters[i].mul_(1 - lr * decay).sub_(part.view_as(parameters[i]))
            for p, *each in zip(dense.param_groups[0]["params"], *others, strict=True):
                p.grad = torch.stack(each).mean(0)
        dense.step()
    return [p.detach() for p in parameters], list(acc)


def train(
    kind: str, closure: bool, shown: bool, schedule: Schedule | None = None
) -> tuple[list[Tensor], Tensor, list[bool]]:
    training = Training(kind, shown=shown, sparsifier="shared_top_k", exchange="reduce_union")
    for step in range(STEPS):
        if schedule is not None:
            training.set(*schedule(step))
        training.step(step, closure)
    residual = torch.cat([training.engine.residual(name) for name in ("2.weight", "0.weight")])  # type: ignore[list-item]
    has_grad = [p.grad is not None for p in training.module.parameters()]
    dense = {p for p in training.module.parameters() if p.dim() == 1}
    assert training.optimizer.state.keys() == dense, (training.optimizer.state.keys(), dense)  # torch's own states
    return training.weights(), residual, has_grad


@pytest.mark.parametrize(
    ("kind", "closure", "shown", "schedule"),
    [
        ("adamw", False, True, None),
        ("adamw", True, False, None),
        ("adamw", False, False, rising),
        ("wrapped", True, True, rising),
    ],
)
def test_the_steps_are_those_of_the_rule(
    two_ranks: Ranks, kind: str, closure: bool, shown: bool, schedule: Schedule | None
) -> None:
    """Also where beta2 and eps follow a schedule."""
    expected, residuals = reference() if schedule is None else reference(schedule)
    assert schedule is None or not torch.allclose(expected[0], reference()[0][0], rtol=1e-3, atol=1e-4)
    results = two_ranks(train, kind, closure, shown, schedule)
    for (weights, residual, has_grad), kept in zip(results, residuals, strict=True):
        assert all(has_grad)  # gradients are given back after a step
        torch.testing.assert_close(residual.double(), kept, rtol=1e-3, atol=1e-7)
        assert_near(weights, expected)


def changed_on_one_rank() -> str:
    training = Training(watch=None)
    training.step(0)
    if training.rank == 1:
        training.set(0.9, 1e-8)
    return error_of(lambda: [training.step(step) for step in (1, 2)])


def test_a_second_beta_that_one_rank_changes_alone_is_an_error_on_all(two_ranks: Ranks) -> None:
    assert ["settings" in error for error in two_ranks(changed_on_one_rank)] == [True, True]


def short_run(
    kind: str, closure: bool, limit: float | None
) -> tuple[list[Tensor], ls.memories.Memory, bool, list[str]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        training = Training(kind, hyper={"lr": 0.01, "betas": (0.9, 0.95)})
        training.limit = limit
        for step in range(4):
            training.step(step, closure)
    engine = training.engine
    taken = engine._binding.takes(training.optimizer)
    return training.weights(), engine.settings.memory, taken, [str(w.message) for w in caught if "moment" in str(w)]


@pytest.mark.parametrize(
    ("kind", "closure", "limit"),
    covering(
        [("sharded", False, 0.02), ("wrapped", True, None), ("sharded", True, None), ("wrapped", False, 0.02)],
        together=1,
    ),
)
def test_adam_within_another_optimizer_is_stepped_for_as_by_itself(
    two_ranks: Ranks, kind: str, closure: bool, limit: float | None
) -> None:
    runs = [two_ranks(short_run, name, closure, limit) for name in ("adamw", kind)]
    for (expected, *_), (weights, memory, taken, warned) in zip(*runs, strict=True):
        assert memory == ls.memories.SecondMoment(0.95) and taken and warned == []
        assert all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))


def test_another_adam_within_an_optimizer_is_warned_of_once(two_ranks: Ranks) -> None:
    (_, memory, taken, [warned]), (*_, others) = two_ranks(short_run, "sharded_nadam", False, None)
    assert not memory.needs_second and not taken
    assert "NAdam keeps a first moment" in warned and others == []


def several_settings(shown: bool) -> list[str]:
    """What is said in three steps of an optimizer with two second betas, of which one has a schedule."""
    module = model()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, density=0.1)
    betas = (0.9, 0.92, 0.94, 0.96)
    groups = [{"params": [p], "betas": (0.9, beta)} for p, beta in zip(module.parameters(), betas, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(3):
            if shown:
                engine._show([optimizer])
            loss_of(ddp, step, dist.get_rank()).backward()
            optimizer.step()
            optimizer.param_groups[0]["betas"] = 0.9, 0.9 - 0.1 * step
    assert engine.settings.memory == ls.memories.SecondMoment(0.94)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("shown", [True, False])
def test_several_second_betas_are_warned_of_once_on_rank_zero(two_ranks: Ranks, shown: bool) -> None:
    [warned], others = two_ranks(several_settings, shown)
    assert "[(0.9, 1e-08), (0.94, 1e-08)]" in warned and others == []


def dense_runs(kind: str, options: dict[str, Any], hyper: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    ours = Training(kind, hyper=hyper, **options)
    module = model()
    plain = DistributedDataParallel(module)
    theirs = CLASSES[kind](plain.parameters(), **hyper)
    for step in range(4):
        ours.step(step)
        theirs.zero_grad()
        loss_of(plain, step, dist.get_rank()).backward()
        theirs.step()
    sent, dense = ours.engine.stepper.totals.sent_bytes, ours.engine.stepper.totals.dense_bytes
    assert sent <= 1.1 * dense, "second moments that nobody reads"
    return ours.weights(), [p.detach().clone() for p in module.parameters()]


DENSE: dict[str, dict[str, Any]] = {
    "1": {"density": 1.0},
    "1 by rule": {"rules": ls.Rules(densities={"*": 1.0})},
    "everything": {"sparsifier": "everything"},
    "dense": {"dense": ["*"]},
}


@pytest.mark.parametrize(("settings", "kind"), covering(in_turns(list(DENSE), ["adamw", "adam"]), together=1))
def test_behind_a_dense_exchange_it_is_torchs_bit_for_bit(two_ranks: Ranks, kind: str, settings: str) -> None:
    for ours, theirs in two_ranks(dense_runs, kind, DENSE[settings], HYPER):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def resumed(kind: str, shown: bool, scheduled: bool) -> tuple[list[Tensor], list[Tensor]]:
    def take(training: Training, step: int) -> None:
        if scheduled:
            training.set(*rising(step))
        training.step(step)

    whole = Training(kind)
    for step in range(8):
        take(whole, step)
        if step == 4:
            kept = whole.saved()
    again = Training(kind, shown=shown)
    assert again.load(kept) == []
    for step in range(5, 8):
        take(again, step)
    return whole.weights(), again.weights()


@pytest.mark.parametrize(
    ("kind", "shown", "scheduled"),
    [("adamw", True, False), ("adamw", True, True), ("adamw", False, False), ("adamw", False, True)],
)
def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Ranks, kind: str, shown: bool, scheduled: bool) -> None:
    for whole, again in two_ranks(resumed, kind, shown, scheduled):
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def skipped_step(exchange: str) -> tuple[list[Tensor], list[Tensor]]:
    runs = []
    for bad_at in (None, 3):
        training = Training(exchange=exchange)
        for step in range(6):
            if step == bad_at:
                training.optimizer.zero_grad()
                (loss_of(training.ddp, step, training.rank) * float("nan")).backward()
                training.optimizer.step()
            training.step(step)
        runs.append(training.weights())
    return runs[0], runs[1]


@pytest.mark.parametrize("exchange", ["packed_union", "reduce_union"])
def test_a_step_that_is_skipped_moves_nothing(two_ranks: Ranks, exchange: str) -> None:
    for plain, skipped in two_ranks(skipped_step, exchange):
        assert all(torch.equal(a, b) for a, b in zip(plain, skipped, strict=True))


def flushed() -> tuple[list[Tensor], list[Tensor], float]:
    training = Training(hyper={**HYPER, "weight_decay": 0.0})
    for step in range(4):
        training.step(step)
    engine, names = training.engine, ["0.weight", "2.weight"]
    before = dict(training.module.named_parameters())
    expected = []
    state = engine.state_dict()["parameters"]
    correction = 1 - HYPER["betas"][1] ** 4
    for name in names:
        means = {}
        for vector in ("residual", "second"):
            total = state[name][vector].clone()
            dist.all_reduce(total)
            means[vector] = total / N
        root = (means["second"] / correction).sqrt()
        assert float((means["residual"] / root).abs().max()) > 2.5
        divisor = torch.hypot(root, means["residual"] / 2.5) + 1e-8  # 0.25 / density
        move = HYPER["lr"] * math.sqrt(N) * means["residual"] / divisor
        expected.append(before[name].detach().flatten() - move)
    norm = ls.flush(engine, [training.optimizer])
    left = max(float(engine.residual(name).abs().max()) for name in names)  # type: ignore[union-attr]
    weights = [before[name].detach().flatten().clone() for name in names]
    assert norm > 0
    return weights, expected, left


def test_a_flush_is_a_step_of_adam_with_all_that_waits(two_ranks: Ranks) -> None:
    for weights, expected, left in two_ranks(flushed):
        assert left == 0
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def narrow(dtype: torch.dtype) -> tuple[list[Tensor], ls.memories.Memory]:
    module = model().to(dtype)
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, density=0.1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=torch.tensor(0.01))
    for step in range(4):
        optimizer.zero_grad()
        (ddp(batch(step, dist.get_rank()).to(dtype)) - 1).square().mean().backward()
        optimizer.step()
    memory = engine.settings.memory
    return [p.detach() for p in module.parameters()], memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_and_a_rate_in_a_tensor(two_ranks: Ranks, dtype: torch.dtype) -> None:
    results = two_ranks(narrow, dtype)
    assert results[0][1] == ls.memories.SecondMoment()
    for mine, others, start in zip(results[0][0], results[1][0], model().to(dtype).parameters(), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, others)
        assert not torch.equal(mine, start) and bool(mine.isfinite().all())


def left_alone(hyper: dict[str, Any], options: dict[str, Any]) -> tuple[Any, bool, list[str]]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        training = Training("adam", hyper=hyper, **options)
        for step in range(3):
            training.step(step)
    memory = training.engine.settings.memory
    return memory, training.engine._binding.takes(training.optimizer), [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("hyper", "options"),
    [
        ({"amsgrad": True}, {}),
        ({"weight_decay": 0.1}, {}),
        ({}, {"memory": ls.memories.Residual()}),
        ({}, {"sparsifier": "top_k", "exchange": "gather_pairs"}),
    ],
    ids=["amsgrad", "coupled", "residual", "gather_pairs"],
)
def test_where_torchs_adam_is_left_alone_it_is_said(
    two_ranks: Ranks, hyper: dict[str, Any], options: dict[str, Any]
) -> None:
    memory, taken, warned = two_ranks(left_alone, hyper, options)[0]
    assert not memory.needs_second and not taken
    assert sum("first moment" in text for text in warned) == 1


def other_ranks_state() -> list[str]:
    """What misfits when the mean of three ranks' states is loaded by two."""
    states = []
    algorithm = ls.engine.config.SparsificationConfig(density=0.1, memory=ls.memories.SecondMoment(0.95)).algorithm
    for rank in range(3):
        parameters = {
            name: {"residual": torch.full((p.numel(),), float(rank)), "second": torch.full((p.numel(),), 2.0 * rank)}
            for name, p in model().named_parameters()
            if p.dim() == 2
        }
        states.append(
            {**NOTHING, "format": STATE_FORMAT, "step": 5, "skipped_steps": 0, "rank": rank, "world_size": 3}
            | {"settings": algorithm, "parameters": parameters}
            | {"counters": {name: {"steps": 5.0} for name in parameters}}
        )
    training = Training()
    told = training.engine.load_state_dict(ls.merge_states(states))
    training.engine._show([training.optimizer])
    vectors = training.engine.state_dict()["parameters"]["0.weight"]
    assert {name: float(v[0]) for name, v in vectors.items()} == {"residual": 1.0, "second": 2.0}
    training.step(0)
    return told


def after_a_step() -> dict[str, Any]:
    training = Training()
    training.step(0)
    return training.engine.state_dict()


def no_state_on_one_rank() -> tuple[list[str], bool, bool]:
    """What is raised where one rank has a state of second moments and the other one none; whether a step is taken."""
    state = after_a_step()
    after = Training(watch=None)
    raised, groups = [], list(after.engine.stepper.groups)
    for given in (None, {**state, "step": "none"}):
        try:
            after.engine.load_state_dict(given if dist.get_rank() else state)
        except ValueError as error:
            raised.append(str(error))
    alike = list(after.engine.stepper.groups) == groups and not after.engine.settings.memory.needs_second
    after.step(1)
    return raised, alike, after.engine.step == 1


def test_a_state_that_one_rank_does_not_have_changes_no_memory(two_ranks: Ranks) -> None:
    for raised, alike, stepped in two_ranks(no_state_on_one_rank):
        assert ["cannot be loaded, and no rank has loaded it: rank 1" in text for text in raised] == [True, True]
        assert alike and stepped


def state_in_another_exchange() -> tuple[list[str], float]:
    """What misfits where second moments can not be averaged, and how much of the residual arrives."""
    state = after_a_step()
    after = Training(sparsifier="top_k", exchange="gather_pairs")
    told = after.engine.load_state_dict(state)
    after.engine._show([after.optimizer])
    differences = [
        float((after.engine.state_dict()["parameters"][name]["residual"] - kept["residual"]).abs().max())
        for name, kept in state["parameters"].items()
        if "residual" in kept
    ]
    return told, max(differences)


def test_residuals_go_on_where_second_moments_cannot(two_ranks: Ranks) -> None:
    told, difference = two_ranks(state_in_another_exchange)[0]
    assert difference == 0
    assert any("SecondMoment" in sentence for sentence in told)


def test_another_number_of_ranks_goes_on_with_the_means(two_ranks: Ranks) -> None:
    assert two_ranks(other_ranks_state)[0] == []


def with_an_older_engine(closed: bool) -> list[Tensor]:
    old = Training(watch=None)
    for step in range(3):
        old.step(step)
    if closed:
        old.engine.close()
    ddp = DistributedDataParallel(old.module)
    ls.attach(ddp, density=0.1, grouping="model")
    optimizer = torch.optim.AdamW(ddp.parameters(), **HYPER)
    for step in range(3, 8):
        optimizer.zero_grad()
        loss_of(ddp, step, dist.get_rank()).backward()
        optimizer.step()
    return old.weights()


def test_an_engine_that_was_not_closed_takes_no_steps_of_a_later_one(two_ranks: Ranks) -> None:
    for one, other in zip(*(two_ranks(with_an_older_engine, closed) for closed in (True, False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def regrouped() -> list[bool]:
    training = Training()
    plan = training.engine.groups
    all_dense = [group._replace(dense=True) for group in plan]
    taken = []
    for number, groups in enumerate((plan, all_dense, plan)):
        if number:
            training.engine.regroup(groups)
        for step in range(2):
            training.step(2 * number + step)
        taken.append(training.engine.settings.memory.needs_second)
    return taken


def test_dense_steps_in_between_change_no_memory(two_ranks: Ranks) -> None:
    assert two_ranks(regrouped) == [[True, True, True]] * 2


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("at_the_end", by_default([False, True]))
def test_two_backwards_before_the_steps_are_two_averages(at_the_end: bool) -> None:
    torch.manual_seed(0)
    pair = Pair()
    ddp = DistributedDataParallel(pair, find_unused_parameters=True)
    ls.attach(ddp, density=0.1, grouping="layer", watch=None, single_device="sparse")
    optimizers = {name: torch.optim.AdamW(getattr(pair, name).parameters(), lr=0.01) for name in ("first", "second")}
    for _ in range(60):
        ddp.zero_grad()
        x = torch.randn(8, WIDTH)
        for name, optimizer in optimizers.items():
            ddp(x, name).backward()
            if not at_the_end:
                optimizer.step()
        for optimizer in optimizers.values() if at_the_end else ():
            optimizer.step()
    assert not any(optimizer.state for optimizer in optimizers.values())
    norms = [float(layer.weight.detach().norm()) for layer in (pair.first, pair.second)]
    assert norms[0] == pytest.approx(norms[1], rel=0.3)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "options",
    [
        {"density": 0.1, "rules": ls.Rules(densities={"0.weight": 1.0})},
        {"density": 1.0, "rules": ls.Rules(densities={"2.weight": 0.1})},
    ],
)
def test_what_is_always_sent_as_a_whole_is_stepped_by_torch_and_the_rest_is_not(options: dict[str, Any]) -> None:
    training = Training(watch=None, single_device="sparse", **options)
    for step in range(3):
        training.step(step)
    parameters = dict(training.module.named_parameters())
    assert "exp_avg" in training.optimizer.state[parameters["0.weight"]]
    assert parameters["2.weight"] not in training.optimizer.state


class Mixed(torch.optim.SGD):
    """Steps matrices itself, and gives the rest to an AdamW."""

    def __init__(self, matrices: Any, others: Any) -> None:
        super().__init__([*matrices, *others], lr=0.1)
        self.optimizer = torch.optim.AdamW(others)


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_with_an_adam_for_some_parameters_is_left_alone() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    ddp = DistributedDataParallel(layer)
    engine = ls.attach(ddp, density=0.1, watch=None, single_device="sparse")
    engine._show([Mixed([layer.weight], [layer.bias])])
    ddp(torch.randn(2, WIDTH)).sum().backward()
    assert all(type(group.memory) is not ls.memories.SecondMoment for group in engine.stepper.groups)


def compiled_step(compiled: bool) -> tuple[list[Tensor], list[str]]:
    """Weights, and files whose operations were compiled."""
    training, files = Training(), list[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        files.extend(str(node.meta.get("stack_trace")) for node in graph.graph.nodes)
        return graph.forward

    def take() -> None:
        training.optimizer.step()

    step = torch.compile(take, backend=backend) if compiled else take
    with warnings.catch_warnings(action="ignore"):  # torch uses what torch itself has deprecated
        for number in range(4):
            training.optimizer.zero_grad()
            loss_of(training.ddp, number, training.rank).backward()
            step()
    torch._dynamo.reset()
    return training.weights(), files


@pytest.mark.thorough  # to compile takes seconds
def test_what_is_done_around_a_compiled_step_is_not_compiled(two_ranks: Ranks) -> None:
    for (weights, files), (plain, _) in zip(
        two_ranks(compiled_step, True), two_ranks(compiled_step, False), strict=True
    ):
        assert files and not any("lightning_sparse" in file for file in files)
        torch.testing.assert_close(weights, plain, rtol=1e-6, atol=1e-7)
