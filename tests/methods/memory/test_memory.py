"""Memories by hand and against plain loops: what they absorb, what leaves them, what a skipped step leaves."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import ops
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.step import Absorbed, Context, Update
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.kinds import check_pair
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.engine.state.schema import with_pending
from lightning_sparse.methods.memory import NoMemory, Residual, as_memory
from lightning_sparse.methods.memory.base import FeedbackState
from tests.covering import in_one_test
from tests.lockstep import noise
from tests.static_path import static_path

CPU = torch.device("cpu")
CTX = Context(step=0, density=0.5, rank=0, world_size=4)
MEMORIES = [
    Residual(),
    Residual(decay=0.5),
    ls.memories.LowPass(0.25),
    ls.memories.MomentumCorrection(),
    ls.memories.MomentumCorrection(0.5, nesterov=True, masking=False),
    ls.memories.AdamCorrection(),
    ls.memories.AdamCorrection(beta1=0.9),
    ls.memories.SecondMoment(),
    ls.memories.ClipByNorm(1.0),
    ls.memories.ClipByNorm(1.0, ls.memories.MomentumCorrection()),
    NoMemory(),
]
every_memory = in_one_test("memory", ((memory,) for memory in MEMORIES), apart=0)


@pytest.fixture(params=["host", "static"], autouse=True)
def formulation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the host knows whether a step counts, and where only the device does."""
    with static_path() if request.param == "static" else nullcontext():
        yield


def update(indices: list[int] | None, values: list[float], sent: list[int] | None, sent_values=None) -> Update:
    return Update(
        indices=None if indices is None else torch.tensor(indices, dtype=torch.int64),
        values=torch.tensor(values),
        sent=None if sent is None else torch.tensor(sent, dtype=torch.int64),
        sent_values=None if sent_values is None else torch.tensor(sent_values),
        counts=torch.tensor([len(values)]),
        union=torch.tensor(len(values)),
        second=torch.ones(len(values)),
    )


def release(sent: list[int] | None, sent_values: list[float] | None = None) -> Update:
    """An update where it does not matter what the others sent."""
    return update(sent, [9.0] * len(sent or [0]), sent, sent_values)


def wide(what: Update) -> Update:
    """For float64 accumulators; the values here are exact in float32."""
    return what._replace(sent_values=None if what.sent_values is None else what.sent_values.double())


def remembering(*values: float) -> FeedbackState:
    state = Residual().init(len(values), CPU, torch.float32)
    Residual().residual(state).copy_(torch.tensor(values))
    return state


def residual(state: FeedbackState) -> list[float]:
    return Residual().residual(state).tolist()


def absorb(memory: ls.memories.Memory, state: Any, grad: Tensor, ctx: Context = CTX) -> Absorbed:
    return memory.absorb_(state, Gradient([grad.clone()]), ctx)


def accumulate(memory: ls.memories.Memory, state: Any, grad: Tensor, ctx: Context = CTX) -> Tensor:
    """A copy of the accumulator of a step: it is what is remembered, and settling changes it."""
    found = absorb(memory, state, grad, ctx)
    assert found.finite
    return found.acc.clone()


def settle(memory: ls.memories.Memory, state: Any, what: Update, rounding: Tensor | None = None) -> None:
    """Let a step count."""
    memory.settle_(state, what, rounding)


def snapshot(memory: ls.memories.Memory, state: Any) -> dict[str, bytes]:
    """The bits of all that is remembered."""
    vectors = {name: vector[:-1].numpy().tobytes() for name, vector in memory.vectors(state).items()}
    return vectors | {name: counter.numpy().tobytes() for name, counter in memory.counters(state).items()}


def copies(memory: ls.memories.Memory, state: Any) -> dict[str, Tensor]:
    return {name: vector[:-1].clone() for name, vector in memory.vectors(state).items()}


def takes_a_norm(memory: ls.memories.Memory) -> bool:
    return isinstance(memory, ls.memories.ClipByNorm | ls.memories.SecondMoment)


# ---- what all memories do


@every_memory
def test_the_accumulator_is_what_is_remembered(memory: ls.memories.Memory) -> None:
    state = memory.init(5, CPU, torch.float32)
    residual = memory.residual(state)
    for seed in range(3):
        found = absorb(memory, state, noise(1, 5, seed=seed, dtype=torch.float32)[0])
        assert bool(found.finite) and found.finite.shape == () and found.finite.dtype == torch.bool
        if residual is not None and not isinstance(memory, ls.memories.LowPass):
            assert found.acc.data_ptr() == residual.data_ptr()
        settle(memory, state, release([1, 3]), torch.tensor([0.5, 0.5]))
        assert residual is None or memory.residual(state).data_ptr() == residual.data_ptr()
    assert all(bool(vector.any()) for vector in memory.vectors(state).values())


