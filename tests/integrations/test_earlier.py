"""A fit after a fit, and a model that is wrapped again: what was remembered goes on with the weights it belongs to."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn

import lightning_sparse as ls
from tests.covering import by_default
from tests.integrations.test_checkpoints import same, strategy_of
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "density": 0.05, "sparsifier": "exdyna"}


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "dropped" in str(w.message) or "residuals" in str(w.message)]


class Integers(nn.Module):
    """A loss whose gradient is the same in every step: integers, so that sums of a few are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 10))
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.register_buffer("slope", torch.randint(-9, 10, (40, 10), generator=generator).float())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.slope).sum() + 0 * x.sum()


def with_integers(package: str) -> Any:
    module = make_module(package)
    module.net = Integers()
    module.training_step = lambda batch, batch_idx: module.net(batch[0])
    module.validation_step = lambda batch, batch_idx: None
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    return module


def fit_twice_exactly(package: str) -> tuple[Tensor, Tensor, Tensor, int, list[int]]:
    """Way of the weights in two fits, residual, gradient of a step, steps, and how many coordinates each one moved."""
    module = with_integers(package)
    moved: list[int] = []
    module.on_train_batch_end = lambda *_: moved.append(int(module.net.weight.grad.count_nonzero()))
    strategy = strategy_of(package, {**SPARSE, "sparsifier": "top_k", "density": ls.Warmup(0.5, 0.01, 4)})
    trainer = make_trainer(package, strategy=strategy, max_epochs=2)
    trainer.fit(module, make_data(), make_data(16))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, make_data(), make_data(16))
    residual = strategy.engine.state_dict()["parameters"]["net.weight"]["residual"]
    return -module.net.weight.detach().flatten(), residual, module.net.slope.flatten(), trainer.global_step, moved


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_a_second_fit_sends_what_the_first_one_has_not(two_ranks: Ranks, package: str) -> None:
    (way, residual, slope, steps, moved), (own_way, own_residual, own_slope, _, _) = two_ranks(
        fit_twice_exactly, package
    )
    assert steps == 9
    assert torch.equal(way, own_way)
    # Nothing is lost: what all ranks computed is what was applied, times the ranks, and what they still hold.
    assert torch.equal(2 * way + residual + own_residual, steps * (slope + own_slope))
    assert moved[0] > 150 and all(count < 20 for count in moved[4:])  # the warm-up is over, and does not come again


def fit_after_an_interruption(package: str, hook: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """Way of the weights, residual, gradient of a step, and exchanges, where an error in a hook has ended a fit."""
    module = with_integers(package)
    strategy = strategy_of(package, {**SPARSE, "sparsifier": "top_k"})
    trainer = make_trainer(package, strategy=strategy, max_epochs=1)

    def interrupt(*_: Any) -> None:
        if trainer.global_step == 3:
            raise ZeroDivisionError("in a hook")

    setattr(module, hook, interrupt)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, make_data(96), make_data(16))
    setattr(module, hook, lambda *_: None)
    trainer.fit(module, make_data(96), make_data(16))
    residual = strategy.engine.state_dict()["parameters"]["net.weight"]["residual"]
    return -module.net.weight.detach().flatten(), residual, module.net.slope.flatten(), strategy.engine.step


@pytest.mark.parametrize(
    "hook", by_default(["on_after_backward", "on_before_optimizer_step", "on_before_backward", "on_train_batch_end"])
)
def test_a_fit_after_an_error_sends_what_was_not_applied(two_ranks: Ranks, hook: str) -> None:
    (way, residual, slope, steps), (own_way, own_residual, own_slope, _) = two_ranks(
        fit_after_an_interruption, "pytorch_lightning", hook
    )
    assert steps > 6
    assert torch.equal(way, own_way)
    assert torch.equal(2 * way + residual + own_residual, steps * (slope + own_slope))


def shrink(module: Any) -> None:
    with torch.no_grad():
        module.net[2].weight.mul_(0.5)


def shrink_all(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)


def shrink_data(module: Any) -> None:
    module.net[2].weight.data.mul_(0.5)


def prune(module: Any) -> None:
    torch.nn.utils.prune.l1_unstructured(module.net[0], "weight", 0.3)


def replace(module: Any) -> None:
    module.net[2] = nn.Linear(30, 3)


def freeze(module: Any) -> None:
    module.net[0].weight.requires_grad_(False)


