"""Training in the closed loop."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import lightning_sparse as ls
from lightning_sparse.tools.compare.methods import DENSE, Method, choose
from lightning_sparse.tools.compare.tasks import Task, digits, text
from lightning_sparse.tools.compare.training import WINDOW, train

RANKS, BATCH, STEPS = 3, 8, 6


def small(name: str, **settings: object) -> Task:
    if name == "digits":
        return digits(ranks=RANKS, batch=BATCH, width=4, **settings)  # type: ignore[arg-type]
    return text(ranks=RANKS, batch=BATCH, words=60, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "lr"), [("digits", 0.05), ("text", 1.0)])
def test_dense_is_plain_training_on_the_batches_of_all_ranks(name: str, lr: float) -> None:
    task = small(name, seed=2)
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    order = torch.randperm(len(task.train[0]), generator=torch.Generator().manual_seed(2))
    losses = []
    for step in range(STEPS):
        places = order[step * RANKS * BATCH : (step + 1) * RANKS * BATCH]
        logits = model(task.train[0][places])
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), task.train[1][places].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = train(task, DENSE, 1.0, steps=STEPS, every=2)
    for ours, plain in zip(task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)
    assert [point.loss for point in run.points] == pytest.approx(
        [sum(losses[:steps]) / steps for steps in (2, 4, 6)], rel=1e-5
    )
    model.eval()
    with torch.no_grad():
        logits = model(task.valid[0])
    if name == "digits":
        expected = 100 * (logits.argmax(-1) == task.valid[1]).double().mean().item()
    else:
        expected = math.exp(nn.functional.cross_entropy(logits.reshape(-1, 60), task.valid[1].reshape(-1)).item())
    assert run.last.quality == pytest.approx(expected, rel=1e-4)


def test_density_one_is_dense() -> None:
    dense, top_k = small("digits"), small("digits")
    train(dense, DENSE, 1.0, steps=STEPS)
    train(top_k, choose(["top_k"])[0], 1.0, steps=STEPS)
    torch.testing.assert_close(top_k.flat, dense.flat, rtol=1e-5, atol=1e-7)


def test_points_and_traffic_by_hand() -> None:
    task = small("digits")
    k = ls.methods.density.count(0.01, task.numel)
    run = train(task, choose(["top_k"])[0], 0.01, steps=7, every=3)
    assert (run.method, run.density) == ("top_k", 0.01)
    assert [point.step for point in run.points] == [3, 6, 7]
    # A count and k pairs of words to two others in each step.
    assert [point.megabytes for point in run.points] == pytest.approx(
        [steps * 2 * (4 + 8 * k) / 1e6 for steps in (3, 6, 7)]
    )
    assert k / task.numel <= run.actual_density <= RANKS * k / task.numel
    dense = train(small("digits"), DENSE, 1.0, steps=2)
    assert dense.actual_density == 1.0
    assert dense.last.megabytes == pytest.approx(2 * 2 * 2 / 3 * 4 * task.numel / 1e6)


def test_the_loss_is_a_mean_over_the_latest_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small("digits")
    ramp = iter(range(100))
    compute = task.gradients

    def gradients() -> torch.Tensor:
        rows = compute()
        task.loss = float(next(ramp))
        return rows

    monkeypatch.setattr(task, "gradients", gradients)
    run = train(task, DENSE, 1.0, steps=WINDOW + 5, every=5)
    assert [point.loss for point in run.points] == [2.0, 4.5, 7.0, 9.5, 14.5]


def test_the_memory_takes_part() -> None:
    [plain] = choose(["top_k"])
    forgetful = Method("forgetful", plain.sparsifier, plain.words, memory=ls.memories.NoMemory())
    one, other = small("digits"), small("digits")
    train(one, plain, 0.01, steps=3)
    train(other, forgetful, 0.01, steps=3)
    assert not torch.equal(one.flat, other.flat)


@pytest.mark.thorough
def test_momentum_is_spent_early_where_the_method_says_so() -> None:
    losses = {}
    for name in ("top_k", "top_k+early"):
        losses[name] = train(small("digits"), choose([name])[0], 0.01, steps=150).last.loss
    assert losses["top_k+early"] < 0.7 * losses["top_k"], losses


def test_without_momentum_there_is_nothing_to_spend() -> None:
    runs = [
        train(small("digits", momentum=0.0), choose([name])[0], 0.01, steps=STEPS) for name in ("top_k", "top_k+early")
    ]
    assert runs[0].points == runs[1].points


def test_sparse_training_learns() -> None:
    run = train(small("text"), choose(["micro"])[0], 0.1, steps=40, every=20)
    assert run.points[0].loss > run.last.loss + 0.3
    assert run.last.quality < 40  # 60 by chance


def test_a_run_that_diverges_says_so() -> None:
    task = small("digits", optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e30))
    with pytest.raises(FloatingPointError, match=r"top_k diverged at step \d\."):
        train(task, choose(["top_k"])[0], 0.1, steps=8)
