"""``delay=1``: averages of the engine without a delay, one step later; nothing is lost, whenever one looks."""

from __future__ import annotations

import copy
import io
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from lightning_sparse.engine.state.schema import revoke
from lightning_sparse.methods.grouping import make_plan
from tests.contract.cases import CASES
from tests.covering import by_default, covering, in_one_test
from tests.ranks import Ranks
from tests.sums import SIZES, Sums, gradient, waiting
from tests.trainers import EVERYTHING_SPARSE

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "density": 0.05, "watch": None}
MEMORIES: list[Any] = [
    ls.memories.NoMemory(),
    ls.memories.Residual(decay=0.5),
    ls.memories.LowPass(0.25),
    ls.memories.MomentumCorrection(0.5),
    ls.memories.ClipByNorm(4.0),
    ls.memories.WeightDecay(0.01),
    ls.memories.AdamCorrection(),
    ls.memories.SecondMoment(),
]


class Linear(nn.Module):
    """Gradients are given, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in {"long": (40, 20), "wide": (10, 30), "bias": (30,)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, step: int, names: Sequence[str] = ("long", "wide", "bias")) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        given = {name: torch.randn(p.shape, generator=generator) for name, p in self.named_parameters()}
        return torch.stack([(self.get_parameter(name) * given[name]).sum() for name in names]).sum()


def wrapped(module: nn.Module | None = None, **options: Any) -> tuple[DistributedDataParallel, Engine]:
    ddp = {name: options.pop(name) for name in ("find_unused_parameters", "gradient_as_bucket_view") if name in options}
    wrapper = DistributedDataParallel(module or Linear(), bucket_cap_mb=0.001, **ddp)
    return wrapper, ls.attach(wrapper, **{**SPARSE, **options})


def weights(ddp: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in ddp.named_parameters()}


# ---- The shift


def averages_of(options: dict[str, Any], delay: int, steps: int = 5) -> tuple[list[list[Tensor]], dict[str, Any]]:
    """Averages in every backward, and the state at the end."""
    ddp, engine = wrapped(**options, delay=delay)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        ddp(step).backward()
        found.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
    state = engine.state_dict()
    engine.close()
    return found, state


def shifted(cases: Sequence[dict[str, Any]]) -> list[str]:
    """In which cases averages are not those without a delay, one step later, bit for bit."""
    wrong = []
    for options in cases:
        (now, state), (late, at_the_end) = averages_of(options, 0), averages_of(options, 1)
        zeros = not any(bool(x.any()) for x in late[0])
        same = all(
            torch.equal(a, b)
            for one, other in zip(now, late[1:], strict=False)
            for a, b in zip(one, other, strict=True)
        )
        kept = all(
            torch.equal(vector, at_the_end["parameters"][name][key])
            for name, vectors in state["parameters"].items()
            for key, vector in vectors.items()
        )
        last = all(
            torch.equal(_dense(at_the_end["late"][name.removeprefix("module.")], p.numel()).to(p.dtype), p.flatten())
            for name, p in zip(("long", "wide", "bias"), now[-1], strict=True)
        )
        if not (zeros and same and kept and last and at_the_end["step"] == state["step"]):
            wrong.append(f"{options}: {zeros=} {same=} {kept=} {last=}")
    return wrong


def _dense(late: dict[str, Tensor], numel: int) -> Tensor:
    if "indices" not in late:
        return late["values"]
    return torch.zeros(numel, dtype=late["values"].dtype).index_add_(0, late["indices"].long(), late["values"])


METHODS = covering(
    ((case,) for case in CASES),
    together=1,
    seen_as=lambda case: ((case.sparsifier.agreement, case.sparsifier.exchange), (case.numbered, case.private)),
)
SHIFTED: dict[str, list[dict[str, Any]]] = {
    "sparsifiers": [
        {"sparsifier": parameter.values[0].sparsifier, "density": 0.1, "grouping": "model"}
        for parameter in METHODS
        if not parameter.marks
    ],
    "memories": [{"sparsifier": "union_top_k", "memory": memory, "grouping": "layer"} for memory in MEMORIES],
    "settings": [
        {"rules": ls.Rules(dense=["bias"], dense_ndim=0, dense_numel=0)},
        {"density": 1.0},
        {"sparsifier": "everything"},
        {"density": ls.Warmup(1.0, 0.05, 3)},
        {"density": ls.density.Accordion(0.05, 0.2, interval=2), "grouping": "layer"},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "grouping": "model"},
    ],
    "all sparsifiers": [{"sparsifier": case.sparsifier, "density": 0.1, "grouping": "model"} for case in CASES],
}


@pytest.mark.parametrize("which", by_default(SHIFTED, 2))
def test_averages_are_those_without_a_delay_one_step_later(two_ranks: Ranks, which: str) -> None:
    assert two_ranks(shifted, SHIFTED[which]) == [[], []]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "adamw in one group": ("adamw", {"grouping": "model"}),
    "momentum at a falling density": ("momentum", {"density": ls.Warmup(1.0, 0.05, 3)}),
    "momentum and published top-k": ("momentum", {"sparsifier": "top_k"}),
    "momentum left to the optimizer": ("momentum", {"memory": "residual"}),
    "adamw in part": ("adamw", {"rules": ls.Rules(dense=["bias"], dense_ndim=0, dense_numel=0)}),
}


def spends(name: str) -> bool:
    """Return whether momentum is spent by how late an average comes."""
    kind, options = TRAINED[name]
    return kind in ("momentum", "nesterov") and "memory" not in options


def trained(name: str, delay: int, scale: float | None, clip: float | None, steps: int = 5) -> dict[str, Tensor]:
    """Weights when all averages are applied; where momentum is spent early, those to which velocities lead."""
    kind, options = TRAINED[name]
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    ddp, engine = wrapped(**options, delay=delay, scaler=scaler)
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    engine.bind([optimizer])
    for step in range(steps):
        optimizer.zero_grad()
        if clip is not None:
            engine._clip_in_place_of_averages(clip, "norm", optimizer, known=True)
        loss = ddp(step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            engine.ignore_skipped(optimizer)
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    assert engine.drain() == bool(delay) and not engine.drain()
    assert engine.step == steps
    found = weights(ddp)
    if spends(name):
        [group] = optimizer.param_groups
        reach = group["lr"] * group["momentum"] ** (1 + group["nesterov"]) / (1 - group["momentum"])
        for one, p in ddp.named_parameters():
            found[one] -= reach * optimizer.state[p]["momentum_buffer"]
    engine.close()
    return found


@pytest.mark.parametrize(("scale", "clip"), by_default([(None, None), (1024.0, None), (None, 0.5)]))
def test_all_averages_are_applied_in_as_many_steps_when_all_is_drained(
    two_ranks: Ranks, scale: float | None, clip: float | None
) -> None:
    """Gradients that do not depend on weights take them to the same place, but for rounding bit for bit."""
    for name in TRAINED if scale is None else ["momentum", "adamw"]:
        now, late = (two_ranks(trained, name, delay, scale, clip)[0] for delay in (0, 1))
        same = partial(torch.allclose, rtol=1e-5, atol=1e-5) if spends(name) else torch.equal
        assert all(same(now[one], late[one]) for one in now), name


def quadratic(memory: str | None, rate: float, steps: int = 200) -> float:
    """Return the distance from the minimum at which momentum SGD ends, one step late."""
    module = nn.Linear(1, 64, bias=False)
    nn.init.ones_(module.weight)
    ddp, engine = wrapped(module, delay=1, density=0.9, memory=memory)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=0.9)
    engine.bind([optimizer])
    for _ in range(steps):
        optimizer.zero_grad()
        (ddp(torch.ones(1, 1)) ** 2).sum().mul(0.5).backward()
        optimizer.step()
    engine.drain()
    engine.close()
    return float(module.weight.detach().abs().max())


def test_momentum_of_late_averages_is_spent_by_how_late_they_are(two_ranks: Ranks) -> None:
    """Late momentum diverges beyond a rate of 0.1 / curvature; the part that would have acted earlier acts at once."""
    assert max(two_ranks(quadratic, None, 0.15)) < 0.01
    assert min(two_ranks(quadratic, "residual", 0.15)) > 1


# ---- Density 1: old gradients of plain DDP


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * batch + dist.get_rank())
        return self.net(torch.randn(5, 8, generator=generator)).square().mean()


def one_step_old(kind: str, local: int, scale: float | None, steps: int) -> dict[str, Tensor]:
    """Plain DDP; each step is taken with the gradients of the backward before."""
    ddp = DistributedDataParallel(Net())
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    old: list[Tensor | None] = [None for _ in ddp.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        _backward(ddp, step, local, scaler)
        factor = scaler.get_scale()
        new: list[Tensor | None] = [p.grad / factor for p in ddp.parameters()]
        for p, grad in zip(ddp.parameters(), old, strict=True):
            p.grad = None if grad is None else grad * factor
        if step:
            scaler.step(optimizer)
            scaler.update()
        elif scale is not None:  # a scaler counts the first step, too
            scaler._growth_tracker.add_(1)
        old = new
    return weights(ddp)


def _backward(ddp: DistributedDataParallel, step: int, local: int, scaler: torch.amp.GradScaler) -> None:
    for part in range(local - 1):
        with ddp.no_sync():
            scaler.scale(ddp(local * step + part)).backward()
    scaler.scale(ddp(local * step + local - 1)).backward()


def one_step_late(kind: str, local: int, scale: float | None, steps: int) -> tuple[dict[str, Tensor], bool]:
    """The engine at density 1; and whether the first step has left the optimizer without a state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
    ddp, engine = wrapped(Net(), density=1.0, delay=1, scaler=scaler)
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    engine.bind([optimizer])
    untouched = True
    for step in range(steps):
        optimizer.zero_grad()
        before = weights(ddp)
        _backward(ddp, step, local, scaler)
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            untouched = not optimizer.state and all(torch.equal(x, before[n]) for n, x in weights(ddp).items())
    found = weights(ddp)
    assert engine.summary()["steps/without_average"] == 1
    engine.drain()
    engine.close()
    return found, untouched


