"""Times of backward, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.tuning.performance.profile import LayerTime
from lightning_sparse.tuning.performance.rank_sync import gathered

Marks = list[tuple[str, Stamp, float]]


class BackwardTimer:
    """Records the times of the end of forward and of each parameter's gradient; by CUDA events on CUDA.

    Args:
        module: its forward is called before each backward; with Lightning it contains the loss.
        parameters: that need a gradient, by name.
        device: of the parameters.
        held_up: returns the seconds so far that something else blocked backward, to be subtracted.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        held_up: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._numels = {name: p.numel() for name, p in parameters.items()}
        self._device = device
        self._held_up = held_up
        self._marks: Marks = []
        self._steps: list[Marks] = []
        self._hooks: list[Any] = [module.register_forward_hook(self._forward_ends)]
        for name, p in parameters.items():
            self._hooks.append(p.register_post_accumulate_grad_hook(partial(self._note, name)))  # type: ignore[no-untyped-call]

    def keep(self) -> None:
        """Keep the times of the latest forward's backward, also of its rest; not of those that only accumulate."""
        self._steps.append(self._marks)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def result(self, comm: TorchCollective) -> tuple[list[LayerTime], float]:
        """Return the median times of the kept steps, averaged over ranks, in rank 0's order; collective.

        Parameters that no step of rank 0 used come last and take no time.

        Returns:
            Layers (modules with their own parameters), and the seconds of a step outside backward.

        Raises:
            RuntimeError: on all ranks, if a rank has seen fewer than two backward passes.
        """
        steps = [marks for marks in self._steps if len(marks) > 1]
        seen = gathered([len(steps)], comm, self._device).flatten().int().tolist()
        if min(seen) < 2:
            raise RuntimeError(
                f"Expected at least 2 backward passes to profile, but the ranks have seen {seen}. Does training_step "
                "return a loss that depends on the model's parameters?"
            )
        places: dict[str, list[int]] = {}
        taken: dict[str, list[float]] = {}
        for marks in steps:
            for place, ((_, before, held_before), (name, now, held)) in enumerate(pairwise(marks)):
                places.setdefault(name, []).append(place)
                taken.setdefault(name, []).append(max(0.0, before.until(now) / 1e3 - (held - held_before)))
        seconds = {name: median(times) for name, times in taken.items()}
        unused = [name for name in reversed(self._numels) if name not in seconds]
        own = [*sorted(places, key=lambda name: median(places[name])), *unused]
        order = comm.broadcast_object(own, 0, self._device)
        periods = [
            first[0][1].until(second[0][1]) / 1e3 - (second[0][2] - first[0][2]) for first, second in pairwise(steps)
        ]
        rest = max(0.0, median(periods) - sum(seconds.values()))
        *times, rest = (
            gathered([*(seconds.get(name, 0.0) for name in order), rest], comm, self._device).mean(0).tolist()
        )
        return _by_module(order, self._numels, times), rest

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: copies of the module need no timer."""
        return {"_hooks": []}

    def _forward_ends(self, *_: Any) -> None:
        if self._hooks and torch.is_grad_enabled():
            self._marks = [("", Stamp.now(self._device), self._held_up())]

    def _note(self, name: str, _: Tensor) -> None:
        self._marks.append((name, Stamp.now(self._device), self._held_up()))


def _by_module(order: list[str], numels: dict[str, int], seconds: list[float]) -> list[LayerTime]:
    """Join parameters to layers; a layer ends with the last of its parameters."""
    modules: dict[str, list[str]] = {}
    for name in order:
        modules.setdefault(name.rpartition(".")[0] or name, []).append(name)
    last = {module: order.index(names[-1]) for module, names in modules.items()}
    layers, reached = [], 0
    for module in sorted(modules, key=last.__getitem__):
        names, end = modules[module], last[module] + 1
        layers.append(LayerTime(module, tuple(names), sum(numels[name] for name in names), sum(seconds[reached:end])))
        reached = max(reached, end)
    return layers
