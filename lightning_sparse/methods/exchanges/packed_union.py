"""The union of all selections in less than half the bytes: short indices, and 16-bit integers for values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllGather, AllReduce, Steps
from lightning_sparse.core.step import Agreement, Context, Selection, Update
from lightning_sparse.methods.exchanges.base import (
    EXCHANGES,
    Exchange,
    Picks,
    counts_of,
    joined,
    reduce_at,
    refuse,
    same_length,
    values_at,
)
from lightning_sparse.methods.exchanges.reduce_union import union_of
from lightning_sparse.ops import compiled, on_device, pad, static_shapes, take, under
from lightning_sparse.ops.c.native import Native
from lightning_sparse.ops.form import (
    CLASS_BITS,
    CLASSES,
    CODE_ZERO,
    LEVELS,
    LOWEST,
    MARKS,
    NIBBLE,
    OCTET,
    SILENT,
    TROUBLE,
    Form,
    Lanes,
    Met,
    Rounded,
)
from lightning_sparse.ops.on_cuda import compare


@EXCHANGES.register
@dataclass(frozen=True)
class PackedUnion(Exchange):
    """Average the values of all ranks at the union, as :class:`ReduceUnion` does, in less than half the bytes.

    ``update[U_j] = (1/n) s_j sum_i q_ij``: at coordinate j all ranks round their values to multiples ``q_ij`` of one
    step ``s_j``, with ``|q_ij| <= floor(32767 / n)``. They keep rounding errors (``acc_i - q_i s``) in their
    residuals, so that no value is lost. Two such integers share a 32-bit word: n of them add up without overflow,
    exactly and in any order, so that the result is equal on all ranks.

    Selected values differ by orders of magnitude. One step for all would round the small ones to zero as long as there
    is a large one. Each coordinate is therefore sent with one of eight classes of magnitude: class c reaches up to
    ``8**-c`` times the rank's largest selected value. The step ``s_j`` is a power of two, that of the largest class
    that any rank has sent for j. Ranks with larger gradients also send their values there, although they have not
    selected them. To leave room for these, steps are raised towards the smallest class that all selected values of some
    rank reach, by as much as leaves each selected value at least two levels. A rank's largest selected value has more
    than half of the levels. A value beyond the last level is sent as the last level; the rest follows later. If a value
    is rounded to zero, that rank has sent nothing. Sums and residuals are exact, except for values beyond the last
    level.

    Indices have the coding of Elias and Fano (:class:`~lightning_sparse.ops.form.Form`): of each coordinate
    the lowest l bits as they are, and the rest as marks, one bit for each selected coordinate and one for each
    ``2**l`` coordinates; l is the shortest of 8, 12, ... 28. For m selected of d coordinates these are
    ``l + 1 + 2**-l d / m`` bits each: 9.8 for one of 200, 13.5 for one of 2000; the entropy of a random choice is 9.1
    and 12.4. Class and :attr:`spare <lightning_sparse.core.step.Selection.spare>` take 4 bits. Together these are 1.7
    to 2.2 bytes, ``(n - 1) m`` times for the longest selection m, and ``4 (n - 1) / n |U|`` bytes of values, plus a few
    words.

    With a single rank, and from 512 ranks on (too few levels), values are sent unrounded.

    If second values are averaged, too (:attr:`Context.second <lightning_sparse.core.step.Context.second>`), each
    selected coordinate comes with the power of two above its second value, in one byte. At each coordinate all ranks
    round their second values to multiples of a share of the largest power that was sent; a value above twice this power
    counts as twice this power. With up to 16 ranks these multiples take the low bits of the 16-bit integers, and values
    the others; with more ranks each coordinate has 32.

    References:
        Ours. Coding of indices: Elias, Efficient Storage and Retrieval by Content and Address of Static Files, Journal
        of the ACM 21(2), 1974. Rounding with error feedback: Karimireddy et al., Error Feedback Fixes SignSGD and other
        Gradient Compression Schemes, ICML 2019, arXiv 1901.09847.
    """

    carries_second: ClassVar[bool] = True
    tells_trouble: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Agreement]] = frozenset({Agreement.INDEPENDENT, Agreement.SHARED, Agreement.DISJOINT})

    def __call__(self, acc: Tensor, selection: Selection, ctx: Context) -> Steps[Update]:
        """One group; see :class:`~lightning_sparse.methods.exchanges.Exchange`."""
        numel, n = acc.numel() - 1, ctx.world_size
        lanes = Lanes.of(n, ctx.second is not None)
        selection, _ = yield from same_length(selection, None, numel)
        form = Form.of(numel, selection.indices.numel(), ctx.second is not None)
        by = _chosen(acc, form, lanes, ctx)
        rows = yield AllGather(by.tell(acc, selection, lanes.most, form, ctx))
        met = by.meet(rows, selection, form, ctx)
        about = met.counts, met.size, met.named
        if n == 1 or lanes.most < lanes.fewest:
            mean, second = yield from reduce_at(acc, met.indices, ctx)
            return Update(met.indices, mean, met.indices, None, *about, second)
        made = by.round(acc, met, lanes, ctx)
        values, second = by.average((yield AllReduce(made.words)), made, met, lanes, n)
        return Update(met.indices, values, made.sent, made.values, *about, second)


class Plain:
    """Do the work of :class:`PackedUnion` on messages, in operations of torch; the reference of the other forms.

    The others are :class:`InC`, and on a device :class:`.triton.packed.Packed`. All give the same bits, so that ranks
    may differ in which one they use.
    """

    def tell(self, acc: Tensor, selection: Selection, most: int, form: Form, ctx: Context) -> Tensor:
        """Write this rank's message, of :attr:`.Form.width` int32 words.

        Args:
            acc: (numel + 1,) accumulator.
            selection: of this rank, in as many slots as the form has.
            most: largest integer that a value becomes.
            form: of the message.
            ctx: the step.
        """
        return _tell(acc, selection if static_shapes(acc.device) else _ascending(selection), most, form, ctx)

    def meet(self, rows: Tensor, selection: Selection, form: Form, ctx: Context) -> Met:
        """Read the messages of all ranks, and unite what they name.

        Args:
            rows: (n, words) of all ranks, each row contiguous.
            selection: of this rank, for what it promises about all of them.
            form: of the messages.
            ctx: the step.

        Raises:
            ValueError: if a message cannot be; where shapes are static, it is not looked at.
        """
        picks, levels, lowest, trouble = _heard(rows, selection, form)
        union = union_of(picks, selection, form.numel, ctx, levels)
        tops = _largest_codes(picks, union.indices, form.numel) if form.codes else None
        return Met(union.indices, union.levels, lowest, tops, trouble, picks.counts, union.size, union.named)

    def round(self, acc: Tensor, met: Met, lanes: Lanes, ctx: Context) -> Rounded:
        """Round this rank's values at the union, and second values if there are any, to integers in words."""
        unit = _step_of(_raised(met.levels, met.lowest, lanes.most_raised), acc.dtype)
        whole = (take(acc, met.indices) / unit).round_().clamp_(-lanes.most, lanes.most).nan_to_num_(nan=0.0)
        given, rounded = whole != 0, whole * unit
        if static_shapes(acc.device):
            sent = torch.where(given, met.indices, acc.numel() - 1)
        else:
            sent, rounded = under(given, met.indices, rounded)
        if ctx.second is None or met.tops is None:
            return Rounded(pack(whole.int()), unit, sent, rounded)
        # Each rank rounds at a place of its own, so that the sum of n equal numbers is right to one part.
        share = ctx.second[met.indices] / _second_tops(met.tops, acc.dtype) * lanes.parts
        parts = (share + (ctx.rank + 0.5) / ctx.world_size).floor().clamp(0, lanes.parts).nan_to_num(nan=0.0)
        both = (whole.int() << lanes.low) + parts.int()
        return Rounded(both if lanes.wide else pack(both), unit, sent, rounded)

    def average(self, words: Tensor, made: Rounded, met: Met, lanes: Lanes, n: int) -> tuple[Tensor, Tensor | None]:
        """Return the means over n ranks of values and of second values, from the sums of words."""
        total, second = words if lanes.wide else unpack(words, made.units.numel()), None
        if met.tops is not None:
            top, parts = _second_tops(met.tops, made.units.dtype), total & (1 << lanes.low) - 1
            # Whoever has told has a quarter of the top there at least, also where that rounds to nothing.
            second = torch.maximum(parts * _divided(top, n * lanes.parts), _divided(top, 4 * n))
        values = _divided((total >> lanes.low) * made.units, n)
        return values.masked_fill(met.trouble, float("nan")), second


