"""`overlap=True` in the Trainer and in Fabric: weights are those without it, and what cannot be is refused."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default
from tests.integrations.test_fabric import CASES, FABRICS
from tests.integrations.test_fabric import train as train_in_fabric
from tests.ranks import Ranks, error_of
from tests.trainers import (
    EVERYTHING_SPARSE,
    PACKAGES,
    flat,
    make_data,
    make_module,
    make_trainer,
    straight_and_resumed,
)


class Looks:
    """Notes messages that are on their way when the optimizer steps."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def callback(self, package: str) -> Any:
        noted = self.sent

        class Callback(importlib.import_module(package).Callback):  # type: ignore[misc, name-defined]
            def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
                waiting = getattr(trainer.strategy.engine.stepper, "_waiting", None)
                noted.append(0 if waiting is None else len(waiting.sent))

        return Callback()


def fit(package: str, settings: dict[str, Any], options: dict[str, Any]) -> tuple[Tensor, list[int]]:
    looks = Looks()
    strategy = {"density": 0.1, "rules": EVERYTHING_SPARSE, "bucket_cap_mb": 0.0005, **settings}
    trainer = make_trainer(package, strategy=strategy, callbacks=[looks.callback(package)], **options)
    module = make_module(package)
    trainer.fit(module, make_data(), make_data(16))
    return flat(module), looks.sent


@pytest.mark.parametrize("package", by_default(PACKAGES))
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_weights_are_those_without_overlap(two_ranks: Ranks, package: str, options: dict[str, Any]) -> None:
    plain = two_ranks(fit, package, {}, options)
    hidden = two_ranks(fit, package, {"overlap": True}, options)
    assert all(torch.equal(weights, plain[0][0]) for weights, _ in (*plain, *hidden))
    assert all(not any(sent) for _, sent in plain)
    assert all(min(sent) >= 1 for _, sent in hidden)  # from the first step on: the optimizer was shown


def refused(package: str, options: dict[str, Any], several: bool) -> str:
    module = make_module(package)
    if several:
        halves = module.net[0].parameters(), module.net[2].parameters()
        module.configure_optimizers = lambda: [torch.optim.SGD(half, lr=0.1) for half in halves]
        module.automatic_optimization = False
    trainer = make_trainer(package, strategy={"overlap": True, "rules": EVERYTHING_SPARSE}, **options)
    return error_of(lambda: trainer.fit(module, make_data(), make_data(16)))


@pytest.mark.parametrize("package", by_default(PACKAGES))
@pytest.mark.parametrize(
    ("options", "several", "sentence"),
    [
        ({"gradient_clip_val": 0.5}, False, "Expected no clipping with overlap=True, which exchanges gradients within"),
        ({}, True, "Expected one optimizer with overlap=True"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    package: str, options: dict[str, Any], several: bool, sentence: str
) -> None:
    with Ranks(2) as ranks:
        for said in ranks(refused, package, options, several):
            assert sentence in said


def test_buckets_of_ddp_are_small_unless_they_are_given() -> None:
    assert "bucket_cap_mb" not in ls.SparseDDPStrategy()._ddp_kwargs
    assert ls.SparseDDPStrategy(overlap=True)._ddp_kwargs["bucket_cap_mb"] == 4.0
    assert ls.SparseDDPStrategy(overlap=True, bucket_cap_mb=10)._ddp_kwargs["bucket_cap_mb"] == 10


def scaled(package: str) -> str:
    mixed = importlib.import_module(f"{package}.plugins.precision").MixedPrecision
    plugin = mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4.0))
    trainer = make_trainer(package, strategy={"overlap": True, "rules": EVERYTHING_SPARSE}, plugins=[plugin])
    return error_of(lambda: trainer.fit(make_module(package), make_data(), make_data(16)))


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_scaled_losses_are_refused_before_the_first_step(package: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks(scaled, package):
            assert "Expected no scaled losses with overlap=True" in said
            assert "bfloat16" in said


def flat_weights(module: Any) -> dict[str, Tensor]:
    return {"": flat(module)}


def resumed(package: str, path: Path) -> dict[str, Any]:
    """Of a run, and of one that goes on from its checkpoint, both with everything that goes with overlap."""

    def run(ckpt: Path | None = None, **options: Any) -> tuple[Any, Any]:
        settings = {"density": 0.1, "rules": EVERYTHING_SPARSE, "bucket_cap_mb": 0.0005, "overlap": True}
        module = make_module(package)
        trainer = make_trainer(package, strategy={**settings, "strict_resume": True}, **options)
        trainer.fit(module, make_data(), make_data(16), ckpt_path=ckpt)
        return trainer, module

    return straight_and_resumed(package, path, flat_weights, run, run, accumulate_grad_batches=2)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(two_ranks: Ranks, package: str, tmp_path: Path) -> None:
    for one in two_ranks(resumed, package, tmp_path):
        assert one["first"]["steps"] == one["second"]["steps"]
        assert torch.equal(one["first"]["weights"][""], one["second"]["weights"][""])


def fitted_twice(package: str, overlap: bool) -> Tensor:
    """A strategy that trains two modules, one after another; optimizers of the first one live on."""
    module, kept = make_module(package), []
    for _ in range(2):
        settings = {"density": 0.1, "rules": EVERYTHING_SPARSE, "bucket_cap_mb": 0.0005, "overlap": overlap}
        trainer = make_trainer(package, strategy=settings)
        trainer.fit(module, make_data(), make_data(16))
        kept.append(trainer.optimizers)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, make_data(), make_data(16))
    return flat(module)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_several_fits(two_ranks: Ranks, package: str) -> None:
    plain, hidden = two_ranks(fitted_twice, package, False), two_ranks(fitted_twice, package, True)
    assert all(torch.equal(weights, plain[0]) for weights in (*plain, *hidden))


FABRIC = {"sparsifier": "top_k", "density": 0.05, "rules": EVERYTHING_SPARSE, "bucket_cap_mb": 0.0005}


@pytest.mark.parametrize("package", by_default(FABRICS))
@pytest.mark.parametrize("case", ["plain", "view", "accumulate", "closure", "compiled"])
def test_fabric_trains_as_without_overlap(two_ranks: Ranks, package: str, case: str) -> None:
    job = partial(train_in_fabric, **CASES[case])
    cap = 2.0 if case == "compiled" else FABRIC["bucket_cap_mb"]  # torch compiles for no smaller buckets
    plain, hidden = (two_ranks(job, package, {**FABRIC, "bucket_cap_mb": cap, "overlap": on}) for on in (False, True))
    for (weights, steps), (expected, known) in zip(hidden, plain, strict=True):
        assert torch.equal(weights, expected)
        assert steps == known == [6]


def refused_in_fabric(package: str, case: str) -> str:
    return error_of(lambda: train_in_fabric(package, {**FABRIC, "overlap": True}, **CASES[case]))


@pytest.mark.parametrize("package", by_default(FABRICS))
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("clip", "Gradients were changed between backward and the optimizer's step"),
        ("clip value", "Gradients were changed between backward and the optimizer's step"),
        ("scaled", "Expected no scaled losses with overlap=True"),
    ],
)
def test_fabric_refuses_what_changes_gradients(package: str, case: str, sentence: str) -> None:
    with Ranks(2) as ranks:
        for said in ranks(refused_in_fabric, package, case):
            assert sentence in said
