"""Gradients are exchanged when optimizers step: what users do between backward and step counts, as with plain DDP."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default
from tests.ranks import Ranks
from tests.static_path import static_path

KINDS = ["sgd", "momentum", "adamw"]
SPARSE: dict[str, Any] = {"density": 0.05, "watch": None}
WITHIN = 5.0
"""Seconds in which ranks that do different things have to end."""


def attached(ddp: DistributedDataParallel, **settings: Any) -> Any:
    return ls.attach(ddp, **{**SPARSE, **settings})


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20)).to(dtype)


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


class Batches:
    """Each rank's own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._random, self._dtype = torch.Generator().manual_seed(dist.get_rank() + 1), dtype

    def loss(self, model: nn.Module) -> Tensor:
        x = torch.randn(8, 30, generator=self._random).to(self._dtype)
        return (model(x) - x[:, :20].sin()).square().mean()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    kind: str,
    settings: dict[str, Any] | None,
    steps: int = 12,
    micro: int = 1,
    synced: bool = False,
    more: str = "",
) -> Tensor:
    """Train, with plain DDP if there are no settings; return the weights."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=more == "views")
    halves = [list(model[0].parameters()), list(model[2].parameters())]  # type: ignore[index]
    parts = halves if more == "two optimizers" else [list(model.parameters())]
    optimizers = [optimizer_of(kind, part) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if more == "scaler" else None
    if settings is not None:
        ls.attach(ddp, **{**SPARSE, **settings})
    for _ in range(steps):
        for one in optimizers:
            one.zero_grad()
        for number in range(micro):
            with ddp.no_sync() if number < micro - 1 and not synced else contextlib.nullcontext():
                loss = batches.loss(ddp)
                (loss if scaler is None else scaler.scale(loss)).backward()
        if more == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for one in optimizers:
            if scaler is None:
                one.step()
            else:
                scaler.step(one)
        if scaler is not None:
            scaler.update()
    return weights(model)


MORE = ["", "views", "clipped", "scaler", "two optimizers"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", MORE)
def test_density_1_is_plain_ddp(two_ranks: Ranks, kind: str, more: str) -> None:
    plain = two_ranks(train, kind, None, 12, 1, False, more)
    assert all(
        torch.equal(x, plain[0]) for x in (*plain, *two_ranks(train, kind, {"density": 1.0}, 12, 1, False, more))
    )


@pytest.mark.parametrize("synced", [False, True])
def test_accumulation_at_density_1_is_that_of_plain_ddp(three_ranks: Ranks, synced: bool) -> None:
    plain = three_ranks(train, "adamw", None, 6, 3, synced)
    assert all(torch.equal(x, plain[0]) for x in three_ranks(train, "adamw", {"density": 1.0}, 6, 3, synced))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro", by_default([2, 8, 16]))
def test_micro_batches_count_once_synchronised_or_not(two_ranks: Ranks, kind: str, micro: int) -> None:
    apart = two_ranks(train, kind, {}, 5, micro, False)
    assert all(torch.equal(x, apart[0]) for x in (*apart, *two_ranks(train, kind, {}, 5, micro, True)))


def discarded(kind: str, throw_away: bool) -> tuple[Tensor, Tensor]:
    """Weights after a large gradient that is thrown away, and after 20 steps with gradients of zero."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    attached(ddp)
    optimizer = optimizer_of(kind, model.parameters())
    if throw_away:
        (1000 * batches.loss(ddp)).backward()
    optimizer.zero_grad()
    before = weights(model)
    for _ in range(20):
        optimizer.zero_grad()
        (0 * batches.loss(ddp)).backward()
        optimizer.step()
    return before, weights(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_thrown_away_moves_nothing(two_ranks: Ranks, kind: str) -> None:
    without = two_ranks(discarded, kind, False)
    for (before, after), (_, expected) in zip(two_ranks(discarded, kind, True), without, strict=True):
        assert torch.equal(after, expected)
        assert kind == "adamw" or torch.equal(after, before)


def law(many: Callable[[Any], Sequence[int]], order: Sequence[int]) -> Tensor:
    """Two wrappers over one encoder, or two optimizers; what SGD has stepped with and residuals are all gradients."""
    torch.manual_seed(0)
    encoder = nn.Linear(30, 40, dtype=torch.float64)
    heads = [nn.Linear(40, 20, dtype=torch.float64) for _ in range(2)]
    tasks = [DistributedDataParallel(nn.Sequential(encoder, nn.Tanh(), head)) for head in heads]
    rules = ls.Rules(dense_ndim=0, dense_numel=0)
    engines = [attached(ddp, rules=rules, memory="residual") for ddp in tasks]
    every = [encoder, *heads]
    optimizers = many(every)
    batches = Batches(torch.float64)
    start, given = [weights(one) for one in every], [torch.zeros_like(weights(one)) for one in every]
    for step in range(12):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches.loss(tasks[order[step % len(order)]]).backward()
        for total, one in zip(given, every, strict=True):
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in one.parameters()]
            total += torch.cat([g.flatten() for g in grads])
        for optimizer in optimizers:
            optimizer.step()
    worst = torch.zeros(())
    for one, before, total in zip(every, start, given, strict=True):
        waits = torch.zeros_like(total)
        where = 0
        for p in one.parameters():
            owner = next(e for e in reversed(engines) if any(q is p for q in e.stepper.parameters.values()))
            name = next(name for name, q in owner.stepper.parameters.items() if q is p)
            waits[where : where + p.numel()] = owner.residual(name)
            where += p.numel()
        dist.all_reduce(total)
        dist.all_reduce(waits)
        n = dist.get_world_size()
        worst = torch.maximum(worst, ((before - weights(one)) / 0.1 * n + waits - total).abs().max().float())
    rows = [torch.empty_like(weights(encoder)) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights(encoder))
    return torch.stack([worst, torch.stack(rows).std(0).max().float()])


