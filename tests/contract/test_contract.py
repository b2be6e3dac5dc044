"""What every sparsifier does with every exchange that accepts it, on all ranks, at sizes that bite."""

from __future__ import annotations

import functools
import inspect
import io
import re
import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Agreement
from tests.contract.cases import CASES, MEMORIES, PAIR_NAMES, PAIRS, Case, kinds
from tests.covering import by_default, covering, everything, in_one_test
from tests.lockstep import Outcome, Ranks, equal_states, gave, noise
from tests.reference.releases import RELEASES, Step

SIZES = [1, 2, 7, 255, 256, 257, 10_000]
RANKS = [3, 4, 2, 1, 8]
SOME_RANKS = [3, 4, 1]
"""For what needs runs of its own."""
DENSITY = 0.2
# Means over a power of two are exact for the streams used here. For 3 ranks a third of a value below 2**7 is rounded by
# at most 2**-47, and n times that is compared: 1e-12 is far above it and far below a lost grain of 1/256.
THIRDS = 1e-12


def streams(n: int, numel: int) -> list[Tensor]:
    """Steps of different nature in a row, so that each meets the residuals that the others leave."""
    alone = torch.zeros(n, numel, dtype=torch.float64)
    alone[n - 1] = noise(1, numel, seed=2)[0]
    return [
        noise(n, numel, seed=0),
        torch.zeros(n, numel, dtype=torch.float64),
        torch.ones(n, numel, dtype=torch.float64),
        alone,
        noise(n, numel, seed=1),
        noise(n, numel, seed=3) * 4,
    ]


def run(
    case: Case, exchange: str, n: int, numel: int, memory: ls.memories.Memory, density: float = DENSITY
) -> list[Outcome]:
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, memory=memory, density=density)
    steps = streams(n, numel)
    return [ranks.step(gradients) for gradients in (steps if numel < 1000 else steps[:3])]


def close(n: int) -> dict[str, float]:
    return {"rtol": 0, "atol": THIRDS if n == 3 else 0}


def in_runs_of_their_own(numbers: list[int], *more: Any) -> list[Any]:
    """Numbers of ranks and all values of one thing more with the pairs that stand for all."""
    cells = ((*pair, n, *rest) for pair in PAIRS for n in numbers for rest in product(*more))
    return covering(cells, together=1, seen_as=kinds)


@functools.cache
def all_runs() -> list[Any]:
    """By default groups of one size, in thorough runs all sizes one after another."""
    one_size = covering(
        ((*pair, n, (numel,)) for pair in PAIRS for n in RANKS for numel in SIZES if pair[0].serves(n, numel, DENSITY)),
        together=1,
        trivial={1, (1,), (2,)},
        thorough={8},
        seen_as=lambda case, exchange, n, sizes: (
            (case, exchange),
            *((kind, one) for one in (n, sizes) for kind in (case.sparsifier.agreement, exchange)),
        ),
    )
    all_sizes = [
        pytest.param(*pair, n, tuple(SIZES), id=f"{name}-{n}-all", marks=pytest.mark.thorough)
        for name, pair in zip(PAIR_NAMES, PAIRS, strict=True)
        for n in RANKS
        if everything
    ]
    return [run for run in one_size if not run.marks] + all_sizes


def fewer_runs() -> list[Any]:
    """Of those by default as many as :func:`in_runs_of_their_own` takes."""
    runs = all_runs()
    few = covering((run.values for run in runs if not run.marks), together=1, seen_as=kinds)
    return [run for run in few if not run.marks] + [run for run in runs if run.marks]


@functools.lru_cache(maxsize=24)  # the runs of one sparsifier
def outcomes(case: Case, exchange: str, n: int, sizes: tuple[int, ...], memory: ls.memories.Memory) -> list[Outcome]:
    """All steps at the sizes that the method serves."""
    served = [numel for numel in sizes if case.serves(n, numel, DENSITY)]
    return [outcome for numel in served for outcome in run(case, exchange, n, numel, memory)]


