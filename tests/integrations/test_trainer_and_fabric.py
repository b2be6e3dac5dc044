"""Trainer and Fabric alike: an error on one rank is heard of on all, advice stays sparse, and copies can be made."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_sparse.methods.memory import Residual
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

FABRICS = ["lightning_fabric", "lightning.fabric"]
SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "sparsifier": "top_k", "density": 0.1}


def strategy_of(package: str, **settings: Any) -> Any:
    name = "FabricSparseDDPStrategy" if package in FABRICS else "SparseDDPStrategy"
    module = importlib.import_module(f"lightning_sparse.integrations.{package.partition('.')[0]}")
    return getattr(module, name)(**SPARSE | settings)


def on_rank_1(here: Any, elsewhere: Any) -> Any:
    return here if dist.get_rank() == 1 else elsewhere


# An error on one rank

ONE_RANK: dict[str, str] = {
    "pattern": "ValueError: The pattern '*.bais' in dense matches no parameter",
    "optimizer": "ValueError: Residual(rates=True) needs steps of lr * gradient",
    "find_unused_parameters": "find_unused_parameters (False on rank 0, True on rank 1)",
    "strict_resume": "strict_resume (False on rank 0, True on rank 1)",
    "model": "parameters (",
}


def settings_for(case: str) -> dict[str, Any]:
    return {
        "pattern": {"dense": on_rank_1(["*.bais"], [])},
        "optimizer": {"memory": Residual(rates=True)},
        "find_unused_parameters": {"find_unused_parameters": on_rank_1(True, False)},
        "strict_resume": {"strict_resume": on_rank_1(True, False)},
        "model": {},
    }[case]


def optimizer_for(case: str, module: nn.Module) -> torch.optim.Optimizer:
    adam = case == "optimizer" and dist.get_rank() == 1
    return (torch.optim.Adam if adam else torch.optim.SGD)(module.parameters(), lr=0.1)


def failing_fit(package: str, case: str) -> str:
    module = make_module(package)
    if case == "model" and dist.get_rank() == 1:
        module.net[2] = nn.Linear(30, 4)
    module.configure_optimizers = lambda: optimizer_for(case, module)
    trainer = make_trainer(package, strategy=strategy_of(package, **settings_for(case)))
    try:
        trainer.fit(module, make_data(), make_data(16))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def failing_setup(package: str, case: str) -> str:
    strategy = strategy_of(package, **settings_for(case))
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Linear(10, 4 if case == "model" and dist.get_rank() == 1 else 3)
    try:
        fabric.setup(model, optimizer_for(case, model))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for engine in strategy.engines:
            engine.close()
    return "nothing"


@pytest.mark.parametrize(
    ("case", "package"), covering(in_turns(list(ONE_RANK), [*PACKAGES[:1], *FABRICS, *PACKAGES[1:]]), together=1)
)
def test_what_is_wrong_on_one_rank_is_heard_of_on_all(two_ranks: Ranks, package: str, case: str) -> None:
    first, second = two_ranks(failing_setup if package in FABRICS else failing_fit, package, case)
    assert ONE_RANK[case] in first
    assert ONE_RANK[case] in second
    if "ValueError" in ONE_RANK[case]:
        assert second.startswith("ValueError")
        assert first.startswith("RuntimeError: Rank 1 failed, so that no rank goes on. Its error: ValueError")
    else:
        assert first == second


# Layers that torch cannot compute on CPUs


def synced(package: str) -> str:
    def run() -> None:
        if package in PACKAGES:
            trainer = make_trainer(package, strategy="sparse_ddp", sync_batchnorm=True)
            trainer.fit(make_module(package, "norm"), make_data(), make_data(16))
        else:
            fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2, strategy="sparse_ddp")
            fabric.launch()
            model = nn.Sequential(nn.Linear(10, 30), nn.BatchNorm1d(30))
            fabric.setup(nn.SyncBatchNorm.convert_sync_batchnorm(model))

    with pytest.raises(ValueError, match="SyncBatchNorm") as raised:
        run()
    return str(raised.value)


@pytest.mark.parametrize("package", [*PACKAGES, *FABRICS])
def test_synchronised_batch_normalisation_on_cpus_is_refused_with_what_to_do(two_ranks: Ranks, package: str) -> None:
    for said in two_ranks(synced, package):
        assert said == (
            "Expected a model without SyncBatchNorm on CPUs, where torch cannot compute it, but "
            f"{'net.1' if package in PACKAGES else '1'!r} is one. Leave out Trainer(sync_batchnorm=True) or "
            "convert_sync_batchnorm(), or train on GPUs."
        )


# Advice of Lightning


def unused(package: str, strategy: Any) -> str:
    trainer = make_trainer(package, strategy=strategy or strategy_of(package))
    try:
        trainer.fit(make_module(package, "unused"), make_data(), make_data(16))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_advice_on_unused_parameters_does_not_lead_back_to_dense_training(two_ranks: Ranks, package: str) -> None:
    for strategy in ("sparse_ddp", None):
        for said in two_ranks(unused, package, strategy):
            assert "parameters that were not used in producing the loss" in said
            assert "'sparse_ddp_find_unused_parameters_true'" in said
            assert "SparseDDPStrategy(find_unused_parameters=True)" in said
            assert "'ddp_find" not in said
    for said in two_ranks(unused, package, "sparse_ddp_find_unused_parameters_true"):
        assert said == "nothing"


# Copies


def loaded(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def boring(package: str) -> Any:
    """A module whose class can be pickled."""
    torch.manual_seed(0)
    return importlib.import_module(package + ".demos.boring_classes").BoringModel()


def copy_now(module: Any, found: list[bool], *_: Any) -> None:
    trainer = module.trainer
    if trainer.global_step == 4:
        strategy = trainer.strategy
        for other in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy), loaded(trainer).strategy):
            found.append(other.engine is None)
            found.append(other.config == strategy.config)
            found.append(torch.equal(flat(other.model.module), flat(module)))
        found.append(strategy.engine.step == 4)


def fit_and_copy(package: str, copying: bool) -> tuple[list[bool], Tensor]:
    """What is copied between two steps is whole; returns the parameters, too."""
    module, found = boring(package), [True]
    if copying:
        module.on_train_batch_end = functools.partial(copy_now, module, found)
    trainer = make_trainer(package, strategy=strategy_of(package), max_steps=6)
    trainer.fit(module)
    return found, flat(module)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_trainer_and_its_strategy_can_be_copied_within_fit(two_ranks: Ranks, package: str) -> None:
    [(_, expected), _] = two_ranks(fit_and_copy, package, False)
    for found, parameters in two_ranks(fit_and_copy, package, True):
        assert found == [True] * 11
        assert torch.equal(parameters, expected)


def fit_with_a_loaded_trainer(package: str) -> tuple[Tensor, int]:
    """A trainer that was saved after fit trains again."""
    trainer = make_trainer(package, strategy=strategy_of(package), max_steps=2)
    trainer.fit(boring(package))
    again, module = loaded(trainer), boring(package)
    again.fit_loop.epoch_loop.max_steps = 6
    again.fit(module)
    return flat(module), again.strategy.engine.step


def test_a_trainer_that_was_saved_trains_again(two_ranks: Ranks) -> None:
    first, second = two_ranks(fit_with_a_loaded_trainer, "pytorch_lightning")
    assert torch.equal(first[0], second[0])
    assert first[1] > 0


def copied_fabric(package: str) -> list[bool]:
    strategy = strategy_of(package)
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    plain = nn.Linear(10, 3)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 10)).sum())
    optimizer.step()
    others = [pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)]
    average = torch.optim.swa_utils.AveragedModel(model)
    found = [other.engine is None and other.config == strategy.config for other in others]
    found.append(torch.equal(average(torch.ones(2, 10)), model(torch.ones(2, 10))))
    strategy.engine.close()
    return found


@pytest.mark.parametrize("package", FABRICS)
def test_a_fabric_strategy_and_its_modules_can_be_copied(two_ranks: Ranks, package: str) -> None:
    assert two_ranks(copied_fabric, package) == [[True] * 3] * 2


def averaged(package: str, strategy: str) -> tuple[Tensor, Tensor]:
    """Parameters after fit with Lightning's callback that averages weights, and their average as it was kept."""
    callbacks = importlib.import_module(package + ".callbacks")
    callback = callbacks.EMAWeightAveraging(decay=0.5, update_every_n_steps=2)
    chosen = strategy_of(package, density=1.0) if strategy == "sparse" else strategy
    trainer = make_trainer(package, strategy=chosen, callbacks=[callback])
    module = make_module(package)
    trainer.fit(module, make_data(), make_data(16))
    return flat(module), flat(callback._average_model.module)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_averages_of_weights_are_those_of_plain_ddp_at_full_density(two_ranks: Ranks, package: str) -> None:
    if not hasattr(importlib.import_module(package + ".callbacks"), "EMAWeightAveraging"):
        pytest.skip("this Lightning has no such callback")
    for plain, sparse in zip(two_ranks(averaged, package, "ddp"), two_ranks(averaged, package, "sparse"), strict=True):
        assert torch.equal(plain[0], sparse[0])
        assert torch.equal(plain[1], sparse[1])
