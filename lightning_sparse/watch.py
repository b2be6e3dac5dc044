"""Watchdogs: what can go wrong with a sparsified exchange, noticed while training goes on and told once."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_sparse.hook import Engine
from lightning_sparse.hook.running import Running
from lightning_sparse.kernels import static_shapes
from lightning_sparse.memory.first_moment import first_moment, of_adams_family
from lightning_sparse.statistics import Statistics
from lightning_sparse.types import Agreement

FILLING = 3
"""A residual has filled after about this many times 1/density steps."""
IN_A_ROW = 3
"""Looks in a row that must agree, where a single one may be an exception."""
LOOKS = 5
"""Looks at which a parameter that gradients arrive at must have got nothing."""
ROW = 1 << 16
"""Words of a row, whose places have weights of their own in a checksum; there may be as many rows, and one more."""
ROWS_ON_DEVICES = 64
"""Rows that are summed at a time on a device."""
NAMED = 3
"""Groups or parameters that a warning names."""


@dataclass(frozen=True)
class Watch:
    """What watchdogs look for, and how often; each problem ends in one warning, on rank 0.

    - *Divergence*: parameters are no longer equal on all ranks, bit for bit. Buffers are not compared.
    - *Residual growth*: a group's residual has become several times as large as it was when it had filled.
    - *Starving parameters*: gradients arrive at a parameter, and nothing of it is ever sent.
    - *Dead threshold*: nothing at all is selected in a group, though its residual is not empty.
    - *Saturation*: far more is selected than the density asks for.
    - *Shortage*: far less is selected than the density asks for, though the residual is not empty.
    - *Void steps*: step after step, a gradient was not finite on some rank.
    - *Adam's first moment*: an optimizer of Adam's family keeps one of parameters that are sparsified; docs/adam.md.

    The residual of a group grows by itself at first: a coordinate waits for about ``1 / density`` steps between two
    times that it is sent. What later norms (Euclidean, mean over ranks) are compared with is therefore that of the
    first look after ``3 / density`` steps at one density: at 0.01 after 300 steps, at 0.001 after 3000. Where a
    schedule changes the density, this begins anew, as everything does where groups change. With ``lr_aware``, residuals
    change with the learning rate, and their growth is not watched.

    Which parameters are served is seen in the update of the step before each look, that is in one step of ``every``. Of
    a parameter with ``m`` coordinates, ``density * m`` are expected there; those of a few looks in a row add up while
    none is sent, and looks do not count where its residual did not move on any rank: such a parameter was not used.

    A look is one all-gather of a few bytes per parameter, and on a device the only time that the host waits. The first
    one is at the second exchange. Void steps are noticed at every step, optimizers at the first exchange after they
    were set up, and those that nobody shows to the engine at their first step.

    Args:
        every: exchanges between two looks, at least 1.
        growth: times that a residual may grow over its reference, above 1; at three looks in a row.
        missed: coordinates of a parameter that must have been expected in vain, at least 1; at five looks or more.
        excess: factor by which what is selected may differ from the density, up or down, above 1; at three looks in a
            row. What counts is the rank that picks most for methods whose ranks pick by themselves, the union for all
            others.
        voids: void steps in a row, at least 1.
        adam: whether to warn of a first moment. On one rank, too: its gradients are sparsified just as well.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(density=0.01, watch=ls.Watch(every=1000))
        >>> ls.Watch(growth=0.5)
        Traceback (most recent call last):
        ...
        ValueError: Expected growth to be a finite number above 1 but got 0.5.
    """

    every: int = 100
    growth: float = 10.0
    missed: int = 200
    excess: float = 3.0
    voids: int = 20
    adam: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field.type == "int" and not (number and isinstance(value, int) and value >= 1):
                raise ValueError(f"Expected {name} to be an integer of at least 1 but got {value!r}.")
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"Expected {name} to be True or False but got {value!r}.")
            if field.type == "float" and not (number and 1 < value < math.inf):
                raise ValueError(f"Expected {name} to be a finite number above 1 but got {value!r}.")


WATCH = Watch()
"""The default."""


def check_watch(watch: Watch | None) -> None:
    """Raise unless these are settings of watchdogs.

    Raises:
        ValueError: saying what is expected.
    """
    if watch is not None and not isinstance(watch, Watch):
        raise ValueError(f"Expected watch to be a Watch such as Watch(every=1000), or None, but got {watch!r}.")


WARNED_OF: WeakSet[Optimizer] = WeakSet()
"""Optimizers with a first moment: they outlive engines, which strategies replace where parameters are unfrozen."""


class Watchdog:
    """Looks on for :class:`Watch`; a :class:`~lightning_sparse.hook.Tuner` that changes nothing.

    All ranks decide by the same numbers: what they hold of their own is gathered first, in one message.

    Args:
        settings: what to look for.
    """

    def __init__(self, settings: Watch) -> None:
        self._settings = settings
        self._steps = 0
        self._told: set[str] = set()
        # Weak: groups that are replaced must be free to go at once, with all that they remember.
        self._trails: WeakKeyDictionary[Running, Trail] = WeakKeyDictionary()
        self._stepped: WeakSet[Optimizer] = WeakSet()
        self._handle: RemovableHandle | None = None

    def before_step(self, engine: Engine) -> None:
        """Look, where it is time to."""
        now, self._steps = self._steps, self._steps + 1
        self._look_at_void_steps(engine)
        if self._settings.adam and "adam" not in self._told:
            self._look_at_optimizers(engine)
        if self._is_due(now):
            self._look(engine)
        if self._is_due(now + 1):
            for group in self._sparse_groups(engine):
                self._trails[group].note(group)

    def close(self) -> None:
        """See no more steps of optimizers."""
        if self._handle is not None:
            self._handle.remove()

    def _look_at_optimizers(self, engine: Engine) -> None:
        """At those that are known; from now on, at others when they take their first step."""
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(_FirstSteps(self, engine))
        for optimizer in (*engine.optimizers, *self._stepped):
            self._look_at(optimizer, engine)

    def notice(self, optimizer: Optimizer, engine: Engine) -> None:
        """An optimizer, maybe of other parameters, is about to take a step."""
        if optimizer not in self._stepped and "adam" not in self._told:
            self._stepped.add(optimizer)
            self._look_at(optimizer, engine)

    def _look_at(self, optimizer: Optimizer, engine: Engine) -> None:
        if not of_adams_family(optimizer):
            return
        # Where nothing waits in a residual, or is averaged there already, nothing comes too late.
        groups = [g for g in self._sparse_groups(engine) if g.sparsifier.agreement is not Agreement.EVERYTHING]
        groups = [g for g in groups if g.density(engine.step) < 1 and not g.memory.has_momentum]
        groups = [g for g in groups if g.memory.residual(g.state.memory) is not None]
        parameters = engine.parameters
        found = first_moment(optimizer, {id(parameters[p.name]) for g in groups for p in g.plan.parameters})
        if found is None:
            return
        if optimizer in WARNED_OF:
            self._told.add("adam")
            return
        WARNED_OF.add(optimizer)
        self._tell(engine, "adam", f"{found.remedy()} watch=ls.Watch(adam=False) silences this.")

    def _sparse_groups(self, engine: Engine) -> list[Running]:
        groups = [] if engine.direct else [group for group in engine.groups if not group.plan.dense]
        for group in groups:
            self._trails.setdefault(group, Trail(group))
        return groups

    def _is_due(self, step: int) -> bool:
        return step == 1 or (step > 0 and step % self._settings.every == 0)

    def _look(self, engine: Engine) -> None:
        parameters = engine.parameters if engine.comm.world_size > 1 else {}
        # The updates of a step that was void say nothing.
        groups = [] if engine.void_streak else self._sparse_groups(engine)
        trails = {group: self._trails[group] for group in groups if self._trails[group].is_behind(group)}
        own = [checksum(p) for p in parameters.values()]
        for group, trail in trails.items():
            own += trail.report(group)
        columns = iter(engine.comm.all_gather(torch.stack(own)).cpu().unbind(1) if own else ())
        self._look_at_parameters(engine, {name: next(columns) for name in parameters})
        for group, trail in trails.items():
            trail.follow(group, columns, engine.step, self._settings)
        self._look_at_groups(engine, list(trails.values()))

    def _look_at_void_steps(self, engine: Engine) -> None:
        voids = engine.void_streak
        if voids >= self._settings.voids:
            self._tell(
                engine,
                "void",
                f"each of the latest {voids} steps was void, because a gradient was not finite on some rank: training "
                "stands still. Lower the learning rate, use bf16 instead of fp16, and look for the layer with "
                "Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True).",
            )

    def _look_at_parameters(self, engine: Engine, sums: dict[str, Tensor]) -> None:
        different = {name: column != column[0] for name, column in sums.items() if (column != column[0]).any()}
        if not different or "divergence" in self._told:
            return
        ranks = torch.stack(list(different.values())).any(0).nonzero().flatten()
        first = next(iter(different))
        self._tell(
            engine,
            "divergence",
            f"{len(different)} of {len(sums)} parameters are no longer equal on all ranks. The first is {first!r}, by "
            f"up to {distance(engine, first):.3g}; rank(s) {ranks.tolist()} differ from rank 0. All ranks are given "
            "the same average, so that something else changes parameters on some ranks only: an optimizer with other "
            "settings or another state there, gradients that each rank clips or adds noise to by itself, weights "
            "written outside of the optimizer. Find it, and go on from a checkpoint that was written before.",
        )

    def _look_at_groups(self, engine: Engine, trails: Sequence[Trail]) -> None:
        settings = self._settings
        # With lr_aware, residuals change with the learning rate.
        if grown := [trail for trail in trails if trail.grown >= IN_A_ROW and not engine.settings.lr_aware]:
            worst = max(grown, key=lambda trail: trail.norm / (trail.reference or 1.0))
            self._tell(
                engine,
                "growth",
                f"the residual of group {worst.name!r} has the norm {worst.norm:.3g}, and had {worst.reference:.3g} at "
                f"step {worst.reference_step}, at the same density {worst.density:g}{others(grown)}. More is put off "
                "than is sent, so that parameters follow old gradients. Raise the density, lower the learning rate, "
                "clip gradients (memory=ls.ClipByNorm(...)) or forget old ones (memory=ls.Residual(decay=0.99)).",
            )
        starving = [found for trail in trails for found in trail.starving(settings.missed)]
        if starving:
            starving.sort(key=lambda found: -found[1])
            names = [f"{name!r} (about {expected:.0f} expected)" for name, expected, _ in starving[:NAMED]]
            self._tell(
                engine,
                "starving",
                f"gradients arrive at {', '.join(names)}{others(starving, NAMED)}, but no coordinate was sent at the "
                f"latest {starving[0][2]} looks: others in the group have larger gradients. Let each layer pick for "
                f"itself (grouping='layer'), give such parameters a density of their own (rules=ls.Rules(densities="
                f"{{{starving[0][0]!r}: ...}})), or keep them dense (rules=ls.Rules(dense=[{starving[0][0]!r}])).",
            )
        if dead := [trail for trail in trails if trail.silent >= IN_A_ROW]:
            one, threshold = dead[0], dead[0].threshold
            self._tell(
                engine,
                "dead",
                f"nothing was selected in group {one.name!r} at {IN_A_ROW} looks in a row{others(dead)}, although its "
                f"residual has the norm {one.norm:.3g} and {one.target} coordinates are wanted"
                f"{'' if threshold is None else f'; the threshold is {threshold:.3g}'}. Use a method that finds its "
                "threshold from the data, such as the default 'union_topk', or set a lower one.",
            )
        if saturated := [trail for trail in trails if trail.excess >= IN_A_ROW]:
            worst = max(saturated, key=lambda trail: trail.selected / trail.target)
            self._tell(
                engine,
                "saturation",
                f"in group {worst.name!r}, {worst.selected} coordinates were selected {worst.by}, where a density of "
                f"{worst.density:g} stands for {worst.target}; more than {settings.excess:g} times too many at "
                f"{IN_A_ROW} looks in a row{others(saturated)}. Messages are longer than planned. Use a method that "
                "holds the density, such as the default 'union_topk', or set a higher threshold.",
            )
        if short := [trail for trail in trails if trail.shortage >= IN_A_ROW]:
            worst = min(short, key=lambda trail: trail.selected / trail.target)
            self._tell(
                engine,
                "short",
                f"in group {worst.name!r}, only {worst.selected} coordinates were selected {worst.by}, where a density "
                f"of {worst.density:g} stands for {worst.target}; less than a share of 1/{settings.excess:g} at "
                f"{IN_A_ROW} looks in a row{others(short)}. What is not sent waits in residuals, training is slower "
                "than the density lets expect: ranks select the same coordinates, or a threshold is too high. Use a "
                "method that holds the density, such as the default 'union_topk', or set a lower threshold.",
            )

    def _tell(self, engine: Engine, kind: str, sentence: str) -> None:
        if kind not in self._told and engine.comm.rank == 0:
            rank_zero_warn(f"sparse_ddp at step {engine.step}: {sentence}")
        self._told.add(kind)


class _FirstSteps:
    """A hook of all optimizers; keeps neither the watchdog nor its engine alive."""

    def __init__(self, watchdog: Watchdog, engine: Engine) -> None:
        self._watchdog, self._engine = weakref.ref(watchdog), weakref.ref(engine)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watchdog, engine = self._watchdog(), self._engine()
        if watchdog is not None and engine is not None:
            watchdog.notice(optimizer, engine)


class Trail:
    """What looks have seen of a group: equal on all ranks, but for what is noted between them.

    Args:
        group: that is sparsified.
    """

    def __init__(self, group: Running) -> None:
        self.name = group.plan.name
        self.density = 0.0
        self.norm = 0.0
        """Of the residual, mean over ranks."""
        self.reference: float | None = None
        self.reference_step = 0
        self.grown = self.silent = self.excess = self.shortage = 0
        """Looks in a row."""
        self.selected = 0
        self._independent = group.sparsifier.agreement is Agreement.INDEPENDENT
        self._since = 0
        self._latest: Statistics | None = None
        self._waiting: dict[str, tuple[float, int]] = {}
        """Parameters without a coordinate in the latest update: how many were expected since, at how many looks."""
        self._noted: dict[str, Tensor] = {}
        """Checksums of their residuals on this rank, one step before a look."""

    def is_behind(self, group: Running) -> bool:
        """Whether the group has run since the latest look, and selected."""
        statistics = group.statistics
        return statistics is not None and statistics is not self._latest and statistics.sparse

    @property
    def target(self) -> int:
        """Coordinates that the density stands for."""
        return 0 if self._latest is None else self._latest.target

    @property
    def by(self) -> str:
        """Who selects."""
        return "by a single rank" if self._independent else "by all ranks together"

    @property
    def threshold(self) -> float | None:
        """That of this rank; None where there is none."""
        return None if self._latest is None or self._latest.threshold is None else float(self._latest.threshold)

    def note(self, group: Running) -> None:
        """Remember what the residuals of waiting parameters are, to see at the look whether they move."""
        residual = group.memory.residual(group.state.memory)
        if residual is not None:
            self._noted = {name: checksum(residual[group.spans[name]]) for name in self._waiting}

    def report(self, group: Running) -> list[Tensor]:
        """What the other ranks have to know: () int64 each, for :meth:`follow`."""
        residual = group.memory.residual(group.state.memory)
        if residual is None:
            return []
        norm = torch.linalg.vector_norm(residual).double().view(torch.int64)
        moved = [(checksum(residual[group.spans[name]]) != sum_).long() for name, sum_ in self._noted.items()]
        return [norm, *moved]

    def follow(self, group: Running, columns: Iterator[Tensor], step: int, settings: Watch) -> None:
        """Take in a look.

        Args:
            group: that is followed.
            columns: yields what :meth:`report` gave on all ranks, (n,) int64 each.
            step: number of the step that begins.
            settings: thresholds.
        """
        statistics = self._latest = group.statistics
        assert statistics is not None
        if statistics.target_density != self.density:
            self.density, self._since = statistics.target_density, step
            self.reference, self.grown = None, 0
        limit = settings.excess * statistics.target
        self.selected = int(statistics.counts.max() if self._independent else statistics.union)
        self.excess = self.excess + 1 if self.selected > limit else 0
        if group.memory.residual(group.state.memory) is None:
            return
        self.norm = float(next(columns).view(torch.float64).mean())
        moved = {name for name in self._noted if next(columns).any()}
        if self.reference is None:
            if self.norm > 0 and step - self._since >= FILLING / self.density:
                self.reference, self.reference_step = self.norm, step
        else:
            self.grown = self.grown + 1 if self.norm > settings.growth * self.reference else 0
        silent = self.norm > 0 and not int(statistics.counts.sum())
        self.silent = self.silent + 1 if silent else 0
        short = self.norm > 0 and not silent and self.selected * settings.excess < statistics.target
        self.shortage = self.shortage + 1 if short else 0
        self._noted = {}
        self._wait(group.spans, statistics, moved - group.untouched)  # with lr_aware, all residuals move

    def _wait(self, spans: dict[str, slice], statistics: Statistics, moved: set[str]) -> None:
        if statistics.indices is None:
            self._waiting = {}
            return
        ends = torch.tensor([span.stop for span in spans.values()], device=statistics.indices.device)
        owners = torch.bucketize(statistics.indices, ends, right=True)  # the padding index has none
        served = torch.bincount(owners, minlength=len(spans) + 1).tolist()
        if not any(served[:-1]):  # it is the threshold that is wrong
            return
        for (name, span), picks in zip(spans.items(), served, strict=False):
            expected, looks = self._waiting.get(name, (0.0, 0))
            if picks:
                self._waiting.pop(name, None)
            elif name in moved:
                self._waiting[name] = expected + self.density * (span.stop - span.start), looks + 1
            else:
                self._waiting[name] = expected, looks

    def starving(self, missed: int) -> list[tuple[str, float, int]]:
        """Names, coordinates expected in vain, and looks, of the parameters that wait for too long."""
        waiting = [(name, expected, looks) for name, (expected, looks) in self._waiting.items()]
        return [found for found in waiting if found[1] >= missed and found[2] >= LOOKS]


def others(found: Sequence[object], named: int = 1) -> str:
    """How many more there are than those named, in words."""
    more = len(found) - named
    return "" if more < 1 else f" (and {more} more like it)"


def checksum(x: Tensor) -> Tensor:
    """() int64: bit patterns, read as signed words of at most 32 bits, times a weight for each place, modulo 2**64.

    Weights are odd, so that one word that differs always shows. Words that differ at several places, that change places
    or that change their signs together go unnoticed with a chance of about 2**-32: weights are random numbers, the
    same ones on all ranks and devices.

    Example:
        >>> given = torch.tensor([1.0, 2.0, 3.0])
        >>> [bool(checksum(torch.tensor(x)) == checksum(given)) for x in ([1.0, 2, 3], [2.0, 1, 3], [-1.0, -2, 3])]
        [True, False, False]
    """
    bits = x.detach().reshape(-1).contiguous().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
    columns, rows = weights(x.device)
    whole = bits.numel() // ROW
    # On a CPU a row at a time, which stays in the cache; on a device as many as make a kernel worth its start.
    at_once = ROWS_ON_DEVICES if static_shapes(x.device) else 1
    pieces = torch.split(bits[: whole * ROW].view(whole, ROW), at_once) if whole else ()
    sums = [(piece.long() * columns).sum(1) for piece in pieces]
    rest = bits[whole * ROW :]
    sums.append((rest.long() * columns[: rest.numel()]).sum().view(1))
    return (torch.cat(sums) * rows[: whole + 1]).sum()


@functools.cache
def weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd random numbers of 64 bits, for places in a row and for rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2, ROW + 1), generator=generator, dtype=torch.int64, device="cpu") | 1
    columns, rows = drawn.to(device)
    return columns[:ROW], rows


def distance(engine: Engine, name: str) -> float:
    """The largest difference of a parameter's coordinates between rank 0 and another rank; collective."""
    own = engine.parameters[name].detach()
    theirs = engine.comm.broadcast(own.clone(memory_format=torch.contiguous_format), 0)
    return float(engine.comm.all_gather((own.double() - theirs.double()).abs().max()).max())