@every_memory
def test_settling_changes_what_was_sent_and_nothing_else(memory: ls.memories.Memory) -> None:
    state = memory.init(5, CPU, torch.float32)
    for seed in range(3):
        acc = accumulate(memory, state, noise(1, 5, seed=seed, dtype=torch.float32)[0])
        before, counted = copies(memory, state), memory.counters(state).get("steps")
        steps = None if counted is None else float(counted)
        settle(memory, state, release([1, 3]), torch.tensor([0.5, 0.25]))
        after = copies(memory, state)
        if isinstance(memory, ls.memories.LowPass):  # follows everywhere
            before["residual"] += memory.beta * (acc[:-1] - before["residual"])
        for name, vector in after.items():
            assert torch.equal(vector[[0, 2, 4]], before[name][[0, 2, 4]])
            assert name != "second" or torch.equal(vector, before[name])
        if after and not isinstance(memory, ls.memories.LowPass):
            assert after["residual"][[1, 3]].tolist() == [0.5, 0.25]
        assert steps is None or float(memory.counters(state)["steps"]) == steps + 1 == seed + 1


@every_memory
def test_the_spare_slot_is_zero_whatever_the_padding_carries(memory: ls.memories.Memory) -> None:
    state, grad = memory.init(2, CPU, torch.float32), torch.tensor([1.0, 1.0])
    padded = slice(0, 3 if ops.static_shapes(CPU) else 1)  # nothing is padded where the host knows sizes
    for sent_values in (None, [0.5, 7.0, 7.0], None):
        acc = absorb(memory, state, grad).acc
        assert acc.shape == (3,)
        assert bool(acc[:2].isfinite().all())
        assert acc[2] == 0
        what = release([0, 2, 2][padded], None if sent_values is None else sent_values[padded])
        settle(memory, state, what, torch.tensor([0.5, 9.0, 9.0])[padded])
        assert all(vector[2] == 0 for vector in memory.vectors(state).values())


@every_memory
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), -float("inf")])
def test_a_coordinate_that_is_not_finite_is_left_as_it_is(memory: ls.memories.Memory, spoilt: float) -> None:
    """The others are absorbed, as if it had been 0; but where a norm is taken, which nobody knows."""
    disturbed, calm = (memory.init(4, CPU, torch.float32) for _ in range(2))
    for seed in range(4):
        gradient = noise(1, 4, seed=seed, dtype=torch.float32)[0]
        if seed != 1:  # else two steps are skipped in a row
            accs = [accumulate(memory, state, gradient) for state in (disturbed, calm)]
            assert torch.equal(*accs)
            settle(memory, disturbed, release([seed]))
            settle(memory, calm, release([seed]))
        before, bits = copies(memory, disturbed), snapshot(memory, disturbed)
        gradient[2] = spoilt
        found = absorb(memory, disturbed, gradient)
        assert not found.finite
        if takes_a_norm(memory):
            assert snapshot(memory, disturbed) == bits
            continue
        assert isinstance(memory, NoMemory) or bool(found.acc.isfinite().all())
        gradient[2] = 0.0
        absorb(memory, calm, gradient)
        for name, vector in memory.vectors(calm).items():
            assert torch.equal(memory.vectors(disturbed)[name][2], before[name][2])
            vector[2] = before[name][2]
        assert snapshot(memory, disturbed) == snapshot(memory, calm)


@pytest.mark.parametrize("memory", [Residual(), ls.memories.MomentumCorrection()], ids=repr)
def test_sums_that_are_too_large_are_left_as_they_are_too(memory: ls.memories.Memory) -> None:
    state, large = memory.init(3, CPU, torch.float32), torch.tensor([1.0, 6e37, 2.0])
    found = [bool(absorb(memory, state, large).finite) for _ in range(8)]
    assert found[0] and not found[-1]
    residual, *velocity = memory.vectors(state).values()
    assert 5e37 < residual[1] < 3.4e38 and residual[0] >= 8
    assert all(vector[1].isfinite() for vector in velocity)


@every_memory
def test_a_skipped_step_keeps_what_it_has_absorbed(memory: ls.memories.Memory) -> None:
    state = memory.init(4, CPU, torch.float32)
    for seed in range(5):
        absorb(memory, state, noise(1, 4, seed=seed, dtype=torch.float32)[0])
        before = snapshot(memory, state)
        memory.skip_(state)
        assert isinstance(memory, ls.memories.LowPass) or snapshot(memory, state) == before
        if seed % 2:
            settle(memory, state, release([seed]))


@every_memory
@pytest.mark.parametrize("skipped", [False, True], ids=["counts", "skipped"])
def test_what_is_remembered_of_unused_parameters_stays(memory: ls.memories.Memory, skipped: bool) -> None:
    parts = {
        "memory": memory,
        "sparsifier": ls.sparsifiers.TopK(),
        "exchange": ls.exchanges.EXCHANGES.resolve("reduce_union"),
    }
    ctx, spans = Context(0, 0.5, 0, 1), [slice(0, 1), slice(2, 4)]
    state = init_group(5, torch.float32, CPU, ctx, memory=memory, sparsifier=parts["sparsifier"])
    for grad in noise(3, 5, dtype=torch.float32):
        made = drive(exchange_group(grad, state, ctx, **parts), TorchCollective())
        state = settle_group(state, made, bool(made.skipped), memory)
    before = copies(memory, state.memory)
    grad = torch.tensor([0.0, 64.0, 0.0, 0.0, float("nan") if skipped else 0.25])
    made = drive(exchange_group(grad, state, ctx, **parts, unused=spans), TorchCollective())
    assert bool(made.skipped) == skipped
    for name, vector in copies(memory, state.memory).items():
        for span in spans:
            assert torch.equal(vector[span], before[name][span])
    absorbed = copies(memory, state.memory)
    settle_group(state, made, bool(made.skipped), memory, spans)
    for name, vector in copies(memory, state.memory).items():
        assert not skipped or isinstance(memory, ls.memories.LowPass) or torch.equal(vector, absorbed[name])
        for span in spans:
            assert torch.equal(vector[span], before[name][span])
        assert torch.equal(vector, before[name]) == (skipped and takes_a_norm(memory))


