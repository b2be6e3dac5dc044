"""One rank's way through a group step: sizes, the spare slot, and sums that leave the range of a dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.step import Context, Selection, Update
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.pipeline import exchange_group, init_group, reduce_group, settle_group
from tests.lockstep import Ranks, equal_states, noise

CPU = torch.device("cpu")
ALONE = Context(step=0, density=0.25, rank=0, world_size=1)


@pytest.mark.parametrize("numel", [0, 2**31 - 1])
def test_a_group_without_coordinates_or_with_too_many_is_refused(numel: int) -> None:
    with pytest.raises(ValueError, match=f"1 to {2**31 - 2} coordinates, but got {numel}"):
        init_group(numel, torch.float32, CPU, ALONE, memory=ls.memories.Residual(), sparsifier=ls.sparsifiers.TopK())


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
    state = init_group(3, dtype, CPU, ALONE, memory=ls.memories.Residual(), sparsifier=ls.sparsifiers.TopK())
    assert ls.memories.Residual().residual(state.memory).dtype == wide
    assert ls.memories.Residual().residual(state.memory).shape == (3,)


@pytest.mark.parametrize("exchange", ["gather_pairs", "reduce_union", "dense"])
def test_finite_gradients_whose_sum_is_not_make_the_step_skipped_and_no_later_one(exchange: str) -> None:
    # 2 * 3e38 is beyond float32.
    ranks = Ranks(2, 8, sparsifier=ls.sparsifiers.TopK(), exchange=exchange, density=0.25, dtype=torch.float32)
    before = ranks.step(noise(2, 8, dtype=torch.float32))
    skipped = ranks.step(torch.full((2, 8), 3e38))
    assert bool(torch.isnan(skipped.averages).all())
    assert not torch.cat(skipped.after).any()
    assert equal_states(skipped.states[0].counts, before.states[0].counts)
    assert bool(ranks.step(noise(2, 8, dtype=torch.float32)).averages.isfinite().all())


@pytest.mark.parametrize("sparsifier", [ls.sparsifiers.TopK(), ls.sparsifiers.MiCRO()])
def test_an_average_beyond_the_range_of_the_gradient_is_sent_in_parts(sparsifier: ls.sparsifiers.Sparsifier) -> None:
    # float16 ends at 65504, the float32 accumulator does not. Coordinates wait while others are sent, one each step,
    # and are beyond float16 when their turn comes.
    ranks = Ranks(1, 8, sparsifier=sparsifier, density=0.125, dtype=torch.float16)
    gradient = torch.full((1, 8), 40_000.0, dtype=torch.float16)
    arrived = torch.zeros(8)
    largest = 0.0
    for step in range(40):
        outcome = ranks.step(gradient if step < 4 else torch.zeros_like(gradient))
        assert bool(torch.isfinite(outcome.averages).all())
        largest = max(largest, float(outcome.averages.abs().max()))
        arrived += outcome.averages[0].float()
        assert torch.equal(arrived + outcome.after[0], torch.full((8,), 40_000.0 * min(step + 1, 4)))
    assert largest == 65504
    assert arrived.tolist() == [160_000.0] * 8


def test_a_step_is_skipped_in_the_units_of_a_scaled_loss_and_residuals_are_not() -> None:
    state = init_group(2, torch.float32, CPU, ALONE, memory=ls.memories.Residual(), sparsifier=ls.sparsifiers.TopK())
    parts = {
        "memory": ls.memories.Residual(),
        "sparsifier": ls.sparsifiers.TopK(),
        "exchange": ls.exchanges.GatherPairs(),
    }
    ctx = ALONE._replace(density=0.5)
    for scale, expected in ((1024.0, [3072.0, 0.0]), (2.0, [6.0, 0.0]), (0.5, [1.5, 0.0])):
        grad = torch.tensor([3.0, 1.0]) * scale
        made = drive(exchange_group(grad, state, ctx, scale=torch.tensor(scale), **parts), TorchCollective())
        assert not made.skipped
        state = settle_group(state, made, bool(made.skipped), ls.memories.Residual())
        assert grad.tolist() == expected
    assert ls.memories.Residual().residual(state.memory).tolist() == [0.0, 3.0]
    # 2e38 fits into float32, and so does the average; four times as much does not.
    steps = exchange_group(torch.tensor([2e38, 0.0]), state, ctx, scale=torch.tensor(1.0), **parts)
    assert not drive(steps, TorchCollective()).skipped
    state = init_group(2, torch.float32, CPU, ALONE, memory=ls.memories.Residual(), sparsifier=ls.sparsifiers.TopK())
    ls.memories.Residual().residual(state.memory).fill_(2e38)
    steps = exchange_group(torch.tensor([1.0, 0.0]), state, ctx, scale=torch.tensor(4.0), **parts)
    assert drive(steps, TorchCollective()).skipped


def test_the_feedback_that_a_sparsifier_sees_are_the_counts_of_the_step_before() -> None:
    seen = []

    class Watching(ls.sparsifiers.HardThreshold):
        def select(self, acc, state, ctx):
            seen.append((ctx.rank, ctx.step, None if ctx.counts is None else ctx.counts.tolist()))
            return super().select(acc, state, ctx)

    ranks = Ranks(2, 3, sparsifier=Watching(1.0), density=0.5)
    ranks.step(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64))
    ranks.step(torch.zeros(2, 3, dtype=torch.float64))
    ranks.step(torch.zeros(2, 3, dtype=torch.float64))
    assert seen == [(0, 0, None), (1, 0, None), (0, 1, [1, 3]), (1, 1, [1, 3]), (0, 2, [0, 0]), (1, 2, [0, 0])]


def test_an_exchange_without_messages_may_return_its_update() -> None:
    class Alone(ls.exchanges.Exchange):
        accepts = ls.exchanges.GatherPairs.accepts

        def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Update:
            return drive(ls.exchanges.GatherPairs()(acc, selection, ctx), TorchCollective())

    parts = {"memory": ls.memories.Residual(), "sparsifier": ls.sparsifiers.TopK()}
    state = init_group(4, torch.float32, CPU, ALONE, **parts)
    grad = torch.tensor([1.0, -4.0, 3.0, 0.5])
    state, _ = drive(reduce_group(grad, state, ALONE, **parts, exchange=Alone()), TorchCollective())
    assert grad.tolist() == [0.0, -4.0, 0.0, 0.0]
    assert ls.memories.Residual().residual(state.memory).tolist() == [1.0, 0.0, 3.0, 0.5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [3.0, 65536.0])
def test_what_a_narrow_gradient_of_a_scaled_loss_rounds_off_stays(dtype: torch.dtype, scale: float) -> None:
    """As an optimizer finds it, which divides in float32: also where the quotient has no place in 16 bits."""
    parts = {
        "memory": ls.memories.Residual(),
        "sparsifier": ls.sparsifiers.TopK(),
        "exchange": ls.exchanges.EXCHANGES.resolve("gather_pairs"),
    }
    ctx, wide = Context(0, 1.0, 0, 1), torch.tensor([1e-3, 1e-6, 3e-5, 0.7])
    state = init_group(4, dtype, torch.device("cpu"), ctx, memory=parts["memory"], sparsifier=parts["sparsifier"])
    grad = (wide * scale).to(dtype)
    offered = grad.float() / scale  # smaller values than a narrow dtype holds: the scale is there for them
    made = drive(exchange_group(grad, state, ctx, scale=torch.tensor(scale), **parts), TorchCollective())
    assert not made.skipped
    settle_group(state, made, bool(made.skipped), parts["memory"])
    left = state.memory.residual[:4]
    torch.testing.assert_close(left.double() + grad.double() / scale, offered.double(), rtol=1e-6, atol=1e-12)
