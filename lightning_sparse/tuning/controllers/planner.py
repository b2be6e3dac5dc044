"""Planner: profiles the first steps, then cuts groups and sets densities by the profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_sparse.core.console import Table
from lightning_sparse.engine import Engine
from lightning_sparse.engine.calls import digest_of
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.methods.grouping import Group, Messages, ParameterSize, make_plan
from lightning_sparse.tuning.performance.profile import Profile
from lightning_sparse.tuning.performance.profiler import Profiler, delivered_numels

LONGEST_TABLE = 40


class Planner:
    """Sets an engine's groups and densities by its grouping and its schedule, once there is a profile.

    Until then, training runs as usual; the measurements delay one step by some seconds.

    Args:
        ddp: the wrapped model; its forward is called before each backward.
        engine: with the groups of the first steps.
        sizes: of all parameters, in order of registration.
        profile: :attr:`saved` of an earlier run; used if it matches this one.
    """

    def __init__(
        self, ddp: Any, engine: Engine, sizes: Sequence[ParameterSize], profile: dict[str, Any] | None = None
    ) -> None:
        self.profile: Profile | None = None
        self._bucket_numels = delivered_numels(ddp, engine)
        self._sizes = list(sizes)
        self._profiler: Profiler | None = None
        self._fingerprint = fingerprint(sizes, engine)
        if not self.resume(profile, engine):
            self._profiler = Profiler(ddp, engine, *engine.settings.grouping.profiled_steps)

    def resume(self, profile: dict[str, Any] | None, engine: Engine) -> bool:
        """Use the profile of an earlier run that matches this one, without measuring; collective, between two steps.

        Args:
            profile: from :attr:`saved`; that of rank 0 decides.
            engine: its groups change.

        Returns:
            True if it matches.
        """
        known = engine.comm.all_gather_object(profile, engine.device)[0]
        if not isinstance(known, dict) or known.get("fingerprint") != self._fingerprint:
            return False
        self.close()
        self._apply(replace(Profile.from_dict(known), bucket_numels=self._bucket_numels), engine)
        return True

    @staticmethod
    def wanted(settings: SparsificationConfig) -> bool:
        """Return True if these settings need a profile."""
        return settings.grouping.needs_profile or settings.density.needs_profile

    @property
    def saved(self) -> dict[str, Any] | None:
        """The profile, for a checkpoint."""
        return None if self.profile is None else self.profile.as_dict()

    def before_step(self, engine: Engine) -> bool:
        """Count steps; after the last timed one, measure the rest and change the groups, which is all."""
        profiler = self._profiler
        if profiler is None:
            return True
        if profiler.seen == 0 and engine.comm.rank == 0:
            print(f"sparse_ddp: profiling {profiler.steps} steps after {profiler.warmup} of warm-up ...", flush=True)
        if profiler.before_step():
            self._profiler = None
            self._apply(self._measure(profiler, engine), engine)
        return self._profiler is None

    def close(self) -> None:
        """Stop timing backward."""
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def _measure(self, profiler: Profiler, engine: Engine) -> Profile:
        settings = engine.settings
        profiler.measure_step()
        sparse = sum(group.numel for group in engine.plan if not group.dense)
        method = {"sparsifier": settings.sparsifier, "exchange": settings.exchange_in_use, "memory": settings.memory}
        densities = sorted({*settings.density.tried, *settings.rules.densities.values()})
        costs = [profiler.group_cost(sparse, **method, density=density) for density in densities]
        return profiler.profile(costs, self._fingerprint)

    def _apply(self, profile: Profile, engine: Engine) -> None:
        plan, self.profile = self._choose(profile, engine.settings, engine.frozen)
        engine.regroup(plan, self.profile.messages)
        if engine.comm.rank == 0:
            print_profile(self.profile, plan, engine.settings.density.final)

    def _choose(
        self, profile: Profile, settings: SparsificationConfig, frozen: Iterable[str]
    ) -> tuple[list[Group], Profile]:
        """Return groups with their densities, and the profile with the chosen messages.

        If the settings allow both kinds of messages, the one with the shorter predicted step is chosen.
        """
        possible: Sequence[Messages] = ("step", "group") if settings.messages == "auto" else (settings.messages,)
        assert settings.bucket_cap_mb is not None
        cut, density = (settings.grouping, settings.rules, settings.bucket_cap_mb), settings.density
        profiles = [replace(profile, messages=messages) for messages in possible]
        plans = [density.assign(make_plan(self._sizes, *cut, one, density.final, frozen), one) for one in profiles]
        choices = zip(plans, profiles, strict=True)
        return min(choices, key=lambda choice: choice[1].step_seconds(choice[0], density.final))


def fingerprint(sizes: Sequence[ParameterSize], engine: Engine) -> str:
    """Return a digest of everything that a profile depends on, except the machine."""
    settings = engine.settings
    facts = (list(sizes), settings.algorithm, settings.executor, engine.comm.world_size, engine.device.type)
    return f"{digest_of(*facts):016x}"


def print_profile(profile: Profile, plan: Sequence[Group], density: float) -> None:
    """Print groups with the measured times."""
    rows = []
    groups, (_, backward) = profile.timeline(plan)
    for group, seconds in list(zip(groups, backward, strict=True))[:LONGEST_TABLE]:
        cost = profile.group_cost(group.density or density)
        parts = (cost.select, cost.process, cost.transfer)
        times = [f"{1e3 * one:.3g}" for one in (seconds, *(part(group.numel) for part in parts))]
        rows.append([group.name, f"{group.numel:,}", f"{group.density or density:.3g}", *times])
    network = profile.network
    print(
        f"sparse_ddp: {len(profile.layers)} layers; a step without exchange takes {1e3 * profile.compute_seconds:.4g} "
        f"ms, {1e3 * sum(profile.backward_seconds):.4g} ms of it backward. Overlap with backward: {profile.overlap}."
    )
    if network.ranks > 1:
        lines = [("all-reduce", network.all_reduce), ("all-gather", network.all_gather)]
        each = [f"{name} {1e6 * line.alpha:.3g} us + {1e9 * line.beta:.3g} ns/byte" for name, line in lines]
        print(f"sparse_ddp: {network.ranks} ranks, {', '.join(each)}", flush=True)
    travel = "of all groups travel together" if profile.messages == "step" else "of each group travel by themselves"
    seconds = profile.step_seconds(plan, density)
    print(f"sparse_ddp: messages {travel}; predicted is a step of {1e3 * seconds:.4g} ms.")
    header = ["group", "coordinates", "density", "backward ms", "select ms", "process ms", "transfer ms"]
    Table("sparse_ddp: groups by this profile", header, rows).show()
