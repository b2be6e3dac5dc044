"""The groups at work, and what is done to them between two steps: others take their place, and residuals are taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.checks import expect
from lightning_sparse.core.layout import own, rates_at, shaped, whole_of
from lightning_sparse.core.messages import AllGather, AllReduce, Message
from lightning_sparse.core.step import Context
from lightning_sparse.engine.average import Average
from lightning_sparse.engine.calls import digest_of
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.metrics import Totals
from lightning_sparse.engine.network import TorchCollective, send
from lightning_sparse.engine.record import Counts, Record
from lightning_sparse.engine.share import Share
from lightning_sparse.engine.stream import ExchangeStream
from lightning_sparse.methods.density import Constant
from lightning_sparse.methods.grouping import Group, ParameterSize
from lightning_sparse.methods.memory import Memory

CUT = ":"
"""Stands between the name of a group and the number of a part; names of modules have none."""


class Groups:
    """Holds the groups of an engine, and what belongs to their parameters whatever the groups are.

    Args:
        parameters: by name.
        settings: checked choices.
        comm: the ranks.
        device: where gradients live.
        share: what this rank exchanges of each gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        settings: SparsificationConfig,
        comm: TorchCollective,
        device: torch.device,
        share: Share,
    ) -> None:
        self.names = {id(p): name for name, p in parameters.items()}
        """Of parameters, by id."""
        self.groups: list[GroupReducer] = []
        self.group_of: dict[str, GroupReducer] = {}
        """The group of each parameter, by name."""
        self.scheduled: GroupReducer | None = None
        """The first group whose density a schedule gives, the same one for all such groups; None: there is none."""
        self.sparsified: Set[str] = frozenset()
        """Names of the parameters that are not always sent as a whole."""
        self.adoptions = 0
        """Number of times that groups took the place of others."""
        self.direct = False
        """True if buckets are averaged just as DDP does, past the groups."""
        self.settings = settings
        self.memories: Mapping[str, Memory] = {}
        """Of parameters whose optimizers need another memory than that of the settings, by name."""
        self.rates: Callable[[], Mapping[str, float]] = dict
        """Returns the learning rate of each parameter, by name, of optimizers that are known."""
        self.record = Record(self.names)
        self.on_stream = ExchangeStream(device)
        self.flushed: Mapping[str, Average] | None = None
        """Within a flush, by parameter, the averages that optimizers step with; their gradients wait elsewhere."""
        self._flushing: Mapping[str, Average] = {}
        """The same, of what this rank exchanges, as far as no optimizer has stepped with it."""
        self.flush_asked = False
        """True if everything is sent in the next step."""
        self.grad_norm: Tensor | None = None
        """() norm of the mean gradient before clipping, in the latest step."""
        self.totals = Totals()
        """Bytes and times of all steps so far."""
        self.parameters, self.comm, self.device = parameters, comm, device
        self.share, self.within = share, share.within
        """What this rank exchanges of each gradient, and the ranks that exchange the rest."""
        self.networks = [comm] if share.within.world_size == 1 else [share.within, comm]
        """The ranks that exchange the rest, if there are any, and those that exchange the same: they reach all."""
        self._number = 0
        """Number of the step that is running, or of the next one."""

    @property
    def step(self) -> int:
        """Exchanges so far that counted; may wait for the device."""
        return self.record.counts.step

    def form(
        self,
        group: Group,
        flush: bool = False,
        step: int | None = None,
        settings: SparsificationConfig | None = None,
        memories: Mapping[str, Memory] | None = None,
    ) -> GroupReducer:
        """Return a group with nothing remembered.

        Args:
            group: of the plan.
            flush: whether it must be able to send what it will remember.
            step: at which it starts; None: the current one.
            settings: that it will have; None: the current ones.
            memories: of parameters that need others than that of the settings; None: the current ones.
        """
        step, settings = self.step if step is None else step, settings or self.settings
        if memory := (self.memories if memories is None else memories).get(group.parameters[0].name):
            settings = replace(settings, memory=memory)
        density = group.density or settings.density(step)
        ctx = Context(step, density, self.comm.rank, self.comm.world_size)
        return GroupReducer(group, self.parameters, settings, ctx, flush, self.share.places)

    def prepare(self) -> None:
        """Compile what steps of the groups will need, before the first of them."""
        for group in self.groups:
            group.prepare(Context(0, 1.0, self.comm.rank, self.comm.world_size))

    def adopt(self, groups: list[GroupReducer], counts: Counts) -> None:
        """Go on with these groups, between two steps."""
        with self.record.changing():
            self.direct = False
            self.record.restart(counts)
            self.groups = groups
            self.scheduled = next((group for group in groups if type(group.density) is not Constant), None)
            self.group_of = {name: group for group in groups for name in group.spans}
        self._number = counts.step
        self.adoptions += 1
        self._model_numel = sum(g.plan.numel for g in groups if not g.plan.dense) or None
        self._digest_of_plan = digest_of([group.plan for group in groups], sorted(self.memories.items(), key=repr))
        self._digest()
        self._reads_rates = self.settings.memory_in_use.reads_rates
        self.sparsified = {n for g in groups if g.leaves_out for n in g.spans}

    def _digest(self) -> None:
        """Digest settings and groups, which ranks compare in each call."""
        self.digest = digest_of(self.settings, self._digest_of_plan)
        self.digest_of_names = digest_of(self.settings, [(group.plan.name, list(group.spans)) for group in self.groups])

    def regroup(self, plan: Sequence[Group], direct: bool = False, for_good: bool = False) -> None:
        """Go on with other groups of the same parameters, and what is remembered of these; between two steps.

        Args:
            plan: the groups.
            direct: average buckets past the groups, which keep nothing then but what is remembered.
            for_good: of groups in which nothing waits, forget what else is remembered where the new ones have no use
                for it.
        """
        groups, parts = [], self.uniform(plan, self.memories)
        with self.on_stream.between_steps():
            kept = self._kept_anywhere([p.name for part in parts if part.dense for p in part.parameters], for_good)
            for part in parts:
                before = {p.name: self.group_of[p.name] for p in part.parameters}
                groups.append((self.form(part, not kept.isdisjoint(before)), before))
            if any(old.drifts and not running.drifts for running, before in groups for old in before.values()):
                self.meet_weights()
            for running, before in groups:
                for name, old in before.items():
                    running.carry(name, old)
                if direct and not running.memory.vectors(running.state.memory):  # what it only works in
                    running.state = running.state._replace(memory=None)
        self.adopt([running for running, _ in groups], self.record.counts)
        self.direct = direct

    def _kept_anywhere(self, names: Sequence[str], for_good: bool) -> Set[str]:
        """Return the parameters of which a group that becomes dense must keep what any rank remembers; collective."""
        able = [name for name in names if (one := self.group_of[name]).memory.vectors(one.state.memory)]
        if not able:  # so on all ranks
            return set()
        holds = {name: one.waits if for_good else one.remembers for name in able if (one := self.group_of[name])}
        return self.anywhere({name for name in able if holds[name]})

    def anywhere(self, names: Set[str]) -> set[str]:
        """Return the names that any rank gives; collective."""
        found = set(names)
        for network in reversed(self.networks):
            found = found.union(*network.all_gather_object(found, self.device))
        return found

    @staticmethod
    def uniform(plan: Sequence[Group], memories: Mapping[str, Memory]) -> list[Group]:
        """Return a plan of which no group has parameters whose memories differ."""
        parts = []
        for group in plan:
            by: dict[Memory | None, list[ParameterSize]] = {}
            for p in group.parameters:
                by.setdefault(memories.get(p.name), []).append(p)
            parts += in_parts(group, list(by.values()))
        return parts

    def remember_by(self, settings: SparsificationConfig, memories: Mapping[str, Memory] | None = None) -> None:
        """Go on with settings that differ in memory and exchange; between two steps.

        Args:
            settings: the new ones.
            memories: of parameters that need others than that of the settings; None: as before.
        """
        self.settings = settings
        self.memories = self.memories if memories is None else memories
        self.regroup([group.plan for group in self.groups])

    def adapt(self, memory: Memory) -> None:
        """Go on with a memory of the same kind that has other settings, in a step that has just begun."""
        self.settings = replace(self.settings, memory=memory)
        self._digest()
        with self.record.changing(), self.on_stream.between_steps():
            for group in self.groups:
                if group.memory.needs_second:
                    before, group.memory = group.memory, memory
                    memory.adapt_(group.state.memory, before)

    def whole(self, averages: Sequence[Average]) -> Sequence[Average]:
        """Return averages of all that this rank has of gradients, given those of what it exchanges; collective."""
        return averages

    def split(self, held: Collection[str]) -> None:
        """Cut groups in two where an optimizer holds some of their parameters, and others the rest."""
        if len(held) == len(self.parameters):
            return
        plan: list[Group] = []
        for group in (group.plan for group in self.groups):
            inside = [p for p in group.parameters if p.name in held]
            outside = [p for p in group.parameters if p.name not in held]
            if not inside or not outside:
                plan.append(group)
                continue
            plan += in_parts(group, (inside, outside))
        if len(plan) > len(self.groups):
            self.regroup(plan)

    def on_host(self, x: Tensor) -> Tensor:
        """Return a tensor of the current stream, on which messages of ranks may be that have failed meanwhile.

        Raises:
            LostRankError: if one has.
        """
        if not self.on_stream.host_knows:
            there = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
            x = there.copy_(x, non_blocking=True)
            self.comm.wait_until(torch.cuda.current_stream(self.device).record_event().query, "the exchange")
        return x

    def meet_weights(self, changed: bool = False) -> float:
        """Let all ranks agree on the mean of their weights, where these drift apart; collective, between two steps.

        Args:
            changed: whether somebody else has written to weights, which counts as it is: averages are not longer.

        Returns:
            Square of the norm of the mean drift.
        """
        ranks, square, met = self.comm.world_size, 0.0, False
        with self.on_stream.between_steps():
            for group in self.groups:
                if (memory := group.drift) is None:
                    continue
                kept = group.state.memory
                kept.work.copy = group.weights(self.parameters)
                factor = 1.0 if changed or memory.longer == "steps" else memory.factor(kept, ranks)
                # In double precision the mean of equal weights has their bits.
                message = AllReduce(torch.cat([run.double() for run in memory.copy(kept).runs]))
                self.totals.add(message.bytes_sent(ranks), 0.0)
                mean, met = send(message, self.comm).div_(ranks), True
                square += float((kept.agreed[:-1] - mean).square().sum()) * factor**2
                with self.record.changing():
                    memory.meet_(kept, mean, factor)
            if met:
                with self.record.changing():
                    self.record.count_flush()
        return square

    def take_pending(self) -> dict[str, Tensor]:
        """Return the average of each parameter that has a residual on any rank, and forget the residuals; collective.

        Between two steps. Weights that drift have none, see :meth:`meet_weights`. The averages are
        ``(1/n) sum_i residual_i``, in the parameter's shape and dtype; where residuals are in units of learning rates,
        divided by these, and without parameters whose rate is 0, which keep theirs. Optimizers step with them until
        :meth:`end_flush`. See :meth:`.Engine._take_pending`.
        """
        comm, record, sent = self.comm, self.record, 0.0

        def answer(message: Message) -> Tensor:
            nonlocal sent
            sent += message.bytes_sent(comm.world_size)
            return send(message, comm)

        def mean(x: Tensor) -> Tensor:
            return answer(AllReduce(x.clone())) / comm.world_size

        rates = self.rates() if self.settings.memory_in_use.reads_rates else {}
        with self.on_stream.between_steps():
            groups, made, rounded = (
                [g for g in self.groups if not g.drifts],
                list[Average](),
                list[tuple[Tensor, Tensor]](),
            )
            in_units = list[Average]()  # of the residuals
            waiting = set[str]()  # where no step could be the rate times something
            have = torch.tensor([group.residual is not None for group in groups], dtype=torch.uint8, device=self.device)
            anywhere = answer(AllGather(have)).amax(0).tolist()
            for group in (group for group, wanted in zip(groups, anywhere, strict=True) if wanted):
                if not group.plan.numel:  # those that have the same part have nothing, too
                    made.append(group.nothing())
                    in_units.append(made[-1])
                    continue
                kept = group.residual
                residual = torch.zeros(group.plan.numel, device=self.device, dtype=group.wide) if kept is None else kept
                average = mean(residual)
                handed = meant = average.to(group.dtype)
                if group.memory.reads_rates:
                    known = [(span, rates.get(name, 0.0)) for name, span in group.spans.items()]
                    waiting |= {name for name in group.spans if not rates.get(name)}
                    for span in (span for span, rate in known if not rate):
                        average[span].zero_()
                    per = rates_at([(span, rate or 1.0) for span, rate in known], None, len(average), average)
                    handed = (average / per).to(group.dtype)
                    meant = handed.to(group.wide) * per
                if kept is not None and group.dtype != group.wide:  # each rank keeps the rounding error of the mean
                    rounded.append((kept, average - meant))
                by = group.memory.divide_all(group.state.memory, average, mean, group.density(self.step))
                whole = group.statistics is not None and group.statistics.indices is None
                made.append(group.average(None, handed, by, whole))
                in_units.append(replace(made[-1], values=meant))
            self.totals.add(sent, 0.0)
            given = {name: one for name, one in _by_name(self.whole(made)).items() if name not in waiting}
            with record.changing():
                for group in groups:
                    for span in (span for name, span in group.spans.items() if name not in waiting):
                        if group.residual is not None:
                            group.residual[span].zero_()
                for residual, error in rounded:
                    residual.add_(error)
                record.count_flush()
                self.flushed, self._flushing = given, _by_name(in_units)
        return {name: _shaped(one, name, self.parameters[name]) for name, one in given.items()}

    def end_flush(self) -> None:
        """Let optimizers exchange again when they step; what they have not stepped with is dropped."""
        self.flushed, self._flushing = None, {}


