"""Interface of exchanges, and the one message format that they share.

An exchange makes one update out of the selections of a group's ranks, and returns the values that each rank has sent.
It never sees the network, but yields :mod:`messages <lightning_sparse.core.messages>`. *Own release*: a rank removes
the values that it selected. *Union release*: every rank sends and removes its values at all coordinates that any rank
selected. The exchange decides which of the two applies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import Settings
from lightning_sparse.core.messages import AllGather, AllReduce, Steps
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.ops import at_most, pad, static_shapes, take


class Exchange(Settings, ABC):
    """Turns one rank's selection into the update that all ranks share. A frozen dataclass of settings, nothing else."""

    accepts: ClassVar[frozenset[Agreement]]
    """Kinds of selections this pattern is right for."""
    carries_second: ClassVar[bool] = False
    """True if it averages :attr:`Context.second <lightning_sparse.core.step.Context.second>`, too."""
    tells_trouble: ClassVar[bool] = False
    """True if messages of a device say that a gradient is not finite, also where no values are sent."""

    @abstractmethod
    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Update | Steps[Update]:
        """Exchange one group.

        Args:
            acc: (numel + 1,) accumulator of this rank; the spare slot is zero. Read only: it is the live residual.
            selection: of this rank.
            ctx: the step.

        Returns:
            A coroutine that asks for messages, and ends with the update: equal on all ranks except for the values that
            this rank has sent. One that asks for nothing may return the update itself.
        """


EXCHANGES: Registry[Exchange] = Registry("exchange", Exchange)  # type: ignore[type-abstract]
"""Exchanges by name, for configs and error messages."""


def as_exchange(exchange: Exchange | str | None, sparsifier: object, memory: object = None) -> Exchange:
    """Resolve a name, or None to the default, and check that the exchange fits sparsifier and memory.

    Args:
        exchange: an instance, a name such as ``"gather_pairs"``, or None: the sparsifier's natural one, or one in its
            place where the memory needs second values that it does not carry.
        sparsifier: the :class:`~lightning_sparse.methods.sparsifiers.Sparsifier` it will serve.
        memory: the :class:`~lightning_sparse.methods.memory.Memory` it will serve; None: one that needs nothing of it.

    Raises:
        ValueError: if the name is unknown, if the exchange does not accept the sparsifier's kind of agreement, or if
            the memory needs second values that the exchange does not carry, and none may take its place.
    """
    chosen = EXCHANGES.resolve(getattr(sparsifier, "exchange", None) if exchange is None else exchange)
    agreement: Agreement = sparsifier.agreement  # type: ignore[attr-defined]
    if exchange is None and getattr(memory, "needs_second", False) and not chosen.carries_second:
        if getattr(sparsifier, "is_its_exchange", False):
            raise ValueError(
                f"{type(sparsifier).__name__} is its exchange, {EXCHANGES.name_of(chosen)!r}, which cannot carry the "
                "second moments that Adam and AdamW need: use sparsifier='top_k' or 'union_top_k', or torch's SGD; "
                "memory='residual' leaves steps to the optimizer."
            )
        carrying = [name for name, cls in EXCHANGES.items() if cls.carries_second and agreement in cls.accepts]
        chosen = EXCHANGES.resolve("reduce_union" if "reduce_union" in carrying else carrying[0])
    if agreement not in chosen.accepts:
        fitting = [name for name, cls in EXCHANGES.items() if agreement in cls.accepts]
        raise ValueError(
            f"The exchange {EXCHANGES.name_of(chosen)!r} accepts selections that are "
            f"{' or '.join(sorted(a.value for a in chosen.accepts))}, but {type(sparsifier).__name__}'s are "
            f"{agreement.value}. Exchanges that fit: {', '.join(fitting)}."
        )
    if getattr(memory, "needs_second", False) and not chosen.carries_second:
        fitting = [name for name, cls in EXCHANGES.items() if cls.carries_second and agreement in cls.accepts]
        raise ValueError(
            f"{type(memory).__name__} needs an exchange that averages second moments, too, and "
            f"{EXCHANGES.name_of(chosen)!r} does not. Exchanges that fit: {', '.join(fitting)}."
        )
    return chosen


def values_at(acc: Tensor, indices: Tensor, ctx: Context) -> Tensor:
    """Return the values that this rank offers: ``acc[indices]``, or NaN everywhere if the accumulator is not finite."""
    values = take(acc, indices) if indices.numel() else acc[indices]
    return values if ctx.finite is None else values.masked_fill_(~ctx.finite, float("nan"))


def reduce_at(acc: Tensor, indices: Tensor | None, ctx: Context) -> Steps[tuple[Tensor, Tensor | None]]:
    """Average acc and :attr:`Context.second` over ranks at common coordinates, in one all-reduce.

    Args:
        acc: (numel + 1,) accumulator of this rank.
        indices: (u,) equal on all ranks; None: all coordinates in order.
        ctx: the step.

    Returns:
        Two tensors of u values; None for the second one where there is none.
    """
    if indices is None:
        parts = [acc[:-1]] if ctx.second is None else [acc[:-1], ctx.second[:-1]]
        sent = torch.cat(parts)  # a copy: the sum takes its place
        if ctx.finite is not None:
            sent[:1].masked_fill_(~ctx.finite, float("nan"))
    else:
        values = values_at(acc, indices, ctx)
        sent = values if ctx.second is None else torch.cat([values, take(ctx.second, indices)])
    mean = (yield AllReduce(sent)).div_(ctx.world_size)
    if ctx.second is None:
        return mean, None
    first, second = mean.chunk(2)
    return first, second


