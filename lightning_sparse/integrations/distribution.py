"""Callback that shows the distribution of gradients, and fitted laws."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_sparse.core.checks import check_integer, expect
from lightning_sparse.engine import Engine
from lightning_sparse.integrations.callback import Callback, LocalGradients, trained_parameters
from lightning_sparse.integrations.loggers import log_figure
from lightning_sparse.methods.laws import fit_laws

SAMPLE = 1 << 17
"""Sampled coordinates of a group, evenly spread."""
BINS = 80
WHOLE = "model"
"""Name of the group of all parameters, without an engine with groups."""


class GradientDistribution(Callback):
    """Show the distribution of the magnitudes that sparsifiers select from, with fitted laws and the threshold.

    Logged on rank zero at intervals: histograms of the largest groups; exponential, gamma and generalised Pareto laws
    (:mod:`lightning_sparse.methods.laws`) with their Kolmogorov-Smirnov distances; the threshold, for methods that have
    one. Weights & Biases and TensorBoard get a histogram and, if matplotlib is installed, a figure; all others get
    JSON in ``sparse/gradient_distribution/`` of their folder. At most 131,072 coordinates of a group are sampled,
    without zeros. With a strategy that does not sparsify, the gradients of the whole model are shown.

    With ``node_size``, the part of rank zero is shown, with its own gradient; with sharded parameters, its part of the
    mean over the replica.

    Other steps cost nothing; a shown step copies this rank's gradients and residuals of these groups.

    Args:
        every: steps from one shown step to the next, at least 1.
        what: "accumulated" for residual plus gradient, the input of sparsifiers with ``Residual``; "gradient" for this
            rank's gradient alone.
        most: largest number of shown groups, the largest groups first, at least 1.

    Raises:
        ValueError: for a number outside its range, or another value of ``what``.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> strategy = ls.SparseDDPStrategy(sparsifier="sidco_e")
        >>> trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False,
        ...                   callbacks=[ls.GradientDistribution(every=200)], enable_model_summary=False)
    """

    def __init__(
        self, every: int = 500, what: Literal["accumulated", "gradient"] = "accumulated", most: int = 4
    ) -> None:
        self.every, self.most = check_integer(every, "every"), check_integer(most, "most")
        expect(what in ("accumulated", "gradient"), "what", "'accumulated' or 'gradient'", what)
        self.what = what
        self._steps = 0
        self._groups: dict[str, list[str]] = {}
        self._residuals: dict[str, Tensor] = {}
        self._rates: Mapping[str, float] = {}
        self._gradients: LocalGradients | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to count steps."""
        self._steps, self._gradients = 0, None

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Start to copy gradients, if this step is shown."""
        if self._steps % self.every or not trainer.is_global_zero or self._gradients is not None:
            return
        engine = self._engine_of(trainer)
        parameters = trained_parameters(trainer.lightning_module) if engine is None else engine.stepper.parameters
        plan = [] if engine is None or engine.stepper.direct else [group for group in engine.groups if not group.dense]
        largest = sorted(plan, key=lambda group: -group.numel)[: self.most]
        self._groups = {group.name: [p.name for p in group.parameters] for group in largest}
        self._groups = self._groups or {WHOLE: list(parameters)}
        chosen = set().union(*self._groups.values())
        accumulated = chosen if largest and engine is not None and self.what == "accumulated" else ()
        waiting = [name for name in accumulated if engine and not engine.stepper.group_of[name].drifts]
        residuals = {name: engine.residual(name) for name in waiting if engine}
        self._residuals = {name: one.clone() for name, one in residuals.items() if one is not None}
        scaled = engine is not None and bool(self._residuals) and engine.settings.memory_in_use.reads_rates
        self._rates = engine.stepper.rates() if engine is not None and scaled else {}
        self._gradients = LocalGradients({name: p for name, p in parameters.items() if name in chosen})
        self._gradients.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Show the distribution of the copied gradients."""
        if trainer.fit_loop._should_accumulate():
            return
        self._steps += 1
        if self._gradients is None:
            return
        found = self._gradients.take(self._loss_scale(trainer))
        self._gradients = None
        engine = self._engine_of(trainer)
        thresholds = _thresholds(engine)
        if engine is not None:
            found = {name: engine.stepper.share.part(name, gradient) for name, gradient in found.items()}
        for group, names in self._groups.items():
            here = [name for name in names if name in found]
            parts = [found[name] * self._rates.get(name, 1) + self._residuals.get(name, 0) for name in here]
            magnitudes = sample_of(torch.cat(parts)) if parts else torch.empty(0, device="cpu")
            data = describe(magnitudes, thresholds.get(group))
            if data is None:
                continue
            data = {"group": group, "what": self.what, **data}
            for logger in trainer.loggers:
                name = f"gradient_distribution/{group}"
                log_figure(logger, name, data, partial(draw, data), trainer.global_step, magnitudes)
        self._residuals = {}


