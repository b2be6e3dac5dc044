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
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin
from torch.utils.data import DataLoader

from lightning_sparse.accelerate import attach
from tests.doors.trained import Net, Samples, equal, on_all, relaxed, weights
from tests.ranks import RankError, Ranks

LIMIT = 0.5


def made(**told: Any) -> Accelerator:
    relaxed()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, kwargs_handlers=[AutocastKwargs(enabled=False)], **told)


def scales(accelerator: Accelerator) -> None:
    """Let an Accelerator scale losses as with `fp16`, which it has on GPUs alone; before `prepare`."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"


def train(
    steps: int,
    *,
    settings: dict[str, Any] | None = None,
    folder: str = "",
    save_at: int = -1,
    between: bool = False,
    resume: bool = False,
    accumulate: int = 2,
    each: bool = False,
    optimizer: str = "AdamW",
    fused: bool = False,
    clip: str = "norm",
    scaled: bool = False,
    spoil: int = -1,
    overflow: int = -1,
    refuse: bool = False,
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train with clipping and accumulation.

    Args:
        settings: None: as without the library.
        save_at: after so many steps.
        between: save before the step after these, when its backward is over.
        each: synchronise each micro-batch.
        spoil: the loss of this forward is infinite on one rank.
        overflow: before this step, a gradient of one rank is set to infinity.
    """
    plugin = GradientAccumulationPlugin(num_steps=accumulate, sync_each_batch=each)
    accelerator = made(gradient_accumulation_plugin=plugin)
    if scaled:
        scales(accelerator)
    model = Net(spoil=spoil if torch.distributed.get_rank() == 1 else -1)
    plain = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, fused=fused)
    wrapped, prepared, loader = accelerator.prepare(model, plain, DataLoader(Samples(), 4))
    engine = None if settings is None else attach(accelerator, wrapped, prepared, **settings)
    first = 0
    if resume:
        accelerator.load_state(folder)
        first = save_at * accumulate
    batches = list(loader)
    skipped: list[bool] = []
    for number in range(first, steps * accumulate):
        epoch, within = divmod(number, len(batches))
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist()
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batches[order[within]])["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip == "norm":
                accelerator.clip_grad_norm_(wrapped.parameters(), LIMIT)
            elif accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(wrapped.parameters(), LIMIT / 50)
            if number == overflow * accumulate and torch.distributed.get_rank() == 1:
                next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = float("inf")
            saves = bool(folder) and not resume
            if saves and between and number + 1 == (save_at + 1) * accumulate:
                accelerator.save_state(folder)
            prepared.step()
            skipped += [accelerator.optimizer_step_was_skipped] if accelerator.sync_gradients else []
            prepared.zero_grad()
        if saves and not between and number + 1 == save_at * accumulate:
            accelerator.save_state(folder)
    about: dict[str, Any] = {"scaler": (skipped, accelerator.scaler.get_scale()) if scaled else None}
    if engine is not None:
        about |= {"step": engine.step, "skipped": engine.skipped_steps, "sent": engine.stepper.totals.sent_bytes}
    if refuse:
        accelerator.register_for_checkpointing(engine)
    if engine is not None:
        engine.close()
    return weights(model), about


def job(steps: int, keywords: dict[str, Any]) -> Any:
    return train(steps, **keywords)


DENSE: list[dict[str, Any]] = [
    {},
    {"optimizer": "SGD"},
    {"clip": "value"},
    {"clip": ""},
    {"each": True},
    {"scaled": True, "spoil": 6},
    {"scaled": True, "spoil": 6, "fused": True, "clip": ""},
]


@pytest.mark.parametrize("told", DENSE)
def test_density_one_is_the_accelerators_own_ddp(two_ranks: Ranks, told: dict[str, Any]) -> None:
    dense = two_ranks(job, 7, told)
    ours = two_ranks(job, 7, {**told, "settings": {"density": 1.0}})
    assert all(equal(one, other) for (one, _), (other, _) in zip(dense, ours, strict=True))
    assert [about["scaler"] for _, about in ours] == [about["scaler"] for _, about in dense]


@pytest.mark.parametrize("told", [{}, {"optimizer": "SGD"}, {"clip": "value"}, {"scaled": True, "clip": ""}])
def test_micro_batches_that_are_synchronised_each_train_as_those_that_are_not(
    two_ranks: Ranks, told: dict[str, Any]
) -> None:
    told = {**told, "settings": {"density": 0.05}, "accumulate": 4}
    last, each = two_ranks(job, 7, told), two_ranks(job, 7, {**told, "each": True})
    assert all(equal(one, other) for (one, _), (other, _) in zip(last, each, strict=True))
    assert on_all([about["step"] for _, about in each]) == 7


def test_a_run_that_is_resumed_within_a_shuffled_epoch_ends_as_the_uninterrupted_one(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    told = {"settings": {"density": 0.05, "strict_resume": True}, "folder": str(tmp_path / "state"), "save_at": 8}
    whole = two_ranks(job, 11, told)
    resumed = two_ranks(job, 11, {**told, "resume": True})
    assert all(equal(one, other) for (one, _), (other, _) in zip(whole, resumed, strict=True))
    assert resumed[0][1]["step"] == 11
    assert resumed[0][1]["sent"] == whole[0][1]["sent"]  # totals go on


def test_a_run_goes_on_from_a_state_that_was_saved_between_backward_and_step(two_ranks: Ranks, tmp_path: Path) -> None:
    told = {"settings": {"density": 0.05, "strict_resume": True}, "folder": str(tmp_path / "state"), "save_at": 5}
    told |= {"accumulate": 1, "between": True}
    whole = two_ranks(job, 8, told)
    resumed = two_ranks(job, 8, {**told, "resume": True})
    assert all(equal(one, other) for (one, _), (other, _) in zip(whole, resumed, strict=True))
    assert resumed[0][1]["step"] == 8


@pytest.mark.parametrize("told", [{"spoil": 3}, {"overflow": 3}])
def test_steps_that_are_not_finite_are_skipped_on_all_ranks(two_ranks: Ranks, told: dict[str, int]) -> None:
    results = two_ranks(job, 6, {"settings": {"density": 0.05}, "accumulate": 1, **told})
    assert [about["skipped"] for _, about in results] == [1, 1]
    assert all(bool(torch.isfinite(p).all()) for p in results[0][0])
    assert equal(results[0][0], results[1][0])


@pytest.mark.parametrize("clip", ["norm", ""])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_skips_a_step_on_all_ranks(two_ranks: Ranks, fused: bool, clip: str) -> None:
    told = {"scaled": True, "accumulate": 1, "spoil": 3, "fused": fused, "clip": clip}
    dense, ours = two_ranks(job, 6, told), two_ranks(job, 6, {**told, "settings": {"density": 0.05}})
    assert on_all([about["scaler"] for _, about in ours]) == dense[0][1]["scaler"]
    assert [about["skipped"] for _, about in ours] == [1, 1]
    assert [about["step"] for _, about in ours] == [5, 5]
    assert equal(ours[0][0], ours[1][0])


@pytest.mark.parametrize("fused", [False, True])
def test_an_exchange_behind_a_scaler_skips_a_step_on_all_ranks(two_ranks: Ranks, fused: bool) -> None:
    """A scaler that has unscaled gradients before knows nothing of what happens later."""
    told = {"scaled": True, "accumulate": 1, "overflow": 3, "fused": fused, "settings": {"density": 0.05}}
    ours = two_ranks(job, 6, told)
    skipped, scale = on_all([about["scaler"] for _, about in ours])
    assert not any(skipped)
    assert scale == 2.0**13  # grown after each two steps
    assert [about["skipped"] for _, about in ours] == [1, 1]
    assert all(bool(torch.isfinite(p).all()) for p in ours[0][0])
    assert equal(ours[0][0], ours[1][0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_leaves_no_trace(two_ranks: Ranks, fused: bool) -> None:
    """It is a power of two, so that products with it are exact, but for those within a fused step."""
    told = {"settings": {"density": 0.05}, "fused": fused, "clip": ""}
    plain, scaled = two_ranks(job, 6, told), two_ranks(job, 6, {**told, "scaled": True})
    for (one, _), (other, _) in zip(plain, scaled, strict=True):
        assert equal(one, other) or fused
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def norm_of(grads: list[torch.Tensor]) -> float:
    return float(torch.stack([g.norm() for g in grads]).norm())


def clip_two_models(together: bool, scaled: bool) -> dict[str, Any]:
    """Clip two models and a parameter of none, in one call or several; norms of means before, said, and after."""
    accelerator = made()
    if scaled:
        scales(accelerator)
    models, optimizers, engines = [], [], []
    for _ in range(2):
        model = Net()
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        engines.append(attach(accelerator, wrapped, optimizer, density=0.05))
        models.append(wrapped)
        optimizers.append(optimizer)
    other = torch.nn.Parameter(torch.ones(3))

    def means(*several: Any) -> list[torch.Tensor]:
        found = [p.grad.clone() for one in several for p in one if p.grad is not None]
        for grad in found:
            torch.distributed.all_reduce(grad)
        return [grad / torch.distributed.get_world_size() for grad in found]

    batch = list(DataLoader(Samples(), 4))[torch.distributed.get_rank()]
    losses = [(1 + number) * model(**batch)["loss"] for number, model in enumerate(models)]
    for loss in losses:
        accelerator.backward(loss)
    other.grad = torch.full((3,), 0.5)
    scale = accelerator.scaler.get_scale() if scaled else 1.0
    held = [list(model.parameters()) for model in models]
    calls = [[*held[0], other, *held[1]]] if together else [held[0], held[1], [other]]
    if scaled and not together:  # a scaler unscales once
        accelerator.unscale_gradients()
        accelerator.unscale_gradients, scale = lambda: None, 1.0
    factor = [[1.0 if p is other else 1 / scale for p in call] for call in calls]
    before = [
        norm_of([g * f for g, f in zip(means(call), by, strict=True)]) for call, by in zip(calls, factor, strict=True)
    ]
    own = [p.grad.clone() for p in held[0] if p.grad is not None]
    said = [float(accelerator.clip_grad_norm_(parameters=call, max_norm=LIMIT)) for call in calls]
    after = [norm_of(means(call)) for call in calls]
    grads = [p.grad.view(-1) for p in held[0] if p.grad is not None]
    factors = [float(now @ g.view(-1) / g.square().sum()) for now, g in zip(grads, own, strict=True)]
    for engine in engines:
        assert engine is not None
        engine.close()
    return {"before": before, "said": said, "after": after, "factors": factors, "other": float(other.grad[0])}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_clipping_is_by_the_norm_of_the_mean_gradient(two_ranks: Ranks, together: bool, scaled: bool) -> None:
    results = two_ranks(clip_two_models, together, scaled)
    on_all([(one["said"], one["other"]) for one in results])
    for one in results:
        assert all(norm > LIMIT for norm in one["before"])
        assert one["said"] == pytest.approx(one["before"], rel=0.06)  # of a sketch
        assert one["after"] == pytest.approx([LIMIT] * len(one["after"]), rel=0.06)
        assert one["factors"] == pytest.approx([one["factors"][0]] * len(one["factors"]), rel=1e-4)
        assert one["factors"] == pytest.approx(results[0]["factors"], rel=1e-4)
    if not together:  # a call without a parameter of an engine is Accelerate's own
        assert results[0]["said"][2] == pytest.approx(0.5 * 3**0.5, rel=1e-6)


def clip_otherwise() -> tuple[list[torch.Tensor], list[torch.Tensor], float, float]:
    """Gradients and results of clipping by the largest coordinate, and by value."""
    accelerator, model = made(), Net()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    engine = attach(accelerator, wrapped, optimizer, density=0.05)
    accelerator.backward(wrapped(**list(DataLoader(Samples(), 4))[torch.distributed.get_rank()])["loss"])
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    largest = max(float(g.abs().max()) for g in own)
    said = float(accelerator.clip_grad_norm_(wrapped.parameters(), 1e3, norm_type="inf"))
    accelerator.clip_grad_value_(wrapped.parameters(), clip_value=largest / 4)
    clipped = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert engine is not None
    engine.close()
    return own, clipped, largest, said


def test_other_norms_and_values_are_each_ranks_own(two_ranks: Ranks) -> None:
    results = two_ranks(clip_otherwise)
    assert results[0][2] != results[1][2]
    for own, clipped, largest, said in results:
        limit = largest / 4 * 2**0.5  # the mean of two is that much shorter
        assert said == pytest.approx(largest)
        for before, after in zip(own, clipped, strict=True):
            torch.testing.assert_close(after, before.clamp(-limit, limit))


def residuals_of_two_models(folder: str) -> list[list[torch.Tensor]]:
    """Those of each model before and after a state was saved and loaded."""
    accelerator, engines = made(), []
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


def test_an_engine_is_not_kept_as_if_it_were_equal_on_all_ranks(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="register_for_checkpointing"):
        two_ranks(job, 1, {"settings": {"density": 0.05}, "refuse": True})


def end() -> tuple[list[bool], bool, set[str]]:
    """Train two models; return whether each outlives the training, whether engines ended, and what stays replaced."""
    accelerator = made()
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
    for damaged, words in (("[" * 100_000, "cannot be read as JSON"), ('{"totals": "x"}', "its totals are 'x'")):
        (folder / "lightning_sparse.json").write_text(damaged)
        with pytest.raises(RankError, match=f"(?s)rank 0: .*{words}.*rank 1: .*{words}"):
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
