"""What an engine held after its latest step and before it, and which of the two belongs to the weights.

An exchange is concluded in backward, and its average is applied later, by an optimizer. In between, the weights are of
before the step, and so must be whatever is saved. Nothing here is ever changed but replaced, in one assignment, so that
a signal handler or another thread may look at any moment.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.engine.group import GroupVersion
from lightning_sparse.engine.optimizers.kinds import ids_of
from lightning_sparse.engine.skip import SkipFlag

Surplus = Mapping[str, tuple[float, int]]
"""What changes of learning rates have left in residuals, see
:class:`~lightning_sparse.engine.optimizers.learning_rates`."""


class Counts(NamedTuple):
    """Numbers of exchanges so far."""

    step: int = 0
    """Exchanges that counted."""
    void: int = 0
    """Exchanges that were skipped."""
    streak: int = 0
    """Exchanges skipped since the last one that counted."""
    flushes: int = 0
    """Times that residuals were emptied between two steps."""


class Version(NamedTuple):
    """What counts after an exchange, or at the start."""

    groups: tuple[GroupVersion, ...]
    rates: Mapping[str, float]
    """Latest learning rates."""
    surplus: Surplus
    """What changes of learning rates have left in residuals."""
    start: Counts
    """Counts before the exchange."""
    skipped: SkipFlag | None = None
    """Whether the exchange counted for nothing; None: there was none."""

    @property
    def void(self) -> bool:
        """Whether the exchange counted for nothing; may wait for the device."""
        return self.skipped is not None and bool(self.skipped)

    @property
    def counts(self) -> Counts:
        """Counts after the exchange; may wait for the device."""
        step, void, streak, flushes = self.start
        if self.skipped is None:
            return self.start
        return Counts(step, void + 1, streak + 1, flushes) if self.skipped else Counts(step + 1, void, 0, flushes)

    @property
    def number(self) -> int:
        """Equal on all ranks, and different for versions that differ."""
        counts = self.counts
        return counts.step + counts.flushes


class Handout:
    """The averages that an exchange has handed out, and who has applied them.

    A parameter has taken its average when it was written to, or when an optimizer that holds it has finished a step.

    Args:
        parameters: those that got an average, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = parameters
        self._before = {name: parameter._version for name, parameter in parameters.items()}
        self._stepped: Set[str] = frozenset()

    def step(self, names: Set[str]) -> None:
        """An optimizer that holds these has finished a step."""
        self._stepped = self._stepped | names

    @property
    def names(self) -> Set[str]:
        """Names of the parameters that got an average."""
        return self._before.keys()

    def applied(self, held: Set[str]) -> Set[str]:
        """Names of the parameters whose average was applied; all, when no other one will be.

        Args:
            held: parameters that optimizers hold; empty: nobody knows yet.
        """
        stepped = self._stepped
        done = {name for name, p in self._parameters.items() if name in stepped or p._version != self._before[name]}
        expected = self.names & held if held else self.names
        return self.names if done and expected <= done else done


class History(NamedTuple):
    """The latest version, and the one before while it may still be the one that belongs to the weights."""

    latest: Version
    before: Version | None = None
    handout: Handout | None = None

    def numbers(self, names: Mapping[str, Parameter], held: Set[str]) -> list[int]:
        """Which version belongs to the weights: as a whole, and of each parameter.

        Args:
            names: of all parameters, in order.
            held: see :meth:`Handout.applied`.
        """
        latest = self.latest.number
        if self.before is None or self.handout is None or self.latest.void:
            return [latest] * (1 + len(names))
        before, applied = self.before.number, self.handout.applied(held)
        whole = latest if applied == self.handout.names else before
        waiting = self.handout.names - applied
        return [whole, *(latest if name in applied else before if name in waiting else whole for name in names)]


