"""Catalog of the figures of a report and of a W&B workspace, in order."""

from __future__ import annotations

import re
from typing import NamedTuple

TOTAL_MB, DENSE_MB = "sparse/traffic/total_mb", "sparse/traffic/dense_total_mb"
DENSITY = "sparse/density"
SECONDS = "sparse/time/total_s"
SELECT, EXCHANGE, EXPOSED = "sparse/time/select_ms", "sparse/time/exchange_ms", "sparse/time/exposed_ms"
GROUP, SHADOW = "sparse/group/", "sparse/shadow/"
"""Prefixes of names of a group, and of a shadow sparsifier."""

RESULT = re.compile(r"loss|acc|perplexity|ppl|error|f1|auc|bleu|rouge|iou|mse|mae|score|r2|reward", re.IGNORECASE)
"""Names of logged quantities that measure the quality of a training."""


class Figure(NamedTuple):
    """A figure of one logged quantity against steps."""

    title: str
    """Title with the unit."""
    name: str
    """Name of the quantity in the logs."""
    reference: str | None = None
    """Another quantity, drawn behind the first one as its target."""
    ideal: float | None = None
    """The best value."""
    meaning: str = ""


class Section(NamedTuple):
    """Figures that belong together."""

    title: str
    figures: tuple[Figure, ...]


SECTIONS = (
    Section(
        "Selection",
        (
            Figure(
                "Density of the update",
                DENSITY,
                "sparse/target_density",
                meaning="Coordinates in the update / coordinates. The broad, pale line is the target.",
            ),
            Figure("Density error", "sparse/density_error", ideal=0.0, meaning="| |union| − k | / coordinates."),
            Figure(
                "Padding ratio f(t)", "sparse/padding_ratio", ideal=1.0, meaning="n max k_i / sum k_i; 1: no padding."
            ),
            Figure("Build-up", "sparse/build_up", ideal=1.0, meaning="|union| / k; up to n if selections differ."),
        ),
    ),
    Section(
        "Threshold and residual",
        (
            Figure("Norm of the mean gradient", "sparse/grad_norm", meaning="Before it was clipped."),
            Figure("Threshold", "sparse/threshold", meaning="Least magnitude to be selected; Top-k has none."),
            Figure(
                "Norm of the residual", "sparse/residual_norm", meaning="Of the values not sent yet; mean over ranks."
            ),
            Figure(
                "Threshold / norm of the residual",
                "sparse/threshold_over_residual",
                meaning="Steady if the threshold follows the residual.",
            ),
        ),
    ),
    Section(
        "Traffic",
        (
            Figure("Sent by a rank in a step / MB", "sparse/traffic/sent_mb"),
            Figure(
                "Sent by a rank so far / MB",
                TOTAL_MB,
                DENSE_MB,
                meaning="The broad, pale line is a dense ring all-reduce.",
            ),
            Figure("Dense / sent", "sparse/traffic/ratio", meaning="Bytes of a dense ring / bytes sent."),
        ),
    ),
    Section(
        "Time",
        (
            Figure("Selection / ms", SELECT),
            Figure("Exchange / ms", EXCHANGE),
            Figure("Exposed: backward waits / ms", EXPOSED, ideal=0.0),
        ),
    ),
    Section(
        "Steps",
        (
            Figure("Skipped steps so far", "sparse/steps/skipped", ideal=0.0, meaning="A gradient was not finite."),
            Figure("Averaged densely", "sparse/steps/direct", meaning="1 where DDP averages by itself."),
            Figure(
                "Gradients clipped so far", "sparse/lengths/clipped", meaning="Far longer than those before; with Adam."
            ),
            Figure(
                "Measured anew so far",
                "sparse/lengths/measured_anew",
                meaning="Times that gradients of a group changed their length; with Adam.",
            ),
            Figure("Warnings of the watchdog so far", "sparse/steps/warnings", ideal=0.0),
        ),
    ),
)
"""Figures of the quantities of :class:`lightning_sparse.SparsityMonitor`; results of a training are not listed."""

SHADOWED = {
    "density": "Density that it would have",
    "energy": "Share of the energy that it would send",
    "threshold_error": "How far its count would be off, relative",
    "sent_mb": "What a rank would send in a step / MB",
}
"""Titles of the logged quantities of shadow sparsifiers."""


def is_result(name: str) -> bool:
    """Return True if a logged quantity measures the quality of a training.

    Example:
        >>> is_result("val/accuracy"), is_result("sparse/density_error"), is_result("lr-SGD")
        (True, False, False)
    """
    return not name.startswith("sparse/") and RESULT.search(name) is not None


def is_better_low(name: str) -> bool:
    """Return True if smaller values of a result are better.

    Example:
        >>> is_better_low("val/loss"), is_better_low("val_acc")
        (True, False)
    """
    return re.search(r"loss|perplexity|ppl|error|mse|mae", name, re.IGNORECASE) is not None
