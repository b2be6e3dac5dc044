"""The exchange within backward: the same averages as in the step, nothing lost, and errors on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.hsdp.attach import refuse_without_ddp
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from tests.covering import by_default, covering
from tests.ranks import Ranks, error_of
from tests.static_path import static_path
from tests.warm import warm_python

KINDS = ["sgd", "momentum", "adamw"]
GROUPINGS = ["layer", "bucket", "model", ls.grouping.MergeBelow(1500)]
EVERYTHING = ls.Rules(dense_ndim=0, dense_numel=0)
BUCKET_MB = 0.002
"""Of DDP's buckets: gradients of each layer come alone."""
WITHIN = 5.0
"""Seconds in which ranks have to end."""


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(30, 20)).to(dtype)


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


class Run:
    """A model, DDP, an engine and an optimizer."""

    def __init__(self, kind: str = "sgd", dtype: torch.dtype = torch.float32, views: bool = False, **settings: Any):
        self.model = network(dtype)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=views)
        given = {"density": 0.05, "watch": None, "overlap": True, "grouping": "layer", "bucket_cap_mb": 0.01}
        self.engine = ls.attach(self.ddp, **{**given, **settings})
        self.optimizer = optimizer_of(kind, self.model.parameters())
        self._random, self._dtype = torch.Generator().manual_seed(dist.get_rank() + 1), dtype

    @property
    def sent(self) -> int:
        """Messages that travel alone, of those that wait for the step."""
        waiting = getattr(self.engine.stepper, "_waiting", None)
        return 0 if waiting is None else len(waiting.sent)

    def backward(self, factor: float = 1.0) -> None:
        x = torch.randn(8, 30, generator=self._random).to(self._dtype)
        (factor * (self.ddp(x) - x[:, :20].sin()).square().mean()).backward()

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.backward(factor)
        self.optimizer.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    def gradient(self) -> Tensor:
        every = self.engine.stepper.parameters.values()
        return torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in every])

    def residual(self) -> Tensor:
        every = map(self.engine.residual, self.engine.stepper.parameters)
        return torch.cat([one for one in every if one is not None] or [torch.empty(0)])


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


# ------------------------------------------------------------------------------------------------ equal averages


def averages(kind: str, settings: dict[str, Any], more: str = "", steps: int = 5) -> tuple[list[Tensor], int]:
    """Averages and weights of each step, and the most messages of a backward."""
    dtype = torch.bfloat16 if more == "bfloat16" else torch.float32
    with static_path() if more == "static" else contextlib.nullcontext():
        run = Run(kind, dtype, views=more == "views", **settings)
        found, most = [], 0
        for step in range(steps):
            run.optimizer.zero_grad(set_to_none=more != "zeros")
            with run.ddp.no_sync() if more == "micro-batches" else contextlib.nullcontext():
                if more == "micro-batches":
                    run.backward()
            if more == "flush" and step == 2:
                run.engine._flush_next_step()
            if more == "rates":
                run.optimizer.param_groups[0]["lr"] = [0.1, 0.05, 0.0, 0.2, 0.1][step]
            run.backward()
            most = max(most, run.sent)
            run.optimizer.step()
            found += [run.gradient(), run.weights(), run.residual()]
        run.engine.close()
    return found, most


def ranks_of(request: Any, n: int) -> Ranks:
    found: Ranks = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[n])
    return found


def assert_alike(ranks: Ranks, kind: str, settings: dict[str, Any], more: str = "") -> int:
    plain = ranks(averages, kind, {**settings, "overlap": False}, more)
    hidden = ranks(averages, kind, settings, more)
    for (expected, none), (found, most) in zip(plain, hidden, strict=True):
        assert none == 0
        assert most > 0
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), (number, (one - other).abs().max())
    return hidden[0][1]


@pytest.mark.parametrize(
    ("kind", "grouping", "n"), by_default(covering((k, g, n) for k in KINDS for g in GROUPINGS for n in (2, 3, 4)), 8)
)
def test_averages_are_those_of_the_step_bit_for_bit(request: Any, kind: str, grouping: Any, n: int) -> None:
    most = assert_alike(ranks_of(request, n), kind, {"grouping": grouping})
    assert most == 1 if grouping == "model" else most > 1


