"""From DDP's buckets to groups, through the pipeline, and back.

DDP hands over gradients in buckets whose composition changes after the first iteration. The engine keeps groups of its
own over parameter names: a group runs as soon as its last piece has arrived. When the last one has run, the step is
concluded: what all groups have formed counts from then on, unless a gradient of any of them was not finite on any rank.
Then the buckets are answered. *When and where* groups run is up to an executor.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_sparse.collective import TorchCollective, ring_all_reduce_bytes
from lightning_sparse.grouping import Group
from lightning_sparse.hook.agreement import Note, by_reason, check_equal_on_ranks, gather_notes, name_ranks, reason
from lightning_sparse.hook.executors import Executor, Inline, Threaded, side_stream
from lightning_sparse.hook.learning_rates import LearningRates
from lightning_sparse.hook.running import Delivery, GroupVersion, Learned, Running
from lightning_sparse.hook.settings import Settings
from lightning_sparse.hook.skipping import Flags, heeds_flags
from lightning_sparse.hook.state import STATE_FORMAT, check_state, outline, renamed
from lightning_sparse.hook.verdict import Verdict
from lightning_sparse.hook.versions import Counts, Handout, History, Version
from lightning_sparse.kernels import all_finite
from lightning_sparse.memory import NoMemory
from lightning_sparse.statistics import Stamp, summarize, summarize_direct
from lightning_sparse.types import Context

NO = torch.zeros((), dtype=torch.bool, device="cpu")
PATIENCE = 30.0
"""Seconds that a state waits for an exchange that another rank has concluded already."""


class Tuner(Protocol):
    """Looks on while an engine works, and may change its groups."""

    def before_step(self, engine: Engine) -> None:
        """The first gradients of a step are here and nothing is exchanged yet; called on all ranks."""

    def close(self) -> None:
        """The engine ends."""


class Engine:
    """Runs a plan over the gradients that DDP hands over; made by :func:`~lightning_sparse.attach`.

    Args:
        plan: groups that cover all parameters.
        parameters: by the names used in the plan.
        settings: checked choices.
        comm: the ranks; the engine's own, closed with it.
        device: where gradients live.
        watch_usage: note which parameters took part in a backward. Needed where a backward may leave some out.
        frozen: parameters that need no gradient, by name.
    """

    def __init__(
        self,
        plan: Sequence[Group],
        parameters: dict[str, Parameter],
        settings: Settings,
        comm: TorchCollective,
        device: torch.device,
        watch_usage: bool = False,
        frozen: Mapping[str, Parameter] | None = None,
    ) -> None:
        self.settings = settings
        self.comm = comm
        self.hook_calls = 0
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        """() tensor that the loss is multiplied by, or None; asked in every backward."""
        self._reading = threading.RLock()
        """Held while a state is read, and while buffers of an old version are given free to be written to."""
        self._held: Set[str] = frozenset()
        """Parameters that optimizers hold, as far as they have been seen."""
        self._unheard = False
        self._touched: Set[str] = frozenset()
        self._flags = Flags()
        self._spoilt: set[str] = set()
        self._flushing = False
        self.frozen = dict(frozen or {})
        """Parameters of the model that needed no gradient when it was wrapped."""
        self._parked: dict[str, tuple[dict[str, Tensor], dict[str, float]]] = {}
        """What is remembered of these: vectors and counters."""
        self._deliveries: list[Delivery] = []
        self._passed_on: list[tuple[Future[Tensor], Tensor, list[str]]] = []
        self._firsts: dict[tuple[int, ...], Tensor] = {}
        self._closed = False
        self._names = {id(p): name for name, p in parameters.items()}
        self._rates = LearningRates(self._names)
        self._device = device
        self.run_id = self._agree_on_id()
        """Equal on all ranks, and different for every engine."""
        comm.listen(self.run_id)
        self._used: set[str] | None = set() if watch_usage else None
        self._hosts = comm.between_hosts() if watch_usage else comm
        self._parameters = parameters
        self._stream = side_stream(self._device)
        self._history = History(Version((), {}, {}, Counts()))
        with self._between_steps():
            groups = [self._start(group) for group in plan]
        self._adopt(groups, Counts())
        threaded = settings.executor == "thread" or (
            settings.executor == "auto" and self._stream is None and comm.world_size > 1
        )
        self._executor: Executor = Threaded(self._device) if threaded else Inline()
        self._exposed: Callable[[], float] = lambda: 0.0
        self._held_up_before = 0.0
        self._begun = False
        self.tuners: list[Tuner] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that :meth:`follow` was given last."""
        self._direct = False
        self._watchers = [
            p.register_post_accumulate_grad_hook(Watcher(name, self._used))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
            if self._used is not None
        ]
        self._watchers.append(register_optimizer_step_post_hook(Applied(self)))
        self._layouts = [
            p.register_post_accumulate_grad_hook(partial(self._refuse_sparse, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]

    def _refuse_sparse(self, name: str, parameter: Tensor) -> None:
        """Said here, before DDP looks at the gradient and ends with an error that names no parameter."""
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            with self._failing_together("in backward"):
                raise RuntimeError(
                    f"The gradient of {name!r} is a sparse tensor, as torch.nn.functional.embedding makes it with "
                    "sparse=True, which cannot be looked at as a flat vector. Set sparse=False: what is sent is "
                    "sparsified anyway."
                )

    def _agree_on_id(self) -> str:
        number = torch.tensor([secrets.randbits(62)], device=self._device)
        return f"{int(self.comm.broadcast(number, 0)):016x}"

    @property
    def step(self) -> int:
        """Synchronised backward passes so far that counted; void ones do not, see :attr:`void`."""
        return self._history.latest.counts.step

    @property
    def void_steps(self) -> int:
        """Exchanges so far that counted for nothing, because a gradient was not finite on some rank."""
        return self._history.latest.counts.void

    @property
    def void_streak(self) -> int:
        """Of these, the latest ones without a step that counted."""
        return self._history.latest.counts.streak

    @property
    def known_counts(self) -> Counts:
        """Exchanges so far, of which the host has heard whether they counted; does not wait for a device."""
        latest = self._history.latest
        return latest.start if self._unheard else latest.counts

    @property
    def void(self) -> bool:
        """Whether the latest exchange counted for nothing, because a gradient was not finite on some rank.

        All ranks then hold NaN gradients, and residuals are as they were before. The optimizer must skip the step, as a
        ``GradScaler`` does and as the strategies do with ``nonfinite="skip"``. On a device, asking waits for the
        exchange; with ``nonfinite="nan"`` and no loss scale, nobody asks, and the answer there is always False.
        """
        return self._history.latest.void

    def drop_void(self, optimizer: torch.optim.Optimizer) -> bool:
        """Set gradients to None that a void step has left in this optimizer's parameters, so that it skips them.

        Returns:
            Whether there were any.
        """
        self._hear_verdict()
        return self._drop(optimizer, self._spoilt)

    def skip_void(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer's next step pass over what a void step has left in its parameters.

        On a device, fused optimizers of torch are handed the flag as a ``GradScaler`` hands it over, and nobody waits:
        parameters, momenta and counters of steps stay as they are, the gradients of a void step stay NaN, and the step
        is counted when the next one begins. Where the host knows the flag, for all other optimizers, for those that
        step parameters of others, too, and beside a loss scale, this is :meth:`drop_void`.
        """
        self._flags.take_back(optimizer)
        verdict = self._history.latest.verdict if self._unheard else None
        flag = None if verdict is None else verdict.on_device
        if flag is not None and self.loss_scale() is None and heeds_flags(optimizer):
            latest = self._touched
            self._drop(optimizer, self._spoilt - latest)
            stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if all(self._names.get(id(p)) in latest for p in stepped):
                self._flags.hand(optimizer, flag)
                return
        self.drop_void(optimizer)

    def _drop(self, optimizer: torch.optim.Optimizer, names: Set[str]) -> bool:
        dropped = False
        for group in optimizer.param_groups if names else ():
            for parameter in group["params"]:
                if self._names.get(id(parameter)) in names:
                    parameter.grad = None
                    dropped = True
        return dropped

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the optimizers that apply the averages; with ``lr_aware`` their rates are read in every step.

        Raises:
            ValueError: if one does not go with the memory or with ``lr_aware``.
        """
        chosen = list(optimizers)
        for optimizer in chosen:
            self.settings.memory.check_optimizer(optimizer)
        if self.settings.lr_aware:
            self._rates.follow(chosen)
        self.optimizers = chosen
        for optimizer in chosen:
            self._held = self._held | self._names_in(optimizer)

    def _names_in(self, optimizer: torch.optim.Optimizer) -> set[str]:
        found = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        return {name for name in found if name is not None}

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has finished a step; called for all of the process."""
        if not (names := self._names_in(optimizer)):
            return
        if not names <= self._held:
            self._held = self._held | names
        if (handout := self._history.handout) is not None:
            handout.step(names)

    def count_as_applied(self) -> None:
        """What the latest exchange handed out has been applied, or never will be: between two steps.

        The engine notices by itself that optimizers step. This is for steps that are left out.
        """
        if (handout := self._history.handout) is not None:
            handout.step(handout.names)

    def tune(self, tuner: Tuner) -> None:
        """Let something look on, and change groups, at the start of every exchange; until the engine is closed."""
        self.tuners.append(tuner)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """By name, in order of registration."""
        return dict(self._parameters)

    @property
    def device(self) -> torch.device:
        """Where gradients live."""
        return self._device

    @property
    def held_up_seconds(self) -> float:
        """How long the host stood still inside backward so far, on a CPU; 0 on devices, where streams wait instead."""
        return 0.0 if self._stream is not None else self._held_up_before + self._executor.blocked_seconds

    @property
    def beside_backward(self) -> bool:
        """Whether exchanges go on beside backward: on a stream or a thread of their own."""
        return self._stream is not None or isinstance(self._executor, Threaded)

    @property
    def closed(self) -> bool:
        """Whether the engine has ended."""
        return self._closed

    @property
    def direct(self) -> bool:
        """Whether buckets are averaged just as DDP does, past the groups."""
        return self._direct

    def go_direct(self) -> bool:
        """Average DDP's buckets just as DDP does without a hook, until groups change; for plans that are all dense.

        Refused, with nothing changed, before residuals have been sent (in the first valid step of a dense plan), and
        with memories that do more for dense groups than nothing, such as momentum. What is then still remembered, of
        parameters that the step did not use and of rounding, is kept until groups change again. Collective: all
        ranks get the same answer.
        """
        simple = isinstance(self.settings.memory.for_dense(), NoMemory)
        if not simple or not all(group.plan.dense for group in self.groups):
            return False
        sent = torch.tensor([all(group.sent for group in self.groups)], dtype=torch.uint8, device=self._device)
        self._direct = bool(self.comm.all_gather(sent).all())
        return self._direct

    @property
    def plan(self) -> list[Group]:
        """The groups, in the order in which backward is expected to finish them."""
        return [group.plan for group in self.groups]

    def regroup(self, plan: Sequence[Group]) -> None:
        """Cut the parameters into other groups, from the next step on; collective, between two steps.

        What is remembered of gradients belongs to parameters and moves with them: no residual and no momentum is lost.
        What sparsifiers and density schedules have learned about a group, such as thresholds, belongs to the group and
        starts anew. The residual of a parameter that becomes dense is sent in the next step.

        Args:
            plan: groups of the same parameters, see :func:`~lightning_sparse.grouping.make_plan`.

        Raises:
            ValueError: on all ranks, if these are not the parameters of this engine, each once, or if names of groups
                repeat.
            RuntimeError: within a backward; on all ranks, if their plans differ.

        Example:
            >>> import tempfile, torch, lightning_sparse as ls
            >>> import torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> from lightning_sparse.grouping import make_plan
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
            >>> model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
            >>> engine = ls.attach(DistributedDataParallel(model), grouping="model")
            >>> sizes = [p for group in engine.plan for p in group.parameters][::-1]
            >>> engine.regroup(make_plan(sizes, "layer"))
            >>> [group.name for group in engine.plan]
            ['1', '0', 'dense.bucket0']
            >>> engine.close()
            >>> dist.destroy_process_group()
        """
        if any(group.arrived for group in self.groups):
            raise RuntimeError("Groups can only be changed between two steps, not within a backward.")
        check_equal_on_ranks({"settings": self.settings, "groups": list(plan)}, self.comm, self._device)
        named = Counter(p.name for group in plan for p in group.parameters)
        known = self._parameters.keys()
        wrong = [name for name in sorted(named.keys() | known) if named[name] != 1 or name not in known]
        if wrong:
            raise ValueError(
                "Expected a plan that names each parameter of the model once, but these are unknown, missing or named "
                f"twice: {', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}."
            )
        if len({group.name for group in plan}) < len(plan):
            raise ValueError(f"Expected groups with different names, but got {[group.name for group in plan]}.")
        groups = []
        with self._between_steps():
            for group in plan:
                before = {p.name: self._group_of[p.name] for p in group.parameters}
                running = self._start(group, flush=any(old.remembers for old in before.values()))
                for name, old in before.items():
                    running.carry(name, old)
                groups.append(running)
        self._adopt(groups, self._history.latest.counts)
        self._direct = False

    def _start(self, group: Group, flush: bool = False, step: int | None = None) -> Running:
        step = self.step if step is None else step
        density = group.density or self.settings.density(step)
        ctx = Context(step, density, self.comm.rank, self.comm.world_size)
        return Running(group, self._parameters, self.settings, ctx, flush)

    def _adopt(self, groups: list[Running], counts: Counts) -> None:
        """Go on with these groups, between two steps."""
        self._hear_verdict()
        versions = tuple(group.version for group in groups)
        self._history = History(Version(versions, self._rates.latest, self._rates.surplus, counts))
        self.groups = groups
        self._group_of = {p.name: group for group in groups for p in group.plan.parameters}
        self._model_numel = sum(g.plan.numel for g in groups if not g.plan.dense) or None

    def receive(self, bucket: Any) -> Future[Tensor]:
        """DDP's communication hook: take the gradients of a ``GradBucket``, answer with averages in its own buffer."""
        self.hook_calls += 1
        buffer = bucket.buffer()
        if not self._begun:
            self._begin()
        if self._direct:
            return self._pass_on(bucket)
        delivery = Delivery(buffer)
        self._deliveries.append(delivery)
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if not view.numel():  # has no group
                continue
            name = self._names[id(parameter)]
            start = view.storage_offset() - buffer.storage_offset()
            self._group_of[name].receive(name, delivery.add(name, start, view.numel()))
        begin = Stamp.now(self._device)
        for group in dict.fromkeys(self._group_of[name] for name in delivery.spans):
            if group.complete:
                self._submit(group)
        if bucket.is_last():
            self._finish(begin)
        return delivery.future

    def _begin(self) -> None:
        """The first gradients of a step are here."""
        if self._closed:
            raise RuntimeError("The engine is closed. Wrap the model again and attach a new one to train on.")
        self._begun = True
        self._hear_verdict()
        self._flags.take_all_back()
        with self._reading:  # from here on, buffers of the version before may be written to
            self._history = History(self._history.latest)
            for group in self.groups:
                group.density.take_in()
        thawed = [name for name, p in self.frozen.items() if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"The parameter {thawed[0]} needs gradients now, and did not when DistributedDataParallel was built, "
                "which therefore would not average them. Wrap the model again, attach a new engine and give it the "
                "state_dict() of this one. (The strategies do so by themselves, between two steps.)"
            )
        with self._failing_together("before the first exchange"):
            for tuner in self.tuners:
                tuner.before_step(self)
            if self.settings.lr_aware:
                self._rescale()

    def _rescale(self) -> None:
        if not self._rates.known:
            raise RuntimeError("lr_aware=True needs the optimizers: call engine.follow([optimizer]) before training.")
        with self._reading, self._between_steps():
            latest = self._history.latest
            self._history = History(latest)
            factors = self._rates.factors()
            densities = {name: self._group_of[name].density(self.step) for name in factors}
            self._rates.change(factors, self.step, densities)
            groups = tuple(group.version.scaled(factors) for group in self.groups)
            rates, surplus = self._rates.latest, self._rates.surplus
            self._history = History(latest._replace(groups=groups, rates=rates, surplus=surplus))
            for version in groups:
                version.group.adopt(version)

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Where groups run."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Where groups run, after all that the caller's stream was given so far and before what it is given next.

        The caller's stream may still look at residuals. What groups give back must not be handed out again, to either
        stream, while the other one uses it.
        """
        if self._stream is None:
            yield
            return
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def _submit(self, group: Running) -> None:
        density = group.density(self.step)
        ctx = Context(
            step=self.step,
            density=density,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            model_numel=self._model_numel,
            parameters=self._parameters_of(group) if self.settings.memory.reads_parameters else None,
            surplus=self._rates.surplus_of({p.name: p.numel for p in group.plan.parameters}, self.step, density),
        )
        used = None if self._used is None else [p.name in self._used for p in group.plan.parameters]
        scale = self.loss_scale()
        flush = self._flushing
        ready = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def job() -> None:
            with self._on_stream(), self._failing_together(f"in the exchange of group {group.plan.name!r}"):
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                group.run(ctx, self.comm, self._hosts, used, scale, flush)

        self._executor.submit(job)

    @contextmanager
    def _failing_together(self, where: str) -> Iterator[None]:
        """An error on this rank ends the exchange for all: the others must not wait for it."""
        try:
            yield
        except Exception as error:
            error.add_note(f"sparse_ddp: {where}, step {self.step}, rank {self.comm.rank}")
            for comm in {self.comm, self._hosts}:
                comm.abort()
            raise

    def _parameters_of(self, group: Running) -> list[tuple[slice, Tensor]]:
        return [(span, self._parameters[name].detach()) for name, span in group.spans.items()]

    def _finish(self, begin: Stamp) -> None:
        """The last bucket is here: backward has nothing left to compute, so nothing is lost by waiting."""
        incomplete = [g.plan.name for g in self.groups if g.arrived and not g.complete]
        assert not incomplete, f"DDP delivered only some gradients of the groups {incomplete}"
        deliveries, self._deliveries = self._deliveries, []
        self._executor.drain()
        self._conclude(deliveries)
        with self._on_stream():
            for delivery in deliveries:
                delivery.future.set_result(delivery.buffer)
        self._exposed = self._measure_exposed(begin)
        self._end_step()

    def _conclude(self, deliveries: Sequence[Delivery]) -> None:
        """All groups have run: does the step count? What is not finite is so on all ranks, so that nothing is sent."""
        with self._on_stream():
            void = self._void_on_any_rank()
            fine = self._stream is None and not void
            untouched = {name for group in self.groups for name in group.untouched}
            groups = tuple(group.after(void) for group in self.groups)
            for delivery in () if fine else deliveries:
                delivery.spoil_(void, untouched, self._firsts)
            asked = self.settings.nonfinite == "skip" or self.loss_scale() is not None
            known = self._stream is None or asked
            wait = self.comm.wait_until
            verdict = Verdict(void, self._stream, wait) if known else Verdict(NO, None, wait)
        touched = {name for delivery in deliveries for name in delivery.spans} - untouched
        self._commit(groups, verdict, touched)

    def _void_on_any_rank(self) -> Tensor:
        """() whether a gradient of any group was not finite on some rank; equal on all ranks."""
        flags = [group.void for group in self.groups if group.void is not None]
        if self._stream is None and not any(map(bool, flags)):
            return NO.to(self._device)
        return torch.stack(flags).any() if flags else NO.to(self._device)

    def _commit(self, groups: tuple[GroupVersion, ...], verdict: Verdict, touched: Set[str]) -> None:
        """What groups have formed counts from now on; until it is applied, what was before is kept."""
        before = self._history.latest
        latest = before._replace(groups=groups, start=before.counts, verdict=verdict)
        handout = Handout({name: self._parameters[name] for name in touched})
        self._history = History(latest, before, handout)
        for version in groups:
            version.group.adopt(version)
        self._touched, self._unheard = touched, True

    def _hear_verdict(self) -> None:
        """Note which gradients are spoilt since the latest exchange, if that has not happened yet."""
        if not self._unheard:
            return
        self._unheard = False
        if self._history.latest.void:
            self._spoilt |= self._touched
            return
        self._flushing = False
        self._spoilt -= self._touched

    def _end_step(self) -> None:
        self._begun = False
        for watcher in self._layouts:  # what makes sparse gradients does so from the first step on
            watcher.remove()
        self._layouts = []
        for group in self.groups:
            group.end_step()
        if self._used is not None:
            self._used.clear()

    def _pass_on(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket just as DDP does without a hook."""
        buffer, last = bucket.buffer(), bucket.is_last()
        future = self.comm.start_average(buffer, wait=last)
        self._passed_on.append((future, buffer, [self._names[id(p)] for p in bucket.parameters() if p.numel()]))
        if last:
            passed, self._passed_on = self._passed_on, []
            groups = tuple(group.version for group in self.groups)
            self._commit(groups, self._look_at(passed), {name for *_, names in passed for name in names})
            self._end_step()
        return future

    def _look_at(self, passed: Sequence[tuple[Future[Tensor], Tensor, list[str]]]) -> Verdict:
        """Whether averages that nobody has looked at are finite; a loss scaler looks at them itself."""
        if self.settings.nonfinite != "skip" or self.loss_scale() is not None:
            return Verdict(NO, None, self.comm.wait_until)
        finite = []
        for future, buffer, _ in passed:
            future.wait()
            finite.append(all_finite(buffer))
        stream = torch.cuda.current_stream(self._device) if self._stream is not None else None
        return Verdict(~torch.stack(finite).all(), stream, self.comm.wait_until)

    def _measure_exposed(self, begin: Stamp) -> Callable[[], float]:
        """Time since the last bucket came; groups that ran inside earlier hooks held backward up, too."""
        if self._stream is None:
            inline = self._executor.blocked_seconds
            self._held_up_before += inline
            self._executor.blocked_seconds = 0.0
            return lambda: 1e3 * inline
        with torch.cuda.stream(self._stream):
            end = Stamp.now(self._device)
        return lambda: max(0.0, begin.until(end))

    def summary(self) -> dict[str, float]:
        """The logged quantities of the latest step, see :data:`~lightning_sparse.statistics.QUANTITIES`.

        Collective: all ranks must call this together, outside backward. Empty before the first step.
        """
        if self._direct:
            sent = ring_all_reduce_bytes(sum(p.nbytes for p in self._parameters.values()), self.comm.world_size)
            return summarize_direct(
                sent, [group.residual_norm() for group in self.groups], self._mean_over_ranks, self.void_steps
            )
        seen = [group for group in self.groups if group.statistics is not None]
        if not seen:
            return {}
        norms = [group.residual_norm() for group in seen]
        statistics = [group.statistics for group in seen if group.statistics is not None]
        return summarize(statistics, norms, self._exposed(), self._mean_over_ranks, self.void_steps)

    def group_summaries(self) -> dict[str, dict[str, float]]:
        """Like :meth:`summary`, for each group by name; without ``exposed_ms`` and ``void_steps``, which they share."""
        summaries: dict[str, dict[str, float]] = {}
        for group in [] if self._direct else self.groups:
            if group.statistics is not None:
                summary = summarize([group.statistics], [group.residual_norm()], 0.0, self._mean_over_ranks)
                del summary["exposed_ms"], summary["void_steps"]
                summaries[group.plan.name] = summary
        return summaries

    def residual(self, name: str) -> Tensor | None:
        """What this rank has not sent yet of a parameter, (numel,), or None where nothing is remembered.

        A view, which is valid until the next step begins.
        """
        group = self._group_of[name]
        residual = group.memory.residual(group.state.memory)
        return None if residual is None else residual[group.spans[name]]

    def flush_next_step(self) -> None:
        """Exchange everything densely in the next step that counts, so that no residual is left; on all ranks.

        What a parameter remembers that the step does not use stays.
        """
        self._hear_verdict()  # of the step before, which is not the one that is meant
        self._flushing = True

    def take_pending(self) -> dict[str, Tensor]:
        """What all ranks together have not sent yet, ``(1/n) sum_i residual_i``, and forget it; collective.

        Outside backward. The momentum of memories that have one is kept. See :func:`~lightning_sparse.flush`, which
        gives this to the optimizers.

        Returns:
            The pending average of each parameter that has a residual, of the parameter's shape and dtype.
        """
        self._hear_verdict()  # a void step must still be left out afterwards
        if self.settings.lr_aware and self._rates.known:
            self._rescale()
        pending = {}
        with self._between_steps():
            residuals = [group.memory.residual(group.state.memory) for group in self.groups]
            have = torch.tensor([r is not None for r in residuals], dtype=torch.uint8, device=self._device)
            anywhere = self.comm.all_gather(have).amax(0).tolist()
            for group, residual, wanted in zip(self.groups, residuals, anywhere, strict=True):
                if not wanted:
                    continue
                if residual is None:
                    residual = torch.zeros(group.plan.numel, device=self._device, dtype=group.wide)
                average = self.comm.all_reduce(residual.clone()) / self.comm.world_size
                for name, span in group.spans.items():
                    parameter = self._parameters[name]
                    pending[name] = in_shape(average[span].to(parameter.dtype), parameter)
            self._forget(pending.keys())
        return pending

    def _forget(self, names: Set[str]) -> None:
        """Empty the residuals of parameters that have been handed out."""
        with self._reading:
            before = self._history.latest
            groups = tuple(group.version.scaled(dict.fromkeys(names, 0.0)) for group in self.groups)
            counts = before.counts
            latest = before._replace(groups=groups, start=counts._replace(flushes=counts.flushes + 1), verdict=None)
            self._history = History(latest, before, Handout({name: self._parameters[name] for name in names}))
            for version in groups:
                version.group.adopt(version)

    @property
    def moment(self) -> Tensor:
        """Which of the states that this rank holds belongs to its weights, for :meth:`state_dict`: int64.

        Ranks may be asked at different moments, one before its optimizer's step and another one after it. What rank 0
        has here is what all ranks have to save beside the weights of rank 0.
        """
        return torch.tensor(self._history.numbers(self._parameters, self._held), device="cpu")

    def state_dict(self, moment: Tensor | None = None) -> dict[str, Any]:
        """All that this rank needs to go on exactly where it is: plain data and tensors on the CPU; copies.

        Every rank has its own: residuals differ. It may be taken at any moment, also in a signal handler and by another
        thread, and is that of the last completed step: until an average is applied to a parameter, what is remembered
        of it is that of before the exchange. Where an exchange has begun, averages of the one before count as applied.
        Where the number of ranks has changed, see :func:`~lightning_sparse.merge_states`.

        Args:
            moment: :attr:`moment` of the rank whose weights are saved; None: of this one.

        Returns:
            ``step``, ``void_steps``, ``rank``, ``world_size``, ``settings``; ``parameters`` and ``counters``: what is
            remembered of each, by name; ``groups``: what sparsifiers and schedules have learned; ``rates``: latest
            learning rates; ``surplus``: what changes of them have left in residuals.

        Raises:
            RuntimeError: if this rank has no state of the given moment any more, or not yet.
        """
        if self._stream is not None:
            self._stream.synchronize()
        with self._reading:
            history = self._history
            wanted = history.numbers(self._parameters, self._held) if moment is None else moment.tolist()
            if max(wanted) > history.latest.number:
                history = self._soon()
            versions = {version.number: version for version in (history.before, history.latest) if version is not None}
            if missing := set(wanted) - versions.keys():
                raise RuntimeError(
                    f"The weights that are saved are those after exchange {min(missing)}, and this rank holds what it "
                    f"remembered after {' and '.join(map(str, sorted(versions)))} only. Save a moment later."
                )
            whole = versions[wanted[0]]
            remembered: dict[str, dict[str, Tensor]] = {}
            counters: dict[str, dict[str, float]] = {}
            chosen = dict(zip(self._parameters, wanted[1:], strict=True))
            for number, version in versions.items():
                for group in version.groups:
                    names = [name for name in group.group.spans if chosen[name] == number]
                    remembered |= {name: group.remembered(name) for name in names}
                    counters |= dict.fromkeys(names, group.counters() if names else {})
            return {
                "format": STATE_FORMAT,
                "step": whole.counts.step,
                "void_steps": whole.counts.void,
                "rank": self.comm.rank,
                "world_size": self.comm.world_size,
                "settings": self.settings.algorithm,
                "parameters": {name: remembered[name] for name in self._parameters}
                | {name: dict(vectors) for name, (vectors, _) in self._parked.items()},
                "counters": {name: counters[name] for name in self._parameters}
                | {name: dict(counted) for name, (_, counted) in self._parked.items()},
                "groups": [group.state_dict() for group in whole.groups],
                "rates": dict(whole.rates),
                "surplus": {name: list(noted) for name, noted in whole.surplus.items()},
            }

    def _soon(self) -> History:
        """The history when the exchange is concluded that goes on; another rank has done so already.

        A signal handler may have come in between, on the thread that would conclude it.
        """
        deadline = time.monotonic() + PATIENCE
        arrived = [group for group in self.groups if group.arrived]
        if not arrived and not self._direct:  # the other rank is ahead by a flush
            return self._history
        while not all(group.exchanged for group in arrived):
            if isinstance(self._executor, Inline) or time.monotonic() > deadline:
                return self._history
            time.sleep(0.001)
        latest = self._history.latest
        void = self._void_on_any_rank()
        groups, verdict = tuple(group.after(void) for group in self.groups), Verdict(void, None, self.comm.wait_until)
        return History(latest._replace(groups=groups, start=latest.counts, verdict=verdict), latest)

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Go on where an engine of the same model was; collective, before the first step or between two steps.

        What is remembered goes by names of parameters. What has been learned about groups is taken over where settings,
        number of ranks and the group are the same, and where that is so on all ranks; elsewhere it starts anew.

        Args:
            state: what :meth:`state_dict` gave on this rank, or :func:`~lightning_sparse.merge_states` made.

        Returns:
            Sentences about what did not fit; none where the two engines are alike.

        Raises:
            ValueError: on all ranks, with nothing changed, if this is no such state on one of them, or if the states of
                the ranks do not belong together.
        """
        misfits = self._load(state)
        return [*misfits.learned, *misfits.remembered]

    def take_over(self, state: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> list[str]:
        """Go on where an engine of the same parameters was, whatever their names and groups are now; collective.

        Args:
            state: what its :meth:`state_dict` gave on this rank.
            parameters: those that the state names, or some of them: what is remembered of others is left behind.

        Returns:
            Sentences about what was remembered and did not fit. What was learned about groups that are no more starts
            anew without a word, as with :meth:`regroup`.

        Raises:
            ValueError: as :meth:`load_state_dict`.
        """
        now = {id(p): name for name, p in {**self._parameters, **self.frozen}.items()}
        kept, gone = renamed(state, {name: now[id(p)] for name, p in parameters.items() if id(p) in now})
        return gone + self._load(kept).remembered

    def _load(self, state: Mapping[str, Any]) -> _Misfits:
        """Nothing changes before all ranks know that all of them can."""
        self._hear_verdict()
        note, draft = Note("", ""), None
        try:
            check_state(state)
            draft = self._draft(state)
            note = Note(outline(state), "")
        except Exception as error:  # whatever a damaged state makes of a memory
            note = Note("", reason(error, ValueError))
        notes = gather_notes(note, self.comm, self._device)
        trouble = by_reason(notes)
        if not trouble and len({note.fact for note in notes}) > 1:
            trouble = "the states of the ranks do not belong together"
        if trouble or draft is None:
            raise ValueError(f"The state cannot be loaded, and no rank has loaded it: {trouble}")
        fits = torch.tensor([known is not None for known in draft.learned], dtype=torch.uint8, device=self._device)
        on_ranks = self.comm.all_gather(fits).T.tolist()
        for group, known, fitting in zip(draft.groups, draft.learned, on_ranks, strict=True):
            if known is not None and all(fitting):
                group.learn(known)
            elif known is not None:
                others = [rank for rank, fit in enumerate(fitting) if not fit]
                draft.misfits.learned.append(f"{_anew(group)}, because it does not fit on {name_ranks(others)}.")
        counts = self._history.latest.counts._replace(step=state["step"], void=state["void_steps"])
        self._rates.latest = dict(state["rates"])
        self._rates.surplus = {name: (value, step) for name, (value, step) in state.get("surplus", {}).items()}
        self._adopt(draft.groups, counts)
        self._direct = False
        self._parked = {
            name: (dict(vectors), dict(state["counters"].get(name, {})))
            for name, vectors in state["parameters"].items()
            if name in self.frozen
        }
        if self._stream is not None:
            self._stream.synchronize()
        return draft.misfits

    def _draft(self, state: Mapping[str, Any]) -> _Draft:
        """The groups as they will be if all ranks can load their states."""
        misfits = _Misfits([], [])
        settings = self.settings.algorithm
        if state["settings"] != settings:
            misfits.learned.append(f"The settings were {state['settings']}, and are {settings}.")
        alike = state["settings"] == settings and state["world_size"] == self.comm.world_size
        given = {group["name"]: group for group in state["groups"]} if alike else {}
        known = {name: vectors for name, vectors in state["parameters"].items() if name in self._parameters}
        groups: list[Running] = []
        learned: list[Learned | None] = []
        with self._between_steps():
            for plan in self.plan:
                parts = {p.name: known.get(p.name, {}) for p in plan.parameters}
                remembers = any(bool(vector.any()) for vectors in parts.values() for vector in vectors.values())
                group = self._start(plan, flush=remembers, step=state["step"])
                misfits.remembered.extend(group.load(parts, {name: state["counters"].get(name, {}) for name in parts}))
                groups.append(group)
                learned.append(None)
                if not group.is_about(given.get(plan.name)):
                    misfits.learned.extend([f"{_anew(group)}."] if state["groups"] else [])
                    continue
                try:
                    learned[-1] = group.understand(given[plan.name], self.comm.world_size)
                except ValueError as error:
                    misfits.learned.append(f"{_anew(group)}, because it does not fit: {reason(error, ValueError)}")
        here = {**self._parameters, **self.frozen}
        misfits.remembered.extend(
            f"There is no parameter {name} any more." for name in state["parameters"] if name not in here
        )
        return _Draft(groups, learned, misfits)

    def close(self) -> None:
        """Stop the communication thread, give the process group back, stop watching parameters."""
        self._closed = True
        self._flags.take_all_back()
        for tuner in self.tuners:
            tuner.close()
        self._executor.close()
        for watcher in (*self._watchers, *self._layouts):
            watcher.remove()
        self._watchers, self._layouts = [], []
        for comm in {self.comm, self._hosts}:
            comm.close()

    def __reduce__(self) -> tuple[type[CopiedEngine], tuple[()]]:
        """A copy, pickled or not, is a :class:`CopiedEngine`."""
        return CopiedEngine, ()

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        if self._closed and self.comm.world_size > 1:
            raise RuntimeError(
                "The engine is closed: ask for summaries before the end of fit, in on_train_end at the latest."
            )
        return self.comm.all_reduce(x.to(self._device)).cpu() / self.comm.world_size


class _Misfits(NamedTuple):
    """Sentences about what of a state did not fit."""

    learned: list[str]
    """What was learned about groups."""
    remembered: list[str]
    """What is remembered of gradients: this is lost."""


class _Draft(NamedTuple):
    """What a state makes of an engine, before it counts."""

    groups: list[Running]
    learned: list[Learned | None]
    """About each group; None: nothing that fits."""
    misfits: _Misfits


def _anew(group: Running) -> str:
    return f"What was learned about the group {group.plan.name} starts anew"


class CopiedEngine:
    """What an engine becomes in a copy of the model or strategy that it belongs to: closed, and empty.

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
        """Nothing is held."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "This is a copy of an engine: it exchanges nothing, and residuals stay with the original. To exchange the "
            "gradients of a copied model, attach an engine to it with lightning_sparse.attach()."
        )


class Applied:
    """Tells an engine that an optimizer has finished a step, without keeping it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if (engine := self._engine()) is not None:
            engine.optimizer_stepped(optimizer)


class Watcher:
    """Notes that a parameter's gradient was computed since the last synchronised backward."""

    def __init__(self, name: str, used: set[str]) -> None:
        self.name = name
        self.used = used

    def __call__(self, parameter: Tensor) -> None:
        self.used.add(self.name)


def in_shape(flat: Tensor, parameter: Tensor) -> Tensor:
    """A flat gradient in the parameter's shape, its coordinates in the order of memory, as in DDP's buckets."""
    shaped = torch.empty_like(parameter, requires_grad=False)
    if shaped.stride() != parameter.stride():  # overlapping, or with gaps
        return flat.view(parameter.shape)
    shaped.as_strided((flat.numel(),), (1,)).copy_(flat)
    return shaped
