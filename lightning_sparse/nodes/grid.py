"""Nodes of a training: which ranks are close to each other, and which part of each parameter a rank exchanges."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_sparse.engine import check_equal_on_ranks
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.network import TorchCollective


class Nodes(NamedTuple):
    """Ranks of each node, as the default process group numbers them; as many in each."""

    rows: Sequence[Sequence[int]]

    @property
    def size(self) -> int:
        """Number of ranks of a node."""
        return len(self.rows[0])

    def connect(self, config: SparsificationConfig) -> tuple[TorchCollective, TorchCollective]:
        """Return new networks between nodes, of ranks that have the same place, and within a node; collective."""
        columns = [list(column) for column in zip(*self.rows, strict=True)]
        return TorchCollective.among(columns, config.timeout), TorchCollective.among(self.rows, config.timeout)


def nodes_of(size: int | str | None, ranks: TorchCollective, device: torch.device) -> Nodes:
    """Return the nodes of a process group; collective.

    Args:
        size: the setting ``node_size``.
        ranks: of the model.
        device: for the messages.

    Raises:
        ValueError: on all ranks, if nodes have different numbers of ranks.
        RuntimeError: on all ranks, if their settings differ.
    """
    check_equal_on_ranks({"node_size": size}, ranks, device)
    numbers = dist.get_process_group_ranks(ranks.group) if dist.is_initialized() else [0]
    if size is None:
        return Nodes([[number] for number in numbers])
    if size == "auto":
        return Nodes(_by_host(numbers, ranks.all_gather_object(platform.node(), device)))
    length = min(int(size), len(numbers))
    if len(numbers) % length:
        raise ValueError(
            f"Expected node_size to divide the number of ranks, {len(numbers)}, but got {length}: all nodes have "
            "equally many ranks."
        )
    return Nodes([numbers[start : start + length] for start in range(0, len(numbers), length)])


def _by_host(numbers: Sequence[int], hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, given its name for each of them."""
    rows = [
        (host, [number for number, _ in those])
        for host, those in groupby(zip(numbers, hosts, strict=True), key=lambda pair: pair[1])
    ]
    told = ", ".join(f"{len(row)} on {host!r}" for host, row in rows[:4]) + (", ..." if len(rows) > 4 else "")
    if len({host for host, _ in rows}) < len(rows):
        raise ValueError(
            f"Expected node_size='auto' to find the ranks of a host one after another, but found {told}. Start ranks "
            "host by host."
        )
    if len({len(row) for _, row in rows}) > 1:
        raise ValueError(
            f"Expected node_size='auto' to find equally many ranks on each host, but found {told}. Start as many on "
            "each, or set node_size=None, with which all ranks exchange with each other."
        )
    return [row for _, row in rows]