@every_memory
def test_averages_that_nobody_has_applied_are_given_back(memory: ls.memories.Memory) -> None:
    state = memory.init(5, CPU, torch.float32)
    absorb(memory, state, torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    before = copies(memory, state)
    given = torch.tensor([0.0, 0.5, 0.0, 0.25, 8.0])
    some = {"indices": torch.tensor([1, 3, 4], dtype=torch.int32), "values": given[[1, 3, 4]]}
    for pending in (some, {"values": given}):
        saved = {"parameters": {"p": copies(memory, state)}, "spans": {"p": [0, 5, 5]}, "pending": {"p": pending}}
        found = with_pending(saved, 1)["parameters"]["p"]
        for name, vector in before.items():
            assert torch.equal(found[name], vector + (given if name == "residual" else torch.zeros(5)))
            assert torch.equal(copies(memory, state)[name], vector)
    assert all(vector[-1] == 0 for vector in memory.vectors(state).values())


@every_memory
def test_narrow_gradients_enter_wide_accumulators(memory: ls.memories.Memory) -> None:
    # The values have 7 bits and fit into bfloat16: nothing may be rounded on the way but by clipping.
    gradients = [noise(1, 6, seed=seed, grain=16)[0] for seed in range(4)]
    states = [memory.init(6, CPU, torch.float32) for _ in range(2)]
    clips = isinstance(memory, ls.memories.ClipByNorm)
    for gradient in gradients:
        narrow, wide = (
            accumulate(memory, state, gradient.to(dtype))
            for state, dtype in zip(states, (torch.bfloat16, torch.float32), strict=True)
        )
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow, wide, rtol=2.0**-6 if clips else 0, atol=2.0**-7 if clips else 0)
        for state in states:
            settle(memory, state, release([1, 4]))


@every_memory
def test_states_have_the_accumulators_dtype(memory: ls.memories.Memory) -> None:
    for dtype in (torch.float32, torch.float64):
        state = memory.init(3, CPU, dtype)
        assert accumulate(memory, state, torch.ones(3, dtype=dtype)).dtype == dtype
        assert all(vector.dtype == dtype and vector.shape == (4,) for vector in memory.vectors(state).values())


# ---- Residual


def test_the_residual_takes_the_gradient_in_at_once() -> None:
    state = remembering(1.0, 2.0, 3.0)
    assert accumulate(Residual(), state, torch.tensor([10.0, 20.0, 30.0])).tolist() == [11.0, 22.0, 33.0, 0.0]
    assert residual(state) == [11.0, 22.0, 33.0]


def test_a_residual_that_decays_counts_less_from_step_to_step() -> None:
    memory, state = Residual(decay=0.5), remembering(8.0, 4.0)
    assert accumulate(memory, state, torch.tensor([1.0, 1.0])).tolist() == [5.0, 3.0, 0.0]
    settle(memory, state, release([1]))
    assert residual(state) == [5.0, 0.0]
    assert accumulate(memory, state, torch.tensor([0.0, 0.0])).tolist() == [2.5, 0.0, 0.0]


def step(state: FeedbackState, grad: list[float], what: Update, rounding: Tensor | None = None) -> FeedbackState:
    accumulate(Residual(), state, torch.tensor(grad))
    settle(Residual(), state, what, rounding)
    return state


def test_what_was_sent_is_taken_out_and_the_rest_stays() -> None:
    state = remembering(1.0, 2.0, 3.0)
    state = step(state, [1.0, 1.0, 1.0], update([1], [9.0], sent=[1]))
    assert residual(state) == [2.0, 0.0, 4.0]
    # The next step starts from there. Padding (coordinate 3) is no coordinate.
    state = step(state, [0.5, 0.5, 0.5], update([0, 3], [9.0, 9.0], sent=[0, 3, 3]))
    assert residual(state) == [0.0, 0.5, 4.5]
    assert residual(step(state, [0.0, 0.0, 0.0], update([], [], sent=[]))) == [0.0, 0.5, 4.5]


def test_sent_none_means_everything() -> None:
    state = step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], update(None, [9.0] * 3, sent=None))
    assert residual(state) == [0.0, 0.0, 0.0]


