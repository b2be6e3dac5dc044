"""Drift does what its formula says, and so do today's exchange and dense training with the same optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from benchmarks.race.flat import Flat
from benchmarks.race.methods.base import Method, Place
from benchmarks.race.methods.drift import Drift
from benchmarks.race.methods.optimizers import Averaged, Today
from lightning_sparse.engine.drivers import drive_ranks
from tests.benchmarks.small import Words, methods, take, values
from tests.reference.drift import ReferenceDrift, Settings, Stepper

SHAPES = [(24, 16), (16, 40), (10,), (36, 30)]
MATRICES = [shape for shape in SHAPES if len(shape) == 2]
SIZES = [a * b for a, b in MATRICES]
NUMEL = sum(SIZES)


def matrices_of(vector: Tensor) -> list[Tensor]:
    return [part.view(shape).clone() for part, shape in zip(vector[:NUMEL].split(SIZES), MATRICES, strict=True)]


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """Of a rank's own data at its own weights."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    target = torch.randn(len(x), generator=torch.Generator().manual_seed(7))
    return 0.3 * (x - target) + torch.randn(len(x), generator=drawn)


CASES = [
    ("muon", "measured", "average", "gain", "ranks"),
    ("muon", "root", "average", "drift", "ranks"),
    ("lion", "root", "steps", "gain", "ranks"),
    ("lion", "measured", "average", "gain", "agreed"),
    ("sgd", "one", "average", "drift", "ranks"),
    ("sgd", "measured", "steps", "gain", "ranks"),
    ("sgd", "one", "steps", "gain", "ranks"),
]
DECAYS = {"lion": 1.0, "sgd": 1e-4}
"""Of matrices and vectors, where it is not 0.1."""


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_twenty_steps_are_those_of_the_reference(case: tuple[str, ...], n: int) -> None:
    optimizer, factor, longer, score, decay = case
    settings = {"optimizer": optimizer, "factor": factor, "longer": longer, "score": score, "decay": decay}
    ranks = methods(Drift, n, SHAPES, density=0.05, **settings)
    begin = values(ranks[0])
    decays = (DECAYS.get(optimizer, 0.1),) * 2
    by = Settings(**settings, density=0.05, rate=0.01, weight_decay=decays)
    reference = ReferenceDrift(matrices_of(begin), begin[NUMEL:], n, by)
    for step in range(20):
        take(ranks, torch.stack([gradient(values(ranks[i]), i, step) for i in range(n)]), 0.01, step)
        copies = [torch.cat([*(x.flatten() for x in copy), reference.vector]) for copy in reference.copies]
        rows = [gradient(copy, i, step) for i, copy in enumerate(copies)]
        reference.step([matrices_of(row) for row in rows], [row[NUMEL:] for row in rows], step)
        for method, copy in zip(ranks, reference.copies, strict=True):
            assert torch.equal(method.shared()[0], reference.agreed)
            assert torch.equal(method.flat.matrices.data, torch.cat([x.flatten() for x in copy]))
            torch.testing.assert_close(method.shared()[1], reference.vector, rtol=1e-5, atol=1e-6)
            assert isinstance(method, Drift)
            assert method.factor == pytest.approx(reference.factor, rel=1e-6)
    apart = (values(ranks[0]) - values(ranks[1])).abs().max()
    assert float(apart) > 1e-3, "copies differ"


def test_agreed_weights_move_by_the_factor_times_the_mean_drift_that_was_sent() -> None:
    generator, n = torch.Generator().manual_seed(0), 3
    ranks: list[Any] = methods(Drift, n, SHAPES, optimizer="lion", density=0.02, warm_up=8)
    for step in range(40):
        for method in ranks:
            wild = torch.randn(NUMEL, generator=generator) * 10.0 ** float(torch.randn((), generator=generator))
            method.flat.matrices.data.add_(wild)
            method.part.group.memory.gradients[:-1].add_(torch.randn(NUMEL, generator=generator))
        before, factor = ranks[0].agreed.clone(), ranks[0].factor
        copies = [method.flat.matrices.data.clone() for method in ranks]
        drive_ranks([method.meet(step) for method in ranks])
        sent = ranks[0].part.group.memory.gradients[:-1] == 0
        assert int(sent.sum()) == NUMEL if step == 0 else 0.01 < float(sent.double().mean()) < 1
        given = []
        for method, copy in zip(ranks, copies, strict=True):
            assert torch.equal(method.agreed, ranks[0].agreed), "bit for bit on all ranks"
            assert method.factor == ranks[0].factor and 1 <= method.factor <= n
            assert torch.equal(method.flat.matrices.data[~sent], copy[~sent])
            given.append((before - copy) - (method.agreed - method.flat.matrices.data))
        moved, expected = before - ranks[0].agreed, factor * torch.stack(given).mean(0)
        size = float(torch.stack(copies).abs().max())
        torch.testing.assert_close(moved[sent], expected[sent], rtol=1e-5, atol=1e-6 * size)
        assert not moved[~sent].any()


