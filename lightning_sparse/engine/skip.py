"""Does a step count? The headers that ranks compare, the decision, and gradients that are kept from optimizers.

**The header** of a step is sent with its first message, so that ranks notice that they have drifted apart. It holds a
rank's step, its flush flag, and a digest of its settings and groups. If one of these differs, messages mean different
things on different ranks, though their shapes may match. All ranks then raise an error that names the difference: on
the CPU before any result of the step is used; on a device when the host learns if the step is skipped.

The header travels with other messages. If the difference changes their length, as for a rank that flushes alone, the
header may not arrive: the network fails, or waits until the timeout.

The header does not cover non-finite gradients: a rank that has some sends NaN among its values (see
:func:`~lightning_sparse.engine.pipeline.exchange_group`), so that all ranks find it in the averages before these are
used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparse.core.layout import own
from lightning_sparse.core.messages import AllGather, Steps
from lightning_sparse.engine.agreement import name_ranks
from lightning_sparse.engine.optimizers.kinds import is_adam
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
    first, *_ = rows = headers.tolist()
    if not (others := [rank for rank, row in enumerate(rows) if row != first]):
        return
    told = []
    for name, part in (("step", slice(1)), ("flush", slice(1, 2)), ("settings or groups", slice(2, 4))):
        if differing := [rank for rank in others if rows[rank][part] != first[part]]:
            here, there = (("no", "yes")[row[1]] if name == "flush" else row[0] for row in (first, rows[differing[0]]))
            numbers = f"{here} on rank 0, {there} on rank {differing[0]}"
            told.append(f"{name} ({f'on {name_ranks(differing)}' if part.start == 2 else numbers})")
    raise RuntimeError(
        f"The ranks have drifted apart: {name_ranks(others)} and rank 0 are about to exchange different things. What "
        f"differs: {'; '.join(told)}. Every rank must do the same steps, with the same settings, and flush in the same "
        "one (flush_next_step, on all ranks). Restart from a checkpoint."
    )


def any_set(flags: Sequence[Tensor], device: torch.device, host_knows: bool) -> Tensor:
    """Return the () flag that is set if one of the () flags is; forms nothing where the host knows that none is."""
    if not flags or (host_knows and not any(map(bool, flags))):
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack(list(flags)).any()


def _to_host(x: Tensor) -> Tensor:
    """Begin to copy a tensor to pinned memory; the copy is there when the current stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x, non_blocking=True)


class Decision:
    """True if a step is skipped, for all groups. A flag on a CUDA stream is copied to the host asynchronously.

    ``bool()`` waits for that copy.

    The headers of all ranks come with it: ``bool()`` raises where they differ, see :func:`check`.

    Args:
        flag: () whether the step is skipped; None: it is not.
        stream: on which the flag is formed; None where the host knows it.
        wait: see :meth:`~lightning_sparse.engine.network.TorchCollective.wait_until`.
        headers: of all ranks, formed on the stream.
    """

    def __init__(
        self,
        flag: Tensor | None,
        stream: torch.cuda.Stream | None,
        wait: Callable[[Callable[[], bool], str], None],
        headers: Tensor | None = None,
    ) -> None:
        self._wait = wait
        self._event: torch.cuda.Event | None = None
        self._flag: Tensor | bool = False if flag is None else flag
        self._headers: Tensor | None = None
        self.on_device: Tensor | None = None
        """() the flag as 0.0 or 1.0, where it is formed; None where the host knows it."""
        if stream is not None and flag is not None:
            self.on_device = flag.float()
            self._flag = _to_host(flag)
            self._headers = None if headers is None else _to_host(headers)
            self._event = stream.record_event()

    def __bool__(self) -> bool:
        if self._event is not None:
            self._wait(self._event.query, "the exchange")
            self._event = None
        if self._headers is not None:
            check(self._headers)
            self._headers = None
        return bool(self._flag)


