"""The header of a step: sent with its first message, so that ranks notice that they have drifted apart.

It holds a rank's step, its flush flag, and a digest of its settings and groups. If one of these differs, messages mean
different things on different ranks, though their shapes may match. All ranks then raise an error that names the
difference: on the CPU before any result of the step is used; on a device when the host learns if the step is skipped
(with ``nonfinite="nan"`` and without a loss scale, the host does not ask, and headers are not checked).

The header travels with other messages. If the difference changes their length, as for a rank that flushes alone, the
header may not arrive: the network fails, or waits until the timeout.

The header does not cover non-finite gradients: a rank that has some sends NaN among its values (see
:func:`~lightning_sparse.engine.pipeline.exchange_group`), so that all ranks find it in the averages before these are
used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.messages import AllGather, Steps
from lightning_sparse.engine.agreement import name_ranks
from lightning_sparse.ops import static_shapes

BITS = 31
"""Bits of a number in an int32 word."""


class Header(NamedTuple):
    """Step, flush and settings of one rank."""

    step: int
    flush: bool
    """True if everything is sent."""
    digest: int
    """62 bits, see :func:`digest_of`."""

    def compare(self, device: torch.device) -> Steps[Tensor]:
        """Share the header with all ranks.

        Returns:
            A coroutine that returns the headers of all ranks, (n, 4) int32 words for :func:`check`; on the CPU it
            checks them.
        """
        low = (1 << BITS) - 1
        words = [self.step & low, int(self.flush), self.digest >> BITS, self.digest & low]
        pin = device.type == "cuda"
        own = torch.tensor(words, dtype=torch.int32, device="cpu", pin_memory=pin).to(device, non_blocking=True)
        headers = (yield AllGather(own)).clone()  # so that joined messages can be freed
        if not static_shapes(device):
            check(headers)
        return headers


def digest_of(*facts: Any) -> int:
    """Return 62 bits of a hash of the facts, by their ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 2


def check(headers: Tensor) -> None:
    """Raise unless the headers of all ranks are equal.

    Args:
        headers: (n, 4) int32 on the CPU, see :meth:`Header.compare`.

    Raises:
        RuntimeError: with the ranks that differ from rank 0, and the differences.
    """
    rows: list[list[int]] = headers.tolist()
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if not others:
        return
    told = []
    for what, part in (("step", slice(1)), ("flush", slice(1, 2)), ("settings or groups", slice(2, 4))):
        if differing := [rank for rank, row in enumerate(rows) if row[part] != rows[0][part]]:
            told.append(f"{what} ({_differences(what, rows, differing)})")
    raise RuntimeError(
        f"The ranks have drifted apart: {name_ranks(others)} and rank 0 are about to exchange different things. What "
        f"differs: {'; '.join(told)}. Every rank must do the same steps, with the same settings, and flush in the same "
        "one (flush_next_step, on all ranks). Restart from a checkpoint."
    )


def _differences(what: str, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    first, other = rows[0], rows[ranks[0]]
    if what == "step":
        return f"{first[0]} on rank 0, {other[0]} on rank {ranks[0]}"
    if what == "flush":
        return f"{'yes' if first[1] else 'no'} on rank 0, {'yes' if other[1] else 'no'} on rank {ranks[0]}"
    return f"on {name_ranks(ranks)}"