def joined(rows: Tensor) -> list[Tensor]:
    """The mean of gradients: of each matrix."""
    return matrices_of(rows.mean(0))


@pytest.mark.parametrize("optimizer", ["muon", "lion", "sgd", "adamw"])
@pytest.mark.parametrize("make", [Averaged, Today])
def test_dense_and_todays_exchange_of_everything_step_the_mean_gradient(make: type[Method], optimizer: str) -> None:
    settings = {"density": 1.0} if make is Today else {}
    ranks = methods(make, 2, SHAPES, optimizer=optimizer, **settings)
    x = matrices_of(values(ranks[0]))
    stepper, decay = Stepper(optimizer, x), DECAYS.get(optimizer, 0.1)
    for step in range(5):
        rows = torch.stack([gradient(values(ranks[i]), i, step) for i in range(2)])
        take(ranks, rows, 0.01, step)
        stepper.step(joined(rows), 0.01, decay)
        own = ranks[0].flat.matrices.data
        torch.testing.assert_close(own, torch.cat([m.flatten() for m in x]), rtol=1e-5, atol=1e-6)
    assert torch.equal(values(ranks[0]), values(ranks[1]))
    assert ranks[0].matrices.bytes_sent == 5 * 4 * NUMEL


def test_muon_leaves_embeddings_to_the_exchange_that_serves_adamw() -> None:
    """Steps of embeddings and output layer are those of the library's second moments; Muon has the matrix between."""
    ranks, n, density = [], 2, 0.05
    for rank in range(n):
        torch.manual_seed(0)
        ranks.append(Drift(Flat(Words()), Place(rank, n, 6), "muon", embeddings="second_moment", density=density))
    others, sizes = ranks[0].others, [p.numel() for p in ranks[0].flat.both]
    assert len(ranks[0].served) == 64 * 64 and len(others) == 2 * 64 * 50
    stream = torch.randn(6, n, sum(sizes), generator=torch.Generator().manual_seed(0))
    memory = ls.memories.SecondMoment(0.95)
    for rows, trace in zip(
        stream,
        ls.simulate(stream[..., others], sparsifier="union_top_k", density=density, memory=memory),
        strict=True,
    ):
        before = ranks[0].flat.matrices.data[others]
        take(ranks, rows, 0.01, trace.step)
        assert trace.divisor is not None
        expected = before * (1 - 0.001) - 0.01 * n**0.5 * trace.update / trace.divisor
        for method in ranks:
            torch.testing.assert_close(method.flat.matrices.data[others], expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(*(method.flat.matrices.data[method.served] for method in ranks))
    assert torch.equal(ranks[0].shared()[0], ranks[1].shared()[0])


def test_todays_exchange_sends_a_hundredth_and_keeps_the_rest() -> None:
    ranks: list[Any] = methods(Today, 4, SHAPES, optimizer="sgd", density=0.01)
    total = torch.zeros(NUMEL)
    for step in range(6):
        rows = torch.stack([gradient(values(ranks[i]), i, step) for i in range(4)])
        total += rows[:, :NUMEL].sum(0)
        take(ranks, rows, 0.0, step)
        average = ranks[0].flat.matrices.grad
        assert int((average != 0).sum()) <= 0.011 * NUMEL
        total -= 4 * average
    left = sum(method.parts[0].group.memory.residual[:-1] for method in ranks)
    torch.testing.assert_close(left, total, rtol=1e-4, atol=1e-4)