def test_what_was_rounded_on_the_wire_stays_as_its_rounding_error() -> None:
    some = update([0, 2], [9.0, 9.0], sent=[0, 2], sent_values=[1.5, 4.0])
    assert residual(step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], some)) == [0.5, 3.0, 0.0]
    every = update(None, [9.0] * 3, sent=None, sent_values=[1.5, 3.0, 4.5])
    assert residual(step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], every)) == [0.5, 0.0, -0.5]


def test_what_a_cast_of_the_average_lost_is_added_once_for_each_coordinate() -> None:
    state = remembering(1.0, 2.0, 3.0)
    rounding = torch.tensor([0.25, 0.5, 0.5, 7.0])
    # Coordinate 2 appears twice with the same value, and coordinate 3 is the padding index, on devices.
    slots = slice(0, 4 if ops.static_shapes(CPU) else 3)
    state = step(state, [0.0] * 3, update([0, 2, 2, 3][slots], [9.0] * 3, sent=[0]), rounding[slots])
    assert residual(state) == [0.25, 2.0, 3.5]
    assert accumulate(Residual(), state, torch.zeros(3)).tolist() == [0.25, 2.0, 3.5, 0.0]
    state = step(state, [0.0] * 3, update(None, [9.0] * 3, sent=None), torch.tensor([1.0, 2.0, 3.0]))
    assert residual(state) == [1.0, 2.0, 3.0]


def test_no_memory_remembers_nothing() -> None:
    memory = NoMemory()
    state = memory.init(3, CPU, torch.float64)
    first = accumulate(memory, state, torch.tensor([1.0, 2.0, 3.0])).tolist()
    settle(memory, state, update([0], [1.0], sent=[0]), torch.tensor([5.0]))
    assert first == [1.0, 2.0, 3.0, 0.0]
    assert accumulate(memory, state, torch.tensor([4.0, 5.0, 6.0])).tolist() == [4.0, 5.0, 6.0, 0.0]
    assert memory.residual(state) is None


# ---- LowPass


@pytest.mark.parametrize("beta", [0.25, 0.5, 1.0])
def test_the_low_pass_follows_its_formula(beta: float) -> None:
    memory, e = ls.memories.LowPass(beta), np.zeros(7)
    state = memory.init(7, CPU, torch.float64)
    rng = np.random.default_rng(0)
    for _ in range(12):
        gradient = rng.integers(-64, 64, 7) / 8
        acc = accumulate(memory, state, torch.tensor(gradient))
        assert acc[:-1].tolist() == pytest.approx(list(e + gradient), abs=1e-12)
        sent, released = np.zeros(7), rng.choice(7, 3, replace=False)
        sent[released] = (e + gradient)[released].round()  # on the wire
        # What the cast of the mean loses counts like what was not sent.
        rounding = torch.tensor([0.125, 0.25, 0.0], dtype=torch.float64)
        settle(memory, state, wide(release(released.tolist(), sent[released].tolist())), rounding)
        e = e + beta * (gradient - sent)
        e[released] += beta * rounding.numpy()
        assert residual(state) == pytest.approx(list(e), abs=1e-12)


