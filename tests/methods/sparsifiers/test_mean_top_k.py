"""Selection by codes of the mean, against a slow transcription of the rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.methods.density import count
from lightning_sparse.methods.sparsifiers.mean_top_k import Stripe, encoded, estimated
from tests.static_path import static_path

METHOD = ls.sparsifiers.MeanTopK()
LOW, HIGH = 0.4528, 1.5104
SHARES = [(2, 2000, 0.02), (3, 601, 0.1), (8, 9000, 0.01), (4, 300, 0.3), (5, 5001, 0.04), (2, 140, 0.5)]


def reference_stripe(numel: int, n: int, density: float, step: int) -> list[list[list[int]]]:
    """Coordinates that are looked at, by owner and block."""
    apart = max(1, 2 * round((0.17 / density - 1) / 2) + 1)
    looked = [j for j in range(numel) if j % apart == step % apart]
    block = max(4, min(256, len(looked) // (4 * n) // 4 * 4))
    blocks = [looked[i : i + block] for i in range(0, len(looked), block)]
    return [blocks[owner::n] for owner in range(n)]


def reference_mean(rows: np.ndarray, owner: int, block: list[int], size: int) -> np.ndarray:
    """n times the mean of some coordinates, as the owner of the block estimates it."""

    def padded(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values, np.zeros(size - len(values))])

    total = padded(rows[owner][block])
    for rank, row in enumerate(rows):
        values = padded(row[block])
        level = np.where(np.square(values) > np.square(values).mean(), HIGH, LOW)
        odd = (np.arange(size) + rank) % 2 > 0
        if rank != owner:
            unit = torch.tensor(np.sqrt(np.square(values).mean())).bfloat16().item()
            total = total + unit * np.where((values > 0) | ((values == 0) & odd), level, -level)
    return total[: len(block)]


def reference_selection(
    rows: np.ndarray, density: float, step: int, spare: list[int]
) -> list[tuple[set[int], set[int]]]:
    """Return what each rank selects by its own values and by the mean, given how many spare ones it makes."""
    n, numel = rows.shape
    k = max(1, int(density * numel))
    stripes, made = reference_stripe(numel, n, density, step), []
    size = max((len(block) for owner in stripes for block in owner), default=4)
    for rank, row in enumerate(rows):
        own = set(np.argsort(-np.abs(row), kind="stable")[: (-(-k // 2) + (rank - step) % n) // n].tolist())
        found: list[tuple[float, int]] = []
        for block in stripes[rank]:
            means = reference_mean(rows, rank, block, size)
            found += [(-abs(mean), j) for mean, j in zip(means.tolist(), block, strict=True) if j not in own]
        made.append((own, {j for _, j in sorted(found)[: spare[rank]]}))
    return made


def select(rows: torch.Tensor, density: float, step: int, in_runs: bool = False) -> list[Selection]:
    n, numel = rows.shape

    def one(rank: int):  # type: ignore[no-untyped-def]
        state = METHOD.init(numel, n, density, rows.device)
        row = (
            InRuns(Gradient(list(rows[rank].clone().split([1, numel // 3, numel - 1 - numel // 3]))))
            if in_runs
            else rows[rank]
        )
        return (yield from METHOD.select(row, state, Context(step, density, rank, n)))

    return [selection for selection, _ in drive_ranks([one(rank) for rank in range(n)])]


def picks(selection: Selection) -> tuple[set[int], set[int]]:
    assert selection.spare is not None
    indices, spare = (x[: int(selection.count)].tolist() for x in (selection.indices, selection.spare))
    assert indices == sorted(set(indices))
    return {j for j, s in zip(indices, spare, strict=True) if not s}, {
        j for j, s in zip(indices, spare, strict=True) if s
    }


@pytest.mark.parametrize(("n", "numel", "density"), SHARES)
def test_picks_are_those_of_the_rule(n: int, numel: int, density: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in range(0, 40, 3):
        rows = torch.randn(n, numel, generator=generator, dtype=torch.float64) + torch.randn(numel, generator=generator)
        rows[0, ::5] = 0
        found = [picks(one) for one in select(rows, density, step)]
        assert found == reference_selection(rows.numpy(), density, step, [len(spare) for _, spare in found])
        k = count(density, numel)
        owned = [sum(map(len, owner)) for owner in reference_stripe(numel, n, density, step)]
        wanted = math.floor((0.75 * k) / n)
        assert all(
            len(spare) >= min(wanted, own - len(first)) for (first, spare), own in zip(found, owned, strict=True)
        )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3000), st.integers(2, 9), st.sampled_from([0.001, 0.01, 0.05, 0.5]), st.integers(0, 50))
def test_turns_look_at_every_coordinate_once(numel: int, n: int, density: float, begin: int) -> None:
    apart = Stripe.of(numel, Context(0, density, 0, n)).apart
    seen: list[int] = []
    for step in range(begin, begin + apart):
        stripe = Stripe.of(numel, Context(step, density, 0, n))
        for owner in range(n):
            places = stripe.places(owner, torch.device("cpu"))
            inside = places[places < numel]
            seen += inside.tolist()
            assert bool(stripe.mask(inside, owner)[: len(places)][places < numel].all())
            assert not stripe.mask(inside, (owner + 1) % n).any()
    assert sorted(seen) == list(range(numel))


@pytest.mark.parametrize(("n", "numel", "density"), SHARES)
def test_neither_a_device_nor_runs_change_what_is_picked(n: int, numel: int, density: float) -> None:
    rows = torch.randn(n, numel, generator=torch.Generator().manual_seed(1))
    expected = [picks(one) for one in select(rows, density, 7)]
    assert [picks(one) for one in select(rows, density, 7, in_runs=True)] == expected
    with static_path():
        assert [picks(one) for one in select(rows, density, 7)] == expected


def test_estimates_tell_the_largest_means_of_noise() -> None:
    n = 8
    rows = torch.randn(n, 1, 40, 256, generator=torch.Generator().manual_seed(0)).expand(n, n, 40, 256)
    told = torch.stack([encoded(row, rank)[0] for rank, row in enumerate(rows)])
    mean, estimate = rows[:, 0].mean(0).flatten().abs(), estimated(rows[0, 0], told, 0).flatten().abs()
    best, found, own = (x.topk(1000).indices for x in (mean, estimate, rows[0, 0].flatten().abs()))
    assert float(mean[found].square().sum()) > 0.9 * float(mean[best].square().sum())
    assert float(mean[own].square().sum()) < 0.5 * float(mean[best].square().sum())


@pytest.mark.parametrize("n", [2, 8])
def test_the_union_holds_k_whatever_ranks_agree_on(n: int) -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(90, 1, 20_000, generator=generator)
    for share in (0.0, 0.5, 1.0):
        stream = share * common + (1 - share) * torch.randn(90, n, 20_000, generator=generator)
        densities = [len(step.indices) / 200 for step in ls.simulate(stream, sparsifier=METHOD, density=0.01)]
        assert sum(density < 1 for density in densities) <= 5
        assert min(densities) > 0.7


@pytest.mark.parametrize("scale", [1e-25, 1e18, 1e25, 1e36])
def test_the_union_holds_k_where_squares_are_beyond_float32(scale: float) -> None:
    stream = scale * torch.randn(6, 4, 8000, generator=torch.Generator().manual_seed(0))
    for step in ls.simulate(stream, sparsifier=METHOD, density=0.02):
        assert len(step.indices) == 160


@pytest.mark.parametrize(("dtype", "powers"), [(torch.float32, (33, 70, 120)), (torch.float64, (300, 700, 1000))])
def test_codes_are_the_same_in_other_units(dtype: torch.dtype, powers: tuple[int, ...]) -> None:
    values = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0), dtype=dtype)
    end = values[0].numel() // 4
    expected = encoded(values, 0)
    for power in powers:
        found = encoded(values * 2.0**power, 0)
        assert torch.equal(found[:, :end], expected[:, :end])
        if power < 128:  # what bfloat16 holds
            units, before = (row[:, end:].contiguous().view(torch.bfloat16) for row in (found, expected))
            assert torch.equal(units.double(), before.double() * 2.0**power)


def test_a_coordinate_that_is_large_on_one_rank_does_not_wait_for_its_turn() -> None:
    stream = torch.randn(3, 8, 20_000, generator=torch.Generator().manual_seed(0))
    for step, place in enumerate((5, 17_000, 9_999)):
        stream[step, 3, place] = 100.0
    for place, step in zip((5, 17_000, 9_999), ls.simulate(stream, sparsifier=METHOD, density=0.01), strict=True):
        assert place in step.indices


def test_alone_a_rank_picks_its_k_largest() -> None:
    stream = torch.randn(3, 1, 1000, generator=torch.Generator().manual_seed(0))
    steps = ls.simulate(stream, sparsifier=METHOD, density=0.01)
    expected = ls.simulate(stream, sparsifier="top_k", density=0.01)
    assert [one.indices.tolist() for one in steps] == [one.indices.tolist() for one in expected]


def test_small_groups_are_selected_from_as_by_union_top_k() -> None:
    stream = torch.randn(70, 8, 3000, generator=torch.Generator().manual_seed(0))
    steps, expected = (
        [step.indices.tolist() for step in ls.simulate(stream, sparsifier=name, density=0.01)]
        for name in ("mean_top_k", "union_top_k")
    )
    assert steps == expected


@pytest.mark.parametrize("max_factor", [1.0, 1.2, 2.0])
def test_messages_stay_within_the_bound_where_all_ranks_pick_the_same(max_factor: float) -> None:
    common = torch.randn(20, 1, 20_000, generator=torch.Generator().manual_seed(0)).expand(20, 8, 20_000)
    *_, last = ls.simulate(common, sparsifier=ls.sparsifiers.MeanTopK(max_factor=max_factor), density=0.01)
    assert int(last.counts.max()) <= math.ceil(200 / 8 * max_factor) + 1