class InC(Plain):
    """Does the work of :class:`Plain` in functions of the library.

    Args:
        library: what has been compiled.
    """

    def __init__(self, library: Native) -> None:
        self._library = library

    def tell(self, acc: Tensor, selection: Selection, most: int, form: Form, ctx: Context) -> Tensor:
        """See :meth:`Plain.tell`."""

        def told(one: Selection) -> Tensor | None:
            return self._library.tell(acc, one.indices, one.spare, int(one.count), most, form, ctx.second)

        words = told(selection)
        if words is None:
            words = told(_ascending(selection))
            assert words is not None
        return words

    def meet(self, rows: Tensor, selection: Selection, form: Form, ctx: Context) -> Met:
        """See :meth:`Plain.meet`."""
        counts_of(rows, form.slots)
        met = self._library.meet(rows, form, selection.spare is not None, selection.limit, ctx.step)
        refuse([rank == met for rank in range(len(rows))])
        assert isinstance(met, Met)
        if selection.total is not None and met.size == met.named:  # more than promised, if a rank raises an alarm
            end = selection.total
            met = met._replace(indices=met.indices[:end], levels=met.levels[:end])
        return met

    def round(self, acc: Tensor, met: Met, lanes: Lanes, ctx: Context) -> Rounded:
        """See :meth:`Plain.round`."""
        grid, share = (met.lowest, lanes.most_raised, lanes.most), (lanes.low, lanes.wide, lanes.parts)
        offset = (ctx.rank + 0.5) / ctx.world_size
        return self._library.round(acc, ctx.second, met.indices, met.levels, met.tops, *grid, *share, offset)


