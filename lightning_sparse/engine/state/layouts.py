"""States of models whose parameters lay otherwise in memory, such as convolutions that were ``channels_last``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.layout import order_from
from lightning_sparse.engine.state.schema import State


def with_layouts(state: State, layouts: Mapping[str, Sequence[int]]) -> tuple[State, list[str]]:
    """Return a state whose coordinates are in the order in which parameters lie now.

    Args:
        state: checked; not modified.
        layouts: of parameters, see :func:`~lightning_sparse.core.layout.layout_of`.

    Returns:
        The state, and a sentence for each parameter of which it has a part only: others have the rest of its order.
    """
    orders = {name: order_from(state["layouts"].get(name, now), now) for name, now in layouts.items()}
    moved = {name: order for name, order in orders.items() if order is not None}
    parts = {name for name in moved if name in state["spans"] and state["spans"][name][1] < state["spans"][name][2]}
    changed: State = {"parameters": {**state["parameters"]}}
    for name in moved.keys() & state["parameters"].keys():
        vectors = state["parameters"][name]
        changed["parameters"][name] = {} if name in parts else {key: x[moved[name]] for key, x in vectors.items()}
    for field in ("pending", "late", "sent"):
        changed[field] = {
            name: _in_order(averages, moved[name]) if name in moved else averages
            for name, averages in state[field].items()
            if name not in parts
        }
    lost = [
        f"{name} lies in another order in memory than when its parts were saved: what waited is dropped."
        for name in sorted(parts)
        if state["parameters"].get(name)
    ]
    return {**state, **changed}, lost


def _in_order(averages: Mapping[str, Any], order: Tensor) -> dict[str, Any]:
    """Return averages of a parameter in another order, with ascending coordinates."""
    if "indices" not in averages:
        chosen, found = order, dict[str, Any]()
    else:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        indices, chosen = places[averages["indices"].long()].sort()
        found = {"indices": indices.int()}
    return {**averages, **found, **{key: averages[key][chosen] for key in averages.keys() & {"values", "divisor"}}}
