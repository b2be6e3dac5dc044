"""What ranks' gradients have in common, and how much longer Adam's steps are for it: against exact sums."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.engine.diversity import EVERY, Diversity, squares_of, total
from lightning_sparse.engine.drivers import drive_ranks
from tests.engine.optimizers.test_adam_rule import Training, batch, loss_of
from tests.ranks import Ranks, error_of

NAMES = ("0.weight", "2.weight")


def known(training: Training, name: str = NAMES[0]) -> float:
    """What steps of a parameter are longer by."""
    return Diversity.of([training.engine.state_dict()["counters"][name]]).factor(4)


numbers = st.floats(0.0, 1e200) | st.sampled_from([math.inf, math.nan])


def exact(gradients: Tensor) -> float:
    """Squared norm of the mean of (n, numel) gradients, over the mean of their squared norms."""
    rows = gradients.double()
    return float(rows.mean(0).square().sum() / rows.square().sum(1).mean())


def found(gradients: Tensor, seed: int = 3) -> list[float]:
    """The same, as each rank finds it."""
    rows = drive_ranks([squares_of([g], seed, len(gradients)) for g in gradients])
    return [float(mean / own) for own, mean in rows]


@given(st.lists(st.tuples(numbers, numbers), max_size=5), st.integers(1, 64))
def test_factors_are_between_those_of_equal_gradients_and_the_root_of_n(
    measured: list[tuple[float, float]], n: int
) -> None:
    diversity = Diversity()
    for own, mean in measured:
        diversity.count(own, mean)
    assert math.sqrt(min(n, 1 + 2 / n)) <= diversity.factor(n) * (1 + 1e-12)
    assert diversity.factor(n) <= math.sqrt(n) * (1 + 1e-12)
    assert n > 2 or diversity.factor(n) == math.sqrt(n)


def test_squares_are_summed_over_some_twenty_steps() -> None:
    diversity, squares = Diversity(), [(8.0, 8.0), (4.0, 1.0), (5.0, 2.0), (1e-3, 4e-4)]
    for number, (own, mean) in enumerate(squares):
        for step in range(EVERY):
            assert diversity.asks(8) == (step == 0) and not diversity.asks(2)
            diversity.count(*((own, mean) if step == 0 else ()))
            diversity.learn(0.0, 0.0)  # gradients that are zero tell nothing
            diversity.learn(math.nan, math.nan)
            weights = [0.95 ** (EVERY * (number - i)) for i in range(number + 1)]
            owns, means = (sum(w * pair[k] for w, pair in zip(weights, squares, strict=False)) for k in (0, 1))
            assert diversity.factor(8) == pytest.approx(math.sqrt(1.25 * owns / means), rel=1e-12)
        again = Diversity.of([{"steps": 3.0}, diversity.counters(), {}])
        assert again.factor(8) == diversity.factor(8) and again.counters() == diversity.counters()
    assert Diversity.of([]).factor(4) == 2.0


def test_a_gradient_that_is_far_longer_than_the_others_counts_little() -> None:
    diversity = Diversity()
    for step in range(10 * EVERY):
        diversity.count(*((1.0, 1.0) if step % EVERY == 0 else ()))
    before = diversity.factor(8)
    diversity.count(1e4, 1e4 / 8)
    at_once = diversity.factor(8)
    for step in range(1, 6 * EVERY):
        diversity.count(*((1.0, 1.0) if step % EVERY == 0 else ()))
    assert before == pytest.approx(math.sqrt(1.25)) and at_once < 1.8
    assert diversity.factor(8) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("shape", [(1,), (2,), (251,), (7, 3)])
def test_totals_are_sums(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(total(x), x.sum(0))


@pytest.mark.parametrize("numel", [1, 17, 251, 252, 4093, 5000, 40_000])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_find_what_their_gradients_have_in_common(n: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    common, own = torch.randn(numel, generator=generator), torch.randn(n, numel, generator=generator)
    for gradients in (own, own + 0.7 * common, 1e-15 * own + common):
        [share] = set(found(gradients))
        assert share == pytest.approx(exact(gradients), rel=1e-5 if numel <= 251 else 0.25)
    assert found(common.expand(n, -1).contiguous()) == pytest.approx([1.0] * n, rel=1e-12)
    for scale in (1e-22, 1e16):  # squares are beyond float32
        assert found(scale * own) == pytest.approx(found(own), rel=1e-4)


def test_a_scale_of_the_loss_changes_nothing() -> None:
    gradients = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 2.0**14, 2.0**-9):
        given = torch.full((), scale)
        rows = drive_ranks([squares_of([scale * g], 5, 3, given) for g in gradients])
        assert torch.equal(rows[0], drive_ranks([squares_of([g], 5, 3) for g in gradients])[0])


def moved(rank_of_data: int | None) -> tuple[float, float]:
    """Largest move of a first step, over the learning rate; and the factor that a state has."""
    hyper = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0}
    training = Training(hyper=hyper, sparsifier="shared_top_k", exchange="reduce_union")
    training.rank = training.rank if rank_of_data is None else rank_of_data
    before = {name: p.detach().clone() for name, p in training.module.named_parameters()}
    training.step(0)
    moves = [float((training.module.get_parameter(name).detach() - before[name]).abs().max()) for name in NAMES]
    return max(moves) / 0.01, known(training)


def test_equal_gradients_take_shorter_steps(four_ranks: Ranks) -> None:
    """Those of a first step are as long as the learning rate, but for the factor and the bound of averages."""
    bound = 1 / math.hypot(1, 1 / 2.5)  # 0.25 / density
    shortest = math.sqrt(1.5)
    assert four_ranks(moved, 0) == [(pytest.approx(shortest * bound, rel=1e-4), pytest.approx(shortest))] * 4
    for longest, factor in four_ranks(moved, None):
        assert 1.6 < factor <= 2 and longest > 1.25 * shortest * bound


class Alike(Training):
    """Half of the rows of a batch are the same on all ranks."""

    def step(self, number: int, closure: bool = False) -> None:
        self.optimizer.zero_grad()
        rows = torch.cat([batch(number, self.rank), batch(number, 99)])
        (self.ddp(rows) - 1).square().mean().backward()
        self.optimizer.step()


def factors(options: dict[str, Any]) -> list[float]:
    """What is known after each step."""
    training, seen = Alike(**options), []
    for step in range(2 * EVERY + 1):
        training.step(step)
        seen.append(known(training))
    return seen


def test_every_eighth_step_is_compared_however_groups_are_formed_and_sent(four_ranks: Ranks) -> None:
    ways: list[dict[str, Any]] = [{}, {"grouping": "layer"}, {"overlap": True}]
    for way in ways:
        first, *others = four_ranks(factors, way)
        assert others == [first] * 3
        assert len(set(first[:EVERY])) == len(set(first[EVERY:-1])) == 1 and len(set(first)) == 3, way
        assert all(1.3 < factor <= 2 for factor in first)


def in_turns() -> tuple[list[float], list[float]]:
    """Factors of two optimizers that take turns; ranks have equal gradients of what the second one holds."""
    training = Training(grouping="layer")
    optimizers = [torch.optim.AdamW([training.module.get_parameter(name)], lr=0.01) for name in NAMES]
    for step in range(EVERY + 2):
        for number, (optimizer, name) in enumerate(zip(optimizers, NAMES, strict=True)):
            optimizer.zero_grad()
            p = training.module.get_parameter(name)
            loss_of(training.ddp, step, training.rank).backward()
            seed = 1000 * step + (0 if number else training.rank + 1)
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
    return [known(training, name) for name in NAMES], training.weights()  # type: ignore[return-value]


def test_optimizers_that_take_turns_have_factors_of_their_own(four_ranks: Ranks) -> None:
    for (different, equal), _ in four_ranks(in_turns):
        assert different > 1.9 and equal == pytest.approx(math.sqrt(1.5), rel=0.1)  # both at first


def resumed(regroups: bool) -> tuple[list[float], list[bool]]:
    """What is known before and after, and whether the weights are those of a run without interruption."""
    training = Alike()
    for step in range(5):
        training.step(step)
    saved = training.saved()
    for step in range(5, 12):
        training.step(step)
    again = Alike(grouping="layer") if regroups else Alike()
    again.load(saved)
    kept = [Diversity.of(saved[2]["counters"].values()).factor(4), known(again)]
    for step in range(5, 12):
        again.step(step)
    return kept, [torch.equal(a, b) for a, b in zip(training.weights(), again.weights(), strict=True)]


@pytest.mark.filterwarnings("ignore:.*starts anew")
def test_what_is_known_is_saved(four_ranks: Ranks) -> None:
    for kept, equal in four_ranks(resumed, False):
        assert kept[0] == kept[1] < 2 and all(equal)
    for kept, _ in four_ranks(resumed, True):
        assert kept[0] == kept[1] < 2


def of_others(ranks: int | None) -> tuple[float, float]:
    """What is known after the state of so many ranks, or of a version that did not compare; and after a step."""
    training = Training()
    training.rank = 0  # gradients are equal
    training.step(0)
    saved = training.saved()
    for counters in saved[2]["counters"].values() if ranks is None else ():
        for name in Diversity().counters():
            counters.pop(name, None)
    if ranks is not None:
        saved[2].update(world_size=ranks, rank=0)
    again = Training()
    again.rank = 0
    again.load(saved)
    before = known(again)
    again.step(1)
    return before, known(again)


@pytest.mark.filterwarnings("ignore:.*starts anew")
@pytest.mark.parametrize("ranks", [None, 1])
def test_states_that_do_not_know_it_are_loaded(four_ranks: Ranks, ranks: int | None) -> None:
    assert four_ranks(of_others, ranks) == [(2.0, pytest.approx(math.sqrt(1.5)))] * 4


def known_on_some() -> str:
    """The error of a state of which one rank does not know what it has compared."""
    training = Training()
    training.step(0)
    saved = training.saved()
    if dist.get_rank() == 1:
        for counters in saved[2]["counters"].values():
            for name in Diversity().counters():
                counters.pop(name, None)
    return error_of(lambda: Training().engine.load_state_dict(saved[2]))


def test_ranks_that_know_different_things_load_nothing(two_ranks: Ranks) -> None:
    assert all("do not belong together" in error for error in two_ranks(known_on_some))


def skipped() -> tuple[list[float], int]:
    """What is known after a step, after one that is skipped, and after the next, each of which compares."""
    training, seen = Training(), []
    for step in (0, *[1] * (EVERY - 1), 2, 3):
        training.optimizer.zero_grad()
        rows = torch.cat([batch(step, training.rank), batch(step, 99)])
        (training.ddp(rows) - 1).square().mean().backward()
        if step == 2 and dist.get_rank() == 1:
            training.module.get_parameter(NAMES[0]).grad.fill_(math.nan)  # type: ignore[union-attr]
        training.optimizer.step()
        if step != 1:
            seen.append(known(training))
    return seen, training.engine.skipped_steps


def test_a_step_that_is_skipped_tells_nothing(four_ranks: Ranks) -> None:
    for seen, count in four_ranks(skipped):
        assert count == 1 and seen[0] == seen[1] != seen[2]
