"""The path that groups take on a device, walked on the CPU: same updates, nothing lost, skipped steps skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from tests.contract.cases import CASES, PAIRS, Case, kinds
from tests.covering import by_default, covering, in_one_test
from tests.lockstep import Outcome, Ranks, equal_states, noise
from tests.static_path import static_path

BY_NAME = {case.name: case for case in CASES}
SKIPPED_STEP = 2
SPARSE = [case.name for case in CASES if case.name != "everything"]
TRAVELLING = [
    (name, exchange)
    for name in SPARSE
    for exchange, cls in ls.exchanges.EXCHANGES.items()
    if BY_NAME[name].sparsifier.agreement in cls.accepts
]
SPARSELY_TRAVELLING = [pair for pair in TRAVELLING if pair[1] != "dense"]


def by_name(name: str, exchange: str, *rest: Any) -> tuple[Any, ...]:
    return kinds(BY_NAME[name], exchange, *rest)


@pytest.fixture(name="static_path")
def on_the_static_path() -> Iterator[None]:
    with static_path():
        yield


def without_ties(n: int, numel: int, seed: int) -> torch.Tensor:
    """Which of equal magnitudes go first is the one thing that a device may decide otherwise."""
    return torch.randn(n, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(case: Case, exchange: str, n: int) -> list[Outcome]:
    """Six steps in which no message is longer than its capacity."""
    published = case.name.endswith("published")
    # At full density the 4 k / n slots of the published rule are enough for any range. It starts at 1 / (2 sqrt(288)),
    # 0.03, and smaller gradients keep it from sending everything.
    density, scale, numel = (1.0, 0.03, 288) if published else (0.25, 1.0, 401)
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=density)
    outcomes = []
    for seed in range(6):
        gradients = scale * without_ties(n, numel, seed)
        gradients[:, : numel // 4] *= 3  # for ranges that move
        if seed == SKIPPED_STEP:
            gradients[n - 1, numel // 2] = float("inf")
        outcomes.append(ranks.step(gradients))
    return outcomes


@in_one_test(
    "name, exchange, n", covering(((*pair, n) for pair in TRAVELLING for n in (4, 2, 1)), together=1, seen_as=by_name)
)
def test_updates_equal_those_of_exact_shapes(name: str, exchange: str, n: int) -> None:
    host = run(BY_NAME[name], exchange, n)
    with static_path():
        device = run(BY_NAME[name], exchange, n)
    for step, (static, exact) in enumerate(zip(device, host, strict=True)):
        assert equal_states(tuple(static.after), tuple(exact.after))
        if step == SKIPPED_STEP:
            assert bool(torch.isnan(static.averages).all())
            continue
        assert torch.equal(static.averages, exact.averages)
        for a, b in zip(static.statistics, exact.statistics, strict=True):
            assert torch.equal(a.counts, b.counts)
            assert torch.equal(a.union, b.union)
            if BY_NAME[name].private and a.threshold is not None:  # may come from sums, formed in another order
                torch.testing.assert_close(a.threshold, b.threshold, rtol=1e-9, atol=0)
            else:
                assert equal_states(a.threshold, b.threshold)


@in_one_test(
    "case, exchange, n, dtype, numel",
    covering(
        (
            (*pair, n, dtype, numel)
            for pair in PAIRS
            for n in (4, 1)
            for dtype in (torch.float64, torch.bfloat16)
            for numel in (257, 1000)
            if pair[0].serves(n, numel, 0.02)
        ),
        together=1,
        seen_as=kinds,
    ),
)
def test_nothing_is_lost_when_messages_overflow(
    case: Case, exchange: str, n: int, dtype: torch.dtype, numel: int, static_path: None
) -> None:
    # At a density of 2 % thresholds let far more through than there are slots. Multiples of 1/16 are exact in both.
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=0.02, dtype=dtype)
    for seed in range(5):
        outcome = ranks.step(noise(n, numel, seed=seed, grain=16, dtype=dtype))
        offered = sum(outcome.before) + outcome.gradients.sum(0, dtype=outcome.before[0].dtype)
        assert torch.equal(n * outcome.averages[0].to(offered.dtype) + sum(outcome.after), offered)
        assert all(torch.equal(average, outcome.averages[0]) for average in outcome.averages)
        if not case.private:
            assert all(equal_states(state.selector, outcome.states[0].selector) for state in outcome.states)


@pytest.mark.parametrize("name", ["hard_threshold", "micro-published", "exdyna-published"])
def test_messages_do_not_exceed_their_capacity(name: str, static_path: None) -> None:
    # k = 20 of 1000. Hard-threshold: 8 k a rank; published: 4 k / n a rank.
    n, capacity = 4, {"hard_threshold": 160}.get(name, 20)
    ranks = Ranks(n, 1000, sparsifier=BY_NAME[name].sparsifier, exchange="reduce_union", density=0.02)
    for seed in range(4):
        outcome = ranks.step(100 + without_ties(n, 1000, seed))
        assert outcome.statistics[0].counts.tolist() == [capacity] * n
        assert all(selection.indices.numel() == capacity for selection in outcome.selections)


@pytest.mark.parametrize("name", ["micro", "exdyna"])
def test_values_of_exclusive_picks_travel_in_k_slots_not_in_those_of_all_ranks(name: str, static_path: None) -> None:
    # k = 40, at most 20 a rank, all 20 of whose magnitudes (8 bytes) are shared. Then a count and 20 indices of 4 bytes
    # go to 3 other ranks, and the values at 40 places, not at 4 * 20, through a ring.
    outcome = Ranks(4, 400, sparsifier=BY_NAME[name].sparsifier, density=0.1).step(without_ties(4, 400, 0))
    assert outcome.statistics[0].bytes_sent == 3 * 20 * 8 + 3 * 4 * (1 + 20) + 1.5 * 40 * 8


@in_one_test(
    "name, exchange, size",
    covering(
        (
            (*pair, size)
            for pair in SPARSELY_TRAVELLING
            for size in [(257, 0.5), (257, 0.9), (1001, 0.3), (256, 1.0), (1003, 1.0)]
        ),
        together=1,
        seen_as=by_name,
    ),
)
def test_all_ranks_bring_messages_of_one_length(
    name: str, exchange: str, size: tuple[int, float], static_path: None
) -> None:
    # The network of these tests refuses collectives of unequal shapes. Ranges here differ by one coordinate.
    numel, density = size
    for n in (2, 4):
        ranks = Ranks(n, numel, sparsifier=BY_NAME[name].sparsifier, exchange=exchange, density=density)
        for seed in range(n + 1):
            outcome = ranks.step(without_ties(n, numel, seed))
            assert len({selection.indices.numel() for selection in outcome.selections}) == 1


@pytest.mark.thorough
@in_one_test(
    "name, exchange, n",
    covering(((*pair, n) for pair in SPARSELY_TRAVELLING for n in (4, 2, 1)), together=1, seen_as=by_name),
)
def test_small_groups_work(name: str, exchange: str, n: int, static_path: None) -> None:
    case = BY_NAME[name]
    for numel in (1, 2, 3, 7):
        if not case.serves(n, numel, 0.34):
            continue
        ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=0.34)
        for seed in range(3):
            outcome = ranks.step(noise(n, numel, seed=seed))
            offered = sum(outcome.before) + outcome.gradients.sum(0)
            assert torch.equal(n * outcome.averages[0] + sum(outcome.after), offered)


@pytest.mark.parametrize("name", by_default(SPARSE, 12))
def test_a_skipped_step_leaves_what_was_finite_to_the_next_one(name: str, static_path: None) -> None:
    case, n, numel = BY_NAME[name], 4, 401
    disturbed, calm = (Ranks(n, numel, sparsifier=case.sparsifier, density=0.1) for _ in range(2))
    spoilt = noise(n, numel, seed=9)
    kept = spoilt.clone()
    spoilt[0, 3], kept[0, 3] = float("nan"), 0
    for seeds in ((3, 4, 5), (6, 7, 8)):  # after a skipped first step, and after a later one
        skipped = disturbed.step(spoilt)
        assert bool(skipped.averages.isnan().all())
        assert all(map(torch.equal, skipped.after, map(torch.add, skipped.before, kept)))
        calm.steps += case.numbered  # ranges rotate with the number of the step
        for seed in seeds:
            # Loads that make blocks move: the first quarter of the group is louder. Sums of these numbers are exact.
            gradients = (without_ties(n, numel, seed) * 2**30).round() / 2**30
            gradients[:, : numel // 4] *= 8
            late, at_once = disturbed.step(gradients), calm.step(gradients + kept if seed in (3, 6) else gradients)
            assert torch.equal(late.averages, at_once.averages)
            assert equal_states(tuple(late.after), tuple(at_once.after))
            assert equal_states(late.states[0].selector, at_once.states[0].selector)


@pytest.mark.parametrize("variant", ["corrected", "published"])
def test_blocks_move_as_with_exact_shapes(variant: str, request: pytest.FixtureRequest) -> None:
    # Layered gradients, so that ranges change. They are so small that the published threshold, 1 / (2 sqrt(200)), lets
    # only some through.
    sparsifier = ls.sparsifiers.ExDyna(num_blocks=32, variant=variant)
    scale = torch.linspace(0.001, 0.01, 2000, dtype=torch.float64)

    def walk() -> tuple[list[list[list[int]]], int]:
        ranks = Ranks(4, 2000, sparsifier=sparsifier, density=0.1)
        spans, longest = [], 0
        for seed in range(40):
            outcome = ranks.step(without_ties(4, 2000, seed) * scale)
            spans.append([outcome.states[0].selector.first.tolist(), outcome.states[0].selector.blocks.tolist()])
            longest = max(longest, int(outcome.statistics[0].counts.max()))
        return spans, longest

    exact, longest = walk()
    assert len({str(spans) for spans in exact}) > 3
    assert longest < 4 * 200 / 4  # nothing was thinned
    request.getfixturevalue("static_path")
    assert walk() == (exact, longest)


def reference_move(
    sparsifier: ls.sparsifiers.ExDyna, state: Any, load: list[int], expected: int, low: float, least: float
) -> list[list[int]]:
    """Algorithm 3 of the paper, one pair of neighbours after the other."""
    blocks, first = state.blocks.tolist(), state.first.tolist()
    mean = sum(load) // len(load) if sparsifier.variant == "published" else sum(load) / len(load)
    for p in range(len(load) - 1 if mean else 0):
        left, right = load[p] / mean, load[p + 1] / mean
        if left > sparsifier.alpha and right < low and blocks[p] - sparsifier.move >= least:
            sign = -1
        elif left < low and right > sparsifier.alpha and blocks[p + 1] - sparsifier.move >= least:
            sign = 1
        else:
            continue
        blocks[p] += sign * sparsifier.move
        blocks[p + 1] -= sign * sparsifier.move
        first[p + 1] += sign * sparsifier.move
        load[p] += sign * expected
        load[p + 1] -= sign * expected
    return [blocks, first]


@pytest.mark.parametrize("variant", ["corrected", "published"])
def test_blocks_of_many_ranks_move_at_once_as_one_pair_after_the_other(variant: str) -> None:
    generator, moved = torch.Generator().manual_seed(0), 0
    for n in (2, 3, 4, 5, 8, 13, 40):
        for most in (1, 3, 60):
            sparsifier = ls.sparsifiers.ExDyna(variant=variant, move=2, num_blocks=6 * n)
            state = sparsifier.init(50_000, n, 0.1, torch.device("cpu"))
            size, blocks = sparsifier.layout(50_000, n)
            load = torch.randint(most, (n,), generator=generator)
            limits = 1 / sparsifier.alpha, blocks / (4 * n)
            expected = reference_move(sparsifier, state, load.tolist(), 2 * size * int(load.sum()) // 50_000, *limits)
            found = sparsifier._move(state, load, 50_000, size, *limits)
            assert [part.tolist() for part in found] == expected
            moved += expected[0] != state.blocks.tolist()
    assert moved > 8
