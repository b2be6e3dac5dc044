"""The journey of a gradient, in order: accumulate, select, exchange, settle, scatter, commit.

Everything between ranks is a message that a coroutine yields; :mod:`drivers <lightning_sparse.engine.network.drivers>`
send it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.core.candidates import Candidates
from lightning_sparse.core.clock import Stamp
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.messages import Meter, Steps, resolve
from lightning_sparse.core.step import Agreement, Context, GroupState, Selection, Update
from lightning_sparse.engine import fused
from lightning_sparse.engine.metrics import Statistics, measure
from lightning_sparse.methods.density import count
from lightning_sparse.methods.exchanges import Dense, Exchange
from lightning_sparse.methods.memory import Memory
from lightning_sparse.methods.sparsifiers import Everything, Sparsifier
from lightning_sparse.ops import all_finite, choose, fill_if_, put_in_runs_, scatter_, static_shapes

EVERYTHING, DENSE = Everything(), Dense()
"""What takes the place of sparsifier and exchange where everything is sent."""


def init_group(
    numel: int, dtype: torch.dtype, device: torch.device, ctx: Context, *, memory: Memory, sparsifier: Sparsifier
) -> GroupState:
    """State of a group before its first step. The accumulator has the gradient's dtype, but at least float32.

    Raises:
        ValueError: if the group is empty or has 2**31 - 1 coordinates or more (indices travel as 32-bit words), or if
            the sparsifier cannot serve it.
    """
    if not 0 < numel < 2**31 - 1:
        raise ValueError(
            f"Expected a group of 1 to {2**31 - 2} coordinates, but got {numel}. Use a finer grouping such as 'bucket'."
        )
    wide = torch.promote_types(dtype, torch.float32)
    selector = sparsifier.init(numel, ctx.world_size, ctx.density, device)
    return GroupState(memory.init(numel, device, wide), selector, None, candidates=Candidates())


def reduce_group(
    grad: Tensor | Gradient,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
) -> Steps[tuple[GroupState, Statistics]]:
    """Replace a group's gradient on this rank by the sparsified average over all ranks.

    Nothing is lost: ``n * update + sum_i residual_i(after) = sum_i (residual_i(before) + gradient_i)`` for every
    coordinate. If a gradient is not finite on any rank, the step is void on all: the gradient becomes NaN everywhere,
    and memory, selector and counts stay as they were.

    This is :func:`exchange_group`, which has the same arguments, and :func:`commit_group`, where no other group has a
    say in whether the step counts.

    Returns:
        A coroutine that ends with the next state and what happened.
    """
    after, statistics, void = yield from exchange_group(
        grad, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange
    )
    return commit_group(state, after, void, memory), statistics


def exchange_group(
    grad: Tensor | Gradient,
    state: GroupState,
    ctx: Context,
    *,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
    scale: Tensor | None = None,
    unused: Sequence[slice] = (),
    flush: bool = False,
    kernels: bool = True,
) -> Steps[tuple[GroupState, Statistics, Tensor]]:
    """Exchange a group's gradient, and leave it to :func:`commit_group` whether the step counts.

    At a density of 1, and where it is flushed, the group is exchanged as DDP does it: whatever the sparsifier and the
    exchange are, they are not asked and learn nothing.

    Args:
        grad: (numel,) of this rank, overwritten with the average; one run where shapes are static.
        state: of this group on this rank.
        ctx: the step; ``counts``, ``union`` and ``disjoint`` are filled in here.
        memory: error feedback.
        sparsifier: who picks.
        exchange: how picks travel.
        scale: () factor that the loss was multiplied by; what is remembered is free of it, the average has it again.
        unused: coordinates of parameters that no rank used: nothing of them is sent.
        flush: send everything, whatever the density is.
        kernels: whether :mod:`~lightning_sparse.engine.fused` may take the step over, where it can.

    Returns:
        A coroutine that ends with the state that a valid step leaves, what happened, and () whether a gradient of this
        group was not finite on any rank.
    """
    if isinstance(grad, Tensor):
        grad = Gradient([grad])
    agreement = Agreement.EVERYTHING if flush else sparsifier.agreement
    whole = flush or sends_everything(sparsifier, ctx.density, grad.numel)
    if whole:
        sparsifier, exchange = EVERYTHING, DENSE
    disjoint = sparsifier.agreement is Agreement.DISJOINT
    ctx, meter = ctx._replace(counts=state.counts, union=state.union, disjoint=disjoint), Meter(ctx.world_size)
    if not unused and not whole and kernels:
        flat = grad.runs[0]
        if takes_kernels(flat, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange):
            steps = fused.exchange_group(flat, state, ctx, memory=memory, sparsifier=sparsifier, scale=scale)
            return (yield from steps)
    if not static_shapes(grad.device):
        ctx = ctx._replace(candidates=state.candidates)
    begin = Stamp.now(grad.device)
    if scale is not None:
        for run in grad.runs:
            run.div_(scale)
    acc = memory.accumulate_(state.memory, grad, ctx)
    score = memory.score_(state.memory, acc, grad, ctx)
    score = acc[:-1] if score is None else score
    for span in unused:  # what is remembered of them, and a decay, must not compete
        acc[span].zero_()
        score[span].zero_()
    finite = all_finite(acc[:-1], ctx.candidates)
    if static_shapes(grad.device):  # what is selected then counts for nothing, and nobody waits to know
        ctx = ctx._replace(trouble=~finite)
    elif not finite:  # a rank in trouble takes part in the survey like the others
        acc.zero_()
        score.zero_()
    selection, selector = yield from meter.watch(resolve(sparsifier.select(score, state.selector, ctx)))
    ctx = ctx._replace(second=memory.second(state.memory))
    selected = Stamp.now(grad.device)
    selection = _raise_alarm(acc, selection, finite)
    update = yield from meter.watch(resolve(exchange(acc, selection, ctx)))
    values, sent = _as_gradient(update.values, grad.dtype, scale)
    void = ~all_finite(values if values.dtype == acc.dtype else update.values)  # narrow ones are held in their range
    rounding = None if grad.dtype == acc.dtype else update.values - sent
    memory.settle_(state.memory, update, rounding)
    _scatter_(grad, update, values, void, ctx.candidates)
    stamps = begin, selected, Stamp.now(grad.device)
    numel = acc.numel() - 1
    statistics = measure(grad.dtype, numel, agreement, selection, update, ctx, meter.bytes_sent, stamps)
    if whole:
        return state, statistics, void
    named = update.union if update.named is None else update.named
    return GroupState(state.memory, selector, update.counts, named, state.candidates), statistics, void


def takes_kernels(
    grad: Tensor, state: GroupState, ctx: Context, *, memory: Memory, sparsifier: Sparsifier, exchange: Exchange
) -> bool:
    """Whether :mod:`~lightning_sparse.engine.fused` takes steps over; compiles its kernels where it has to."""
    plain = partial(exchange_group, exchange=exchange, kernels=False)
    return fused.serves(grad, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange, plain=plain)


def sends_everything(sparsifier: Sparsifier, density: float, numel: int) -> bool:
    """Whether a group is exchanged as DDP does it, because the density asks for all of its coordinates."""
    return sparsifier.follows_density and count(density, numel) == numel


def commit_group(
    before: GroupState, after: GroupState, void: Tensor | bool, memory: Memory, unused: Sequence[slice] = ()
) -> GroupState:
    """The state that counts: the one before the step if it is void, the one after it otherwise.

    What ``before`` holds stays as it is until the next step begins.

    Args:
        before: what the step began with.
        after: what :func:`exchange_group` gave; the memory's own state is one and the same object in both.
        void: () whether the step counts for nothing, equal on all ranks; a bool where the host knows it.
        memory: whose it is.
        unused: coordinates of parameters that no rank used, as they were given there.
    """
    remembered = memory.commit(before.memory, void, unused)
    if isinstance(void, bool):
        return (before if void else after)._replace(memory=remembered, candidates=before.candidates)
    counts, union = before.counts, before.union
    if counts is None and after.counts is not None and after.union is not None and static_shapes(void.device):
        counts, union = torch.full_like(after.counts, -1), torch.full_like(after.union, -1)
    old = GroupState(None, before.selector, counts, union)
    new = GroupState(None, after.selector, after.counts, after.union)
    kept: GroupState = choose(void, old, new)
    return kept._replace(memory=remembered, candidates=before.candidates)


def _as_gradient(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The average in the gradient's dtype and scale, and what of it that is without the scale.

    A value beyond the dtype's range is sent as far as the range goes: the step counts, and the rest follows.
    """
    wide = values.dtype
    if scale is not None:
        values = values * scale
    if dtype != wide:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    values = values.to(dtype)
    return values, values if scale is None else values.to(wide) / scale


