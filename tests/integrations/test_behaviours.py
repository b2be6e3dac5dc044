"""What Lightning promises of its DDP strategy holds here, too: each case runs with both, and both packages."""

from __future__ import annotations

import importlib
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.covering import by_default, covering, in_turns
from tests.integrations.test_matrix import Recorder, check_conservation
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

FULL = {"sparsifier": "top_k", "density": 1.0, "rules": EVERYTHING_SPARSE}
LOW = {"sparsifier": "top_k", "density": 0.1, "rules": EVERYTHING_SPARSE}


def make_strategy(package: str, settings: dict[str, Any] | None, **ddp: Any) -> Any:
    """Lightning's own without settings."""
    if settings is None:
        return importlib.import_module(package).strategies.DDPStrategy(**ddp)
    return strategy_class(package)(**settings, **ddp)


def callbacks(package: str, case: str) -> list[Any]:
    module = importlib.import_module(package + ".callbacks")
    made: dict[str, Any] = {
        "weight averaging": lambda: module.WeightAveraging(),
        "EMA": lambda: module.EMAWeightAveraging(decay=0.8, update_every_n_steps=2),
        "SWA": lambda: module.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1),
        "accumulation scheduler": lambda: module.GradientAccumulationScheduler({0: 1, 1: 3}),
        "early stopping": lambda: module.EarlyStopping("val_loss", min_delta=1.0, patience=1),
        "learning-rate finder": lambda: module.LearningRateFinder(num_training_steps=14, early_stop_threshold=None),
    }
    return [made[case]()] if case in made else []


