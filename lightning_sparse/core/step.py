"""Types of the values that a step passes from part to part.

A gradient enters :func:`~lightning_sparse.engine.pipeline.reduce_group` as a flat vector of ``numel`` coordinates. A
sparsifier turns it into a :class:`Selection`, an exchange turns the ranks' selections into one :class:`Update`, and
a :class:`GroupState` survives until the next step. Everything else that a part may know about the step is in its
:class:`Context`.

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
    """Facts of a step that any part may read. Equal on all ranks, except ``rank``."""

    step: int
    """Synchronised backward passes before this one."""
    density: float
    """Target density of this group in this step, in (0, 1]."""
    rank: int
    world_size: int
    counts: Tensor | None = None
    """(n,) int64: number of coordinates that each rank selected in the previous step, or None before the first one; -1
    each, if only the device knows that all steps so far were skipped."""
    union: Tensor | None = None
    """() int64: number of distinct coordinates that the ranks selected in the previous step, also those beyond
    :attr:`Selection.limit`; None or -1 like ``counts``."""
    model_numel: int | None = None
    """Number of coordinates of all sparsified groups together; None if only this group is known."""
    parameters: Sequence[tuple[slice, Tensor]] | None = None
    """Span and tensor of each parameter of the group; None if there is no model, or if the memory does not read
    them."""
    disjoint: bool = False
    """True if no two ranks select the same coordinate in this step, see :attr:`Agreement.DISJOINT`."""
    surplus: float = 1.0
    """Scale of the residuals relative to a constant learning rate; with ``lr_aware``, it exceeds 1 for some steps after
    the rate has dropped. Thresholds in units of the accumulator are multiplied by it when they are applied."""
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
    score: Tensor | None = None
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
    """() number of distinct coordinates that the ranks selected in the latest step, see :class:`Context`."""
    candidates: Candidates | None = None
    """Selection hints, see :class:`Context`; not part of a checkpoint."""