SPARSIFIERS = [name for name, _ in ls.sparsifiers.SPARSIFIERS.items() if name != "everything"]
CARRIED = [
    cell
    for cell in product(SPARSIFIERS, KINDS, (2, 3, 4))
    if cell[0] not in ("gtop_k", "ok_top_k") or cell[1] != "adamw"
]
"""Two exchanges carry no second moments."""


@pytest.mark.parametrize(("sparsifier", "kind", "n"), by_default(covering(CARRIED, together=1), 6))
def test_averages_of_every_sparsifier(request: Any, sparsifier: str, kind: str, n: int) -> None:
    chosen = ls.sparsifiers.HardThreshold(0.01) if sparsifier == "hard_threshold" else sparsifier
    assert_alike(ranks_of(request, n), kind, {"sparsifier": chosen, "rules": EVERYTHING})


MORE = ["views", "zeros", "micro-batches", "flush", "bfloat16", "static"]


@pytest.mark.parametrize(("kind", "more"), by_default(covering((k, m) for k in KINDS[1:] for m in MORE), 7))
def test_averages_where_gradients_lie_and_come_otherwise(three_ranks: Ranks, kind: str, more: str) -> None:
    assert_alike(three_ranks, kind, {"rules": EVERYTHING}, more)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory": ls.memories.Residual(rates=True)},
        {"memory": ls.memories.MomentumCorrection(0.5)},
        {"memory": "low_pass"},
        {"density": ls.Warmup(1.0, 0.02, steps=3)},
        {"rules": ls.Rules(densities={"0.*": 0.5})},
        {"sparsifier": "top_k", "exchange": "reduce_union"},
        {"sparsifier": "everything"},
    ],
    ids=str,
)
def test_averages_with_other_settings(two_ranks: Ranks, settings: dict[str, Any]) -> None:
    if settings == {"sparsifier": "everything"}:  # DDP averages by itself
        plain = two_ranks(averages, "sgd", {**settings, "overlap": False})
        hidden = two_ranks(averages, "sgd", settings)
        assert all(torch.equal(a, b) for a, b in zip(plain[0][0], hidden[0][0], strict=True) if a.numel())
        return
    assert_alike(two_ranks, "sgd", settings, "rates" if "rates=True" in str(settings) else "")