MADE = {
    "outcomes": functools.partial(outcomes, memory=ls.memories.Residual()),
    "forgetful": functools.partial(outcomes, memory=ls.memories.NoMemory()),
}
"""What runs leave behind with and without error feedback."""
on_all_runs = in_one_test("case, exchange, n, sizes", all_runs(), scope="module", made=MADE)
on_fewer_runs = in_one_test("case, exchange, n, sizes", fewer_runs(), scope="module", made=MADE)
on_some_numbers = in_one_test("case, exchange, n", in_runs_of_their_own(SOME_RANKS))


@on_all_runs
def test_nothing_is_lost(outcomes: list[Outcome], n: int) -> None:
    for outcome in outcomes:
        offered = sum(outcome.before) + outcome.gradients.sum(0)
        torch.testing.assert_close(n * outcome.averages[0] + sum(outcome.after), offered, **close(n))


@on_all_runs
def test_a_rank_keeps_what_it_did_not_send(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for rank, (update, kept) in enumerate(zip(outcome.updates, outcome.after, strict=True)):
            expected = outcome.before[rank] + outcome.gradients[rank]
            assert torch.equal(outcome.accs[rank], expected)
            assert torch.equal(kept, expected - gave(update, expected))


@on_fewer_runs
def test_without_memory_a_rank_sends_of_this_gradient_alone(
    forgetful: list[Outcome], case: Case, exchange: str, n: int
) -> None:
    for outcome in forgetful:
        released_as_it_says(outcome, case, exchange)
        assert outcome.before == outcome.after == [None] * n
        released = sum(map(gave, outcome.updates, outcome.gradients))
        torch.testing.assert_close(n * outcome.averages[0], released, **close(n))


@on_all_runs
def test_each_release_rule_takes_what_it_says(outcomes: list[Outcome], case: Case, exchange: str) -> None:
    for outcome in outcomes:
        released_as_it_says(outcome, case, exchange)


def released_as_it_says(outcome: Outcome, case: Case, exchange: str) -> None:
    twice = case.sparsifier.agreement is Agreement.SHARED
    dense = case.is_dense(outcome.gradients.shape[1], DENSITY)
    RELEASES["dense" if dense else exchange](Step.of(outcome, DENSITY, may_travel_twice=twice))


@on_all_runs
def test_all_ranks_hold_the_same_bit_for_bit(outcomes: list[Outcome], case: Case) -> None:
    for outcome in outcomes:
        first, dense = outcome.statistics[0], case.is_dense(outcome.gradients.shape[1], DENSITY)
        for rank, statistics in enumerate(outcome.statistics):
            assert torch.equal(outcome.averages[rank], outcome.averages[0])
            assert torch.equal(statistics.counts, first.counts)
            assert torch.equal(statistics.union, first.union)
            assert equal_states(statistics.indices, first.indices)
            assert equal_states(outcome.states[rank].counts, None if dense else first.counts)
            if not case.private:
                assert equal_states(statistics.threshold, first.threshold)
                assert equal_states(outcome.states[rank].selector, outcome.states[0].selector)


@on_all_runs
def test_selections_are_ascending_coordinates_and_then_padding(outcomes: list[Outcome], case: Case) -> None:
    for outcome in outcomes:
        numel = outcome.gradients.shape[1]
        for selection in outcome.selections:
            indices, count = selection.indices, selection.count
            assert indices.dtype == count.dtype == torch.int64
            assert indices.dim() == 1
            assert count.dim() == 0
            if case.name == "everything" or case.is_dense(numel, DENSITY):
                assert (indices.numel(), int(count)) == (0, numel)
                continue
            picked, padding = indices[: int(count)], indices[int(count) :]
            assert picked.numel() == int(count)
            assert bool((picked[1:] > picked[:-1]).all())
            assert bool(((picked >= 0) & (picked < numel)).all())
            assert bool((padding == numel).all())


@on_all_runs
def test_what_selections_promise_about_other_ranks_is_true(outcomes: list[Outcome], case: Case) -> None:
    for outcome in outcomes:
        selections = outcome.selections
        assert len({(s.aligned, s.total) for s in selections}) == 1
        picked = torch.cat([s.indices[: int(s.count)] for s in selections])
        if case.sparsifier.agreement is Agreement.DISJOINT:
            assert picked.unique().numel() == picked.numel()
        if selections[0].aligned:
            assert len({s.indices.numel() for s in selections}) == 1
        if selections[0].total is not None:
            assert picked.numel() <= selections[0].total


@on_all_runs
def test_counts_and_union_describe_the_update(outcomes: list[Outcome], case: Case, exchange: str) -> None:
    for outcome in outcomes:
        numel, statistics = outcome.gradients.shape[1], outcome.statistics[0]
        dense = exchange == "dense" or case.is_dense(numel, DENSITY)
        union = torch.arange(numel) if statistics.indices is None else statistics.indices.unique()
        union = union[union < numel]
        assert int(statistics.union) == union.numel()
        elsewhere = torch.ones(numel, dtype=torch.bool)
        elsewhere[union] = False
        assert bool((outcome.averages[0][elsewhere] == 0).all())
        picks = [numel if dense else int(selection.count) for selection in outcome.selections]
        if (
            exchange == "follow_leader" and not dense
        ):  # the others picked nothing, and the leader's picks count for them
            leader = outcome.step % len(picks)
            assert sum(picks) == picks[leader]
            picks = [picks[leader]] * len(picks)
        assert statistics.counts.tolist() == picks


@on_some_numbers
def test_simulate_modifies_neither_the_stream_nor_earlier_traces(case: Case, exchange: str, n: int) -> None:
    # The update goes into the gradient's buffer: nothing else may be written, in particular not the stream.
    stream = torch.stack([noise(n, 257, seed=seed) for seed in range(3)])
    before = stream.clone()
    traces = list(ls.simulate(stream, sparsifier=case.sparsifier, density=DENSITY, exchange=exchange))
    assert torch.equal(stream, before)
    for count in (1, 2):
        *_, last = ls.simulate(stream[:count], sparsifier=case.sparsifier, density=DENSITY, exchange=exchange)
        for then, now in zip(last[:-1], traces[count - 1][:-1], strict=True):  # the last one holds stamps
            if isinstance(then, dict):  # clocks differ from run to run
                then, now = ({key: x for key, x in trace.items() if not key.endswith("_ms")} for trace in (then, now))
            assert equal_states(then, now)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_nothing_is_lost_and_ranks_agree_whatever_comes(data: st.DataObject) -> None:
    case, exchange = data.draw(st.sampled_from(PAIRS))
    n, numel = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 600))
    density = data.draw(st.sampled_from([1e-6, 0.01, 0.1, 0.5, 0.9, 1.0]))
    if not case.serves(n, numel, density):
        numel, density = 600, max(density, 0.01)
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=density)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    for seed in range(4):
        # Scales that differ by rank and by place, and zeros: multiples of 2**-20 below 2**18, exact in float64 sums.
        scale = 2.0 ** torch.randint(-12, 13, (n, 1), generator=generator)
        scale = scale * (torch.rand(n, numel, generator=generator) < data.draw(st.sampled_from([0.01, 0.5, 1.0])))
        outcome = ranks.step(noise(n, numel, seed=seed) * scale)
        offered = sum(outcome.before) + outcome.gradients.sum(0)
        # The mean over a number of ranks that is no power of two is rounded: 2**18 * 2**-53, times n.
        tolerance = 0 if n in (1, 2, 4) else 1e-9
        kept = n * outcome.averages[0] + sum(outcome.after)
        torch.testing.assert_close(kept, offered, rtol=0, atol=tolerance)
        assert all(torch.equal(average, outcome.averages[0]) for average in outcome.averages)
        if not case.private:
            assert all(equal_states(state.selector, outcome.states[0].selector) for state in outcome.states)


