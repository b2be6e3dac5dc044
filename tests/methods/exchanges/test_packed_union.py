"""Half the bytes, nothing lost: packing, rounding, and what happens at the edges of 16 bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.core.messages import Steps, resolve
from lightning_sparse.core.step import Context, Selection, Update
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.methods.exchanges.packed_union import _classes, _read, _tell, pack, unpack
from lightning_sparse.ops import compiled, subtract_at_
from lightning_sparse.ops.c import native
from lightning_sparse.ops.form import MARKS, Form
from tests.covering import covering, in_turns
from tests.lockstep import Outcome, Ranks
from tests.static_path import static_path

LANE = 32767


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**16))
def test_sums_of_packed_words_are_packed_sums(n: int, size: int, seed: int) -> None:
    levels = LANE // n
    rows = np.random.default_rng(seed).integers(-levels, levels + 1, size=(n, size))
    rows[:, 0] = levels * np.sign(rows[0, 0] + 0.5)  # all ranks at the last level
    words = sum(pack(torch.tensor(row, dtype=torch.int32)) for row in rows)
    assert words.dtype == torch.int32
    assert words.numel() == (size + 1) // 2
    assert unpack(words, size).tolist() == rows.sum(0).tolist()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 400_000), st.integers(0, 300), st.integers(0, 5), st.integers(0, 2**16),
    st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_what_is_told_of_picks_is_heard_with_and_without_padding(
    numel: int, picks: int, missing: int, seed: int, dtype: torch.dtype
) -> None:
    picks, generator = min(picks, numel), np.random.default_rng(seed)
    chosen = np.sort(generator.choice(numel, picks, replace=False))
    indices = torch.cat([torch.tensor(chosen, dtype=torch.int64), torch.full((missing,), numel)])
    acc = torch.from_numpy(generator.normal(size=numel + 1)).to(dtype)
    acc *= 10.0 ** float(generator.uniform(*(-325, 300) if dtype == torch.float64 else (-46, 35)))  # also subnormal
    acc[: numel // 2] *= 1e-3
    acc[numel] = 0
    slots, spare = picks + missing, torch.from_numpy(generator.random(picks + missing) < 0.3)
    selection, ctx = Selection(indices, torch.tensor(picks), spare=spare), Context(0, 0.01, 0, 2)
    for bits in range(8, 29, 4):
        form = Form(numel, slots, bits)
        words = _tell(acc, selection, 1000, form, ctx)
        if (library := compiled(acc.device)) is not None and dtype == torch.float32:
            assert words.tolist() == library.tell(acc, indices, spare, picks, 1000, form).tolist()
        assert len(words) == form.width >= Form.of(numel, slots).width
        assert form.width % 4 == 0 and not words[form.filled :].any()
        read, classes, fits = _read(torch.stack([words, words]), form)
        assert bool(fits.all())
        assert read.tolist() == [indices.tolist()] * 2
        assert (classes[1, :picks] >> 3 != 0).tolist() == spare[:picks].tolist()
        magnitudes = acc[indices].abs()
        expected = _classes(magnitudes, magnitudes.max() if slots else acc[numel])[:picks]
        assert (classes[0, :picks] & 7).tolist() == expected.tolist()
        with static_path():
            everywhere, *_ = _read(words[None], form)
        assert everywhere[0].tolist() == indices.tolist()
        # Marks are the binary digits of a sum: 2**(j // 2**bits + i) for the coordinate j of pick i.
        marks = sum(int(word) % 2**32 << 32 * i for i, word in enumerate(words[MARKS : form.octets]))
        assert marks == sum(1 << (int(j) >> bits) + i for i, j in enumerate(indices))


def union_ranks(n: int, exchange: str = "packed_union") -> Ranks:
    sparsifier = ls.sparsifiers.UnionTopK()
    return Ranks(n, 2000, sparsifier=sparsifier, exchange=exchange, density=0.02, dtype=torch.float32)


def packed(
    rows: torch.Tensor, density: float, sparsifier: ls.sparsifiers.Sparsifier | None = None, steps: int = 1
) -> list:
    ranks = Ranks(
        len(rows), rows.shape[1], sparsifier=sparsifier or ls.sparsifiers.TopK(), exchange="packed_union",
        density=density, dtype=rows.dtype,
    )  # fmt: skip
    return [ranks.step(rows) for _ in range(steps)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_updates_are_those_of_reduce_union_but_for_the_rounding(dtype: torch.dtype, scale: float) -> None:
    rows = scale * torch.randn(4, 200_000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    [outcome] = packed(rows, 0.001)
    top_k = ls.sparsifiers.TopK()
    exact = Ranks(4, 200_000, sparsifier=top_k, exchange="reduce_union", density=0.001, dtype=dtype).step(rows)
    assert torch.equal(outcome.updates[0].indices, exact.updates[0].indices)
    for rank, update in enumerate(outcome.updates):
        assert torch.equal(update.sent, exact.updates[0].indices[update_of(rows[rank], outcome, rank) != 0])
    # All picks lie in one class, of half of 32767 / 4 levels at least, and are rounded to the nearest.
    step = float(rows.abs().max()) / (32767 // 4 / 2)
    assert float((outcome.averages - exact.averages).abs().max()) <= step / 2
    assert float((outcome.averages - exact.averages).abs().max()) > 0
    offered = rows.double().sum(0)
    kept = 4 * outcome.averages[0].double() + sum(residual.double() for residual in outcome.after)
    # q s is exact, and so is acc - q s but for values that share no exponent with s.
    torch.testing.assert_close(kept, offered, rtol=0, atol=float(rows.abs().max()) * 2.0**-22)


def update_of(row: torch.Tensor, outcome: Outcome, rank: int) -> torch.Tensor:
    """What a rank has given at each coordinate of the union."""
    return (row - outcome.after[rank])[outcome.updates[0].indices]


@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("ratio", [1e5, 1e7])
def test_a_pick_that_dwarfs_all_others_leaves_them_their_digits(n: int, ratio: float) -> None:
    # One step for the whole group, of the largest pick, would round nearly all others to zero, for ever.
    rows = torch.randn(n, 2000, generator=torch.Generator().manual_seed(0))
    rows[:, 77] = ratio
    ranks = union_ranks(n)
    for _ in range(3):
        outcome = ranks.step(rows)
        for rank, selection in enumerate(outcome.selections):
            own = selection.indices[: int(selection.count)]
            own = own[torch.isin(own, outcome.updates[0].indices)]
            acc, left = outcome.accs[rank][own], outcome.after[rank][own]
            assert bool((left.abs() <= 64 * acc.abs() / (32767 // n)).all())


@pytest.mark.parametrize(("n", "ratio"), covering(in_turns([8, 2], [30.0, 2.0]), together=1))
def test_a_rank_with_larger_gradients_is_not_cut_short_by_the_picks_of_others(n: int, ratio: float) -> None:
    norms = {}
    for exchange in ("packed_union", "reduce_union"):
        generator = torch.Generator().manual_seed(0)
        ranks = union_ranks(n, exchange)
        for _ in range(40):
            rows = torch.randn(n, 2000, generator=generator)
            rows[0] *= ratio
            outcome = ranks.step(rows)
        norms[exchange] = float(sum(outcome.after).norm())
    assert norms["packed_union"] < 1.02 * norms["reduce_union"]


@pytest.mark.parametrize("n", [2, 8])
def test_a_rank_without_a_gradient_does_not_coarsen_what_others_send(n: int) -> None:
    # It names the first coordinates, where others have something, and the largest pick of all is far larger.
    rows = torch.randn(n, 2000, generator=torch.Generator().manual_seed(0))
    rows[:, :40] = 5.0
    rows[:, 1000] = 1e7
    rows[0] = 0.0
    ranks = union_ranks(n)
    served = torch.zeros(2000)
    for _ in range(20):
        outcome = ranks.step(rows)
        served += outcome.averages[0] != 0
    assert bool((served[:40] > 0).all())


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_largest_pick_has_more_than_half_of_the_levels(n: int) -> None:
    for seed in range(8):
        rows = torch.randn(n, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rows[:, :5] = 8.0 * rows.abs().max()  # known to all, and so of the class of the largest pick
        [outcome] = packed(rows, 0.05)
        given = (outcome.accs[0] - outcome.after[0])[:5]
        left = outcome.after[0][:5].abs().max()
        assert float(left) <= float(given.abs().max()) / (32767 // n)  # half a step of two in all levels


def test_values_too_small_for_a_step_are_kept_and_come_later() -> None:
    # Rank 0 has 2**15 at coordinate 0, of 16383 levels, so that a step is 4; what rank 1 has there is less than half.
    rows = torch.zeros(2, 10, dtype=torch.float64)
    rows[0, 0], rows[1, 0] = 2.0**15, 1.0
    first, second, *_ = packed(rows, 0.1, steps=2)
    assert first.averages[0, 0] == 2.0**14
    assert first.after[1][0] == 1.0
    assert first.updates[1].sent.tolist() == []  # nothing was sent, and nothing counts as sent
    assert second.after[1][0] == 2.0


def test_alone_a_rank_rounds_nothing() -> None:
    rows = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    [outcome] = packed(rows, 0.01)
    assert outcome.averages[0].count_nonzero() == 10
    assert torch.equal(outcome.averages[0] + outcome.after[0], rows[0])
    assert outcome.after[0].count_nonzero() == 990


@pytest.mark.parametrize("limit", [7, 10, 19])
def test_a_union_above_its_limit_gives_up_others_in_each_step(limit: int) -> None:
    # The gradient at a coordinate that has been sent is what it was, so that the union is the same in every step.
    @dataclass(frozen=True)
    class Limited(ls.sparsifiers.TopK):
        def select(self, acc: torch.Tensor, state: Any, ctx: Context) -> tuple[Selection, Any]:
            picked = Selection(torch.arange(20), torch.tensor(20), aligned=True, limit=limit)
            return picked, state

    for exchange in ("packed_union", "reduce_union"):
        ranks = Ranks(2, 100, sparsifier=Limited(), exchange=exchange, density=0.2)
        served = torch.zeros(100)
        for _ in range(40):
            outcome = ranks.step(torch.ones(2, 100, dtype=torch.float64))
            assert int(outcome.updates[0].union) == limit
            served[outcome.updates[0].indices] += 1
        assert float(served[:20].min()) >= 0.5 * limit / 20 * 40
        assert served[20:].sum() == 0


def test_a_value_beyond_the_last_level_is_sent_in_parts() -> None:
    # Rank 1's range (StripedTopK: odd blocks) holds small values only, rank 0's a large one that it does not own.
    rows = torch.zeros(2, 8, dtype=torch.float64)
    rows[1] = 1e-3
    rows[0, :] = 1e-3
    rows[1, 0] = 1.0  # coordinate 0 belongs to rank 0 in step 0, which has little there
    sparsifier = ls.sparsifiers.StripedTopK(block=1)
    ranks = Ranks(2, 8, sparsifier=sparsifier, exchange="packed_union", density=0.5, dtype=torch.float64)
    outcome = ranks.step(rows)
    picked = torch.cat([s.indices for s in outcome.selections])
    assert 0 in picked.tolist()
    largest = max(float(outcome.accs[r][s.indices].abs().max()) for r, s in enumerate(outcome.selections))
    assert largest < 1e-2  # nobody's own pick is large
    assert 0 < 2 * outcome.averages[0, 0] < 0.1
    torch.testing.assert_close(outcome.after[1][0] + outcome.after[0][0], 1.001 - 2 * outcome.averages[0, 0])


def test_messages_are_less_than_half_as_long() -> None:
    # Of 500 picks, each one's lowest 8 bits, 4 bits and a mark, and a mark for each of the 781 whole 256 of 200 000
    # coordinates; the count of picks and an exponent, in multiples of 16 bytes; then half a word per value, float32 or
    # not.
    rows = torch.randn(4, 200_000, generator=torch.Generator().manual_seed(0))
    [outcome] = packed(rows, 0.01, ls.sparsifiers.SharedTopK())
    union = int(outcome.statistics[0].union)
    indices, values = 16 * -(-(2 + 125 + 63 + -(-1281 // 32)) // 4), 4 * -(-union // 2)
    assert outcome.statistics[0].bytes_sent == 3 * indices + 1.5 * values
    plain = Ranks(
        4, 200_000, sparsifier=ls.sparsifiers.SharedTopK(), exchange="reduce_union", density=0.01, dtype=torch.float32
    )
    assert outcome.statistics[0].bytes_sent < 0.5 * plain.step(rows).statistics[0].bytes_sent


@dataclass(frozen=True)
class Descending(ls.sparsifiers.UnionTopK):
    def select(self, acc: torch.Tensor, state: Any, ctx: Context) -> Steps[tuple[Selection, Any]]:
        selection, state = yield from resolve(super().select(acc, state, ctx))
        order = torch.arange(len(selection.indices))
        order[: int(selection.count)] = order[: int(selection.count)].flip(0)
        spare = None if selection.spare is None else selection.spare[order]
        return selection._replace(indices=selection.indices[order], spare=spare), state


@pytest.mark.parametrize(
    ("memory", "dtype"),
    covering(
        in_turns([ls.memories.Residual(), ls.memories.SecondMoment()], [torch.float32, torch.float64]), together=1
    ),
)
def test_picks_that_do_not_ascend_travel_like_others(
    dtype: torch.dtype, memory: ls.memories.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.randn(3, 196_608, generator=torch.Generator().manual_seed(0), dtype=dtype)  # 3 blocks
    for density in (1e-5, 1e-3):  # told whole, and in blocks
        for library in {native.library, None}:
            monkeypatch.setattr(native, "library", library)
            ways = [
                Ranks(3, 196_608, sparsifier=sparsifier, exchange="packed_union", density=density, dtype=dtype,
                      memory=memory)
                for sparsifier in (ls.sparsifiers.UnionTopK(), Descending())
            ]  # fmt: skip
            for _ in range(3):
                plain, turned = (way.step(rows) for way in ways)
                assert torch.equal(plain.averages, turned.averages)
                assert all(map(torch.equal, plain.after, turned.after))  # type: ignore[arg-type]


def test_few_picks_take_few_words() -> None:
    rows = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(0))
    [outcome] = packed(rows, 8e-6)
    assert outcome.statistics[0].counts.tolist() == [2, 2]
    union = int(outcome.statistics[0].union)
    # The lowest 16 bits: a word of octets, two planes of four bits; one of marks and one of classes; one of zeros.
    assert outcome.statistics[0].bytes_sent == 4 * (2 + 5 + 1) + 4 * -(-union // 2)
    assert torch.equal(
        outcome.averages[0].nonzero().flatten(), torch.cat([s.indices for s in outcome.selections]).unique()
    )


@pytest.mark.parametrize("share", [0.01, 0.005, 1e-3, 1e-4])
def test_coordinates_take_little_more_than_the_entropy_of_the_choice(share: float) -> None:
    numel = 10_000_000
    form = Form.of(numel, int(share * numel))
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    assert entropy < 32 * (form.classes - MARKS) / form.slots < entropy + 1.6


def test_too_many_ranks_for_a_share_of_the_levels_send_unrounded_values(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    monkeypatch.setattr("lightning_sparse.ops.form.FEWEST_LEVELS", 32767 // 3 + 1)
    [outcome] = packed(rows, 0.1)
    exact = Ranks(3, 1000, sparsifier=ls.sparsifiers.TopK(), exchange="reduce_union", density=0.1).step(rows)
    assert torch.equal(outcome.averages, exact.averages)


def test_zeros_and_the_smallest_numbers_are_no_trouble() -> None:
    for scale in (0.0, 1e-38, 1e-44):  # the last is below the smallest normal float32
        rows = torch.full((2, 100), scale)
        [outcome] = packed(rows, 0.1)
        assert bool(torch.isfinite(outcome.averages).all())
        assert torch.equal(2 * outcome.averages[0] + sum(outcome.after), rows.sum(0))


def test_nothing_selected_in_the_first_step_of_a_thread() -> None:
    """Buffers of compiled code belong to a thread, and are made when they are first needed."""

    def run() -> list[float]:
        gradients = torch.full((1, 2, 50), 0.5)
        [step] = ls.simulate(
            gradients, sparsifier=ls.sparsifiers.HardThreshold(9.0), density=0.2, exchange="packed_union"
        )
        return step.update.tolist()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result(30) == [0.0] * 50


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_rank_has_sent_is_listed_and_its_accumulator_stays(dtype: torch.dtype, beside: bool) -> None:
    """Where shapes are static, too: there, places of what is not sent hold the padding index."""
    n, numel = 3, 500
    accs = torch.randn(n, numel + 1, generator=torch.Generator().manual_seed(0), dtype=dtype)
    accs[:, ::50] *= 1e-9  # rounded to zero
    accs[:, numel] = 0
    exchange, picks = ls.exchanges.PackedUnion(), torch.arange(0, numel, 10)

    def updates() -> list[Update]:
        given = accs.clone()
        coroutines = []
        for rank, acc in enumerate(given):
            ctx = Context(0, 0.1, rank, n, second=acc.square() if beside else None)
            coroutines.append(exchange(acc, Selection(picks, torch.tensor(len(picks)), aligned=True), ctx))
        made = drive_ranks(coroutines)  # type: ignore[arg-type]
        assert torch.equal(given, accs)
        return list(made)

    for with_padding in (False, True):
        with static_path() if with_padding else nullcontext():
            made = updates()
        total = torch.zeros(numel + 1, dtype=dtype)
        for acc, update in zip(accs, made, strict=True):
            assert update.sent is not None and update.sent_values is not None
            sent = update.sent < numel
            assert bool(sent.all()) != with_padding
            assert bool(update.sent_values[sent].all()) and not update.sent_values[~sent].any()
            assert torch.equal(update.sent[sent], update.sent[sent].unique())
            left = acc.clone()
            subtract_at_(left, update.sent, update.sent_values)
            assert float(left[picks].abs().max()) < 0.05 * float(acc[picks].abs().max())
            total.index_add_(0, update.sent[sent], update.sent_values[sent])
        torch.testing.assert_close(made[0].values * n, total[made[0].indices])
