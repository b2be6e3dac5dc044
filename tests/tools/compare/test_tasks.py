"""Training problems: their data, and gradients that are those of plain torch."""

from __future__ import annotations

import copy
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from lightning_sparse.tools.compare import tasks
from lightning_sparse.tools.compare.tasks import Task, digits, heavy_tail, label, make, record, text

WORDS = "one two three four five six seven eight nine ten , ; eleven twelve thirteen Fourteen Fifteen 16 . " * 60


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(WORDS)
    return path


def plain_gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def batches(examples: int, size: int, seed: int) -> list[Tensor]:
    """Places of the first pass, a batch of all ranks in each row."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    return list(order[: examples // size * size].view(-1, size))


@pytest.mark.parametrize("name", ["digits", "text"])
def test_gradients_are_those_of_plain_autograd(name: str) -> None:
    task = digits(ranks=3, batch=5, width=3, seed=4) if name == "digits" else text(ranks=3, batch=5, words=50, seed=4)
    for places in batches(len(task.train[0]), 15, seed=4)[:2]:
        plain = copy.deepcopy(task.model)
        rows = task.gradients()
        for row, some in zip(rows, places.view(3, 5), strict=True):
            torch.testing.assert_close(row, plain_gradient(plain, task.train[0][some], task.train[1][some]))
        task.apply(rows.mean(0))


def test_an_update_reaches_the_parameters_through_the_optimizer() -> None:
    task = digits(ranks=2, width=2, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
    before, update = task.flat.clone(), torch.randn(task.numel, generator=torch.Generator().manual_seed(0))
    task.apply(update)
    task.apply(update)
    torch.testing.assert_close(task.flat, before - 0.5 * update - 0.5 * 1.9 * update)
    flat = torch.cat([p.detach().reshape(-1) for p in task.model.parameters()])
    assert torch.equal(flat, task.flat)


def test_the_loss_is_the_mean_over_ranks() -> None:
    task = digits(ranks=2, width=2, batch=3)
    before = copy.deepcopy(task.model)
    [places, *_] = batches(1437, 6, seed=0)
    task.gradients()
    expected = nn.functional.cross_entropy(before(task.train[0][places]), task.train[1][places])
    assert task.loss == pytest.approx(expected.item(), rel=1e-5)


def test_every_example_comes_once_in_a_pass() -> None:
    task = digits(ranks=4, width=1, batch=16)
    some = torch.cat([places.flatten() for places in islice(task._draw(), 1437 // 64)])
    assert len(set(some.tolist())) == len(some) == 1437 // 64 * 64


@pytest.mark.parametrize(("name", "numel"), [("digits", 227_210), ("text", 223_208)])
def test_sizes_are_as_documented(name: str, numel: int) -> None:
    task = make(name, ranks=1)
    assert task.numel == sum(p.numel() for p in task.model.parameters()) == numel
    assert f"{numel:,}".replace(",", " ") in (tasks.TASKS[name].__doc__ or "")


def test_digits_for_validation_are_never_trained_on() -> None:
    one, other = digits(ranks=1, seed=0, width=1), digits(ranks=1, seed=1, width=1)
    assert len(one.train[0]) == 1437
    assert len(one.valid[0]) == 360
    assert torch.equal(one.valid[0], other.valid[0])
    images = torch.cat([one.train[0], one.valid[0]]).flatten(1)
    from sklearn.datasets import load_digits

    original = np.sort(np.unique(load_digits().data / 16, axis=0), axis=0)
    assert np.array_equal(np.sort(np.unique(images.numpy(), axis=0), axis=0), original)


def test_words_are_predicted_from_those_before(story: Path) -> None:
    task = text(ranks=1, path=story, words=10)
    for inputs, targets in (task.train, task.valid):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert int(inputs.max()) == 9  # the rare ones are one word
    # 20 words, signs and single figures per round of the story, 1200 in all, 16 in a sequence; every tenth of these is
    # for validation.
    assert (len(task.train[0]), len(task.valid[0])) == (74 - 8, 8)


def test_words_are_counted_without_regard_to_case(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_text("A a B , " * 40)
    task = text(ranks=1, batch=1, path=path, words=4)
    assert task.train[0][0].tolist() == [0, 0, 1, 2] * 4


def test_quality_by_hand() -> None:
    task = digits(ranks=1, width=1)
    with torch.no_grad():
        task.flat.zero_()
    assert task.evaluate() == pytest.approx(100 * float((task.valid[1] == 0).double().mean()))
    words = text(ranks=1, words=40)
    with torch.no_grad():
        words.flat.zero_()
    assert words.evaluate() == pytest.approx(40, rel=1e-4)
    assert task.model.training
    assert words.model.training


@pytest.mark.parametrize("name", ["digits", "text"])
def test_seeds_decide_everything(name: str) -> None:
    settings = {"width": 2} if name == "digits" else {"words": 30}
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    one, same, other = (torch.stack(list(record(make(name, ranks=2, seed=seed, **settings), 3))) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), drawn)  # the caller's random numbers are left alone
    assert torch.equal(one, same)
    assert not torch.isclose(one, other).all()


def test_recorded_gradients_are_those_of_dense_training() -> None:
    task, plain = digits(ranks=2, width=2), digits(ranks=2, width=2)
    for rows in record(task, 3):
        assert torch.equal(rows, plain.gradients())
        plain.apply(rows.mean(0))


def test_more_ranks_than_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1600 examples to train on, 16 for each of 100 ranks, but got 1437"):
        digits(ranks=100)


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    for content, message in ((b"", "but got 0"), (b"too short", "but got 0"), (b"\xff\xfe\x80", "invalid start byte")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            tasks.check(["text"], ranks=2, text=str(path))
    with pytest.raises(ValueError, match=r"a file in UTF-8, but got .*: Is a directory\."):
        tasks.check([], ranks=2, text=str(tmp_path))


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-sparse\[cli\]'"):
        digits()


def test_the_heavy_tail_is_what_it_says() -> None:
    ranks, numel, steps = 4, 40_000, 4
    rows = torch.stack(list(heavy_tail(ranks=ranks, numel=numel, steps=steps, seed=1))).double().numpy()
    assert rows.shape == (steps, ranks, numel)
    layers = rows.reshape(steps, ranks, 10, -1)
    medians = np.median(np.abs(layers), axis=(1, 3))
    # A tenth of the scale from the middle on.
    assert medians[:2].mean() / medians[2:].mean() == pytest.approx(10, rel=0.05)
    assert medians[0] / medians[0, 0] == pytest.approx(medians[3] / medians[3, 0], rel=0.15)
    assert 0.7 < np.log(medians[0]).std() < 3
    # Own and common halves are Student's t with 3 degrees of freedom each. Two ranks' difference has own parts only,
    # their sum minus others' likewise; both are compared with draws of scipy's.
    draws = scipy.stats.t(3).rvs(size=(3, 400_000), random_state=np.random.default_rng(0))
    scaled = layers[:2] / medians[:2, None, :, None]
    for found, law in (
        ((scaled[:, 0] - scaled[:, 1]), draws[0] - draws[1]),
        (scaled[:, 0], draws[0] + draws[2]),
        ((scaled[:, 0] + scaled[:, 1]), draws[0] + draws[1] + 2 * draws[2]),
    ):
        found, law = found.flatten() / np.median(np.abs(found)), law / np.median(np.abs(law))
        assert scipy.stats.ks_2samp(found, law).statistic < 0.008
        normal = scipy.stats.norm(scale=1 / scipy.stats.norm.ppf(0.75))
        assert scipy.stats.kstest(found, normal.cdf).statistic > 0.016
    # As much is common as is each one's own.
    own = np.median(np.abs(scaled[:, 0] - scaled[:, 1])) / np.median(np.abs(draws[0] - draws[1]))
    both = np.median(np.abs(scaled[:, 0])) / np.median(np.abs(draws[0] + draws[2]))
    assert own == pytest.approx(both, rel=0.02)


def test_the_heavy_tail_depends_on_its_seed_only() -> None:
    one, same, other = (torch.stack(list(heavy_tail(ranks=2, numel=95, steps=3, seed=s))) for s in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.isclose(one, other).any()
    assert one.shape == (3, 2, 95)


def test_labels_tell_the_text() -> None:
    assert [label("text", "a/b.c.txt"), label("text", None), label("heavy_tail", "x")] == [
        "text:b.c",
        "text",
        "heavy_tail",
    ]


def test_any_of_torchs_optimizers_will_do() -> None:
    task = digits(ranks=1, width=1, optimizer=partial(torch.optim.AdamW, lr=0.125))
    assert isinstance(task.optimizer, torch.optim.AdamW)
    assert task.optimizer.param_groups[0]["lr"] == 0.125


def test_a_task_of_ones_own() -> None:
    inputs, targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1] * 4)
    data = inputs, targets
    task = Task(nn.Linear(3, 2), data, data, ranks=2, batch=4, optimizer=partial(torch.optim.SGD, lr=1.0), seed=0)
    first = task.gradients()
    assert first.shape == (2, 8)
    for _ in range(50):
        task.apply(task.gradients().mean(0))
    assert task.loss < 0.69
