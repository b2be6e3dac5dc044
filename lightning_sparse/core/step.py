"""The nouns that flow from one room to the next.

A gradient enters :func:`~lightning_sparse.engine.pipeline.reduce_group` as a flat vector of ``numel`` coordinates. A
sparsifier turns it into a :class:`Selection`, an exchange turns the ranks' selections into one :class:`Update`, and
what must survive until the next step is a :class:`GroupState`. Everything else that a part may know about the step
is in its :class:`Context`.

The *padding index* is ``numel``, one past the last coordinate. Flat buffers that are read or written through padded
indices have a spare slot there, so that no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from torch import Tensor

from lightning_sparse.core.candidates import Candidates


class Agreement(Enum):
    """Relation of the selections of the ranks to each other; decides which exchanges make sense."""

    INDEPENDENT = "independent"
    """Every rank picks by its own data; picks may overlap (Top-k, hard-threshold)."""
    SHARED = "shared"
    """Every rank picks by its own data and wants the values of all ranks there; picks may overlap (SharedTopK)."""
    DISJOINT = "disjoint"
    """No coordinate is picked by two ranks (MiCRO, ExDyna)."""
    LEADER = "leader"
    """The pick of one rank, known by all from the step, counts for all (CLT-k)."""
    IDENTICAL = "identical"
    """All ranks arrive at the same pick without talking (Random-k with a shared seed)."""
    EVERYTHING = "everything"
    """All coordinates are picked; the selection's indices are left empty (dense)."""


class Context(NamedTuple):
    """Facts that a part may know about this step. Equal on all ranks, except ``rank``."""

    step: int
    """Synchronised backward passes before this one."""
    density: float
    """Target density of this group in this step, in (0, 1]."""
    rank: int
    world_size: int
    counts: Tensor | None = None
    """(n,) int64: picks of each rank in the previous step, or None before the first one; -1 each, where only the device
    knows that all steps so far were void."""
    union: Tensor | None = None
    """() int64: different coordinates that the ranks named in the previous step, also those beyond
    :attr:`Selection.limit`; None or -1 like ``counts``."""
    model_numel: int | None = None
    """Coordinates of all sparsified groups together; None where only this group is known."""
    parameters: Sequence[tuple[slice, Tensor]] | None = None
    """Places of the group's parameters in it, and they themselves; None where there is no model, or where the
    memory does not read them."""
    disjoint: bool = False
    """True if no coordinate is picked by two ranks in this step, see :attr:`Agreement.DISJOINT`."""
    surplus: float = 1.0
    """Factor by which what waits in the residuals is larger than it would be at a constant learning rate; above 1 for a
    while after the rate has dropped, with ``lr_aware``. Thresholds that are kept in units of the accumulator are
    multiplied by it where they are applied."""
    second: Tensor | None = None
    """(numel + 1,) vector of this rank whose mean over ranks is wanted wherever an average is formed: at least 0, in
    the accumulator's dtype; None: there is none. For exchanges, see
    :attr:`~lightning_sparse.methods.exchanges.Exchange.carries_second`."""
    candidates: Candidates | None = None
    """Notes of forming the accumulator, which selecting from it may use; they decide what that costs and nothing else.
    None where shapes are static."""
    trouble: Tensor | None = None
    """() bool: True if this rank's accumulator is not finite, where only the device knows that: the values that the
    rank offers are then NaN, see :func:`~lightning_sparse.methods.exchanges.base.values_at`. None: it is finite, or
    holds NaN everywhere."""


class Selection(NamedTuple):
    """Coordinates that one rank picked."""

    indices: Tensor
    """(c,) int64, unique and ascending; slots from ``count`` on hold the padding index."""
    count: Tensor  # type: ignore[assignment]  # also the name of a tuple's method, which nobody needs here
    """() int64: number of picks."""
    threshold: Tensor | None = None
    """() float64: the magnitude that decided, where there is one."""
    aligned: bool = False
    """True if ``c`` is the same on all ranks, so that sizes need not be exchanged."""
    total: int | None = None
    """Upper bound of the picks of all ranks together, where it is known without asking."""
    limit: int | None = None
    """Thin the union evenly to this many coordinates, for exchanges that form one; what is left out is not sent."""
    spare: Tensor | None = None
    """(c,) bool: picks that only fill a union up to ``limit``; left out first where no other rank needs them."""


class Update(NamedTuple):
    """Average that the ranks agreed on: equal on all of them, bit for bit, but for what each one sent."""

    indices: Tensor | None
    """(u,) int64 coordinates of the average; a repeated one carries the same value each time. Where shapes are static
    (not on the CPU), equal ones are neighbours, and the padding index is allowed. None: every coordinate in order."""
    values: Tensor
    """(u,) mean over ranks."""
    sent: Tensor | None
    """int64 coordinates that this rank takes out of its residual, repeated ones as above. None: all of them."""
    sent_values: Tensor | None
    """Values that really travelled for ``sent``, when it was rounded on the wire. None: the exact values."""
    counts: Tensor
    """(n,) int64 picks per rank."""
    union: Tensor
    """() int64 number of different coordinates in ``indices``."""
    named: Tensor | None = None
    """() int64 different coordinates that the ranks named, where these may be more than ``union``."""
    second: Tensor | None = None
    """(u,) mean over ranks of :attr:`Context.second`, as far as it travels exactly, where it was given."""


class Absorbed(NamedTuple):
    """A gradient as a memory has absorbed it; local to the rank."""

    acc: Tensor
    """(numel + 1,) accumulator, the last slot zero: the live residual of memories that have one. Read only."""
    finite: Tensor
    """() bool on the accumulator's device: whether all that came was finite."""
    score: Tensor | None = None
    """(numel,) vector that coordinates are selected by, the largest magnitudes first; None: the accumulator."""
    second: Tensor | None = None
    """(numel + 1,) vector whose mean over ranks is wanted wherever an average arrives; None: nothing more."""


class GroupState(NamedTuple):
    """Everything of a group that survives a step, on one rank."""

    memory: Any
    """Owned by the :class:`~lightning_sparse.methods.memory.Memory`."""
    selector: Any
    """Owned by the :class:`~lightning_sparse.methods.sparsifiers.Sparsifier`."""
    counts: Tensor | None
    """(n,) picks per rank in the latest step."""
    union: Tensor | None = None
    """() different coordinates that the ranks named in the latest step, see :class:`Context`."""
    candidates: Candidates | None = None
    """See :class:`Context`. Steps write to it as they like: it holds nothing that counts."""
