"""The engine: the public view of a sparsified model. Counts, groups, logged quantities, state, and changes of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.clock import Totals
from lightning_sparse.collective import TorchCollective
from lightning_sparse.config import SparsificationConfig
from lightning_sparse.console import say
from lightning_sparse.core import Agreement
from lightning_sparse.density import Constant
from lightning_sparse.memory import Adapting, Memory, NoMemory, named_in
from lightning_sparse.metrics import Step, summarize
from lightning_sparse.optim import made_for
from lightning_sparse.plan import Group, Messages
from lightning_sparse.reducer.adam_steps import AdamSteps
from lightning_sparse.reducer.agreement import check_equal_on_ranks
from lightning_sparse.reducer.clipping import Clipping
from lightning_sparse.reducer.copied import CopiedEngine
from lightning_sparse.reducer.flush import average_residuals
from lightning_sparse.reducer.group import GroupReducer, check_covers
from lightning_sparse.reducer.reducer import Reducer
from lightning_sparse.reducer.schema import renamed
from lightning_sparse.reducer.state import Draft, Misfits, Parked, capture, draft_of, load, parked
from lightning_sparse.reducer.versions import Counts


class StepObserver(Protocol):
    """Called at the start of every step of an engine, whose groups it may inspect and change."""

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
        settings: SparsificationConfig,
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
        self.frozen = dict(frozen or {})
        """Parameters of the model that needed no gradient when it was wrapped."""
        self.observers: list[StepObserver] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers that :meth:`follow` was given last."""
        self.warnings: list[str] = []
        """What :meth:`warn` was given."""
        self.on_warning: Callable[[str, str], None] | None = None
        """Called on rank zero with the kind of each warning and the sentence, for those who pass it on."""
        self._parameters = parameters
        self._device = device
        self.run_id = self._agree_on_id()
        """Equal on all ranks, and different for every engine."""
        comm.listen(self.run_id)
        self._parked: Parked = {}
        self._closed = False
        self._reducer = Reducer(
            parameters, settings, comm, device, watch_usage, lambda: self.loss_scale(), self._before_exchange
        )
        self._record, self._skipped = self._reducer.record, self._reducer.skipped
        self._chosen_memory = settings.memory
        self._told: set[str] = set()
        self.loads = 0
        """How many states were loaded."""
        try:
            with self._reducer.on_stream.between_steps():
                groups = [self._reducer.form(group) for group in plan]
            self._reducer.adopt(groups, Counts())
        except BaseException:
            self._reducer.close()
            raise
        names = {id(p): name for name, p in parameters.items()}
        self._adam_steps = AdamSteps(names, self._sparse_group, self._handed_out, comm.world_size)

    def _agree_on_id(self) -> str:
        number = torch.tensor([secrets.randbits(62)], device=self._device)
        return f"{int(self.comm.broadcast(number, 0)):016x}"

    @property
    def step(self) -> int:
        """Synchronised backward passes so far that counted; void ones do not, see :attr:`void`."""
        return self._record.latest.counts.step

    @property
    def void_steps(self) -> int:
        """Exchanges so far that counted for nothing, because a gradient was not finite on some rank."""
        return self._record.latest.counts.void

    @property
    def void_streak(self) -> int:
        """Exchanges that counted for nothing since the last one that counted."""
        return self._record.latest.counts.streak

    @property
    def known_counts(self) -> Counts:
        """Exchanges so far, of which the host has heard whether they counted; does not wait for a device."""
        latest = self._record.latest
        unheard = self._skipped.unresolved and not self._reducer.on_stream.host_knows
        return latest.start if unheard else latest.counts

    @property
    def void(self) -> bool:
        """Whether the latest exchange counted for nothing, because a gradient was not finite on some rank.

        All ranks then hold NaN gradients, and residuals are as they were before. The optimizer must skip the step, as a
        ``GradScaler`` does and as the strategies do with ``nonfinite="skip"``. On a device, asking waits for the
        exchange; with ``nonfinite="nan"`` and no loss scale, nobody asks, and the answer there is always False.
        """
        return self._record.latest.void

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank keeps for error feedback, of all groups; in :class:`Residual` 8 a float32 coordinate.

        Of groups whose gradients do not lie in one run in DDP's buckets, room for scores and for copies, where some
        are needed, is counted from the first step on.
        """
        return sum(group.memory_bytes for group in self.groups)

    def drop_void(self, optimizer: torch.optim.Optimizer) -> bool:
        """Set gradients to None that a void step has left in this optimizer's parameters, so that it skips them.

        Returns:
            Whether there were any.
        """
        return self._skipped.drop(optimizer)

    def skip_void(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer's next step pass over what a void step has left in its parameters.

        On a device, fused optimizers of torch are handed the flag as a ``GradScaler`` hands it over, and nobody waits:
        parameters, momenta and counters of steps stay as they are, the gradients of a void step stay NaN, and the step
        is counted when the next one begins. Where the host knows the flag, for all other optimizers, for those that
        step parameters of others, too, and beside a loss scale, this is :meth:`drop_void`.
        """
        self._skipped.skip(optimizer, hand_over=self.loss_scale() is None)

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at the optimizers that apply the averages; with ``lr_aware`` their rates are read in every step.

        Raises:
            ValueError: if one does not go with the memory or with ``lr_aware``.
        """
        chosen = list(optimizers)
        self._suit(chosen)
        for optimizer in chosen:
            self.settings.memory.check_optimizer(optimizer)
        if self.settings.lr_aware:
            self._reducer.rates.follow(chosen)
        self.optimizers = chosen
        for optimizer in chosen:
            self._record.hold(optimizer)

    def _suit(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Choose the memory that suits these optimizers, where that was left open."""
        if not isinstance(self._chosen_memory, Adapting) or not self.settings.exchange.carries_second:
            return
        sparsified = {
            id(self._parameters[name])
            for group in self.groups
            if not group.plan.dense and group.sparsifier.agreement is not Agreement.EVERYTHING
            for name in group.spans
        }
        if not sparsified:  # for a while, maybe
            return
        memory: Memory = self._chosen_memory
        if self.settings.density != Constant(1.0):
            memory = self._chosen_memory.suited(optimizers, sparsified, self._warn_once)
        if memory != self.settings.memory:
            self._remember_by(memory)
            if memory.needs_second and self.comm.rank == 0:
                say(
                    "Adam's steps for parameters that are sparsified are taken with the second moments of all ranks' "
                    "own gradients and without a first moment, at the optimizer's learning rate (docs/adam.md). "
                    "memory='residual' leaves them to the optimizer."
                )

    def _remember_by(self, memory: Memory) -> None:
        """Go on with another memory, and with what both remember; between two steps."""
        self.settings = replace(self.settings, memory=memory)
        self._reducer.remember_by(self.settings)

    def _sparse_group(self, name: str) -> GroupReducer | None:
        return None if self._reducer.direct else self._reducer.group_of.get(name)

    def _handed_out(self) -> Set[str]:
        """Parameters that got an average, and have not been stepped since."""
        return self._record.waiting

    def takes_steps_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether Adam's steps for parameters that are sparsified are taken here, see :class:`SecondMoment`."""
        return self._adam_steps.takes(optimizer)

    def clip_gradients(
        self, limit: float, algorithm: str = "norm", optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Clip each rank's gradients before they are accumulated, from the next step on. All ranks must call this.

        Averages of sparsified gradients hold what has waited for many steps, and to clip them shortens steps at random.
        With ``messages="step"`` the norm is that of all gradients of this rank, and local work begins when all of them
        are here; with "group", each group is clipped to its share.

        Args:
            limit: above 0, for the average over ranks; the norm of each rank is clipped to ``sqrt(n)`` times that.
            algorithm: "norm" or "value".
            optimizer: clip the gradients of its parameters together, apart from others; None: those of all parameters.

        Raises:
            ValueError: for a limit or an algorithm that cannot be.
        """
        clipping = Clipping(limit, algorithm)
        clipping.check()
        held = self._parameters.keys() if optimizer is None else self._record.hold(optimizer)
        names = frozenset(name for name in held if self._parameters[name].numel())
        if names:
            self._reducer.clippings[None if optimizer is None else id(optimizer)] = clipping, names

    def clipping_of(self, optimizer: torch.optim.Optimizer | None = None) -> Clipping | None:
        """What the gradients of an optimizer's parameters are clipped to before the exchange from the next step on."""
        found = self._reducer.clippings.get(None if optimizer is None else id(optimizer))
        return None if found is None else found[0]

    def clipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients of an optimizer's parameters were clipped before the latest exchange."""
        return bool(self._reducer.clipped & {None, id(optimizer)})

    def count_as_applied(self) -> None:
        """What the latest exchange handed out has been applied, or never will be: between two steps.

        The engine notices by itself that optimizers step. This is for steps that are left out.
        """
        self._record.count_as_applied()

    def warn(self, kind: str, sentence: str) -> None:
        """Tell the user on rank zero; all ranks call this in the same step, and count the warning."""
        sentence = f"sparse_ddp at step {self.step}: {sentence}"
        self.warnings.append(sentence)
        if self.comm.rank == 0:
            if self.on_warning is not None:
                self.on_warning(kind, sentence)
            rank_zero_warn(sentence)

    def _warn_once(self, sentence: str) -> None:
        """Tell the user on rank zero, which is one rank also where nobody has told processes their ranks."""
        if self.comm.rank == 0 and sentence not in self._told:
            self._told.add(sentence)
            rank_zero_warn(sentence)

    def add_observer(self, observer: StepObserver) -> None:
        """Let something look on, and change groups, at the start of every exchange; until the engine is closed."""
        self.observers.append(observer)

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters by name, in order of registration."""
        return dict(self._parameters)

    @property
    def device(self) -> torch.device:
        """Where gradients live."""
        return self._device

    @property
    def totals(self) -> Totals:
        """What this rank has sent in all steps so far, and how long it took; may be that of an engine before."""
        return self._reducer.totals

    @totals.setter
    def totals(self, totals: Totals) -> None:
        self._reducer.totals = totals

    @property
    def held_up_seconds(self) -> float:
        """How long the host stood still inside backward so far, on a CPU; 0 on devices, where streams wait instead."""
        return self._reducer.held_up_seconds

    @property
    def overlaps_backward(self) -> bool:
        """Whether exchanges go on beside backward: on a stream or a thread of their own."""
        return self._reducer.overlaps_backward

    @property
    def closed(self) -> bool:
        """Whether the engine has ended."""
        return self._closed

    @property
    def direct(self) -> bool:
        """Whether buckets are averaged just as DDP does, past the groups."""
        return self._reducer.direct

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
        self._reducer.direct = bool(self.comm.all_gather(sent).all())
        return self._reducer.direct

    @property
    def groups(self) -> list[GroupReducer]:
        """Groups at work, in the order of the plan."""
        return self._reducer.groups

    @property
    def plan(self) -> list[Group]:
        """The groups, in the order in which backward is expected to finish them."""
        return [group.plan for group in self.groups]

    @property
    def messages(self) -> Messages:
        """What travels together: the messages of each "group", or those of all groups of a "step"."""
        return self._reducer.messages

    def regroup(self, plan: Sequence[Group], messages: Messages | None = None) -> None:
        """Cut the parameters into other groups, from the next step on; collective, between two steps.

        What is remembered of gradients belongs to parameters and moves with them: no residual and no momentum is lost.
        What sparsifiers and density schedules have learned about a group, such as thresholds, belongs to the group and
        starts anew. The residual of a parameter that becomes dense is sent in the next step.

        Args:
            plan: groups of the same parameters, see :func:`~lightning_sparse.plan.make_plan`.
            messages: what travels together from then on; None: as before.

        Raises:
            ValueError: on all ranks, if these are not the parameters of this engine, each once, or if names of groups
                repeat.
            RuntimeError: within a backward; on all ranks, if their plans differ.

        Example:
            >>> import tempfile, torch, lightning_sparse as ls
            >>> import torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> from lightning_sparse.plan import make_plan
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
        self._check_between_steps("Groups can only be changed")
        chosen = messages or self.messages
        facts = {"settings": self.settings, "groups": list(plan), "messages": chosen}
        check_equal_on_ranks(facts, self.comm, self._device)
        check_covers(plan, self._parameters)
        self._reducer.regroup(plan, chosen)
        if self.optimizers:
            self._suit(self.optimizers)

    def receive(self, bucket: Any) -> Future[Tensor]:
        """DDP's communication hook: take the gradients of a ``GradBucket``, answer with averages in its own buffer."""
        self.hook_calls += 1
        if self._closed:
            raise RuntimeError("The engine is closed. Wrap the model again and attach a new one to train on.")
        return self._reducer.receive(bucket)

    def _before_exchange(self) -> None:
        """The first gradients of a step are here."""
        with self._reducer.failing_together("before the first exchange"):
            thawed = [name for name, p in self.frozen.items() if p.requires_grad]
            if thawed:
                raise RuntimeError(
                    f"The parameter {thawed[0]} needs gradients now, and did not when DistributedDataParallel was "
                    "built, which therefore would not average them. Wrap the model again, attach a new engine and give "
                    "it the state_dict() of this one. (The strategies do so by themselves, between two steps.)"
                )
            if not self.optimizers:  # nobody has shown any: those of this package are found
                self._suit(made_for({id(p) for p in self._parameters.values()}))
            for observer in self.observers:
                observer.before_step(self)
            if self.settings.lr_aware:
                self._reducer.rescale()

    def summary(self) -> dict[str, float]:
        """The logged quantities of the latest step, see :data:`~lightning_sparse.metrics.QUANTITIES`.

        Collective: all ranks must call this together, between two steps. Empty before the first step. Groups that the
        latest step did not use, on any rank, count for their residuals alone.

        Raises:
            RuntimeError: within a step.
        """
        step = self.latest_step()
        return {} if step is None else summarize(step, self.mean_over_ranks)

    def latest_step(self) -> Step | None:
        """What all groups did in the latest step on this rank, between two steps; None before the first one.

        Of it, :func:`~lightning_sparse.metrics.summarize` and the metrics of :mod:`lightning_sparse.averages` make
        numbers.

        Raises:
            RuntimeError: within a step.
        """
        self._check_between_steps("Summaries can only be asked for")
        norms = [group.residual_norm() for group in self.groups]
        if self._reducer.direct:
            numel, sent = sum(p.numel() for p in self._parameters.values()), self._reducer.direct_bytes
            return Step.dense(numel, sent, norms, self.void_steps, self.totals, len(self.warnings))
        statistics = [group.statistics for group in self.groups if group.ran and group.statistics is not None]
        if not statistics:
            return None
        return Step(
            statistics,
            norms,
            self._reducer.exposed_ms(),
            self.void_steps,
            shared_bytes=self._reducer.shared_bytes,
            totals=self.totals,
            warnings=len(self.warnings),
        )

    def group_summaries(self) -> dict[str, dict[str, float]]:
        """Like :meth:`summary`, for each group by name; without what groups share, such as ``exposed_ms``.

        Groups that the latest step did not use, on any rank, are left out.
        """
        self._check_between_steps("Summaries can only be asked for")
        summaries: dict[str, dict[str, float]] = {}
        for group in [] if self._reducer.direct else self.groups:
            if group.ran and group.statistics is not None:
                step = Step([group.statistics], [group.residual_norm()])
                summaries[group.plan.name] = summarize(step, self.mean_over_ranks)
        return summaries

    def residual(self, name: str) -> Tensor | None:
        """What this rank has not sent yet of a parameter, (numel,), or None where nothing is remembered.

        A view, which is valid until the next step begins.
        """
        group = self._reducer.group_of[name]
        residual = group.memory.residual(group.state.memory)
        return None if residual is None else residual[group.spans[name]]

    def flush_next_step(self) -> None:
        """Exchange everything densely in the next step that counts, so that no residual is left.

        All ranks must call this between the same two steps; within a step, it means the one after it. A rank that does
        so alone sends messages of another length: the step ends with an error on all ranks, which says that ranks have
        drifted apart where messages still fit, and otherwise is one of the network. With gloo, that may be the end of
        the process, or an error no earlier than the timeout.

        What a parameter remembers that the step does not use stays.
        """
        self._reducer.flush_asked = True

    def take_pending(self) -> dict[str, Tensor]:
        """What all ranks together have not sent yet, ``(1/n) sum_i residual_i``, and forget it; collective.

        Between two steps. The momentum of memories that have one is kept. See :func:`~lightning_sparse.flush`, which
        gives this to the optimizers.

        Returns:
            The pending average of each parameter that has a residual, of the parameter's shape and dtype.

        Raises:
            RuntimeError: within a step.
        """
        self._check_between_steps("Residuals can only be taken")
        self._skipped.resolve()
        if self.settings.lr_aware and self._reducer.rates.known:
            self._reducer.rescale()
        with self._reducer.on_stream.between_steps():
            pending, sent = average_residuals(self.groups, self._parameters, self.comm, self._device)
            self.totals.add(sent, 0.0)
            emptied = dict.fromkeys(pending, 0.0)
            with self._record.lock:
                self._record.flush([group.version.scaled(emptied) for group in self.groups], pending.keys())
        return pending

    @property
    def moment(self) -> Tensor:
        """Which of the states that this rank holds belongs to its weights, for :meth:`state_dict`: int64.

        Ranks may be asked at different moments, one before its optimizer's step and another one after it. What rank 0
        has here is what all ranks have to save beside the weights of rank 0.
        """
        return torch.tensor(self._record.numbers(self._record.history), device="cpu")

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
        self._reducer.on_stream.synchronize()
        with self._record.lock:
            history = self._record.history
            numbers = self._record.numbers(history) if moment is None else moment.tolist()
            if max(numbers) > history.latest.number:
                history = self._reducer.soon()
            return capture(history, numbers, list(self._parameters), self._parked, self.settings.algorithm, self.comm)

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

    def _load(self, state: Mapping[str, Any]) -> Misfits:
        """Nothing changes before all ranks know that all of them can."""
        self._skipped.resolve()
        if (
            type(self._chosen_memory) is Adapting
            and not self.optimizers
            and (memory := named_in(state.get("settings")))
        ):
            self._remember_by(memory)
        draft = load(lambda: self._draft(state), state, self.comm, self._device)
        counts = self._record.latest.counts._replace(step=state["step"], void=state["void_steps"])
        if self._reducer.flush_at is not None:
            self._reducer.flush_at = counts.step if self._reducer.flush_at == self.step else None
        self._reducer.rates.load(state["rates"], state.get("surplus", {}))
        self._reducer.adopt(draft.groups, counts)
        self._parked = parked(state, self.frozen)
        self.loads += 1
        self._reducer.on_stream.synchronize()
        return draft.misfits

    def _draft(self, state: Mapping[str, Any]) -> Draft:
        algorithm, n = self.settings.algorithm, self.comm.world_size
        with self._reducer.on_stream.between_steps():
            return draft_of(state, self.plan, self._reducer.form, self.frozen, algorithm, n)

    def close(self) -> None:
        """Stop the communication thread, give the process group back, stop watching parameters."""
        self._closed = True
        for observer in self.observers:
            observer.close()
        self._adam_steps.close()
        self._reducer.close()

    def __reduce__(self) -> tuple[type[CopiedEngine], tuple[()]]:
        """A copy, pickled or not, is a :class:`CopiedEngine`."""
        return CopiedEngine, ()

    def _check_between_steps(self, what: str) -> None:
        """Raise within a step, whose messages may go on, on a thread of their own."""
        if any(group.arrived for group in self.groups):
            raise RuntimeError(
                f"{what} between two steps, not within a backward, nor between several ones of which one step is made."
            )

    def mean_over_ranks(self, x: Tensor) -> Tensor:
        """The mean of a small vector on the CPU; collective."""
        if self._closed and self.comm.world_size > 1:
            raise RuntimeError(
                "The engine is closed: ask for summaries before the end of fit, in on_train_end at the latest."
            )
        return self.comm.all_reduce(x.to(self._device)).cpu() / self.comm.world_size
