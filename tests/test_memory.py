"""The residual by hand: what enters, what is taken out, what a void step leaves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lightning_sparse.memory
from lightning_sparse.memory import FeedbackState, NoMemory, Residual
from lightning_sparse.types import Update

CPU = torch.device("cpu")
GO, VOID = torch.tensor(False), torch.tensor(True)


@pytest.fixture(params=["host", "static"], autouse=True)
def formulation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of committing a step, the second without looking at the flag."""
    if request.param == "static":
        monkeypatch.setattr(lightning_sparse.memory, "static_shapes", lambda device: True)


def update(indices: list[int] | None, values: list[float], sent: list[int] | None, sent_values=None) -> Update:
    return Update(
        indices=None if indices is None else torch.tensor(indices),
        values=torch.tensor(values),
        sent=None if sent is None else torch.tensor(sent, dtype=torch.int64),
        sent_values=None if sent_values is None else torch.tensor(sent_values),
        counts=torch.tensor([len(values)]),
        union=torch.tensor(len(values)),
    )


def remembering(*values: float) -> FeedbackState:
    state = Residual().init(len(values), CPU, torch.float32)
    state.residual[:-1] = torch.tensor(values)
    return state


def residual(state: FeedbackState) -> list[float]:
    return Residual().residual(state).tolist()


def test_accumulate_adds_the_gradient_and_changes_neither_gradient_nor_residual() -> None:
    state, grad = remembering(1.0, 2.0, 3.0), torch.tensor([10.0, 20.0, 30.0])
    acc = Residual().accumulate_(state, grad)
    assert acc.tolist() == [11.0, 22.0, 33.0, 0.0]
    assert residual(state) == [1.0, 2.0, 3.0]
    assert grad.tolist() == [10.0, 20.0, 30.0]


def test_the_spare_slot_of_the_accumulator_is_zero_whatever_was_there() -> None:
    state = remembering(1.0, 2.0)
    state.acc.fill_(float("nan"))
    assert Residual().accumulate_(state, torch.tensor([1.0, 1.0, float("inf")])).tolist() == [2.0, 3.0, 0.0]
    scratch = torch.full((3,), float("nan"))
    assert NoMemory().accumulate_(scratch, torch.tensor([1.0, 1.0, float("inf")])).tolist() == [1.0, 1.0, 0.0]


def test_a_narrow_gradient_enters_a_wide_accumulator_exactly() -> None:
    state = remembering(2.0**-20, 0.0)
    grad = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    assert Residual().accumulate_(state, grad).tolist() == [1.0 + 2.0**-20, 3.0, 0.0]


def step(state: FeedbackState, grad: list[float], what: Update, void: Tensor = GO) -> list[float]:
    Residual().accumulate_(state, torch.tensor(grad))
    Residual().forget_(state, what, void)
    return residual(state)


def test_what_was_sent_is_taken_out_and_the_rest_stays() -> None:
    state = remembering(1.0, 2.0, 3.0)
    assert step(state, [1.0, 1.0, 1.0], update([1], [9.0], sent=[1])) == [2.0, 0.0, 4.0]
    # The next step starts from there. Padding (coordinate 3) is no coordinate.
    assert step(state, [0.5, 0.5, 0.5], update([0, 3], [9.0, 9.0], sent=[0, 3, 3])) == [0.0, 0.5, 4.5]
    assert step(state, [0.0, 0.0, 0.0], update([], [], sent=[])) == [0.0, 0.5, 4.5]


def test_sent_none_means_everything() -> None:
    assert step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], update(None, [9.0] * 3, sent=None)) == [0.0, 0.0, 0.0]


def test_what_was_rounded_on_the_wire_stays_as_its_rounding_error() -> None:
    some = update([0, 2], [9.0, 9.0], sent=[0, 2], sent_values=[1.5, 4.0])
    assert step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], some) == [0.5, 3.0, 0.0]
    every = update(None, [9.0] * 3, sent=None, sent_values=[1.5, 3.0, 4.5])
    assert step(remembering(1.0, 2.0, 3.0), [1.0, 1.0, 1.0], every) == [0.5, 0.0, -0.5]


def test_a_void_step_changes_nothing_even_if_the_accumulator_is_spoilt() -> None:
    state = remembering(1.0, 2.0, 3.0)
    assert step(state, [float("nan")] * 3, update([1], [float("nan")], sent=[1]), VOID) == [1.0, 2.0, 3.0]
    assert step(state, [1.0, 1.0, 1.0], update([1], [9.0], sent=[1])) == [2.0, 0.0, 4.0]


def test_what_a_cast_of_the_average_lost_is_added_once_for_each_coordinate() -> None:
    state = remembering(1.0, 2.0, 3.0)
    rounding = torch.tensor([0.25, 0.5, 0.5, 7.0])
    # Coordinate 2 appears twice with the same value, and coordinate 3 is the padding index.
    Residual().keep_(state, update([0, 2, 2, 3], [9.0] * 4, sent=[0]), rounding, GO)
    assert residual(state) == [1.25, 2.0, 3.5]
    assert Residual().accumulate_(state, torch.zeros(3)).tolist() == [1.25, 2.0, 3.5, 0.0]
    Residual().keep_(state, update(None, [9.0] * 3, sent=None), torch.tensor([1.0, 1.0, 1.0]), GO)
    assert residual(state) == [2.25, 3.0, 4.5]


def test_a_void_step_loses_nothing_to_a_cast() -> None:
    state = remembering(1.0, 2.0, 3.0)
    for what in (update([0, 2], [9.0] * 2, sent=[0]), update(None, [9.0] * 3, sent=None)):
        Residual().keep_(state, what, torch.full_like(what.values, float("nan")), VOID)
    assert residual(state) == [1.0, 2.0, 3.0]


def test_spans_set_aside_are_empty_until_they_are_brought_back() -> None:
    state, spans = remembering(1.0, 2.0, 3.0, 4.0, 5.0), [slice(0, 1), slice(2, 4)]
    aside = Residual().set_aside_(state, spans)
    assert residual(state) == [0.0, 2.0, 0.0, 0.0, 5.0]
    assert [piece.tolist() for piece in aside] == [[1.0], [3.0, 4.0]]
    # A step in between goes on without them, and swaps the buffers.
    assert step(state, [0.0, 1.0, 0.0, 0.0, 1.0], update([1], [9.0], sent=[1])) == [0.0, 0.0, 0.0, 0.0, 6.0]
    Residual().bring_back_(state, spans, aside)
    assert residual(state) == [1.0, 0.0, 3.0, 4.0, 6.0]


def test_no_memory_remembers_nothing() -> None:
    memory = NoMemory()
    state = memory.init(3, CPU, torch.float64)
    first = memory.accumulate_(state, torch.tensor([1.0, 2.0, 3.0])).tolist()
    memory.forget_(state, update([0], [1.0], sent=[0]), GO)
    memory.keep_(state, update([0], [1.0], sent=[0]), torch.tensor([5.0]), GO)
    aside = memory.set_aside_(state, [slice(0, 2)])
    memory.bring_back_(state, [slice(0, 2)], aside)
    assert first == [1.0, 2.0, 3.0, 0.0]
    assert memory.accumulate_(state, torch.tensor([4.0, 5.0, 6.0])).tolist() == [4.0, 5.0, 6.0, 0.0]
    assert memory.residual(state) is None
    assert state.dtype == torch.float64
