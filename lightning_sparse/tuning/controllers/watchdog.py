"""Watchdogs: they detect faults of a sparsified exchange during training, and warn once of each."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.core.step import Agreement
from lightning_sparse.engine import Engine
from lightning_sparse.engine.agreement import checksum
from lightning_sparse.engine.config import Watch
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.metrics import Statistics
from lightning_sparse.engine.optimizers.kinds import holds, is_adam, refusal, stepping
from lightning_sparse.methods.memory import SecondMoment
from lightning_sparse.tuning.controllers.announcer import DIVERGED
from lightning_sparse.tuning.unsuited import unsuited

IN_A_ROW = 3
"""Checks in a row that must agree, since a single one may be an exception."""
NAMED = 3
"""Starving parameters that a warning names."""
FIRST_LOOK = 8
"""The step before which residuals are measured first, between checks; each later one is 1.5 times the one before."""
FILLING = 3
"""A residual counts as filled after this many times ``1 / density`` steps."""
POWER = 6
"""Power of the growth that is allowed for filled residuals: a limit of 10 there is one of a million here. Gradients of
deep networks become up to 20 thousand times as long when training leaves its first plateau, in calm trainings, too; in
trainings that diverged, residuals became ten million times as long and more."""
CHECKS = 5
"""Number of checks without a coordinate sent after which a parameter that gets gradients is starving."""


class GroupHistory:
    """Results of checks of a group. Equal on all ranks, except for values that are recorded between checks.

    Args:
        group: a sparsified group.
    """

    def __init__(self, group: GroupReducer) -> None:
        self.name = group.plan.name
        self.density = self.norm = self.reference = 0.0
        """``norm``: of the residual at the latest check, mean over ranks; ``reference``: 0 until there is one."""
        self.reference_step = self.selected = self.target = 0
        self.in_a_row: Counter[str] = Counter()
        """Number of checks in a row with a fault, by kind of warning."""
        self._independent = group.sparsifier.agreement is Agreement.INDEPENDENT
        self.by = "by a single rank" if self._independent else "by all ranks together"
        """The selecting ranks, as words for a warning."""
        self._since = 0
        self._latest: Statistics | None = None
        self._waiting: dict[str, tuple[float, int]] = {}
        """Parameters without a coordinate in the latest update: expected coordinates since then, number of checks."""
        self._noted: dict[str, Tensor] = {}
        """Checksums of their residuals on this rank, one step before a check."""

    def is_behind(self, group: GroupReducer) -> bool:
        """Return True if the group has selected in a step since the latest check."""
        statistics = group.statistics
        return statistics is not None and statistics is not self._latest and statistics.sparse

    @property
    def threshold(self) -> str:
        """This rank's threshold, as words for a warning; empty if the method has none."""
        known = self._latest and self._latest.threshold
        return "" if known is None else f"; the threshold is {float(known):.3g}"

    def note(self, group: GroupReducer) -> None:
        """Record checksums of the residuals of waiting parameters, to detect at the check if they move."""
        residual = group.memory.residual(group.state.memory)
        if residual is not None:
            self._noted = {name: checksum(residual[group.spans[name]]) for name in self._waiting}

    def report(self, group: GroupReducer) -> list[Tensor]:
        """Return this rank's numbers for :meth:`update` on all ranks, () int64 each."""
        residual = group.memory.residual(group.state.memory)
        if residual is None:
            return []
        norm = torch.linalg.vector_norm(residual).double().view(torch.int64)
        moved = [(checksum(residual[group.spans[name]]) != sum_).long() for name, sum_ in self._noted.items()]
        return [norm, *moved]

    def measure(self, group: GroupReducer, columns: Iterator[Tensor]) -> set[str]:
        """Take the norm of the residual from :meth:`report`; return the noted parameters whose residuals have moved.

        Args:
            group: of this history.
            columns: yields the results of :meth:`report` on all ranks, (n,) int64 each.
        """
        if group.memory.residual(group.state.memory) is None:
            return set()
        self.norm = float(next(columns).view(torch.float64).mean())
        return {name for name in self._noted if next(columns).any()}

    def update(self, group: GroupReducer, columns: Iterator[Tensor], step: int, excess: float, growth: float) -> None:
        """Evaluate a check.

        Args:
            group: of this history.
            columns: see :meth:`measure`.
            step: number of the step that begins.
            excess: factor by which the selection may differ from the density.
            growth: factor by which a residual may grow.
        """
        statistics = self._latest = group.statistics
        assert statistics is not None
        self.target = statistics.target
        if statistics.target_density != self.density:
            self.density, self._since, self.reference = statistics.target_density, step, 0.0
        self.selected = int(statistics.counts.max() if self._independent else statistics.union)
        moved = self.measure(group, columns)
        nothing, kept = not int(statistics.counts.sum()), self.norm > 0
        faults = {
            "growth": 0 < growth * self.reference < self.norm,
            "dead": kept and nothing,
            "saturation": self.selected > excess * self.target,
            "short": kept and not nothing and self.selected * excess < self.target,
        }
        self.in_a_row = Counter({kind: self.in_a_row[kind] + 1 for kind, holds in faults.items() if holds})
        if not self.reference and step - self._since >= FILLING / self.density:
            self.reference, self.reference_step = self.norm, step
        self._noted = {}
        self._wait(group.spans, statistics, moved - group.unused)

    def _wait(self, spans: dict[str, slice], statistics: Statistics, moved: set[str]) -> None:
        if statistics.indices is None:
            self._waiting = {}
            return
        ends = torch.tensor([span.stop for span in spans.values()], device=statistics.indices.device)
        owners = torch.bucketize(statistics.indices, ends, right=True)  # the padding index has none
        served = torch.bincount(owners, minlength=len(spans) + 1).tolist()
        if not any(served[:-1]):  # the threshold is wrong
            return
        for (name, span), picks in zip(spans.items(), served, strict=False):
            expected, checks = self._waiting.get(name, (0.0, 0))
            if picks:
                self._waiting.pop(name, None)
            elif name in moved:
                self._waiting[name] = expected + self.density * (span.stop - span.start), checks + 1
            else:
                self._waiting[name] = expected, checks

    def starving(self, missed: int) -> list[tuple[str, float, int]]:
        """Return names, missed coordinates and checks of the parameters that wait for too long."""
        waiting = [(name, expected, checks) for name, (expected, checks) in self._waiting.items()]
        return [found for found in waiting if found[1] >= missed and found[2] >= CHECKS]