def _raise_alarm(acc: Tensor, selection: Selection, finite: Tensor) -> Selection:
    """Where the gradient is not finite, offer NaN, at coordinate 0 if nothing was picked: all ranks then see it."""
    if static_shapes(acc.device):
        alone = ~finite & (selection.count == 0)
        selection.indices[:1].masked_fill_(alone, 0)
        if selection.spare is not None:
            selection.spare[:1].masked_fill_(alone, False)
        return selection._replace(count=selection.count + alone)
    if finite:
        return selection
    acc.fill_(float("nan"))
    if selection.count > 0:
        return selection
    indices = selection.indices if selection.indices.numel() else selection.indices.new_zeros(1)
    indices = torch.full_like(indices, acc.numel() - 1)
    indices[0] = 0
    spare = None if selection.spare is None else torch.zeros_like(indices, dtype=torch.bool)
    return selection._replace(indices=indices, count=torch.ones_like(selection.count), spare=spare)


def _scatter_(grad: Gradient, update: Update, values: Tensor, void: Tensor, candidates: Candidates | None) -> None:
    """The average into the gradient's place; NaN everywhere in a void step."""
    if static_shapes(grad.device):
        scatter_(grad.runs[0], update.indices, values, void)
        return
    if update.indices is None:
        for span, run in grad:
            run.copy_(values[span])
    else:
        if candidates is None or not candidates.cleared(grad.runs):
            for run in grad.runs:
                run.zero_()
        put_in_runs_(grad.runs, update.indices, values)
    for run in grad.runs:
        fill_if_(run, void, float("nan"))