@in_one_test(
    "kind, scale, local",
    covering(
        product(OPTIMIZERS, [None, 256.0], [1, 3]),
        together=1,
        thorough={3},
        seen_as=lambda kind, scale, local: (kind, (scale, kind in ("momentum", "adamw"))),
    ),
    apart=0,
)
def test_density_1_is_plain_ddp_with_gradients_of_the_step_before(
    two_ranks: Ranks, kind: str, scale: float | None, local: int
) -> None:
    (late, untouched), _ = two_ranks(one_step_late, kind, local, scale, 6)
    expected = two_ranks(one_step_old, kind, local, scale, 6)[0]
    assert untouched
    for name, weight in expected.items():
        assert torch.equal(late[name], weight), name


# ---- Nothing is lost

STEPS, BAD, LEFT_OUT, ALTERNATE, REGROUPED, RELOADED, FLUSHED = 16, 3, 5, (7, 8), 9, 11, 13


def law(now: bool, options: dict[str, Any]) -> list[tuple[dict[str, Tensor], dict[str, Any], dict[str, int]]]:
    """Weights, states and how many gradients of each parameter this rank has absorbed, at every moment of a run.

    Args:
        now: whether states are taken without waiting for the exchange that is in flight.
        options: of the engine.
    """
    everything: dict[str, Any] = {**SPARSE, "sparsifier": "top_k", "grouping": "layer", "delay": 1, **options}
    ddp, engine = wrapped(Sums(), find_unused_parameters=True, **everything)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    engine.bind([optimizer])
    absorbed = dict.fromkeys((f"in_{name}.{name}" for name in SIZES), 0)
    latest = dict(absorbed)
    looks = []

    def look() -> None:
        state = engine._state_now() if now else engine.state_dict()
        counts = dict(absorbed)
        if state["step"] + state["skipped_steps"] < sum(backwards):  # in flight, and not absorbed yet
            counts = {name: counts[name] - latest[name] * (name not in state["absorbed"]) for name in counts}
        looks.append((weights(ddp.module), state, counts))

    backwards: list[int] = []

    for step in range(STEPS):
        optimizer.zero_grad()
        out = ("first", "second") if step == ALTERNATE[0] else ("third", "fourth") if step == ALTERNATE[1] else ()
        loss = ddp(dist.get_rank(), out)
        if step == BAD and dist.get_rank() == 1:
            loss = loss * math.inf
        look()
        loss.backward()
        backwards.append(1)
        for name in absorbed:
            bad = step == BAD and dist.get_rank() == 1
            latest[name] = int(name.rpartition(".")[2] not in out and not bad)
            absorbed[name] += latest[name]
        look()
        if step == LEFT_OUT:
            continue  # its averages go back
        engine.ignore_skipped(optimizer)
        optimizer.step()
        look()
        if step == REGROUPED:
            sizes = [p for group in engine.plan for p in group.parameters][::-1]
            engine.regroup(make_plan(sizes, "model", EVERYTHING_SPARSE))
            look()
        if step == RELOADED:
            buffer = io.BytesIO()
            torch.save(engine.state_dict(), buffer)
            buffer.seek(0)
            engine.close()
            ddp, engine = wrapped(ddp.module, find_unused_parameters=True, **{**everything, "grouping": "model"})
            engine.bind([optimizer])
            assert engine.load_state_dict(torch.load(buffer)) == []
            look()
        if step == FLUSHED:
            ls.flush(engine, [optimizer])
            look()
            assert not any(engine.residual(name).any() for name in absorbed)
    engine.drain()
    look()
    engine.close()
    return looks


