"""`FlushResidual` in both Lightning packages, on two real processes."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

LR = 0.1


def own(package: str, name: str) -> Any:
    """A class of ours for this Lightning package."""
    return getattr(importlib.import_module(f"lightning_sparse.integrations.{package.removesuffix('.pytorch')}"), name)


class Fit:
    """A run with plain SGD whose learning rate is 0 from the second epoch's end on."""

    def __init__(self, package: str, flush: dict[str, Any] | None, callbacks: Any = (), **options: Any) -> None:
        strategy = own(package, "SparseDDPStrategy")(sparsifier="top_k", density=0.05, rules=EVERYTHING_SPARSE)
        flushing = [] if flush is None else [ls.FlushResidual(**flush)]
        self.module = make_module(package)
        base = importlib.import_module(package).Callback

        class Looking(base):  # type: ignore[misc, valid-type]
            """Whether anything is held back when validation begins, and the parameters when it ends."""

            def __init__(self) -> None:
                self.empty: list[bool] = []
                self.validated: list[Tensor] = []

            def on_validation_start(self, trainer: Any, module: Any) -> None:
                self.empty.append(not held(trainer.strategy.engine).any())
                self.validated.append(flat(module))

        def configure_optimizers() -> Any:
            optimizer = torch.optim.SGD(self.module.parameters(), lr=LR)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.0)]

        self.module.configure_optimizers = configure_optimizers
        self.looking = Looking()
        self.trainer = make_trainer(
            package,
            strategy=strategy,
            enable_checkpointing=bool(callbacks),
            num_sanity_val_steps=0,
            callbacks=[*callbacks, *flushing, self.looking],
            **options,
        )
        take = ls.Engine._take_pending
        with patch.object(ls.Engine, "_take_pending", autospec=True, side_effect=take) as taken:
            self.trainer.fit(self.module, make_data(), make_data(16))
        self.flushes = taken.call_count
        self.held = held(strategy.engine)
        self.parameters = flat(self.module)
        self.rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]


def held(engine: Any) -> Tensor:
    return torch.cat([engine.residual(name) for name in engine.stepper.parameters]).clone()


def saver(package: str, **options: Any) -> Any:
    return importlib.import_module(package + ".callbacks").ModelCheckpoint(**options)


def flat_in(path: Path) -> Tensor:
    return torch.cat([v.flatten() for v in torch.load(path, weights_only=True)["state_dict"].values()])


