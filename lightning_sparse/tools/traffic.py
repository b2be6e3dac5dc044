"""Messages of a step, counted by a dry run: the real pipeline without a network, on tensors without content."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_sparse.core.checks import check_integer
from lightning_sparse.core.messages import Message, SendRecv
from lightning_sparse.core.step import Context
from lightning_sparse.density import check_density
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.engine.pipeline import exchange_group, init_group
from lightning_sparse.exchanges import Exchange
from lightning_sparse.memories import Memory, NoMemory
from lightning_sparse.sparsifiers import Sparsifier

META = torch.device("meta")


class Traffic(NamedTuple):
    """Messages and bytes of a step of one group."""

    messages: tuple[tuple[str, int], ...]
    """Name of the operation (a method of :class:`~lightning_sparse.engine.network.TorchCollective`) and bytes of a
    rank's tensor, in order. A rank that only receives is counted as if it sent."""
    bytes_sent: float
    """Bytes that a rank sends under ring algorithms, mean over ranks."""


def count_bytes(
    sparsifier: Sparsifier | str,
    numel: int,
    world_size: int,
    density: float,
    *,
    exchange: Exchange | str | None = None,
    memory: Memory | None = None,
    dtype: torch.dtype = torch.float32,
) -> Traffic:
    """Count the messages of a step of one group, by a dry run.

    The group's step runs as on CUDA, where the length of every message is known beforehand. There the result is exact,
    in every step; of UnionTopK in the first 64, and an upper bound behind them; of MeanTopK an upper bound.

    On the CPU, the length of messages follows from the selection:

    - Top-k, SharedTopK, UnionTopK (its first 64 steps), StripedTopK, CLT-k, Random-k, gTop-k and all dense exchanges:
      exact with the sparsifier's natural exchange; an upper bound where Top-k selections are united, since the union
      is shorter by the coordinates that ranks share.
    - MiCRO, ExDyna: an upper bound, as if one rank had twice its share.
    - DGC, RedSync, GaussianK, SIDCo: an upper bound, as if a message was as long as on CUDA.
    - hard-threshold, Ok-Topk with other exchanges than its own, and the published variants: no bound, since nothing
      limits on the CPU how many coordinates reach their thresholds.

    Selections whose length differs from rank to rank take one more all-gather of 8 bytes on the CPU, not counted here.

    Args:
        sparsifier: an instance or a name.
        numel: coordinates of the group.
        world_size: number of ranks n.
        density: target density.
        exchange: an instance, a name, or None for the sparsifier's natural one.
        memory: error feedback; it matters only if it has second moments averaged.
        dtype: of the gradients.

    Raises:
        ValueError: if a name is unknown, if a number is out of range, if the exchange does not go with the sparsifier
            and the memory, or if the sparsifier cannot serve such a group.

    Example:
        >>> count_bytes("top_k", 1000, world_size=4, density=0.01)
        Traffic(messages=(('all_gather', 84),), bytes_sent=252.0)
        >>> count_bytes("everything", 1000, world_size=4, density=0.01)
        Traffic(messages=(('all_reduce', 4000),), bytes_sent=6000.0)
    """
    numel, world_size = check_integer(numel, "numel"), check_integer(world_size, "world_size")
    chosen = SparsificationConfig(sparsifier=sparsifier, exchange=exchange, memory=memory or NoMemory())
    methods: dict[str, Any] = {"memory": chosen.memory_in_use, "sparsifier": chosen.sparsifier}
    density = check_density(density)
    grad = torch.empty(numel, dtype=dtype, device=META)

    def messages_of(rank: int) -> list[Message]:
        ctx = Context(0, density, rank, world_size)
        state = init_group(numel, dtype, META, ctx, **methods)
        steps = exchange_group(grad, state, ctx, exchange=chosen.exchange_in_use, **methods)
        return drive_mirrored(steps, world_size)[1]

    ranks = [messages_of(0)]
    if any(isinstance(message, SendRecv) for message in ranks[0]):  # some ranks send more than others
        ranks += [messages_of(rank) for rank in range(1, world_size)]
    sent = sum(message.bytes_sent(world_size) for messages in ranks for message in messages)
    return Traffic(tuple((message.kind, message.x.nbytes) for message in ranks[0]), sent / len(ranks))
