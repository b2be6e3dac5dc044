"""A step of the default, UnionTopK with packed_union, in 23 to 32 launches on a GPU, for any n.

The same journey as in :mod:`~lightning_sparse.engine.pipeline`, whose operations of torch give the same bits, with
kernels in Triton that do together what belongs together. With a plain residual 16 bytes a coordinate are read and
written, with :class:`~lightning_sparse.SecondMoment` 28, 2 to 3 more for bitmaps and counts, and about 430 and 600 for
each one that is sent. The host waits for nothing and decides nothing.

Everything that changes from step to step is an argument that kernels are not specialised for, or lies on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lightning_sparse.core.console import say
from lightning_sparse.core.messages import AllGather, AllReduce, Meter, Steps, ask
from lightning_sparse.core.step import Candidates, Context, GroupState, Selection, Update
from lightning_sparse.engine.delivery import Proposed
from lightning_sparse.engine.metrics import Stamp, measure
from lightning_sparse.engine.network.drivers import drive_mirrored
from lightning_sparse.methods.density import count
from lightning_sparse.methods.exchanges import Exchange
from lightning_sparse.methods.exchanges.packed_union import Lanes, PackedUnion
from lightning_sparse.methods.memory import Memory, Residual, SecondMoment
from lightning_sparse.methods.memory.second_moment import SecondMomentState, damping
from lightning_sparse.methods.sparsifiers import Sparsifier, UnionTopK
from lightning_sparse.methods.sparsifiers.union_topk import MARGIN, WINDOW, FillState
from lightning_sparse.ops.form import Form
from lightning_sparse.ops.on_cuda import compare, on_cuda

MOST_NUMEL = (1 << 30) - 1
"""Largest group: kernels count twice its coordinates in 31 bits."""
Plain = Callable[..., Steps[Proposed]]
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class Scratch:
    """The buffers of one group's kernels. It is kept from step to step, and holds nothing that counts.

    Args:
        numel: length of the group.
        n: number of ranks.
        device: where it lies.
    """

    def __init__(self, numel: int, n: int, device: torch.device) -> None:
        from lightning_sparse.ops.triton import launch as triton_launch
        from lightning_sparse.ops.triton import select as triton_select
        from lightning_sparse.ops.triton import union as triton_union

        words = triton_union.bitmap_words(numel)
        sizes = [
            triton_select.CONTROL, 2 * triton_select.DIGITS.value,
            words, triton_launch.PROGRAMS, words, triton_launch.PROGRAMS, n, 1,
        ]  # fmt: skip
        self.emptied = torch.empty(sum(sizes), dtype=torch.int32, device=device)
        """The buffer that is zero at the start of a step, in one piece."""
        control, histograms, *marks, self.lowest, self.trouble = torch.split_with_sizes(self.emptied, sizes)
        noted, counts = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (words, triton_launch.PROGRAMS)
        )
        self.search = triton_select.Scratch(control, histograms, noted, counts)
        self.named, self.first = triton_union.Bitmap(*marks[:2]), triton_union.Bitmap(*marks[2:])
        self.bound = torch.full((), math.inf, device=device)
        """Magnitude from which on the pass that forms the accumulator notes coordinates."""


def serves(
    grad: Tensor,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
    plain: Plain,
) -> bool:
    """Return whether :func:`exchange_group` can take a step instead of :mod:`~lightning_sparse.engine.pipeline`.

    The first time that it can, kernels are compiled, with a line that says so, and what they compute is compared.

    Args:
        grad: as there; one element of the same dtype and device is enough.
        state: as there.
        ctx: the step.
        memory: as there.
        sparsifier: as there.
        exchange: as there.
        plain: the same step in operations of torch.
    """
    if not on_cuda.takes(grad) or grad.dtype not in GRADIENTS or type(sparsifier) is not UnionTopK:
        return False
    if type(exchange) is not PackedUnion or type(memory) not in (Residual, SecondMoment):
        return False
    from lightning_sparse.ops.triton.values import MOST_RANKS

    acc, n = state.memory.residual, ctx.world_size
    numel, lanes = acc.numel() - 1, Lanes.of(n, memory.needs_second)
    if acc.dtype != torch.float32 or not 1 < numel <= MOST_NUMEL or not 1 < n <= MOST_RANKS:
        return False
    if lanes.most < lanes.fewest or not grad.is_contiguous():
        return False
    what = grad.dtype, grad.device, sparsifier, memory.needs_second
    if ctx.rank == 0 and not on_cuda.knows(what):
        say(
            "sparse_ddp: kernels in Triton are compiled and tried, which takes up to a minute where they are not known "
            "from an earlier run."
        )
    return on_cuda.tried(what, lambda: _rehearse(grad, memory, sparsifier, plain))


def exchange_group(
    grad: Tensor,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    scale: Tensor | None = None,
    changing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Steps[Proposed]:
    """Do the work of :func:`~lightning_sparse.engine.pipeline.exchange_group`, where :func:`serves` says yes.

    Args:
        grad: (numel,) or more; no spare slot is needed.
        state: of this group on this rank.
        ctx: the step.
        memory: a plain residual, or with a second moment.
        sparsifier: who picks.
        scale: of the loss.
        changing: is entered while what is remembered changes.
    """
    from lightning_sparse.ops.triton import dense as triton_dense
    from lightning_sparse.ops.triton import lanes as triton_lanes
    from lightning_sparse.ops.triton import need as triton_need
    from lightning_sparse.ops.triton import second as triton_second
    from lightning_sparse.ops.triton import select as triton_select
    from lightning_sparse.ops.triton import union as triton_union
    from lightning_sparse.ops.triton import values as triton_values

    acc: Tensor = state.memory.residual
    numel, n = acc.numel() - 1, ctx.world_size
    assert isinstance(sparsifier, UnionTopK) and isinstance(memory, (Residual, SecondMoment))
    k, turn, lanes = count(ctx.density, numel), (ctx.rank - ctx.step) % n, Lanes.of(n, memory.needs_second)
    share, slots = (k + turn) // n, -(-k // n)
    room = math.floor((sparsifier._most * k + n - 1) / n)
    scratch, meter, start = _scratch_of(state, numel, n, grad.device), Meter(n), Stamp.now(grad.device)
    if scale is not None:
        scale = scale.to(torch.float32)

    void = torch.empty((), dtype=torch.uint8, device=grad.device)
    after, spare = triton_need.begin(
        scratch.emptied, void, state.selector, state.union, k, turn, n,
        most=sparsifier._most, margin=MARGIN, window=WINDOW,
    )  # fmt: skip
    search, weighed, beside, second = scratch.search, None, None, None
    noted = search.words, search.counts, search.broken, scratch.bound
    if isinstance(memory, Residual):
        with changing():
            triton_dense.accumulate_(acc, grad, memory.decay, scale, *noted)
    else:
        moments: SecondMomentState = state.memory
        second, power, damp = moments.second, memory.power(moments), damping(ctx.density)
        weighed = triton_second.Weighed(second, acc.new_empty(2))
        beside = triton_values.Beside(
            second, lanes.low, lanes.wide, lanes.parts, (ctx.rank + 0.5) / n, power, memory.eps, damp
        )
        with changing():
            units = memory.units(moments, [grad[:numel]], ctx.density, scale).float()
            by = power, units, memory.beta2, memory.eps, damp
            triton_second.weigh_(acc, weighed, grad, scale, *by, *noted)
    found = triton_select.pick(acc[:numel], search, scratch.bound, share, slots + room, spare, turn, n, weighed)
    selected = Stamp.now(grad.device)

    form = Form.of(numel, slots + room, weighed is not None)
    message = triton_lanes.tell(acc, found.keys, found.number, found.largest, search.broken, form, lanes.most, second)
    rows = yield from meter.watch(ask(AllGather(message)))
    heard = triton_lanes.hear(rows, form, scratch.named, scratch.first, scratch.lowest, scratch.trouble)
    levels = message.new_empty(k) if beside is None else message.new_empty((2, k))
    indices, sizes = triton_union.listed(scratch.named, numel, k, ctx.step, first=scratch.first, levels=levels)
    triton_union.raise_levels_(levels, indices, heard.places, heard.levels, numel)
    rounded = triton_values.round_to_lanes(acc, indices, levels, scratch.lowest, lanes.most, n, beside)
    total = yield from meter.watch(ask(AllReduce(rounded.words)))
    codes = None if beside is None else levels[1]
    values, rounding, divisor = triton_values.average_(
        grad, indices, total, rounded, scratch.trouble, scale, void, n, numel, codes, beside
    )
    triton_dense.fill_if_(grad, void, math.nan)

    named, size = sizes.unbind()
    update = Update(indices, values, indices, rounded.taken, heard.numbers, size, named)
    selection = Selection(indices, found.number, aligned=True, limit=k)
    stamps = start, selected, Stamp.now(grad.device)
    statistics = measure(grad.dtype, numel, sparsifier.agreement, selection, update, ctx, meter.bytes_sent, stamps)
    reached = GroupState(state.memory, FillState(*after), heard.numbers, named, state.candidates)
    return Proposed(update, rounding, reached, statistics, void.view(torch.bool), divisor)


def _scratch_of(state: GroupState, numel: int, n: int, device: torch.device) -> Scratch:
    """The scratch of a group, made in its first step."""
    assert state.candidates is not None
    if state.candidates.on_device is None:
        state.candidates.on_device = Scratch(numel, n, device)
    scratch: Scratch = state.candidates.on_device
    return scratch


def _rehearse(grad: Tensor, memory: Memory, sparsifier: UnionTopK, plain: Plain) -> None:
    """Compile all kernels, and compare what they compute: messages of both forms, first and later steps, a scale.

    The last step of each form is skipped, as a coordinate is not finite.

    Raises:
        MismatchError: if they differ from operations of torch. Whatever compilers and drivers raise comes through.
    """
    numel, n, device = 4096, 2, grad.device
    if isinstance(memory, SecondMoment):  # products of these numbers are exact, however torch rounds them
        memory = SecondMoment(1 - 2**-10, memory.eps)
    places = torch.arange(numel, device=device)
    # Magnitudes of sums are different, so that there is no choice between equal ones.
    signs = 1 - 2 * (places % 2)
    values, small = (1 + places * 1103 % numel) * signs / 64, (1 + places % 128) * signs / (1 << 14)
    broken = small.masked_fill(places == numel // 3, math.inf)
    for k in (1, numel // 2):
        ctx = Context(step=0, density=k / numel, rank=0, world_size=n)
        states = []
        for _ in range(2):
            selector = sparsifier.init(numel, n, ctx.density, device)
            state = GroupState(memory.init(numel, device, torch.float32), selector, None, candidates=Candidates())
            state.memory.residual[:-1].copy_(values)
            states.append(state)
        scaled = torch.full((), 2.0, device=device)
        for step, (given, scale) in enumerate(((small, None), (small, scaled), (broken, None))):
            now = ctx._replace(step=step)
            grads = [given.to(grad.dtype, copy=True) for _ in states]
            of_torch = plain(grads[0], states[0], now, memory=memory, sparsifier=sparsifier, scale=scale)
            own = exchange_group(grads[1], states[1], now, memory=memory, sparsifier=sparsifier, scale=scale)
            proposed = [drive_mirrored(steps, n)[0] for steps in (of_torch, own)]
            for state, one in zip(states, proposed, strict=True):
                memory.settle_(state.memory, one.update, one.rounding, one.void)
            expected, found = (
                _left_behind(memory, x, one, given is broken) for x, one in zip(grads, proposed, strict=True)
            )
            states = [one.after for one in proposed]
            compare(
                found, expected, memory=memory, dtype=grad.dtype, numel=numel, n=n, k=k, step=step,
                scale=None if scale is None else float(scale),
            )  # fmt: skip


def _left_behind(memory: Memory, grad: Tensor, proposed: Proposed, skipped: bool) -> dict[str, Tensor]:
    """Everything that a step may write to; of a skipped one, where picks do not matter, what is remembered."""
    update, after = proposed.update, proposed.after
    remembered = memory.vectors(after.memory) | {"void": proposed.void}
    if skipped:
        return remembered
    assert update.indices is not None and after.counts is not None and after.union is not None
    inside = update.indices < grad.numel()
    arrived = {"indices": update.indices, "values": update.values.float()}
    if proposed.divisor is not None:
        arrived["divisor"] = proposed.divisor
    arrived = {name: x[inside] for name, x in arrived.items()}
    found = {"gradient": grad, **after.selector._asdict(), "counts": after.counts, "union": after.union}
    return remembered | found | arrived
