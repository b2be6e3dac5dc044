"""SharedTopK and StripedTopK: what their docstrings promise."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.core.step import Context, Found
from lightning_sparse.methods.sparsifiers.striped_top_k import even_shares
from lightning_sparse.ops import host
from tests.covering import covering, in_one_test, in_turns


def stream(steps: int, n: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, n, numel, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("n", "density"), covering(in_turns([1, 2, 3, 4, 8], [0.01, 0.05]), together=1))
def test_shared_picks_never_exceed_k_and_messages_are_constant(n: int, density: float) -> None:
    numel = 1000
    k = int(density * numel)
    sizes = set()
    for step in ls.simulate(stream(30, n, numel), sparsifier="shared_top_k", density=density):
        assert len(step.indices) <= k
        assert step.padding_ratio == 1
        assert step.counts.tolist() == [k // n] * n
        sizes |= set(step.bytes_sent.tolist())
    assert len(sizes) == 1


def test_shared_picks_are_the_largest_of_each_rank_with_the_values_of_all() -> None:
    [gradients] = stream(1, 3, 300)
    [step] = ls.simulate([gradients], sparsifier="shared_top_k", density=0.1)
    picked = torch.cat([row.abs().topk(10).indices for row in gradients]).unique()
    assert torch.equal(step.indices, picked)
    torch.testing.assert_close(step.update[picked], gradients.mean(0)[picked])
    assert step.update.count_nonzero() == len(picked)


def test_with_fewer_picks_than_ranks_they_are_shared_out_in_turns() -> None:
    counts = [s.counts for s in ls.simulate(stream(8, 8, 300), sparsifier="shared_top_k", density=0.01)]  # k = 3
    assert all(int(c.sum()) == 3 for c in counts)
    assert torch.stack(counts).sum(0).tolist() == [3] * 8


def test_shared_picks_need_the_values_of_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"SharedTopK's are shared. Exchanges that fit: dense, reduce_union"):
        ls.simulate(stream(1, 2, 10), sparsifier="shared_top_k", density=0.5, exchange="gather_pairs")


@in_one_test(
    "n, numel, density",
    covering(product([1, 2, 3, 4, 8], [1, 2, 7, 255, 256, 257, 10_000], [0.001, 0.01, 0.3, 1.0])),
)
def test_striped_density_is_exact_for_any_size(n: int, numel: int, density: float) -> None:
    k = max(1, int(density * numel))
    for step in ls.simulate(stream(4, n, numel), sparsifier="striped_top_k", density=density):
        assert len(step.indices) == k
        assert int(step.counts.sum()) == (k if k < numel else n * numel)
        assert step.density_error == 0
        if k % n == 0 and k < numel // 2:
            assert step.padding_ratio == 1


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_coordinate_belongs_to_one_rank_and_stripes_rotate(n: int) -> None:
    # At density 1 a rank picks all it owns: looked at through single ranks' selections.
    numel, sparsifier = 5000, ls.sparsifiers.StripedTopK(block=64)
    owners = []
    for step in range(n + 1):
        owner = torch.full((numel,), -1)
        for rank in range(n):
            ctx = Context(step, 1.0, rank, n)
            selection, _ = sparsifier.select(torch.ones(numel), None, ctx)
            picked = selection.indices[: int(selection.count)]
            assert bool((owner[picked] == -1).all())
            owner[picked] = rank
        assert bool((owner >= 0).all())
        owners.append(owner)
    for step in range(n):
        assert torch.equal(owners[step + 1], (owners[step] - 1) % n)
    assert torch.equal(owners[0][:128], torch.arange(128) // 64)


def test_striped_selection_searches_only_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, passes = [], host.reaching

    def note(x: torch.Tensor, bound: float) -> Found:
        seen.append(x.numel())
        return passes(x, bound)

    monkeypatch.setattr(host, "reaching", note)
    for n in (1, 2, 4, 8):
        list(ls.simulate(stream(1, n, 81_920), sparsifier="striped_top_k", density=0.01))
        assert seen == [81_920 // n] * n
        seen.clear()


def test_shares_are_as_even_as_ownership_allows() -> None:
    assert even_shares(10, [3, 3, 3]) == [3, 3, 3]
    assert even_shares(5, [0, 9, 9]) == [0, 3, 2]
    assert sum(even_shares(100, [1, 50, 7, 60])) == 100
    with pytest.raises(ValueError, match="positive integer"):
        ls.sparsifiers.StripedTopK(block=0)