class Odd(nn.Module):
    """Parameters that lie otherwise than most do."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(
            memory_format=torch.channels_last
        )
        self.empty, self.factor = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(8, 30).t())
        self.first, self.tied = nn.Linear(30, 30), nn.Linear(30, 30)
        self.tied.weight = self.first.weight
        self.short, self.frozen = nn.Linear(30, 30).bfloat16(), nn.Linear(30, 30).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maps(x).mean((2, 3)) @ self.turned.t() * self.factor + self.empty.sum()
        x = self.tied(self.frozen(self.first(x)).tanh())
        return self.short(x.bfloat16()).float()


def odd_weights(overlap: bool, views: bool) -> tuple[Tensor, int]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Odd(), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=views)
    engine = ls.attach(ddp, density=0.1, watch=None, overlap=overlap, grouping="layer", rules=EVERYTHING)
    held = [p for name, p in ddp.module.named_parameters() if p.requires_grad and name != "maps.2.weight"]
    optimizer = torch.optim.SGD([{"params": held[:4], "lr": 0.1}, {"params": held[4:]}], lr=0.05, momentum=0.9)
    generator, hidden = torch.Generator().manual_seed(dist.get_rank()), 0
    for _ in range(5):
        optimizer.zero_grad()
        ddp.module.maps[2].weight.grad = None  # which no optimizer holds
        ddp(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
        hidden += engine.stepper._waiting is not None if overlap else 0
        optimizer.step()
    return torch.cat([p.detach().flatten().float() for p in ddp.parameters()]), hidden


@pytest.mark.parametrize("views", [False, True])
def test_averages_of_parameters_that_lie_otherwise(two_ranks: Ranks, views: bool) -> None:
    plain, hidden = two_ranks(odd_weights, False, views), two_ranks(odd_weights, True, views)
    for weights, backwards in hidden:
        assert backwards == 4
        assert torch.equal(weights, plain[0][0])


# ----------------------------------------------------------------------------------------------------- the law


def history(seed: int, save: bool) -> tuple[float, float, int, int]:
    """A random history in float64; return what was lost, how weights differ, and the steps that counted or did not.

    With ``save``, states at every hook between backward and step, one of which takes the place of the engine's.
    """
    choose = torch.Generator().manual_seed(seed)

    def one_of(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=choose))]

    run = Run(
        "sgd",
        torch.float64,
        views=one_of(True, False),
        rules=EVERYTHING,
        memory="residual",
        grouping=one_of(*GROUPINGS),
        sparsifier=one_of("union_top_k", "top_k", "exdyna", "gtop_k"),
    )
    engine, n, rank = run.engine, dist.get_world_size(), dist.get_rank()
    start = run.weights()
    given = torch.zeros_like(start)
    worst, here = 0.0, dict[int, Tensor]()
    take = engine.stepper.take

    def noting(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        here.update((id(p), grad.flatten().clone()) for p, grad in zip(parameters, gradients, strict=True))
        take(parameters, gradients)

    engine.stepper.take = noting

    def lost(moved: Tensor, waits: Tensor) -> float:
        return float((summed(waits) + n * moved / 0.1 - summed(given)).abs().max())

    def remembered() -> Tensor:
        state = engine.state_dict()
        assert not state["pending"]
        return torch.cat([state["parameters"][name]["residual"] for name in engine.stepper.parameters])

    for step in range(14):
        run.optimizer.zero_grad()
        for _ in range(one_of(0, 0, 2)):
            with run.ddp.no_sync():
                run.backward()
        bad = step > 2 and one_of(*range(5)) == 0
        if bad:  # in one layer, on one rank: others were absorbed before
            layer = run.model[2 * one_of(0, 1, 2)]  # type: ignore[index]
            handle = layer.weight.register_hook(
                lambda grad: grad.index_fill(0, torch.tensor([3]), float("nan")) if rank == 1 else grad
            )
        run.backward()
        local = torch.cat([here[id(p)] for p in run.model.parameters()]) if here else run.gradient()
        if bad:
            handle.remove()
            assert not run.gradient().isfinite().all()
            assert rank != 1 or local.isnan().any()
        else:
            assert torch.equal(local, run.gradient())
        given += local.nan_to_num(0.0)  # what is finite waits
        if save and step:  # before the first step, the optimizer is not known
            worst = max(worst, lost(start - run.weights(), remembered()))
        if not bad and one_of(True, False):
            run.optimizer.step()
        elif not bad:  # within a closure, which forms nothing anew
            run.optimizer.step(lambda: 0.0)  # type: ignore[arg-type]
        match one_of(*range(8)):
            case 0:
                sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
                engine.regroup(make_plan(sizes, one_of(*GROUPINGS), EVERYTHING, 0.01))
            case 1:
                engine.load_state_dict(engine.state_dict())
            case 2:
                engine._flush_next_step()
            case 3:
                ls.flush(engine, [run.optimizer])
        worst = max(worst, lost(start - run.weights(), run.residual()))
    rows = [torch.empty_like(start) for _ in range(n)]
    dist.all_gather(rows, run.weights())
    return worst, float(torch.stack(rows).std(0).max()), engine.step, engine.skipped_steps


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("seed", by_default(range(12), 2))
@pytest.mark.parametrize("n", [2, 3])
def test_nothing_is_lost_in_random_histories(request: Any, seed: int, n: int) -> None:
    for worst, apart, steps, skipped in ranks_of(request, n)(history, seed, seed % 2 == 0):
        assert worst < 1e-10
        assert apart == 0
        assert steps + skipped == 14


def saved_at_hooks(kind: str) -> list[float]:
    """What states lose that are taken within backward, at each bucket, and between backward and step."""
    run = Run(kind, torch.float64, rules=EVERYTHING, memory="residual")
    engine, n = run.engine, dist.get_world_size()
    for _ in range(3):
        run.step()
    found: list[float] = []
    names = list(engine.stepper.parameters)
    before = {name: engine.residual(name).clone() for name in names}  # type: ignore[union-attr]
    states: list[dict[str, Any]] = []
    take = engine.stepper.take

    def and_save(parameters: Any, gradients: Any) -> None:
        take(parameters, gradients)
        states.append(engine.state_dict())

    engine.stepper.take = and_save
    run.optimizer.zero_grad()
    run.backward()
    local = {name: p.grad.flatten().clone() for name, p in engine.stepper.parameters.items()}  # type: ignore[union-attr]
    states.append(engine.state_dict())
    for number, state in enumerate(states):
        absorbed = set(state["absorbed"])
        assert len(absorbed) == len(names) if number >= len(states) - 2 else absorbed < set(names)
        for name in names:
            expected = before[name] + (local[name] if name in absorbed else 0)
            found.append(float((state["parameters"][name]["residual"] - expected).abs().max()))
    start = run.weights()
    run.optimizer.step()
    moved = {name: p.grad.flatten() for name, p in engine.stepper.parameters.items()}  # type: ignore[union-attr]
    for name in names:  # a run that goes on from the last state has all that was stepped with
        waited = summed(states[-1]["parameters"][name]["residual"])
        found.append(float((waited - summed(engine.residual(name)) - n * moved[name]).abs().max()))  # type: ignore[arg-type]
    assert not torch.equal(start, run.weights())
    assert engine.state_dict()["absorbed"] == []
    return found


@pytest.mark.parametrize("kind", KINDS[:2])
def test_states_within_backward_hold_all_that_was_absorbed(three_ranks: Ranks, kind: str) -> None:
    for found in three_ranks(saved_at_hooks, kind):
        assert max(found) < 1e-12


def resumed(kind: str) -> list[Tensor]:
    """Weights of a run, and of one that is saved between steps and goes on with a new engine."""
    found = []
    for resumes in (False, True):
        run = Run(kind)
        for step in range(6):
            if resumes and step == 3:
                state = run.engine.state_dict()
                run.engine.close()
                run.ddp = DistributedDataParallel(run.model, bucket_cap_mb=BUCKET_MB)
                settings = {"density": 0.05, "watch": None, "overlap": True, "grouping": "layer"}
                run.engine = ls.attach(run.ddp, **settings)
                run.engine._show(run.optimizer)
                run.engine.load_state_dict(state)
            run.step()
        found.append(run.weights())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: Ranks, kind: str) -> None:
    for whole, in_two in two_ranks(resumed, kind):
        assert torch.equal(whole, in_two)


# --------------------------------------------------------------------------------------------------- refusals


def clip_by_hand(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)


def mask(run: Run) -> None:
    run.model[0].weight.grad[:3] = 0  # type: ignore[index]


def on_one_rank(change: Callable[[Run], None]) -> Callable[[Run], None]:
    return lambda run: change(run) if dist.get_rank() == 1 else None


def replace(run: Run) -> None:
    run.model[0].weight.grad = run.model[0].weight.grad.clone()  # type: ignore[index]


def zero(run: Run) -> None:
    run.optimizer.zero_grad()


def another_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.5


def half(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.model[0].parameters(), lr=0.1)  # type: ignore[index]


def fused_scaler(run: Run) -> None:
    run.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]


def unscaled(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(run.optimizer)


WEIGHT = "Gradients were changed between backward and the optimizer's step: 0.weight"
"""Views of one bucket share a version, so that others of it are named, too."""
ALL = (
    "Gradients were changed between backward and the optimizer's step: 0.weight, 0.bias, 2.weight, 2.bias, 4.weight and"
)
BETWEEN: dict[str, tuple[Any, str]] = {
    "clipped by torch": (clip_by_hand, ALL),
    "clipped by the engine": (lambda run: run.engine.clip_grad_norm_(run.model.parameters(), 1e9), ALL),
    "values clipped": (lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 1e9), ALL),
    "masked": (mask, WEIGHT),
    "scaled past the version": (lambda run: run.model[4].weight.grad.data.mul_(2), ALL),
    "masked on one rank": (on_one_rank(mask), WEIGHT),
    "replaced on one rank": (on_one_rank(replace), WEIGHT),
    "zeroed on one rank": (on_one_rank(zero), ALL),
    "a local backward": (lambda run: run.model(torch.randn(8, 30).double()).sum().backward(), ALL),
    "a second backward": (Run.backward, "A second synchronised backward has begun"),
    "a second backward on one rank": (on_one_rank(Run.backward), "The ranks have drifted apart"),
    "thrown away": (lambda run: (zero(run), run.backward()), "A second synchronised backward has begun"),
    "another rate": (another_rate, "Learning rates have changed between backward"),
    "another rate on one rank": (on_one_rank(another_rate), "The ranks have drifted apart"),
    "another optimizer": (half, "An optimizer steps other parameters"),
    "an optimizer of half a group": (half, "Groups cannot change between a backward and the optimizer's step"),
    "a scaler": (unscaled, ALL),
    "a scaler of a fused optimizer": (fused_scaler, "Losses cannot be scaled with overlap=True"),
    "engine.exchange": (
        lambda run: run.engine.exchange(run.model.parameters()),
        "engine.exchange() does not go with overlap=True",
    ),
    "regrouping": (lambda run: run.engine.regroup(run.engine.groups), "Groups can only be changed between two steps"),
    "loading": (lambda run: run.engine.load_state_dict(run.engine.state_dict()), "A state can only be loaded between"),
    "a flush": (lambda run: ls.flush(run.engine, [run.optimizer]), "Residuals can only be taken between two steps"),
    "closures called twice": (
        lambda run: torch.optim.LBFGS(run.model.parameters(), max_iter=3).step(lambda: run.backward() or 1.0),
        "A second synchronised backward has begun",
    ),
}


def refused(what: str, views: bool) -> tuple[str, float, float]:
    """What is said, after how long, and what is lost with it."""
    rates = ls.memories.Residual(rates=True) if "rate" in what else "residual"
    grouping = "model" if "group" in what else "layer"
    run = Run("sgd", torch.float64, views=views, rules=EVERYTHING, memory=rates, grouping=grouping)
    for _ in range(3):
        run.step()
    before = run.residual()
    run.optimizer.zero_grad()
    run.backward()
    local = run.gradient().clone() * (0.1 if "rate" in what else 1)

    def go_on() -> None:
        BETWEEN[what][0](run)
        run.optimizer.step()

    begin = time.monotonic()
    said = error_of(go_on)
    seconds = time.monotonic() - begin
    state = run.engine.state_dict()
    waits = torch.cat([state["parameters"][name]["residual"] for name in run.engine.stepper.parameters])
    # A second backward of one rank is a gradient that ranks do not agree on: it is not absorbed.
    return said, seconds, float((waits - before - local).abs().max())


@pytest.mark.parametrize("what", by_default(BETWEEN, 9))
@pytest.mark.parametrize("views", by_default([False, True]))
def test_refusals_are_errors_on_all_ranks_and_lose_nothing(what: str, views: bool) -> None:
    with Ranks(2) as ranks:
        for said, seconds, lost in ranks(refused, what, views):
            assert BETWEEN[what][1] in said, said
            assert seconds < WITHIN
            assert lost < 1e-12


def flushed_by_one() -> str:
    """Messages of other lengths would meet, and end the processes."""
    run = Run(rules=EVERYTHING)
    for _ in range(2):
        run.step()
    if dist.get_rank() == 1:
        run.engine._flush_next_step()
    return error_of(run.step)


def test_ranks_that_would_send_different_things_are_told_before() -> None:
    with Ranks(2) as ranks:
        for said in ranks(flushed_by_one):
            assert "drifted apart" in said
            assert "rank 1 begins a backward, which flushes" in said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fallback": True}, "Expected fallback to be False with overlap=True: dense steps are not timed beside it"),
        ({"node_size": 2}, "Expected overlap to be False with node_size: nodes average gradients in backward"),
        ({"overlap": 1}, "Expected overlap to be True or False, but got 1"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ls.SparseDDPStrategy(**{"overlap": True, **settings})


def test_sharded_models_do_not_overlap() -> None:
    with pytest.raises(ValueError, match="Expected overlap to be False for a sharded model, but got True"):
        refuse_without_ddp(ls.SparseDDPStrategy(overlap=True).config)


def refused_at_construction(options: dict[str, Any]) -> str:
    ddp = DistributedDataParallel(network(), **options)
    return error_of(lambda: ls.attach(ddp, overlap=True))


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_which_parameters_are_used_has_to_be_known(two_ranks: Ranks, option: str) -> None:
    for said in two_ranks(refused_at_construction, {option: True}):
        assert "Expected find_unused_parameters and static_graph to be False with overlap=True" in said


def two_optimizers() -> str:
    run = Run()
    halves = list(run.model[0].parameters()), [p for layer in run.model[2:] for p in layer.parameters()]  # type: ignore[index]
    optimizers = [torch.optim.SGD(half, lr=0.1) for half in halves]

    def train() -> None:
        for _ in range(3):
            run.backward()
            for one in optimizers:
                one.step()
                one.zero_grad()

    return error_of(train)


def test_two_optimizers_are_one_sentence() -> None:
    with Ranks(2) as ranks:
        for said in ranks(two_optimizers):
            assert "An optimizer steps other parameters than those" in said


def mended(how: str) -> tuple[str, float, bool, int]:
    """What is said of gradients that were not finite in backward and are in the step, and what is lost with it."""
    run = Run("sgd", torch.float64, rules=EVERYTHING, memory="residual")
    for _ in range(3):
        run.step()
    run.optimizer.zero_grad()
    before, start, here = run.residual(), run.weights(), dict[str, Tensor]()
    parameters = run.engine.stepper.parameters
    last = next(iter(parameters))
    parameters[last].register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), float("inf")))
    for name, p in parameters.items():
        p.register_hook(lambda grad, name=name: here.update({name: grad.nan_to_num(posinf=0.0)}))  # type: ignore[misc]
    run.backward()
    for name, p in parameters.items() if how != "as they are" else ():
        p.grad = here[name] if how == "mended" else torch.zeros_like(p)
    said = error_of(run.optimizer.step)
    local = torch.cat([here[name].flatten() for name in parameters])
    lost = float((run.residual() - before - local).abs().max())
    return said, lost, torch.equal(run.weights(), start), run.engine.skipped_steps


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("how", ["as they are", "zeroed", "mended"])
def test_gradients_that_were_not_finite_are_not_exchanged_again(how: str) -> None:
    with Ranks(2) as ranks:
        for said, lost, still, skipped in ranks(mended, how):
            assert (said == "nothing") if how == "as they are" else ("Gradients were changed between" in said)
            assert lost < 1e-12
            assert still
            assert skipped == 1


def beside_another_engine() -> str:
    run = Run()
    for _ in range(2):
        run.step()
    later = ls.attach(DistributedDataParallel(run.model), density=0.05, watch=None)
    said = error_of(run.step)
    later.close()
    return said


def test_two_engines_of_one_model_are_one_sentence() -> None:
    with Ranks(2) as ranks:
        for said in ranks(beside_another_engine):
            assert "Another engine holds parameters of this one" in said


# ---------------------------------------------------------------------------------- threads, signals, and errors


def signalled(when: str) -> tuple[int, int, bool]:
    """Rank 1 is asked for a state while it waits for rank 0: in the step, or for its thread after the header."""
    run = Run("sgd", torch.float64, rules=EVERYTHING, memory="residual")
    engine, moments = run.engine, list[int]()
    for _ in range(2):
        run.step()
    wait_for_rank_0 = dist.get_rank() == 1

    def handle(*_: Any) -> None:
        state = engine.state_dict()
        moments.append(state["moment"])
        if when == "thread":  # rank 0 has gone on
            moments.append(engine.state_dict(torch.tensor([engine.step + 1]))["moment"])

    before = signal.signal(signal.SIGUSR1, handle)
    start = engine._sending.start if hasattr(engine, "_sending") else engine.stepper._sending.start

    def late(message: Any) -> Any:
        answer = start(message)

        def wait() -> Tensor:
            time.sleep(0.2)
            return answer()

        return wait

    try:
        if when == "thread" and wait_for_rank_0:
            engine.stepper._sending.start = late
        if wait_for_rank_0:
            threading.Timer(0.4 if when == "thread" else 0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        run.optimizer.zero_grad()
        run.backward()
        if when == "header" and not wait_for_rank_0:
            time.sleep(1.0)
        run.optimizer.step()
        deadline = time.monotonic() + 3
        while wait_for_rank_0 and not moments and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        signal.signal(signal.SIGUSR1, before)
    run.engine.stepper.__dict__.pop("_sending.start", None)
    return len(moments), moments[-1] if moments else 0, engine.stepper.hides


@pytest.mark.parametrize("when", ["header", "thread"])
def test_handlers_run_while_a_step_waits(when: str) -> None:
    with Ranks(2) as ranks:
        (none, _, hides), (handled, moment, other) = ranks(signalled, when)
    assert not hides
    assert not other
    assert none == 0
    assert (handled, moment) == ((1, 2) if when == "header" else (2, 3))


def failing(where: str) -> tuple[str, float, int]:
    run = Run(rules=EVERYTHING)
    for _ in range(2):
        run.step()
    sending, odd = run.engine.stepper._sending, dist.get_rank() == 1
    start = sending.start

    def fail(message: Any) -> Any:
        if odd:
            raise ValueError("a bad day")
        return start(message)

    def go_on() -> None:
        if where == "thread":
            sending.start = fail
        elif where == "backward" and odd:
            run.model[2].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[index]
        begin_step = run.optimizer.zero_grad
        begin_step()
        run.backward()
        if where == "user" and odd:
            run.engine.close()
            raise ValueError("a bad day")
        run.optimizer.step()

    begin = time.monotonic()
    said = error_of(go_on)
    if where == "backward" and odd:
        run.engine.close()
    return said, time.monotonic() - begin, threading.active_count()


@pytest.mark.parametrize("where", ["thread", "backward", "user"])
def test_an_error_on_one_rank_ends_all(where: str) -> None:
    with Ranks(2) as ranks:
        (other, seconds, _), (said, own, _) = ranks(failing, where)
    assert {"thread": "ValueError: a bad day", "backward": "ZeroDivisionError", "user": "a bad day"}[where] in said
    assert "lost another rank" in other or "failed" in other, other
    assert max(seconds, own) < WITHIN


def waits_alone() -> tuple[str, float, str, float]:
    """Rank 1 fails, and its engine is closed, while its thread waits for rank 0, which comes later."""
    run = Run(rules=EVERYTHING)
    for _ in range(2):
        run.step()
    odd = dist.get_rank() == 1
    if odd:
        run.model[0].weight.register_hook(lambda grad: 1 / 0)  # type: ignore[index]
    else:
        time.sleep(1.5)
    begin = time.monotonic()
    said = error_of(run.step)
    middle = time.monotonic()
    closing = error_of(run.engine.close) if odd else "nothing"
    return said, middle - begin, closing, time.monotonic() - middle


def test_a_thread_that_waits_ends_with_its_engine() -> None:
    with Ranks(2) as ranks:
        (other, *_), (said, seconds, closing, closes) = ranks(waits_alone)
    assert "lost another rank" in other
    assert "ZeroDivisionError" in said
    assert closing == "nothing"
    assert max(seconds, closes) < 1


FAILS = """
import time, torch, torch.distributed as dist, lightning_sparse as ls
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(30, 30) for _ in range(4)])
ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
engine = ls.attach(ddp, overlap=True, grouping="layer", watch=None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == 2 and dist.get_rank() == 0:
        time.sleep(3)
    elif step == 2:
        model[0].weight.register_hook(lambda grad: 1 / 0)
    ddp(torch.randn(4, 30)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_process_that_fails_ends_with_its_error_and_not_with_a_signal() -> None:
    """Where the interpreter ends a thread within a message of gloo, that ends the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    command = [warm_python(), "-c", FAILS]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **of_all, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], said
    assert "LostRankError" in said[0]
    assert "ZeroDivisionError" in said[1]


def closed_between() -> tuple[str, float, bool]:
    run = Run(rules=EVERYTHING)
    for _ in range(2):
        run.step()
    run.backward()
    before, begin = run.weights(), time.monotonic()
    run.engine.close()
    seconds = time.monotonic() - begin
    return error_of(run.optimizer.step), seconds, torch.equal(before, run.weights())


def test_an_engine_that_is_closed_between_backward_and_step() -> None:
    with Ranks(2) as ranks:
        for said, seconds, equal in ranks(closed_between):
            assert "The engine was closed between a backward and this step of SGD" in said
            assert seconds < WITHIN
            assert equal


def interrupted(often: bool) -> tuple[Tensor, set[int]]:
    """Weights of a run whose states are asked for at any moment, and how many gradients they have absorbed."""
    run = Run("sgd", torch.float64, rules=EVERYTHING, memory="residual", overlap=often)
    for _ in range(2):
        run.step()
    absorbed, ends = set[int](), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: absorbed.add(len(run.engine.state_dict()["absorbed"])))
    choose = torch.Generator().manual_seed(dist.get_rank())

    def ask() -> None:
        while not ends.wait(0.001 + 0.004 * float(torch.rand((), generator=choose))):
            os.kill(os.getpid(), signal.SIGUSR1)

    asking = threading.Thread(target=ask, daemon=True)
    try:
        if often:
            asking.start()
        for _ in range(40):
            run.step()
    finally:
        ends.set()
        if often:
            asking.join()
        signal.signal(signal.SIGUSR1, before)
    return run.weights(), absorbed


def test_states_at_any_moment_change_nothing(two_ranks: Ranks) -> None:
    [(plain, _), _] = two_ranks(interrupted, False)
    for weights, absorbed in two_ranks(interrupted, True):
        assert torch.equal(weights, plain)
        assert len(absorbed) > 2  # also within backward


def given_free() -> list[bool]:
    """Whether nothing holds gradients that are set to None, without a search for cycles."""
    run, found = Run("momentum"), []
    gc.disable()
    try:
        for _ in range(4):
            run.step()
            every = [StorageWeakRef(p.grad.untyped_storage()) for p in run.model.parameters()]  # type: ignore[union-attr]
            run.optimizer.zero_grad()
            found.append(all(one.expired() for one in every))
    finally:
        gc.enable()
    return found


def test_gradients_are_given_free(two_ranks: Ranks) -> None:
    assert two_ranks(given_free) == [[True] * 4] * 2


def threads() -> list[int]:
    """Threads of the library before, with, and after an engine, and after one that nobody has closed."""

    def here() -> int:
        return sum(one.name == "sparse-overlap" for one in threading.enumerate())

    found = [here()]
    run = Run()
    for _ in range(2):
        run.step()
    found.append(here())
    run.engine.close()
    found.append(here())
    return found


def test_the_thread_ends_with_the_engine(two_ranks: Ranks) -> None:
    assert two_ranks(threads) == [[0, 1, 0]] * 2


def measured() -> tuple[list[Tensor], list[float]]:
    """Weights and norms without overlap and with it, where gradients are only looked at."""
    weights, norms = [], []
    for overlap in (False, True):
        run = Run(overlap=overlap)
        for _ in range(4):
            run.optimizer.zero_grad()
            run.backward()
            norms.append(float(run.engine.clip_grad_norm_(run.model.parameters(), float("inf"))))
            run.optimizer.step()
        weights.append(run.weights())
    return weights, norms


def test_a_norm_that_clips_nothing_may_be_asked_for(two_ranks: Ranks) -> None:
    for (plain, hidden), norms in two_ranks(measured):
        assert torch.equal(plain, hidden)
        assert norms[:4] == norms[4:]


def in_a_closure(kind: str, overlap: bool) -> Tensor:
    """Lightning's way: backward within the optimizer's step."""
    run = Run(kind, overlap=overlap)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        run.backward()
        return torch.zeros(())

    for _ in range(5):
        run.optimizer.step(closure)
    return run.weights()


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_within_a_closure(two_ranks: Ranks, kind: str) -> None:
    plain = two_ranks(in_a_closure, kind, False)
    assert all(torch.equal(x, plain[0]) for x in (*plain, *two_ranks(in_a_closure, kind, True)))


def counted() -> tuple[list[int], dict[str, float], dict[str, float]]:
    runs = [Run(overlap=overlap) for overlap in (False, True)]
    for run in runs:
        for _ in range(3):
            run.step()
    one, other = (run.engine.summary() for run in runs)
    return [run.engine.memory_bytes for run in runs], one, other


def test_what_is_counted_and_logged(two_ranks: Ranks) -> None:
    for (without, hidden), one, other in two_ranks(counted):
        assert hidden - without == 4 * sum(p.numel() for p in network().parameters())
        times = {name for name in one if name.startswith("time/") or name.endswith("_ms")}
        apart = {name for name in one if name not in times and one[name] != other[name]}
        assert one.keys() == other.keys()
        assert all("bytes" in name or "time" in name or "seconds" in name for name in apart), apart


def test_the_engine_without_it_imports_nothing_of_it() -> None:
    code = (
        "import sys, tempfile, torch, torch.distributed as dist, lightning_sparse as ls\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())\n"
        "ddp = DistributedDataParallel(torch.nn.Linear(20, 20))\n"
        "engine = ls.attach(ddp, single_device='sparse')\n"
        "engine.close()\n"
        "dist.destroy_process_group()\n"
        "assert 'lightning_sparse.engine.engine' in sys.modules\n"
        "assert 'lightning_sparse.engine.overlap' not in sys.modules\n"
    )
    subprocess.run([warm_python(), "-c", code], check=True, timeout=120)