def _by_name(averages: Sequence[Average]) -> dict[str, Average]:
    return {name: each for each in averages for name in each.spans}


def _shaped(average: Average, name: str, parameter: Tensor) -> Tensor:
    """Return the average of a parameter, of all its coordinates here, in its shape."""
    return whole_of(shaped(average.values[average.spans[name]], own(parameter)), parameter)


def in_parts(group: Group, parts: Sequence[Sequence[ParameterSize]]) -> list[Group]:
    """Return groups of some of the parameters of one each; itself, where there is one part."""
    if len(parts) < 2:
        return [group]
    names = (f"{group.name}{CUT}{number}" for number in range(len(parts)))
    return [group._replace(name=name, parameters=tuple(part)) for name, part in zip(names, parts, strict=True)]


def cut_alike(plan: Sequence[Group], earlier: Mapping[str, Sequence[str]]) -> list[Group]:
    """Return a plan that is cut where :func:`in_parts` has cut the same groups of an earlier one.

    Args:
        plan: the groups.
        earlier: names of parameters by group, of the earlier plan.
    """
    cut = []
    for group in plan:
        sizes = {p.name: p for p in group.parameters}
        whole = group.name.partition(CUT)[0]
        found = [names for name, names in earlier.items() if CUT in name and name.partition(CUT)[0] == whole]
        parts = [[sizes.pop(name) for name in names if name in sizes] for names in found]
        cut += in_parts(group, [part for part in (*parts, list(sizes.values())) if part])
    return cut


def check_covers(plan: Sequence[Group], parameters: Mapping[str, Parameter]) -> None:
    """Raise unless a plan names each parameter once.

    Raises:
        ValueError: saying which ones are wrong, or which names of groups repeat; for what is no plan.
    """
    made = isinstance(plan, Sequence) and all(isinstance(group, Group) for group in plan)
    expect(made, "plan", "a list of groups, as make_plan() gives it", plan)
    named = Counter(p.name for group in plan for p in group.parameters)
    wrong = [name for name in sorted(named.keys() | parameters) if named[name] != 1 or name not in parameters]
    if wrong:
        raise ValueError(
            "Expected a plan that names each parameter of the model once, but these are unknown, missing or named "
            f"twice: {', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}."
        )
    if len({group.name for group in plan}) < len(plan):
        raise ValueError(f"Expected groups with different names, but got {[group.name for group in plan]}.")