@on_fewer_runs
def test_simulate_takes_the_same_steps(outcomes: list[Outcome], case: Case, exchange: str) -> None:
    numel = outcomes[-1].gradients.shape[1]
    taken = [outcome for outcome in outcomes if outcome.gradients.shape[1] == numel]
    stream = [outcome.gradients for outcome in taken]
    traces = ls.simulate(stream, sparsifier=case.sparsifier, density=DENSITY, exchange=exchange)
    for trace, outcome in zip(traces, taken, strict=True):
        assert torch.equal(trace.update, outcome.averages[0])
        assert torch.equal(trace.counts, outcome.statistics[0].counts)
        norms = [float(residual.norm()) for residual in outcome.after]
        assert trace.residual_norm.tolist() == pytest.approx(norms)


@on_some_numbers
def test_nothing_comes_of_nothing(case: Case, exchange: str, n: int) -> None:
    for numel in (7, 256):
        if not case.serves(n, numel, DENSITY):
            continue
        ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=DENSITY)
        for _ in range(3):
            outcome = ranks.step(torch.zeros(n, numel, dtype=torch.float64))
            assert bool((outcome.averages == 0).all())
            assert all(bool((residual == 0).all()) for residual in outcome.after)
            threshold = outcome.statistics[0].threshold
            assert threshold is None or bool(torch.isfinite(threshold))
            assert int(outcome.statistics[0].counts.sum()) <= n * numel


