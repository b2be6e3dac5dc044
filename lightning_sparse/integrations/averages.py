"""Logged quantities over many steps and ranks, as metrics of ``torchmetrics``: they add up, synchronise and plot."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_sparse.core.checks import expect
from lightning_sparse.engine.metrics import MB, QUANTITIES, Step

__all__ = ["BuildUp", "DensityError", "PaddingRatio", "Traffic"]


class _MeanOverSteps(MeanMetric):
    """The mean of a quantity over the given steps, and over ranks; NaN without a step.

    ``update`` takes the result of :meth:`Engine.latest_step <lightning_sparse.Engine.latest_step>`, and waits for the
    device; ``metric(step)`` also returns the value of that step. The rest is as in ``torchmetrics``: keywords,
    ``reset``, ``plot``, use as an attribute of a module or in a ``MetricCollection``.
    """

    higher_is_better = False  # type: ignore[assignment]
    plot_lower_bound = 0.0
    quantity: ClassVar[str]
    """Its name in :data:`~lightning_sparse.engine.metrics.QUANTITIES`."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        # A state of its own keeps a MetricCollection from taking two of these for one, where they begin alike.
        self.add_state(self.quantity, torch.zeros((), device="cpu"), dist_reduce_fx="sum")

    def update(self, step: Step) -> None:  # type: ignore[override]
        """Count a step."""
        _check_step(step)
        value = QUANTITIES[self.quantity].compute(step)
        if value is not None:
            super().update(value)


class DensityError(_MeanOverSteps):
    """Distance of the density of updates from its target, ``| |union| - k | / numel``: mean over steps.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(5, 4, 1000, generator=torch.Generator().manual_seed(0))
        >>> metric = ls.metrics.DensityError()
        >>> for trace in ls.simulate(stream, sparsifier="top_k", density=0.01):
        ...     metric.update(trace.ranks[0])
        >>> print(f"{float(metric.compute()):.3f}")  # 4 ranks pick 1 % each, and hardly ever the same
        0.029
    """

    quantity = "density_error"


class PaddingRatio(_MeanOverSteps):
    """The papers' ``f(t) = n max_i k_i / sum_i k_i``: the longest selection over the mean one; mean over steps."""

    plot_lower_bound = 1.0
    quantity = "padding_ratio"


class BuildUp(_MeanOverSteps):
    """Coordinates in the update over their target, ``|union| / k``: mean over steps."""

    quantity = "build_up"


class Traffic(Metric):
    """MB (1e6 bytes) that a rank sends, mean over ranks, and the ratio to a dense exchange.

    A step of an engine has the totals of all steps up to it, given or not, as ``traffic/total_mb``. A step of a
    simulation has its own traffic only.

    Example:
        >>> import torch, lightning_sparse as ls
        >>> stream = torch.randn(5, 4, 1000, generator=torch.Generator().manual_seed(0))
        >>> metric = ls.metrics.Traffic()
        >>> for trace in ls.simulate(stream, sparsifier="top_k", density=0.01):
        ...     metric.update(trace.ranks[0])
        >>> {name: round(float(value), 4) for name, value in metric.compute().items()}
        {'total_mb': 0.0013, 'dense_total_mb': 0.03, 'ratio': 23.8095}
    """

    is_differentiable = False
    full_state_update = True
    higher_is_better = None
    sent: Tensor
    dense: Tensor

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.add_state("sent", torch.zeros((), dtype=torch.float64, device="cpu"), dist_reduce_fx="mean")
        self.add_state("dense", torch.zeros((), dtype=torch.float64, device="cpu"), dist_reduce_fx="mean")

    def update(self, step: Step) -> None:
        """Count a step."""
        _check_step(step)
        if step.totals is not None:
            self.sent = torch.full_like(self.sent, step.totals.sent_bytes)
            self.dense = torch.full_like(self.dense, step.totals.dense_bytes)
            return
        self.sent += sum(group.bytes_sent for group in step.groups) + step.shared_bytes
        self.dense += sum(group.dense_bytes for group in step.groups)

    def compute(self) -> dict[str, Tensor]:
        """Return ``total_mb``, ``dense_total_mb`` and ``ratio``, which is 1 if nothing was sent; () each."""
        ratio = torch.where(self.sent > 0, self.dense / self.sent, 1.0)
        return {"total_mb": self.sent / MB, "dense_total_mb": self.dense / MB, "ratio": ratio}

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Return a figure and axes with the results of :meth:`compute`, or with given values; needs matplotlib."""
        return self._plot(val, ax)


def _check_step(given: Any) -> None:
    """Raise a ValueError unless this is a step."""
    expect(isinstance(given, Step), "step", "what Engine.latest_step() gives after a step", given)