def test_the_low_pass_keeps_its_part_of_a_skipped_step() -> None:
    stream = torch.zeros(6, 2, 4)
    stream[0, 0], stream[1, 0, 0], stream[1, 1, 3] = torch.tensor([1.0, 2.0, 3.0, 4.0]), 10.0, math.nan
    plain, filtered = (
        [step.update for step in ls.simulate(stream, sparsifier="top_k", density=0.25, memory=memory)]
        for memory in (ls.memories.Residual(), ls.memories.LowPass(1.0))
    )
    assert max(float(update[0]) for update in plain if update.isfinite().all()) == 5.5
    for one, other in zip(plain, filtered, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_squares_that_overflow_skip_no_step() -> None:
    for step in ls.simulate(
        torch.full((3, 2, 4), 1e21), sparsifier="top_k", density=0.5, memory=ls.memories.AdamCorrection()
    ):
        assert step.update.isfinite().all()


# ---- MomentumCorrection


class PlainDGC:
    """One rank of Deep Gradient Compression, coordinate by coordinate."""

    def __init__(self, numel: int, momentum: float, nesterov: bool, masking: bool) -> None:
        self.u, self.v = [0.0] * numel, [0.0] * numel
        self.momentum, self.nesterov, self.masking = momentum, nesterov, masking

    def accumulate(self, gradient: list[float]) -> list[float]:
        for j, g in enumerate(gradient):
            if self.nesterov:
                self.u[j] = self.momentum * (self.u[j] + g)
                self.v[j] += self.u[j] + g
            else:
                self.u[j] = self.momentum * self.u[j] + g
                self.v[j] += self.u[j]
        return list(self.v)

    def send(self, places: list[int], values: list[float]) -> None:
        for j, value in zip(places, values, strict=True):
            self.v[j] -= value
            if self.masking and len(places) < len(self.v):
                self.u[j] = 0.0


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_correction_follows_the_paper(nesterov: bool, masking: bool) -> None:
    memory = ls.memories.MomentumCorrection(0.75, nesterov, masking)
    state, plain = memory.init(6, CPU, torch.float64), PlainDGC(6, 0.75, nesterov, masking)
    rng = np.random.default_rng(1)
    for number in range(20):
        gradient = rng.integers(1, 64, 6) / 8
        expected = plain.accumulate(gradient.tolist())
        acc = accumulate(memory, state, torch.tensor(gradient))
        assert acc[:-1].tolist() == pytest.approx(expected, abs=1e-12)
        places = sorted(rng.choice(6, rng.integers(0, 7), replace=False).tolist())
        values = [expected[j] if number % 3 else math.ceil(expected[j]) for j in places]
        plain.send(places, values)
        settle(memory, state, wide(release(places, None if number % 3 else [float(v) for v in values])))
        assert residual(state) == pytest.approx(plain.v, abs=1e-12)
        assert memory.vectors(state)["momentum"][:-1].tolist() == pytest.approx(plain.u, abs=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_without_masking_every_velocity_is_sent_or_kept(nesterov: bool) -> None:
    memory = ls.memories.MomentumCorrection(0.5, nesterov, masking=False)
    state = memory.init(8, CPU, torch.float64)
    buffer, velocities, sent = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    for seed in range(10):
        gradient = noise(1, 8, seed=seed)[0]
        buffer = 0.5 * buffer + gradient
        velocities = velocities + (gradient + 0.5 * buffer if nesterov else buffer)
        acc = accumulate(memory, state, gradient)
        places = [seed % 8, (3 * seed + 1) % 8]
        released = sorted(set(places))
        sent = sent.double()
        sent[released] += acc[released]
        settle(memory, state, release(released))
        assert torch.equal(velocities, sent + memory.residual(state))  # halves of multiples of 1/256: exact


ALL = {
    "none": release(None),
    "coordinates": release([0, 1, 2, 3]),
    "repeated and padded": release([0, 1, 1, 2, 3, 3, 4, 4]),
}


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("everything", ALL.values(), ids=ALL)
def test_where_everything_is_sent_momentum_is_that_of_sgd(nesterov: bool, masking: bool, everything: Update) -> None:
    memory = ls.memories.MomentumCorrection(0.5, nesterov, masking)
    state = memory.init(4, CPU, torch.float64)
    ours, theirs = (torch.nn.Parameter(torch.zeros(4, dtype=torch.float64)) for _ in range(2))
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.5, nesterov=nesterov)
    for seed in range(20):
        theirs.grad = noise(1, 4, seed=seed)[0]
        acc = accumulate(memory, state, theirs.grad)[:-1]
        settle(memory, state, everything)
        sgd.step()
        with torch.no_grad():
            ours -= acc
        assert torch.equal(ours, theirs)  # 20 halvings of multiples of 1/256 fit into float64
    assert residual(state) == [0.0] * 4


def momentum_after(what: Update) -> list[float]:
    memory = ls.memories.MomentumCorrection(0.5)
    state = memory.init(4, CPU, torch.float32)
    accumulate(memory, state, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    settle(memory, state, what)
    return memory.vectors(state)["momentum"][:-1].tolist()


def test_masking_clears_what_was_sent_and_nothing_else() -> None:
    assert momentum_after(release([])) == [1.0, 2.0, 3.0, 4.0]
    assert momentum_after(release([1])) == [1.0, 0.0, 3.0, 4.0]
    # Many slots are not many coordinates: only two are covered.
    assert momentum_after(release([1, 1, 2, 2, 4, 4])) == [1.0, 0.0, 0.0, 4.0]
    assert momentum_after(release([0, 1, 2, 4, 4])) == [0.0, 0.0, 0.0, 4.0]
    assert momentum_after(release([0, 1, 2, 3])) == [1.0, 2.0, 3.0, 4.0]


def test_masking_spares_what_was_dropped_on_the_way() -> None:
    # Coordinate 0 came through, 1 was dropped and given back, 2 is another rank's that was dropped here.
    some = update([0], [9.0], sent=[0, 1, 2], sent_values=[1.0, 0.0, -5.0])
    assert momentum_after(some) == [0.0, 2.0, 3.0, 4.0]
    # Rounded on the wire, and everything: no masking, even where the rounded value is zero.
    assert momentum_after(release([0, 1, 2, 3], [1.0, 0.0, 3.0, 4.0])) == [1.0, 2.0, 3.0, 4.0]
    assert momentum_after(release(None, [1.0, 0.0, 3.0, 4.0])) == [1.0, 2.0, 3.0, 4.0]


# ---- ClipByNorm


@pytest.mark.parametrize("n", [1, 4, 9])
def test_a_long_gradient_is_shortened_to_the_limit_over_the_root_of_n(n: int) -> None:
    memory, ctx = ls.memories.ClipByNorm(6.0), CTX._replace(world_size=n)
    gradient = torch.tensor([30.0, -40.0, 0.0])
    acc = accumulate(memory, memory.init(3, CPU, torch.float32), gradient, ctx)
    limit = 6 / math.sqrt(n)
    assert acc.tolist() == pytest.approx([0.6 * limit, -0.8 * limit, 0.0, 0.0])


@pytest.mark.parametrize("values", [[3.0, 4.0, 0.0], [0.0, 0.0, 0.0], [1e-30, 0.1, -0.3]])
def test_a_short_gradient_is_not_touched(values: list[float]) -> None:
    memory, ctx = ls.memories.ClipByNorm(5.0), CTX._replace(world_size=1)
    acc = accumulate(memory, memory.init(3, CPU, torch.float32), torch.tensor(values), ctx)
    assert torch.equal(acc[:-1], torch.tensor(values))


@pytest.mark.parametrize("numel", [1, (1 << 16) - 1, 1 << 16, 300_001])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_of_long_vectors_are_exact_to_the_dtype(numel: int, dtype: torch.dtype) -> None:
    gradient = (10 * torch.randn(numel, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = math.sqrt(math.fsum(g * g for g in gradient.tolist()))
    memory = ls.memories.ClipByNorm(1.0)
    state = memory.init(numel, CPU, torch.promote_types(dtype, torch.float32))
    acc = accumulate(memory, state, gradient, CTX._replace(world_size=1))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    assert expected > 1
    assert math.sqrt(math.fsum(a * a for a in acc.tolist())) == pytest.approx(1, rel=tolerance)


@pytest.mark.parametrize(
    ("memory", "plain"),
    [
        (ls.memories.LowPass(1.0), Residual()),
        (ls.memories.ClipByNorm(1e9, ls.memories.MomentumCorrection(0.5)), ls.memories.MomentumCorrection(0.5)),
    ],
    ids=repr,
)
def test_a_memory_that_changes_nothing_is_the_plain_one(memory: ls.memories.Memory, plain: ls.memories.Memory) -> None:
    states = [one.init(5, CPU, torch.float32) for one in (memory, plain)]
    for seed in range(4):
        for one, state in zip((memory, plain), states, strict=True):
            accumulate(one, state, noise(1, 5, seed=seed, dtype=torch.float32)[0])
            settle(one, state, release([seed]), torch.tensor([0.5]))
        assert snapshot(memory, states[0]) == snapshot(plain, states[1])
        assert torch.equal(memory.residual(states[0]), plain.residual(states[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_whose_squares_overflow_are_clipped_like_others(dtype: torch.dtype) -> None:
    [trace] = ls.simulate(
        [torch.full((2, 100), 1e25, dtype=dtype)],
        sparsifier="everything",
        density=1.0,
        memory=ls.memories.ClipByNorm(2.0),
    )
    assert float(trace.update.norm()) == pytest.approx(2.0 / 2**0.5)


# ---- AdamCorrection


def adam_steps(kind: str, memory: ls.memories.AdamCorrection, steps: int, **settings: Any) -> tuple[Tensor, Tensor]:
    """Parameters after steps of torch's optimizer and of ours with SGD behind it, one rank, everything sent."""
    theirs, ours = (torch.nn.Parameter(noise(1, 7, seed=99)[0]) for _ in range(2))
    betas = (memory.beta1, memory.beta2)
    adam = getattr(torch.optim, kind)([theirs], lr=0.01, betas=betas, eps=memory.eps, **settings)
    sgd = torch.optim.SGD([ours], lr=0.01, **(settings if kind == "AdamW" else {}))
    state = memory.init(7, CPU, torch.float64)
    for seed in range(steps):
        theirs.grad = noise(1, 7, seed=seed)[0] * 10.0 ** (seed % 5 - 3)
        acc = accumulate(memory, state, theirs.grad, CTX._replace(world_size=1))
        ours.grad = acc[:-1]
        settle(memory, state, release(None))
        adam.step()
        sgd.step()
    return ours.detach(), theirs.detach()


@pytest.mark.parametrize("settings", [{}, {"beta1": 0.5, "beta2": 0.7}, {"beta1": 0.9}, {"eps": 0.1}], ids=str)
def test_alone_at_full_density_it_is_adam_and_adamw(settings: dict[str, float]) -> None:
    memory = ls.memories.AdamCorrection(**settings)
    for kind, decay in (("Adam", 0.0), ("AdamW", 0.0), ("AdamW", 0.1)):
        ours, theirs = adam_steps(kind, memory, 20, weight_decay=decay)
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)


def test_a_group_is_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = adam_steps("Adam", ls.memories.AdamCorrection(), 5)[0]
    for name in ("HOST_PIECE", "PIECE"):
        monkeypatch.setattr(sys.modules["lightning_sparse.methods.memory.base"], name, 3)
    assert torch.equal(adam_steps("Adam", ls.memories.AdamCorrection(), 5)[0], whole)


# ---- settings


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (ls.memories.Residual, {"decay": 0}, r"decay to be a number in \(0, 1\], but got 0"),
    (ls.memories.Residual, {"decay": 1.5}, "but got 1.5"),
    (ls.memories.Residual, {"decay": True}, "but got True"),
    (ls.memories.LowPass, {"beta": 0.0}, r"beta to be a number in \(0, 1\], but got 0.0"),
    (ls.memories.LowPass, {"beta": float("nan")}, "but got nan"),
    (ls.memories.MomentumCorrection, {"momentum": 1}, r"momentum to be a number in \[0, 1\), but got 1"),
    (ls.memories.MomentumCorrection, {"momentum": "high"}, "but got 'high'"),
    (ls.memories.AdamCorrection, {"beta1": 1.0}, r"beta1 to be a number in \[0, 1\), but got 1.0"),
    (ls.memories.AdamCorrection, {"beta2": -0.1}, "but got -0.1"),
    (ls.memories.AdamCorrection, {"eps": 0}, r"eps to be a number of at least 1.2e-38, but got 0"),
    (ls.memories.SecondMoment, {"eps": 1e-45}, r"eps to be a number of at least 1.2e-38, but got 1e-45"),
    (ls.memories.ClipByNorm, {"max_norm": 0}, "max_norm to be a positive number, but got 0"),
    (ls.memories.ClipByNorm, {"max_norm": float("nan")}, "but got nan"),
    (ls.memories.ClipByNorm, {"max_norm": 1.0, "memory": "residual"}, r"memory to be a Memory such as Residual\(\)"),
    (ls.memories.WeightDecay, {"decay": -0.1}, "decay to be a finite number of at least 0, but got -0.1"),
    (ls.memories.WeightDecay, {"decay": float("nan")}, "but got nan"),
    (ls.memories.WeightDecay, {"decay": True}, "but got True"),
    (ls.memories.WeightDecay, {"decay": 0.1, "min_ndim": -1}, "min_ndim to be an integer of at least 0, but got -1"),
    (ls.memories.WeightDecay, {"decay": 0.1, "memory": "residual"}, "Expected memory to be a Memory"),
]


@pytest.mark.parametrize(("memory", "settings", "message"), BAD, ids=[f"{m.__name__} {s}" for m, s, _ in BAD])
def test_bad_settings_fail_at_construction(memory: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory(**settings)


def test_edges_of_the_ranges_are_allowed() -> None:
    for cls, edges in ((Residual, [1]), (ls.memories.LowPass, [1]), (ls.memories.AdamCorrection, [0, 0])):
        cls(*edges)
    assert ls.memories.MomentumCorrection(0).momentum == 0


def test_as_memory() -> None:
    assert as_memory(None) == Residual()
    assert as_memory(ls.memories.LowPass(0.5)) == ls.memories.LowPass(0.5)
    assert as_memory("low_pass") == as_memory("LowPass") == ls.memories.LowPass()
    with pytest.raises(ValueError, match=r"Unknown memory 'lowpas'\. Did you mean 'low_pass'\? Known names: adam_corr"):
        as_memory("lowpas")
    with pytest.raises(
        ValueError, match=r"Memory 'clip_by_norm' needs settings: write ClipByNorm\(max_norm=\.\.\.\)\."
    ):
        as_memory("clip_by_norm")
    with pytest.raises(ValueError, match="Expected a memory or its name, but got 3"):
        as_memory(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got the class Residual: write Residual\(\)"):
        as_memory(Residual)  # type: ignore[arg-type]


def test_every_memory_has_a_name() -> None:
    classes = {
        value
        for value in vars(ls.memories).values()
        if isinstance(value, type) and issubclass(value, ls.memories.Memory)
    }
    assert {cls for _, cls in ls.memories.MEMORIES.items()} == classes - {ls.memories.Memory}


def test_what_serves_dense_groups() -> None:
    assert Residual().for_dense() == ls.memories.LowPass().for_dense() == NoMemory().for_dense() == NoMemory()
    for memory in (ls.memories.MomentumCorrection(0.5), ls.memories.AdamCorrection()):
        assert memory.for_dense() is memory
        assert ls.memories.ClipByNorm(1.0, memory).for_dense() == ls.memories.ClipByNorm(1.0, memory)
    assert ls.memories.ClipByNorm(1.0).for_dense() == ls.memories.ClipByNorm(1.0, NoMemory())


def optimizer(name: str, **settings: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))], **settings)


FITTING = [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "weight_decay": 0.1})]
WITH_MOMENTUM = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adam", {}),
    ("AdamW", {}),
    ("NAdam", {}),
    ("RMSprop", {"momentum": 0.5}),
]
ADAPTING = [*WITH_MOMENTUM[1:], ("RMSprop", {}), ("Adagrad", {}), ("Adadelta", {}), ("Rprop", {}), ("Adafactor", {})]


@pytest.mark.parametrize(("name", "settings"), FITTING, ids=str)
@every_memory
def test_every_memory_takes_plain_sgd(memory: ls.memories.Memory, name: str, settings: dict[str, Any]) -> None:
    check_pair(memory, optimizer(name, **settings))


@pytest.mark.parametrize(("name", "settings"), WITH_MOMENTUM, ids=str)
def test_momentum_twice_is_warned_of(name: str, settings: dict[str, Any]) -> None:
    check_pair(Residual(), optimizer(name, **settings))
    for memory in (ls.memories.MomentumCorrection(), ls.memories.ClipByNorm(1.0, ls.memories.MomentumCorrection())):
        with pytest.warns(UserWarning, match=rf"{name} would apply momentum to them a second time.*momentum=0"):
            check_pair(memory, optimizer(name, **settings))


@pytest.mark.parametrize(("name", "settings"), [*ADAPTING, WITH_MOMENTUM[0], ("LBFGS", {})], ids=str)
def test_adam_correction_takes_nothing_but_plain_sgd(name: str, settings: dict[str, Any]) -> None:
    for memory in (ls.memories.AdamCorrection(), ls.memories.ClipByNorm(1.0, ls.memories.AdamCorrection())):
        with pytest.raises(ValueError, match=rf"but got {name}.*Set torch.optim.SGD\(lr=<the lr you"):
            check_pair(memory, optimizer(name, **settings))


def test_a_parameter_group_with_momentum_of_its_own_is_noticed() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": m} for m in (0.0, 0.9)]
    with pytest.raises(ValueError, match="but got SGD with momentum"):
        check_pair(ls.memories.AdamCorrection(), torch.optim.SGD(groups, lr=0.1))


# ---- WeightDecay


def decayed(
    memory: ls.memories.Memory, parameters: list[tuple[slice, Tensor]] | None, grad: list[float]
) -> list[float]:
    state = memory.init(len(grad), CPU, torch.float32)
    return accumulate(memory, state, torch.tensor(grad), CTX._replace(parameters=parameters))[:-1].tolist()


def test_decay_is_added_to_the_gradients_of_matrices_and_vectors() -> None:
    matrix, vector = torch.tensor([[8.0, -4.0]]), torch.tensor([16.0])
    parameters = [(slice(0, 2), matrix), (slice(2, 3), vector)]
    assert decayed(ls.memories.WeightDecay(0.25), parameters, [1.0, 1.0, 1.0]) == [3.0, 0.0, 5.0]
    assert decayed(ls.memories.WeightDecay(0.25, min_ndim=2), parameters, [1.0, 1.0, 1.0]) == [3.0, 0.0, 1.0]
    inside = ls.memories.ClipByNorm(5.0, ls.memories.WeightDecay(0.25, ls.memories.Residual()))
    assert decayed(inside, parameters, [30.0, 0.0, 40.0]) == pytest.approx(
        [3 / CTX.world_size**0.5 + 2, -1, 4 / CTX.world_size**0.5 + 4]
    )
    assert matrix.tolist() == [[8.0, -4.0]]


def test_decay_follows_the_order_of_memory_as_gradients_in_buckets_do() -> None:
    parameter = torch.arange(2 * 3 * 2 * 2, dtype=torch.float32).view(2, 3, 2, 2)
    last = parameter.to(memory_format=torch.channels_last)
    expected = parameter.permute(0, 2, 3, 1).flatten().tolist()
    assert decayed(ls.memories.WeightDecay(1.0), [(slice(0, 24), last)], [0.0] * 24) == expected
    gaps = torch.arange(12, dtype=torch.float32).view(3, 4)[:, ::2]
    assert decayed(ls.memories.WeightDecay(1.0), [(slice(0, 6), gaps)], [0.0] * 6) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_decay_with_momentum_is_that_of_sgd() -> None:
    memory, ours = (
        ls.memories.WeightDecay(0.125, ls.memories.MomentumCorrection(0.5)),
        torch.zeros(4, dtype=torch.float64),
    )
    theirs = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    sgd = torch.optim.SGD([theirs], lr=0.5, momentum=0.5, weight_decay=0.125)
    state = memory.init(4, CPU, torch.float64)
    assert memory.reads_parameters and ls.memories.ClipByNorm(1.0, memory).reads_parameters
    for seed in range(8):
        theirs.grad = noise(1, 4, seed=seed)[0]
        ctx = CTX._replace(parameters=[(slice(0, 4), ours)])
        acc = accumulate(memory, state, theirs.grad, ctx)[:-1]
        settle(memory, state, wide(release(None)))
        sgd.step()
        ours -= 0.5 * acc
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-14, atol=1e-14)


