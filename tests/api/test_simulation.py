"""The public simulation: lazy, strict about shapes, and without threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import AllGather, Steps
from lightning_sparse.core.step import Agreement, Selection
from tests.lockstep import noise


def test_gradients_are_asked_for_one_step_at_a_time() -> None:
    asked = []

    def stream() -> Iterator[Tensor]:
        for step in range(3):
            asked.append(step)
            yield noise(2, 10, seed=step)

    traces = ls.simulate(stream(), sparsifier="top_k", density=0.2)
    assert asked == []
    for step in range(3):
        assert next(traces).step == step
        assert asked == list(range(step + 1))
    with pytest.raises(StopIteration):
        next(traces)


def test_a_step_of_the_stream_is_let_go_before_the_next_one_is_asked_for() -> None:
    # A stream may be larger than memory.
    alive: list[weakref.ref] = []

    def stream() -> Iterator[Tensor]:
        for step in range(4):
            rows = noise(2, 10, seed=step)
            alive.append(weakref.ref(rows))
            yield rows
            del rows

    for trace in ls.simulate(stream(), sparsifier="top_k", density=0.2):
        assert sum(ref() is not None for ref in alive[: trace.step]) == 0


def test_the_stream_may_depend_on_the_traces() -> None:
    # Gradient descent on |x - target|^2 / 2 with two ranks that see different targets: the mean target is found.
    targets = torch.tensor([[3.0, -1.0, 0.0, 2.0], [1.0, 1.0, 4.0, 2.0]])
    position = torch.zeros(4)

    def stream() -> Iterator[Tensor]:
        while True:
            yield position - targets

    for trace in ls.simulate(stream(), sparsifier="top_k", density=0.25):
        position -= 0.02 * trace.update
        if trace.step == 600:
            break
    # exp(-0.02 * 600) of the way is left, and the position swings by 0.02 times what is held back, residuals of a few
    # units. A rank alone would end at a distance of 1 or 2.
    torch.testing.assert_close(position, targets.mean(0), rtol=0, atol=0.1)


def test_no_threads_are_started() -> None:
    before = threading.active_count()
    for _ in ls.simulate([noise(3, 10)] * 3, sparsifier="micro", density=0.2):
        assert threading.active_count() == before


def test_the_error_of_a_stream_surfaces_as_itself() -> None:
    def stream() -> Iterator[Tensor]:
        yield noise(2, 10)
        raise RuntimeError("the disk is gone")

    traces = ls.simulate(stream(), sparsifier="top_k", density=0.2)
    next(traces)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(traces)


@dataclass(frozen=True)
class FailsOnOneRank(ls.sparsifiers.Sparsifier):
    """Rank 1 fails in step 1, before or after it has talked to the others."""

    agreement: ClassVar[Agreement] = Agreement.INDEPENDENT
    exchange: ClassVar[str] = "gather_pairs"
    talks: bool = False

    def select(self, acc: Tensor, state: None, ctx: ls.core.step.Context) -> Steps[tuple[Selection, None]]:
        if self.talks:
            yield AllGather(acc[:1])
        if ctx.step == 1 and ctx.rank == 1:
            raise ArithmeticError("rank 1 has had enough")
        return Selection(torch.tensor([0]), torch.tensor(1), aligned=True), None


@pytest.mark.parametrize("talks", [False, True])
def test_the_error_of_one_rank_surfaces_as_itself(talks: bool) -> None:
    traces = ls.simulate(iter([noise(4, 10)] * 3), sparsifier=FailsOnOneRank(talks), density=0.1)
    next(traces)
    with pytest.raises(ArithmeticError, match="rank 1 has had enough"):
        next(traces)
    with pytest.raises(StopIteration):
        next(traces)


def test_a_group_that_the_method_cannot_serve_is_refused_at_the_first_step() -> None:
    traces = ls.simulate([noise(2, 10)], sparsifier=ls.sparsifiers.ExDyna(variant="published"), density=0.2)
    with pytest.raises(ValueError, match="at least 32768 coordinates"):
        next(traces)


@pytest.mark.parametrize(
    ("rows", "came"),
    [
        (torch.zeros(3), r"\(3,\) torch.float32"),
        (torch.zeros(1, 2, 3), r"\(1, 2, 3\) torch.float32"),
        (torch.zeros(0, 3), r"\(0, 3\) torch.float32"),
        (torch.zeros(2, 0), r"\(2, 0\) torch.float32"),
        (torch.zeros(2, 3, dtype=torch.int64), r"\(2, 3\) torch.int64"),
        (torch.zeros(2, 3).to_sparse(), r"\(2, 3\) torch.float32 torch.sparse_coo"),
        (torch.zeros(2, 3, device="meta"), r"\(2, 3\) torch.float32 on meta"),
        ([[1.0, 2.0]], "list"),
    ],
)
def test_gradients_of_a_wrong_shape_or_type_are_refused_with_what_came(rows: object, came: str) -> None:
    with pytest.raises(ValueError, match=rf"one \(n, numel\) tensor of floats of 16 bits or more, but got {came}\."):
        next(ls.simulate([rows], sparsifier="top_k", density=0.2))


def test_what_is_no_stream_of_gradients_is_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"^Expected gradients to be an iterable of \(n, numel\) tensors, but got 3"):
        ls.simulate(3, sparsifier="top_k", density=0.2)  # type: ignore[arg-type]


def test_gradients_must_keep_the_dtype_of_the_first_step() -> None:
    traces = ls.simulate([noise(2, 10).float(), noise(2, 10).double()], sparsifier="top_k", density=0.2)
    next(traces)
    message = "torch.float32 on cpu as in the first step, but got .* torch.float64 on cpu"
    with pytest.raises(ValueError, match=message):
        next(traces)


@pytest.mark.parametrize("shape", [(2, 11), (3, 10)])
def test_gradients_must_keep_the_shape_of_the_first_step(shape: tuple[int, int]) -> None:
    traces = ls.simulate([noise(2, 10), torch.zeros(shape)], sparsifier="top_k", density=0.2)
    next(traces)
    with pytest.raises(ValueError, match=rf"of \(2, 10\) .* as in the first step, but got \({shape[0]}, {shape[1]}\)"):
        next(traces)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsifier": "tpok"}, r"Unknown sparsifier 'tpok'\. Did you mean 'top_k'"),
        ({"sparsifier": ls.sparsifiers.TopK}, r"write TopK\(\)"),
        ({"density": 0.0}, r"Expected density to be a number in \(0, 1\]"),
        ({"density": "0.1"}, r"Expected density to be a number in \(0, 1\]"),
        ({"exchange": "gather_paris"}, r"Unknown exchange 'gather_paris'\. Did you mean 'gather_pairs'"),
        ({"memory": "residul"}, r"Unknown memory 'residul'\. Did you mean 'residual'"),
        (
            {"sparsifier": "everything", "exchange": "gather_pairs"},
            r"The exchange 'gather_pairs' accepts selections that are disjoint or independent, but Everything's are "
            r"everything\. Exchanges that fit: dense\.",
        ),
        (
            {"memory": "second_moment", "exchange": "gather_pairs"},
            r"SecondMoment needs an exchange that averages second moments, too, and 'gather_pairs' does not\. "
            r"Exchanges that fit: dense, reduce_union, packed_union\.",
        ),
        (
            {"memory": ls.memories.ClipByNorm(1.0, ls.memories.SecondMoment()), "exchange": "gather_pairs"},
            "ClipByNorm needs an exchange that averages second",
        ),
    ],
)
def test_wrong_settings_are_refused_at_the_call_before_anything_is_asked_for(settings: dict, message: str) -> None:
    def stream() -> Iterator[Tensor]:
        pytest.fail("asked for gradients")
        yield

    with pytest.raises(ValueError, match=message):
        ls.simulate(stream(), **({"sparsifier": "top_k", "density": 0.1} | settings))


@pytest.mark.parametrize(
    ("name", "instance"),
    [
        ("top_k", ls.sparsifiers.TopK()),
        ("ExDyna", ls.sparsifiers.ExDyna()),
        ("hard-threshold", ls.sparsifiers.HardThreshold()),
        ("MiCRO", ls.sparsifiers.MiCRO()),
    ],
)
def test_a_name_stands_for_the_class_with_its_defaults(name: str, instance: ls.sparsifiers.Sparsifier) -> None:
    stream = torch.stack([noise(2, 300, seed=seed) for seed in range(3)])
    by_name, by_instance = (
        [trace.update for trace in ls.simulate(stream, sparsifier=s, density=0.1)] for s in (name, instance)
    )
    assert torch.equal(torch.stack(by_name), torch.stack(by_instance))


def test_an_exchange_by_name_is_the_exchange_by_instance_and_none_is_the_natural_one() -> None:
    stream = torch.stack([noise(2, 300, seed=seed) for seed in range(3)])

    def updates(exchange: ls.exchanges.Exchange | str | None) -> Tensor:
        return torch.stack([t.update for t in ls.simulate(stream, sparsifier="top_k", density=0.1, exchange=exchange)])

    assert torch.equal(updates("reduce_union"), updates(ls.exchanges.ReduceUnion()))
    assert torch.equal(updates(None), updates("gather_pairs"))
    assert not torch.equal(updates(None), updates("reduce_union"))


def test_a_schedule_sets_the_density_of_each_step() -> None:
    stream = torch.stack([noise(2, 100, seed=seed) for seed in range(4)])
    traces = list(ls.simulate(stream, sparsifier="top_k", density=ls.Warmup(0.4, 0.1, steps=2)))
    assert [trace.target_density for trace in traces] == pytest.approx([0.4, 0.2, 0.1, 0.1])
    assert [trace.counts.tolist() for trace in traces] == [[40, 40], [20, 20], [10, 10], [10, 10]]


def test_a_steps_n_numel_tensor_is_a_stream() -> None:
    stream = torch.stack([noise(2, 10, seed=seed) for seed in range(3)])
    a, b = (list(ls.simulate(s, sparsifier="top_k", density=0.2)) for s in (stream, list(stream)))
    assert len(a) == len(b) == 3
    assert all(torch.equal(x.update, y.update) for x, y in zip(a, b, strict=True))


def test_an_empty_stream_has_no_traces() -> None:
    assert list(ls.simulate([], sparsifier="top_k", density=0.2)) == []


def test_gradients_that_require_grad_are_taken_as_numbers() -> None:
    rows = noise(2, 10).requires_grad_()
    trace = next(ls.simulate([rows], sparsifier="top_k", density=0.2))
    assert not trace.update.requires_grad


def test_the_fields_of_a_trace_are_stable() -> None:
    # People's scripts read these.
    assert ls.api.simulation.StepTrace._fields == (
        "step",
        "target_density",
        "counts",
        "indices",
        "threshold",
        "update",
        "divisor",
        "residual_norm",
        "quantities",
        "bytes_sent",
        "partition",
        "ranks",
    )


def test_a_trace_by_hand() -> None:
    # Two ranks, k = 1. Rank 0 keeps 1 and -1, rank 1 keeps 1 and 2: norms sqrt(2) and sqrt(5).
    rows = torch.tensor([[4.0, 0.0, -1.0, 1.0], [0.0, 8.0, 1.0, 2.0]], dtype=torch.bfloat16)
    trace = next(ls.simulate([rows], sparsifier="top_k", density=0.25))
    assert (trace.step, trace.target_density) == (0, 0.25)
    assert trace.counts.dtype == trace.indices.dtype == torch.int64
    assert trace.counts.tolist() == [1, 1]
    assert trace.indices.tolist() == [0, 1]
    assert trace.threshold is None
    assert trace.update.dtype == torch.bfloat16
    assert trace.update.tolist() == [2.0, 4.0, 0.0, 0.0]
    assert trace.residual_norm.dtype == trace.bytes_sent.dtype == torch.float64
    assert trace.residual_norm.tolist() == pytest.approx([2**0.5, 5**0.5])
    assert (trace.density, trace.density_error, trace.padding_ratio, trace.build_up) == (0.5, 0.25, 1.0, 2.0)
    assert trace.bytes_sent.tolist() == [12.0, 12.0]  # a count, an index and a float32 value to one other rank
    assert trace.partition is None


def test_a_trace_of_a_method_with_ranges_has_thresholds_and_the_partition() -> None:
    # MiCRO at step 1: rank 0 looks at the second half. k = 2, all picks on rank 0's range.
    zero = torch.zeros(2, 6)
    rows = torch.tensor([[0.0, 0.0, 0.0, 5.0, 4.0, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0, 9.0]])
    _, trace = ls.simulate([zero, rows], sparsifier="micro", density=0.34)
    assert trace.partition.dtype == torch.int64
    assert trace.partition.tolist() == [[3, 6], [0, 3]]
    assert trace.counts.tolist() == [2, 0]
    assert trace.padding_ratio == 2.0
    assert trace.threshold.dtype == torch.float64
    assert trace.threshold.shape == (2,)
    assert trace.threshold[0] == trace.threshold[1]
    assert trace.indices.tolist() == [3, 4]
    assert trace.update.tolist() == [0.0, 0.0, 0.0, 3.0, 2.0, 0.0]  # rank 1 adds its values at the union


def test_indices_of_a_trace_are_ascending_without_padding_or_repetition() -> None:
    for sparsifier in ("top_k", "micro", "exdyna"):
        for trace in ls.simulate([noise(4, 200, seed=s) for s in range(4)], sparsifier=sparsifier, density=0.1):
            assert torch.equal(trace.indices, torch.unique(trace.indices))
            assert int(trace.indices.max()) < 200
            assert torch.equal(trace.update.nonzero().flatten(), trace.indices)


def test_without_memory_the_residual_norm_is_zero() -> None:
    trace = next(ls.simulate([noise(2, 10)], sparsifier="top_k", density=0.2, memory=ls.memories.NoMemory()))
    assert trace.residual_norm.tolist() == [0.0, 0.0]


def test_two_simulations_may_be_interleaved() -> None:
    stream = torch.stack([noise(2, 50, seed=seed) for seed in range(5)])
    alone = [t.update for t in ls.simulate(stream, sparsifier="exdyna", density=0.1)]
    first = ls.simulate(stream, sparsifier="exdyna", density=0.1)
    second = ls.simulate(stream, sparsifier="micro", density=0.2)
    both = [a.update for a, _ in zip(first, second, strict=True)]
    assert torch.equal(torch.stack(both), torch.stack(alone))


def test_a_skipped_step_moves_no_schedule_and_no_turn() -> None:
    stream = torch.ones(4, 2, 100)
    stream[1, 1, 5] = torch.nan
    traces = list(ls.simulate(stream, sparsifier="clt_k", density=ls.Warmup(0.5, 0.05, 3)))
    assert [trace.step for trace in traces] == [0, 1, 2, 3]
    first, skipped, again, last = (trace.target_density for trace in traces)
    assert (first, last) == (0.5, ls.Warmup(0.5, 0.05, 3)(2))
    assert skipped == again == ls.Warmup(0.5, 0.05, 3)(1)


@pytest.mark.parametrize(
    ("gradients", "what"),
    [(torch.tensor(1.0), "an iterable"), (torch.ones(2, 2, 4).to(torch.float8_e5m2), "of 16 bits or more")],
)
def test_tensors_that_are_no_streams_are_refused(gradients: Tensor, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        next(ls.simulate(gradients, sparsifier="top_k", density=0.5))
