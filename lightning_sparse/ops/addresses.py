"""Where many tensors lie, as a table on their device: one launch then works on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_sparse.core.layout import Runs
from lightning_sparse.ops.on_cuda import on_cuda
from lightning_sparse.ops.triton.launch import TILE

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of parameters and gradients that there are kernels for."""
PART = 16 * TILE
"""Most elements of a row."""
MOST_TABLES = 256
"""That are kept; the oldest ones go first."""
Rows = NDArray[np.int64]
T = TypeVar("T")


def takes(tensors: Sequence[Tensor], *numbers: Any) -> bool:
    """Return whether a kernel can work on tensors of a parameter, and on others beside them in one launch.

    Args:
        tensors: of one shape; they have to lie alike and without gaps, on CUDA.
        numbers: those that are tensors have to be there, too.
    """
    first = tensors[0]
    if not on_cuda.takes(first) or not first.numel():
        return False
    device = first.device
    for x in (*tensors, *numbers):
        if isinstance(x, Tensor) and x.device != device:
            return False
    if all(x.is_contiguous() for x in tensors):
        return True
    return first.dim() == 4 and all(x.is_contiguous(memory_format=torch.channels_last) for x in tensors)


class Table(NamedTuple):
    """The arguments of a launch."""

    rows: Tensor
    """(r, c + 1) int64: addresses of a part of a tensor of each of c lists, and how many elements the part has."""
    aligned: bool
    """True if all addresses are multiples of 16."""


class RunTable(NamedTuple):
    """A vector in several runs, as :mod:`.triton.runs` reads it."""

    rows: Tensor
    """(2 r + 1,) int64."""
    runs: int
    dtype: torch.dtype
    numel: int
    aligned: bool
    """True if each run lies, modulo 16 bytes, as if coordinate 0 did at a multiple of 16."""


_RUN_TABLES: dict[Any, tuple[Rows, RunTable]] = {}
MOST_RUN_TABLES = 4096
"""The same of these, which several groups need."""


def run_table(runs: Sequence[Tensor | int]) -> RunTable:
    """Return the table of a vector's runs, of one dtype; kept as long as addresses do not change.

    Args:
        runs: at least one; an int is the length of one that is not there, with an address of 0.
    """
    if isinstance(runs, Runs) and runs.table is not None and runs.table[0] == runs[0].data_ptr():
        known: RunTable = runs.table[1]
        return known
    here = [run for run in runs if isinstance(run, Tensor)]
    like, size = here[0], here[0].element_size()
    starts = np.cumsum([0, *(run if isinstance(run, int) else run.numel() for run in runs)], dtype=np.int64)
    ends = zip(runs, starts[:-1].tolist(), strict=True)
    begins = [0 if isinstance(run, int) else run.data_ptr() - start * size for run, start in ends]
    rows = np.concatenate([np.array(begins, dtype=np.int64), starts])
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    what = stream, like.device, like.dtype, like.data_ptr(), len(runs)  # several groups take turns

    def make() -> RunTable:
        aligned = not bool((rows[: len(runs)] % 16).any())
        return RunTable(_on_device(rows, like), len(runs), like.dtype, int(starts[-1]), aligned)

    made = _kept(_RUN_TABLES, what, rows, MOST_RUN_TABLES, make)
    if isinstance(runs, Runs):
        runs.table = here[0].data_ptr(), made
    return made


def _kept(known: dict[Any, tuple[Rows, T]], what: Any, rows: Rows, most: int, make: Callable[[], T]) -> T:
    """Return what has been made of rows, if they are as they were; where addresses are new, they may never come back.

    Args:
        known: by what it is; the oldest ones go first, where there are more than most.
        what: hashable.
        rows: of which something is made.
        most: how many are kept.
        make: what makes it.
    """
    found = known.pop(what, None)
    if found is None or not np.array_equal(found[0], rows):
        found = rows, make()
    while len(known) >= most:
        del known[next(iter(known))]
    known[what] = found
    return found[1]


def vector_of(runs: Sequence[Tensor]) -> Tensor | RunTable:
    """Return what kernels take for a vector in runs: the vector itself if it is one."""
    return runs[0] if len(runs) == 1 else run_table(runs)


def _on_device(rows: Rows, like: Tensor) -> Tensor:
    """Return rows on the device of a tensor; the host does not wait."""
    made = torch.from_numpy(rows)
    return made.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else made


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

        def make() -> Table:
            return Table(_on_device(rows, like), not bool((rows[:, :aligned] % 16).any()))

        return _kept(self._known, what, rows, MOST_TABLES, make)


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