def own_picks(selection: Selection) -> Tensor:
    """Return the coordinates that this rank picked, as an update may have them: without padding on the CPU."""
    return selection.indices[: at_most(selection.count, selection.indices.numel())]


class Picks(NamedTuple):
    """The selections of all ranks, as every rank knows them after :func:`gather_picks`."""

    indices: Sequence[Tensor] | Tensor
    """Coordinates by rank, int64 or int32: n tensors without padding on the CPU; elsewhere one tensor of n rows."""
    values: Sequence[Tensor] | Tensor | None
    """n tensors like ``indices``, if values were sent along."""
    counts: Tensor
    """(n,) int64."""
    spare: Sequence[Tensor] | Tensor | None = None
    """n tensors of bool like ``indices``: which picks are spare, see :class:`~lightning_sparse.core.step.Selection`."""
    codes: Sequence[Tensor] | Tensor | None = None
    """n tensors of integers like ``indices``, if something was told of second values."""

    def joined(self) -> Tensor:
        """Return all coordinates, in rank order."""
        return joined(self.indices)


def reinterpreted(words: Tensor, dtype: torch.dtype) -> Tensor:
    """View (n, words) of int32 as numbers of 32 or 64 bits, in a copy: wider ones begin at even words only."""
    return torch.empty_like(words, memory_format=torch.contiguous_format).copy_(words).view(dtype)


def joined(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Join the vectors of all ranks, in rank order."""
    return parts.flatten() if isinstance(parts, Tensor) else torch.cat(list(parts))


def same_length(selection: Selection, values: Tensor | None, padding: int) -> Steps[tuple[Selection, Tensor | None]]:
    """Pad the selection, and values if there are any, to the longest one if lengths may differ."""
    if selection.aligned:
        return selection, values
    counts = yield AllGather(selection.count)
    slots = int(counts.max())

    def cut(x: Tensor, value: float) -> Tensor:
        return pad(x[:slots], slots, value)

    spare = None if selection.spare is None else cut(selection.spare, False)
    padded = selection._replace(indices=cut(selection.indices, padding), spare=spare)
    return padded, None if values is None else cut(values, 0)


def counts_of(rows: Tensor, slots: int) -> list[int]:
    """Return the number of picks that each of (n, words) messages of int32 holds, its first word. On the CPU only.

    Raises:
        ValueError: if there cannot be so many.
    """
    counts: list[int] = rows[:, 0].tolist()
    refuse([not 0 <= told <= slots for told in counts])
    return counts


def is_outside(places: Tensor, padding: int) -> bool:
    """Return True if a coordinate is neither in the group nor padding. On the CPU only."""
    return bool(places.numel() and (places.min() < 0 or places.max() > padding))


def refuse(wrong: Sequence[bool]) -> None:
    """Raise if the message of some rank is wrong; all ranks have the same messages, and do the same."""
    if any(wrong):
        rank = wrong.index(True)
        raise ValueError(f"The message of rank {rank} cannot be: its number of picks, or one of them, is out of range.")


def gather_picks(selection: Selection, values: Tensor | None, padding: int) -> Steps[Picks]:
    """All-gather selections, and optionally one value per pick, in one message per rank.

    The message is int32 words: the count, the coordinates (inverted, and so negative, where a pick is spare), the bits
    of the values. Selections of different lengths (only on the CPU) are padded to the longest, whose length costs one
    more all-gather of 8 bytes a rank.

    Args:
        selection: this rank's picks.
        values: (c,) values at ``selection.indices``, or None.
        padding: the padding index; must fit into 31 bits.
    """
    slots, rows = yield from gather_rows(selection, values, padding)
    return read_picks(rows, slots, selection, values, padding)


def gather_rows(selection: Selection, values: Tensor | None, padding: int) -> Steps[tuple[int, Tensor]]:
    """Gather the messages of :func:`gather_picks`; return their slots for coordinates, and (n, words) of int32."""
    selection, values = yield from same_length(selection, values, padding)
    indices = selection.indices
    if selection.spare is not None:
        indices = torch.where(selection.spare, ~indices, indices)
    parts = [selection.count.view(1).int(), indices.int()]
    if values is not None:
        parts.append(values.view(torch.int32))
    return indices.numel(), (yield AllGather(torch.cat(parts)))


def read_picks(rows: Tensor, slots: int, selection: Selection, values: Tensor | None, padding: int) -> Picks:
    """Read the messages of all ranks that :func:`gather_rows` returns.

    Args:
        rows: of all ranks.
        slots: for coordinates.
        selection: of this rank, which tells whether some are spare.
        values: of this rank, which tell a dtype; None: none were sent.
        padding: which coordinates may reach, and not exceed.
    """
    counts = rows[:, 0].long()
    if static_shapes(counts.device):
        places = rows[:, 1 : 1 + slots]
        given = None if values is None else reinterpreted(rows[:, 1 + slots :], values.dtype)
        if selection.spare is None:
            return Picks(places.long(), given, counts)
        told = places < 0
        return Picks(torch.where(told, ~places, places).long(), given, counts, told)
    ends = counts_of(rows, slots)
    picked = [row[1 : 1 + end].long() for row, end in zip(rows, ends, strict=True)]
    spare = None
    if selection.spare is not None:
        spare = [places < 0 for places in picked]
        picked = [torch.where(places < 0, ~places, places) for places in picked]
    refuse([is_outside(places, padding) for places in picked])
    sent = None
    if values is not None:
        bits = [row[1 + slots :].clone().view(values.dtype) for row in rows]
        sent = [row[:end] for row, end in zip(bits, ends, strict=True)]
    return Picks(picked, sent, counts, spare)
