"""Layers that are frozen and thawed within fit: the first step behind the new wrapping is sparse like all others."""

from __future__ import annotations

import importlib
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}
SPARSE: dict[str, Any] = {"density": 0.1, "rules": EVERYTHING_SPARSE, "watch": None}
FROZEN = (2, 3)
"""Batches in which the first layer needs no gradient, of six."""


def step_by_hand(module: Any, loss: Any) -> None:
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def fit(package: str, kind: str, by_hand: bool, options: dict[str, Any]) -> tuple[list[float], list[set[str]]]:
    """The parameters, and what the optimizer remembers of each after the last step."""
    base: Any = type(module := make_module(package))

    class Thawing(base):  # type: ignore[misc]
        automatic_optimization = not by_hand

        def configure_optimizers(self) -> Any:
            return OPTIMIZERS[kind](self.parameters())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx not in FROZEN)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not by_hand:
                return loss
            return step_by_hand(self, loss)

    module.__class__ = Thawing
    trainer = make_trainer(package, strategy=SPARSE, max_epochs=1, **options)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    states = trainer.optimizers[0].state
    return flat(module).tolist(), [set(states.get(p, {})) for p in module.parameters()]


@pytest.mark.parametrize("kind", by_default(["adamw", "sgd"], 2))
def test_a_step_whose_closure_wraps_the_model_again_is_as_any_other(two_ranks: Ranks, kind: str) -> None:
    # By hand, the model is wrapped again before the optimizer's step begins.
    [expected, _], results = (two_ranks(fit, PACKAGES[0], kind, by_hand, {}) for by_hand in (True, False))
    kept = {"momentum_buffer", "waited"} if kind == "sgd" else set()
    for weights, states in results:
        assert states == expected[1] == [kept] * 4
        assert weights == expected[0]


def fit_frozen_within(package: str, case: str) -> str:
    """The sentence that fit ends with."""
    base: Any = type(module := make_module(package))

    class Freezing(base):  # type: ignore[misc]
        automatic_optimization = case != "by hand"

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if case == "accumulated":
                self.net[0].requires_grad_(batch_idx != 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if case != "accumulated":
                self.net[0].requires_grad_(batch_idx % 2 == 0)
                self.net[2].requires_grad_(batch_idx % 2 == 1 or case == "one layer")
            loss = super().training_step(batch, batch_idx)
            if case != "by hand":
                return loss
            return step_by_hand(self, loss)

    module.__class__ = Freezing
    options = {"accumulate_grad_batches": 3} if case == "accumulated" else {}
    trainer = make_trainer(package, strategy=SPARSE, max_epochs=1, **options)
    with warnings.catch_warnings(action="ignore"):
        try:
            trainer.fit(module, make_data())
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize("case", ["one layer", "by hand", "accumulated"])
def test_parameters_that_are_frozen_within_a_step_end_fit_on_all_ranks_as_with_ddp(two_ranks: Ranks, case: str) -> None:
    # The model would be wrapped again, and nobody would learn that ranks have stepped with gradients of their own.
    for sentence in two_ranks(fit_frozen_within, PACKAGES[0], case):
        assert sentence.startswith("Parameters were frozen within "), sentence
        assert ("accumulated" in sentence) == (case == "accumulated")


def fit_accumulating(package: str, density: float) -> tuple[list[float], list[tuple[int, int]]]:
    """Weights, and steps and exchanges after each epoch, of a layer that thaws and freezes while batches accumulate."""
    base: Any = type(module := make_module(package))
    counts = []

    class Thawing(base):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.trainer.current_epoch != 1)

        def on_train_epoch_end(self) -> None:
            counts.append((self.trainer.global_step, self.trainer.strategy.engine.step))

    module.__class__ = Thawing
    trainer = make_trainer(package, strategy={**SPARSE, "density": density}, max_epochs=3, accumulate_grad_batches=3)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    return flat(module).tolist(), counts


def test_layers_thaw_while_batches_are_accumulated_without_an_exchange_more(two_ranks: Ranks) -> None:
    first, second = two_ranks(fit_accumulating, PACKAGES[1], 0.1)
    assert first == second
    assert all(exchanges == steps for steps, exchanges in first[1])


def fit_with_rules(package: str, rules: ls.Rules) -> list[bool]:
    """Whether parameters were sparsified, in each epoch; the first layer is frozen in the second one."""
    module = make_module(package)
    seen = []

    class Freeze(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch == 1)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append("net.0.weight" in trainer.strategy.engine.stepper.parameters)

    module.net[0].requires_grad_(False)
    trainer = make_trainer(package, strategy={**SPARSE, "rules": rules}, callbacks=[Freeze()], max_epochs=3)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    return seen