def make_variant(package: str, case: str) -> Any:
    """The module of tests.trainers with one method more, or another one."""
    module = make_module(package, "norm" if case == "SWA" else "plain")
    methods: dict[str, Any] = {}
    if case == "own clipping":

        def configure_gradient_clipping(self: Any, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

        methods["configure_gradient_clipping"] = configure_gradient_clipping
    if case == "LBFGS":
        methods["configure_optimizers"] = lambda self: torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
    if case == "own step":

        def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

        methods["optimizer_step"] = optimizer_step
    if case == "learning-rate finder":
        module.lr = 0.1
        methods["configure_optimizers"] = lambda self: torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
    module.__class__ = type("Variant", (type(module),), methods)
    return module


def fit_case(package: str, settings: dict[str, Any] | None, case: str, folder: str) -> tuple[Tensor, int, int, float]:
    """Parameters, epochs, steps, and the learning rate if it was searched."""
    warnings.filterwarnings("ignore", message=".*Swapping scheduler")
    module = make_variant(package, case)
    trainer = make_trainer(
        package,
        strategy=make_strategy(package, settings),
        callbacks=callbacks(package, case),
        max_epochs=3,
        default_root_dir=folder,
        **({"fast_dev_run": 3} if case == "fast_dev_run" else {}),
    )
    searched = case == "learning-rate finder"  # which begins to look at losses after ten steps
    trainer.fit(module, make_data(96 if searched else 48), make_data(16))
    return flat(module), trainer.current_epoch, trainer.global_step, getattr(module, "lr", 0.0)


CASES = [
    "weight averaging",
    "EMA",
    "SWA",
    "accumulation scheduler",
    "early stopping",
    "learning-rate finder",
    "own clipping",
    "own step",
    "LBFGS",
    "fast_dev_run",
]


@pytest.mark.parametrize(("case", "package"), by_default(covering(in_turns(CASES, PACKAGES), together=1), 3))
def test_callbacks_and_overrides_do_what_they_do_with_ddp(
    two_ranks: Ranks, package: str, case: str, tmp_path: Path
) -> None:
    plain = two_ranks(fit_case, package, None, case, str(tmp_path))
    ours = two_ranks(fit_case, package, FULL, case, str(tmp_path))
    for x, y in zip(plain, ours, strict=True):
        assert torch.equal(x[0], y[0])
        assert x[1:] == y[1:]
        assert (x[3] not in (0.0, 0.1)) == (case == "learning-rate finder")
    assert not torch.equal(plain[0][0], flat(make_variant(package, case)))
    assert list(tmp_path.iterdir()) == []


def fit_after_search(package: str, folder: str) -> tuple[int, float]:
    """Steps and length of all residuals when training begins, after the learning-rate finder has trained a while."""
    module = make_variant(package, "learning-rate finder")
    seen: list[tuple[int, float]] = []

    def on_train_start() -> None:
        engine = module.trainer.strategy.engine
        residuals = [engine.residual(name) for name in engine.stepper.parameters]
        seen.append((engine.step, sum(float(r.norm()) for r in residuals)))

    trainer = make_trainer(
        package,
        strategy=make_strategy(package, LOW),
        callbacks=callbacks(package, "learning-rate finder"),
        default_root_dir=folder,
    )
    module.on_train_start = on_train_start
    trainer.fit(module, make_data(), make_data(16))
    return seen[-1]


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_nothing_of_the_search_for_a_learning_rate_is_left(two_ranks: Ranks, tmp_path: Path, package: str) -> None:
    assert two_ranks(fit_after_search, package, str(tmp_path)) == [(0, 0.0)] * 2
    assert list(tmp_path.iterdir()) == []


# Parameters that are frozen for some epochs.

THAWED = {1, 3}
"""Epochs in which the first layer is trained."""


def fit_freezing(
    package: str, settings: dict[str, Any] | None, ddp: dict[str, Any]
) -> tuple[Tensor, Recorder, list[int]]:
    """Parameters, what was exchanged, and the number of parameters in DDP in each epoch. Plain DDP never freezes."""
    module = make_module(package)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    wrapped: list[int] = []

    class Freeze(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if settings is not None:
                module.net[0].requires_grad_(trainer.current_epoch in THAWED)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if settings is None and trainer.current_epoch not in THAWED:
                for p in module.net[0].parameters():
                    p.grad = None

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if settings is not None:
                wrapped.append(len(trainer.strategy.engine.stepper.parameters))

    if settings is not None:
        module.net[0].requires_grad_(False)
    recorder = Recorder()
    trainer = make_trainer(
        package,
        strategy=make_strategy(package, settings, **ddp),
        callbacks=[Freeze(), recorder.callback()],
        max_epochs=5,
    )
    trainer.fit(module, make_data(32), make_data(16))
    return flat(module), recorder, wrapped


@pytest.mark.parametrize(
    "ddp",
    by_default([{"find_unused_parameters": True}, {}, {"gradient_as_bucket_view": True}], 1),
    ids=str,
)
def test_layers_that_thaw_and_freeze_train_like_ones_that_the_optimizer_skips(
    two_ranks: Ranks, ddp: dict[str, Any]
) -> None:
    plain = two_ranks(fit_freezing, "pytorch_lightning", None, {})
    full = two_ranks(fit_freezing, "pytorch_lightning", FULL, ddp)
    for ours, reference in zip(full, plain, strict=True):
        assert torch.equal(ours[0], reference[0])
        frozen = 4 if "find_unused_parameters" in ddp else 2  # where frozen means unused, DDP may keep them
        assert ours[2] == [2, 4, frozen, 4, frozen]
    low = two_ranks(fit_freezing, "pytorch_lightning", LOW, ddp)
    assert torch.equal(low[0][0], low[1][0])
    check_conservation([recorder for _, recorder, _ in low], "32-true")
    # They are frozen at the end, and what they have not sent is kept.
    assert all(recorder.residuals["net.0.weight"].any() for _, recorder, _ in low)


def fit_finetuning(package: str, settings: dict[str, Any] | None) -> tuple[Tensor, bool]:
    """Lightning's own callback; parameters, and whether the first layer has changed."""
    finetuning = importlib.import_module(package + ".callbacks").BaseFinetuning

    class Finetune(finetuning):  # type: ignore[misc, valid-type]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.05)

    module = make_module(package)
    module.configure_optimizers = lambda: torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9
    )
    before = flat(module.net[0])
    trainer = make_trainer(package, strategy=make_strategy(package, settings), callbacks=[Finetune()], max_epochs=3)
    trainer.fit(module, make_data(), make_data(16))
    return flat(module), not torch.equal(flat(module.net[0]), before)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_ranks_agree_on_layers_that_thaw(two_ranks: Ranks, package: str) -> None:
    for settings in (FULL, LOW):
        (first, changed), (second, _) = two_ranks(fit_finetuning, package, settings)
        assert torch.equal(first, second)
        assert changed
    # As they do not with DDP, which averages what needed gradients when the model was wrapped.
    (first, changed), (second, _) = two_ranks(fit_finetuning, package, None)
    assert not torch.equal(first, second)
    assert changed


# What a strategy offers to modules and callbacks.


def ask_strategy(package: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message=".*all_gather is deprecated")  # Lightning 2.6 under torch 2.13
    module = make_module(package)
    answers: dict[str, Any] = {}

    def on_train_start() -> None:
        strategy, rank = module.trainer.strategy, dist.get_rank()
        strategy.barrier("here")
        answers.update(
            mean=strategy.reduce(torch.tensor([1.0 + rank, 3.0]), reduce_op="mean").tolist(),
            sum=strategy.reduce(torch.tensor(1.0 + rank), reduce_op="sum").item(),
            not_a_tensor=strategy.reduce(5),
            broadcast=strategy.broadcast({"from": rank, "list": [rank]}),
            from_last=strategy.broadcast(rank, src=1),
            gathered=strategy.all_gather(torch.tensor([rank, 7])).tolist(),
            module_gathered=module.all_gather({"a": torch.tensor(rank)})["a"].tolist(),
            all_true=strategy.reduce_boolean_decision(True),
            one_true=strategy.reduce_boolean_decision(rank == 1, all=True),
            any_true=strategy.reduce_boolean_decision(rank == 1, all=False),
            none_true=strategy.reduce_boolean_decision(False, all=False),
            is_global_zero=strategy.is_global_zero,
            ranks=(strategy.world_size, strategy.global_rank, strategy.local_rank, strategy.node_rank),
            nodes=(strategy.num_nodes, strategy.num_processes),
            sampler=dict(strategy.distributed_sampler_kwargs),
            root_device=str(strategy.root_device),
            device_ids=strategy.determine_ddp_device_ids(),
            backend=strategy.process_group_backend,
            wrapped=isinstance(strategy.model, DistributedDataParallel),
            device_ids_of_ddp=strategy.model.device_ids,
            unwrapped=strategy.lightning_module is module,
            same_trainer=strategy.lightning_module.trainer is module.trainer,
            keys=list(strategy.lightning_module_state_dict()),
            checkpoint_keys=list(module.trainer._checkpoint_connector.dump_checkpoint()["state_dict"]),
            restores_after_setup=strategy.restore_checkpoint_after_setup,
            lightning_restores=strategy.lightning_restore_optimizer,
            handles_accumulation=strategy.handles_gradient_accumulation,
            launcher=type(strategy.launcher).__name__,
        )

    module.on_train_start = on_train_start
    trainer = make_trainer(package, strategy=make_strategy(package, settings), max_epochs=1)
    trainer.fit(module, make_data(), make_data(16))
    answers["after"] = trainer.strategy.model is module, trainer.strategy.lightning_module is module
    answers["metrics"] = sorted(trainer.callback_metrics)
    return answers


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_strategy_answers_like_ddp(two_ranks: Ranks, package: str) -> None:
    plain = two_ranks(ask_strategy, package, None)
    assert two_ranks(ask_strategy, package, LOW) == plain
    for rank, answers in enumerate(plain):
        # The reference has answers at all.
        assert answers["mean"] == [1.5, 3.0]
        assert (answers["sum"], answers["one_true"], answers["any_true"]) == (3.0, False, True)
        assert answers["ranks"] == (2, rank, rank, 0)
        assert answers["keys"] == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
        assert answers["wrapped"]


def evaluate(package: str, settings: dict[str, Any] | None, fit_first: bool) -> tuple[Any, ...]:
    warnings.filterwarnings("ignore", message="Using `DistributedSampler`")  # Lightning's advice on evaluation
    module, data = make_module(package), make_data()
    trainer = make_trainer(package, strategy=make_strategy(package, settings))
    if fit_first:
        trainer.fit(module, data, make_data(16))
    validated = trainer.validate(module, data, verbose=False)
    tested = trainer.test(module, data, verbose=False)
    predicted = torch.cat(trainer.predict(module, data))
    again = make_trainer(package, strategy=make_strategy(package, settings))
    again.fit(module, data, make_data(16))
    return validated, tested, predicted, flat(module), trainer.strategy.model is module


@pytest.mark.parametrize(("package", "fit_first"), by_default(covering(in_turns(PACKAGES, [True, False]), together=1)))
def test_evaluation_with_and_without_fit_and_a_second_fit_equal_ddp(
    two_ranks: Ranks, package: str, fit_first: bool
) -> None:
    plain = two_ranks(evaluate, package, None, fit_first)
    for ours, reference in zip(two_ranks(evaluate, package, FULL, fit_first), plain, strict=True):
        assert ours[:2] == reference[:2]
        assert torch.equal(ours[2], reference[2])
        assert torch.equal(ours[3], reference[3])
        assert ours[4] == reference[4]


def fit_with_batch_size_finder(package: str, settings: dict[str, Any] | None) -> str:
    finder = importlib.import_module(package + ".callbacks").BatchSizeFinder()
    try:
        trainer = make_trainer(package, strategy=make_strategy(package, settings), callbacks=[finder])
        trainer.fit(make_module(package), make_data(), make_data(16))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_the_batch_size_finder_is_refused_as_with_ddp(two_ranks: Ranks) -> None:
    for package in PACKAGES:
        messages = two_ranks(fit_with_batch_size_finder, package, LOW)
        assert messages == two_ranks(fit_with_batch_size_finder, package, None)
        assert "not supported with distributed strategies" in messages[0]


def fit_and_fail(package: str, where: str) -> tuple[str, bool, Tensor]:
    """What came out of fit, whether the engine is closed, and parameters of a fit after it."""
    module = make_module(package)

    def fail(*_: Any, **__: Any) -> None:
        if module.trainer.global_step == 2:
            raise RuntimeError(f"no more of {where} on rank {dist.get_rank()}")

    trainer = make_trainer(package, strategy=make_strategy(package, LOW))
    setattr(module, where, fail)
    message, closed = "", False
    try:
        trainer.fit(module, make_data(), make_data(16))
    except RuntimeError as error:
        message, closed = str(error), trainer.strategy.engine.closed
    module = make_module(package)
    trainer = make_trainer(package, strategy=make_strategy(package, LOW))
    trainer.fit(module, make_data(), make_data(16))
    return message, closed, flat(module)


@pytest.mark.parametrize(
    ("where", "package"),
    by_default(in_turns(["on_train_batch_start", "on_before_backward", "on_after_backward"], PACKAGES[::-1])),
)
def test_an_error_in_training_comes_out_of_fit_and_a_new_fit_works(two_ranks: Ranks, where: str, package: str) -> None:
    results = two_ranks(fit_and_fail, package, where)
    for rank, (message, closed, parameters) in enumerate(results):
        assert message == f"no more of {where} on rank {rank}"
        assert closed
        assert torch.equal(parameters, results[0][2])


@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize("package", PACKAGES)
def test_timeout_and_backend_reach_the_process_groups(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, Any]] = []
    init, new_group = dist.init_process_group, dist.new_group

    def note_init(backend: Any = None, **options: Any) -> Any:
        given.append((backend, options.get("timeout")))
        return init(backend, **options)

    def note_new(*args: Any, **options: Any) -> Any:
        given.append(("new", options.get("timeout")))
        return new_group(*args, **options)

    monkeypatch.setattr(dist, "init_process_group", note_init)
    monkeypatch.setattr(dist, "new_group", note_new)
    strategy = make_strategy(package, LOW, timeout=timedelta(seconds=77), process_group_backend="gloo")
    trainer = make_trainer(package, strategy=strategy, devices=1, max_epochs=1)
    try:
        trainer.fit(make_module(package), make_data(), make_data(16))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert given[0] == ("gloo", timedelta(seconds=77))
    assert {timeout for _, timeout in given} == {timedelta(seconds=77)}
    assert trainer.strategy._process_group_backend == "gloo"