class SkippedSteps:
    """Keeps gradients that a skipped step has left NaN from optimizers.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._latest: Set[str] = frozenset()
        """Parameters that got a gradient in the latest step."""
        self.decision: Decision | None = None
        """On the latest step, until somebody asks whether it is skipped; None: it is resolved."""
        self._invalid: Set[str] = frozenset()
        """Parameters whose gradient a skipped step has left NaN, as far as steps are resolved."""
        self._handed: WeakSet[Optimizer] = WeakSet()
        """Optimizers that hold a flag as ``found_inf`` during their next step, as a ``GradScaler`` hands it over."""

    @property
    def _flag(self) -> Tensor | None:
        """The flag of the latest step on the device; None if it is resolved, or where the host knows it."""
        return None if self.decision is None else self.decision.on_device

    def note(self, decision: Decision, names: Set[str]) -> None:
        """Note that a step has ended which gave these parameters a gradient; the one before is resolved."""
        self.decision, self._latest = decision, frozenset(names)  # a view of a mapping would keep its averages

    def resolve(self) -> None:
        """Note which gradients are invalid since the latest step; waits for its flag."""
        if self.decision is None:
            return
        skipped, self.decision = bool(self.decision), None
        self._invalid = self._invalid | self._latest if skipped else self._invalid - self._latest

    def begin_step(self) -> None:
        """Resolve the step before, when new gradients are coming."""
        self.resolve()
        self.close()

    def drop(self, optimizer: Optimizer) -> bool:
        """Set this optimizer's invalid gradients to None; return True if there were any."""
        self.resolve()
        return self._drop(optimizer, self._invalid)

    def skip(self, optimizer: Optimizer, hand_over: bool) -> None:
        """Let this optimizer's next step pass over invalid gradients.

        Args:
            optimizer: any.
            hand_over: whether it may be given the flag on the device, so that nobody waits; else :meth:`drop`.
        """
        self.take_back(optimizer)
        if hasattr(optimizer, "found_inf"):  # of a scaler that the engine was not shown: it finds the NaN itself
            return
        if self._flag is not None and hand_over and heeds_found_inf(optimizer):
            self._drop(optimizer, self._invalid - self._latest)
            stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if all(self._names.get(id(p)) in self._latest for p in stepped):
                optimizer.found_inf = self._flag  # type: ignore[attr-defined]
                self._handed.add(optimizer)
                return
        self.drop(optimizer)

    def take_back(self, optimizer: Optimizer) -> None:
        """Take the flag back: the step that it was handed over for is over, or did not come."""
        if optimizer in self._handed:
            self._handed.remove(optimizer)
            del optimizer.found_inf  # type: ignore[attr-defined]

    def could_spare_a_wait(self, optimizer: Optimizer) -> bool:
        """Return True if the latest flag is on a device, and the optimizer would heed it there if it was fused."""
        return self._flag is not None and _may_be_fused(optimizer) and not _fused(optimizer)

    def close(self) -> None:
        """Take flags back that optimizers still hold."""
        for optimizer in list(self._handed):
            self.take_back(optimizer)

    def _drop(self, optimizer: Optimizer, names: Set[str]) -> bool:
        """Set gradients of these parameters to None, unless all of them are finite: others have taken their places."""
        parameters = (p for group in optimizer.param_groups for p in group["params"] if names)
        left = [p for p in parameters if self._names.get(id(p)) in names and p.grad is not None]
        if not left or torch.stack([own(p.grad).isfinite().all() for p in left if p.grad is not None]).all():
            return False
        for parameter in left:
            parameter.grad = None
        return True


def _may_be_fused(optimizer: Optimizer) -> bool:
    """Return True for those of torch that heed ``found_inf`` where they are fused."""
    return type(optimizer) is SGD or is_adam(type(optimizer))


def _fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def heeds_found_inf(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's next step does nothing at all where ``found_inf`` is set: torch's that are fused.

    Not SGD with momentum in its first step: it makes the momenta in that step, and would leave them undefined.
    """
    if not _may_be_fused(optimizer) or not _fused(optimizer):
        return False
    return all(
        group.get("momentum", 0) == 0
        or all(
            isinstance(optimizer.state.get(parameter, {}).get("momentum_buffer"), torch.Tensor)
            for parameter in group["params"]
            if parameter.grad is not None
        )
        for group in optimizer.param_groups
    )
