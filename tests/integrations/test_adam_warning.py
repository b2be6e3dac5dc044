"""The warning of optimizers that a sparse exchange harms: in all doors, once, and only where it is true."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.integrations.test_fabric import FABRICS, close, make_fabric
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"sparsifier": "top_k", "exchange": "gather_pairs", "density": 0.1, "rules": EVERYTHING_SPARSE}
ADAM: dict[str, Any] = {"lr": 0.01}

Job = Callable[..., None]


class FusedAdam8bit(torch.optim.AdamW):
    """As other packages name theirs."""


class Sophia(torch.optim.SGD):
    """Has betas, and another name."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.param_groups[0]["betas"] = (0.9, 0.99)


class OwnSGD(torch.optim.SGD):
    """Whose steps nobody knows."""


class OwnAverages(torch.optim.Optimizer):
    """Keeps averages of gradients, as nobody can see by its name or its settings; skipped steps leave nothing."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.data.sub_(average, alpha=group["lr"])
        return loss


class FusedLion(torch.optim.SGD):
    """Named as those of other packages."""


class MuonWithAuxAdam(torch.optim.SGD):
    """Named as those of other packages."""


def make_optimizer(name: str, parameters: Any, settings: dict[str, Any]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = {**vars(torch.optim), **globals()}[name](parameters, **settings)
    return made


def said(job: Job, *args: Any) -> list[str]:
    """What was warned of optimizers on this rank."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        job(*args)
    told = [str(warning.message) for warning in caught]
    return [one for one in told if "behind the sparse exchange" in one or "trains a copy of the weights" in one]


def attach(options: dict[str, Any], name: str, settings: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 20)))
    engine = ls.attach(ddp, **SPARSE | options)
    optimizer = make_optimizer(name, ddp.parameters(), settings)
    for _ in range(2):
        ddp(torch.ones(2, 10)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def fit(
    options: dict[str, Any], name: str, settings: dict[str, Any], package: str = PACKAGES[0], devices: int = 2
) -> None:
    module = make_module(package)
    module.configure_optimizers = lambda: make_optimizer(name, module.parameters(), settings)
    trainer = make_trainer(package, strategy=strategy_class(package)(**SPARSE | options), max_steps=2, devices=devices)
    trainer.fit(module, make_data())


def fit_fabric(options: dict[str, Any], name: str, settings: dict[str, Any], package: str = FABRICS[0]) -> None:
    fabric = make_fabric(package, SPARSE | options)
    model = nn.Linear(10, 30)
    model, optimizer = fabric.setup(model, make_optimizer(name, model.parameters(), settings))
    for _ in range(2):
        fabric.backward(model(torch.ones(2, 10)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    close(fabric)


@pytest.mark.parametrize(
    ("job", "args"),
    [
        *by_default((fit, (package,)) for package in PACKAGES),
        *by_default((fit_fabric, (package,)) for package in FABRICS),
        (attach, ()),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)),
)
def test_all_doors_warn_once_on_rank_zero_until_told_not_to(two_ranks: Ranks, job: Job, args: tuple[Any, ...]) -> None:
    [sentence], others = two_ranks(said, job, {}, "AdamW", ADAM, *args)
    assert others == []
    for part in (
        "AdamW keeps a first moment",
        "betas=(0.0, 0.999)",
        "four times",
        "guide/optimizers.md",
        "Watch(adam=False)",
    ):
        assert part in sentence
    for watch in (None, ls.Watch(adam=False)):
        assert two_ranks(said, job, {"watch": watch}, "AdamW", ADAM, *args) == [[], []]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("Adam", {}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {}), ("FusedAdam8bit", {"betas": (0.5, 0.95)})],
)
def test_the_whole_family_is_known(two_ranks: Ranks, name: str, settings: dict[str, Any]) -> None:
    [sentence], _ = two_ranks(said, attach, {"memory": "residual"}, name, ADAM | settings)
    assert f"{name} keeps a first moment" in sentence
    beta2 = settings.get("betas", (0.9, 0.999))[1]
    assert f"betas=(0.0, {beta2:g})" in sentence


@pytest.mark.parametrize(
    ("name", "loss"), [("FusedLion", "280 instead of 179"), ("MuonWithAuxAdam", "87 instead of 80")]
)
def test_optimizers_whose_steps_have_one_length_are_known(two_ranks: Ranks, name: str, loss: str) -> None:
    [sentence], others = two_ranks(said, attach, {"exchange": "reduce_union"}, name, ADAM)
    assert others == []
    for part in (f"{name} ", loss, "torch's AdamW", "dense=['*.weight']", "optimizers.md", "Watch(adam=False)"):
        assert part in sentence