def test_rules_may_name_layers_that_are_frozen(two_ranks: Ranks) -> None:
    for rules in (ls.Rules(dense=["net.0.*"]), ls.Rules(densities={"net.0.weight": 0.5})):
        assert two_ranks(fit_with_rules, PACKAGES[0], rules) == [[False, True, False]] * 2


def goes_on(package: str, case: str, options: dict[str, Any], folder: str) -> list[Tensor]:
    """Weights of a run of four epochs, and of one that goes on, strictly, from what another one saved after two."""
    base: Any = type(make_module(package))

    class Changing(base):  # type: ignore[misc]
        automatic_optimization = case != "two optimizers"

        def configure_optimizers(self) -> Any:
            if case == "two optimizers":
                return [OPTIMIZERS["adamw"](self.net[n].parameters()) for n in (0, 2)]
            return OPTIMIZERS["sgd"](self.parameters())

        def on_train_epoch_start(self) -> None:
            frozen = {"freezes": (1, 2), "thaws": (0,)}.get(case, ())
            self.net[0].requires_grad_(self.trainer.current_epoch not in frozen)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if case != "two optimizers":
                return loss
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
            return None

    def fit(epochs: int, load: str | None = None, **other: Any) -> Tensor:
        module = make_module(package)
        module.__class__ = Changing
        module.net[0].requires_grad_(case != "thaws")
        strategy = {**SPARSE, "strict_resume": True, **options}
        trainer = make_trainer(package, strategy=strategy, max_epochs=epochs, **other)
        trainer.fit(module, make_data(), ckpt_path=load)
        return flat(module)

    saver = importlib.import_module(package).callbacks.ModelCheckpoint(folder, filename="saved", every_n_epochs=2)
    with warnings.catch_warnings(action="ignore"):
        straight = fit(4)
        fit(2, callbacks=[saver], enable_checkpointing=True)
        return [straight, fit(4, f"{folder}/saved.ckpt")]


@pytest.mark.parametrize("options", [{"sparsifier": "exdyna"}, {"density": 1.0}], ids=str)
@pytest.mark.parametrize("case", ["two optimizers", "freezes", "thaws"])
def test_a_run_whose_groups_have_changed_resumes_strictly_and_bit_for_bit(
    two_ranks: Ranks, tmp_path: Path, case: str, options: dict[str, Any]
) -> None:
    for straight, resumed in two_ranks(goes_on, PACKAGES[0], case, options, str(tmp_path)):
        assert torch.equal(straight, resumed)


def fit_and_read(package: str, folder: str, reads: bool) -> tuple[Tensor, int]:
    """Weights and steps of a run whose first layer is frozen at the end; a callback may look at a checkpoint before."""
    path = f"{folder}/first.ckpt"

    class Reads(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(path)
            elif trainer.current_epoch == 1 and reads:
                trainer.strategy.load_checkpoint(path)

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch < 2)

    module = make_module(package)
    trainer = make_trainer(package, strategy=SPARSE, callbacks=[Reads()], max_epochs=3)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    return flat(module), trainer.strategy.engine.step


def test_a_checkpoint_that_a_callback_has_only_read_changes_nothing(two_ranks: Ranks, tmp_path: Path) -> None:
    plain, read = (two_ranks(fit_and_read, PACKAGES[0], str(tmp_path), reads) for reads in (False, True))
    for (weights, steps), (expected, expected_steps) in zip(read, plain, strict=True):
        assert steps == expected_steps == 9
        assert torch.equal(weights, expected)


def traffic(package: str, folder: str, searching: bool) -> list[float]:
    """Bytes sent so far, after each batch; a layer thaws in the second epoch; a search may come before the first."""
    module = make_module(package)
    module.lr = 0.1
    module.net[0].requires_grad_(False)
    base, found = importlib.import_module(package), []

    class Thaws(base.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.net[0].requires_grad_(trainer.current_epoch > 0)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            found.append(trainer.strategy.engine.stepper.totals.sent_bytes)

    search = base.callbacks.LearningRateFinder(num_training_steps=20, early_stop_threshold=None, update_attr=False)
    strategy = {**SPARSE, "sparsifier": "top_k"}
    callbacks = [search, Thaws()] if searching else [Thaws()]
    trainer = make_trainer(package, strategy=strategy, callbacks=callbacks, default_root_dir=folder)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data())
    return found


def test_totals_are_those_of_training_after_a_search_and_a_thaw(two_ranks: Ranks, tmp_path: Path) -> None:
    plain, searched = (two_ranks(traffic, PACKAGES[0], str(tmp_path), searching) for searching in (False, True))
    assert plain == searched
    assert all(0 < one < next_one for row in plain for one, next_one in itertools.pairwise(row))
