"""Candidates of the step before: they save passes, and never change what a step gives."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import ops
from lightning_sparse.core.step import Candidates
from lightning_sparse.ops import host, reference
from tests.covering import by_default, covering
from tests.lockstep import Ranks, equal_states
from tests.ops.compiled import VARIANTS

NUMEL = 40_000
METHODS = ["top_k", "union_top_k", "shared_top_k", "dgc", "gaussian_k", "redsync", "sidco_e", "sidco_gp", "ok_top_k"]
METHODS += ["clt_k", "striped_top_k", "micro", "hard_threshold"]


def accumulated(candidates: Candidates, numel: int = NUMEL, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    grad, acc = (torch.randn(numel, generator=generator) for _ in range(2))
    assert bool(ops.accumulate_(acc, [grad], 1.0, candidates))
    return acc


def gradients(steps: int, n: int) -> list[Tensor]:
    """Their scale drops and jumps, so that bounds of the step before are far too high and far too low."""
    generator = torch.Generator().manual_seed(3)
    scales = [1.0, 1.1, 1e-3, 1e-3, 50.0, 1.0, 0.0, 1.0, 1.3]
    return [scales[step % len(scales)] * torch.randn(n, NUMEL, generator=generator) for step in range(steps)]


@pytest.mark.parametrize(
    ("kernel", "method", "dtype"),
    by_default(
        covering(
            product(VARIANTS, METHODS, [torch.float32, torch.bfloat16]),
            together=1,
            seen_as=lambda kernel, method, dtype: (method, (kernel, dtype)),
        ),
        6,
    ),
    indirect=["kernel"],
)
def test_steps_are_the_same_with_and_without_candidates(kernel: str, method: str, dtype: torch.dtype) -> None:
    sparsifier = (
        ls.sparsifiers.HardThreshold(3.0) if method == "hard_threshold" else ls.sparsifiers.SPARSIFIERS.resolve(method)
    )
    with_them, without = (Ranks(2, NUMEL, sparsifier=sparsifier, density=0.01, dtype=dtype) for _ in range(2))
    without.states = [state._replace(candidates=None) for state in without.states]
    for step, rows in enumerate(gradients(12, 2)):
        rows = rows.to(dtype)
        if step == 7:
            rows[1, 5] = float("nan")
        ours, plain = with_them.step(rows), without.step(rows)
        assert ours.averages.view(torch.uint8).equal(plain.averages.view(torch.uint8))
        assert equal_states(tuple(ours.after), tuple(plain.after))
        for a, b in zip(ours.states, plain.states, strict=True):
            assert equal_states((a.selector, a.counts, a.union), (b.selector, b.counts, b.union))


def test_the_next_selection_looks_at_candidates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = Candidates()
    expected = ops.top_k(accumulated(candidates), 300, candidates)
    assert 0 < candidates.bound < math.inf
    acc = accumulated(candidates)

    def refuse(*args: object) -> None:
        raise AssertionError("the whole vector was passed over")

    monkeypatch.setattr(host, "reaching", refuse)
    assert torch.equal(ops.top_k(acc, 300, candidates), expected)
    threshold = 1.01 * acc.abs()[expected].min().double()
    above, count = ops.above(acc, threshold, candidates=candidates)
    assert 0 < int(count) < 300
    assert above.tolist() == (acc.abs() >= threshold).nonzero().flatten().tolist()


@pytest.mark.usefixtures("kernel")
def test_scores_of_adam_are_collected_with_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "sparsifier": ls.sparsifiers.UnionTopK(),
        "density": 0.01,
        "memory": ls.memories.SecondMoment(),
        "dtype": torch.float32,
    }
    with_them, without = (Ranks(2, NUMEL, **given) for _ in range(2))
    above = host.reaching
    for step in range(8):
        rows = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(step))
        passes: list[object] = []
        monkeypatch.setattr(host, "reaching", lambda *given, passes=passes: passes.append(given) or above(*given))
        ours = with_them.step(rows)
        assert not passes or step < 4  # until the second moments are worth something
        for state in without.states:
            state.candidates.bound = math.inf
        plain = without.step(rows)
        assert passes or step == 0
        assert ours.averages.view(torch.uint8).equal(plain.averages.view(torch.uint8))
        assert equal_states(tuple(ours.after), tuple(plain.after))


@pytest.mark.parametrize("k", [1, 200, 300, 301, 5000, NUMEL - 1])
def test_too_few_or_too_many_candidates_cost_another_pass(k: int) -> None:
    for before in (1, 300, NUMEL // 2):
        candidates = Candidates()
        ops.top_k(accumulated(candidates, seed=1), before, candidates)
        acc = accumulated(candidates, seed=2)
        assert torch.equal(ops.top_k(acc, k, candidates), ops.top_k(acc, k))


def test_whatever_is_written_afterwards_ends_what_was_noted() -> None:
    candidates = Candidates()
    ops.top_k(accumulated(candidates), 300, candidates)
    acc = accumulated(candidates)
    assert candidates.reaching(acc, math.inf) is not None
    assert candidates.reaching(acc[1:], math.inf) is None
    assert candidates.reaching(acc.clone(), math.inf) is None
    top = ops.top_k(acc, 1)
    acc[top] = 0
    assert candidates.reaching(acc, math.inf) is None
    assert torch.equal(ops.top_k(acc, 300, candidates), ops.top_k(acc, 300))


def test_a_gradient_is_known_to_be_empty_until_somebody_writes_to_it() -> None:
    candidates, grad = Candidates(), torch.ones(100)
    assert not candidates.cleared([grad])
    ops.accumulate_(torch.zeros(100), [grad], 1.0, candidates)
    assert candidates.cleared([grad])
    assert not grad.any()
    grad[3] = 1
    assert not candidates.cleared([grad])


def test_a_gradient_that_is_not_finite_tells_nothing_about_the_next_step() -> None:
    candidates = Candidates()
    ops.top_k(accumulated(candidates), 300, candidates)
    bound = candidates.bound
    acc, grad = torch.zeros(NUMEL), torch.ones(NUMEL)
    grad[7] = math.nan
    finite = ops.accumulate_(acc, [grad], 1.0, candidates)
    assert not finite
    assert candidates.cleared([grad])
    assert candidates.reaching(acc, math.inf) is None
    ops.top_k(acc, 300, candidates)
    assert candidates.bound == bound


def test_a_decay_and_other_devices_accumulate_as_torch_does() -> None:
    acc, grad = torch.ones(4), torch.tensor([1.0, 2.0, 3.0, math.inf])
    for candidates in (Candidates(), None):
        finite = ops.accumulate_(acc, [grad[:1], grad[1:]], 0.5, candidates)
        assert not finite
    assert acc.tolist() == [1.75, 3.25, 4.75, 1.0]
    assert grad.tolist() == [1.0, 2.0, 3.0, math.inf]
    meta = torch.zeros(3, device="meta")
    for decay in (1.0, 0.5):
        finite = ops.accumulate_(meta, [meta], decay, Candidates())
        assert finite.device.type == "meta"
        assert finite.shape == ()
        assert finite.dtype == torch.bool


def test_long_runs_are_added_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", 100)
    for place in (None, 0, 99, 100, 449, 450, 999):
        acc, grad = torch.randn(1000), torch.randn(1000).bfloat16()
        if place is not None:
            grad[place] = math.inf
        formed = acc + grad
        expected = torch.where(formed.isfinite(), formed, acc)
        finite = reference.accumulate_(acc, [grad[:450], grad[450:]], 1.0)
        assert bool(finite) == (place is None)
        assert torch.equal(acc, expected)


def test_what_kernels_write_ends_what_was_noted() -> None:
    acc, grad = torch.zeros(100), torch.ones(100)
    candidates = Candidates()
    candidates.bound = 2.0
    ops.accumulate_(acc, [grad], 1.0, candidates)
    assert candidates.reaching(acc, 2.0) is not None
    assert candidates.cleared([grad])
    ops.put_(acc, torch.tensor([3]), 0.0)
    assert candidates.reaching(acc, 2.0) is None
    assert candidates.cleared([grad])
    ops.put_(grad, torch.tensor([3]), 2.0)
    assert not candidates.cleared([grad])