class Filling:
    """Checks the growth of the residuals of all groups together, from the first steps on.

    While residuals fill, for about ``1 / density`` steps, their norm grows: with the root of the number of steps if
    gradients are independent, and with this number itself if all are equal. That much is expected. The reference is the
    largest norm so far by this measure, so that gradients may also grow slowly. Groups are not checked one by one:
    gradients of layers below weights that start at zero grow for hundreds of steps, by many orders of magnitude, but
    are negligible beside the residuals of all groups. A norm that falls again is no alarm.
    """

    def __init__(self) -> None:
        self.norm = self.reference = 0.0
        self.reference_step = self.grown = 0
        """``grown``: measurements in a row with a norm above the expected one."""
        self.explained = 1.0
        """Factor of growth since the reference that filling can explain."""
        self._densities: Mapping[str, float] = {}
        self._since = 0
        self._reference_age = 0.0

    def judge(self, densities: Mapping[str, float], norm: float, step: int, growth: float) -> None:
        """Evaluate a measurement.

        Args:
            densities: of all groups with residuals, by name; others than before reset the reference.
            norm: of all residuals together, mean over ranks.
            step: number of the step that begins.
            growth: factor by which filled residuals may grow; its :data:`POWER` is allowed here.
        """
        if densities != self._densities:
            self._densities, self._since = densities, step
            self.reference, self.grown = 0.0, 0
        before, self.norm = self.norm, norm
        if not norm or step == self._since:
            return
        age = min(float(step - self._since), FILLING / min(densities.values()))
        if self.reference:
            self.explained = age / self._reference_age
        expected = self.explained * self.reference
        grown = self.reference > 0 and norm > growth**POWER * expected
        self.grown = self.grown + 1 if grown and norm > before else 0
        if not grown and norm > expected:
            self.reference, self.reference_step, self._reference_age, self.explained = norm, step, age, 1.0


