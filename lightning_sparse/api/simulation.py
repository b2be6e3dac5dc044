"""Simulation of n ranks in one process, with the code of training: to study a method without a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context, GroupState
from lightning_sparse.engine.average import spread_divisor
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.metrics import Step, local, norm_of, summarize
from lightning_sparse.engine.pipeline import Proposed, exchange_group, init_group, settle_group
from lightning_sparse.methods.density import DensitySchedule, as_schedule
from lightning_sparse.methods.exchanges import Exchange, as_exchange
from lightning_sparse.methods.memory import Memory, as_memory
from lightning_sparse.methods.sparsifiers import SPARSIFIERS, Sparsifier


class StepTrace(NamedTuple):
    """Results of one simulated step."""

    step: int
    target_density: float
    counts: Tensor
    """(n,) int64 number of selected indices per rank."""
    indices: Tensor
    """(u,) int64 coordinates of the update, ascending, without padding."""
    threshold: Tensor | None
    """(n,) float64 threshold of each rank, or None."""
    update: Tensor
    """(numel,) mean over ranks of the released values."""
    divisor: Tensor | None
    """(numel,) divisor that turns the update into a step of Adam, at its coordinates; None: it is a gradient."""
    residual_norm: Tensor
    """(n,) float64 Euclidean norms of the residuals after the step."""
    quantities: dict[str, float]
    """Numbers that a Trainer logs: :data:`~lightning_sparse.engine.metrics.QUANTITIES` by name."""
    bytes_sent: Tensor
    """(n,) float64 bytes each rank sends, see :meth:`~lightning_sparse.core.messages.Message.bytes_sent`."""
    partition: Tensor | None
    """(n, 2) int64 first and past-the-end coordinate of each rank's range, for methods with contiguous ranges."""
    ranks: tuple[Step, ...]
    """Statistics of each rank, without coordinates: for metrics such as :class:`.DensityError`."""

    @property
    def density(self) -> float:
        """Share of coordinates in the update, u / numel."""
        return self.quantities["density"]

    @property
    def density_error(self) -> float:
        """Distance from the target, |u - k| / numel."""
        return self.quantities["density_error"]

    @property
    def padding_ratio(self) -> float:
        """Longest over mean selection, n max_i k_i / sum_i k_i."""
        return self.quantities["padding_ratio"]

    @property
    def build_up(self) -> float:
        """Coordinates in the update over the target, u / k."""
        return self.quantities["build_up"]


FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def simulate(
    gradients: Iterable[Tensor],
    *,
    sparsifier: Sparsifier | str,
    density: float | DensitySchedule,
    memory: Memory | str | None = None,
    exchange: Exchange | str | None = None,
) -> Iterator[StepTrace]:
    """Run a sparsifier over a stream of gradients, all ranks side by side in this process.

    The ranks run the same code as in training; only the network is replaced. Gradients are read and traces are yielded
    one step at a time, so that a stream may be larger than memory, or be computed at parameters that the previous
    trace has moved. All n and all group sizes work, n = 1 included.

    Args:
        gradients: one (n, numel) tensor per step, all of one shape, float dtype and device, or a (steps, n, numel)
            tensor. They are not modified.
        sparsifier: an instance or a name such as ``"top_k"``.
        density: target in (0, 1], or a schedule.
        memory: error feedback, an instance or a name such as ``"low_pass"``; None: :class:`.Residual`.
        exchange: an instance, a name, or None for the sparsifier's natural one.

    Yields:
        One :class:`StepTrace` per step.

    Raises:
        ValueError: at the call, for an unknown name, a density outside (0, 1], gradients that are no iterable, or an
            exchange that does not accept the sparsifier or does not carry the memory's second moments; while iterating,
            for gradients of a wrong shape, dtype or device.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(20, 4, 1000, generator=torch.Generator().manual_seed(0))
        >>> for trace in ls.simulate(stream, sparsifier="top_k", density=0.01):
        ...     pass
        >>> trace.step, trace.counts.tolist(), round(trace.build_up, 1)
        (19, [10, 10, 10, 10], 4.0)
    """
    sparsifier = SPARSIFIERS.resolve(sparsifier)
    memory = as_memory(memory)
    gradients_do = memory.averages != "moves"
    expect(gradients_do, "memory", "one of gradients: Drift averages what optimizers do to weights", memory)
    exchange = as_exchange(exchange, sparsifier, memory)
    many = isinstance(gradients, Iterable) and not (isinstance(gradients, Tensor) and gradients.dim() == 0)
    expect(many, "gradients", "an iterable of (n, numel) tensors", gradients)
    return _run(iter(gradients), sparsifier, as_schedule(density), memory, exchange)


