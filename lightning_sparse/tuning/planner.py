"""Profile the first steps, then cut groups and set densities by what was measured."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_sparse.console import print_table
from lightning_sparse.density import HiddenDensity, ProfiledDensity, TimeBudget
from lightning_sparse.grouping import (
    Group,
    Grouping,
    OptimalMerge,
    Overlap,
    ParameterSize,
    Profile,
    ProfiledMerge,
    Rules,
    budget_density,
    hidden_densities,
    make_plan,
    timeline,
)
from lightning_sparse.grouping.plan import bucket_numels
from lightning_sparse.hook import Engine, Settings
from lightning_sparse.profiling import BackwardTimer, from_rank_zero, gathered, measure_network, rehearse, sizes_up_to

LAST_STEP = 2**31
"""Schedules are asked for the density of a step that is far away: a warm-up is over by then."""
LONGEST_TABLE = 40


class Planner:
    """Gives an engine the groups and densities that its grouping and its schedule want, once there is a profile.

    Until then, and while it is made, training goes on as usual; the profile itself holds up one step for some seconds.

    Args:
        module: whose forward is called before each backward.
        engine: works with the groups to begin with.
        sizes: of all parameters, in order of registration.
        grouping: what the user asked for.
        rules: which parameters stay dense, and which have densities of their own; these keep them.
        bucket_cap_mb: size of groups by bucket.
        delivery_mb: sizes of DDP's first bucket and of the others, in which gradients are handed over.
        profile: of an earlier run, as :attr:`saved` gave it; used if it fits this one.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: Engine,
        sizes: Sequence[ParameterSize],
        grouping: Grouping,
        rules: Rules,
        bucket_cap_mb: float,
        delivery_mb: tuple[float, float],
        profile: dict[str, Any] | None = None,
    ) -> None:
        self.profile: Profile | None = None
        first, others = delivery_mb
        self._bucket_numels = bucket_numels(sizes, others, first)
        self._sizes, self._grouping, self._rules, self._cap = list(sizes), grouping, rules, bucket_cap_mb
        merge = grouping if isinstance(grouping, OptimalMerge) else OptimalMerge()
        self._warmup, self._steps = merge.warmup, merge.steps
        self._seen = 0
        self._timer: BackwardTimer | None = None
        self._fingerprint = fingerprint(sizes, engine)
        if not self.resume(profile, engine):
            self._timer = BackwardTimer(module, engine.parameters, engine.device, lambda: engine.held_up_seconds)

    def resume(self, profile: dict[str, Any] | None, engine: Engine) -> bool:
        """Use the profile of an earlier run instead of measuring, if it fits this one; collective, between two steps.

        Args:
            profile: as :attr:`saved` gave it; what rank 0 has decides.
            engine: whose groups change.

        Returns:
            Whether it fits.
        """
        known = from_rank_zero(profile, engine.comm, engine.device)
        if not isinstance(known, dict) or known.get("fingerprint") != self._fingerprint:
            return False
        self.close()
        self._apply(replace(Profile.from_dict(known), bucket_numels=self._bucket_numels), engine)
        return True

    @staticmethod
    def wanted(grouping: Grouping, settings: Settings) -> bool:
        """Whether these settings need a profile."""
        return isinstance(grouping, OptimalMerge) or isinstance(settings.density, ProfiledDensity)

    @property
    def saved(self) -> dict[str, Any] | None:
        """The profile, to be kept in a checkpoint."""
        return None if self.profile is None else self.profile.as_dict()

    def before_step(self, engine: Engine) -> None:
        """Count steps; after the last one that is timed, measure the rest and change the groups."""
        if self._timer is None:
            return
        if self._seen == 0 and engine.comm.rank == 0:
            print(f"sparse_ddp: profiling {self._steps} steps after {self._warmup} of warm-up ...", flush=True)
        if self._seen > self._warmup:
            self._timer.keep()
        self._seen += 1
        if self._seen > self._warmup + self._steps:
            timer, self._timer = self._timer, None
            timer.close()
            self._apply(self._measure(timer, engine), engine)

    def close(self) -> None:
        """Stop watching backward."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _measure(self, timer: BackwardTimer, engine: Engine) -> Profile:
        comm, device, settings = engine.comm, engine.device, engine.settings
        layers, rest = timer.result(comm)
        dtype = next(iter(engine.parameters.values())).dtype
        beside = overlap(engine)
        most = sum(p.nbytes for p in engine.parameters.values())
        network = measure_network(comm, device, dtype, most, busy=beside == "transfer")
        sparse = sum(group.numel for group in engine.plan if not group.dense)
        costs = [
            rehearse(
                comm,
                device,
                sizes_up_to(sparse),
                sparsifier=settings.sparsifier,
                exchange=settings.exchange,
                memory=settings.memory,
                density=density,
                dtype=dtype,
            )
            for density in self._densities(settings)
        ]
        if beside == "transfer":
            costs = [cost.on(network) for cost in costs]
        own = Profile(self._fingerprint, layers, rest, network, costs, beside, self._bucket_numels)
        # Sums of measurements may differ in their last digits: rank 0 decides.
        return Profile.from_dict(from_rank_zero(own.as_dict(), comm, device))

    def _densities(self, settings: Settings) -> list[float]:
        schedule = settings.density
        tried = schedule.tried if isinstance(schedule, ProfiledDensity) else [schedule(LAST_STEP)]
        return sorted({*tried, *self._rules.densities.values()})

    def _apply(self, profile: Profile, engine: Engine) -> None:
        plan = self._plan(profile, engine.settings)
        engine.regroup(plan)
        self.profile = profile
        if engine.comm.rank == 0:
            print_profile(profile, plan, engine.settings.density(LAST_STEP))

    def _plan(self, profile: Profile, settings: Settings) -> list[Group]:
        schedule = settings.density

        def plan_at(density: float) -> list[Group]:
            grouping = self._grouping
            if isinstance(grouping, OptimalMerge):
                grouping = ProfiledMerge(profile, density, grouping.rule)
            return make_plan(self._sizes, grouping, self._rules, self._cap)

        def step_seconds(density: float) -> float:
            groups, times = timeline(plan_at(density), profile)
            return profile.timeline_seconds(times, [group.density or density for group in groups])

        if isinstance(schedule, TimeBudget):
            density = budget_density(step_seconds, profile, schedule.exposed, schedule.floor, schedule.cap)
            return [
                group if group.dense or group.density is not None else group._replace(density=density)
                for group in plan_at(density)
            ]
        plan = plan_at(schedule(LAST_STEP))
        if isinstance(schedule, HiddenDensity):
            groups, times = timeline(plan, profile)
            own = [group.density for group in groups]
            densities = hidden_densities(times, profile, schedule.floor, schedule.cap, own)
            found = {group.name: density for group, density in zip(groups, densities, strict=True)}
            return [group._replace(density=found.get(group.name)) for group in plan]
        return plan


def overlap(engine: Engine) -> Overlap:
    """What goes on beside backward with an engine on this machine; collective.

    A CUDA stream overlaps with everything. A communication thread takes a processor only where the ranks of this
    machine leave one to it, and hides its transfers everywhere.
    """
    if not engine.beside_backward:
        return "nothing"
    if engine.device.type == "cuda":
        return "all"
    here = float(int.from_bytes(hashlib.sha256(platform.node().encode()).digest()[:6], "big"))
    neighbours = int((gathered([here], engine.comm, engine.device) == here).sum())
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return "all" if processors >= neighbours * (torch.get_num_threads() + 1) else "transfer"


def fingerprint(sizes: Sequence[ParameterSize], engine: Engine) -> str:
    """Of everything that a profile depends on, but for the machine."""
    settings = engine.settings
    what = (list(sizes), settings, engine.comm.world_size, engine.device.type)
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def print_profile(profile: Profile, plan: Sequence[Group], density: float) -> None:
    """Print groups with the times that led to them."""
    rows = []
    groups, (_, backward) = timeline(plan, profile)
    for group, seconds in list(zip(groups, backward, strict=True))[:LONGEST_TABLE]:
        cost = profile.group_cost(group.density or density)
        parts = (cost.select, cost.process, cost.transfer)
        times = [f"{1e3 * one:.3g}" for one in (seconds, *(part(group.numel) for part in parts))]
        rows.append([group.name, f"{group.numel:,}", f"{group.density or density:.3g}", *times])
    network = profile.network
    print(
        f"sparse_ddp: {len(profile.layers)} layers; a step without exchange takes {1e3 * profile.compute_seconds:.4g} "
        f"ms, {1e3 * sum(profile.backward_seconds):.4g} ms of it backward. Beside backward goes: {profile.overlap}."
    )
    if network.ranks > 1:
        lines = [("all-reduce", network.all_reduce), ("all-gather", network.all_gather)]
        each = [f"{name} {1e6 * line.alpha:.3g} us + {1e9 * line.beta:.3g} ns/byte" for name, line in lines]
        print(f"sparse_ddp: {network.ranks} ranks, {', '.join(each)}", flush=True)
    header = ["group", "coordinates", "density", "backward ms", "select ms", "process ms", "transfer ms"]
    print_table("sparse_ddp: groups by this profile", header, rows)
