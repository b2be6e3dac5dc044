"""Types of the values that a step passes from part to part.

A gradient enters :func:`~lightning_sparse.engine.pipeline.reduce_group` as a flat vector of ``numel`` coordinates. A
sparsifier turns it into a :class:`Selection`, an exchange turns the ranks' selections into one :class:`Update`, and
a :class:`GroupState` survives until the next step. Everything else that a part may know about the step is in its
:class:`Context`, with :class:`Candidates`, hints that save the selection a pass.

The *padding index* is ``numel``, one past the last coordinate. Flat buffers that are read or written through padded
indices have a spare slot there, so that no mask is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sparse.core.layout import InRuns, Rates

Found = tuple[Tensor, Tensor]
"""Ascending int32 coordinates and their magnitudes."""


class Agreement(Enum):
    """Relation between the selections of different ranks; it decides which exchanges accept a sparsifier."""

    INDEPENDENT = "independent"
    """Every rank selects by its own data; selections may overlap (Top-k, hard-threshold)."""
    SHARED = "shared"
    """Every rank selects by its own data and needs the values of all ranks there; may overlap (SharedTopK)."""
    DISJOINT = "disjoint"
    """No two ranks select the same coordinate (MiCRO, ExDyna)."""
    LEADER = "leader"
    """The selection of one rank, known from the step, is used by all (CLT-k)."""
    IDENTICAL = "identical"
    """All ranks make the same selection without a message (Random-k with a shared seed)."""
    EVERYTHING = "everything"
    """All coordinates are selected; the selection's indices are empty (dense)."""


class Context(NamedTuple):
    """Facts of a step that any part may read.

    Equal on all ranks, except ``rank``, and what is of this rank's own gradient or memory: ``second``, ``candidates``
    and ``finite``.
    """

    step: int
    """Exchanges of this group before this one that counted; of a new group, those of the engine before it."""
    density: float
    """Target density of this group in this step, in (0, 1]."""
    rank: int
    world_size: int
    counts: Tensor | None = None
    """(n,) int64: number of coordinates that each rank selected in the previous step, or None before the first one."""
    union: Tensor | None = None
    """() int64: number of distinct coordinates that the ranks selected in the previous step, also those beyond
    :attr:`Selection.limit`; None like ``counts``."""
    told: int | None = None
    """The same number, if the host was told what only the device knew."""
    model_numel: int | None = None
    """Number of coordinates of all sparsified groups together; None if only this group is known."""
    parameters: Sequence[tuple[slice, Tensor]] | None = None
    """Span and tensor of each parameter of the group; None if there is no model, or if the memory does not read
    them."""
    disjoint: bool = False
    """True if no two ranks select the same coordinate in this step, see :attr:`Agreement.DISJOINT`."""
    rates: Rates | None = None
    """Learning rate of each parameter of the group that takes part, not 0; None if there is no optimizer, or if the
    memory does not read them."""
    second: Tensor | None = None
    """(numel + 1,) second vector of this rank, at least 0, in the accumulator's dtype: exchanges also average it at the
    coordinates of the update, see :attr:`~lightning_sparse.methods.exchanges.Exchange.carries_second`. None: none."""
    candidates: Candidates | None = None
    """Selection hints: forming the accumulator may write them, and selection may read them. They change the cost of a
    step and not its result."""
    finite: Tensor | None = None
    """() bool: False if this rank's gradient is not finite and only the device knows. The rank then sends NaN, see
    :func:`~lightning_sparse.methods.exchanges.base.values_at`. None: the host has checked; the accumulator is finite,
    or NaN everywhere."""


class Selection(NamedTuple):
    """The coordinates that one rank selected."""

    indices: Tensor
    """(c,) int64, unique and ascending; slots from ``count`` on hold the padding index."""
    count: Tensor  # type: ignore[assignment]  # replaces the unused method of tuples
    """() int64: number of selected coordinates."""
    threshold: Tensor | None = None
    """() float64: threshold magnitude, if the rule has one."""
    aligned: bool = False
    """True if ``c`` is equal on all ranks, so that sizes need not be exchanged."""
    total: int | None = None
    """Upper bound of the selected coordinates of all ranks together, if it is known without a message."""
    limit: int | None = None
    """Largest union for exchanges that form one: it is thinned evenly, and the rest is not sent."""
    spare: Tensor | None = None
    """(c,) bool: coordinates that only fill a union up to ``limit``; they are dropped first unless another rank has
    selected them."""


class Update(NamedTuple):
    """Result of an exchange: equal on all ranks, bit for bit, except ``sent`` and ``sent_values``."""

    indices: Tensor | None
    """(u,) int64 coordinates of the average; a repeated one has the same value each time. With static shapes (not on
    the CPU), equal ones are neighbours, and the padding index is allowed. None: every coordinate in order."""
    values: Tensor
    """(u,) mean over ranks."""
    sent: Tensor | None
    """int64 coordinates that this rank removes from its residual, repeated ones as above. None: all of them."""
    sent_values: Tensor | None
    """Values that were really sent at ``sent``, if messages were rounded. None: the exact values."""
    counts: Tensor
    """(n,) int64 number of selected coordinates per rank."""
    union: Tensor
    """() int64 number of distinct coordinates in ``indices``."""
    named: Tensor | None = None
    """() int64 number of distinct coordinates that the ranks selected, if it may exceed ``union``."""
    second: Tensor | None = None
    """(u,) mean over ranks of :attr:`Context.second`, in the precision of the messages; None if none was given."""


