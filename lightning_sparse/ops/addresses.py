"""Where many tensors lie, as a table on their device: one launch then works on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.ops.on_cuda import on_cuda
from lightning_sparse.ops.triton.launch import TILE

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of parameters and gradients that there are kernels for."""
PART = 16 * TILE
"""Most elements of a row."""
MOST_TABLES = 256
"""That are kept; the oldest ones go first."""
Rows = NDArray[np.int64]


def takes(tensors: Sequence[Tensor], *numbers: Any) -> bool:
    """Return whether a kernel can work on tensors of a parameter, and on others beside them in one launch.

    Args:
        tensors: of one shape; they have to lie alike and without gaps, on CUDA.
        numbers: those that are tensors have to be there, too.
    """
    first = tensors[0]
    if not on_cuda.takes(first) or not first.numel():
        return False
    if any(x.device != first.device for x in (*tensors, *numbers) if isinstance(x, Tensor)):
        return False
    forms = [torch.contiguous_format, *([torch.channels_last] if first.dim() == 4 else [])]
    return any(all(x.is_contiguous(memory_format=form) for x in tensors) for form in forms)


class Table(NamedTuple):
    """The arguments of a launch."""

    rows: Tensor
    """(r, c + 1) int64: addresses of a part of a tensor of each of c lists, and how many elements the part has."""
    aligned: bool
    """True if all addresses are multiples of 16."""


class Addresses:
    """Tables, kept from step to step as long as the addresses in them do not change."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Rows, Table]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def table(self, what: Any, lists: Sequence[Sequence[Tensor]], aligned: int) -> Table:
        """The table of some tensors.

        Args:
            what: hashable; tensors of the same kind.
            lists: c lists, each of as many tensors, of one dtype and device. The i-th ones of all lists have the same
                shape and are dense in memory, in the same order.
            aligned: of how many lists alignment matters, from the first one on.
        """
        rows, like = rows_of(lists), lists[0][0]
        what = what, int(rows[0, 0]), len(rows)  # of the same kind there may be several lists
        known = self._known.get(what)
        if known is None or not np.array_equal(known[0], rows):
            on_device = torch.from_numpy(rows)
            if like.is_cuda:
                on_device = on_device.pin_memory().to(like.device, non_blocking=True)
            while len(self._known) >= MOST_TABLES:  # where tensors are allocated anew, addresses may never come back
                del self._known[next(iter(self._known))]
            known = self._known[what] = rows, Table(on_device, not bool((rows[:, :aligned] % 16).any()))
        return known[1]


def rows_of(lists: Sequence[Sequence[Tensor]]) -> Rows:
    """Rows of :class:`Table`, on the host; see there.

    Args:
        lists: as :meth:`Addresses.table` takes them.
    """
    lengths = np.array([x.numel() for x in lists[0]], dtype=np.int64)
    parts = -(-lengths // PART)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    start = (np.arange(len(first)) - first) * PART
    rows = np.empty((len(first), len(lists) + 1), dtype=np.int64)
    for column, tensors in enumerate(lists):
        addresses = np.array([x.data_ptr() for x in tensors], dtype=np.int64)
        rows[:, column] = np.repeat(addresses, parts) + start * tensors[0].element_size()
    rows[:, -1] = np.minimum(PART, np.repeat(lengths, parts) - start)
    return rows
