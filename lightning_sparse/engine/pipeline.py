"""The journey of a group's gradient: absorb, select, exchange, scatter; settle, if the step counts.

Everything between ranks is a message that a coroutine yields; :mod:`drivers <lightning_sparse.engine.drivers>` send it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.console import say
from lightning_sparse.core.layout import Gradient, InRuns, rates_at, sum_dtype
from lightning_sparse.core.messages import Meter, Steps
from lightning_sparse.core.step import Absorbed, Agreement, Candidates, Context, GroupState, Selection, Update
from lightning_sparse.engine.average import scatter_average_
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.engine.metrics import Stamp, Statistics, measure
from lightning_sparse.methods.density import count
from lightning_sparse.methods.exchanges import Dense, Exchange
from lightning_sparse.methods.memory import Memory
from lightning_sparse.methods.sparsifiers import Everything, Sparsifier
from lightning_sparse.ops import all_finite, on_device, static_shapes
from lightning_sparse.ops.on_cuda import on_cuda
from lightning_sparse.ops.reference import as_gradient

EVERYTHING, DENSE = Everything(), Dense()
"""The sparsifier and the exchange where everything is sent."""
REHEARSED = 4096, 0.25
"""Coordinates and density of steps that :func:`rehearse` takes."""


class Proposed(NamedTuple):
    """A step of a group that has been exchanged, and is not settled yet."""

    update: Update
    rounding: Tensor | None
    """(u,) what casting the average to the gradient's dtype lost; None: nothing."""
    after: GroupState
    """The state that a step that counts leaves; its memory is the group's own, which has not been settled."""
    statistics: Statistics
    skipped: Tensor
    """() bool: whether something was not finite on any rank."""
    handed: Tensor
    """(u,) what gradients got, in their dtype, free of the scale of a loss; the update is in units of the residual."""
    divisor: Tensor | None = None
    """(u,) what averages are divided by, see :meth:`~lightning_sparse.methods.memory.Memory.divisors`."""


