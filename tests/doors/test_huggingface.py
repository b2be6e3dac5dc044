"""`transformers.Trainer`, between two real processes."""

from __future__ import annotations

import os
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_sparse.huggingface import prepare_trainer
from tests.doors.trained import Net, Samples, equal, on_all, relaxed, weights
from tests.engine.drift.models import Lion
from tests.ranks import RankError, Ranks

SPARSE = {"density": 0.05, "strict_resume": True}


class EndAt(TrainerCallback):
    """Ends training at a step, as where a job's time is over."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def made(folder: str, settings: dict[str, Any] | None, model: Module, end_at: int = 0, **arguments: Any) -> Trainer:
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    told = {
        "max_steps": 10, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_steps": 5,
        "logging_steps": 2, "report_to": [], "use_cpu": True, "ddp_backend": "gloo", "learning_rate": 1e-2,
        "disable_tqdm": True, "seed": 3, "ddp_find_unused_parameters": False,
    }  # fmt: skip
    trainer = Trainer(
        model=model,
        args=TrainingArguments(folder, **{**told, **arguments}),
        train_dataset=Samples(),
        eval_dataset=Samples(),
        callbacks=[EndAt(end_at)] if end_at else None,
    )
    return trainer if settings is None else prepare_trainer(trainer, **settings)


class Checkpointed(Net):
    """Computes activations again in backward, where a Trainer asks for that."""

    again = False

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        self.again = True

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.again:
            return super().forward(inputs, labels)
        return checkpoint(super().forward, inputs, labels, use_reentrant=False)


def fit(
    folder: str,
    settings: dict[str, Any] | None,
    resume: Any = None,
    times: int = 1,
    spoil: int = -1,
    own: str = "",
    **told: Any,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train `times` times; the loss of forward `spoil` is infinite on one rank; `own`: an optimizer that is given."""
    model = Checkpointed(spoil if torch.distributed.get_rank() == 1 else -1)
    trainer = made(folder, settings, model, **told)
    if own:
        trainer.optimizer = getattr(torch.optim, own)(model.parameters(), lr=1e-2)
    for _ in range(times):
        trainer.train(resume_from_checkpoint=resume)
    engine = getattr(trainer, "sparse_engine", None)
    rows = [sorted(row) for row in trainer.state.log_history]
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    about = {
        "rows": rows,
        "norms": norms,
        "step": engine.step if engine else 0,
        "skipped": engine.skipped_steps if engine else 0,
    }
    if engine is not None:
        engine.close()
    return weights(trainer.model), about


def job(folder: str, settings: dict[str, Any] | None, told: dict[str, Any]) -> Any:
    return fit(folder, settings, **told)


def same_weights(some: list[Any], others: list[Any]) -> bool:
    return all(equal(one[0], other[0]) for one, other in zip(some, others, strict=True))


EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
TOLD: list[dict[str, Any]] = [
    {},
    {"optim": "sgd"},
    {"max_grad_norm": 0.0},
    {"bf16": True},
    EACH,
    {"optim": "adafactor", "max_grad_norm": 0.1},
    {"own": "RMSprop", "ddp_find_unused_parameters": True},
    {"gradient_checkpointing": True, "max_grad_norm": 0.1},
]


@pytest.mark.parametrize("told", TOLD)
def test_density_one_is_the_trainers_own_ddp(two_ranks: Ranks, tmp_path: Path, told: dict[str, Any]) -> None:
    dense = two_ranks(job, str(tmp_path / "dense"), None, told)
    ours = two_ranks(job, str(tmp_path / "ours"), {"density": 1.0}, told)
    assert same_weights(dense, ours)
    assert [about["norms"] for _, about in ours] == [about["norms"] for _, about in dense]


@pytest.mark.parametrize("told", TOLD)
def test_ranks_stay_equal(two_ranks: Ranks, tmp_path: Path, told: dict[str, Any]) -> None:
    (one, about), (other, _) = two_ranks(job, str(tmp_path), SPARSE, told)
    assert equal(one, other)
    assert about["step"] == 10


@pytest.mark.parametrize("told", [{}, {"optim": "sgd", "max_grad_norm": 0.1}])
def test_micro_batches_that_are_synchronised_each_train_as_those_that_are_not(
    two_ranks: Ranks, tmp_path: Path, told: dict[str, Any]
) -> None:
    told = {**told, "gradient_accumulation_steps": 4}
    last = two_ranks(job, str(tmp_path / "last"), SPARSE, told)
    each = two_ranks(job, str(tmp_path / "each"), SPARSE, {**told, **EACH})
    assert same_weights(last, each)
    assert [about["norms"] for _, about in each] == [about["norms"] for _, about in last]