def disagree(module: Any) -> None:
    """Rank 0 decides about weights when the model is wrapped."""
    if dist.get_rank() == 1:
        shrink_all(module)


def flip(module: Any) -> None:
    """Other weights of the same norms."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.neg_()


BETWEEN: dict[str, Callable[[Any], None]] = {
    "weights of one layer": shrink,
    "all signs": flip,
    "data of one layer": shrink_data,
    "all weights": shrink_all,
    "names": prune,
    "a layer": replace,
    "frozen": freeze,
    "weights of rank 1": disagree,
}


def fit_twice(
    package: str, between: str, folder: str, **settings: Any
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """The state after a fit and the one with which the next begins, and what was said."""
    warnings.filterwarnings("ignore", message="Using `DistributedSampler`")  # Lightning's advice on evaluation
    module, data = make_module(package), make_data()
    begins: list[dict[str, Any]] = []

    class Look(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begins.append(trainer.strategy.engine.state_dict())

    strategy = strategy_of(package, SPARSE | settings)
    trainer = make_trainer(package, strategy=strategy, max_epochs=2, callbacks=[Look()])
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, data)
        ends = strategy.engine.state_dict()
        if between == "evaluation":
            trainer.validate(module, data, verbose=False)
            trainer.predict(module, data)
            trainer.fit(module, data)  # which has nothing to do
        path = None
        if between == "a checkpoint":
            path = f"{folder}/x.ckpt"
            trainer.save_checkpoint(path)
            trainer.fit_loop.max_epochs = 3
            trainer.fit(module, data)
        if between in BETWEEN:
            BETWEEN[between](module)
        if between == "another model":
            module = make_module(package)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, data, ckpt_path=path)
    return ends, begins[-1], told(caught)


def check(two_ranks: Ranks, between: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    (ends, begins, said), (_, _, own_said) = two_ranks(fit_twice, "pytorch_lightning", between, str(folder))
    assert own_said == []  # once, on rank zero
    assert all(ends["parameters"][f"net.{layer}.weight"]["residual"].any() for layer in (0, 2))
    return ends, begins, said


@pytest.mark.parametrize("between", by_default(["evaluation", "nothing", "a checkpoint", "weights of rank 1"]))
def test_a_second_fit_begins_where_the_first_one_ended(two_ranks: Ranks, tmp_path: Path, between: str) -> None:
    for ends, begins, said in two_ranks(fit_twice, "pytorch_lightning", between, str(tmp_path)):
        assert same(ends, begins)
        assert begins["step"] == 6
        assert said == []


@pytest.mark.parametrize("between", ["weights of one layer", "data of one layer"])
def test_what_was_not_sent_goes_with_the_weights_it_is_about(two_ranks: Ranks, tmp_path: Path, between: str) -> None:
    ends, begins, [said] = check(two_ranks, between, tmp_path)
    assert said == ("What was not sent of some parameters is dropped. The weights of net.2.weight have changed since.")
    for name, vectors in begins["parameters"].items():
        expected = ends["parameters"][name]["residual"]
        assert torch.equal(vectors["residual"], torch.zeros_like(expected) if name == "net.2.weight" else expected)
    assert begins["step"] == 6


@pytest.mark.parametrize("between", by_default(["all weights", "all signs", "another model"]))
def test_a_second_fit_with_other_weights_starts_anew_and_says_so(
    two_ranks: Ranks, tmp_path: Path, between: str
) -> None:
    _, begins, [said] = check(two_ranks, between, tmp_path)
    assert said.startswith("What was not sent before is dropped, and schedules start anew: ")
    assert ("another model" in said) == (between == "another model")
    assert not any(vectors["residual"].any() for vectors in begins["parameters"].values())
    assert begins["step"] == 0


def fit_twice_densely(package: str, folder: str) -> list[list[str]]:
    return [
        fit_twice(package, between, folder, density=1.0)[2]
        for between in ("another model", "all weights", "weights of one layer")
    ]


def test_nothing_is_said_to_be_dropped_where_nothing_waits(two_ranks: Ranks, tmp_path: Path) -> None:
    for said in two_ranks(fit_twice_densely, "pytorch_lightning", str(tmp_path)):
        assert said == [[], [], []]


def with_pruned_name(remembered: dict[str, Any]) -> dict[str, Any]:
    """As torch.nn.utils.prune names parameters."""
    return {"net.0.weight_orig" if name == "net.0.weight" else name: own for name, own in remembered.items()}


def test_a_second_fit_knows_parameters_by_other_names(two_ranks: Ranks, tmp_path: Path) -> None:
    ends, begins, said = check(two_ranks, "names", tmp_path)
    assert said == []
    assert same(begins["parameters"], with_pruned_name(ends["parameters"]))


def test_a_second_fit_with_another_layer_says_what_is_gone(two_ranks: Ranks, tmp_path: Path) -> None:
    ends, begins, [said] = check(two_ranks, "a layer", tmp_path)
    start = "What was not sent of some parameters is dropped. There is no parameter net.2.weight any more."
    assert said.startswith(start)
    for name, vectors in begins["parameters"].items():
        assert name.startswith("net.0.") or not vectors["residual"].any()
    assert same(begins["parameters"]["net.0.weight"], ends["parameters"]["net.0.weight"])


def test_a_second_fit_keeps_what_frozen_parameters_have_not_sent(two_ranks: Ranks, tmp_path: Path) -> None:
    ends, begins, said = check(two_ranks, "frozen", tmp_path)
    assert said == []
    assert same(ends["parameters"], begins["parameters"])


def wrap_again(package: str, change: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What is remembered before and after a model is wrapped again within a fit, and what was said."""
    module, seen = make_module(package), []
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)

    def on_train_epoch_start() -> None:
        if module.current_epoch == 1:
            seen.append(module.trainer.strategy.engine.state_dict()["parameters"])
            BETWEEN[change](module)
            module.net[0].bias.requires_grad_(False)

    def on_before_zero_grad(optimizer: Any) -> None:
        if module.current_epoch == 1 and len(seen) == 1:  # wrapped, and nothing exchanged yet
            seen.append(module.trainer.strategy.engine.state_dict()["parameters"])

    module.on_train_epoch_start, module.on_before_zero_grad = on_train_epoch_start, on_before_zero_grad
    trainer = make_trainer(package, strategy=strategy_of(package, SPARSE), max_epochs=3)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, make_data())
    return seen[0], seen[1], told(caught)


