"""Every sparsifier and exchange with memories other than the plain residual: each has a law, and all keep theirs."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import GroupState
from tests.contract.cases import CASES, MEMORIES, PAIR_NAMES, PAIRS, Case, Offer, fit, kinds
from tests.covering import covering, in_one_test
from tests.lockstep import Outcome, Ranks, equal_states, gave, noise
from tests.reference.length import Length
from tests.static_path import static_path

N, DENSITY = 3, 0.2
STEPS, SKIPPED_STEP = 4, 2
# Sums and halves of the gradients are exact; a third of the mean is not, and neither are Adam's roots and quotients.
CLOSE = {"rtol": 0, "atol": 1e-12}
ONE_EACH = list({type(case.sparsifier): case.name for case in reversed(CASES)}.values())
"""The first case of each sparsifier: a memory cannot tell its variants apart."""
SOME = [pair for pair in PAIRS if pair[0].name in ONE_EACH]
MOMENTUM = [memory for memory in MEMORIES if isinstance(memory, ls.memories.MomentumCorrection)]


def remembered(memory: ls.memories.Memory, state: GroupState) -> dict[str, Tensor]:
    """Copies of the (numel,) vectors of one rank."""
    return {name: vector[:-1].clone() for name, vector in memory.vectors(state.memory).items()}


def walk(
    case: Case, exchange: str, memory: ls.memories.Memory, numel: int
) -> Iterator[tuple[Outcome, list[Any], list[Any]]]:
    """Steps with what each rank remembers before and after."""
    ranks = Ranks(N, numel, sparsifier=case.sparsifier, exchange=exchange, memory=memory, density=DENSITY)
    lengths = [Length() for _ in range(N)]
    for seed in range(STEPS):
        gradients = noise(N, numel, seed=seed)
        before = [remembered(memory, state) for state in ranks.states]
        if seed == SKIPPED_STEP:
            gradients[1, numel // 2] = float("inf")
        for kept, length, row in zip(before, lengths, gradients, strict=True):
            units = length(row.tolist()) if row.isfinite().all() else (0.0, 1.0)
            kept["take"], kept["carry"] = torch.tensor(units, dtype=torch.float64)
        outcome = ranks.step(gradients)
        yield outcome, before, [remembered(memory, state) for state in outcome.states]


@functools.lru_cache(maxsize=16)  # the runs of one sparsifier
def all_steps(case: Case, exchange: str, memory: ls.memories.Memory) -> list[tuple[Outcome, list[Any], list[Any]]]:
    sizes = [numel for numel in (7, 257) if case.serves(N, numel, DENSITY)]
    return [step for numel in sizes for step in walk(case, exchange, memory, numel)]


def with_memories(memories: Iterable[ls.memories.Memory]) -> Any:
    cells = covering(
        ((*pair, memory) for pair in SOME for memory in memories if fit(memory, pair[1])),
        together=1,
        seen_as=lambda case, exchange, memory: (
            *kinds(case, exchange, memory),
            (case.sparsifier.agreement, memory),
        ),
    )
    return in_one_test("case, exchange, memory", cells, scope="module", made={"steps": all_steps})


with_all_memories = with_memories(MEMORIES)


def is_skipped(outcome: Outcome) -> bool:
    return not bool(outcome.gradients.isfinite().all())


@with_all_memories
def test_each_rank_offers_what_its_memory_says(steps: list[Any], memory: ls.memories.Memory) -> None:
    for outcome, before, _ in steps:
        number = outcome.step + (outcome.step < SKIPPED_STEP)  # committed steps, this one included
        for rank in range(N):
            if not is_skipped(outcome):
                expected = MEMORIES[memory].offered(Offer(before[rank], outcome.gradients[rank], number, N))
                torch.testing.assert_close(outcome.accs[rank], expected, **CLOSE)


@with_all_memories
def test_what_was_given_is_averaged_and_leaves_the_residual(steps: list[Any], memory: ls.memories.Memory) -> None:
    for outcome, before, after in steps:
        if is_skipped(outcome):
            continue
        given = [gave(update, acc) for update, acc in zip(outcome.updates, outcome.accs, strict=True)]
        torch.testing.assert_close(N * outcome.averages[0], sum(given), **CLOSE)
        for rank in range(N):
            old = before[rank]["residual"]
            kept = MEMORIES[memory].kept(old, outcome.accs[rank], outcome.gradients[rank], given[rank])
            torch.testing.assert_close(after[rank]["residual"], kept, **CLOSE)


@with_all_memories
def test_nothing_is_lost_but_by_the_memorys_own_rule(steps: list[Any], memory: ls.memories.Memory) -> None:
    for outcome, before, after in steps:
        if is_skipped(outcome):
            continue
        now = sum(kept["residual"] for kept in after)
        old, total = sum(kept["residual"] for kept in before), N * outcome.averages[0]
        expected = MEMORIES[memory].kept(old, sum(outcome.accs), outcome.gradients.sum(0), total)
        torch.testing.assert_close(now, expected, **CLOSE)


@with_memories(MOMENTUM)
def test_momentum_is_cleared_where_something_arrived(steps: list[Any], memory: ls.memories.MomentumCorrection) -> None:
    cleared_somewhere = False
    for outcome, before, after in steps:
        if is_skipped(outcome):
            continue
        for rank, update in enumerate(outcome.updates):
            old, new, gradient = before[rank]["momentum"], after[rank]["momentum"], outcome.gradients[rank]
            advanced = memory.momentum * (old + gradient) if memory.nesterov else memory.momentum * old + gradient
            numel = gradient.numel()
            sent = torch.arange(numel) if update.sent is None else update.sent.unique()
            sent = sent[sent < numel]
            if memory.masking and sent.numel() < numel:
                if update.sent_values is not None:
                    arrived = torch.isin(sent, update.indices) & (gave(update, outcome.accs[rank])[sent] != 0)
                    sent = sent[arrived]
                advanced[sent] = 0
                cleared_somewhere |= bool(sent.numel())
            assert torch.equal(new, advanced)
    dense = all(update.sent is None for outcome, _, _ in steps for update in outcome.updates)
    assert cleared_somewhere == (memory.masking and not dense)


@with_all_memories
def test_all_ranks_hold_the_same_bit_for_bit(steps: list[Any]) -> None:
    for outcome, _, _ in steps:
        if not is_skipped(outcome):
            assert all(torch.equal(average, outcome.averages[0]) for average in outcome.averages)


@with_all_memories
def test_a_skipped_step_absorbs_what_is_finite_and_sends_nothing(steps: list[Any], memory: ls.memories.Memory) -> None:
    seen = 0
    for outcome, before, after in steps:
        if not is_skipped(outcome):
            continue
        seen += 1
        assert bool(torch.isnan(outcome.averages).all())
        for rank in range(N):
            finite = outcome.gradients[rank].isfinite()
            if takes_a_norm(memory):  # nobody knows the length of what is not finite
                finite &= finite.all()
            gradient = outcome.gradients[rank].where(finite, 0)
            offered = MEMORIES[memory].offered(Offer(before[rank], gradient, outcome.step + 1, N))
            if isinstance(memory, ls.memories.LowPass):
                offered = torch.lerp(before[rank]["residual"], offered, memory.beta)
            expected = offered.where(finite, before[rank]["residual"])
            torch.testing.assert_close(after[rank]["residual"], expected, **CLOSE)
            for name, vector in before[rank].items():
                if name in after[rank]:
                    assert torch.equal(after[rank][name][~finite], vector[~finite])
    assert seen in (1, 2)


def takes_a_norm(memory: ls.memories.Memory) -> bool:
    return isinstance(memory, ls.memories.ClipByNorm | ls.memories.SecondMoment)


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
@pytest.mark.parametrize("name", ["top_k-gather_pairs", "shared_top_k-reduce_union", "gtop_k-tree"])
def test_what_the_cast_of_a_mean_loses_is_kept(memory: ls.memories.Memory, name: str) -> None:
    case, exchange = PAIRS[PAIR_NAMES.index(name)]
    if not fit(memory, exchange):
        pytest.skip("the exchange carries no second moments")
    # Two ranks: means are exact in the float32 accumulator, and only the cast rounds. Clipping and Adam round, too.
    exact, dtype = not isinstance(memory, (ls.memories.ClipByNorm, ls.memories.AdamCorrection)), torch.bfloat16
    ranks = Ranks(2, 257, sparsifier=case.sparsifier, exchange=exchange, memory=memory, density=DENSITY, dtype=dtype)
    rounded = False
    for seed in range(4):
        gradients = noise(2, 257, seed=seed, grain=256, dtype=dtype)
        outcome = ranks.step(gradients.clone())
        total, mean = sum(outcome.accs), outcome.averages[0].float()
        rounded |= not torch.equal(outcome.updates[0].values, outcome.updates[0].values.to(dtype).float())
        expected = MEMORIES[memory].kept(sum(outcome.before), total, gradients.float().sum(0), 2 * mean)
        torch.testing.assert_close(sum(outcome.after), expected, rtol=0, atol=0 if exact else 1e-5)
        assert outcome.averages.dtype == dtype
    assert rounded


def test_every_memory_has_a_law() -> None:
    # NoMemory has nothing to keep; WeightDecay reads a model's parameters, which are not here.
    assert {type(memory) for memory in MEMORIES} | {
        ls.memories.NoMemory,
        ls.memories.WeightDecay,
        ls.memories.Drift,
    } == {cls for _, cls in ls.memories.MEMORIES.items()}


STATIC = ["top_k-gather_pairs", "shared_top_k-reduce_union", "exdyna-reduce_union", "gtop_k-tree", "top_k-dense"]


@in_one_test(
    "memory, name, density",
    covering(
        (memory, name, density)
        for memory, name, density in product(MEMORIES, STATIC, [0.25, 1.0])
        if fit(memory, PAIRS[PAIR_NAMES.index(name)][1])
    ),
)
def test_the_path_on_a_device_leaves_the_same_behind(memory: ls.memories.Memory, name: str, density: float) -> None:
    case, exchange = PAIRS[PAIR_NAMES.index(name)]

    def run() -> list[Any]:
        ranks = Ranks(N, 257, sparsifier=case.sparsifier, exchange=exchange, memory=memory, density=density)
        seen = []
        for seed in range(5):
            # Without ties: which of equal magnitudes go first is the one thing that a device may decide otherwise.
            generator = torch.Generator().manual_seed(seed)
            gradients = torch.randn(N, 257, dtype=torch.float64, generator=generator)
            if seed == 2:
                gradients[0, 0] = float("nan")
            outcome = ranks.step(gradients)
            kept = [tuple(remembered(memory, state).values()) for state in outcome.states]
            seen.append((tuple(kept), outcome.averages.nan_to_num(7.0)))
        return seen

    exact = run()
    with static_path():
        found = run()
    if isinstance(memory, ls.memories.SecondMoment):  # torch's root is not always the closest number on CPUs
        torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    else:
        assert all(equal_states(a, b) for a, b in zip(found, exact, strict=True))