@on_some_numbers
def test_full_density_is_the_dense_mean_and_leaves_no_residual(case: Case, exchange: str, n: int) -> None:
    # A threshold that does not follow k is put below everything instead, or starts there: 1 / (2 sqrt(k)) < 1.
    sparsifier = ls.sparsifiers.HardThreshold(1.0) if case.name == "hard_threshold" else case.sparsifier
    sizes = [numel for numel in (1, 2, 7, 257, 512) if case.serves(n, numel, 1.0)]
    assert sizes
    for numel in sizes:
        ranks = Ranks(n, numel, sparsifier=sparsifier, exchange=exchange, density=1.0)
        gradients = noise(n, numel) + 16  # no zeros, so that what is left out shows
        for _ in range(2):
            outcome = ranks.step(gradients)
            assert int(outcome.statistics[0].union) == numel
            if case.name != "hard_threshold":
                assert outcome.statistics[0].counts.tolist() == [numel] * n
            torch.testing.assert_close(outcome.averages[0], gradients.sum(0) / n, **close(n))
            assert all(bool((residual == 0).all()) for residual in outcome.after)


@in_one_test("case, exchange, n", in_runs_of_their_own([3]))
def test_a_dense_step_in_between_is_the_mean_and_teaches_nothing(case: Case, exchange: str, n: int) -> None:
    if case.name in ("hard_threshold", "everything"):
        return  # these do not follow the density
    numel = 512
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=DENSITY)
    for number, density in enumerate((1.0, DENSITY, DENSITY, 1.0, 1.0, DENSITY, DENSITY)):
        ranks.density, before = density, ranks.states
        outcome = ranks.step(noise(n, numel, seed=number))
        offered = sum(outcome.before) + outcome.gradients.sum(0)
        torch.testing.assert_close(n * outcome.averages[0] + sum(outcome.after), offered, rtol=0, atol=THIRDS)
        assert all(torch.equal(average, outcome.averages[0]) for average in outcome.averages)
        if density == 1:
            assert not any(bool(residual.any()) for residual in outcome.after)
            for then, now in zip(before, outcome.states, strict=True):
                assert equal_states((then.selector, then.counts, then.union), (now.selector, now.counts, now.union))
        elif exchange != "dense" and "published" not in case.name:
            assert int(outcome.statistics[0].union) < numel


@in_one_test("case, exchange, n, kind", in_runs_of_their_own([4], ["noise", "one idle rank", "fewer picks than ranks"]))
def test_updates_scale_with_gradients(case: Case, exchange: str, n: int, kind: str) -> None:
    if case.name in ("hard_threshold", "micro-published", "exdyna-published"):
        return  # their thresholds, or where these start, are absolute
    numel = 20 if kind == "fewer picks than ranks" else 300
    large, small = (Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=0.05) for _ in range(2))
    for seed in range(4):
        gradients = noise(n, numel, seed=seed)
        if kind == "one idle rank":
            gradients[2] = 0
        expected, found = large.step(gradients), small.step(gradients * 2.0**-40)
        assert torch.equal(found.averages, expected.averages * 2.0**-40)
        assert torch.equal(found.statistics[0].counts, expected.statistics[0].counts)