@pytest.mark.parametrize("limit", [0.0, 0.1])
def test_the_norm_that_is_logged_is_that_of_the_mean_gradient(two_ranks: Ranks, tmp_path: Path, limit: float) -> None:
    told = {"max_grad_norm": limit, "logging_steps": 1, "max_steps": 2}
    dense = two_ranks(job, str(tmp_path / "dense"), None, told)[0][1]["norms"]
    ours = on_all([about["norms"] for _, about in two_ranks(job, str(tmp_path / "ours"), SPARSE, told)])
    assert ours[0] == pytest.approx(dense[0], rel=0.06)  # of a sketch; weights differ from then on


def test_a_step_that_is_not_finite_is_skipped_on_all_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    told = {"spoil": 7, "logging_steps": 1}
    (one, about), (other, of_other) = two_ranks(job, str(tmp_path), SPARSE, told)
    assert about["skipped"] == of_other["skipped"] == 1
    assert [isfinite(norm) for norm in about["norms"]] == [number != 3 for number in range(10)]
    assert equal(one, other)
    assert all(bool(p.isfinite().all()) for p in one)


def test_a_run_that_is_resumed_within_a_shuffled_epoch_ends_as_the_uninterrupted_one(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    whole = two_ranks(job, str(tmp_path / "whole"), SPARSE, {})
    two_ranks(job, str(tmp_path / "part"), SPARSE, {"end_at": 5})
    resumed = two_ranks(job, str(tmp_path / "part"), SPARSE, {"resume": True})
    assert same_weights(whole, resumed)
    assert on_all([about["step"] for _, about in resumed]) == 10


def test_rows_with_a_loss_have_the_exchange_beside_it(two_ranks: Ranks, tmp_path: Path) -> None:
    [_, about], _ = two_ranks(job, str(tmp_path), SPARSE, {})
    rows = [row for row in about["rows"] if "loss" in row]
    assert len(rows) == 5
    assert all({"sparse/density", "sparse/traffic/total_mb", "grad_norm"} <= set(row) for row in rows)


def test_a_kill_between_the_checkpoint_and_the_marker_is_not_silent(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(job, str(tmp_path), SPARSE, {"end_at": 5})
    (tmp_path / "checkpoint-5" / "lightning_sparse.json").unlink()
    with pytest.raises(RankError, match="marker"):
        two_ranks(job, str(tmp_path), SPARSE, {"resume": True})


def test_a_checkpoint_of_a_dense_run_is_resumed_and_saved_again(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(job, str(tmp_path), None, {"end_at": 5})
    results = two_ranks(job, str(tmp_path), SPARSE, {"resume": True})
    assert on_all([about["step"] for _, about in results]) == 5
    again = two_ranks(job, str(tmp_path), SPARSE, {"resume": True, "max_steps": 14})
    assert on_all([about["step"] for _, about in again]) == 9


def test_residuals_go_with_the_folder_that_is_rotated_away(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(job, str(tmp_path), SPARSE, {"save_total_limit": 1})
    assert os.listdir(tmp_path) == ["checkpoint-10"]
    files = set(os.listdir(tmp_path / "checkpoint-10"))
    assert {"lightning_sparse.json", "lightning_sparse.sparse"} <= files


def test_models_alone_are_saved_without_residuals(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks(job, str(tmp_path), SPARSE, {"save_only_model": True})
    assert not [name for name in os.listdir(tmp_path / "checkpoint-10") if name.startswith("lightning_sparse")]


def test_the_best_model_is_loaded_at_the_end(two_ranks: Ranks, tmp_path: Path) -> None:
    told = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 5, "save_total_limit": 1}
    results = two_ranks(job, str(tmp_path), SPARSE, told)
    assert equal(results[0][0], results[1][0])


def test_a_second_train_goes_on_with_what_waits(two_ranks: Ranks, tmp_path: Path) -> None:
    results = two_ranks(job, str(tmp_path), SPARSE, {"times": 2})
    assert on_all([about["step"] for _, about in results]) == 20


def search(folder: str) -> list[int]:
    """Two trials, each with a model of its own; exchanges of each."""
    relaxed()
    trainer = made(folder, None, Net(), max_steps=4, save_steps=2)
    trainer.model_init = lambda trial=None: Net()
    prepare_trainer(trainer, **SPARSE)
    steps: list[int] = []

    def objective(metrics: dict[str, float]) -> float:
        assert trainer.sparse_engine is not None
        steps.append(trainer.sparse_engine.step)
        return metrics["eval_loss"]

    space = {"hp_space": lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)}}
    trainer.hyperparameter_search(**space, compute_objective=objective, n_trials=2, backend="optuna")
    return steps


def test_residuals_are_in_the_folder_of_a_trial(two_ranks: Ranks, tmp_path: Path) -> None:
    assert on_all(two_ranks(search, str(tmp_path))) == [4, 4]
    marked = {path.parent for path in tmp_path.rglob("lightning_sparse.json")}
    assert marked == {tmp_path / f"run-{trial}" / f"checkpoint-{step}" for trial in (0, 1) for step in (2, 4)}
    assert marked == {path.parent for path in tmp_path.rglob("trainer_state.json")}


def lora(folder: str) -> Any:
    from peft import LoraConfig, get_peft_model

    relaxed()
    model = get_peft_model(Net(), LoraConfig(r=16, target_modules=["layers.0", "layers.2"]))
    before = weights(model)
    trainer = made(folder, SPARSE, model, label_names=["labels"])
    trainer.train()
    assert trainer.sparse_engine is not None
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    trained = [p.requires_grad for p in model.parameters()]
    return moved == trained, trainer.sparse_engine.step


def test_adapters_are_exchanged_and_the_base_is_left_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    assert on_all(two_ranks(lora, str(tmp_path))) == (True, 10)


def compiled(folder: str) -> Any:
    trainer = made(folder, SPARSE, Net(), torch_compile=True, torch_compile_backend="eager", max_steps=4)
    trainer.train()
    assert trainer.sparse_engine is not None
    return trainer.sparse_engine.step


def test_compiled_models_are_exchanged(two_ranks: Ranks, tmp_path: Path) -> None:
    assert on_all(two_ranks(compiled, str(tmp_path))) == 4


class FailsOnce(Trainer):  # type: ignore[misc]
    """Runs out of memory in the third step with the first batch size, as a GPU would."""

    failed = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2 and not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().training_step(*args, **kwargs)


def with_half_the_batch(folder: str) -> Any:
    trainer = made(folder, None, Net(), auto_find_batch_size=True, max_steps=6)
    trainer.__class__ = FailsOnce
    prepare_trainer(trainer, **SPARSE)
    trainer.train()
    assert trainer.sparse_engine is not None
    return trainer.sparse_engine.step, trainer._train_batch_size, weights(trainer.model)


def test_a_smaller_batch_that_is_found_goes_on_with_what_waits(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks(with_half_the_batch, str(tmp_path))
    assert one[0] == other[0] == 8  # two steps before, six with the new batch size
    assert one[1] < 4
    assert equal(one[2], other[2])


def test_mistakes_are_named_before_training(tmp_path: Path) -> None:
    relaxed()
    trainer = Trainer(model=Net(), args=TrainingArguments(str(tmp_path), report_to=[], use_cpu=True))
    with pytest.raises(TypeError, match="density"):
        prepare_trainer(trainer, densty=0.01)
    with pytest.raises(TypeError, match="Trainer"):
        prepare_trainer(Net(), density=0.01)  # type: ignore[arg-type]
    prepare_trainer(trainer, density=0.01)
    with pytest.raises(RuntimeError, match="once"):
        prepare_trainer(trainer, density=0.01)


def with_lion(folder: str, resume: Any, best: bool) -> dict[str, Any]:
    """What a Trainer with Lion reports, saves and leaves in the model."""
    more = {"load_best_model_at_end": True, "metric_for_best_model": "loss"} if best else {}
    more |= {"eval_strategy": "steps", "eval_steps": 5}
    model = Net(-1)
    trainer = made(folder, SPARSE, model, max_steps=15, **more)
    trainer.optimizer = Lion(model.parameters(), lr=1e-3)
    trainer.train(resume_from_checkpoint=resume)
    rows = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    engine = trainer.sparse_engine
    kinds = {type(group.memory).__name__ for group in engine.stepper.groups if group.sparsified}
    after = trainer.evaluate()["eval_loss"]
    own = engine.state_dict()["parameters"]
    engine.close()
    found = {"rows": rows, "weights": weights(model), "after": after, "kinds": kinds}
    return found | {"copies": [vectors["copy"] for vectors in own.values() if "copy" in vectors]}


def by_torch(folder: str) -> float:
    """The loss of a saved file over what a rank evaluates, as the Trainer forms it."""
    plain = Net(-1)
    plain.load_state_dict(load_file(f"{folder}/model.safetensors"))
    trainer = made(folder, None, plain)
    return float(trainer.evaluate()["eval_loss"])


def test_lion_is_evaluated_and_saved_as_all_ranks_agree(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks(with_lion, str(tmp_path), None, False)
    assert one["kinds"] == {"Drift"} and equal(one["weights"], other["weights"])
    assert not equal(one["copies"], other["copies"])
    assert one["rows"][15] == one["after"] == two_ranks(by_torch, str(tmp_path / "checkpoint-15"))[0]
    resumed = two_ranks(with_lion, str(tmp_path), str(tmp_path / "checkpoint-10"), False)
    assert all(equal(a["copies"], b["copies"]) for a, b in zip((one, other), resumed, strict=True))
    assert equal(resumed[0]["weights"], one["weights"])


def test_the_best_weights_are_those_of_the_best_evaluation(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks(with_lion, str(tmp_path), None, True)
    assert equal(one["weights"], other["weights"])
    assert one["after"] == min(one["rows"].values())