def fit_twice(package: str, folder: str) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters and residual without a flush, and parameters with one."""
    without = Fit(package, None, [saver(package, dirpath=f"{folder}/without")])
    # The default saves at the end of an epoch; the other one does when validation ends.
    kinds: dict[str, dict[str, Any]] = {
        "epoch": {"save_last": True},
        "val": {"monitor": "val_loss", "save_on_train_epoch_end": False},
        "step": {"every_n_train_steps": 3},
    }
    every = {"filename": "{epoch}", "save_top_k": -1}
    savers = [saver(package, dirpath=f"{folder}/{kind}", **every, **more) for kind, more in kinds.items()]
    run = Fit(package, {}, savers)
    assert not run.held.any()
    assert run.rates == without.rates == [0.0]
    assert run.looking.empty == [False, True]
    assert torch.equal(run.looking.validated[-1], run.parameters)
    assert run.trainer.global_step == without.trainer.global_step == 6
    for kind in ("epoch", "val", "step"):
        assert torch.equal(flat_in(Path(folder, kind, "epoch=1.ckpt")), run.parameters), kind
        assert not torch.equal(flat_in(Path(folder, kind, "epoch=0.ckpt")), run.parameters)
    assert torch.equal(flat_in(Path(folder, "epoch", "last.ckpt")), run.parameters)
    rank = torch.distributed.get_rank()
    for epoch, empty in ((0, False), (1, True)):
        [side] = Path(folder, "epoch", f"epoch={epoch}.ckpt.sparse").glob(f"rank-{rank}-*")
        vectors = torch.load(side, weights_only=True)["state"]["parameters"].values()
        assert all(not v["residual"].any() for v in vectors) == empty
    return without.parameters, without.held, run.parameters


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_the_last_checkpoint_contains_everything(two_ranks: Ranks, tmp_path: Path, package: str) -> None:
    (before, held0, after), (_, held1, other) = two_ranks(fit_twice, package, str(tmp_path))
    pending = (held0.double() + held1.double()) / 2
    assert pending.norm() > 0.01
    # By the rate of the last step, though the schedule is at 0; one rounding in float32 of numbers below 1.
    torch.testing.assert_close(after.double(), before.double() - LR * pending, rtol=0, atol=1e-7)
    assert torch.equal(after, other)


def fit_and_go_back(folder: str, after: bool) -> tuple[Tensor, Tensor, int]:
    """A state of the last step, from before the flush or after it, is loaded when the epoch ends."""

    class Back(importlib.import_module(PACKAGES[0]).Callback):  # type: ignore[misc]
        kept: Any = None

        def keep(self, trainer: Any, module: Any) -> None:
            self.kept = trainer.strategy.engine.state_dict(), {n: v.clone() for n, v in module.state_dict().items()}

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            self.keep(trainer, module)  # before the flush

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if after:
                self.keep(trainer, module)
            state, weights = self.kept
            assert trainer.strategy.engine.load_state_dict(state) == []
            module.load_state_dict(weights)

    run = Fit(PACKAGES[0], {}, [Back()], max_epochs=1, default_root_dir=folder)
    return run.parameters, run.held, run.flushes


def test_what_is_there_again_after_a_state_was_loaded_is_flushed_once_more(two_ranks: Ranks, tmp_path: Path) -> None:
    runs = [two_ranks(fit_and_go_back, str(tmp_path / str(after)), after)[0] for after in (False, True)]
    straight = two_ranks(fit_every_parameter, PACKAGES[0])[0]
    for parameters, residual, flushes in runs:
        assert not residual.any()
        assert torch.equal(parameters, straight)  # and nothing is applied twice
        assert flushes == 2


def fit_every_parameter(package: str) -> Tensor:
    return Fit(package, {}, max_epochs=1).parameters


def fit_every(package: str, every: int | None, epochs: int) -> list[bool]:
    run = Fit(package, {"every_n_epochs": every}, max_epochs=epochs)
    assert not run.held.any()
    assert run.flushes == sum(run.looking.empty), "none where nothing was exchanged since the last one"
    return run.looking.empty


def test_every_so_many_epochs(two_ranks: Ranks) -> None:
    # From the third epoch on the rate is 0, and gradients still come.
    for every, expected in (
        (1, [True, True, True, True, True]),
        (2, [False, True, False, True, True]),
        (None, [False, False, False, False, True]),
    ):
        assert two_ranks(fit_every, PACKAGES[0], every, 5) == [expected] * 2


class StopsIn:
    """Stops training after some validation."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = trainer.current_epoch >= self.epoch