@on_some_numbers
def test_a_gradient_that_is_not_finite_makes_the_step_skipped_on_all_ranks(case: Case, exchange: str, n: int) -> None:
    numel = 257
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=DENSITY)
    ranks.step(noise(n, numel, seed=0))
    before = ranks.step(noise(n, numel, seed=1))
    for bad, place in ((float("nan"), 0), (float("inf"), numel - 1), (-float("inf"), numel // 2)):
        spoilt = noise(n, numel, seed=2)
        spoilt[n - 1, place] = bad
        skipped = ranks.step(spoilt)
        assert bool(torch.isnan(skipped.averages).all())
        for old, new, gradient in zip(skipped.before, skipped.after, spoilt, strict=True):
            assert torch.equal(new, torch.where(gradient.isfinite(), old + gradient, old))
        for then, now in zip(before.states, skipped.states, strict=True):
            assert equal_states(now.selector, then.selector)
            assert equal_states(now.counts, then.counts)


@on_some_numbers
def test_what_a_skipped_step_absorbs_is_all_that_it_leaves(case: Case, exchange: str, n: int) -> None:
    # A skipped first step is the usual start under automatic mixed precision, where the first loss scale is too large.
    numel = 257
    spoilt = torch.full((n, numel), float("inf"), dtype=torch.float64)
    disturbed, calm = (
        Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=DENSITY) for _ in range(2)
    )
    for seeds in ((4, 5), (6, 7, 8)):  # after a skipped first step, and after a later one
        skipped = disturbed.step(spoilt)
        assert bool(torch.isnan(skipped.averages).all())
        # Ranges rotate with the number of the step (MiCRO, ExDyna), and so does what a full message leaves out
        # (balanced): there the calm run skips the number of the skipped step. The other methods do not look at it.
        calm.steps += case.numbered or exchange == "balanced"
        for seed in seeds:
            with_skipped, without = (ranks.step(noise(n, numel, seed=seed)) for ranks in (disturbed, calm))
            assert torch.equal(with_skipped.averages, without.averages)
            assert torch.equal(with_skipped.statistics[0].counts, without.statistics[0].counts)
            assert equal_states(with_skipped.statistics[0].threshold, without.statistics[0].threshold)
            assert equal_states(tuple(with_skipped.after), tuple(without.after))


@in_one_test(
    "case, exchange, n, dtype", in_runs_of_their_own(SOME_RANKS, [torch.float32, torch.bfloat16, torch.float16])
)
def test_dtype_is_kept_and_what_the_cast_loses_is_remembered(
    case: Case, exchange: str, n: int, dtype: torch.dtype
) -> None:
    numel = 257
    # Multiples of 1/16 below 8 have 7 bits and fit into bfloat16; their sums and means fit into the float32 residual.
    # Casting the mean loses bits, and the residual must hold them: for a power of two nothing at all is rounded away.
    # Over 3 ranks the mean is rounded in float32: values below 2**7, by 2**-18 at most after multiplication by 3.
    tolerance = {"rtol": 0, "atol": 2.0**-17 if n == 3 else 0}
    ranks = Ranks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=DENSITY, dtype=dtype)
    assert {residual.dtype for residual in ranks.residuals()} == {torch.float32}
    for seed in range(4):
        outcome = ranks.step(noise(n, numel, seed=seed, grain=16, dtype=dtype))
        assert outcome.averages.dtype == dtype
        offered = sum(outcome.before) + outcome.gradients.float().sum(0)
        torch.testing.assert_close(n * outcome.averages[0].float() + sum(outcome.after), offered, **tolerance)
        assert all(torch.equal(average, outcome.averages[0]) for average in outcome.averages)


