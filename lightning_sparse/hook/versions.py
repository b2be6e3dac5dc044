"""What an engine held after its latest step and before it, and which of the two belongs to the weights.

An exchange is concluded in backward, and its average is applied later, by an optimizer. In between, the weights are of
before the step, and so must be whatever is saved. Nothing here is ever changed but replaced, in one assignment, so that
a signal handler or another thread may look at any moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from torch.nn import Parameter

from lightning_sparse.hook.running import GroupVersion
from lightning_sparse.hook.verdict import Verdict


class Counts(NamedTuple):
    """Of exchanges."""

    step: int = 0
    """Those that counted."""
    void: int = 0
    """Those that did not."""
    streak: int = 0
    """Of these, the latest ones without a step that counted."""
    flushes: int = 0
    """How often residuals were emptied between two steps."""


class Version(NamedTuple):
    """What counts after an exchange, or at the start."""

    groups: tuple[GroupVersion, ...]
    rates: Mapping[str, float]
    """Latest learning rates."""
    surplus: Mapping[str, tuple[float, int]]
    """What changes of them have left in residuals."""
    start: Counts
    """Before the exchange."""
    verdict: Verdict | None = None
    """On the exchange; None: there was none."""

    @property
    def void(self) -> bool:
        """Whether the exchange counted for nothing; may wait for the device."""
        return self.verdict is not None and bool(self.verdict)

    @property
    def counts(self) -> Counts:
        """After the exchange; may wait for the device."""
        step, void, streak, flushes = self.start
        if self.verdict is None:
            return self.start
        return Counts(step, void + 1, streak + 1, flushes) if self.verdict else Counts(step + 1, void, 0, flushes)

    @property
    def number(self) -> int:
        """Equal on all ranks, and different for versions that differ."""
        counts = self.counts
        return counts.step + counts.flushes


class Handout:
    """The averages that an exchange has handed out, and who has applied them.

    A parameter has taken its average when it was written to, or when an optimizer that holds it has finished a step.

    Args:
        parameters: that got one, by name.
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
        """Of the parameters that got one."""
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
