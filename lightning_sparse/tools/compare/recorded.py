"""Open-loop comparison of methods on the same recorded gradients: density, balance, captured energy, traffic.

The loop is open: updates do not change the next gradients. The numbers thus show the effect of a method on a gradient,
quickly and at many settings. For the quality of training see :mod:`~lightning_sparse.tools.compare.training`.

All methods have a plain residual here, for any memory that they have in a training. The density is meant as in their
papers: each rank selects k of its own, or all ranks together select k.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse import simulate
from lightning_sparse.api.simulation import StepTrace
from lightning_sparse.core.registry import unknown
from lightning_sparse.core.step import Agreement
from lightning_sparse.exchanges import Exchange
from lightning_sparse.methods.density import count
from lightning_sparse.ops import top_k
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.tools.compare import jobs
from lightning_sparse.tools.compare.jobs import Job
from lightning_sparse.tools.compare.methods import Method, choose
from lightning_sparse.tools.compare.tasks import TASKS, heavy_tail, make, record

BAND = 0.1
"""Largest relative distance of an estimate from its target."""
STAY = 10
"""Steps that it has to stay within."""
SETTLED = 60
"""Steps for a method to find its threshold; half of the stream, if that is less."""

QUANTITIES: Mapping[str, str] = {
    "relative_density_error": (
        "|u - k| / k in percent, u coordinates in the update; mean over the last third of the steps"
    ),
    "steps_to_target": (
        "first step from which the estimate, mean over ranks, stays within 10 % of its target for 10 steps; "
        "empty if there is none, as always in fewer than 10 steps"
    ),
    "padding_ratio": "f(t) = n max_i k_i / sum_i k_i; mean over the last third of the steps",
    "build_up": "u / k; mean over the last third of the steps",
    "estimate": (
        "picks over intended picks: k_i / k of each rank where ranks pick by themselves, u / k where k is meant for "
        "all ranks together; mean over ranks and the steps from 60 on (over the second half of shorter streams)"
    ),
    "estimate_low": "5 % quantile of the estimate over the same ranks and steps",
    "estimate_high": "95 % quantile of the estimate over the same ranks and steps",
    "captured": (
        "(|S|^2 - |S - n u|^2) / |S_k|^2 with S the sum over ranks of residual and gradient, n u what the update takes "
        "out of it and S_k its k largest entries: energy over what the best k coordinates hold; mean over the last "
        "third of the steps"
    ),
    "bytes_sent": "bytes that a rank sends in a step under ring collectives, mean over ranks and steps",
}
"""The measures of a :class:`Row` and their meanings."""


class Row(NamedTuple):
    """Results of one method on one stream; a line of ``simulate.csv``. Measures: :data:`QUANTITIES`."""

    stream: str
    ranks: int
    density: float
    method: str
    steps: int
    seed: int
    relative_density_error: float
    steps_to_target: int | None
    padding_ratio: float
    build_up: float
    estimate: float
    estimate_low: float
    estimate_high: float
    captured: float
    bytes_sent: float

    @property
    def key(self) -> tuple[str, int, float, str, int, int]:
        """Key of its job."""
        return self.stream, self.ranks, self.density, self.method, self.seed, self.steps


STREAMS = (*TASKS, "heavy_tail")
"""Names of streams, see :func:`stream`."""


def stream(name: str, *, ranks: int, steps: int, seed: int = 0, text: str | None = None) -> list[Tensor]:
    """Return the gradients of n ranks, step by step.

    Args:
        name: a task, trained densely while its gradients are recorded, or ``"heavy_tail"``.
        ranks: number of ranks n.
        steps: length.
        seed: of everything.
        text: file for the task ``text``; None: the text that comes with Python.

    Returns:
        One (n, numel) float32 tensor per step.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in STREAMS:
        raise unknown("stream", name, STREAMS)
    if name == "heavy_tail":
        return list(heavy_tail(ranks=ranks, steps=steps, seed=seed))
    return list(record(make(name, ranks=ranks, seed=seed, text=text), steps))


def plan(*, streams: Sequence[str], methods: Sequence[str] | None, seed: int = 0, **settings: Any) -> list[Job]:
    """Return jobs for every method on every stream, with every number of ranks and density.

    Args:
        streams: names in :data:`STREAMS`.
        methods: names in :data:`~lightning_sparse.tools.compare.methods.METHODS`; None: all that differ in more than
            their memory.
        seed: of the streams.
        settings: numbers of ranks (each at least 1), densities and other arguments of
            :func:`~lightning_sparse.tools.compare.jobs.plan`.

    Example:
        >>> jobs = plan(streams=["text"], ranks=[2, 4], densities=[0.1], methods=["top_k"], steps=5)
        >>> [(job.source, job.ranks, job.density, job.method) for job in jobs]
        [('text', 2, 0.1, 'top_k'), ('text', 4, 0.1, 'top_k')]
    """
    chosen = choose(methods)
    if methods is None:
        parts: dict[tuple[Sparsifier, Exchange | None], Method] = {}
        for method in chosen:
            parts.setdefault((method.sparsifier, method.exchange), method)
        chosen = list(parts.values())
    return jobs.plan(streams, kind="stream", known=STREAMS, least_ranks=1, methods=chosen, seeds=[seed], **settings)