def test_decay_needs_a_model_and_no_second_decay() -> None:
    with pytest.raises(ValueError, match="WeightDecay needs the parameters of a model"):
        decayed(ls.memories.WeightDecay(0.1), None, [1.0])
    parameter = torch.nn.Parameter(torch.zeros(1))
    with pytest.warns(UserWarning, match="WeightDecay adds the decay.*SGD would apply its own"):
        check_pair(ls.memories.WeightDecay(0.1), torch.optim.SGD([parameter], 0.1, weight_decay=0.1))
    check_pair(ls.memories.WeightDecay(0.1), torch.optim.SGD([parameter], 0.1))
    with pytest.warns(UserWarning, match="MomentumCorrection sends velocities"):
        memory = ls.memories.WeightDecay(0.1, ls.memories.MomentumCorrection(0.9))
        check_pair(memory, torch.optim.SGD([parameter], 0.1, momentum=0.9))


def test_transforms_leave_all_to_the_memory_inside() -> None:
    """But for the gradient, what dense groups keep, and where gradients may lie: in one vector, which is changed."""
    own = {"absorb_", "for_dense", "for_whole", "takes_runs"}
    inside = ls.memories.SecondMoment(0.9)
    outside = ls.memories.ClipByNorm(0.1, inside)
    public = {name for name in dir(ls.memories.Memory) if not name.startswith("_")}
    assert {name for name in public - own if getattr(outside, name) != getattr(inside, name)} == set()
