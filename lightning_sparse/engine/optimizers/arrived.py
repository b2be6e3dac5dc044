"""Averages that an optimizer is about to apply, as step rules get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.nn import Parameter

from lightning_sparse.engine.delivery import Delivery
from lightning_sparse.engine.group import GroupReducer


class Arrived(NamedTuple):
    """A parameter whose average an optimizer has not applied yet."""

    parameter: Parameter
    """Its ``grad`` is the average."""
    name: str
    group: GroupReducer | None
    """None: its averages are always dense."""
    delivery: Delivery | None
    """Facts about its average; None: there are none."""


OfGroup = tuple[Mapping[str, Any], Sequence[Arrived]]
"""Of a parameter group of an optimizer: its settings, and what has arrived."""