def one_optimizer(every: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for one in every for p in one.parameters()], lr=0.1)]


def an_optimizer_each(every: Sequence[nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(one.parameters(), lr=0.1) for one in reversed(every)]


@pytest.mark.parametrize("many", [one_optimizer, an_optimizer_each])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1)])
def test_two_wrappers_over_one_encoder_lose_nothing(two_ranks: Ranks, many: Any, order: tuple[int, ...]) -> None:
    for lost, apart in two_ranks(law, many, order):
        assert lost < 1e-10
        assert apart == 0


def in_turns(first: int, every_second: bool) -> tuple[float, Tensor]:
    model, batches = network(dtype=torch.float64), Batches(torch.float64)
    ddp = DistributedDataParallel(model)
    engine = attached(ddp, rules=ls.Rules(dense_ndim=0, dense_numel=0), memory="residual")
    halves = [list(model[0].parameters()), list(model[2].parameters())]  # type: ignore[index]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in (halves if first == 0 else halves[::-1])]
    start, given = weights(model), torch.zeros_like(weights(model))
    for step in range(10):
        batches.loss(ddp).backward()
        for number, optimizer in enumerate(optimizers):
            if number and every_second and step % 2:
                optimizer.zero_grad()
                continue
            for p in optimizer.param_groups[0]["params"]:
                place = sum(q.numel() for q in list(model.parameters())[: [*map(id, model.parameters())].index(id(p))])
                given[place : place + p.numel()] += p.grad.flatten()
            optimizer.step()
            optimizer.zero_grad()
    waits = torch.cat([engine.residual(name) for name in engine.stepper.parameters])
    dist.all_reduce(given)
    dist.all_reduce(waits)
    lost = (start - weights(model)) / 0.1 * dist.get_world_size() + waits - given
    return float(lost.abs().max()), weights(model)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("every_second", [False, True])
def test_one_backward_and_two_optimizers_lose_nothing(two_ranks: Ranks, first: int, every_second: bool) -> None:
    (lost, one), (other_lost, other) = two_ranks(in_turns, first, every_second)
    assert max(lost, other_lost) < 1e-10
    assert torch.equal(one, other)


