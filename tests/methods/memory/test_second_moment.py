"""Error feedback for Adam: what is selected, what averages are divided by, and what travels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Context, Update
from lightning_sparse.engine.optimizers.choice import chosen_in
from lightning_sparse.engine.optimizers.rules import AdamRule
from lightning_sparse.methods.exchanges.packed_union import Lanes
from tests.covering import by_default
from tests.lockstep import Ranks
from tests.reference.length import Length

Rows = NDArray[np.float64]


def stream(steps: int, n: int, numel: int, seed: int = 0) -> torch.Tensor:
    """Gradients of very different sizes, partly common to all ranks."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 2, numel, dtype=torch.float64)[torch.randperm(numel, generator=generator)]
    common = torch.randn(steps, 1, numel, generator=generator, dtype=torch.float64)
    own = torch.randn(steps, n, numel, generator=generator, dtype=torch.float64)
    return (0.5 * common + own) * sizes


def reference_picks(score: Rows, share: int) -> set[int]:
    order = sorted(range(len(score)), key=lambda j: (-score[j], j))
    return set(order[:share])


def reference_steps(gradients: Rows, k: int, beta2: float, eps: float) -> list[tuple[Rows, dict[int, float]]]:
    """Averages, and by what they are divided, of SharedTopK with exact values."""
    steps, n, numel = gradients.shape
    acc, v = np.zeros((n, numel)), np.zeros((n, numel))
    damping = float(np.float32(1 / max(2.0, numel / k / 4)))
    seen = []
    lengths = [Length() for _ in range(n)]
    for step in range(steps):
        takes, carries = np.array([length(g) for length, g in zip(lengths, gradients[step], strict=True)]).T[:, :, None]
        acc = acc * carries + gradients[step] * takes
        v = beta2 * v * carries**2 + (1 - beta2) * (gradients[step] * takes) ** 2
        corrected = v / (1 - beta2 ** (step + 1))
        union: set[int] = set()
        for rank in range(n):
            score = acc[rank] ** 2 / (np.sqrt(corrected[rank] + (acc[rank] * damping) ** 2) + eps)
            union |= reference_picks(score, k // n)
        average, divisor = np.zeros(numel), {}
        for j in union:
            average[j] = acc[:, j].mean()
            divisor[j] = math.sqrt(corrected[:, j].mean() + (average[j] * damping) ** 2) + eps
            acc[:, j] = 0
        seen.append((average, divisor))
    return seen


@pytest.mark.parametrize(("n", "beta2", "eps"), [(1, 0.999, 1e-8), (3, 0.9, 1e-8), (4, 0.5, 0.1)])
def test_the_best_steps_of_adam_are_sent_with_what_they_are_divided_by(n: int, beta2: float, eps: float) -> None:
    gradients = stream(40, n, 60)
    memory = ls.memories.SecondMoment(beta2, eps)
    traces = ls.simulate(gradients, sparsifier="shared_top_k", exchange="reduce_union", density=0.2, memory=memory)
    for trace, (average, divisor) in zip(traces, reference_steps(gradients.numpy(), 12, beta2, eps), strict=True):
        assert trace.indices.tolist() == sorted(divisor)
        np.testing.assert_allclose(trace.update, average, rtol=1e-9, atol=1e-12)
        assert trace.divisor is not None
        np.testing.assert_allclose(trace.divisor[trace.indices], [divisor[j] for j in sorted(divisor)], rtol=1e-9)


def test_what_agrees_with_itself_is_sent_before_it_is_large() -> None:
    # Coordinate 0 flips its sign at every step, 1 is a hundred times smaller and does not.
    gradients = torch.tensor([[[10.0, 0.1]], [[-10.0, 0.1]]]).repeat(40, 1, 1)

    def sent(memory: ls.memories.Memory) -> set[int]:
        traces = ls.simulate(gradients, sparsifier="top_k", exchange="reduce_union", density=0.5, memory=memory)
        return {int(j) for trace in traces for j in trace.indices}

    assert sent(ls.memories.Residual()) == {0}
    assert sent(ls.memories.SecondMoment(0.9)) == {0, 1}


def test_where_gradients_have_stopped_steps_stay_bounded() -> None:
    """A residual whose second moment has decayed to nothing would make steps without end."""
    gradients = torch.zeros(150, 1, 4)
    gradients[0] = torch.tensor([1.0, 1e-3, 1e-6, 1.0])
    gradients[:, :, 3] = 1.0
    quotients = []
    for trace in ls.simulate(
        gradients, sparsifier="top_k", exchange="reduce_union", density=0.25, memory=ls.memories.SecondMoment(0.5)
    ):
        assert trace.divisor is not None
        quotients.append(float((trace.update / trace.divisor).abs().max()))
    assert {int(j) for j in trace.indices} <= {0, 1, 2, 3}
    assert 1 <= max(quotients) <= 2


def test_steps_stay_bounded_however_long_a_coordinate_has_waited() -> None:
    gradients = (torch.ones(1, 500) for _ in range(450))  # agree at every step; each waits for 250
    settings = {"sparsifier": "shared_top_k", "exchange": "reduce_union", "density": 0.004}
    traces = list(ls.simulate(gradients, **settings, memory=ls.memories.SecondMoment()))
    waited = [float(trace.update.max()) for trace in traces]
    steps = [float((trace.update / trace.divisor).max()) for trace in traces if trace.divisor is not None]
    assert max(waited) > 200
    bound = 0.25 / 0.004
    assert len(steps) == 450 and max(steps) == pytest.approx(max(waited) / math.hypot(1, max(waited) / bound))
    assert 0.95 * bound < max(steps) < bound


@pytest.mark.parametrize("size", [1e18, 1e21, 1e30, 3e38])
def test_what_is_too_large_to_be_squared_is_sent_first_and_moves_by_a_step(size: float) -> None:
    gradients = torch.ones(3, 2, 8)
    gradients[:, 0, 5] = size
    for trace in ls.simulate(gradients, sparsifier="union_top_k", density=0.25, memory=ls.memories.SecondMoment()):
        assert 5 in trace.indices.tolist()
        assert trace.divisor is not None
        assert 0 < float(trace.update[5] / trace.divisor[5]) <= 2


def reference_parts(second: Rows, picked: list[set[int]], j: int, parts: int) -> float:
    """The mean second moment at a coordinate as PackedUnion lets it travel."""
    told = [math.frexp(second[rank, j])[1] for rank, own in enumerate(picked) if j in own]
    top = 2.0 ** (max(told) + 1)
    n = len(second)
    rounded = [min(parts, math.floor(x / top * parts + (rank + 0.5) / n)) for rank, x in enumerate(second[:, j])]
    return max(sum(rounded) * top / n / parts, top / 4 / n)


@pytest.mark.parametrize(("n", "low"), by_default([(2, 5), (9, 6), (17, 12), (4, 5), (8, 6), (16, 6), (40, 12)], 3))
def test_packed_second_moments_are_averaged_in_parts_of_the_largest_that_was_told(n: int, low: int) -> None:
    numel, beta2 = 400, 0.9
    gradients = stream(4, n, numel, seed=n)
    memory = ls.memories.SecondMoment(beta2)
    ranks = Ranks(n, numel, sparsifier=ls.sparsifiers.UnionTopK(), density=0.2, memory=memory)
    v, lengths = np.zeros((n, numel)), [Length() for _ in range(n)]
    for step, rows in enumerate(gradients):
        outcome = ranks.step(rows)
        units = np.array([length(row) for length, row in zip(lengths, rows.tolist(), strict=True)])
        v = beta2 * v * units[:, 1:] ** 2 + (1 - beta2) * (rows.numpy() * units[:, :1]) ** 2
        picked = [{int(j) for j in s.indices if j < numel} for s in outcome.selections]
        update = outcome.updates[0]
        assert update.indices is not None and update.second is not None and len(update.indices) > 40
        expected = [reference_parts(v, picked, int(j), ((1 << low) - 1) // n) for j in update.indices]
        np.testing.assert_allclose(update.second, expected, rtol=1e-12)
        correction = 1 - beta2 ** (step + 1)
        assert all(torch.equal(divisors, outcome.divisors[0]) for divisors in outcome.divisors)
        np.testing.assert_allclose(
            outcome.divisors[0],
            np.sqrt(np.array(expected) / correction + np.square(update.values.numpy() / 2)) + 1e-8,
            rtol=1e-12,
        )
        # Coarse, but never far off: a rank that has picked has told its own size.
        exact = v[:, update.indices].mean(0)
        assert np.median(abs(np.array(expected) / exact - 1)) < 0.25


@pytest.mark.parametrize("n", [2, 16, 17, 4095, 4096, 10_000])
def test_integers_are_shared_as_long_as_each_rank_has_a_part(n: int) -> None:
    lanes = Lanes.of(n, second=True)
    assert (lanes.most >= lanes.fewest) == (n < 4096) == (lanes.parts > 0)


@pytest.mark.parametrize("exchange", ["packed_union", "reduce_union", "dense"])
def test_a_step_whose_gradients_have_no_length_leaves_no_trace_and_is_not_counted(exchange: str) -> None:
    memory = ls.memories.SecondMoment(0.5)
    gradients = stream(6, 3, 50)

    def run(void_at: int | None) -> Any:
        ranks = Ranks(3, 50, sparsifier=ls.sparsifiers.UnionTopK(), exchange=exchange, density=0.2, memory=memory)
        for number, rows in enumerate(gradients):
            if number == void_at:
                bad = rows.clone()
                bad[:, 7] = float("nan")
                assert ranks.step(bad, number).averages.isnan().all()
            outcome = ranks.step(rows, number)
        return outcome

    plain, after_skipped = run(None), run(3)
    assert torch.equal(plain.averages, after_skipped.averages)
    for then, now in zip(plain.divisors, after_skipped.divisors, strict=True):
        assert torch.equal(then, now)
    for then, now in zip(plain.states, after_skipped.states, strict=True):
        assert torch.equal(then.memory.steps, now.memory.steps)


@pytest.mark.parametrize("exchange", ["packed_union", "reduce_union", "dense"])
def test_a_step_that_another_rank_makes_skipped_is_absorbed_and_not_counted(exchange: str) -> None:
    memory = ls.memories.SecondMoment(0.5)
    ranks = Ranks(3, 50, sparsifier=ls.sparsifiers.UnionTopK(), exchange=exchange, density=0.2, memory=memory)
    lengths = Length()
    for rows in stream(4, 3, 50):
        before = {name: vector[:-1].clone() for name, vector in memory.vectors(ranks.states[0].memory).items()}
        steps, selector = ranks.states[0].memory.steps.clone(), ranks.states[0].selector
        bad = rows.clone()
        bad[1] = float("inf")
        assert ranks.step(bad).averages.isnan().all()
        take, carry = lengths(rows[0].tolist())
        state = ranks.states[0]
        now = memory.vectors(state.memory)
        torch.testing.assert_close(now["residual"][:-1], carry * before["residual"] + take * rows[0])
        squares = 0.5 * carry**2 * before["second"] + 0.5 * (take * rows[0]).square()
        torch.testing.assert_close(now["second"][:-1], squares)
        assert torch.equal(state.memory.steps, steps) and state.selector is selector
        ranks.step(rows)
        lengths(rows[0].tolist())


def test_a_residual_without_a_second_moment_starts_with_short_steps() -> None:
    old, memory = ls.memories.Residual(), ls.memories.SecondMoment(0.9)
    before = old.init(3, torch.device("cpu"), torch.float32)
    old.residual(before).copy_(torch.tensor([50.0, -2.0, 0.0]))
    state = memory.init(3, torch.device("cpu"), torch.float32)
    memory.carry_(state, slice(0, 3), old, before, slice(0, 3))
    assert memory.residual(state).tolist() == [50.0, -2.0, 0.0]
    assert memory.vectors(state)["second"][:3].tolist() == pytest.approx([250.0, 0.4, 0.0])


@pytest.mark.parametrize("betas", [[0.9, 0.999, 0.5], [0.999, 0.0, 0.9], [0.9] * 5], ids=str)
def test_the_start_is_corrected_by_the_product_of_all_second_betas(betas: list[float]) -> None:
    """Of gradients that are all alike, the corrected second moment is their square, whatever the decay was."""
    memory = ls.memories.SecondMoment(betas[0])
    state = memory.init(1, torch.device("cpu"), torch.float64)
    for number, beta2 in enumerate(betas):
        memory, before = ls.memories.SecondMoment(beta2), memory
        memory.adapt_(state, before)
        grad, ctx = Gradient([torch.full((1,), 3.0, dtype=torch.float64)]), Context(number, 1.0, 0, 1)
        second = memory.absorb_(state, grad, ctx).second[:-1]
        corrected = second / (1 - state.power)
        assert float(corrected) == pytest.approx(9.0, rel=1e-12)
        one = torch.ones(1, dtype=torch.int64)
        memory.settle_(state, Update(None, torch.full((1,), 3.0), None, None, counts=one, union=one[0]))
        assert math.isfinite(float(state.steps))  # or it could not be saved
    assert betas[0] != betas[-1] or float(state.steps) == len(betas)


def test_lengths_have_the_same_bits_wherever_the_gradient_lies() -> None:
    """DDP lays buckets out anew after its first step, which a resumed run goes through once more."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator) for size in (1_000, 70_000, 3, 333)]
    together, measured = torch.cat(parts), []
    for pieces in (parts, together.split([len(part) for part in parts])):
        memory = ls.memories.SecondMoment()
        state = memory.init(len(together), torch.device("cpu"), torch.float32)
        memory.absorb_(state, Gradient.of(pieces), Context(0, 0.01, 0, 2))
        measured.append(state.lengths)
    assert torch.equal(*measured)


def test_exchanges_that_carry_no_second_moments_are_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match=r"SecondMoment needs an exchange .* 'gather_pairs' does not.*reduce_union"):
        ls.engine.config.SparsificationConfig(sparsifier="top_k", memory="second_moment", exchange="gather_pairs")
    around = ls.memories.ClipByNorm(1.0, ls.memories.SecondMoment())
    with pytest.raises(ValueError, match="ClipByNorm needs an exchange"):
        ls.engine.config.SparsificationConfig(sparsifier="top_k", memory=around, exchange="gather_pairs")
    assert ls.engine.config.SparsificationConfig(memory=around).memory == around


PARAMETERS = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
IDS = {id(p) for p in PARAMETERS}


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        ([torch.optim.AdamW(PARAMETERS, betas=(0.9, 0.95), eps=1e-6)], ls.memories.SecondMoment(0.95, 1e-6)),
        ([torch.optim.Adam(PARAMETERS)], ls.memories.SecondMoment()),
        (
            [torch.optim.AdamW(PARAMETERS[:1], weight_decay=0.0), torch.optim.Adam(PARAMETERS[1:])],
            ls.memories.SecondMoment(),
        ),
        ([torch.optim.Adam(PARAMETERS, weight_decay=0.1)], None),
        ([torch.optim.AdamW(PARAMETERS, amsgrad=True)], None),
        ([torch.optim.AdamW(PARAMETERS, eps=0.0)], None),
        ([torch.optim.AdamW(PARAMETERS[:1]), torch.optim.SGD(PARAMETERS[1:], 0.1)], None),
        ([torch.optim.NAdam(PARAMETERS)], None),
        ([torch.optim.SGD(PARAMETERS, 0.1)], None),
        ([torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])], None),
        ([], None),
    ],
)
def test_which_memory_suits_which_optimizers(
    optimizers: list[torch.optim.Optimizer], expected: ls.memories.Memory | None
) -> None:
    assert AdamRule.memory(optimizers, IDS) == expected


def test_several_second_betas_are_warned_of() -> None:
    groups = [{"params": PARAMETERS[:1], "betas": (0.9, 0.95)}, {"params": PARAMETERS[1:], "betas": (0.9, 0.99)}]
    told: list[str] = []
    assert AdamRule.memory([torch.optim.AdamW(groups)], IDS, told.append) == ls.memories.SecondMoment(0.99)
    assert "several pairs" in told[0] and "[(0.95, 1e-08), (0.99, 1e-08)]" in told[0]


def test_a_states_settings_name_the_memory() -> None:
    memory = ls.memories.SecondMoment(0.95, 1e-6)
    for kept in (memory, ls.memories.ClipByNorm(1.0, memory)):
        assert chosen_in(ls.engine.config.SparsificationConfig(memory=kept).algorithm) == memory
    assert chosen_in(ls.engine.config.SparsificationConfig().algorithm) is None
    assert chosen_in(None) is None


@pytest.mark.parametrize("n", by_default([8, 2, 4, 16, 20, 32]))
def test_what_one_rank_alone_has_is_not_divided_by_nothing(n: int) -> None:
    """Of a coordinate that the others have never had a gradient of, the mean second moment is small and not zero."""
    generator = torch.Generator().manual_seed(n)
    gradients = torch.zeros(20, n, 320, dtype=torch.float64)
    for rank in range(n):
        gradients[:, rank, rank::n] = torch.randn(20, 320 // n, generator=generator, dtype=torch.float64)
    exact, packed = (
        max(
            float((trace.update / trace.divisor).abs().max())
            for trace in ls.simulate(
                gradients,
                sparsifier="union_top_k",
                exchange=exchange,
                density=0.1,
                memory=ls.memories.SecondMoment(0.95),
            )
            if trace.divisor is not None
        )
        for exchange in ("reduce_union", "packed_union")
    )
    assert packed < 2 * exact


def test_a_gradient_whose_square_overflows_leaves_a_state_of_numbers() -> None:
    memory = ls.memories.SecondMoment(0.9)
    ranks = Ranks(2, 40, sparsifier=ls.sparsifiers.UnionTopK(), density=0.1, memory=memory, dtype=torch.float32)
    for step in range(3):
        outcome = ranks.step(torch.full((2, 40), 1e30 if step == 1 else 1.0))
    assert bool(outcome.averages.isfinite().all())
    for state in outcome.states:
        assert all(bool(vector.isfinite().all()) for vector in memory.vectors(state.memory).values())