HOLDS = "Use a method that holds the density, such as the default 'union_top_k', or set a {} threshold."
WARNINGS = {
    "growth": "the residual of group {0.name!r} has the norm {0.norm:.3g}, and had {0.reference:.3g} at step "
    "{0.reference_step}, at the same density {0.density:g}{others}. Residuals grow faster than they are sent, so "
    "updates are old gradients. Raise the density, lower the learning rate, clip gradients "
    "(memory=ls.memories.ClipByNorm(...)) or forget old ones (memory=ls.memories.Residual(decay=0.99)).",
    "dead": "nothing was selected in group {0.name!r} at {checks} checks in a row{others}, although its residual has "
    "the norm {0.norm:.3g} and {0.target} coordinates are wanted{0.threshold}. Use a method that finds its threshold "
    "from the data, such as the default 'union_top_k', or set a lower one.",
    "saturation": "in group {0.name!r}, {0.selected} coordinates were selected {0.by}, where a density of "
    "{0.density:g} stands for {0.target}; more than {excess:g} times too many at {checks} checks in a row{others}. "
    "Messages are longer than planned. " + HOLDS.format("higher"),
    "short": "in group {0.name!r}, only {0.selected} coordinates were selected {0.by}, where a density of "
    "{0.density:g} stands for {0.target}; less than a share of 1/{excess:g} at {checks} checks in a row{others}. What "
    "is not sent waits in residuals, training is slower than the density lets expect: ranks select the same "
    "coordinates, or a threshold is too high. " + HOLDS.format("lower"),
}
"""Warnings of the worst group, by kind."""
WORST: dict[str, Callable[[GroupHistory], float]] = {
    "growth": lambda one: one.norm / one.reference,
    "dead": lambda one: 0.0,
    "saturation": lambda one: one.selected / one.target,
    "short": lambda one: -one.selected / one.target,
}
"""Measures by which one group is worse than another; of equal ones the first."""
WARNED_OF: WeakSet[Optimizer] = WeakSet()
"""Unsuited optimizers: they outlive engines, which strategies replace when parameters are unfrozen."""