def fit_and_stop(package: str, folder: str, how: str) -> None:
    """However training ends, the checkpoint of the last epoch holds what the module holds."""
    saving = saver(package, dirpath=f"{folder}/{package}/{how}", filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {
        "steps": {"max_steps": 5, "max_epochs": -1},
        "stop": {"max_epochs": 9},
        "one batch": {"max_epochs": 1, "limit_train_batches": 1},
        "accumulate": {"max_epochs": 1, "accumulate_grad_batches": 2},
    }[how]
    callbacks: list[Any] = [saving]
    if how == "stop":
        base = importlib.import_module(package).Callback
        callbacks.append(type("Stops", (StopsIn, base), {})(1))
    run = Fit(package, {}, callbacks, **options)
    assert not run.held.any()
    assert run.flushes == 1, "none where nothing was exchanged since the last one"
    last = {"steps": 1, "stop": 1}.get(how, 0)
    assert run.trainer.global_step == {"steps": 5, "stop": 6, "one batch": 1, "accumulate": 2}[how]
    assert torch.equal(flat_in(Path(folder, package, how, f"epoch={last}.ckpt")), run.parameters)
    if how != "stop":  # there, validation has come before
        assert torch.equal(run.looking.validated[-1], run.parameters) or how == "steps"


@pytest.mark.parametrize(
    ("how", "package"),
    by_default(covering(in_turns(["stop", "accumulate", "steps", "one batch"], PACKAGES), together=1), 2),
)
def test_however_training_ends_the_last_checkpoint_contains_everything(
    two_ranks: Ranks, tmp_path: Path, package: str, how: str
) -> None:
    two_ranks(fit_and_stop, package, str(tmp_path), how)


def fit_densely(package: str) -> None:
    callback = ls.FlushResidual()
    trainer = make_trainer(package, strategy="ddp", callbacks=[callback])
    if torch.distributed.get_rank() == 0:
        with pytest.warns(UserWarning, match="FlushResidual has nothing to do: the strategy DDPStrategy"):
            trainer.fit(make_module(package), make_data(), make_data(16))
    else:
        trainer.fit(make_module(package), make_data(), make_data(16))
    assert trainer.global_step == 6


def test_without_a_sparse_strategy_it_warns_and_does_nothing(two_ranks: Ranks) -> None:
    for package in PACKAGES:
        two_ranks(fit_densely, package)


@pytest.mark.parametrize("every", [0, -1, 1.5, "1"])
def test_bad_settings_fail_at_construction(every: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_epochs to be an integer from 1 on, or None, but got {every!r}"):
        ls.FlushResidual(every_n_epochs=every)
    assert ls.FlushResidual().every_n_epochs is None


def fit_beside(package: str, case: str) -> tuple[int, bool]:
    """The number of flushes, and whether weights are those of a run without them."""
    base = importlib.import_module(package)
    callbacks = {
        "asked to stop before min_epochs": lambda: [type("Stops", (StopsIn, base.Callback), {})(0)],
        "an average with BatchNorm": lambda: [base.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)],
    }[case]
    ends = []
    for flushing in (False, True):
        module = make_module(package, "norm")
        strategy = own(package, "SparseDDPStrategy")(sparsifier="top_k", density=0.05, rules=EVERYTHING_SPARSE)
        trainer = make_trainer(
            package,
            strategy=strategy,
            callbacks=[*callbacks(), *([ls.FlushResidual()] if flushing else [])],
            max_epochs=3 if "average" in case else 9,
            min_epochs=4 if "stop" in case else None,
        )
        take = ls.Engine._take_pending
        with (
            warnings.catch_warnings(action="ignore"),
            patch.object(ls.Engine, "_take_pending", autospec=True, side_effect=take) as taken,
        ):
            trainer.fit(module, make_data(), make_data(16))
        ends.append(flat(module))
    return taken.call_count, torch.equal(*ends)


def test_it_flushes_when_training_ends_and_no_average_of_weights(two_ranks: Ranks) -> None:
    assert two_ranks(fit_beside, PACKAGES[0], "asked to stop before min_epochs") == [(1, False)] * 2
    assert two_ranks(fit_beside, PACKAGES[1], "an average with BatchNorm") == [(0, True)] * 2


def fit_by_own_optimizer(package: str, kind: str) -> tuple[str, bool, bool, list[str]]:
    """The memory; whether the flush moves weights; whether it leaves gradients behind; what it warns of."""
    base = make_module(package).__class__
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD,
        "adamw": torch.optim.AdamW,
        "of one layer": lambda parameters, lr: torch.optim.SGD([*parameters][:2], lr),
    }

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.own = kinds[kind](self.parameters(), lr=0.01)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.own.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.own.step()

        def configure_optimizers(self) -> None:
            return None

    class Looking(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            module.zero_grad()
            self.before = flat(module)

    strategy = own(package, "SparseDDPStrategy")(density=0.05, rules=EVERYTHING_SPARSE, watch=None)
    looking, module = Looking(), Own()
    trainer = make_trainer(package, strategy=strategy, callbacks=[looking, ls.FlushResidual()], max_epochs=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, make_data())
    memory = type(strategy.engine.settings.memory).__name__
    left = any(p.grad is not None for p in module.parameters())
    told = [str(w.message) for w in caught if "flush" in str(w.message)]
    return memory, not torch.equal(flat(module), looking.before), left, told


def test_optimizers_that_lightning_was_not_shown_take_the_step(two_ranks: Ranks) -> None:
    assert two_ranks(fit_by_own_optimizer, PACKAGES[0], "sgd") == [("Residual", True, False, [])] * 2
    assert two_ranks(fit_by_own_optimizer, PACKAGES[1], "adamw") == [("SecondMoment", True, False, [])] * 2


def test_of_optimizers_that_nobody_knows_a_user_of_lightning_hears_what_to_do(two_ranks: Ranks) -> None:
    (*_, [told]), (*_, others) = two_ranks(fit_by_own_optimizer, PACKAGES[0], "of one layer")
    assert "holds the parameter net.2.weight, and 1 more" in told
    assert "return all optimizers from configure_optimizers" in told
    assert others == []


def fit_with_a_closure(package: str) -> None:
    module = make_module(package)
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), lr=0.1)
    strategy = own(package, "SparseDDPStrategy")(density=0.05, rules=EVERYTHING_SPARSE)
    trainer = make_trainer(package, strategy=strategy, callbacks=[ls.FlushResidual()])
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ValueError, match="the step of LBFGS evaluates the loss"),
    ):
        trainer.fit(module, make_data())
    assert trainer.global_step == 0


def test_optimizers_that_evaluate_the_loss_are_refused_before_training(two_ranks: Ranks) -> None:
    two_ranks(fit_with_a_closure, PACKAGES[0])
