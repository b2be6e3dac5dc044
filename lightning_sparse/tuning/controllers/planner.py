"""Planner: times the first steps, then cuts groups and sets densities so that messages hide behind backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from lightning_sparse.core.console import say
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from lightning_sparse.tuning.measuring.profiler import Profiler
from lightning_sparse.tuning.performance.profile import Profile

WARMUP, STEPS = 5, 10
"""Steps that are not timed, and steps of which medians count."""
LATE = 10**9
"""Step at which a schedule has reached its last density."""


class Planner:
    """Observer of an engine with ``overlap=True`` whose grouping or density needs a profile.

    The first steps exchange when the optimizer steps, so that nothing runs beside the backward that is timed. Then
    network and groups are timed between the ranks, which takes some seconds, and groups change. No residual is lost.

    Args:
        ddp: the wrapped model; its forward is called before each backward.
        engine: with the groups of the first steps.
        sizes: of all parameters, in order of registration.
    """

    def __init__(self, ddp: Any, engine: Engine, sizes: Sequence[ParameterSize]) -> None:
        self.profile: Profile | None = None
        """Equal on all ranks, when it is known."""
        self._sizes = list(sizes)
        self._profiler: Profiler | None = Profiler(ddp, engine, WARMUP, STEPS)
        self._router = cast(Any, engine.stepper)
        self._router.hiding = False

    @staticmethod
    def wanted(settings: SparsificationConfig) -> bool:
        """Return True if these settings need a profile."""
        return settings.grouping.needs_profile or settings.density.needs_profile

    def before_step(self, engine: Engine) -> bool:
        """Count steps; after the last timed one, measure the rest and change groups, which is all."""
        profiler = self._profiler
        if profiler is not None and profiler.before_step():
            self.close()
            self.profile = profile = self._measure(profiler, engine)
            settings = engine.settings
            density, cap = settings.density(LATE), settings.bucket_cap_mb
            assert cap is not None
            plan = make_plan(self._sizes, settings.grouping, settings.rules, cap, profile, density, engine.frozen)
            if settings.density.needs_profile:
                schedule: Any = settings.density
                plan = schedule.assign(plan, profile)
            engine.regroup(plan)
            self._router.hiding = True
            if engine.comm.rank == 0:
                groups = sum(not group.dense for group in plan)
                say(
                    f"sparse_ddp: {groups} groups by a profile of {STEPS} steps, behind "
                    f"{1e3 * sum(profile.backward_seconds):.3g} ms of backward; predicted is a step of "
                    f"{1e3 * profile.step_seconds(plan, density):.3g} ms."
                )
        return self._profiler is None

    def close(self) -> None:
        """Stop timing backward."""
        if self._profiler is not None:
            self._profiler.close()
        self._profiler = None

    def _measure(self, profiler: Profiler, engine: Engine) -> Profile:
        settings = engine.settings
        profiler.measure_step()
        sparse = sum(group.numel for group in engine.groups if not group.dense)
        method: dict[str, Any] = {"sparsifier": settings.sparsifier, "exchange": settings.exchange_in_use}
        method["memory"] = settings.memory_in_use
        schedule: Any = settings.density
        tried = schedule.tried if schedule.needs_profile else [schedule(LATE)]
        densities = sorted({*tried, *settings.rules.densities.values()})
        costs = [profiler.group_cost(sparse, **method, density=density) for density in densities]
        on_device = engine.device.type == "cuda"
        return replace(profiler.profile(costs), overlap="full" if on_device else "comm", messages="group")
