"""What travels: message sizes by hand, values bit for bit, and selections of unequal or no length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import Message, run
from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.methods.exchanges import as_exchange
from lightning_sparse.methods.exchanges.base import gather_picks, reduce_at
from tests.lockstep import Ranks, noise


def bytes_sent(sparsifier: ls.sparsifiers.Sparsifier, exchange: str, rows: torch.Tensor, density: float) -> list[float]:
    trace = next(ls.simulate([rows], sparsifier=sparsifier, density=density, exchange=exchange))
    return trace.bytes_sent.tolist()


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 4)])
def test_gather_pairs_of_equal_counts_is_one_message_of_count_indices_and_values(
    n: int, dtype: torch.dtype, width: int
) -> None:
    # k = 10 picks of 4 bytes and their values (those of bfloat16 travel as the accumulator's float32), one count of 4.
    sent = bytes_sent(ls.sparsifiers.TopK(), "gather_pairs", noise(n, 100, dtype=dtype), 0.1)
    assert sent == [(n - 1) * (4 + 10 * 4 + 10 * width)] * n


@pytest.mark.parametrize("exchange", ["gather_pairs", "reduce_union"])
def test_unequal_counts_cost_eight_more_bytes_and_padding_to_the_longest(exchange: str) -> None:
    rows = torch.zeros(3, 20)
    rows[0, :2] = 5.0
    rows[1, 1:8] = 5.0  # the longest: 7 picks; the union is 0 to 7, 8 coordinates; rank 2 picks nothing
    sent = bytes_sent(ls.sparsifiers.HardThreshold(1.0), exchange, rows, 0.1)
    lengths = 2 * 8
    if exchange == "gather_pairs":
        assert sent == [lengths + 2 * (4 + 7 * 4 + 7 * 4)] * 3
    else:
        ring = 2 * 2 / 3
        assert sent == pytest.approx([lengths + 2 * (4 + 7 * 4) + ring * 8 * 4] * 3)


def test_reduce_union_of_equal_counts_sends_indices_once_and_values_at_the_union() -> None:
    rows = torch.zeros(2, 10)
    rows[0, [0, 1]] = 5.0
    rows[1, [1, 2]] = 5.0
    # 1 * (4 + 2 * 4) of indices; 2 * 1/2 * 3 values of 4 bytes.
    assert bytes_sent(ls.sparsifiers.TopK(), "reduce_union", rows, 0.2) == [12 + 12.0] * 2


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float64, 8)])
def test_dense_is_a_ring_all_reduce_of_everything(dtype: torch.dtype, width: int) -> None:
    for sparsifier in (ls.sparsifiers.Everything(), ls.sparsifiers.TopK(), ls.sparsifiers.HardThreshold(1.0)):
        assert bytes_sent(sparsifier, "dense", noise(4, 100, dtype=dtype), 0.1) == [1.5 * 100 * width] * 4


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_the_survey_of_the_corrected_methods_stands_in_for_the_exchange_of_counts(n: int) -> None:
    rows = noise(n, 6400, dtype=torch.float32)
    trace = next(ls.simulate([rows], sparsifier="micro", density=0.1))
    k, longest = 640, int(trace.counts.max())
    points = min(math.ceil(2 * k / n), max(8, min(32, 256 // n)))
    survey = (n - 1) * points * 4
    indices = (n - 1) * (4 + 4 * longest)
    values = 2 * (n - 1) / n * k * 4
    assert trace.bytes_sent.tolist() == pytest.approx([survey + indices + values] * n)
    assert points <= 32


def test_values_travel_bit_for_bit() -> None:
    # Subnormals, a negative zero among picks, the largest numbers: what one rank sends is what all get.
    values = [1e-45, -0.0, 3.4028234663852886e38, -1e-38, 1.0000001, -(2.0**-149)]
    for dtype in (torch.float32, torch.float64):
        row = torch.tensor(values, dtype=dtype)
        ranks = Ranks(2, 6, sparsifier=ls.sparsifiers.TopK(), exchange="gather_pairs", density=1.0, dtype=dtype)
        outcome = ranks.step(torch.stack([row, torch.zeros(6, dtype=dtype)]))
        assert torch.equal(outcome.averages[0], row / 2)


def test_the_largest_coordinates_survive_the_32_bit_message() -> None:
    picked = torch.tensor([0, 2**24 + 1, 2**31 - 3])
    values = torch.tensor([1.5, -0.0, 2.0**-149])
    for aligned in (True, False):
        selection = Selection(picked, torch.tensor(3), aligned=aligned)
        picks, _ = drive_mirrored(gather_picks(selection, values, 2**31 - 2), 2)
        assert picks.counts.tolist() == [3, 3]
        assert torch.equal(picks.joined(), torch.cat([picked, picked]))
        for got in picks.values:
            assert torch.equal(got.view(torch.int32), values.view(torch.int32))


@dataclass(frozen=True)
class PaddedTopK(ls.sparsifiers.Sparsifier):
    """Says nothing of its length, and has more slots than picks on every rank."""

    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"

    def select(self, acc: Tensor, state: None, ctx: Context) -> tuple[Selection, None]:
        picks = acc.abs().topk(ctx.rank + 1).indices.sort().values
        return Selection(torch.cat([picks, picks.new_full((9,), len(acc))]), torch.tensor(len(picks))), state


@pytest.mark.parametrize("exchange", ["gather_pairs", "reduce_union", "packed_union", "tree", "balanced"])
def test_padding_that_all_ranks_have_is_not_sent(exchange: str) -> None:
    ranks = Ranks(3, 20, sparsifier=PaddedTopK(), exchange=exchange, density=0.1)
    gradients = noise(3, 20)
    outcome = ranks.step(gradients)
    if exchange != "tree":
        assert outcome.statistics[0].counts.tolist() == [1, 2, 3]
    assert torch.allclose(outcome.averages[0] * 3 + torch.stack(outcome.after).sum(0), gradients.sum(0))
    assert 1 <= int(outcome.averages[0].count_nonzero()) <= 6


@pytest.mark.parametrize("exchange", ["gather_pairs", "reduce_union", "tree", "balanced"])
def test_a_step_in_which_no_rank_picks_anything_sends_nothing_and_keeps_everything(exchange: str) -> None:
    ranks = Ranks(3, 20, sparsifier=ls.sparsifiers.HardThreshold(100.0), exchange=exchange, density=0.1)
    gradients = noise(3, 20)
    outcome = ranks.step(gradients)
    assert outcome.statistics[0].counts.tolist() == [0, 0, 0]
    assert int(outcome.statistics[0].union) == 0
    assert torch.equal(outcome.averages, torch.zeros(3, 20, dtype=torch.float64))
    assert torch.equal(torch.stack(outcome.after), gradients)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.float64, 8)])
def test_one_selection_for_all_costs_one_broadcast_or_nothing_beside_the_values(
    n: int, dtype: torch.dtype, width: int
) -> None:
    rows = noise(n, 100, dtype=dtype)
    values = 2 * (n - 1) / n * 10 * width
    assert bytes_sent(ls.sparsifiers.CLTK(), "follow_leader", rows, 0.1) == [(n - 1) / n * 10 * 4 + values] * n
    assert bytes_sent(ls.sparsifiers.RandomK(), "reduce_shared", rows, 0.1) == [values] * n


def test_all_follow_the_leader_by_hand() -> None:
    rows = torch.tensor([[4.0, 0.0, -1.0, 2.0], [1.0, 8.0, 1.0, 2.0]], dtype=torch.float64)
    ranks = Ranks(2, 4, sparsifier=ls.sparsifiers.CLTK(), density=0.25)
    first = ranks.step(rows)
    assert first.averages[0].tolist() == [2.5, 0.0, 0.0, 0.0]
    assert [residual.tolist() for residual in first.after] == [[0, 0, -1, 2], [0, 8, 1, 2]]
    assert [statistics.counts.tolist() for statistics in first.statistics] == [[1, 1], [1, 1]]
    second = ranks.step(torch.zeros_like(rows))
    assert second.averages[0].tolist() == [0.0, 4.0, 0.0, 0.0]


def test_own_and_union_release_by_hand() -> None:
    rows = torch.tensor([[4.0, 0.0, -1.0, 2.0], [1.0, 8.0, 1.0, 2.0]], dtype=torch.float64)
    own = Ranks(2, 4, sparsifier=ls.sparsifiers.TopK(), exchange="gather_pairs", density=0.25).step(rows)
    assert own.averages[0].tolist() == [2.0, 4.0, 0.0, 0.0]
    assert [residual.tolist() for residual in own.after] == [[0, 0, -1, 2], [1, 0, 1, 2]]
    union = Ranks(2, 4, sparsifier=ls.sparsifiers.TopK(), exchange="reduce_union", density=0.25).step(rows)
    assert union.averages[0].tolist() == [2.5, 4.0, 0.0, 0.0]  # rank 1 adds its 1 at coordinate 0
    assert [residual.tolist() for residual in union.after] == [[0, 0, -1, 2], [0, 0, 1, 2]]


def test_sums_are_formed_in_rank_order_on_every_rank() -> None:
    # In float32 (1e8 + 1) - 1e8 is 0, and (1e8 - 1e8) + 1 is 1: the order shows.
    for order, expected in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        rows = torch.tensor(order).view(3, 1)
        for exchange in ("gather_pairs", "reduce_union", "dense", "tree", "balanced"):
            ranks = Ranks(3, 1, sparsifier=ls.sparsifiers.TopK(), exchange=exchange, density=1.0, dtype=torch.float32)
            assert ranks.step(rows).averages.tolist() == [[pytest.approx(expected / 3)]] * 3


def test_identical_ranks_make_own_and_union_release_equal() -> None:
    gradients = [noise(1, 100, seed=seed).expand(4, -1) for seed in range(4)]
    own, union = (
        [t.update for t in ls.simulate(gradients, sparsifier="top_k", density=0.1, exchange=exchange)]
        for exchange in ("gather_pairs", "reduce_union")
    )
    assert torch.equal(torch.stack(own), torch.stack(union))


class OddlyAgreed(ls.sparsifiers.TopK):
    agreement = Agreement.LEADER


@pytest.mark.parametrize(
    ("exchange", "accepted"),
    [
        ("gather_pairs", "disjoint or independent"),
        ("reduce_union", "disjoint or independent or shared"),
        ("reduce_shared", "identical"),
        ("tree", "independent"),
        ("balanced", "independent"),
    ],
)
def test_an_exchange_that_does_not_fit_says_what_it_accepts_and_what_would_fit(exchange: str, accepted: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"The exchange '{exchange}' accepts selections that are {accepted}, but OddlyAgreed's are "
        r"leader\. Exchanges that fit: dense, follow_leader\.",
    ):
        as_exchange(exchange, OddlyAgreed())


def test_every_sparsifier_goes_with_its_natural_exchange() -> None:
    for _, cls in ls.sparsifiers.SPARSIFIERS.items():
        assert ls.exchanges.EXCHANGES.name_of(as_exchange(None, cls())) == cls.exchange


def test_a_dense_mean_takes_the_place_of_the_one_copy_that_was_sent() -> None:
    acc, sent = torch.arange(101.0), []

    def answer(message: Message) -> torch.Tensor:
        sent.append(message.x)
        return message.x.mul_(3)

    mean, second = run(reduce_at(acc, None, Context(0, 1.0, 0, 3)), answer)
    assert second is None and torch.equal(mean, torch.arange(100.0)) and torch.equal(acc, torch.arange(101.0))
    assert [x.data_ptr() for x in sent] == [mean.data_ptr()]
