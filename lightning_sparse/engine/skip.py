"""The decision whether a step counts, and gradients of skipped steps that are kept from optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_sparse.engine.header import check
from lightning_sparse.engine.optimizers.kinds import is_adam


def any_set(flags: Sequence[Tensor], device: torch.device, host_knows: bool) -> Tensor:
    """() whether one of the () flags is set; forms nothing where the host knows that none is."""
    if not flags or (host_knows and not any(map(bool, flags))):
        return torch.zeros((), dtype=torch.bool, device=device)
    return torch.stack(list(flags)).any()


def _to_host(x: Tensor) -> Tensor:
    """Begin to copy a tensor to pinned memory; the copy is there when the current stream has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu").copy_(x, non_blocking=True)


class Decision:
    """True if a step is skipped, for all groups. A flag on a CUDA stream is copied to the host asynchronously.

    ``bool()`` waits for that copy.

    The headers of all ranks come with it: ``bool()`` raises where they differ, see
    :func:`~lightning_sparse.engine.header.check`.

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
        self._flag: Decision | None = None
        """The flag of the latest step, until it is resolved."""
        self._invalid: Set[str] = frozenset()
        """Parameters whose gradient a skipped step has left NaN, as far as steps are resolved."""
        self._handed = FoundInf()

    @property
    def unresolved(self) -> bool:
        """Whether nobody has asked yet whether the latest step is skipped."""
        return self._flag is not None

    def note(self, flag: Decision, names: Set[str]) -> None:
        """A step has ended that gave these parameters a gradient; the one before is resolved."""
        self._flag, self._latest = flag, names

    def resolve(self) -> None:
        """Note which gradients are invalid since the latest step; waits for its flag."""
        if self._flag is None:
            return
        skipped, self._flag = bool(self._flag), None
        self._invalid = self._invalid | self._latest if skipped else self._invalid - self._latest

    def begin_step(self) -> None:
        """New gradients are coming."""
        self.resolve()
        self._handed.take_all_back()

    def drop(self, optimizer: Optimizer) -> bool:
        """Set this optimizer's invalid gradients to None; whether there were any."""
        self.resolve()
        return self._drop(optimizer, self._invalid)

    def skip(self, optimizer: Optimizer, hand_over: bool) -> None:
        """Let this optimizer's next step pass over invalid gradients.

        Args:
            optimizer: any.
            hand_over: whether it may be given the flag on the device, so that nobody waits; else :meth:`drop`.
        """
        self._handed.take_back(optimizer)
        flag = None if self._flag is None else self._flag.on_device
        if flag is not None and hand_over and heeds_found_inf(optimizer):
            self._drop(optimizer, self._invalid - self._latest)
            stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if all(self._names.get(id(p)) in self._latest for p in stepped):
                self._handed.hand(optimizer, flag)
                return
        self.drop(optimizer)

    def take_back(self, optimizer: Optimizer) -> None:
        """The step that a flag was handed over for is over."""
        self._handed.take_back(optimizer)

    def could_spare_a_wait(self, optimizer: Optimizer) -> bool:
        """Whether the flag of the latest step is on a device, and the optimizer would heed it there if it was fused."""
        flag = None if self._flag is None else self._flag.on_device
        return flag is not None and may_be_fused(optimizer) and not _fused(optimizer)

    def close(self) -> None:
        """Take flags back that optimizers still hold."""
        self._handed.take_all_back()

    def _drop(self, optimizer: Optimizer, names: Set[str]) -> bool:
        dropped = False
        for group in optimizer.param_groups if names else ():
            for parameter in group["params"]:
                if self._names.get(id(parameter)) in names:
                    parameter.grad = None
                    dropped = True
        return dropped


class FoundInf:
    """Flags that optimizers hold during their next step as ``found_inf``, as a ``GradScaler`` hands them over."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def hand(self, optimizer: Optimizer, flag: Tensor) -> None:
        """Let the optimizer's next step do nothing if () the flag, 0.0 or 1.0, is set; for that step alone."""
        self._held[optimizer] = optimizer.found_inf = flag  # type: ignore[attr-defined]

    def take_back(self, optimizer: Optimizer) -> None:
        """The step that was meant is over, or did not come."""
        if self._held.pop(optimizer, None) is not None:
            del optimizer.found_inf  # type: ignore[attr-defined]

    def take_all_back(self) -> None:
        """As :meth:`take_back`, of all optimizers."""
        for optimizer in list(self._held):
            self.take_back(optimizer)


def may_be_fused(optimizer: Optimizer) -> bool:
    """Whether it is one of those of torch that heed ``found_inf`` where they are fused."""
    return type(optimizer) is SGD or is_adam(type(optimizer))


def _fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def heeds_found_inf(optimizer: Optimizer) -> bool:
    """Whether an optimizer's next step does nothing at all where ``found_inf`` is set; those of torch that are fused.

    Not SGD with momentum in its first step: it makes the momenta in that step, and would leave them undefined.
    """
    if not may_be_fused(optimizer) or not _fused(optimizer):
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