@pytest.mark.parametrize(
    ("name", "job"),
    by_default([("RMSprop", fit), ("Adamax", attach), ("NAdam", fit_fabric), ("FusedAdam8bit", attach)], 2),
)
def test_that_nobody_has_measured_copies_is_said_of_others(two_ranks: Ranks, name: str, job: Job) -> None:
    [sentence], others = two_ranks(said, job, {}, name, ADAM)
    assert f"How {name} trains in this way was not measured" in sentence and "memory='residual'" in sentence
    assert others == []
    assert two_ranks(said, job, {"memory": "drift"}, name, ADAM) == [[], []]
    assert two_ranks(said, job, {}, "Adafactor", ADAM) == [[], []]  # which was measured


LATE_COMERS: dict[str, tuple[dict[str, Any], str]] = {
    "Sophia": ({}, "Sophia keeps a first moment (beta1 = 0.9)"),
    "OwnSGD": ({"momentum": 0.9}, "OwnSGD keeps momentum (0.9)"),
    "OwnAverages": ({}, "OwnAverages keeps a state of its own"),
}


@pytest.mark.parametrize(("name", "job"), covering(in_turns(list(LATE_COMERS), [attach, fit]), together=1))
def test_other_optimizers_that_let_averages_come_late_are_warned_of(two_ranks: Ranks, name: str, job: Job) -> None:
    settings, part = LATE_COMERS[name]
    [sentence], others = two_ranks(said, job, {}, name, ADAM | settings)
    assert part in sentence and others == []


def attach_without(part: str) -> None:
    """A first moment for parameters that stay dense, of a model whose others are left to SGD."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 20)))
    engine = ls.attach(ddp, **SPARSE, dense=[f"{part}.*"])
    adam, sgd = torch.optim.AdamW(ddp.module[0].parameters()), torch.optim.SGD(ddp.module[1].parameters(), lr=0.1)
    ddp(torch.ones(2, 10)).square().sum().backward()
    adam.step()
    sgd.step()
    engine.close()


@pytest.mark.parametrize(
    ("options", "name", "settings"),
    by_default(
        [
            ({}, "AdamW", {"betas": (0.0, 0.999)}),
            ({}, "SGD", {"momentum": 0.9}),
            ({"memory": "residual"}, "RMSprop", {}),
            ({"memory": "residual"}, "OwnSGD", {"momentum": 0.9}),
            ({"memory": "residual"}, "OwnAverages", {}),
            ({"dense": ["*"]}, "OwnAverages", {}),
            ({}, "ASGD", {}),
            ({"memory": ls.memories.MomentumCorrection(0.9)}, "Sophia", {}),
            ({}, "OwnSGD", {}),
            ({"density": 1.0}, "FusedLion", {}),
            ({"dense": ["*"]}, "FusedLion", {}),
            ({"density": 1.0}, "AdamW", {}),
            ({"dense": ["*"]}, "AdamW", {}),
            ({"sparsifier": "everything", "exchange": None}, "AdamW", {}),
            ({"memory": ls.memories.NoMemory()}, "AdamW", {}),
            ({"memory": ls.memories.MomentumCorrection(0.9)}, "AdamW", {}),
            ({"memory": ls.memories.ClipByNorm(1.0, ls.memories.AdamCorrection())}, "SGD", {}),
        ],
        10,
    ),
)
def test_nobody_is_warned_without_reason(
    two_ranks: Ranks, options: dict[str, Any], name: str, settings: dict[str, Any]
) -> None:
    assert two_ranks(said, attach, options, name, ADAM | settings) == [[], []]


def reasons() -> list[str]:
    """Why an Adam of torch is left to itself: its own settings, or another optimizer."""
    amsgrad = said(fit, {"exchange": "reduce_union"}, "Adam", {"lr": 0.01, "amsgrad": True})
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 20)))
    engine = ls.attach(ddp, **SPARSE | {"exchange": "reduce_union"})
    first, second = ddp.module
    both = [torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)]

    def step() -> None:
        for _ in range(2):
            ddp(torch.ones(2, 10)).square().sum().backward()
            for optimizer in both:
                optimizer.step()

    mixed = said(step)
    engine.close()
    return [*amsgrad, *mixed]


def test_an_adam_that_is_left_to_itself_is_told_why(two_ranks: Ranks) -> None:
    told, _ = two_ranks(reasons)
    assert "The exchange does not take steps of Adam here: amsgrad=True needs torch's own step." in told[0]
    assert "The exchange does not take steps of AdamW here: SGD is none of torch's Adam and AdamW." in told[1]


def test_parameters_that_stay_dense_may_have_a_first_moment(two_ranks: Ranks) -> None:
    assert two_ranks(said, attach_without, "0") == [[], []]
    assert len(two_ranks(said, attach_without, "1")[0]) == 1


@pytest.mark.parametrize(
    "memory", [ls.memories.LowPass(0.5), ls.memories.ClipByNorm(1.0)], ids=lambda memory: type(memory).__name__
)
def test_other_memories_that_let_gradients_wait(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    assert len(two_ranks(said, attach, {"memory": memory}, "AdamW", ADAM)[0]) == 1


def attach_with_a_skipped_step_first() -> None:
    ddp = DistributedDataParallel(nn.Linear(10, 20))
    engine = ls.attach(ddp, **SPARSE)
    optimizer = OwnAverages(ddp.parameters(), 0.1)
    for step in range(4):
        ddp(torch.full((2, 10), float("inf") if step == 0 else 1.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


def test_what_an_optimizer_keeps_is_looked_at_when_a_step_has_counted(two_ranks: Ranks) -> None:
    assert [len(sentences) for sentences in two_ranks(said, attach_with_a_skipped_step_first)] == [1, 0]


def attach_twice() -> None:
    """Two engines, one after the other, as where parameters are unfrozen; and an optimizer of nobody's parameters."""
    model = nn.Linear(10, 20)
    adam = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, **SPARSE)
        ddp(torch.ones(2, 10)).square().sum().backward()
        adam.step()
        engine.close()
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    torch.optim.AdamW([other]).step()


