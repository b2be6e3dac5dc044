"""The readable side of an engine: counts, groups, logged quantities; and the stand-in for an engine in a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_sparse.core.checks import expect
from lightning_sparse.core.names import plain_name
from lightning_sparse.engine.agreement import failing_together
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.metrics import Step, dense_statistics, summarize
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.grouping import Group
from lightning_sparse.ops.length import LengthChanges

T = TypeVar("T")


class EngineView:
    """Read access to an engine: nothing here changes what is exchanged.

    Args:
        stepper: its own, which its owner closes.
    """

    def __init__(self, stepper: Stepper) -> None:
        self.comm, self.device = stepper.comm, stepper.device
        self.warnings: list[str] = []
        """Given to :meth:`~lightning_sparse.engine.Engine._warn`."""
        self.closed = False
        """True if the engine has ended."""
        self.stepper = stepper
        """Exchanges gradients when optimizers step."""
        self.networks = stepper.networks
        """See :class:`.Stepper`."""
        self._record = stepper.record

    @property
    def step(self) -> int:
        """Number of steps with an exchange so far; skipped ones do not count, see :attr:`skipped`."""
        return self._record.counts.step

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far, because a gradient was not finite on some rank."""
        return self._record.counts.skipped

    @property
    def _length_changes(self) -> LengthChanges:
        """Number of times that this rank clipped a group's gradient to twice its usual length, or rescaled a residual.

        With :class:`.SecondMoment`, from the first step on, also before a checkpoint; waits for the
        device.
        """
        return _length_changes(self.stepper.groups) or LengthChanges(0, 0)

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank keeps for error feedback, of all groups; with :class:`.Residual` 4 for each coordinate.

        Vectors for what finds no room in the place of a gradient, such as scores of 16-bit gradients, are counted from
        the first step on.
        """
        return sum(group.memory_bytes for group in self.stepper.groups)

    @property
    def groups(self) -> list[Group]:
        """The groups, in the order in which backward should finish them; sizes are of what this rank exchanges."""
        return [group.plan for group in self.stepper.groups]

    def summary(self) -> dict[str, float]:
        """Return the logged quantities of the latest step, see :data:`~lightning_sparse.engine.metrics.QUANTITIES`.

        Collective: all ranks must call this together, between two steps. Empty before the first step. Groups that the
        latest step did not use, on any rank, count for their residuals alone.

        Raises:
            RuntimeError: within a step.
        """
        step = self.latest_step()
        return {} if step is None else summarize(step, self._mean_over_ranks)

    def latest_step(self) -> Step | None:
        """Return this rank's statistics of all groups in the latest step, between two steps; None before the first one.

        It is the input of :func:`~lightning_sparse.engine.metrics.summarize` and of the metrics in
        :mod:`lightning_sparse.integrations.averages`.

        Raises:
            RuntimeError: within a step.
        """
        self._check_between_steps("Summaries can only be asked for")
        stepper = self.stepper
        if stepper.left_to_ddp:
            statistics = [dense_statistics(sum(p.numel() for p in stepper.parameters.values()), stepper.direct_bytes)]
        else:
            statistics = [
                group.statistics for group in self.stepper.groups if group.ran and group.statistics is not None
            ]
        if not statistics:
            return None
        return Step(
            statistics,
            [group.residual_norm() for group in self.stepper.groups],
            stepper.exposed_ms(),
            self.skipped_steps,
            stepper.left_to_ddp,
            stepper.shared_bytes,
            self.stepper.totals,
            len(self.warnings),
            _length_changes(self.stepper.groups),
            stepper.grad_norm,
        )

    def _group_summaries(self) -> dict[str, dict[str, float]]:
        """Return :meth:`summary` of each group by name, without quantities that groups share, such as ``exposed_ms``.

        Groups that the latest step did not use, on any rank, are left out.
        """
        self._check_between_steps("Summaries can only be asked for")
        summaries: dict[str, dict[str, float]] = {}
        for group in [] if self.stepper.left_to_ddp else self.stepper.groups:
            if group.ran and group.statistics is not None:
                changes = _length_changes([group])
                step = Step([group.statistics], [group.residual_norm()], length_changes=changes)
                summaries[group.plan.name] = summarize(step, self._mean_over_ranks)
        return summaries

    def residual(self, name: str) -> Tensor | None:
        """Return the (numel,) residual of a parameter on this rank, or None if the memory keeps none.

        Coordinates are in the order of memory, which is another one than that of ``flatten()`` for ``channels_last``.
        Where ranks have parts, of this rank's. A view, valid until the next step begins; with
        :class:`~lightning_sparse.memories.Drift` the drift, a copy.

        Raises:
            ValueError: for another name than those of :attr:`parameters`.
        """
        name = plain_name(name) if isinstance(name, str) else name
        known = isinstance(name, str) and name in self.stepper.parameters
        expect(known, "name", "that of a parameter of the engine", name)
        group = self.stepper.group_of[name]
        if group.drifts:
            copies = self.stepper.copies
            return copies.common(name) - copies.mine(name)
        return None if group.residual is None else group.residual[group.spans[name]]

    def _check_between_steps(self, what: str) -> None:
        """Raise within an exchange, where handlers of signals and other threads may ask."""
        if self.stepper.busy:
            raise RuntimeError(f"{what} between two steps, not within one.")

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        """Return the mean over ranks of a small vector on the CPU; collective."""
        if self.closed and self.comm.world_size > 1:
            raise RuntimeError(
                "The engine is closed: ask for summaries before the end of fit, in on_train_end at the latest."
            )
        for network in reversed(self.networks):
            x = network.all_reduce(x.to(self.device)) / network.world_size
        return x.cpu()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raise an error of the block on all ranks, also on those that have other parts; collective at its end."""
        with ExitStack() as stack:
            for network in reversed(self.networks):
                stack.enter_context(failing_together(network, self.device))
            yield

    def _all_gather_object(self, what: T) -> list[T]:
        """Return small objects of all ranks, also of those that have other parts, in the order of :attr:`rank`."""
        found = [what]
        for network in reversed(self.networks):
            found = list(chain.from_iterable(zip(*network.all_gather_object(found, self.device), strict=True)))
        return found

    @property
    def _rank(self) -> int:
        """See :attr:`.Stepper.rank`."""
        return self.stepper.rank

    @property
    def _world_size(self) -> int:
        """Number of all ranks, also of those that have other parts."""
        return self.comm.world_size * self._parts

    @property
    def _parts(self) -> int:
        """Number of ranks that exchange the parts of the same gradients; 1 where each exchanges all."""
        return self.stepper.within.world_size

    @property
    def _exchanging(self) -> int:
        """Number of ranks that exchange the same part of gradients; 1 where those near each other are all."""
        return 1 if self.stepper.settings.node_size and self._parts == 1 else self.comm.world_size

    def _sum_within(self, x: Tensor) -> Tensor:
        """Return the sum of a small vector on the CPU over ranks that hold parts of the same gradients; collective."""
        whole = self.stepper.share.cuts or self.stepper.within.world_size == 1
        return x if whole else self.stepper.within.all_reduce(x.to(self.device)).cpu()


