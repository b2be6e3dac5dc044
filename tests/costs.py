"""What a step costs on a device, counted on meta tensors: operations, and bytes that move through memory.

Meta tensors have shapes and no content, and take the path of CUDA. Each operation that is no view is counted, with the
bytes that a kernel for it has to read and write. Caches are left out: what one kernel writes, the next one reads again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.methods.density import count
from lightning_sparse.methods.grouping import Group, ParameterSize
from tests.mirror import Mirror
from tests.streams import written_by

SECTOR = 32
"""Bytes that memory hands out at once: what a strided or scattered access costs at least."""
TOP_K_READS = 5
"""Times that ``top_k`` reads a long vector: a pass for each of four digits of 8 bits, and one that collects."""
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "resize_", "scalar_tensor"}
"""Allocations, and numbers that travel with the arguments of a kernel."""
OVERWRITING = {"copy_", "_foreach_copy_", "zero_", "fill_", "random_", "normal_"}
"""In place, and nothing is read of what was there."""
SCATTERED = {"index", "index_select", "gather", "take", "index_copy_", "index_fill_", "index_put_", "index_add_"}
SCATTERED |= {"scatter", "scatter_", "scatter_reduce", "scatter_reduce_", "masked_scatter_"}


class Costs(TorchDispatchMode):
    """Counts what is computed on a device while it is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.operations: Counter[str] = Counter()
        """Times of each operation."""
        self.bytes: Counter[str] = Counter()
        """Read and written by each operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)] or written_by(func, args, kwargs)
        on_device = any(t.device == self.device for t in results)
        if on_device and name not in FREE and not func.is_view:
            self.operations[name] += 1
            self.bytes[name] += _moved(name, func, args, kwargs, results)
        return out


def _moved(name: str, func: Any, args: tuple, kwargs: dict, results: list[Tensor]) -> int:
    """Bytes that one operation reads and writes."""
    given = list({id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}.values())
    changed = written_by(func, args, kwargs)
    written = sum(map(_size, changed or results))
    read = sum(_size(t) for t in given if not any(t is other for other in changed))
    if name in SCATTERED:
        places = max((t.numel() for t in given if t.dtype in (torch.int32, torch.int64)), default=0)
        touched = min(max(SECTOR * places, 0 if changed else written), _size(given[0]))
        rest = sum(map(_size, given[1:]))
        return rest + (2 * touched if changed else touched + written + (name.startswith("scatter")) * 2 * touched)
    if name == "topk":
        return TOP_K_READS * _size(given[0]) + written
    if name in ("sort", "argsort"):  # radix: a pass for each 8 bits of the keys, which moves keys and int64 places
        return given[0].numel() * given[0].element_size() * 2 * (given[0].element_size() + 8)
    if name == "searchsorted":
        sorted_ones, values = given[0], given[1]
        return _size(values) + written + min(_size(sorted_ones), SECTOR * values.numel())
    if name == "cumsum":  # sums of blocks first
        return 2 * read + written
    if name.endswith("_") and changed and name not in OVERWRITING:
        return read + 2 * written  # in place
    return read + written


def _size(x: Tensor) -> int:
    """Bytes of memory that x covers, in whole sectors where its elements lie apart."""
    elements = 1
    for length, stride in zip(x.shape, x.stride(), strict=True):
        elements *= length if stride else 1  # expanded
    apart = min((s for s, length in zip(x.stride(), x.shape, strict=True) if s and length > 1), default=1)
    return elements * min(x.element_size() * apart, max(SECTOR, x.element_size()))


class Network(Mirror):
    """As :class:`Mirror`, with answers that cost nothing."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty((self.world_size, *x.shape))

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def send_recv(self, x: Tensor, to: int | None, source: int | None) -> Tensor:
        return x[:0] if source is None else torch.empty_like(x)


META = torch.device("meta")


def group_step(
    sparsifier: ls.sparsifiers.Sparsifier | str = "union_top_k",
    n: int = 8,
    density: float = 0.01,
    numel: int = 1 << 22,
    memory: ls.memories.Memory | None = None,
    dtype: torch.dtype = torch.float32,
    buckets: int = 1,
    rank: int = 1,
) -> Costs:
    """What a step of a group costs one of n ranks, from gradients in buckets of DDP to averages in these.

    Args:
        sparsifier: with its own exchange.
        n: number of ranks.
        density: target density.
        numel: coordinates of the group.
        memory: error feedback.
        dtype: of the gradients.
        buckets: in which the gradients of the group lie.
        rank: which one counts.
    """
    settings = ls.engine.config.SparsificationConfig(density=density, sparsifier=sparsifier, memory=memory)
    lengths = [numel // 2, numel - numel // 2]
    plan = Group(
        "group", tuple(ParameterSize(str(i), size, dtype.itemsize, "") for i, size in enumerate(lengths)), False
    )
    parameters = {p.name: torch.nn.Parameter(torch.empty(p.numel, dtype=dtype, device=META)) for p in plan.parameters}
    ctx = Context(n, density, rank, n, model_numel=numel)
    group = GroupReducer(plan, parameters, settings, ctx, flush=False)
    for step in (n, n + 1):  # the first one knows nothing of a step before
        apart = 1 if buckets > 1 else 0  # a gap between pieces
        bucket = torch.empty(numel + apart, dtype=dtype, device=META)
        pieces = {"0": bucket[: lengths[0]], "1": bucket[lengths[0] + apart :]}
        with Costs(META) as costs:
            made = drive(group.exchange_steps(ctx._replace(step=step), pieces), Network(rank, n))
            group.settle(made, False, count(density, numel))
        group.diversity.count(2.0, 1.0)  # ranks compare gradients in every eighth step alone
    return costs