def init_group(
    numel: int, dtype: torch.dtype, device: torch.device, ctx: Context, *, memory: Memory, sparsifier: Sparsifier
) -> GroupState:
    """State of a group before its first step. The accumulator has the gradient's dtype, but at least float32.

    Raises:
        ValueError: if the group is empty or has 2**31 - 1 coordinates or more (indices travel as 32-bit words), if the
            density is outside (0, 1], or if the sparsifier cannot serve the group.
    """
    if not 0 < numel < 2**31 - 1:
        raise ValueError(
            f"Expected a group of 1 to {2**31 - 2} coordinates, but got {numel}. Use a finer grouping such as 'bucket'."
        )
    count(ctx.density, numel)  # refuses what a schedule may give that is no density
    wide = sum_dtype(dtype)
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
    coordinate. If a gradient is not finite on any rank, the step is skipped on all: the gradient becomes NaN
    everywhere, selector and counts stay as they were, and finite coordinates wait in the residuals.

    This is :func:`exchange_group`, which has the same arguments, and :func:`settle_group`, where no other group has a
    say in whether the step counts.

    Returns:
        A coroutine that ends with the next state and statistics.
    """
    proposed = yield from exchange_group(grad, state, ctx, memory=memory, sparsifier=sparsifier, exchange=exchange)
    return settle_group(state, proposed, bool(proposed.skipped), memory), proposed.statistics


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
    anew: bool = False,
    changing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Steps[Proposed]:
    """Absorb a group's gradient and exchange; :func:`settle_group` follows if the step counts.

    At a density of 1, and where it is flushed, the group is exchanged as DDP does it: whatever the sparsifier and the
    exchange are, they are not asked and learn nothing.

    Args:
        grad: (numel,) of this rank, overwritten with the average.
        state: of this group on this rank. Its memory absorbs the gradient, but for coordinates that are not finite.
        ctx: the step; ``counts``, ``union`` and ``disjoint`` are filled in here.
        memory: error feedback.
        sparsifier: selects coordinates.
        exchange: averages the selected values.
        scale: () factor that the loss was multiplied by; what is remembered is free of it, the average has it again.
        unused: coordinates of parameters that no rank used: nothing of them is absorbed or sent.
        flush: send everything, whatever the density is.
        anew: gradients are of other parameters than those before.
        changing: is entered while what is remembered changes; no message is sent meanwhile.

    Returns:
        A coroutine that ends with what the step would settle.
    """
    if isinstance(grad, Tensor):
        grad = Gradient([grad])
    agreement = Agreement.EVERYTHING if flush else sparsifier.agreement
    whole = flush or sends_everything(sparsifier, ctx.density, grad.numel)
    if whole:
        sparsifier, exchange = EVERYTHING, DENSE
    disjoint = sparsifier.agreement is Agreement.DISJOINT
    ctx = ctx._replace(counts=state.counts, union=state.union, told=state.told)
    ctx = ctx._replace(disjoint=disjoint, candidates=state.candidates)
    meter = Meter(ctx.world_size)
    begin = Stamp.now(grad.device)
    given = grad if scale is None else grad.unscaled(scale)
    with changing():
        kept = _kept(memory, state, unused) if unused else ()
        if anew:
            memory.measure_anew_(state.memory)
        absorbed = memory.absorb_(state.memory, given, ctx)
        for place, content in kept:
            place.copy_(content)
    acc, score = _offered(absorbed, unused, sparsifier.reads_runs)
    finite, second = absorbed.finite, absorbed.second
    static = static_shapes(grad.device)
    if static:  # a rank in trouble offers NaN, and nobody waits to know
        ctx = ctx._replace(finite=finite)
    elif not finite:  # it takes part in the survey like the others
        score = torch.zeros_like(acc[:-1])
        acc = torch.full_like(acc, float("nan"))
    selected = sparsifier.select(score, state.selector, ctx)
    if isinstance(selected, Generator):
        selected = yield from meter.watch(selected)
    selection, selector = selected
    ctx = ctx._replace(second=second)
    if state.candidates is not None:
        state.candidates.forget()
    del absorbed, given, score
    if static:  # scores of 16-bit gradients have a vector of their own, which other groups can take
        grad.rooms.clear()
    picked = Stamp.now(grad.device)
    if not exchange.tells_trouble if static else not finite:
        selection = _raise_alarm(acc, selection, finite)
    update = exchange(acc, selection, ctx)
    if isinstance(update, Generator):
        update = yield from meter.watch(update)
    divisor = memory.divisors(state.memory, update, ctx)
    average, rate = update.values, None
    if memory.reads_rates and ctx.rates:
        rate = rates_at(ctx.rates, update.indices, grad.numel, average)
        average = average / rate
    if memory.averages == "moves":  # settling takes weights there
        handed, rounding, skipped = average, None, ~_is_finite(average, update.indices, grad.numel)
    else:
        handed, rounding, skipped = hand_over_(grad, update.indices, average, scale, state.candidates)
    sent = handed
    if rate is not None:
        sent, rounding = handed * rate, None if rounding is None else rounding * rate
    stamps = begin, picked, Stamp.now(grad.device)
    statistics = measure(grad.dtype, grad.numel, agreement, selection, update, ctx, meter.bytes_sent, stamps)
    named = update.union if update.named is None else update.named
    after = state if whole else GroupState(state.memory, selector, update.counts, named, state.candidates)
    return Proposed(update._replace(values=sent), rounding, after, statistics, skipped, handed, divisor)


def rehearse(
    dtype: torch.dtype,
    device: torch.device,
    ctx: Context,
    memory: Memory,
    sparsifier: Sparsifier,
    exchange: Exchange,
    in_runs: bool = False,
) -> None:
    """Take small steps that count for nothing, so that kernels are compiled and compared before the first real one.

    The first time for some parts, a line says so.
    """
    example, what = torch.empty((), device=device), (dtype, device, repr((memory, sparsifier, exchange)), in_runs)
    if not on_cuda.takes(example) or on_cuda.knows(what):
        return
    if ctx.rank == 0:
        say(
            "sparse_ddp: kernels in Triton are compiled and tried, which takes up to a minute where they are not known "
            "from an earlier run."
        )

    def steps() -> None:
        parts: dict[str, Any] = {"memory": memory, "sparsifier": sparsifier}
        numel, density = REHEARSED
        weights = [(slice(0, numel), torch.zeros(numel, dtype=dtype, device=device))]
        small = ctx._replace(density=density, parameters=weights, rates=[(slice(0, numel), 0.5)])
        state = init_group(numel, dtype, device, small, **parts)
        for step, scale in enumerate((None, torch.full((), 2.0, dtype=torch.float32, device=device))):
            given = torch.arange(numel, device=device).to(dtype)
            grad = Gradient([half.clone() for half in given.tensor_split(2)] if in_runs else [given])
            one = exchange_group(grad, state, small._replace(step=step), **parts, exchange=exchange, scale=scale)
            proposed, _ = drive_mirrored(one, ctx.world_size)
            state = settle_group(state, proposed, False, memory)

    def attempt() -> None:
        with suppress(Exception):  # kernels of parts that take no small steps are compiled in their first real one
            steps()

    on_cuda.tried(what, attempt)


def sends_everything(sparsifier: Sparsifier, density: float, numel: int) -> bool:
    """Return whether a group is exchanged as DDP does it, because the density asks for all of its coordinates."""
    return sparsifier.follows_density and count(density, numel) == numel


def settle_group(
    state: GroupState, proposed: Proposed, skipped: bool, memory: Memory, unused: Sequence[slice] = ()
) -> GroupState:
    """Return the state after a step: what was sent leaves the memory, in place, unless the step is skipped.

    Args:
        state: the step began with it.
        proposed: the group's exchange.
        skipped: whether the step counts for nothing, equal on all ranks.
        memory: of the group.
        unused: coordinates of parameters that no rank used, as they were given to :func:`exchange_group`.
    """
    kept = _kept(memory, state, unused) if unused else ()
    if skipped:
        memory.skip_(state.memory)
    else:
        memory.settle_(state.memory, proposed.update, proposed.rounding)
    for place, content in kept:
        place.copy_(content)
    if skipped:
        forget_overflow_(state, memory, len(proposed.statistics.counts))
        return state
    return proposed.after


def forget_overflow_(state: GroupState, memory: Memory, world_size: int) -> None:
    """Forget residuals so large that their sum over ranks may not be finite, after a step that was skipped.

    All later steps would be skipped otherwise.
    """
    residual = memory.residual(state.memory)
    if residual is not None:
        residual.masked_fill_(residual.abs() > torch.finfo(residual.dtype).max / world_size, 0.0)


def _kept(memory: Memory, state: GroupState, unused: Sequence[slice]) -> list[tuple[Tensor, Tensor]]:
    """Return the places and copies of all that is remembered of unused parameters, which stays as it is."""
    vectors = memory.vectors(state.memory).values()
    return [(vector[span], vector[span].clone()) for vector in vectors for span in unused]


def _offered(absorbed: Absorbed, unused: Sequence[slice], in_runs: bool) -> tuple[Tensor, Any]:
    """Return the accumulator and the score that a step selects and sends from.

    Unused parameters must not compete for the density: they are zero in a copy of the accumulator, and in the score.
    The score is one vector, unless it may lie in runs.
    """
    acc, score = absorbed.acc, absorbed.score
    if unused:
        acc = acc.clone()
    for span in unused:
        acc[span].zero_()
        if score is not None:
            score[span].zero_()
    if isinstance(score, InRuns) and not in_runs:
        score = score.place.flat()
    return acc, acc[:-1] if score is None else score


def _raise_alarm(acc: Tensor, selection: Selection, finite: Tensor) -> Selection:
    """Where the gradient is not finite, offer NaN, at coordinate 0 if nothing was picked: all ranks then see it."""
    if static_shapes(acc.device):
        alone = ~finite & (selection.count == 0)
        selection.indices[:1].masked_fill_(alone, 0)
        if selection.spare is not None:
            selection.spare[:1].masked_fill_(alone, False)
        return selection._replace(count=selection.count + alone)
    if selection.count > 0:
        return selection
    indices = selection.indices if selection.indices.numel() else selection.indices.new_zeros(1)
    indices = torch.full_like(indices, acc.numel() - 1)
    indices[0] = 0
    spare = None if selection.spare is None else torch.zeros_like(indices, dtype=torch.bool)
    return selection._replace(indices=indices, count=torch.ones_like(selection.count), spare=spare)


def hand_over_(
    grad: Gradient, indices: Tensor | None, average: Tensor, scale: Tensor | None, candidates: Candidates | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Write an average to the gradient's place, in the gradient's dtype; NaN everywhere if it is not finite.

    Args:
        grad: of this rank.
        indices: see :class:`~lightning_sparse.core.step.Update`.
        average: (u,) in the accumulator's dtype.
        scale: () of the loss, which the gradient has again; None: none.
        candidates: which may have set the place to zero already.

    Returns:
        (u,) what the gradient got, without the scale; (u,) what its dtype has lost of it, None: nothing; and () whether
        the step is skipped.
    """
    if static_shapes(grad.device):
        cleared = candidates is not None and candidates.cleared(grad.runs)
        return on_device.hand_over_(grad.runs, indices, average, scale, cleared)
    values, handed, rounding, skipped = as_gradient(average, grad.dtype, scale)
    scatter_average_(grad, indices, values, candidates)
    for run in grad.runs if skipped else ():
        run.fill_(float("nan"))
    return handed, rounding, skipped


def _is_finite(average: Tensor, indices: Tensor | None, numel: int) -> Tensor:
    """Return () whether an average is finite, wherever its values count."""
    if indices is not None and static_shapes(average.device):
        average = average.masked_fill(indices == numel, 0.0)
    return all_finite(average)
