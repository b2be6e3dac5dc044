"""What ranks tell each other of weights that drift: in the words that begin a step, and where they begin to drift."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from lightning_sparse.core.layout import flattened, own
from lightning_sparse.engine.agreement import checksum
from lightning_sparse.engine.calls import SUMS, Met
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.regrouping import Groups
from lightning_sparse.methods.memory.drift import LOOKED_AT
from lightning_sparse.ops import all_finite


class Moves:
    """Follows how far optimizers move weights that drift, on this rank and on all.

    Args:
        groups: of the engine.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._same = 0
        """Steps in a row in which ranks have moved their weights alike."""
        self.on_alike: Callable[[], None] = lambda: None
        """Called on all ranks if the first ones were such."""

    def begin_alike(self) -> bool:
        """Let rank 0's weights be those that all agree on, where ranks have begun to drift from others; collective.

        Whoever wraps a model again while its weights drift lets ``DistributedDataParallel`` send those of rank 0.

        Returns:
            Whether there were any.
        """
        new = [group for group in self._groups.groups if group.drift and not group.state.memory.work.compared]
        if not new:
            return False
        comm = self._groups.comm
        sums = torch.stack([checksum(group.state.memory.agreed) for group in new])
        differ = (comm.all_gather(sums) != sums).any(0).tolist()
        for group, different in zip(new, differ, strict=True):
            group.state.memory.work.compared = True
            if different and group.drift:
                agreed = comm.broadcast(group.state.memory.agreed[:-1].clone(), 0)
                with self._groups.record.changing():
                    group.drift.meet_(group.state.memory, agreed, 1.0)
        return any(differ)

    def are_finite(self, names: Collection[str]) -> bool:
        """Return whether gradients are finite by which this rank's own weights move: no average will tell."""
        groups = self._groups
        grads = (groups.parameters[name].grad for name in names if groups.group_of[name].drifts)
        found = [all_finite(flattened(own(grad))) for grad in grads if grad is not None]
        return not found or bool(torch.stack(found).all())

    def told(self, names: Collection[str]) -> list[float]:
        """Return (SUMS,) what this rank tells of its weights in the latest step; nothing, where that is all zeros.

        Squares of what it has sent, sums of drifts and of gradients.
        """
        squares = [group.state.memory.squares[0].view(1) for group in self._lengthened(names)]
        moving = [group for group in self._groups.groups if group.drifts and not group.spans.keys().isdisjoint(names)]
        totals = [group.state.memory.work.totals for group in moving]
        moved = [torch.stack(totals).sum(0)] if totals and None not in totals else []
        if not squares and not moved:
            return []
        zero = torch.zeros(1, device=self._groups.device, dtype=torch.float64)
        told = torch.cat([torch.stack(squares).sum(0) if squares else zero, *moved])
        found: list[float] = self._groups.on_host(told).tolist()
        return found + [0.0] * (SUMS - len(found))

    def hear(self, names: Collection[str], met: Met) -> None:
        """Note what all ranks have told of the latest step, and let the factors of averages follow it."""
        drifts, gradients = ([row[place] for row in met.sums()] for place in (1, 2))
        alike = bool(names) and len(set(drifts)) == 1 and drifts[0] != 0 and len(set(gradients)) > 1
        self._same = self._same + 1 if alike else 0
        if self._same == LOOKED_AT:
            self.on_alike()
        if groups := self._lengthened(names):
            each = sum(row[0] for row in met.sums()) / self._groups.comm.world_size
            sent = torch.stack([group.state.memory.squares[1] for group in groups]).sum()
            mean = float(self._groups.on_host(sent))
            with self._groups.record.changing():
                for group in groups if mean > 0 else ():
                    if group.drift:
                        group.drift.measure_(group.state.memory, each, mean)

    def _lengthened(self, names: Collection[str]) -> list[GroupReducer]:
        """Return the groups of these parameters whose averages are lengthened by a factor that is measured."""
        groups = (group for group in self._groups.groups if group.drift and group.drift.longer == "averages")
        return [group for group in groups if not group.spans.keys().isdisjoint(names)]