def test_an_optimizer_that_meets_a_second_engine_is_known(two_ranks: Ranks) -> None:
    assert [len(sentences) for sentences in two_ranks(said, attach_twice)] == [1, 0]


def attach_at_full_density_first() -> list[int]:
    """How many warnings there are after each step of a density that falls from 1."""
    ddp = DistributedDataParallel(nn.Linear(10, 20))
    engine = ls.attach(ddp, **SPARSE | {"density": ls.Warmup(1.0, 0.1, steps=3)})
    adam = torch.optim.AdamW(ddp.parameters())
    counts = []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(4):
            ddp(torch.ones(2, 10)).square().sum().backward()
            adam.step()
            counts.append(sum("first moment" in str(warning.message) for warning in caught))
    engine.close()
    return counts


def test_a_density_that_falls_from_one_warns_when_it_does(two_ranks: Ranks) -> None:
    counts, none = two_ranks(attach_at_full_density_first)
    assert counts[-1] == 1 and none == [0, 0, 0, 0]


def test_one_rank_is_warned_too(not_launched: None) -> None:
    sentences = said(fit, {"single_device": "sparse"}, "AdamW", ADAM, PACKAGES[0], 1)
    dist.destroy_process_group()
    assert len(sentences) == 1


@pytest.mark.parametrize("value", [1, "no", None])
def test_the_setting_is_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match="Expected adam to be True or False, but got"):
        ls.Watch(adam=value)


def warnings_of_memories() -> list[str]:
    """In processes to which nobody has told their ranks but torch."""
    found = []
    for memory in (ls.memories.MomentumCorrection(), ls.memories.WeightDecay(0.1)):
        ddp = DistributedDataParallel(nn.Linear(20, 20))
        engine = ls.attach(ddp, sparsifier="top_k", memory=memory, watch=None)
        optimizer = torch.optim.SGD(engine.stepper.parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.1)
        with warnings.catch_warnings(record=True, action="always") as caught:
            ddp(torch.ones(1, 20)).sum().backward()
            optimizer.step()
        found += [str(warning.message) for warning in caught]
        engine.close()
    return found


def test_memories_warn_of_optimizers_on_one_rank(two_ranks: Ranks) -> None:
    said, others = two_ranks(warnings_of_memories)
    assert [warning.split()[0] for warning in said] == ["MomentumCorrection", "WeightDecay"]
    assert not others
