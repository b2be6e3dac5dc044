"""Averages that are kept, put into the places of gradients in DDP's buckets, for optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_sparse.core.layout import Gradient
from lightning_sparse.engine.pipeline import scatter_average_
from lightning_sparse.engine.state.record import Averages, Kept
from lightning_sparse.ops import static_shapes


@torch.no_grad()
def place(kept: Kept, places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Put averages where gradients lay, times the present scale of the loss; NaN, if they are of a skipped step.

    Args:
        kept: averages by parameter, in the coordinates of the places.
        places: flat gradients by parameter, of all that the averages name.
        scale: () of the loss; None: none.
    """
    host_knows = not static_shapes(next(iter(places.values())).device)
    if not (host_knows and kept.decision):
        parts: dict[int, tuple[Averages, list[str]]] = {}
        for name, averages in kept.averages.items():
            if averages is not None:  # of a skipped step that a state holds
                parts.setdefault(id(averages), (averages, []))[1].append(name)
        for averages, names in parts.values():
            _scatter(averages, {name: places[name] for name in names}, scale)
    if kept.skipped is not None and (not host_knows or kept.skipped):
        fill_nan_((places[name] for name in kept.averages), kept.skipped)


def fill_nan_(gradients: Iterable[Tensor], skipped: Tensor) -> None:
    """Write NaN into flat gradients of a skipped step; if only the device knows it, into the first of each.

    Args:
        gradients: on one device.
        skipped: () flag, which is set where the host knows it.
    """
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for flat in gradients:
        if not static_shapes(skipped.device):
            flat.fill_(float("nan"))
        elif flat.numel():
            of_dtype.setdefault(flat.dtype, []).append(flat[:1])
    for dtype, firsts in of_dtype.items():
        factor = torch.ones((), dtype=dtype, device=skipped.device).masked_fill_(skipped, float("nan"))
        torch._foreach_mul_(firsts, factor)


def _scatter(averages: Averages, places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Write averages of some parameters of a group to their places."""
    assert averages.values is not None
    dtype = next(iter(places.values())).dtype
    values = (averages.values if scale is None else averages.values * scale).to(dtype)
    if places.keys() == averages.spans.keys():
        place = Gradient.of(places[name] for name in averages.spans)
        flat = place if len(place.runs) == 1 or not static_shapes(place.device) else Gradient([place.flat()])
    else:
        place = flat = Gradient([values.new_empty(max(span.stop for span in averages.spans.values()))])
    scatter_average_(flat, averages.indices, values)
    if flat is not place:
        place.spread_(flat.runs[0])
    for name, piece in places.items() if places.keys() != averages.spans.keys() else ():
        piece.copy_(flat[averages.spans[name]])
    if averages.delivery is not None and places.keys() == averages.spans.keys():
        averages.delivery.sample([places[name] for name in averages.spans], scale)