def _thresholds(engine: Engine | None) -> dict[str, float]:
    found = {} if engine is None else {group.plan.name: group.statistics for group in engine.stepper.groups}
    return {name: float(one.threshold) for name, one in found.items() if one is not None and one.threshold is not None}


def sample_of(flat: Tensor) -> Tensor:
    """Return ascending magnitudes of an even sample, float64 on the CPU, without zeros and non-finite values."""
    sample = flat[:: -(-flat.numel() // SAMPLE)].detach().cpu().double().abs()
    return sample[(sample > 0) & sample.isfinite()].sort().values


def describe(magnitudes: Tensor, threshold: float | None) -> dict[str, Any] | None:
    """Return a histogram, fitted laws, and the threshold, as plain data; None if nothing can be fitted.

    Args:
        magnitudes: (m,) float64 on the CPU, positive and ascending.
        threshold: of the selection, or None.
    """
    if magnitudes.numel() < 2 or magnitudes[0] == magnitudes[-1]:
        return None
    last = max(float(magnitudes[int(0.9995 * (magnitudes.numel() - 1))]), 1.05 * (threshold or 0.0))
    edges = torch.linspace(0, last, BINS + 1, dtype=torch.float64, device="cpu")
    counts = torch.histogram(magnitudes, edges).hist
    middles = (edges[1:] + edges[:-1]) / 2
    return {
        "sample": magnitudes.numel(),
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "threshold": threshold,
        "beyond": None if threshold is None else float((magnitudes >= threshold).double().mean()),
        "laws": {
            law.name: {**law.parameters, "distance": law.distance(magnitudes), "density": law.density(middles).tolist()}
            for law in fit_laws(magnitudes)
        },
    }


def draw(data: Mapping[str, Any]) -> Any:
    """Draw the result of :func:`describe`: bars, a line for each law with its name, the threshold."""
    from matplotlib.figure import Figure

    edges = data["edges"]
    width = edges[1] - edges[0]
    middles = [edge + width / 2 for edge in edges[:-1]]
    heights = [count / (data["sample"] * width) for count in data["counts"]]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.bar(middles, heights, width=width, color="0.85")
    styles = {"exponential": ("#0072B2", "-"), "gamma": ("#D55E00", "--"), "pareto": ("#009E73", "-.")}
    for name, law in data["laws"].items():
        colour, style = styles[name]
        axes.plot(middles, law["density"], style, color=colour, label=f"{name}, distance {law['distance']:.3f}")
    if data["threshold"] is not None:
        axes.axvline(data["threshold"], color="black", linewidth=1, label=f"threshold, {data['beyond']:.2%} beyond")
    least = min((height for height in heights if height > 0), default=1e-12)
    axes.set(yscale="log", ylim=(least / 2, 3 * max(heights)), xlabel="magnitude", ylabel="probability density")
    axes.set_title(f"{data['group']}: {data['what']}", loc="left")
    axes.legend(frameon=False)
    return figure