PLAIN = Plain()


def _chosen(acc: Tensor, form: Form, lanes: Lanes, ctx: Context) -> Plain:
    """The form that works fastest for an accumulator."""
    library = compiled(acc.device, acc.dtype)
    if library is not None and (ctx.second is None or _alike(ctx.second, acc)):
        return InC(library)
    kernels: Plain | None = None
    if ctx.world_size * form.slots < 1 << 31:  # they count picks in 31 bits
        kernels = on_device.packed(acc, ctx.second, lanes, lambda made: _rehearse(made, acc.device, lanes))
    return PLAIN if kernels is None else kernels


def _alike(second: Tensor, acc: Tensor) -> bool:
    """Return whether compiled functions can read second values."""
    return second.dtype == acc.dtype and second.shape == acc.shape and second.is_contiguous()


def _rehearse(kernels: Plain, device: torch.device, lanes: Lanes) -> None:
    """Compare what kernels compute with operations of torch: messages of three ranks, in the layout of more.

    Raises:
        MismatchError: if they differ. Whatever compilers and drivers raise comes through.
    """
    numel, n, slots, codes = 3001, 3, 64, lanes.low > 0
    form = Form.of(numel, slots, codes)
    places = torch.arange(numel + 1, device=device)
    acc = ((1 + places * 1103 % numel) * (1 - 2 * (places % 2)) * (places < numel)).float() / 64
    second, finite = acc.square() if codes else None, torch.ones((), dtype=torch.bool, device=device)
    steps = [Context(5, 0.1, rank, n, second=second, finite=finite) for rank in range(n)]
    given = []
    for rank in range(n):
        indices = pad(places[rank : numel : 60 + rank], slots, numel)
        spare = (indices % 3 == 0) & (indices < numel)
        count = (indices < numel).sum()
        given.append((Selection(indices, count, aligned=True, limit=100, spare=spare), lanes.most, form))
    results: list[dict[str, Tensor]] = []
    for by in (kernels, PLAIN):
        rows = torch.stack([by.tell(acc, *one, ctx) for one, ctx in zip(given, steps, strict=True)])
        met = by.meet(rows, given[0][0], form, steps[0])
        made = [by.round(acc, met, lanes, ctx) for ctx in steps]
        values, mean = by.average(torch.stack([one.words for one in made]).sum(0).int(), made[0], met, lanes, n)
        alarm = by.tell(acc, *given[0], steps[0]._replace(finite=~finite))
        inside = met.indices < numel
        vectors = {"indices": met.indices, "values": values, "second values": values if mean is None else mean}
        results.append(
            {"messages": rows, "alarm": alarm[:2], "picks": met.counts, "size": met.size, "named": met.named}
            | {name: vector[inside] for name, vector in vectors.items()}
            | {f"words of rank {rank}": one.words for rank, one in enumerate(made)}
        )
    compare(results[0], results[1], codes=codes)


