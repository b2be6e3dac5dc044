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

from lightning_sparse.engine.diversity import EVERY, Diversity, squares_of
from lightning_sparse.engine.network import drive_ranks
from lightning_sparse.ops.sketch import narrow_sketch
from tests.engine.optimizers.test_adam_rule import Training, loss_of
from tests.ranks import Ranks

NAMES = ("0.weight", "2.weight")


def known(training: Training) -> float:
    """What steps are longer by, between 1 and the root of 9."""
    return Diversity.of(training.engine.state_dict()["counters"].values()).factor(9)


numbers = st.floats(0.0, 1e200) | st.sampled_from([math.inf, math.nan])


def exact(gradients: Tensor) -> float:
    """Squared norm of the mean of (n, numel) gradients, over the mean of their squared norms."""
    rows = gradients.double()
    return float(rows.mean(0).square().sum() / rows.square().sum(1).mean())


def found(gradients: Tensor, seed: int = 3) -> list[float]:
    """The same, as each rank finds it."""
    rows = drive_ranks([squares_of(narrow_sketch([g], seed), len(gradients)) for g in gradients])
    return [float(mean / own) for own, mean in rows]


@given(st.lists(st.tuples(numbers, numbers), max_size=5), st.integers(1, 64))
def test_factors_are_between_1_and_the_root_of_n(measured: list[tuple[float, float]], n: int) -> None:
    diversity = Diversity()
    for own, mean in measured:
        diversity.measure(own, mean)
    assert 1.0 <= diversity.factor(n) <= math.sqrt(n) * (1 + 1e-12)


def test_squares_are_summed_over_some_twenty_steps() -> None:
    diversity, squares = Diversity(), [(8.0, 8.0), (4.0, 1.0), (5.0, 2.0), (1e-3, 4e-4)]
    for number, (own, mean) in enumerate(squares):
        diversity.measure(0.0, 0.0)  # gradients that are zero tell nothing
        diversity.measure(math.nan, math.nan)
        diversity.measure(own, mean)
        weights = [0.95 ** (EVERY * (number - i)) for i in range(number + 1)]
        owns, means = (sum(w * pair[k] for w, pair in zip(weights, squares, strict=False)) for k in (0, 1))
        assert diversity.factor(8) == pytest.approx(math.sqrt(owns / means), rel=1e-12)
        assert Diversity.of([{"steps": 3.0}, diversity.counters(), {}]).factor(8) == diversity.factor(8)
    assert Diversity.of([]).factor(4) == 2.0


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


def moved(rank_of_data: int | None) -> tuple[float, float]:
    """Largest move of a first step, over the learning rate; and the factor that a state has."""
    hyper = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0}
    training = Training(hyper=hyper, sparsifier="shared_top_k", exchange="reduce_union")
    training.rank = training.rank if rank_of_data is None else rank_of_data
    before = {name: p.detach().clone() for name, p in training.module.named_parameters()}
    training.step(0)
    state = training.engine.state_dict()
    moves = [float((training.module.get_parameter(name).detach() - before[name]).abs().max()) for name in NAMES]
    return max(moves) / 0.01, Diversity.of(state["counters"].values()).factor(2)


def test_equal_gradients_take_the_steps_of_dense_adam(two_ranks: Ranks) -> None:
    """Those of a first step are as long as the learning rate, but for the bound of averages."""
    bound = 1 / math.hypot(1, 1 / 2.5)  # 0.25 / density
    assert two_ranks(moved, 0) == [(pytest.approx(bound, rel=1e-4), pytest.approx(1.0))] * 2
    for longest, factor in two_ranks(moved, None):
        assert 1.3 < factor <= math.sqrt(2) and longest > 1.2 * bound


def shares(options: dict[str, Any]) -> list[float]:
    """What is known after each step."""
    training = Training(**options)
    seen = []
    for step in range(2 * EVERY + 1):
        training.step(step)
        seen.append(known(training))
    return seen


def test_every_eighth_step_is_compared_however_groups_are_formed_and_sent(two_ranks: Ranks) -> None:
    ways: list[dict[str, Any]] = [{}, {"grouping": "layer"}, {"overlap": True}]
    for way in ways:
        first, second = two_ranks(shares, way)
        assert first == second
        assert len(set(first[:EVERY])) == len(set(first[EVERY:-1])) == 1 and len(set(first)) == 3
        assert all(1.1 < factor < 1.8 for factor in first)


def resumed(regroups: bool) -> tuple[list[float], list[bool]]:
    """What is known before and after, and whether the weights are those of a run without interruption."""
    training = Training()
    for step in range(5):
        training.step(step)
    saved = training.saved()
    for step in range(5, 12):
        training.step(step)
    again = Training(grouping="layer") if regroups else Training()
    again.load(saved)
    kept = [Diversity.of(saved[2]["counters"].values()).factor(9), known(again)]
    for step in range(5, 12):
        again.step(step)
    return kept, [torch.equal(a, b) for a, b in zip(training.weights(), again.weights(), strict=True)]


@pytest.mark.filterwarnings("ignore:.*starts anew")
def test_what_is_known_is_saved(two_ranks: Ranks) -> None:
    for kept, equal in two_ranks(resumed, False):
        assert kept[0] == kept[1] < 2 and all(equal)
    for kept, _ in two_ranks(resumed, True):
        assert kept[0] == kept[1] < 2


def of_earlier() -> tuple[float, list[str]]:
    """What is known after a state of a version that did not measure it."""
    training = Training()
    training.step(0)
    saved = training.saved()
    for counters in saved[2]["counters"].values():
        for name in Diversity().counters():
            counters.pop(name, None)
    again = Training()
    lost = again.load(saved)
    return known(again), lost


def test_states_without_it_are_loaded(two_ranks: Ranks) -> None:
    assert two_ranks(of_earlier) == [(3.0, [])] * 2


def skipped() -> tuple[list[float], int]:
    training, seen = Training(), []
    for step, bad in enumerate((False, True, False)):
        training.optimizer.zero_grad()
        loss_of(training.ddp, step, training.rank).backward()
        if step:  # the exchange that is skipped would be the eighth
            training.engine.router.record.counts = training.engine.router.record.counts._replace(step=EVERY)
        if bad and dist.get_rank() == 1:
            training.module.get_parameter(NAMES[0]).grad.fill_(math.nan)  # type: ignore[union-attr]
        training.optimizer.step()
        seen.append(known(training))
    return seen, training.engine.skipped_steps


def test_a_step_that_is_skipped_tells_nothing(two_ranks: Ranks) -> None:
    for seen, count in two_ranks(skipped):
        assert count == 1 and seen[0] == seen[1] != seen[2]