def test_residuals_follow_pruned_parameters_when_the_model_is_wrapped_again(two_ranks: Ranks) -> None:
    for before, after, said in two_ranks(wrap_again, "pytorch_lightning", "names"):
        assert before["net.0.weight"]["residual"].any()
        assert same(after, with_pruned_name(before))
        assert said == []


def test_what_is_lost_when_a_model_is_wrapped_again_is_said_once(two_ranks: Ranks) -> None:
    (before, after, [said]), (_, _, own_said) = two_ranks(wrap_again, "pytorch_lightning", "a layer")
    assert "There is no parameter net.2.weight any more." in said
    assert own_said == []
    assert not after["net.2.weight"]["residual"].any()
    assert same(after["net.0.weight"], before["net.0.weight"])


@dataclass(frozen=True)
class FailsOnce(ls.memories.Residual):
    """Has an error in the third step of the first fit, while a residual is being changed."""

    calls: list[int] = field(default_factory=list, repr=False, compare=False)

    def settle_(self, *args: Any) -> None:
        super().settle_(*args)
        self.calls.append(1)
        if len(self.calls) == 9:
            raise ZeroDivisionError("only once")


def fit_after_an_error(package: str) -> tuple[dict[str, Any], list[str], int]:
    module, begins = make_module(package), list[dict[str, Any]]()

    class Look(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begins.append(trainer.strategy.engine.state_dict())

    strategy = strategy_of(package, {**SPARSE, "memory": FailsOnce()})
    trainer = make_trainer(package, strategy=strategy, max_epochs=2, callbacks=[Look()])
    with warnings.catch_warnings(record=True, action="always") as caught:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(module, make_data(96))
        trainer.fit(module, make_data(96))
    return begins[-1], told(caught), strategy.engine.step


def test_a_fit_after_an_error_that_has_broken_residuals_starts_anew_and_says_so(two_ranks: Ranks) -> None:
    seen = two_ranks(fit_after_an_error, "pytorch_lightning")
    assert [len(said) for _, said, _ in seen] == [1, 0]
    assert seen[0][1][0].startswith(
        "What was not sent before is dropped, and schedules start anew: An error has ended a step while residuals were"
    )
    for begins, _, steps in seen:
        assert begins["step"] == 0
        assert steps == 6
        assert not any(vectors["residual"].any() for vectors in begins["parameters"].values())