def _run(
    gradients: Iterator[Tensor], sparsifier: Sparsifier, schedule: DensitySchedule, memory: Memory, exchange: Exchange
) -> Iterator[StepTrace]:
    def run(grad: Tensor, state: GroupState, ctx: Context) -> Steps[tuple[GroupState, Proposed]]:
        parts: dict[str, Any] = {"memory": memory, "sparsifier": sparsifier, "exchange": exchange}
        proposed = yield from exchange_group(grad, state, ctx, **parts)
        return settle_group(state, proposed, bool(proposed.skipped), memory), proposed

    states: list[GroupState] = []
    alike, counted = None, 0
    for number, rows in enumerate(gradients):
        alike = _check_rows(rows, alike)
        n, numel = rows.shape
        ctx = Context(step=counted, density=schedule(counted), rank=0, world_size=n)
        if not states:
            first = numel, rows.dtype, rows.device, ctx._replace(density=schedule(0))
            states = [init_group(*first, memory=memory, sparsifier=sparsifier) for _ in range(n)]
        grads = [row.detach().clone() for row in rows]
        steps = [run(grads[rank], states[rank], ctx._replace(rank=rank)) for rank in range(n)]
        states, proposed = (list(of_ranks) for of_ranks in zip(*drive_ranks(steps), strict=True))
        if not proposed[0].skipped:
            counted += 1
        norms = [norm_of(memory.residual(state.memory)) for state in states]
        yield _trace(number, ctx, grads[0], proposed, norms, sparsifier.ranges(numel, states[0].selector, ctx))


def _check_rows(
    rows: Tensor, alike: tuple[torch.Size, torch.dtype, torch.device] | None
) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return shape, dtype and device of a step's gradients; raise unless they equal those of the first step."""
    dense = isinstance(rows, Tensor) and rows.layout == torch.strided and not rows.is_meta
    if not dense or rows.dim() != 2 or 0 in rows.shape or rows.dtype not in FLOATS:
        came = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        if isinstance(rows, Tensor) and not dense:
            came += " on meta" if rows.is_meta else f" {rows.layout}"
        raise ValueError(
            f"Expected gradients of each step as one (n, numel) tensor of floats of 16 bits or more, but got {came}."
        )
    found = rows.shape, rows.dtype, rows.device
    if alike is not None and found != alike:
        first, came = (f"{tuple(shape)} {dtype} on {device}" for shape, dtype, device in (alike, found))
        raise ValueError(f"Expected gradients of {first} as in the first step, but got {came}.")
    return found


def _trace(
    step: int, ctx: Context, update: Tensor, proposed: Sequence[Proposed], norms: Sequence[float], ranges: Tensor | None
) -> StepTrace:
    statistics = [one.statistics for one in proposed]
    first, numel = statistics[0], update.numel()
    indices = torch.arange(numel, device="cpu") if first.indices is None else torch.unique(first.indices.cpu())
    indices = indices[indices < numel]
    thresholds = [s.threshold for s in statistics if s.threshold is not None]
    pairs = zip(statistics, norms, strict=True)
    steps = [Step([one._replace(indices=None)], [norm], exposed_ms=0.0) for one, norm in pairs]
    own = torch.tensor([list(local(step).values()) for step in steps], dtype=torch.float64, device="cpu")
    return StepTrace(
        step=step,
        target_density=ctx.density,
        counts=first.counts.cpu(),
        indices=indices,
        threshold=torch.stack(thresholds).cpu() if thresholds else None,
        update=update,
        divisor=None if proposed[0].divisor is None else spread_divisor(first.indices, proposed[0].divisor, numel),
        residual_norm=torch.tensor(norms, dtype=torch.float64, device="cpu"),
        quantities=summarize(steps[0], lambda _: own.mean(0)),
        bytes_sent=torch.tensor([s.bytes_sent for s in statistics], dtype=torch.float64, device="cpu"),
        partition=ranges,
        ranks=tuple(steps),
    )