def alone(what: str) -> str:
    """One rank does something else than the others; return the error, or how long nothing came."""
    model, batches = network(), Batches()
    twins = nn.ModuleList([nn.Linear(30, 20), nn.Linear(30, 20)])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twins = twins

        def forward(self, x: Tensor) -> Tensor:
            return self.twins[0](x) + self.twins[1](x)

    ddp = DistributedDataParallel(Both() if what == "another order" else model)
    attached(ddp, rules=ls.Rules(dense_ndim=0, dense_numel=0))
    twin = [optimizer_of("sgd", one.parameters()) for one in twins]
    optimizer, odd = optimizer_of("sgd", model.parameters()), dist.get_rank() == 1
    begin = time.monotonic()
    try:
        for step in range(6):
            different = odd and step == 3
            for number in range(2):
                last = number == 1 or (what == "micro-batches" and different)
                with contextlib.nullcontext() if last else ddp.no_sync():
                    batches.loss(ddp).backward()
            if what == "another order":
                for one in twin[::-1] if different else twin:
                    one.step()
            elif not (what == "skips" and different):
                optimizer.step()
                if what == "steps twice" and different:
                    optimizer.step()
            for one in (*twin, optimizer):
                one.zero_grad()
    except RuntimeError as error:
        return f"{time.monotonic() - begin < WITHIN} {error}"
    return "nothing was said"