@pytest.mark.parametrize(
    ("now", "options"),
    by_default(
        [(False, {}), (True, {"sparsifier": "union_top_k", "exchange": "reduce_union"}), (True, {"density": 1.0})], 2
    ),
)
def test_nothing_is_lost_whenever_one_looks(two_ranks: Ranks, now: bool, options: dict[str, Any]) -> None:
    """Residuals, averages on their way and weights hold all that was absorbed, at every moment, exactly."""
    late = 0
    for (weight, state, counts), (other_weight, other, others) in zip(*two_ranks(law, now, options), strict=True):
        late += bool(state["late"])
        for name, w in weight.items():
            assert torch.equal(w, other_weight[name])
            given = counts[name] * gradient(name, 0).double() + others[name] * gradient(name, 1).double()
            kept = waiting([state, other], name) - 2 * w.double().flatten()
            assert torch.equal(kept, given), (state["step"], name)
    assert late > (4 if now else STEPS)


# ---- States


def resumed(kind: str, options: dict[str, Any], saved: int, delay: int, steps: int = 5) -> list[dict[str, Tensor]]:
    """Weights after all steps: of one run, and of one that goes on from a state after some step."""
    everything = {"sparsifier": "union_top_k", "grouping": "layer", **options}
    results = []
    for stops in (False, True):
        ddp, engine = wrapped(Net(), **everything, delay=1)
        optimizer = OPTIMIZERS[kind](ddp.parameters())
        engine.bind([optimizer])
        for step in range(steps):
            optimizer.zero_grad()
            ddp(step).backward()
            optimizer.step()
            if step == saved and stops:
                files = io.BytesIO(), io.BytesIO()
                torch.save(engine.state_dict(), files[0])
                torch.save(optimizer.state_dict(), files[1])
                engine.close()
                for file in files:
                    file.seek(0)
                ddp, engine = wrapped(ddp.module, **everything, delay=delay)
                optimizer = OPTIMIZERS[kind](ddp.parameters())
                optimizer.load_state_dict(torch.load(files[1]))
                engine.bind([optimizer])
                assert engine.load_state_dict(torch.load(files[0])) == []
        engine.drain()
        results.append(weights(ddp.module))
        engine.close()
    return results