def execute_all(wanted: Iterable[Job]) -> Iterator[Row]:
    """Run all jobs in order, with one stream in memory at a time.

    Args:
        wanted: jobs, with those of one stream and number of ranks next to each other.
    """
    for (name, ranks, seed, steps, text), some in groupby(wanted, lambda job: (*job[:2], *job[4:6], job.text)):
        gradients = stream(name, ranks=ranks, steps=steps, seed=seed, text=text)
        for job in some:
            [method] = choose([job.method])
            source, _, density, _, _, _ = job.key
            yield Row(source, ranks, density, method.name, steps, seed, **compare(gradients, method, job.density))  # type: ignore[arg-type]


def compare(gradients: Sequence[Tensor], method: Method, density: float) -> dict[str, float | int | None]:
    """Run a method over a stream and measure it.

    Args:
        gradients: (n, numel) of each step; not modified.
        method: its memory is not used.
        density: k / numel with k as the method means it, in (0, 1].

    Returns:
        Names of :data:`QUANTITIES` to numbers.

    Raises:
        ValueError: if there are no gradients, or for a density outside (0, 1].

    Example:
        >>> import torch
        >>> from lightning_sparse.tools.compare.methods import choose
        >>> gradients = torch.randn(30, 1, 1000, generator=torch.Generator().manual_seed(0)).unbind()
        >>> measures = compare(gradients, choose(["top_k"])[0], density=0.01)
        >>> round(measures["captured"], 6), measures["relative_density_error"], measures["steps_to_target"]
        (1.0, 0.0, 0)
    """
    if not len(gradients):
        raise ValueError("Expected gradients of at least one step, but got none.")
    since = 2 * len(gradients) // 3
    steps = list(_follow(gradients, method, density, since))
    last = steps[since:]
    estimates = torch.stack([step.estimate for step in steps])
    settled = estimates[min(SETTLED, len(steps) // 2) :].flatten()
    low, high = torch.quantile(settled, torch.tensor([0.05, 0.95], dtype=settled.dtype, device="cpu")).tolist()
    return {
        "relative_density_error": _mean(100 * abs(step.build_up - 1) for step in last),
        "steps_to_target": _steps_to_target(estimates.mean(1).tolist()),
        "padding_ratio": _mean(step.padding_ratio for step in last),
        "build_up": _mean(step.build_up for step in last),
        "estimate": settled.mean().item(),
        "estimate_low": low,
        "estimate_high": high,
        "captured": _mean(step.captured for step in last),
        "bytes_sent": _mean(step.bytes_sent for step in steps),
    }


class _Step(NamedTuple):
    """Numbers of a step that are kept; nothing large."""

    estimate: Tensor
    build_up: float
    padding_ratio: float
    bytes_sent: float
    captured: float
    """NaN if it was not computed."""


def _follow(gradients: Sequence[Tensor], method: Method, density: float, since: int) -> Iterator[_Step]:
    """Run the method; compute the captured energy from step ``since`` on."""
    n, numel = gradients[0].shape
    k = count(density, numel)
    # Nothing is lost, so that the sum of the ranks' residuals is known without reading them.
    total = torch.zeros(numel, dtype=torch.float64, device="cpu")
    traces = simulate(gradients, sparsifier=method.sparsifier, density=density, exchange=method.exchange)
    for rows, trace in zip(gradients, traces, strict=True):
        total += rows.sum(0, dtype=torch.float64)
        left = total - n * trace.update.double()
        captured = _captured(total, left, k) if trace.step >= since else float("nan")
        total = left
        estimate = _estimate(trace, method.sparsifier.agreement, k)
        bytes_sent = trace.bytes_sent.mean().item()
        yield _Step(estimate, trace.build_up, trace.padding_ratio, bytes_sent, captured)


def _captured(total: Tensor, left: Tensor, k: int) -> float:
    best = total[top_k(total, k)].square().sum()
    return ((total.square().sum() - left.square().sum()) / best).item() if best else 1.0


def _estimate(trace: StepTrace, agreement: Agreement, k: int) -> Tensor:
    """Return (m,) selected over intended counts, of each rank or of all together."""
    if agreement in (Agreement.DISJOINT, Agreement.SHARED):
        return torch.tensor([trace.indices.numel() / k], dtype=torch.float64, device="cpu")
    return trace.counts.double() / k


def _steps_to_target(estimates: Sequence[float]) -> int | None:
    # 1.1 - 1 is a little more than 0.1.
    near = [abs(estimate - 1) <= BAND * (1 + 1e-9) for estimate in estimates]
    return next((step for step in range(len(near) - STAY + 1) if all(near[step : step + STAY])), None)


def _mean(numbers: Iterable[float]) -> float:
    kept = list(numbers)
    return sum(kept) / len(kept)
