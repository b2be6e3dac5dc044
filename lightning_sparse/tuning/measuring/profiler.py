"""Profiler of a training run: times backward over some steps, then the network and the cost of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lightning_sparse.engine import Engine
from lightning_sparse.engine.gradient_hooks import on_gradients
from lightning_sparse.engine.metrics import Stamp
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import ParameterSize, bucket_numels
from lightning_sparse.tuning.measuring.collectives import measure_network
from lightning_sparse.tuning.measuring.microbenchmark import measure_group, sizes_up_to
from lightning_sparse.tuning.measuring.rank_sync import gathered
from lightning_sparse.tuning.performance.network import Network
from lightning_sparse.tuning.performance.profile import GroupCost, LayerTime, Profile

Marks = list[tuple[str, Stamp]]


class BackwardTimer:
    """Records the times of the end of forward and of each parameter's gradient; by CUDA events on CUDA.

    Args:
        module: its forward is called before each backward; with Lightning it contains the loss.
        parameters: that need a gradient, by name.
        device: of the parameters.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._numels = {name: p.numel() for name, p in parameters.items()}
        self._device = device
        self._marks: Marks = []
        self._steps: list[Marks] = []
        self._hooks: ExitStack | None = on_gradients(parameters, self._note)
        self._hooks.callback(module.register_forward_hook(self._forward_ends).remove)

    def keep(self) -> None:
        """Keep the times of the latest forward's backward, also of its rest; not of those that only accumulate."""
        self._steps.append(self._marks)

    def close(self) -> None:
        """Remove the hooks."""
        if self._hooks is not None:
            self._hooks.close()
        self._hooks = None

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
            for place, ((_, before), (name, now)) in enumerate(pairwise(marks)):
                places.setdefault(name, []).append(place)
                taken.setdefault(name, []).append(max(0.0, before.until(now) / 1e3))
        seconds = {name: median(times) for name, times in taken.items()}
        unused = [name for name in reversed(self._numels) if name not in seconds]
        own = [*sorted(places, key=lambda name: median(places[name])), *unused]
        order = comm.all_gather_object(own, self._device)[0]
        periods = [first[0][1].until(second[0][1]) / 1e3 for first, second in pairwise(steps)]
        rest = max(0.0, median(periods) - sum(seconds.values()))
        *times, rest = (
            gathered([*(seconds.get(name, 0.0) for name in order), rest], comm, self._device).mean(0).tolist()
        )
        return _by_module(order, self._numels, times), rest

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state: copies of the module need no timer."""
        return {"_hooks": None}

    def _forward_ends(self, *_: Any) -> None:
        if self._hooks is not None and torch.is_grad_enabled():
            self._marks = [("", Stamp.now(self._device))]

    def _note(self, name: str, _: Tensor) -> None:
        self._marks.append((name, Stamp.now(self._device)))


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


class Profiler:
    """Times an engine's backward for some steps and then measures, within one step, the rest of a profile.

    Call :meth:`before_step` at the start of every exchange. When it returns True, call :meth:`measure_step`, then
    :meth:`group_cost` for all settings to compare, and :meth:`profile`. All of it is collective.

    Args:
        ddp: the wrapped model; its forward is called before each backward.
        engine: in training.
        warmup: steps that are not timed.
        steps: steps that are timed; medians count.
    """

    def __init__(self, ddp: Any, engine: Engine, warmup: int, steps: int) -> None:
        self.warmup, self.steps = warmup, steps
        self._engine, self._bucket_numels = engine, delivered_numels(ddp, engine)
        self.seen = 0
        """Steps so far."""
        self._timer = BackwardTimer(ddp, engine.stepper.parameters, engine.device)
        self._dtype = next(iter(engine.stepper.parameters.values())).dtype
        self._layers: list[LayerTime] = []
        self._rest = 0.0
        self.network: Network

    def before_step(self) -> bool:
        """Count a step; return True when enough have been timed."""
        if self.seen > self.warmup:
            self._timer.keep()
        self.seen += 1
        return self.seen > self.warmup + self.steps

    def measure_step(self) -> None:
        """Evaluate the steps and time the network.

        Raises:
            RuntimeError: on all ranks, if a rank has seen fewer than two backward passes.
        """
        self.close()
        engine = self._engine
        self._layers, self._rest = self._timer.result(engine.comm)
        most = sum(p.nbytes for p in engine.stepper.parameters.values())
        self.network = measure_network(engine.comm, engine.device, self._dtype, most)

    def group_cost(self, numel: int, **settings: Any) -> GroupCost:
        """Measure the cost of groups of up to ``numel`` coordinates.

        Args:
            numel: coordinates of the largest group.
            settings: of :func:`.measure_group`.
        """
        engine = self._engine
        return measure_group(engine.comm, engine.device, sizes_up_to(numel), dtype=self._dtype, **settings)

    def profile(self, costs: Sequence[GroupCost]) -> Profile:
        """Return all measurements, of exchanges that come after backward; equal on all ranks.

        Args:
            costs: of groups, at one density or more.
        """
        own = Profile(self._layers, self._rest, self.network, costs, "none", self._bucket_numels, "step")
        return self._engine.comm.all_gather_object(own, self._engine.device)[0]

    def close(self) -> None:
        """Stop timing backward."""
        self._timer.close()


def delivered_numels(ddp: Any, engine: Engine) -> tuple[float, float]:
    """Return the coordinates of DDP's first bucket of gradients, and of the others."""
    size = ddp.bucket_bytes_cap / (1 << 20)
    sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
    # DDP shortens the first bucket only if no size was given.
    return bucket_numels(sizes, size, 1.0 if ddp.bucket_bytes_cap_default else size)