@pytest.mark.parametrize("what", ["skips", "steps twice", "micro-batches", "another order"])
def test_ranks_that_do_different_things_all_end_with_a_sentence(what: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks(alone, what):
            assert said.startswith("True The ranks have drifted apart, because they do different things"), said


def not_finite(who: str, bad: float) -> tuple[Tensor, int, int, list[bool]]:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine, optimizer = attached(ddp), optimizer_of("adamw", model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaler" in who else None
    stepped = []
    for step in range(8):
        optimizer.zero_grad()
        loss = batches.loss(ddp)
        if step == 4 and dist.get_rank() == 1:
            loss = loss * bad
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            if who == "scaler that unscales first":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        elif who == "a look at the norm":
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            stepped.append(bool(norm.isfinite()))
            if stepped[-1]:
                optimizer.step()
        else:
            optimizer.step()
    return weights(model), engine.step, engine.skipped_steps, stepped


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("who", ["nobody", "a look at the norm", "scaler", "scaler that unscales first"])
@pytest.mark.parametrize("bad", by_default([float("nan"), float("inf")]))
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(two_ranks: Ranks, who: str, bad: float) -> None:
    one, other = two_ranks(not_finite, who, bad)
    assert torch.equal(one[0], other[0])
    assert one[0].isfinite().all()
    assert one[1:] == other[1:]
    assert one[1:3] == (7, 1)


def refused(what: str) -> str:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine = attached(ddp)
    try:
        if what == "closure":
            optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = batches.loss(ddp)
                loss.backward()
                return loss

            optimizer.step(closure)
        elif what == "inside":
            each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(lambda p: each[p].step())  # type: ignore[no-untyped-call]
            batches.loss(ddp).backward()
        elif what == "two":
            both = [optimizer_of("sgd", model.parameters()) for _ in range(2)]
            batches.loss(ddp).backward()
            for one in both:
                one.step()
        else:
            optimizer = optimizer_of("sgd", model.parameters())
            model[0](torch.randn(8, 30)).sum().backward()  # type: ignore[index]
            ddp(torch.randn(8, 30))
            optimizer.step()
            return f"nothing: {engine.step}"
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("closure", "LBFGS has called its closure a second time"),
        ("inside", "takes a step within a backward"),
        ("two", "Two optimizers step"),
    ],
)
def test_what_cannot_be_as_with_ddp_is_one_sentence(what: str, sentence: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks(refused, what):
            assert sentence in said


def masked(when: str) -> list[float]:
    """Only some rows are trained."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    attached(ddp)
    optimizer = optimizer_of("adamw", [{"params": model.parameters(), "weight_decay": 0.0}])
    first = next(model.parameters())

    def mask(*_: Any) -> None:
        assert first.grad is not None
        first.grad[:20] = 0

    if when == "in a hook of the optimizer":
        optimizer.register_step_pre_hook(mask)
    before = first.detach().clone()
    for _ in range(20):
        optimizer.zero_grad()
        batches.loss(ddp).backward()
        if when == "after backward":
            mask()
        optimizer.step()
    moved = (first.detach() - before).abs()
    return [float(moved[:20].max()), float(moved[20:].max())]


@pytest.mark.parametrize("when", ["after backward", "in a hook of the optimizer"])
def test_rows_that_are_masked_do_not_move(two_ranks: Ranks, when: str) -> None:
    for masked_rows, others in two_ranks(masked, when):
        assert masked_rows == 0
        assert others > 0


def signalled() -> tuple[bool, float]:
    """Rank 0 is late: a signal is handled on rank 1 while it waits in the exchange, and both meet in the handler."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine, optimizer = attached(ddp), optimizer_of("sgd", model.parameters())
    met: list[float] = []
    group = dist.new_group()

    def handle(*_: Any) -> None:
        begin = time.monotonic()
        engine.state_dict()
        dist.barrier(group)
        met.append(time.monotonic() - begin)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for step in range(3):
            optimizer.zero_grad()
            batches.loss(ddp).backward()
            if step == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
                if dist.get_rank() == 0:
                    while not met:
                        time.sleep(0.01)
            optimizer.step()
        return bool(met), met[0]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_handled_while_ranks_wait_for_each_other(two_ranks: Ranks) -> None:
    for handled, seconds in two_ranks(signalled):
        assert handled
        assert seconds < 1.0


def clipped(density: float | None, limit: float) -> tuple[list[float], Tensor]:
    """Norms that clipping by the engine returns, or torch's with plain DDP; and weights."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    clip: Any = nn.utils.clip_grad_norm_ if density is None else attached(ddp, density=density).clip_grad_norm_
    optimizer, norms = optimizer_of("sgd", model.parameters()), []
    for _ in range(6):
        optimizer.zero_grad()
        batches.loss(ddp).backward()
        norms.append(float(clip(model.parameters(), limit)))
        optimizer.step()
    return norms, weights(model)


def test_clipping_at_density_1_is_that_of_plain_ddp(three_ranks: Ranks) -> None:
    plain = three_ranks(clipped, None, 0.1)
    for (norms, found), (plain_norms, expected) in zip(three_ranks(clipped, 1.0, 0.1), plain, strict=True):
        assert norms == plain_norms
        assert torch.equal(found, expected)


def test_the_norm_of_clipping_is_that_of_the_mean_on_all_ranks(three_ranks: Ranks) -> None:
    (expected, _), *_ = three_ranks(clipped, None, 1e9)
    found = three_ranks(clipped, 0.05, 1e9)
    assert all(norms == found[0][0] and torch.equal(moved, found[0][1]) for norms, moved in found)
    assert found[0][0][0] == pytest.approx(expected[0], rel=0.08)
    limited = three_ranks(clipped, 0.05, 0.01)
    assert all(torch.equal(moved, limited[0][1]) for _, moved in limited)
    start = weights(network())
    assert (limited[0][1] - start).norm() < 0.5 * (found[0][1] - start).norm()


def clipped_in_parts(each: bool) -> list[list[float]]:
    """Norms of a run, and of one whose engine ends after three steps and goes on as another one."""
    found = []
    for resumes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 20))  # longer than its sketch
        batches, norms = Batches(), []
        ddp = DistributedDataParallel(model)
        engine = attached(ddp, density=0.05)
        optimizer = optimizer_of("sgd", model.parameters())
        for step in range(6):
            if resumes and step == 3:
                state = engine.state_dict()
                engine.close()
                ddp = DistributedDataParallel(model)
                engine = attached(ddp, density=0.05)
                engine.load_state_dict(state)
            optimizer.zero_grad()
            for micro in range(3):
                with contextlib.nullcontext() if each or micro == 2 else ddp.no_sync():
                    batches.loss(ddp).backward()
            norms.append(float(engine.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
        found.append(norms)
    return found


def test_the_norm_of_clipping_is_the_same_after_a_resume_and_with_micro_batches_synchronised_each(
    two_ranks: Ranks,
) -> None:
    found = [norms for each in (False, True) for one in two_ranks(clipped_in_parts, each) for norms in one]
    assert all(norms == found[0] for norms in found)


def logged_norm() -> tuple[float, list[float | None]]:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine = attached(ddp)
    optimizer = optimizer_of("sgd", model.parameters())
    norm, logged = 0.0, []
    for clips in (True, False):
        optimizer.zero_grad()
        batches.loss(ddp).backward()
        if clips:
            norm = float(engine.clip_grad_norm_(model.parameters(), 0.01))
        optimizer.step()
        logged.append(engine.summary().get("grad_norm"))
    return norm, logged


def test_the_norm_of_clipping_is_logged_in_steps_that_clip(two_ranks: Ranks) -> None:
    for norm, logged in two_ranks(logged_norm):
        assert logged == [norm, None]


def overflowing() -> tuple[int, int, bool]:
    """Steps that counted, those that were skipped, and whether weights are finite, on the path of a device."""
    with static_path():
        model, batches = network(), Batches()
        ddp = DistributedDataParallel(model)
        engine, optimizer = attached(ddp), optimizer_of("sgd", model.parameters())
        for step in range(4):
            optimizer.zero_grad()
            batches.loss(ddp).backward()
            for p in model.parameters() if step == 1 else ():
                assert p.grad is not None
                p.grad.fill_(3e38)  # finite on each rank, and the sum is not
            optimizer.step()
        return engine.step, engine.skipped_steps, bool(weights(model).isfinite().all())


def test_gradients_whose_sum_overflows_skip_one_step_on_a_device(two_ranks: Ranks) -> None:
    assert two_ranks(overflowing) == [(3, 1, True)] * 2


def test_gradients_are_given_free_when_they_are_set_to_none(one_rank: None) -> None:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    attached(ddp, single_device="sparse")
    optimizer = optimizer_of("momentum", model.parameters())
    for _ in range(2):
        batches.loss(ddp).backward()
        optimizer.step()
        kept = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        assert len(kept) == 4
        assert all(one.expired() for one in kept)


@pytest.mark.parametrize("what", ["backward", "step"])
def test_what_is_captured_in_a_graph_is_refused(one_rank: None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine, optimizer = attached(ddp, single_device="sparse"), optimizer_of("sgd", model.parameters())
    loss = batches.loss(ddp)
    if what == "step":
        loss.backward()
    monkeypatch.setattr(engine.stepper, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        loss.backward() if what == "backward" else optimizer.step()


class NeedsNoClosure(torch.optim.SGD):
    """Takes something in the place of a closure, and steps without it."""

    def step(self, what: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"])
        return what


def other_steps(what: str) -> tuple[str, bool]:
    """What is said, and whether ranks end with equal weights."""
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine = attached(ddp)
    said = ""
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            for _ in range(12):
                model.zero_grad()
                loss = batches.loss(ddp)
                loss.backward()
                NeedsNoClosure(model.parameters(), lr=0.1).step(loss if what == "loss" else loss.backward)
        except RuntimeError as error:
            said = str(error)
    said = said or " ".join(str(warning.message) for warning in caught)
    rows = [torch.empty_like(weights(model)) for _ in range(dist.get_world_size())]
    if not engine.closed and what != "ignored closure":
        dist.all_gather(rows, weights(model))
    return said, all(torch.equal(row, rows[0]) for row in rows)


def test_steps_past_the_exchange_are_told_of() -> None:
    with Ranks(2) as ranks:
        assert any("has stepped without calling it" in said for said, _ in ranks(other_steps, "ignored closure"))


def test_an_optimizer_may_take_something_else_than_a_closure(two_ranks: Ranks) -> None:
    for said, equal in two_ranks(other_steps, "loss"):
        assert "closure" not in said and equal


def resumed_at_density_1(density: float | None) -> Tensor:
    model, batches = network(), Batches()
    ddp = DistributedDataParallel(model)
    engine = None if density is None else attached(ddp, density=density)
    optimizer = optimizer_of("adamw", model.parameters())
    for step in range(8):
        if step == 4 and engine is not None:
            engine.load_state_dict(engine.state_dict())
        optimizer.zero_grad()
        batches.loss(ddp).backward()
        clip = nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
        clip(model.parameters(), 0.05)
        optimizer.step()
    return weights(model)


def test_a_state_in_which_nothing_waits_leaves_density_1_to_ddp(three_ranks: Ranks) -> None:
    plain = three_ranks(resumed_at_density_1, None)
    assert all(torch.equal(x, plain[0]) for x in (*plain, *three_ranks(resumed_at_density_1, 1.0)))