class Record:
    """The history of an engine, and who applies its averages.

    Args:
        parameters: by name.
        names: of parameters, by id.
    """

    def __init__(self, parameters: Mapping[str, Parameter], names: Mapping[int, str]) -> None:
        self._names = names
        self.history = History(Version((), {}, {}, Counts()))
        self.lock = threading.RLock()
        """Held while a state is read, and while buffers of an old version are given free to be written to."""
        self._parameters = parameters
        self.held: Set[str] = frozenset()
        """Parameters that optimizers hold, as far as they have been seen."""
        self._handouts = 0
        self._handed_out: dict[str, int] = {}
        """The number of the handout in which a parameter got its latest average."""
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The number of handouts when an optimizer took its latest step."""

    @property
    def latest(self) -> Version:
        """What counts after the latest exchange."""
        return self.history.latest

    def numbers(self, history: History) -> list[int]:
        """Which version of a history belongs to the weights: as a whole, and of each parameter.

        The history is the caller's, who may look while another thread replaces it.
        """
        return history.numbers(self._parameters, self.held)

    def restart(
        self, groups: Sequence[GroupVersion], rates: Mapping[str, float], surplus: Surplus, start: Counts
    ) -> None:
        """Other groups, between two steps."""
        self.history = History(Version(tuple(groups), rates, surplus, start))
        self._handed_out = {}

    def begin_step(self) -> None:
        """From here on, buffers of the version before may be written to; the lock must be held."""
        self.history = History(self.latest)

    def commit(self, groups: Sequence[GroupVersion], skipped: SkipFlag, names: Set[str]) -> None:
        """What groups have formed in an exchange counts from now on; until it is applied, what was before is kept.

        Args:
            groups: all of them.
            skipped: whether the exchange counts for nothing.
            names: of the parameters that got an average.
        """
        before = self.latest
        latest = before._replace(groups=tuple(groups), start=before.counts, skipped=skipped)
        self._go_on_with(History(latest, before, self._handout(names)))

    def flush(self, groups: Sequence[GroupVersion], names: Set[str]) -> None:
        """Residuals of these parameters are empty from now on: all of them have been handed out as averages."""
        with self.lock:
            before, counts = self.latest, self.latest.counts
            start = counts._replace(flushes=counts.flushes + 1)
            latest = before._replace(groups=tuple(groups), start=start, skipped=None)
            self._go_on_with(History(latest, before, self._handout(names)))

    def rescale(self, groups: Sequence[GroupVersion], rates: Mapping[str, float], surplus: Surplus) -> None:
        """What is remembered was changed with a setting of an optimizer, in a step that has just begun."""
        self._go_on_with(History(self.latest._replace(groups=tuple(groups), rates=rates, surplus=surplus)))

    def _go_on_with(self, history: History) -> None:
        self.history = history
        for version in history.latest.groups:
            version.group.adopt(version)

    def _handout(self, names: Set[str]) -> Handout:
        self._handouts += 1
        self._handed_out.update(dict.fromkeys(names, self._handouts))
        return Handout({name: self._parameters[name] for name in names})

    def hold(self, optimizer: Optimizer) -> Set[str]:
        """An optimizer holds parameters; their names."""
        names = {self._names[key] for key in ids_of(optimizer) & self._names.keys()}
        if not names <= self.held:
            self.held = self.held | names
        return names

    def applied(self, optimizer: Optimizer) -> None:
        """An optimizer has finished a step: its averages count as applied, also where a later engine owns them."""
        names = self.hold(optimizer)
        self._seen[optimizer] = self._handouts
        if names and (handout := self.history.handout) is not None:
            handout.step(names)

    def waiting(self, optimizer: Optimizer) -> Set[str]:
        """Parameters that got an average, also in an earlier exchange, since this optimizer has taken a step."""
        seen = self._seen.get(optimizer, 0)
        return {name for name, number in self._handed_out.items() if number > seen}

    def count_as_applied(self) -> None:
        """What the latest exchange handed out has been applied, or never will be."""
        if (handout := self.history.handout) is not None:
            handout.step(handout.names)
