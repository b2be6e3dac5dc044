"""One rank's way through a group step: sizes, the spare slot, and sums that leave the range of a dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.collective import TorchCollective
from lightning_sparse.pipeline import init_group, reduce_group
from lightning_sparse.types import Context
from tests.lockstep import Ranks, equal_states, noise

CPU = torch.device("cpu")
ALONE = Context(step=0, density=0.25, rank=0, world_size=1)


@pytest.mark.parametrize("numel", [0, 2**31 - 1])
def test_a_group_without_coordinates_or_with_too_many_is_refused(numel: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {2**31 - 2} coordinates, but got {numel}"):
        init_group(numel, torch.float32, CPU, ALONE, memory=ls.Residual(), sparsifier=ls.TopK())


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_the_accumulator_has_the_dtype_of_the_gradient_but_at_least_float32(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    state = init_group(3, dtype, CPU, ALONE, memory=ls.Residual(), sparsifier=ls.TopK())
    assert ls.Residual().residual(state.memory).dtype == wide
    assert ls.Residual().residual(state.memory).shape == (3,)


def step_alone(grad: Tensor, memory: ls.Memory) -> None:
    numel = 8
    state = init_group(numel, grad.dtype, CPU, ALONE, memory=memory, sparsifier=ls.TopK())
    parts = {"memory": memory, "sparsifier": ls.TopK(), "exchange": ls.GatherPairs(), "comm": TorchCollective()}
    reduce_group(grad, state, ALONE, **parts)


@pytest.mark.parametrize("memory", [ls.Residual(), ls.NoMemory()])
def test_the_spare_slot_of_the_gradient_is_optional_and_its_content_ignored(memory: ls.Memory) -> None:
    values = torch.tensor([0.0, 1.0, -5.0, 2.0, 0.5, 3.0, -1.0, 0.0])
    expected = torch.tensor([0.0, 0.0, -5.0, 0.0, 0.0, 3.0, 0.0, 0.0])
    exact = values.clone()
    step_alone(exact, memory)
    assert torch.equal(exact, expected)
    for content in (0.0, 100.0, float("nan"), float("inf")):
        longer = torch.cat([values, torch.tensor([content])])
        step_alone(longer, memory)
        assert torch.equal(longer[:8], expected)


@pytest.mark.parametrize("exchange", ["gather_pairs", "reduce_union", "dense"])
def test_finite_gradients_whose_sum_is_not_make_the_step_void(exchange: str) -> None:
    # 2 * 3e38 is beyond float32.
    ranks = Ranks(2, 8, sparsifier=ls.TopK(), exchange=exchange, density=0.25, dtype=torch.float32)
    before = ranks.step(noise(2, 8, dtype=torch.float32))
    void = ranks.step(torch.full((2, 8), 3e38))
    assert bool(torch.isnan(void.averages).all())
    assert equal_states(tuple(void.after), tuple(before.after))
    assert equal_states(void.states[0].counts, before.states[0].counts)


@pytest.mark.parametrize("sparsifier", [ls.TopK(), ls.MiCRO()])
def test_an_average_that_overflows_the_dtype_of_the_gradient_does_not_spoil_the_residual(
    sparsifier: ls.Sparsifier,
) -> None:
    # float16 ends at 65504, the float32 accumulator does not. Coordinates wait while others are sent, one each step,
    # and are beyond float16 when their turn comes.
    ranks = Ranks(1, 8, sparsifier=sparsifier, density=0.125, dtype=torch.float16)
    gradient = torch.full((1, 8), 40_000.0, dtype=torch.float16)
    outcomes = [ranks.step(gradient) for _ in range(3)]
    assert [bool(torch.isfinite(outcome.averages).all()) for outcome in outcomes] == [True, False, False]
    assert torch.equal(outcomes[0].averages[0].float() + outcomes[0].after[0], gradient[0].float())
    for void in outcomes[1:]:
        assert torch.equal(void.after[0], outcomes[0].after[0])


def test_after_an_average_that_overflows_the_dtype_of_the_gradient_steps_count_again() -> None:
    ranks = Ranks(1, 2, sparsifier=ls.TopK(), density=0.5, dtype=torch.float16)
    ranks.step(torch.tensor([[60_000.0, 60_000.0]], dtype=torch.float16))  # sends coordinate 0, keeps 60 000 at 1
    overflow = ranks.step(torch.tensor([[0.0, 60_000.0]], dtype=torch.float16))  # sends 120 000
    assert not bool(torch.isfinite(overflow.averages).all())  # the loss scaler must see it
    # What happens under a loss scaler: the scale is lowered until the sum fits.
    later = ranks.step(torch.tensor([[1.0, -60_000.0]], dtype=torch.float16))
    assert bool(torch.isfinite(later.averages).all())


def test_the_feedback_that_a_sparsifier_sees_are_the_counts_of_the_step_before() -> None:
    seen = []

    class Watching(ls.HardThreshold):
        def select(self, acc, state, ctx):
            seen.append((ctx.rank, ctx.step, None if ctx.counts is None else ctx.counts.tolist()))
            return super().select(acc, state, ctx)

    ranks = Ranks(2, 3, sparsifier=Watching(1.0), density=0.5)
    ranks.step(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64))
    ranks.step(torch.zeros(2, 3, dtype=torch.float64))
    ranks.step(torch.zeros(2, 3, dtype=torch.float64))
    assert seen == [(0, 0, None), (1, 0, None), (0, 1, [1, 3]), (1, 1, [1, 3]), (0, 2, [0, 0]), (1, 2, [0, 0])]