def _divided(x: Tensor, by: int) -> Tensor:
    """By a tensor: torch multiplies by the reciprocal of a number on CUDA, and some ranks may divide in kernels."""
    return x / torch.full_like(x[:1], by)


def _second_tops(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Twice the powers of two that codes stand for."""
    return _step_of(codes.int().clamp(min=1) + (1 - CODE_ZERO - LOWEST), dtype)


def _largest_codes(picks: Picks, union: Tensor, padding: int) -> Tensor:
    """(u,) int64 the largest code that any rank has told for each coordinate of the union."""
    assert picks.codes is not None
    told, codes = picks.joined().long(), joined(picks.codes)
    places = torch.searchsorted(union, told) if union.numel() else told
    # Padding, and what was thinned out of the union, goes to one more slot.
    hit = pad(union, union.numel() + 1, -1)[places.clamp(max=union.numel())] == told
    places = torch.where(hit & (told < padding), places, union.numel())
    largest = torch.zeros(union.numel() + 1, dtype=codes.dtype, device=codes.device)
    largest.scatter_reduce_(0, places, codes, "amax")
    return largest[: union.numel()]


def _heard(rows: Tensor, selection: Selection, form: Form) -> tuple[Picks, Tensor, Tensor, Tensor]:
    """Everybody's picks and what is told of them.

    Returns:
        The picks; their levels, in rank order; () the lowest level that all picks of some rank reach, for
        :func:`_raised`; and () whether any of them is not finite.
    """
    slots, padding, static = form.slots, form.numel, static_shapes(rows.device)
    head = rows[:, :2].long()
    counts, tops = head[:, 0], head[:, 1:]
    trouble = tops.max() == TROUBLE
    octets = _unpack_octets(rows[:, form.seconds :], slots) if form.codes else None
    places, told, fits = _read(rows, form)
    levels = (tops - (told & (CLASSES - 1)) * CLASS_BITS).clamp(min=SILENT)
    within = torch.arange(slots, device=rows.device) < counts[:, None]
    lowest = torch.where(within, levels, tops).amin(1).max() if slots else tops.max()
    all_spares = None if selection.spare is None else told >= CLASSES
    if not static:
        ends = counts_of(rows, slots)
        known = ((tops >= SILENT) & (tops < LEVELS)) | (tops == TROUBLE)
        descends = (places[:, 1:] < places[:, :-1]) & within[:, 1:]
        refuse((descends.any(1) | ~known[:, 0] | ~fits).tolist())
        spares, codes = (None if x is None else _cut(x, ends) for x in (all_spares, octets))
        picks = Picks(_cut(places.clamp_(max=padding).long(), ends), None, counts, spares, codes)
        return picks, torch.cat(_cut(levels, ends)), lowest, trouble
    return Picks(places.clamp_(0, padding), None, counts, all_spares, octets), levels.flatten(), lowest, trouble


def _ascending(selection: Selection) -> Selection:
    """With coordinates in order, which those of an outside sparsifier need not be; on the CPU."""
    if bool((selection.indices[1:] >= selection.indices[:-1]).all()):
        return selection
    indices, order = selection.indices.sort()
    return selection._replace(indices=indices, spare=None if selection.spare is None else selection.spare[order])


def _cut(rows: Tensor, ends: list[int]) -> list[Tensor]:
    """Of each rank what belongs to picks."""
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def _tell(acc: Tensor, selection: Selection, most: int, form: Form, ctx: Context) -> Tensor:
    """The message of one rank: number of picks and level of the largest; coordinates; four bits for each; and codes."""
    magnitudes = values_at(acc, selection.indices, ctx).abs_()
    largest = magnitudes.max() if form.slots else acc.new_zeros(())
    classes = _classes(magnitudes, largest)
    if selection.spare is not None:
        classes = classes | selection.spare.to(torch.uint8) << 3
    head = torch.stack([selection.count.int(), _level_of(largest / most)])
    *parts, zeros = _written(selection.indices, classes, form)
    if ctx.second is not None:
        parts.append(_pack_octets(_codes(ctx.second[selection.indices])))
    return torch.cat([head, *parts, zeros])


def _written(indices: Tensor, classes: Tensor, form: Form) -> list[Tensor]:
    """Ascending coordinates, four bits for each, and the zeros at the end of a message, in int32 words."""
    places = (indices >> form.bits) + torch.arange(form.slots, device=indices.device)
    sizes = [form.octets - MARKS, form.width - form.filled]
    marks, zeros = torch.split(torch.zeros(sum(sizes), dtype=torch.int32, device=indices.device), sizes)
    marks.index_add_(0, places >> 5, (1 << (places & 31)).int())
    nibbles = classes[None]
    if form.planes:
        nibbles = torch.cat([(indices >> _shifts(form, indices.device) & 15).to(torch.uint8), nibbles])
    return [marks, _pack_octets((indices & 255).to(torch.uint8)), _pack_nibbles(nibbles), zeros]


def _read(rows: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    """Read the messages that :func:`_written` has made, of (n, words).

    Returns:
        (n, slots) coordinates, padding or more where there is no pick; uint8 classes; and (n,) on the CPU, which
        messages have as many marks as slots.
    """
    wide, device = torch.int32 if 2 * form.numel < 2**31 else torch.int64, rows.device
    octets = rows[:, MARKS : form.octets].contiguous().view(torch.uint8)
    slots = torch.arange(form.slots, dtype=torch.int32, device=device)
    bits = (octets[..., None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten(1)
    fits = slots if static_shapes(device) else bits.sum(1) == form.slots
    until = bits.cumsum(1, dtype=torch.int32)
    marks = torch.searchsorted(until, (slots + 1).expand(len(rows), -1).contiguous(), out_int32=True)
    places = (marks - slots).to(wide) << form.bits
    places |= _unpack_octets(rows[:, form.octets : form.nibbles], form.slots)
    planes = rows[:, form.nibbles : form.seconds].view(len(rows), form.planes + 1, form.seconds - form.classes)
    nibbles = _unpack_nibbles(planes, form.slots)
    if form.planes:
        places += (nibbles[:, :-1].to(wide) << _shifts(form, device)).sum(1, dtype=wide)
    return places, nibbles[:, -1], fits


def _shifts(form: Form, device: torch.device) -> Tensor:
    """Where the four bits of each plane belong in coordinates: (planes, 1)."""
    return torch.arange(OCTET, form.bits, NIBBLE, device=device)[:, None]


def pack(lanes: Tensor) -> Tensor:
    """Pair 16-bit integers in int32 words; sums of words are pairs of sums while these stay within 16 bits.

    Example:
        >>> words = pack(torch.tensor([1, -2, 30_000], dtype=torch.int32))
        >>> unpack(words + words.new_tensor([5, -7]), 3)
        tensor([    6,    -2, 29993], dtype=torch.int32)
    """
    padded = torch.nn.functional.pad(lanes, (0, lanes.numel() % 2))
    return padded[0::2] + padded[1::2] * (1 << 16)


def unpack(words: Tensor, count: int) -> Tensor:
    """The first ``count`` integers of (..., words)."""
    # A lower half that is negative has borrowed from the upper one; moved up by half its range, it has not.
    apart = (words + (1 << 15)) ^ (1 << 15)
    return apart.view(torch.int16)[..., :count].int()


def _pack_nibbles(nibbles: Tensor) -> Tensor:
    """Eight integers of 4 bits, uint8, in each int32 word; rows one behind the other."""
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[-1] % 8))
    return (padded[..., 0::2] | padded[..., 1::2] << 4).flatten().view(torch.int32)


def _unpack_nibbles(words: Tensor, count: int) -> Tensor:
    """Undo :func:`_pack_nibbles` for (..., words): (..., count) uint8."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)[..., :count]


def _pack_octets(octets: Tensor) -> Tensor:
    """Four integers of 8 bits, uint8, in each int32 word."""
    return torch.nn.functional.pad(octets, (0, -octets.numel() % 4)).view(torch.int32)


def _unpack_octets(words: Tensor, count: int) -> Tensor:
    """Undo :func:`_pack_octets` for (n, words): (n, count) int64."""
    return words.contiguous().view(torch.uint8)[:, :count].long()


def _codes(second: Tensor) -> Tensor:
    """The exponent of the power of two above each second value, in 8 bits: ``2**(code - CODE_ZERO)``; uint8."""
    exponent = torch.frexp(second).exponent
    return torch.where(second > 0, exponent + CODE_ZERO, 1).clamp(1, 255).to(torch.uint8)


def _classes(magnitudes: Tensor, largest: Tensor) -> Tensor:
    """The class of each magnitude: the largest c below 8 with ``magnitude <= 8**-c largest``, exactly; uint8."""
    mantissa, exponent = torch.frexp(magnitudes)
    top = torch.frexp(largest)
    halvings = torch.add(top.exponent - exponent, mantissa > top.mantissa, alpha=-1)
    halvings = torch.where(magnitudes > 0, halvings, (largest > 0) * (CLASSES * CLASS_BITS))
    return (halvings // CLASS_BITS).clamp(0, CLASSES - 1).to(torch.uint8)


def _raised(levels: Tensor, lowest: Tensor, by: int) -> Tensor:
    """The levels of a union, raised towards () the lowest one that all picks of some rank reach.

    What a rank has left out is hardly larger than its smallest pick, and may be much larger than a pick of another
    rank: with that one's step it could send only a part. Picks keep at least two of their levels. Where only
    ranks that have nothing but zeros have picked, nothing has to be kept.
    """
    raised = levels.masked_fill(levels == SILENT, TROUBLE) + by
    return torch.maximum(levels, torch.minimum(raised, lowest))


def _level_of(step: Tensor) -> Tensor:
    """() int32: level of the smallest power of two that is not below a () number, see :data:`LOWEST`."""
    mantissa, exponent = torch.frexp(step)  # the mantissa is in [0.5, 1)
    level = torch.where(step > 0, torch.add(exponent - LOWEST, mantissa == 0.5, alpha=-1), SILENT)
    return torch.where(step < math.inf, level, TROUBLE)  # the step is not negative


def _step_of(levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Powers of two in float32 or float64, none of them subnormal; from their bits, which is exact everywhere.

    Example:
        >>> _step_of(_level_of(torch.tensor(0.3)).view(1), torch.float32)
        tensor([0.5000])
    """
    integer, digits, bias = (torch.int32, 23, 127) if dtype == torch.float32 else (torch.int64, 52, 1023)
    return ((levels.to(integer) + (LOWEST + bias)).clamp(1, 2 * bias) << digits).view(dtype)