@pytest.mark.parametrize("after", by_default([((0, 1, 2),), ((3,),)]), ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_run_that_is_resumed_after_any_step_goes_on_bit_for_bit(
    two_ranks: Ranks, kind: str, after: tuple[int, ...]
) -> None:
    partly: dict[str, Any] = {"rules": ls.Rules(dense=["*.bias"], dense_ndim=0, dense_numel=0)}
    for saved in after:
        options = partly if (saved % 2 == 0) == (kind == "adamw") else {}
        for whole, stopped in two_ranks(resumed, kind, options, saved, 1):
            assert all(torch.equal(whole[name], stopped[name]) for name in whole), (saved, options)


def three_steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        ddp(dist.get_rank()).backward()
        optimizer.step()


def given_back() -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor], list[str]]:
    """A state with averages that come late, and what an engine without a delay has after loading it."""
    ddp, engine = wrapped(Sums(), sparsifier="top_k", delay=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    three_steps(ddp, optimizer)
    state, weight = engine.state_dict(), weights(ddp.module)
    engine.close()
    _, engine = wrapped(ddp.module, sparsifier="top_k")
    notes = engine.load_state_dict(state)
    after = engine.state_dict()
    engine.close()
    return state, after, weight, notes


def test_without_a_delay_averages_of_a_state_go_back_into_residuals(two_ranks: Ranks) -> None:
    (state, after, weight, notes), (other, other_after, _, _) = two_ranks(given_back)
    assert state["late"] and not after["late"] and not after["pending"] and not notes
    for name in weight:
        assert torch.equal(waiting([state, other], name), waiting([after, other_after], name))


def test_averages_of_a_state_stay_as_they_are_with_another_number_of_ranks(two_ranks: Ranks) -> None:
    states = [one[0] for one in two_ranks(given_back)]
    merged = ls.merge_states(states)
    assert merged["late"].keys() == states[0]["late"].keys()
    for name, late in merged["late"].items():
        assert late["ranks"] == 2
        assert torch.equal(late["values"], states[0]["late"][name]["values"])


# ---- Several optimizers, settings of the last step, errors


def in_turn(delay: int, steps: int = 8) -> dict[str, Tensor]:
    """Two optimizers that take turns, as in a GAN; each average is applied by its own."""
    ddp, engine = wrapped(find_unused_parameters=True, grouping="model", sparsifier="top_k", delay=delay)
    inner = ddp.module
    optimizers = [torch.optim.AdamW([inner.long], lr=0.01), torch.optim.SGD([inner.wide, inner.bias], lr=0.1)]
    engine.bind(optimizers)
    for step in range(steps):
        optimizer = optimizers[step % 2]
        optimizer.zero_grad()
        ddp(step, ["long"] if step % 2 == 0 else ["wide", "bias"]).backward()
        engine.ignore_skipped(optimizer)
        optimizer.step()
    engine.drain()
    found = weights(inner)
    engine.close()
    return found


def test_averages_of_two_optimizers_that_take_turns_wait_for_their_own_turn(two_ranks: Ranks) -> None:
    now, late = (two_ranks(in_turn, delay) for delay in (0, 1))
    for name in now[0]:
        assert torch.equal(late[0][name], late[1][name])
        assert torch.equal(now[0][name], late[0][name]), name


def drained_at_rate_0() -> tuple[bool, float, bool]:
    ddp, engine = wrapped(density=1.0, delay=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    engine.bind([optimizer])
    ddp(0).backward()
    optimizer.step()
    grads = [p.grad for p in ddp.parameters()]
    before = weights(ddp)
    optimizer.param_groups[0]["lr"] = 0.0  # as a schedule that has ended
    engine.drain()
    moved = any(not torch.equal(x, before[name]) for name, x in weights(ddp).items())
    same = all(a is b for a, b in zip(grads, (p.grad for p in ddp.parameters()), strict=True))
    rate = float(optimizer.param_groups[0]["lr"])
    engine.close()
    return moved, rate, same


def test_a_drain_takes_the_settings_of_the_last_step(two_ranks: Ranks) -> None:
    assert two_ranks(drained_at_rate_0) == [(True, 0.0, True)] * 2


def refused() -> list[str]:
    said = []
    ddp, engine = wrapped(delay=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        ddp(step).backward()
        optimizer.step()
    try:
        optimizer.zero_grad()
        ddp(2).backward()
        ddp(3).backward()
    except RuntimeError as error:
        said.append(str(error))
    engine.close()
    for options in ({"messages": "group"}, {"executor": "inline"}):
        try:
            wrapped(delay=1, **options)
        except ValueError as error:
            said.append(str(error))
    ddp, engine = wrapped(delay=1)
    ddp(0).backward()
    try:
        engine.drain()
    except ValueError as error:
        said.append(str(error))
    try:
        engine.close()
    except UserWarning as warning:
        said.append(str(warning))
    return said


def test_what_cannot_be_is_refused_by_name(two_ranks: Ranks) -> None:
    for rank, said in enumerate(two_ranks(refused)):
        assert "no optimizer has stepped" in said[0] and any(
            f" {name} " in said[0] for name in ("long", "wide", "bias")
        )
        assert "messages='group'" in said[1] and "executor" in said[2] and "engine.bind" in said[3]
        assert len(said) == (5 if rank == 0 else 4)
        assert all("engine.drain()" in one for one in said[4:])


def test_groupings_that_send_by_group_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="OptimalMerge"):
        ls.engine.config.SparsificationConfig(delay=1, grouping=ls.tuning.OptimalMerge("published"))
    assert ls.engine.config.SparsificationConfig(delay=1, grouping=ls.tuning.OptimalMerge()).messages == "step"


def test_dense_steps_of_ddp_cannot_take_turns_with_late_ones() -> None:
    with pytest.raises(ValueError, match="fallback"):
        ls.engine.config.SparsificationConfig(delay=1, fallback=True)


class Regroups:
    """Changes groups when a step begins, as planners do."""

    def before_step(self, engine: Engine) -> None:
        if engine.step == 2:
            engine.latest_step()
            engine.regroup([*engine.plan])

    def close(self) -> None:
        pass


def observed(observe: bool) -> list[list[Tensor]]:
    ddp, engine = wrapped(density=0.1, delay=1)
    if observe:
        engine.add_observer(Regroups())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    found = []
    for step in range(5):
        optimizer.zero_grad()
        ddp(step).backward()
        found.append([p.grad.clone() for p in ddp.parameters()])
        optimizer.step()
    engine.drain([optimizer])
    engine.close()
    return found


def test_observers_may_change_groups_when_a_step_begins(two_ranks: Ranks) -> None:
    for alone, seen in zip(two_ranks(observed, False), two_ranks(observed, True), strict=True):
        assert all(
            torch.equal(a, b) for one, other in zip(alone, seen, strict=True) for a, b in zip(one, other, strict=True)
        )


def warmed_up_from_0() -> bool:
    """Whether an optimizer has any state after the first step, which has no averages, at a rate of 0."""
    ddp, engine = wrapped(delay=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5)
    engine.bind([optimizer])
    ddp(0).backward()
    optimizer.step()
    schedule.step()
    known = bool(optimizer.state)
    for step in (1, 2):
        optimizer.zero_grad()
        ddp(step).backward()
        optimizer.step()
    engine.drain()
    engine.close()
    return known


def test_a_first_step_at_rate_0_is_no_rehearsal(two_ranks: Ranks) -> None:
    assert two_ranks(warmed_up_from_0) == [False, False]


def overflowing() -> tuple[list[float], dict[str, Tensor], dict[str, Any], dict[str, int]]:
    """A scale that overflows on one rank; scales after each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=100)
    ddp, engine = wrapped(Sums(), sparsifier="top_k", delay=1, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    scales, counts = [], 0
    for step in range(5):
        optimizer.zero_grad()
        factor = 1e9 if step == 1 and dist.get_rank() == 0 else 1.0
        finite = math.isfinite(float(scaler.get_scale() * torch.tensor(100 * factor)))
        scaler.scale(factor * ddp(dist.get_rank())).backward()
        counts += finite
        scaler.step(optimizer)
        scaler.update()
        scales.append(math.log2(scaler.get_scale()))
    engine.drain([optimizer])
    state, weight = engine.state_dict(), weights(ddp.module)
    engine.close()
    return scales, weight, state, {"counts": counts}


def test_an_overflow_lowers_the_scale_on_all_ranks_and_loses_nothing(two_ranks: Ranks) -> None:
    (scales, weight, state, counts), (others, _, other, other_counts) = two_ranks(overflowing)
    assert scales == others == [120, 120, 119, 119, 119]
    assert state["skipped_steps"] == 1
    for name, w in weight.items():
        kept = waiting([state, other], name) - 2 * w.double().flatten()
        given = counts["counts"] * gradient(name, 0).double() + other_counts["counts"] * gradient(name, 1).double()
        assert torch.equal(kept, given), name


def at_another_rate() -> float:
    """Largest difference between averages in ``.grad`` and twice those of the state before the rate was halved."""
    ddp, engine = wrapped(delay=1, lr_aware=True, grouping="model")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    engine.bind([optimizer])
    for step in range(3):
        optimizer.zero_grad()
        ddp(step).backward()
        optimizer.step()
    late = engine.state_dict()["late"]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.zero_grad()
    ddp(3).backward()
    named = dict(ddp.module.named_parameters())
    off = [(p.grad.flatten() - 2 * _dense(late[name], p.numel())).abs().max() for name, p in named.items()]
    optimizer.step()
    engine.drain()
    engine.close()
    return float(max(off))


def test_averages_on_their_way_keep_what_they_are_worth_at_another_rate(two_ranks: Ranks) -> None:
    assert two_ranks(at_another_rate) == [0.0, 0.0]


def apart(ahead: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and state after an error, where one rank alone has heard of the latest exchange."""
    ddp, engine = wrapped(Sums(), sparsifier="union_top_k", delay=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    three_steps(ddp, optimizer)
    if dist.get_rank() == ahead:
        engine.router.join()
    else:
        engine.router.join_if_over = lambda: None  # it has not arrived here
    state, weight = engine._state_alone(), weights(ddp.module)
    engine.drain([optimizer])
    engine.close()
    return weight, state


@pytest.mark.parametrize("ahead", [-1, 0, 1])
def test_states_of_ranks_that_are_alone_belong_together_whoever_has_settled(two_ranks: Ranks, ahead: int) -> None:
    (weight, state), (_, other) = two_ranks(apart, ahead)
    assert state["step"] == 2 and other["step"] == 2 + (ahead == 1)
    if ahead == 1:
        other = revoke(other)
    assert not state["late"]
    for name, w in weight.items():
        kept = waiting([state, {**other, "late": {}}], name) - 2 * w.double().flatten()
        counts = [2 + (name in one["absorbed"]) for one in (state, other)]
        given = sum(count * gradient(name, rank).double() for rank, count in enumerate(counts))
        assert torch.equal(kept, given), name


# ---- Between backwards: states, steps that are left out, other uses of gradients


def rolled_back() -> bool:
    """Whether an engine that loads an earlier state goes on as a new one that loads it."""
    ends = []
    for again in (False, True):
        ddp, engine = wrapped(delay=1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        engine.bind([optimizer])
        step_of(ddp, optimizer, range(3))
        state, before = engine.state_dict(), weights(ddp.module)
        if again:
            step_of(ddp, optimizer, range(3, 6))
            ddp.module.load_state_dict(before)
        else:
            engine.close()
            ddp, engine = wrapped(ddp.module, delay=1)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            engine.bind([optimizer])
        assert engine.load_state_dict(state) == []
        step_of(ddp, optimizer, range(3, 7))
        steps = engine.state_dict()["step"]
        engine.drain()
        ends.append((steps, weights(ddp.module)))
        engine.close()
    return ends[0][0] == ends[1][0] == 7 and same(ends[0][1], ends[1][1])


def step_of(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(step).backward()
        optimizer.step()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_is_loaded_while_an_exchange_is_in_flight(two_ranks: Ranks) -> None:
    assert two_ranks(rolled_back) == [True, True]


def left_out() -> str:
    """A step is left out before batches add up, and gradients are measured apart; then one meets an average."""
    ddp, engine = wrapped(delay=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    engine.bind([optimizer])
    for step in range(5):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(2 * step).backward()
        ddp(2 * step + 1).backward()
        torch.autograd.grad(ddp.module(0), list(ddp.module.parameters()))
        if step != 2:
            optimizer.step()
    ddp(10).backward()
    try:
        ddp(11).backward()
    except RuntimeError as error:
        return str(error)[:80]
    finally:
        engine.close()
    return ""


def test_gradients_are_refused_on_top_of_averages_and_of_nothing_else(two_ranks: Ranks) -> None:
    assert all("gets a new gradient on top of an average" in told for told in two_ranks(left_out))


def clipped_and_resumed(kind: str) -> bool:
    """Whether a run that is resumed leaves averages alone whose gradients were clipped before the exchange."""
    ends = []
    for resumed in (False, True):
        ddp, engine = wrapped(delay=1)
        optimizer = OPTIMIZERS[kind](ddp.parameters())
        engine.bind([optimizer])
        engine._clip_in_place_of_averages(1.0, "norm", optimizer, known=True)
        for step in range(8):
            if step == 6 and resumed:
                state, of_optimizer = engine.state_dict(), copy.deepcopy(optimizer.state_dict())
                engine.close()
                ddp, engine = wrapped(ddp.module, delay=1)
                optimizer = OPTIMIZERS[kind](ddp.parameters())
                optimizer.load_state_dict(of_optimizer)
                engine.bind([optimizer])
                assert engine.load_state_dict(state) == []
            optimizer.zero_grad()
            (ddp(0) + 0.01 * ddp(step)).backward()  # gradients that nearly agree, so that averages are long
            if not engine._clip_in_place_of_averages(1.0, "norm", optimizer):
                assert step == 0
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        engine.drain()
        ends.append(weights(ddp.module))
        engine.close()
    return same(*ends)


@pytest.mark.parametrize("kind", by_default(["adamw", "momentum"], 1))
def test_a_resumed_run_clips_no_average_whose_gradients_were_clipped(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks(clipped_and_resumed, kind) == [True, True]


def loaded_twice() -> bool:
    """Whether a state that is loaded twice is the same the second time, though averages were changed in between."""
    ddp, engine = wrapped(delay=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    engine.bind([optimizer])
    step_of(ddp, optimizer, range(4))
    state = engine.state_dict()
    before = copy.deepcopy(state)
    engine.close()
    ddp, engine = wrapped(ddp.module, delay=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    engine.bind([optimizer])
    engine.load_state_dict(state)
    for step in range(4, 6):
        optimizer.zero_grad()
        ddp(step).backward()
        for p in ddp.parameters():
            p.grad.mul_(0.3)
        optimizer.step()
    engine.drain()
    engine.close()
    late = [(before["late"][name], state["late"][name]) for name in before["late"]]
    return bool(late) and all(torch.equal(a[key], b[key]) for a, b in late for key in ("values", "divisor") if key in a)


def test_loading_leaves_a_state_as_it_is(two_ranks: Ranks) -> None:
    assert two_ranks(loaded_twice) == [True, True]


def decayed(in_a_hurry: bool) -> dict[str, Tensor]:
    """Weights after steps that follow the backward at once, or when its exchange is over."""
    ddp, engine = wrapped(delay=1, memory=ls.memories.WeightDecay(0.5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    engine.bind([optimizer])
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(step)
        engine.router.submit(partial(time.sleep, 0.05), "in a test")  # the exchange begins behind the optimizer's step
        loss.backward()
        if not in_a_hurry:
            engine.router.join()
        optimizer.step()
    engine.drain()
    engine.close()
    return weights(ddp.module)


def test_weight_decay_is_that_of_the_weights_of_the_backward(two_ranks: Ranks) -> None:
    for hurried, waited in zip(two_ranks(decayed, True), two_ranks(decayed, False), strict=True):
        assert same(hurried, waited)


def frozen_since(name: str) -> float:
    """What is missing of a parameter's averages on their way once it is frozen and thawed; on all ranks together."""
    options = {"delay": 1, "sparsifier": "top_k", "rules": ls.Rules(dense=["bias"], dense_ndim=0, dense_numel=0)}
    ddp, engine = wrapped(**options)
    step_of(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(3))
    state, parameters = engine.state_dict(), dict(engine.parameters)
    engine.close()
    p = ddp.module.get_parameter(name)
    late = _dense(state["late"][name], p.numel()).double() * (2 if dist.get_rank() == 0 else 0)
    expected = state["parameters"][name].get("residual", torch.zeros(p.numel())).double() + late
    for trains in (False, True):
        p.requires_grad_(trains)
        ddp, engine = wrapped(ddp.module, **options)
        assert engine._take_over(state, parameters) == []
        state, parameters = engine.state_dict(), {**engine.parameters, **engine.frozen}
        engine.close()
    missing = expected - state["parameters"][name]["residual"].double()
    dist.all_reduce(missing)
    return float(missing.abs().max())


def test_averages_on_their_way_to_a_frozen_parameter_go_back_into_its_residual(two_ranks: Ranks) -> None:
    assert max(*two_ranks(frozen_since, "long"), *two_ranks(frozen_since, "bias")) < 1e-5


def drained_by_the_latest() -> bool:
    """Whether the optimizer that has stepped last applies the last averages, and no earlier one that is still there."""
    ends = []
    for bound in (False, True):
        ddp, engine = wrapped(delay=1)
        first, second = (torch.optim.SGD(ddp.parameters(), lr=rate) for rate in (0.5, 0.1))
        step_of(ddp, first, range(2))
        if bound:
            engine.bind([second])
        step_of(ddp, second, range(2, 4))
        engine.drain()
        ends.append(weights(ddp.module))
        engine.close()
    return same(*ends)


def test_optimizers_that_nobody_bound_apply_the_last_averages(two_ranks: Ranks) -> None:
    assert two_ranks(drained_by_the_latest) == [True, True]


def scales(resumed: bool) -> list[float]:
    """The scale of the loss after each step; the gradient of step 3 is infinite on rank 1, and arrives in step 4."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    ddp, engine = wrapped(delay=1, scaler=scaler)
    found = []
    for step in range(6):
        if step == 4 and resumed:
            state, saved = engine.state_dict(), scaler.state_dict()
            engine.close()
            scaler = torch.amp.GradScaler("cpu", growth_interval=1000)
            scaler.load_state_dict(saved)
            ddp, engine = wrapped(ddp.module, delay=1, scaler=scaler)
            engine.load_state_dict(state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        loss = scaler.scale(ddp(step))
        (loss * math.inf if step == 3 and dist.get_rank() == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(scaler.get_scale())
    engine.drain([optimizer])
    engine.close()
    return found


def test_a_loss_scaler_hears_of_a_skipped_exchange_that_a_state_holds(two_ranks: Ranks) -> None:
    assert two_ranks(scales, False) == two_ranks(scales, True) == [[1024.0] * 4 + [512.0] * 2] * 2
