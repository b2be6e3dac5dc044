"""Counts of an engine's exchanges, and what guards residuals while they change."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

from lightning_sparse.engine.signals import Hold


class Counts(NamedTuple):
    """Numbers of exchanges so far."""

    step: int = 0
    """Exchanges that counted."""
    skipped: int = 0
    """Exchanges that were skipped."""
    streak: int = 0
    """Exchanges skipped since the last one that counted."""
    flushes: int = 0
    """Times that residuals were emptied between two steps."""

    @property
    def number(self) -> int:
        """Exchanges and flushes that counted: equal on ranks whose states belong together."""
        return self.step + self.flushes


class Record:
    """Counts exchanges, and guards what is remembered while it changes.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.counts = Counts()
        """Of exchanges that have settled."""
        self.latest_skipped = False
        """Whether the latest of them was skipped."""
        self.lock = threading.RLock()
        """Held while a state is read, and while what is remembered changes; never while a message is waited for."""
        self.held: Set[str] = frozenset()
        """Parameters that optimizers hold, as far as they have been seen."""
        self.absorbed: Set[str] = frozenset()
        """Parameters of which a gradient was absorbed whose exchange is not settled."""
        self._whole = True

    @contextmanager
    def changing(self, absorbs: Set[str] = frozenset()) -> Iterator[None]:
        """Let what is remembered change: nobody reads it meanwhile, and signals wait.

        An error in between leaves some of it changed: states are refused from then on.

        Args:
            absorbs: parameters of which a new gradient is absorbed.
        """
        hold = Hold()
        hold.start()
        try:
            with self.lock:
                whole, self._whole = self._whole, False
                self.absorbed = self.absorbed | absorbs
                yield
                self._whole = whole
        finally:
            hold.end()

    def check_whole(self) -> None:
        """Raise if an error has ended a change of what is remembered half-way.

        Raises:
            RuntimeError: saying so.
        """
        if not self._whole:
            raise RuntimeError(
                "An error has ended a step while residuals were being changed: some of them are of before it and some "
                "of after it. They cannot be saved; go on from an earlier checkpoint."
            )

    def restart(self, counts: Counts) -> None:
        """Count from here, with other groups, between two steps."""
        self.counts, self.latest_skipped, self.absorbed = counts, False, frozenset()

    def count(self, skipped: bool) -> None:
        """Count an exchange that has settled; within :meth:`changing`."""
        step, before, streak, flushes = self.counts
        self.counts = Counts(step, before + 1, streak + 1, flushes) if skipped else Counts(step + 1, before, 0, flushes)
        self.latest_skipped, self.absorbed = skipped, frozenset()

    def count_flush(self) -> None:
        """Count a flush: all residuals have been handed out as averages, and are empty; within :meth:`changing`."""
        self.counts = self.counts._replace(flushes=self.counts.flushes + 1)
        self.latest_skipped = False

    def hold(self, ids: Set[int]) -> Set[str]:
        """Note that an optimizer holds the parameters of these ids; return the names of the engine's among them."""
        names = {self._names[key] for key in ids & self._names.keys()}
        if not names <= self.held:
            self.held = self.held | names
        return names