class Absorbed(NamedTuple):
    """Result of absorbing a gradient; local to the rank."""

    acc: Tensor
    """(numel + 1,) accumulator, the last slot zero: the live residual of memories that have one. Read only."""
    finite: Tensor
    """() bool on the accumulator's device: True if the whole gradient was finite."""
    score: Tensor | InRuns | None = None
    """(numel,) vector for the selection, the largest magnitudes first; None: the accumulator."""
    second: Tensor | None = None
    """(numel + 1,) vector that is averaged over ranks at the coordinates of the update, too; None: none."""


class GroupState(NamedTuple):
    """State of a group on one rank that survives a step."""

    memory: Any
    """Owned by the :class:`~lightning_sparse.methods.memory.Memory`."""
    selector: Any
    """Owned by the :class:`~lightning_sparse.methods.sparsifiers.Sparsifier`."""
    counts: Tensor | None
    """(n,) number of selected coordinates per rank in the latest step."""
    union: Tensor | None = None
    """() number of distinct coordinates that the ranks selected in the latest step, see :attr:`Context.union`."""
    candidates: Candidates | None = None
    """Selection hints, see :class:`Context`; not part of a checkpoint."""
    told: int | None = None
    """See :attr:`Context.told`."""


class Candidates:
    """Coordinates of a group's accumulator that will probably be selected, found while it is formed.

    A group keeps one instance from step to step. The selection of a step leaves a bound that the next selection will
    probably reach (:meth:`expect`). The pass that forms the next accumulator collects the coordinates that reach it
    (:meth:`note`), and the next selection starts from these (:meth:`reaching`). A wrong bound costs one more pass and
    never changes a result, so this is not part of a group's state.

    The hints are valid for one vector with its content at that time: any later operation of torch that writes to the
    vector invalidates them.
    """

    ROOM = 8
    """The pass collects at most ``numel / ROOM`` coordinates; if more reach the bound, it keeps none."""

    def __init__(self) -> None:
        self.bound = math.inf
        """Least magnitude that the next pass collects."""
        self.on_device: Any = None
        """Buffers that kernels on a device keep for the next step, see :mod:`~lightning_sparse.ops.on_device`."""
        self._expected = math.inf
        self._vector: Any = None
        self._cleared: Any = None
        self._finite = True
        self._reached = math.inf
        self._found: Any = None

    def __eq__(self, other: object) -> bool:
        """Return True for all instances: hints are not part of the state."""
        return isinstance(other, Candidates)

    __hash__ = None  # type: ignore[assignment]

    def note(self, x: Tensor | InRuns, runs: Sequence[Tensor], found: Any, finite: bool = True) -> None:
        """Keep the results of a pass with :attr:`bound`.

        Args:
            x: (numel,) vector that the pass has formed and that is selected by.
            runs: vectors that it has set to zero.
            found: ascending coordinates and their magnitudes, on a device :attr:`on_device`; None: too many.
            finite: True if all of the gradient was finite, or only the device knows.
        """
        self._vector, self._cleared = _state_of(x), list(map(_state_of, runs))
        self._found, self._finite, self._reached, self._expected = found, finite, self.bound, math.inf

    def expect(self, bound: float) -> None:
        """Let the next pass collect magnitudes of at least this bound; the lowest of several bounds in a step."""
        if self._finite:  # else the step is skipped, and its selection says nothing about the next one
            self._expected = min(self._expected, bound)
            self.bound = self._expected

    def reaching(self, x: Tensor | InRuns, bound: float = math.inf) -> Any:
        """Return what was found, if it is of x and has all coordinates that reach a bound; None if that is unknown."""
        same = self._vector is not None and self._vector == _state_of(x)
        return self._found if same and bound >= self._reached else None

    def forget(self) -> None:
        """Let go of what was found, when a selection has been made."""
        self._found = None

    def take(self, x: Tensor | InRuns) -> Any:
        """Return what was found, if it is of x, and forget it: a search on a device changes it."""
        found, self._found = self.reaching(x), None
        return found

    def cleared(self, runs: Sequence[Tensor]) -> bool:
        """Return True if the pass has set these vectors to zero and they have not been written to since."""
        if self._cleared is None:
            return False
        states = list(map(_state_of, runs))
        return None not in states and self._cleared == states


def _state_of(x: Tensor | InRuns) -> tuple[Any, ...] | None:
    """Return a vector's address, length and version counter; None if torch keeps no version counter."""
    if isinstance(x, InRuns):
        states = tuple(map(_state_of, x.runs))
        return None if None in states else states
    return None if x.is_inference() else (x.data_ptr(), x.numel(), x._version)
