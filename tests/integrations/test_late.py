"""``delay=1`` behind Trainer and Fabric, on two real processes."""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.engine.state.schema import revoke
from tests.covering import by_default
from tests.integrations.test_checkpoints import saver, strategy_of
from tests.integrations.test_fabric import make_fabric
from tests.ranks import Ranks
from tests.sums import Sums, check_sums, gradient, saved_in
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "density": 0.05, "watch": None}


def given_gradients(package: str, kind: str) -> Any:
    """A module whose gradients do not depend on its weights; "gan" has two optimizers that take turns."""
    base = importlib.import_module(package).LightningModule

    class Given(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.left, self.right = nn.Parameter(torch.randn(20, 10)), nn.Parameter(torch.randn(300))
            self.automatic_optimization = kind != "gan"

        def loss(self, batch: list[Tensor], *parameters: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(int(1000 * batch[0].abs().sum()))
            return torch.stack([(p * torch.randn(p.shape, generator=generator)).sum() for p in parameters]).sum()

        def forward(self, batch: list[Tensor], which: int | None) -> Tensor:
            both = [self.left, self.right]
            return self.loss(batch, *(both if which is None else both[which : which + 1]))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            if kind != "gan":
                return self(batch, None)
            optimizer = self.optimizers()[batch_idx % 2]
            optimizer.zero_grad()
            self.manual_backward(self(batch, batch_idx % 2))
            optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            if kind == "gan":
                return [torch.optim.AdamW([self.left], lr=0.01), torch.optim.SGD([self.right], lr=0.1)]
            if kind == "adamw":
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Given()


def fitted(package: str, kind: str, delay: int, options: dict[str, Any]) -> tuple[Tensor, int, dict[str, float]]:
    """Weights after fit, the number of exchanges, and what the last step has logged."""
    logged: dict[str, float] = {}
    # Momentum that is spent by how late averages are has not led as far yet.
    settings = {"gan": {"find_unused_parameters": True}, "momentum": {"memory": "residual"}}.get(kind, {})
    strategy = strategy_of(package, {**SPARSE, "sparsifier": "union_top_k", "delay": delay, **settings})
    trainer = make_trainer(package, strategy=strategy, callbacks=[ls.SparsityMonitor(table=False)], **options)
    module = given_gradients(package, kind)
    trainer.fit(module, make_data())
    logged = {name: float(x) for name, x in trainer.logged_metrics.items() if name.startswith("sparse/")}
    return flat(module), strategy.engine.step, logged


@pytest.mark.parametrize(
    ("kind", "package", "options"),
    by_default(
        [
            ("momentum", PACKAGES[0], {"accumulate_grad_batches": 3}),
            ("adamw", PACKAGES[1], {"gradient_clip_val": 0.5, "log_every_n_steps": 1}),
            ("gan", PACKAGES[0], {}),
        ],
        2,
    ),
)
def test_after_fit_all_averages_are_applied(two_ranks: Ranks, kind: str, package: str, options: dict[str, Any]) -> None:
    now, late = (two_ranks(fitted, package, kind, delay, options) for delay in (0, 1))
    for (expected, steps, _), (found, others, logged) in zip(now, late, strict=True):
        assert others == steps > 0
        assert torch.equal(found, expected)
        if options.get("log_every_n_steps") == 1:
            assert logged["sparse/steps/without_average"] == 1
            assert min(logged[f"sparse/time/{name}"] for name in ("blocked_ms", "hidden_ms")) >= 0


def resumed(package: str, folder: str, delay: int, dense: bool = False) -> list[Tensor]:
    """Weights of a run, and of one that goes on from its checkpoint after 3 of 6 steps; maybe with dense biases."""
    ends = []
    for resume in (None, f"{folder}/epoch=0-step=3.ckpt"):
        settings = {**SPARSE, "delay": 1 if resume is None else delay, "strict_resume": True}
        strategy = strategy_of(package, settings | ({"rules": None} if dense else {}))
        place = folder if resume is None else f"{folder}/again"
        callbacks = [saver(package, dirpath=place, every_n_train_steps=3, save_top_k=-1)]
        trainer = make_trainer(package, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
        module = make_module(package)
        if dense:
            module.net[0].bias.data -= 0.8  # units without gradients in some batches: momentum of theirs waits
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            trainer.fit(module, make_data(), make_data(16), ckpt_path=resume, weights_only=False)
        ends.append(flat(module))
    return ends


@pytest.mark.parametrize("dense", [False, True])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path, dense: bool) -> None:
    for whole, again in two_ranks(resumed, PACKAGES[1], str(tmp_path), 1, dense):
        assert torch.equal(whole, again)


def finished(package: str, folder: str) -> tuple[Tensor, Tensor, bool]:
    """Weights of a run, and of a fit that resumes its last checkpoint; whether that has other weights."""
    ends = []
    for resume in (None, f"{folder}/last.ckpt"):
        callbacks = [saver(package, dirpath=f"{folder}/again" if resume else folder, save_last=True)]
        strategy = strategy_of(package, {**SPARSE, "delay": 1})
        trainer = make_trainer(package, strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
        module = make_module(package)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)  # noqa: B023
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The dirpath has changed")
            trainer.fit(module, make_data(), make_data(16), ckpt_path=resume, weights_only=False)
        ends.append(flat(module))
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
    return ends[0], ends[1], not torch.equal(ends[0], torch.cat([x.flatten() for x in saved.values()]))


def test_a_run_that_is_over_gets_its_last_averages_when_it_is_resumed(two_ranks: Ranks, tmp_path: Path) -> None:
    for whole, again, differed in two_ranks(finished, PACKAGES[0], str(tmp_path)):
        assert differed
        assert torch.equal(whole, again)


def interrupted(folder: str) -> bool:
    """A run that ends with an error while an exchange is in flight, where each rank saves; whether it did."""
    package = PACKAGES[0]
    base = importlib.import_module(package)

    class Summing(base.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Sums()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 4:
                raise ValueError("all ranks have had enough")
            return self.model(dist.get_rank())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    class OnException(base.Callback):  # type: ignore[misc, name-defined]
        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(f"{folder}/failed.ckpt")

    options = {**SPARSE, "sparsifier": "top_k", "delay": 1}
    trainer = make_trainer(package, strategy=strategy_of(package, options), callbacks=[OnException()])
    with suppress(ValueError):
        trainer.fit(Summing(), make_data(96))
    return (Path(folder) / "failed.ckpt").exists()


def test_ranks_that_save_on_an_exception_do_not_wait_and_lose_nothing(tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        ranks(interrupted, str(tmp_path))
    finally:
        ranks.stop()
    checkpoint = torch.load(tmp_path / "failed.ckpt", weights_only=False)
    states = saved_in(tmp_path / "failed.ckpt", 2)
    step = checkpoint["lightning_sparse"]["residuals"]["step"]
    states = [revoke(state) if state["step"] > step else state for state in states]
    check_sums(checkpoint["state_dict"], [states[0], {**states[1], "late": states[0]["late"]}], step)


def in_fabric(delay: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    fabric = make_fabric("lightning.fabric", {**SPARSE, "sparsifier": "top_k", "delay": delay})
    module = Sums()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1.0))
    for _ in range(4):
        optimizer.zero_grad()
        fabric.backward(model(dist.get_rank()))
        optimizer.step()
    engine = fabric.strategy.engine
    engine.drain()
    left = [engine.residual(name).clone() for name in engine.parameters]
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    engine.close()
    return weights, left


def test_fabric_applies_all_averages_when_it_is_drained(two_ranks: Ranks) -> None:
    (now, _), _ = two_ranks(in_fabric, 0)
    (late, left), (_, others) = two_ranks(in_fabric, 1)
    for (name, weight), one, other in zip(late.items(), left, others, strict=True):
        assert torch.equal(weight, now[name])
        given = 4 * (gradient(name, 0) + gradient(name, 1))
        assert torch.equal(one + other - 2 * weight.flatten(), given)


def averaged(package: str) -> tuple[bool, list[Any]]:
    """Whether the weights at the end of fit are their average, and which callbacks are left."""
    base = importlib.import_module(package)
    averaging = base.callbacks.EMAWeightAveraging(decay=0.9)
    strategy = strategy_of(package, {**SPARSE, "delay": 1})
    trainer = make_trainer(package, strategy=strategy, callbacks=[averaging])
    module = make_module(package)
    trainer.fit(module, make_data(), make_data(16))
    return torch.equal(flat(averaging._average_model.module), flat(module)), [
        type(x).__name__ for x in trainer.callbacks
    ]


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_the_last_average_is_applied_before_weights_are_replaced_by_their_average(
    two_ranks: Ranks, package: str
) -> None:
    assert two_ranks(averaged, package) == [(True, ["EMAWeightAveraging"])] * 2


def measured(package: str) -> list[bool]:
    """Whether an average is on its way at the start of each epoch, of which SWA measures its weights in the last."""
    base = importlib.import_module(package)
    seen: list[bool] = []

    class Looking(base.Callback):  # type: ignore[misc, name-defined]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            seen.append(bool(trainer.strategy.engine.state_dict()["late"]))

    callbacks = [base.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1), Looking()]
    trainer = make_trainer(package, strategy=strategy_of(package, {**SPARSE, "delay": 1}), callbacks=callbacks)
    module = make_module(package, "norm")
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data(), make_data(16))
    return seen


def test_the_last_average_is_applied_before_swa_measures_its_weights(two_ranks: Ranks) -> None:
    assert two_ranks(measured, PACKAGES[0]) == [[False, True, False]] * 2