def _length_changes(groups: Sequence[GroupReducer]) -> LengthChanges | None:
    """Return those of all groups together; None where no memory follows lengths. Waits for the device, once."""
    counters = [group.memory.counters(group.state.memory) for group in groups if group.sparsified]
    found = [[one[name] for name in LengthChanges._fields] for one in counters if LengthChanges._fields[0] in one]
    if not found:
        return None
    return LengthChanges(*torch.stack([torch.stack(one) for one in found]).sum(0).long().tolist())


class CopiedEngine:
    """Takes the place of an engine in a copy of the model or strategy that it belongs to: closed, and empty.

    A process group and a thread cannot be copied, and residuals belong to the model that trains. The copy of a
    ``DistributedDataParallel`` model averages gradients densely, as DDP does by itself, until an engine is attached.

    Example:
        >>> import copy, tempfile, torch, lightning_sparse as ls
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
        >>> ddp = DistributedDataParallel(torch.nn.Linear(20, 20))
        >>> engine = ls.attach(ddp)
        >>> average = torch.optim.swa_utils.AveragedModel(ddp)
        >>> copy.deepcopy(engine).step
        Traceback (most recent call last):
        ...
        RuntimeError: This is a copy of an engine: it exchanges nothing, and residuals stay with the original. ...
        >>> engine.close()
        >>> dist.destroy_process_group()
    """

    closed = True

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "This is a copy of an engine: it exchanges nothing, and residuals stay with the original. To exchange the "
            "gradients of a copied model, attach an engine to it with lightning_sparse.attach()."
        )
