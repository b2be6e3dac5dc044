"""Signals that wait while an optimizer steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch

from lightning_sparse.engine.optimizers.hooks import uninterrupted
from lightning_sparse.engine.signals import SAVING, Hold


class Stepping(torch.optim.SGD):
    """Does something between two parameters."""

    in_between: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        first, second = self.param_groups[0]["params"]
        with torch.no_grad():
            first.add_(1)
            self.in_between()
            second.add_(1)
        return loss


@pytest.fixture
def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]


@pytest.fixture
def seen(parameters: list[torch.nn.Parameter]) -> Iterator[list[Any]]:
    """What handlers have seen: the signal, and the parameters at that time."""
    seen: list[Any] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, lambda got, _: seen.append((got, *(p.item() for p in parameters))))
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_handlers_see_whole_steps_in_the_order_of_the_signals(parameters: Any, seen: list[Any]) -> None:
    optimizer = Stepping(parameters, 1.0)
    optimizer.in_between = lambda: send(signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2)  # type: ignore[method-assign]
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)]
    optimizer.step()
    assert {entry[1:] for entry in seen} == {(1.0, 0.0)}  # without help, they see half of a step
    seen.clear()
    with uninterrupted():
        optimizer.step()
    assert seen == [(signal.SIGUSR2, 2.0, 2.0), (signal.SIGUSR1, 2.0, 2.0)]
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)] == handlers
    seen.clear()
    optimizer.step()  # of which nobody is asked to take care
    assert seen[0] == (signal.SIGUSR2, 3.0, 2.0)


@pytest.mark.parametrize("positional", [True, False])
def test_while_a_closure_runs_signals_are_handled_at_once(parameters: Any, seen: list[Any], positional: bool) -> None:
    optimizer = Stepping(parameters, 1.0)
    optimizer.in_between = lambda: send(signal.SIGUSR2)  # type: ignore[method-assign]

    def closure() -> float:
        send(signal.SIGUSR1)
        assert seen == [(signal.SIGUSR1, 0.0, 0.0)]
        return 7.0

    with uninterrupted():
        assert (optimizer.step(closure) if positional else optimizer.step(closure=closure)) == 7.0
    assert seen[1:] == [(signal.SIGUSR2, 1.0, 1.0)]


def test_ctrl_c_comes_after_the_step_and_what_came_behind_it_is_not_lost(parameters: Any, seen: list[Any]) -> None:
    optimizer = Stepping(parameters, 1.0)
    optimizer.in_between = lambda: send(signal.SIGINT, signal.SIGUSR1)  # type: ignore[method-assign]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            optimizer.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert [p.item() for p in parameters] == [1.0, 1.0]
    assert seen == [(signal.SIGUSR1, 1.0, 1.0)]


def test_handlers_are_given_back_after_an_error(parameters: Any, seen: list[Any]) -> None:
    optimizer = Stepping(parameters, 1.0)

    def fail() -> None:
        send(signal.SIGUSR1)
        raise ZeroDivisionError

    optimizer.in_between = fail  # type: ignore[method-assign]
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ZeroDivisionError), uninterrupted():
        optimizer.step()
    assert seen == [(signal.SIGUSR1, 1.0, 0.0)]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_handler_that_is_set_meanwhile_stays(seen: list[Any]) -> None:
    hold = Hold()
    hold.start()
    signal.signal(signal.SIGUSR1, lambda *_: seen.append("new"))
    send(signal.SIGUSR1, signal.SIGUSR2)
    hold.end()
    assert seen == ["new", (signal.SIGUSR2, 0.0, 0.0)]


def test_some_signals_can_be_held_earlier_than_others(seen: list[Any]) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("interrupt"))
    try:
        hold = Hold()
        hold.start(SAVING)
        send(signal.SIGUSR1, signal.SIGINT)
        assert seen == ["interrupt"]
        hold.start()
        send(signal.SIGINT)
        assert seen == ["interrupt"]
        hold.end()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["interrupt", (signal.SIGUSR1, 0.0, 0.0), "interrupt"]


def test_other_threads_hold_nothing(parameters: Any, seen: list[Any]) -> None:
    optimizer = Stepping(parameters, 1.0)

    def step() -> None:
        with uninterrupted():
            optimizer.step()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert [p.item() for p in parameters] == [1.0, 1.0]
    assert seen == []


def test_an_optimizer_without_hooks_steps_as_it_would(parameters: Any, seen: list[Any]) -> None:
    class Wrapped:
        """What Lightning takes for an optimizer."""

        param_groups: ClassVar[Any] = [{"params": parameters}]

        def step(self, closure: Any = None) -> Any:
            return closure()

    with uninterrupted() as hold:  # type: ignore[arg-type]

        def closure() -> str:
            hold.start(SAVING)
            send(signal.SIGUSR1)
            assert not seen
            return "loss"

        assert Wrapped().step(closure) == "loss"
    assert [number for number, *_ in seen] == [signal.SIGUSR1]
