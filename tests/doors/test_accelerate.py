"""Accelerate, between two real processes."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader

from lightning_sparse.accelerate import attach
from tests.doors.trained import Net, Samples, equal, on_all, relaxed, weights
from tests.ranks import RankError, Ranks

LIMIT = 0.5


def train(
    steps: int,
    *,
    settings: dict[str, Any] | None = None,
    folder: str = "",
    save_at: int = -1,
    resume: bool = False,
    accumulate: int = 2,
    optimizer: str = "AdamW",
    spoil: int = -1,
    refuse: bool = False,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train with clipping and accumulation; `settings` None: as without the library."""
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = Net(spoil=spoil if torch.distributed.get_rank() == 1 else -1)
    plain = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    wrapped, prepared, loader = accelerator.prepare(model, plain, DataLoader(Samples(), 4))
    engine = None if settings is None else attach(accelerator, wrapped, prepared, max_grad_norm=LIMIT, **settings)
    first = 0
    if resume:
        accelerator.load_state(folder)
        first = save_at * accumulate
    batches = list(loader)
    for number in range(first, steps * accumulate):
        epoch, within = divmod(number, len(batches))
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batches[order[within]])["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), LIMIT)
            prepared.step()
            prepared.zero_grad()
        if folder and not resume and number + 1 == save_at * accumulate:
            accelerator.save_state(folder)
    about = (
        {}
        if engine is None
        else {"step": engine.step, "skipped": engine.skipped_steps, "sent": engine.totals.sent_bytes}
    )
    if refuse:
        accelerator.register_for_checkpointing(engine)
    if engine is not None:
        engine.close()
    return weights(model), about


def job(steps: int, keywords: dict[str, Any]) -> Any:
    return train(steps, **keywords)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_density_one_is_the_accelerators_own_ddp(two_ranks: Ranks, optimizer: str) -> None:
    dense = two_ranks(job, 7, {"optimizer": optimizer})
    ours = two_ranks(job, 7, {"optimizer": optimizer, "settings": {"density": 1.0}})
    assert all(equal(one, other) for (one, _), (other, _) in zip(dense, ours, strict=True))


def test_a_run_that_is_resumed_within_a_shuffled_epoch_ends_as_the_uninterrupted_one(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    told = {"settings": {"density": 0.05, "strict_resume": True}, "folder": str(tmp_path / "state"), "save_at": 8}
    whole = two_ranks(job, 11, told)
    resumed = two_ranks(job, 11, {**told, "resume": True})
    assert all(equal(one, other) for (one, _), (other, _) in zip(whole, resumed, strict=True))
    assert resumed[0][1]["step"] == 11
    assert resumed[0][1]["sent"] == whole[0][1]["sent"]  # totals go on


def test_steps_that_are_not_finite_are_skipped_on_all_ranks(two_ranks: Ranks) -> None:
    results = two_ranks(job, 6, {"settings": {"density": 0.05}, "accumulate": 1, "spoil": 3})
    assert [about["skipped"] for _, about in results] == [1, 1]
    assert all(bool(torch.isfinite(p).all()) for p in results[0][0])
    assert equal(results[0][0], results[1][0])


def clip_two_models(together: bool) -> float:
    """Clip gradients of two models in one call, or in one for each; return the norm of all averages."""
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    models, optimizers, engines = [], [], []
    for _ in range(2):
        model = Net()
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        engines.append(attach(accelerator, wrapped, optimizer, density=0.05))
        models.append(wrapped)
        optimizers.append(optimizer)
    batch = next(iter(DataLoader(Samples(), 4)))
    for _ in range(2):
        for model in models:
            model.zero_grad()
            accelerator.backward(1e3 * model(**batch)["loss"])
        calls = [[p for m in models for p in m.parameters()]] if together else [m.parameters() for m in models]
        for parameters in calls:
            accelerator.clip_grad_norm_(parameters=parameters, max_norm=LIMIT)
    grads = [p.grad.clone() for m in models for p in m.parameters() if p.grad is not None]
    for engine in engines:
        assert engine is not None
        engine.close()
    return float(torch.stack([g.norm() for g in grads]).norm())


def residuals_of_two_models(folder: str) -> list[list[torch.Tensor]]:
    """Those of each model before and after a state was saved and loaded."""
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator, engines = Accelerator(cpu=True), []
    for number in range(2):
        model = Net()
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        engines.append(attach(accelerator, wrapped, optimizer, density=0.05))
        for batch in list(DataLoader(Samples(), 4))[: 3 + number]:
            accelerator.backward((1 + number) * wrapped(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    found = []
    for act in (accelerator.save_state, accelerator.load_state):
        act(folder)
        parameters = [engine.state_dict()["parameters"] for engine in engines]
        found.append([torch.cat([x for each in one.values() for x in each.values()]) for one in parameters])
    for engine in engines:
        engine.close()
    return found


def test_each_model_goes_on_with_its_own_residuals(two_ranks: Ranks, tmp_path: Path) -> None:
    for before, after in two_ranks(residuals_of_two_models, str(tmp_path / "state")):
        assert not torch.equal(before[0], before[1])
        for one, other in zip(before, after, strict=True):
            assert torch.equal(one, other)


def test_a_norm_over_several_models_is_that_of_averages(two_ranks: Ranks) -> None:
    together, apart = two_ranks(clip_two_models, True)[0], two_ranks(clip_two_models, False)[0]
    assert together == pytest.approx(LIMIT, rel=1e-3)  # averages, all of them
    assert apart > LIMIT  # each rank's gradients of each model, before they wait


def test_an_engine_is_not_kept_as_if_it_were_equal_on_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="register_for_checkpointing"):
        two_ranks(job, 1, {"settings": {"density": 0.05}, "refuse": True})


def end() -> tuple[list[bool], bool, set[str]]:
    """Train two models; return whether each outlives the training, whether engines ended, and what stays replaced."""
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    before = set(vars(accelerator))
    accelerator.state.destroy_process_group = lambda: None  # others of this process go on with it
    models = [accelerator.prepare(Net()) for _ in range(2)]
    engines = []
    for model in models:
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
        engines.append(attach(accelerator, model, optimizer, density=0.1))
    for batch in accelerator.prepare(DataLoader(Samples(), 4)):
        for model in models:
            accelerator.backward(model(**batch)["loss"])
        break
    accelerator.end_training()
    closed = all(engine.closed for engine in engines)
    left = set(vars(accelerator)) - before
    outlive = [weakref.ref(model) for model in models]
    del models, model, optimizer, engines, batch, accelerator
    AcceleratorState._reset_state()
    return [one() is not None for one in outlive], closed, left


def test_the_end_of_training_ends_engines_and_leaves_no_references_to_models(two_ranks: Ranks) -> None:
    """Threads of process groups that something refers to can abort the process when it ends."""
    for outlive, closed, left in two_ranks(end):
        assert closed
        assert not left
        assert outlive == [False, False]


def test_a_save_that_was_interrupted_is_an_error_with_strict_resume(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    told = {"settings": {"density": 0.05, "strict_resume": True}, "folder": str(folder), "save_at": 2}
    two_ranks(job, 2, told)
    (folder / "lightning_sparse.json").unlink()
    with pytest.raises(RankError, match="marker"):
        two_ranks(job, 3, {**told, "resume": True})


def test_a_state_that_was_saved_without_us_is_resumed_and_saved_again(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    two_ranks(job, 3, {"folder": folder, "save_at": 3})
    assert "lightning_sparse.json" not in os.listdir(folder)
    resumed = two_ranks(job, 5, {"settings": {"density": 0.05}, "folder": folder, "save_at": 3, "resume": True})
    assert on_all([about["step"] for _, about in resumed]) == 2


def test_one_process_trains_as_before(tmp_path: Path, one_rank: None) -> None:
    relaxed()
    accelerator = Accelerator(cpu=True)
    model = Net()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert attach(accelerator, wrapped, optimizer, density=0.01) is None


def test_settings_that_cannot_be_fail_at_once() -> None:
    relaxed()
    accelerator = Accelerator(cpu=True)
    model = Net()
    with pytest.raises(TypeError, match="density"):
        attach(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), densty=0.01)
    with pytest.raises(ValueError, match="optimizer"):
        attach(accelerator, model, "adamw", density=0.01)