class Watchdog:
    """Checks by the settings of :class:`Watch`; a :class:`~lightning_sparse.engine.StepObserver` that changes nothing.

    All ranks decide by the same numbers: each rank's own numbers are gathered first, in one message.

    Args:
        settings: of the checks.
    """

    def __init__(self, settings: Watch) -> None:
        self._settings = settings
        self._steps = 0
        self._next_look, self._filling = FIRST_LOOK, Filling()
        self._told: set[str] = set()
        # Weak: replaced groups must be freed at once, with their residuals.
        self._histories: WeakKeyDictionary[GroupReducer, GroupHistory] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._shown: list[weakref.ref[Optimizer]] = []
        self._fine: WeakSet[Optimizer] = WeakSet()
        """Optimizers that are suited to any sparsified parameters."""
        self._unheld: set[str] = set()
        self._engine: Callable[[], Engine | None] = lambda: None

    def before_step(self, engine: Engine) -> None:
        """Run the checks that are due."""
        now, self._steps = self._steps, self._steps + 1
        looks = now == self._next_look < 2 * self._settings.every
        self._next_look += now // 2 if looks else 0
        self.after_skipped_step(engine)
        if self._settings.adam and "adam" not in self._told:
            self._check_optimizers(engine)
        if self._is_due(now):
            self._check(engine, whole=True)
            if now > 1:
                self._check_that_all_are_held(engine)
        elif looks and "growth" not in self._told and not _follows_rates(engine):
            self._check(engine, whole=False)
        if self._is_due(now + 1):
            for group in self._sparse_groups(engine):
                self._histories[group].note(group)

    def _check_optimizers(self, engine: Engine) -> None:
        """Check the known optimizers now, and others when they take their first step."""
        if self._engine() is not engine:
            self._engine = weakref.ref(engine)
            engine._binding.watchers.append(self._before_optimizer)
        optimizers = engine._binding.optimizers
        shown = list(map(weakref.ref, optimizers))
        if shown != self._shown:  # replaced ones step no more; others are recorded again
            self._shown = shown
            self._stepped.clear()
        for optimizer in {*optimizers, *self._stepped}:
            self._check_optimizer(optimizer, engine)

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that is about to step; it may have other parameters."""
        engine = self._engine()
        if engine is not None and optimizer not in self._stepped and "adam" not in self._told:
            self._check_optimizer(optimizer, engine)
            self._stepped.add(optimizer)

    def close(self) -> None:
        """Do nothing: the engine removes its hooks on optimizers."""

    def _check_that_all_are_held(self, engine: Engine) -> None:
        """Warn after two checks in a row: an optimizer that was not bound may take its first step late."""
        apart = engine.stepper.record.held | engine.stepper.unused
        found = [p.name for group in self._selecting(engine) for p in group.plan.parameters if p.name not in apart]
        names, self._unheld = [name for name in found if name in self._unheld], set(found)
        if engine.stepper.record.held and names:
            self._tell(
                engine,
                "unheld",
                f"no optimizer holds {names[0]!r}{others(names)}, which needs gradients all the same. These "
                "are not exchanged, and nothing sets them to zero. Freeze what is not trained, with "
                "requires_grad_(False), before the model is wrapped.",
            )

    def _check_optimizer(self, optimizer: Optimizer, engine: Engine) -> None:
        if optimizer in self._fine or engine._binding.takes(optimizer):
            return
        parameters = engine.stepper.parameters
        of_any = unsuited(optimizer, {id(parameter) for parameter in parameters.values()})
        if of_any is None or (
            of_any.by_choice and not (engine._binding.left_open or isinstance(engine.settings.memory, SecondMoment))
        ):
            known = optimizer in self._stepped or stepping(optimizer) in self._stepped
            if known and engine.stepper.record.counts.step:  # its state exists by now
                self._fine.add(optimizer)
            return
        # Without a residual, or with a memory that averages other values, nothing comes too late.
        groups = [g for g in self._selecting(engine) if g.memory.averages == "gradients"]
        groups = [g for g in groups if g.memory.residual(g.state.memory) is not None]
        sparsified = {id(parameters[p.name]) for g in groups for p in g.plan.parameters}
        found = unsuited(optimizer, sparsified)
        if found is None:
            return
        if optimizer in WARNED_OF:
            self._told.add("adam")
            return
        WARNED_OF.add(optimizer)
        reasons = [refusal(each, sparsified) for each in engine._binding.optimizers if holds(each, sparsified)]
        reason = next(filter(None, reasons), None) if is_adam(type(stepping(optimizer))) else None
        here = f"The exchange does not take steps of {found.optimizer} here: {reason}. " if reason else ""
        self._tell(engine, "adam", f"{here}{found.remedy()} watch=ls.Watch(adam=False) silences this.")

    def _sparse_groups(self, engine: Engine) -> list[GroupReducer]:
        groups = [] if engine.stepper.direct else [group for group in engine.stepper.groups if not (group.plan.dense)]
        for group in groups:
            self._histories.setdefault(group, GroupHistory(group))
        return groups

    def _selecting(self, engine: Engine) -> list[GroupReducer]:
        """Return the groups that do not send all coordinates."""
        return [group for group in self._sparse_groups(engine) if group.selects(engine.step)]

    def _is_due(self, step: int) -> bool:
        return step == 1 or (step > 0 and step % self._settings.every == 0)

    def _check(self, engine: Engine, whole: bool) -> None:
        """Check everything, or between such checks the growth of residuals alone."""
        parameters = engine.stepper.parameters if whole and engine._world_size > 1 else {}
        # The updates of a skipped step have no meaning.
        groups = [] if engine.stepper.record.counts.streak else self._sparse_groups(engine)
        histories = {group: self._histories[group] for group in groups if self._histories[group].is_behind(group)}
        sums = [checksum(engine.stepper.copies.common(name)) for name in parameters]
        for group, history in histories.items():
            sums += history.report(group)
        rows = engine.comm.all_gather(torch.stack(sums)) if sums else torch.zeros(1, 0, device="cpu")
        columns = iter(rows[:, len(parameters) :].cpu().unbind(1))
        if parameters:
            self._check_parameters(engine, list(parameters), differing(engine, rows[:, : len(parameters)]))
        for group, history in histories.items():
            if whole:
                history.update(group, columns, engine.step, self._settings.excess, self._settings.growth)
            else:
                history.measure(group, columns)
        if whole:
            self._check_groups(engine, list(histories.values()))
        if not _follows_rates(engine):  # residuals would change with the rates
            self._check_filling(engine, groups)

    def after_skipped_step(self, engine: Engine) -> None:
        """Warn where training stands still."""
        skips = engine.stepper.record.counts.streak
        if skips >= self._settings.skips:
            self._tell(
                engine,
                "skipped",
                f"each of the latest {skips} steps was skipped, because a gradient was not finite on some rank: "
                f"training stands still. {DIVERGED}",
            )

    def _check_parameters(self, engine: Engine, names: Sequence[str], differ: Tensor) -> None:
        """Warn of parameters that differ, given where: (ranks, parameters)."""
        different = [name for name, one in zip(names, differ.any(0).tolist(), strict=True) if one]
        if not different or "divergence" in self._told:
            return
        ranks, first = differ.any(1).nonzero().flatten(), different[0]
        self._tell(
            engine,
            "divergence",
            f"{len(different)} of {len(names)} parameters are no longer equal on all ranks. The first is {first!r}, by "
            f"up to {distance(engine, first):.3g}; rank(s) {ranks.tolist()} differ from rank 0. All ranks are given "
            "the same average, so that something else changes parameters on some ranks only: an optimizer with other "
            "settings or another state there, gradients that each rank clips or adds noise to by itself, weights "
            "written outside of the optimizer. Find it, and go on from a checkpoint that was written before.",
        )

    def _check_groups(self, engine: Engine, histories: Sequence[GroupHistory]) -> None:
        settings = self._settings
        for kind, sentence in WARNINGS.items():
            found = [history for history in histories if history.in_a_row[kind] >= IN_A_ROW]
            if found and not (kind == "growth" and _follows_rates(engine)):
                worst, more = max(found, key=WORST[kind]), others(found)
                self._tell(engine, kind, sentence.format(worst, others=more, checks=IN_A_ROW, excess=settings.excess))
        starving = [found for history in histories for found in history.starving(settings.missed)]
        if starving:
            starving.sort(key=lambda found: -found[1])
            names = [f"{name!r} (about {expected:.0f} expected)" for name, expected, _ in starving[:NAMED]]
            self._tell(
                engine,
                "starving",
                f"gradients arrive at {', '.join(names)}{others(starving, NAMED)}, but no coordinate was sent at the "
                f"latest {starving[0][2]} checks: others in the group have larger gradients. Let each layer pick for "
                f"itself (grouping='layer'), give such parameters a density of their own (rules=ls.Rules(densities="
                f"{{{starving[0][0]!r}: ...}})), or keep them dense (rules=ls.Rules(dense=[{starving[0][0]!r}])).",
            )

    def _check_filling(self, engine: Engine, groups: Sequence[GroupReducer]) -> None:
        ran = {group: group.statistics.target_density for group in groups if group.statistics is not None}
        filling, norm = self._filling, math.hypot(*(self._histories[group].norm for group in ran))
        densities = {group.plan.name: density for group, density in ran.items()}
        filling.judge(densities, norm, engine.step, self._settings.growth)
        if filling.grown >= IN_A_ROW:
            self._tell(
                engine,
                "growth",
                f"the residuals of all groups together have the norm {filling.norm:.3g}, and had "
                f"{filling.reference:.3g} at step {filling.reference_step}, of which filling explains a factor of "
                f"{filling.explained:.3g} at most. Gradients grow without bound, as where training diverges. Lower the "
                "learning rate, let it rise more slowly, or clip gradients.",
            )

    def _tell(self, engine: Engine, kind: str, sentence: str) -> None:
        if kind not in self._told:
            engine._warn(kind, sentence)
        self._told.add(kind)


def _follows_rates(engine: Engine) -> bool:
    """Return True if what waits is in units of learning rates, and changes with them."""
    return any(group.drifts or group.memory.reads_rates for group in engine.stepper.groups)


def others(found: Sequence[object], named: int = 1) -> str:
    """Return the number of further findings beyond the named ones, in words."""
    more = len(found) - named
    return "" if more < 1 else f" (and {more} more like it)"


def differing(engine: Engine, sums: Tensor) -> Tensor:
    """Return where parameters differ from those of rank 0, as (ranks, parameters) on the CPU; collective.

    Args:
        engine: whose ranks these are, in the order of :attr:`.Stepper.rank`. Of parameters that are sharded, each rank
            compares its part with that of the first replica.
        sums: (ranks of ``engine.comm``, parameters) checksums.
    """
    every = engine.stepper.within.all_gather(sums)
    first = every[:, :1] if not engine.stepper.share.cuts else every[:1, :1]
    return (every != first).transpose(0, 1).flatten(0, 1).cpu()


def distance(engine: Engine, name: str) -> float:
    """Return the largest difference of a parameter between rank 0 and another rank; collective."""
    here = engine.stepper.copies.common(name)
    theirs = here.clone()
    if engine.stepper.share.cuts:
        theirs = engine.stepper.within.broadcast(theirs, 0)
    theirs = engine.comm.broadcast(theirs, 0)
    furthest = (here.double() - theirs.double()).abs().amax() if here.numel() else here.new_zeros(()).double()
    return float(engine.comm.all_gather(engine.stepper.within.all_gather(furthest)).amax())