def go_together(case: Case, memory: ls.memories.Memory) -> bool:
    return not (memory.needs_second and case.sparsifier.is_its_exchange)


# What a memory keeps and what a method keeps stand beside each other in a state.
@pytest.mark.parametrize(
    ("case", "memory"),
    by_default(
        covering(
            [pair for pair in product(CASES, [ls.memories.Residual(), *MEMORIES]) if go_together(*pair)], together=1
        ),
        18,
    ),
)
def test_state_survives_save_and_load(case: Case, memory: ls.memories.Memory) -> None:
    n, numel = 3, 257
    whole, resumed = (Ranks(n, numel, sparsifier=case.sparsifier, memory=memory, density=DENSITY) for _ in range(2))
    for seed in range(4):
        whole.step(noise(n, numel, seed=seed))
    file = io.BytesIO()
    torch.save(whole.states, file)
    file.seek(0)
    resumed.states, resumed.steps = torch.load(file, weights_only=False), whole.steps
    for seed in range(4, 7):
        expected, found = (ranks.step(noise(n, numel, seed=seed)) for ranks in (whole, resumed))
        assert torch.equal(found.averages, expected.averages)
        assert equal_states(tuple(found.after), tuple(expected.after))
        for then, now in zip(expected.states, found.states, strict=True):
            assert equal_states(now[1:], then[1:])


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_residual_of_a_float64_gradient_is_float64(case: Case) -> None:
    ranks = Ranks(2, 512, sparsifier=case.sparsifier, density=DENSITY)
    outcome = ranks.step(noise(2, 512))
    assert {residual.dtype for residual in outcome.before + outcome.after} == {torch.float64}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@pytest.mark.parametrize("n", [1, 3, pytest.param(8, marks=pytest.mark.thorough)])
def test_a_group_that_a_method_cannot_serve_is_refused_with_advice(case: Case, n: int) -> None:
    refused = [(numel, d) for numel in [1, 2, 7, 255, 256] for d in (0.01, 0.2) if not case.serves(n, numel, d)]
    for numel, density in refused:
        with pytest.raises(ValueError, match=r"needs .* but (got|a group has) .*Use larger groups"):
            Ranks(n, numel, sparsifier=case.sparsifier, density=density)
    served = [(numel, d) for numel in [1, 2, 7, 255, 256] for d in (0.01, 0.2) if case.serves(n, numel, d)]
    for numel, density in served:
        Ranks(n, numel, sparsifier=case.sparsifier, density=density).step(noise(n, numel))
    assert bool(refused) == case.name.endswith("published")


def test_every_sparsifier_and_every_exchange_has_a_contract_case() -> None:
    assert {type(case.sparsifier) for case in CASES} == {cls for _, cls in ls.sparsifiers.SPARSIFIERS.items()}
    assert (
        {exchange for _, exchange in PAIRS} == RELEASES.keys() == {name for name, _ in ls.exchanges.EXCHANGES.items()}
    )
    assert all(cls.exchange in dict(ls.exchanges.EXCHANGES.items()) for _, cls in ls.sparsifiers.SPARSIFIERS.items())


def test_every_sparsifier_and_every_exchange_is_exported() -> None:
    for module, registry in ((ls.sparsifiers, ls.sparsifiers.SPARSIFIERS), (ls.exchanges, ls.exchanges.EXCHANGES)):
        for _, cls in registry.items():
            assert cls.__name__ in module.__all__
            assert getattr(module, cls.__name__) is cls


def test_the_configs_are_those_of_the_registry() -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "configs" / "generate.py"))["main"](["--check"])


def test_every_sparsifier_and_every_exchange_has_documented_defaults() -> None:
    for registry in (ls.sparsifiers.SPARSIFIERS, ls.exchanges.EXCHANGES):
        for name, cls in registry.items():
            assert registry.resolve(name) == cls()  # all settings have defaults, and equality is by settings
            parameters = [p for p in inspect.signature(cls).parameters if p not in ("self",)]
            assert all(re.search(rf"^ +{p}: ", cls.__doc__, re.MULTILINE) for p in parameters), cls.__name__
