"""The open loop's measures, against slow ones of the tests' own on data of the tests' own network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_sparse.core.step import Agreement, Context, Selection
from lightning_sparse.methods.sparsifiers import TopK
from lightning_sparse.tools.compare import recorded
from lightning_sparse.tools.compare.methods import DENSE, METHODS, Method, choose
from tests.covering import by_default
from tests.lockstep import Ranks
from tests.reference import measures

TOGETHER = {"random_k", "clt_k", "micro", "exdyna", "exdyna+early", "striped_top_k", "dense"} | {
    name
    for name in (method.name for method in METHODS)
    if name.startswith(("shared_top_k", "union_top_k", "mean_top_k"))
}
"""k is the number of coordinates in the update; for the others each rank picks k."""


def tail(n: int, numel: int, steps: int, seed: int = 0) -> list[Tensor]:
    """Layers of different scales, and a scale that changes on the way."""
    generator = torch.Generator().manual_seed(seed)
    layers = torch.logspace(0, 1.5, numel)
    return [
        layers * torch.randn(n, numel, generator=generator) * (1 if step < steps // 2 else 0.3) for step in range(steps)
    ]


def followed(gradients: list[Tensor], method: Method, density: float) -> list[measures.Step]:
    n, numel = gradients[0].shape
    ranks = Ranks(
        n,
        numel,
        sparsifier=method.sparsifier,
        density=density,
        exchange=method.exchange,  # type: ignore[arg-type]
        dtype=torch.float32,
    )
    steps = []
    for rows in gradients:
        outcome = ranks.step(rows)
        updated = {numel} if outcome.updates[0].indices is None else set(outcome.updates[0].indices.tolist()) - {numel}
        picks = [numel if method == DENSE else int(s.count) for s in outcome.selections]
        if method.sparsifier.agreement is Agreement.LEADER:
            picks = [max(picks)] * n  # one rank picks for all
        steps.append(
            measures.Step(
                before=torch.stack(outcome.accs).double().numpy(),
                after=torch.stack(outcome.after).double().numpy(),  # type: ignore[arg-type]
                update=outcome.averages[0].double().numpy(),
                picks=picks,
                updated=numel if method == DENSE else len(updated),
                bytes_sent=[s.bytes_sent for s in outcome.statistics],
            )
        )
    return steps


@pytest.mark.parametrize("method", by_default([*METHODS, DENSE], 8), ids=lambda method: method.name)
def test_measures_are_those_of_the_definitions(method: Method) -> None:
    gradients, density, k = tail(3, 400, 14), 0.05, 20
    if method == DENSE:
        density, k = 1.0, 400
    steps = followed(gradients, method, density)
    expected = measures.measures(steps, k, method.name in TOGETHER)
    found = recorded.compare(gradients, method, density)
    assert list(found) == list(recorded.QUANTITIES) == list(expected)
    assert found.pop("steps_to_target") == expected.pop("steps_to_target")
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_gradients_are_left_alone() -> None:
    gradients = tail(2, 100, 4)
    before = [rows.clone() for rows in gradients]
    recorded.compare(gradients, choose(["top_k"])[0], 0.1)
    assert all(map(torch.equal, gradients, before))


def test_bytes_of_topk_and_dense_by_hand() -> None:
    gradients = tail(4, 300, 3)
    # A count and 30 pairs of words to three others; a ring all-reduce of 300 words.
    assert recorded.compare(gradients, choose(["top_k"])[0], 0.1)["bytes_sent"] == 3 * (4 + 30 * 8)
    assert recorded.compare(gradients, DENSE, 1.0)["bytes_sent"] == 2 * 3 / 4 * 1200


def test_build_up_and_captured_energy_by_hand() -> None:
    # Each rank picks its own 4; together they hold 4, 4 and, best of all, 2 * 3 = 6 at the last coordinate.
    rows = torch.tensor([[4.0, 0.0, 3.0], [0.0, 4.0, 3.0]])
    found = recorded.compare([rows], choose(["top_k"])[0], 1 / 3)
    assert (found["build_up"], found["relative_density_error"], found["padding_ratio"]) == (2.0, 100.0, 1.0)
    assert found["captured"] == pytest.approx((16 + 16) / 36)


def test_nothing_at_all_is_captured_completely() -> None:
    assert recorded.compare([torch.zeros(2, 10)] * 3, choose(["top_k"])[0], 0.1)["captured"] == 1.0


@pytest.mark.parametrize(
    ("estimates", "first"),
    [
        ([1.0] * 10, 0),
        ([1.0] * 9, None),
        ([], None),
        ([2.0, 1.0, 2.0] + [1.0] * 10, 3),
        ([2.0] * 5 + [1.1] * 10, 5),  # the edges belong to the band
        ([2.0] * 5 + [0.9] * 10, 5),
        ([1.11] * 20, None),
        ([0.89] * 20, None),
        ([1.0] * 10 + [5.0] * 10, 0),  # it need not stay for ever
        ([1.0] * 9 + [5.0] + [1.0] * 9, None),
        ([float("nan")] * 3 + [1.0] * 10, 3),
    ],
)
def test_steps_to_target(estimates: list[float], first: int | None) -> None:
    assert recorded._steps_to_target(estimates) == first


def test_an_estimate_that_is_off_by_ten_percent_exactly_is_in_the_band() -> None:
    class ElevenOfTen(TopK):
        def select(self, acc: Tensor, state: None, ctx: Context) -> tuple[Selection, None]:
            return Selection(torch.arange(11), torch.tensor(11)), None

    found = recorded.compare([torch.ones(1, 40)] * 12, Method("eleven", ElevenOfTen(), lambda n: 2.0), 0.25)
    assert found["estimate"] == pytest.approx(1.1)
    assert found["steps_to_target"] == 0


def test_meaning_of_k_follows_the_agreement() -> None:
    # Where a method is new, its place in TOGETHER above is to be decided.
    together = {Agreement.DISJOINT, Agreement.SHARED, Agreement.LEADER, Agreement.IDENTICAL, Agreement.EVERYTHING}
    assert {m.name for m in [*METHODS, DENSE] if m.sparsifier.agreement in together} == TOGETHER


def test_without_gradients_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="at least one step, but got none"):
        recorded.compare([], DENSE, 1.0)


def test_a_plan_has_every_combination_once() -> None:
    jobs = recorded.plan(
        streams=["heavy_tail"], ranks=[2, 4, 2], densities=[0.1, 0.01], methods=["top_k", "dense"], steps=5, seeds=[3]
    )
    each = [(0.1, "top_k"), (1.0, "dense"), (0.01, "top_k")]
    assert [(job.ranks, job.density, job.method) for job in jobs] == [(n, *one) for n in (2, 4) for one in each]
    assert {(job.source, job.steps, job.seed) for job in jobs} == {("heavy_tail", 5, 3)}


def test_methods_that_differ_in_memory_only_are_compared_once() -> None:
    jobs = recorded.plan(streams=["heavy_tail"], ranks=[2], densities=[0.1], methods=None, seeds=[0], steps=5)
    names = [job.method for job in jobs]
    assert names == [method.name for method in METHODS if not method.name.endswith(("+momentum", "+early"))]


GOOD = {"streams": ["heavy_tail"], "ranks": [2], "densities": [0.1], "methods": ["top_k"], "seeds": [0], "steps": 5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streams": ["digit"]}, r"Unknown stream 'digit'\. Did you mean 'digits'\? Known names: digits, heavy_tail, "),
        ({"ranks": [4, 0]}, r"Expected ranks to be at least 1, but got 0\."),
        ({"methods": []}, r"Expected at least one of sparsifiers, but got none\."),
    ],
)
def test_impossible_plans_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recorded.plan(**(GOOD | settings))


def test_rows_are_measures_of_the_streams_they_name() -> None:
    jobs = recorded.plan(
        streams=["heavy_tail"], ranks=[1, 2], densities=[0.01], methods=["top_k", "micro"], seeds=[0], steps=3
    )
    rows = list(recorded.execute_all(jobs))
    assert [row.key for row in rows] == [job.key for job in jobs]
    for row in rows:
        gradients = recorded.stream("heavy_tail", ranks=row.ranks, steps=3, seed=0)
        expected = recorded.compare(gradients, choose([row.method])[0], row.density)
        assert {name: getattr(row, name) for name in recorded.QUANTITIES} == expected
