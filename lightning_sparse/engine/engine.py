"""The engine, which exchanges the gradients of a model. Methods that only read it are in its base class."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.core.checks import expect
from lightning_sparse.engine.agreement import Note, by_reason, check_equal_on_ranks
from lightning_sparse.engine.backward import BackwardEnd
from lightning_sparse.engine.clipping import clip_by_norm
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.binding import OptimizerBinding
from lightning_sparse.engine.record import Counts
from lightning_sparse.engine.regrouping import check_covers
from lightning_sparse.engine.share import Share
from lightning_sparse.engine.state.schema import renamed
from lightning_sparse.engine.state.state import EngineState
from lightning_sparse.engine.step import Stepper
from lightning_sparse.engine.view import CopiedEngine, EngineView
from lightning_sparse.methods.grouping import Group
from lightning_sparse.methods.memory import NoMemory
from lightning_sparse.ops import static_shapes
from lightning_sparse.ops.on_cuda import on_cuda


class Engine(EngineView):
    """Exchanges the gradients of a model group by group; made by :func:`~lightning_sparse.attach`.

    Args:
        plan: groups that cover all parameters; whole ones, also where this rank has parts of them.
        parameters: by the names used in the plan.
        settings: checked choices.
        comm: the ranks; closed with the engine.
        device: where gradients live.
        watch_usage: note which parameters took part in a backward. Needed where a backward may leave some out.
        frozen: parameters that need no gradient, by name.
        share: what this rank exchanges of each gradient; None: all that it has. Closed with the engine.
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
        share: Share | None = None,
    ) -> None:
        left_open, open_exchange = settings.memory is None, settings.exchange is None
        settings = replace(settings, memory=settings.memory_in_use, exchange=settings.exchange_in_use)
        self.frozen = dict(frozen or {})
        """Parameters of the model that needed no gradient when it was wrapped."""
        self.observers: list[StepObserver] = []
        self._called: list[StepObserver] = []
        """:attr:`observers` that have not said yet that they are done."""
        self.on_warning: Callable[[str, str], None] | None = None
        """Called on rank zero with the kind of each warning and the sentence, for those who pass it on."""
        number = comm.broadcast(torch.tensor([secrets.randbits(62)], device=device), 0)
        if share is not None:
            number = share.within.broadcast(number, 0)
        self.run_id = f"{int(number):016x}"
        """Equal on all ranks, and different for every engine."""
        for network in (comm, share.within) if share else (comm,):
            network.listen(self.run_id)
        stepper_of, source_of = (Stepper, BackwardEnd) if not settings.overlap else _overlapped()
        stepper = stepper_of(parameters, settings, comm, device, self._before_exchange, watch_usage, share)
        super().__init__(stepper)
        try:
            with stepper.on_stream.between_steps():
                groups = [stepper.form(group) for group in self._parts_of(plan)]
            stepper.adopt(groups, Counts())
        except BaseException:
            stepper.close()
            raise
        self._source = source_of(stepper)
        stepper.on_skipped = self._after_skipped_step
        self._compared_kernels = False
        self._binding = OptimizerBinding(stepper, left_open, open_exchange, lambda: self._source.unfinished)
        stepper.optimizers = lambda: self._binding.optimizers
        self._state = EngineState(stepper, self._binding, self.frozen)
        if not left_open:  # else optimizers settle the memory
            stepper.prepare()

    @property
    def settings(self) -> SparsificationConfig:
        """The choices in effect; open choices of memory and exchange are settled by the optimizers."""
        return self.stepper.settings

    def _show(self, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        """Say which optimizers there are before they step, in place of those that were shown before.

        The engine finds them when they step first. Hosts that know them show them, so that settings are checked, and
        states loaded, before that.

        Raises:
            ValueError: if one does not go with the memory or the sparsifier, or is no optimizer.
        """
        self._binding.show(optimizers)
        self.stepper.prepare()

    def _warn(self, kind: str, sentence: str) -> None:
        """Tell the user on rank zero; all ranks call this in the same step, and count the warning."""
        sentence = f"sparse_ddp at step {self.step}: {sentence}"
        self.warnings.append(sentence)
        if self._rank == 0:
            if self.on_warning is not None:
                self.on_warning(kind, sentence)
            rank_zero_warn(sentence)

    def _add_observer(self, observer: StepObserver) -> None:
        """Call an observer, which may change groups, at the start of every exchange until it is done.

        Raises:
            ValueError: for an object without the methods of a :class:`StepObserver`.
        """
        expect(can_observe(observer), "observer", "an object with before_step(engine) and close()", observer)
        self.observers.append(observer)
        self._called.append(observer)

    def _go_direct(self, for_good: bool = False) -> bool:
        """Average DDP's buckets just as DDP does without a hook, until groups change; for plans that are all dense.

        Returns False, with nothing changed, before residuals have been sent (in the first valid step of a dense plan),
        with memories that also act on dense groups, such as momentum, and where ranks exchange parts. Residuals that
        are still left, of parameters that the step did not use and of rounding, are kept until groups change again.
        Collective: all ranks get the same answer.

        Args:
            for_good: forget second moments and other values that only sparse steps need.
        """
        simple = isinstance(self.settings.memory_in_use.for_dense(), NoMemory) and not self.stepper.share.cuts
        dense = all(group.plan.dense for group in self.stepper.groups)
        if not (simple and dense and all(self._all_gather_object(all(group.sent for group in self.stepper.groups)))):
            return False
        self.stepper.regroup(self.groups, direct=True, for_good=for_good)
        return True

    def regroup(self, plan: Sequence[Group]) -> None:
        """Cut the parameters into other groups, from the next step on; collective, between two steps.

        Residuals and momenta belong to parameters and move with them: none is lost. States of sparsifiers, such as
        thresholds, belong to groups and start anew. The residual of a parameter that becomes dense is sent in the next
        step.

        Args:
            plan: groups of the same parameters, see :func:`~lightning_sparse.methods.grouping.make_plan`; whole ones,
                also where this engine has parts of them.

        Raises:
            ValueError: on all ranks, if these are no groups or not the parameters of this engine, each once, if names
                of groups repeat, or if a rank has nothing of a group.
            RuntimeError: within a backward; on all ranks, if their plans differ.

        Example:
            >>> import tempfile, torch, lightning_sparse as ls
            >>> import torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> from lightning_sparse.methods.grouping import ParameterSize, make_plan
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
            >>> model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
            >>> ddp = DistributedDataParallel(model)
            >>> engine = ls.attach(ddp, grouping="model", single_device="sparse")
            >>> sizes = [ParameterSize.of(name, p) for name, p in model.named_parameters()]
            >>> engine.regroup(make_plan(sizes, "layer"))
            >>> [group.name for group in engine.groups]
            ['1', '0', 'dense.bucket0']
            >>> engine.close()
            >>> dist.destroy_process_group()
        """
        self._check_between_steps("Groups can only be changed")
        groups = list(plan) if isinstance(plan, Iterable) else plan
        facts = {"settings": self.settings, "groups": groups}
        for network in self.networks:  # one after the other: what differs in one network is an error for all of them
            with self._failing_together():
                check_equal_on_ranks(facts, network, self.device)
        check_covers(groups, self.stepper.parameters)
        parts = self._parts_of(groups)
        self.stepper.regroup(parts)
        if self._binding.optimizers:
            self._binding.suit(self._binding.optimizers)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the gradients of backwards within the context alone: somebody else averages them, or nobody does.

        Example:
            >>> import tempfile, torch, lightning_sparse as ls
            >>> import torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
            >>> ddp = DistributedDataParallel(torch.nn.Linear(20, 20))
            >>> engine = ls.attach(ddp, single_device="sparse")
            >>> with engine.paused():
            ...     ddp(torch.ones(1, 20)).sum().backward()
            >>> engine.step
            0
            >>> engine.close()
            >>> dist.destroy_process_group()
        """
        stepper = self.stepper
        before, stepper.paused = stepper.paused, True
        try:
            yield
        finally:
            stepper.paused = before

    @contextmanager
    def agreed(self, together: bool = False) -> Iterator[None]:
        """Let parameters hold the weights that all ranks agree on, within the block.

        With :class:`~lightning_sparse.memories.Drift`, each rank trains a copy of its own. Evaluate, export and average
        weights in here; each rank may do so by itself. ``state_dict()`` of the model has the agreed weights anyway.
        Parameters that somebody has written to since the last step are left as they are, and what is written within the
        block stays. With other memories, all ranks have the same weights, and nothing happens.

        Args:
            together: average what somebody has written to since the last step, such as clamped weights, over ranks
                first; all ranks enter the block then.

        Example:
            >>> import tempfile, torch, lightning_sparse as ls
            >>> import torch.distributed as dist
            >>> from torch.nn.parallel import DistributedDataParallel
            >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
            >>> model = torch.nn.Linear(20, 20, bias=False)
            >>> ddp = DistributedDataParallel(model)
            >>> engine = ls.attach(ddp, memory="drift", density=0.1, single_device="sparse")
            >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            >>> before = model.weight.detach().clone()
            >>> ddp(torch.ones(1, 20)).sum().backward()
            >>> optimizer.step()                          # moves all weights of this rank
            >>> int((model.weight != before).sum())
            400
            >>> with engine.agreed():                     # 40 of them have been sent
            ...     int((model.weight != before).sum())
            40
            >>> engine.close()
            >>> dist.destroy_process_group()
        """
        if together:
            self.stepper.follow_changes()
        with self.stepper.copies.agreed():
            yield

    def exchange(self, parameters: Tensor | Iterable[Tensor]) -> bool:
        """Exchange the gradients of parameters before an optimizer that is none of torch's steps them; collective.

        Optimizers of torch do so by themselves when they step. Averages take the place of gradients; what is done to
        them afterwards is the caller's.

        Args:
            parameters: of the model; all that the optimizer will step.

        Returns:
            False if no rank may take the step, because a gradient was not finite; gradients are zeros then.

        Raises:
            ValueError: for parameters of which the engine has none.
            RuntimeError: on all ranks, if they do different things.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        names = {self.stepper.names[id(p)] for p in given if id(p) in self.stepper.names}
        expect(bool(names), "parameters", "parameters of the engine's model", f"{len(given)} others")
        return self._binding.exchange([name for name in self.stepper.parameters if name in names])

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip gradients by the norm of their mean over ranks, between backward and step; collective.

        This has the arguments of ``torch.nn.utils.clip_grad_norm_``, and returns what that returns behind plain DDP,
        where ``.grad`` is the mean: the norm of all parameters together, equal on all ranks. All ranks scale their own
        gradients by one factor. Below a density of 1 the norm is estimated from a sketch of 16 KB, with a spread of
        1.1 %, see :func:`~lightning_sparse.ops.sketch.sketch`.

        Args:
            parameters: of the model, and maybe others.
            max_norm: of the mean gradient.
            norm_type: 2; with others, such as infinity, each rank's own norm is taken.
            error_if_nonfinite: raise if the norm is not finite, on all ranks.
            foreach: see torch.

        Returns:
            () the norm before clipping.

        Raises:
            RuntimeError: on all ranks, if they do different things.
        """
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return clip_by_norm([self.stepper], given, max_norm, norm_type, error_if_nonfinite, foreach)

    def _receive(self, bucket: Any) -> Future[Tensor]:
        """Take the gradients of a ``GradBucket`` and return averages in its buffer: DDP's communication hook."""
        if self.closed:
            raise RuntimeError("The engine is closed. Wrap the model again and attach a new one to train on.")
        if self.stepper.paused:
            buffer: Tensor = bucket.buffer()
            left: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
            left.set_result(buffer)
            return left
        return self._source.receive(bucket)

    def _before_exchange(self) -> None:
        """Check frozen parameters and call observers, with the first gradients of a step."""
        try:
            thawed = [name for name, p in self.frozen.items() if p.requires_grad]
            if thawed:
                raise RuntimeError(
                    f"The parameter {thawed[0]} needs gradients now, and did not when DistributedDataParallel was "
                    "built, or the engine attached, so that nobody would average them. Wrap the model again, "
                    "attach a new engine and give it the state_dict() of this one. (The strategies for "
                    "DDP do so by themselves, between two steps.)"
                )
            self._binding.begin_step()
            if not self._compared_kernels:
                self._compare_kernels()
            for observer in list(self._called):
                if observer.before_step(self) is True:
                    self._called.remove(observer)
        except Exception as error:
            self.stepper.locate(error, "before the first exchange")
            raise

    def _after_skipped_step(self) -> None:
        """Call observers that ask for it: no exchange calls them where every step is skipped."""
        for observer in list(self._called):
            getattr(observer, "after_skipped_step", lambda engine: None)(self)

    def _compare_kernels(self) -> None:
        """Say which ranks alone do without kernels in Triton, in the first step: the others wait for them."""
        self._compared_kernels = True
        if static_shapes(self.device) and self.comm.world_size > 1:
            self.stepper.prepare()
            problems = self.comm.all_gather_object(on_cuda.problems, self.device)
            if len(set(problems)) > 1:
                notes = by_reason([Note("", problem) for problem in problems])
                self._warn(
                    "kernels",
                    "some ranks use operations of torch in place of kernels in Triton, which take longer, and the "
                    f"others wait for them in every step: {notes}.",
                )

    def _flush_next_step(self) -> None:
        """Exchange everything densely in the next step that counts, so that no residual is left.

        All ranks must call this between the same two steps; within a step, it means the one after it. A rank that does
        so alone sends messages of another length: the step ends with an error on all ranks, which says that ranks have
        drifted apart where messages still fit, and otherwise is one of the network. With gloo, that may be the end of
        the process, or an error no earlier than the timeout.

        Parameters that the step does not use keep their residuals.
        """
        self.stepper.flush_asked = True

    def _meet_weights(self) -> float:
        """Average copies of the weights densely, see :meth:`.Groups.meet_weights`; collective, between two steps."""
        if any(group.drifts for group in self.stepper.groups):
            self._check_between_steps("Weights can only be averaged")
        return self.stepper.meet_weights()

    def _take_pending(self) -> dict[str, Tensor]:
        """Return the mean of the ranks' residuals, ``(1/n) sum_i residual_i``, and clear these; collective.

        Between two steps. The momentum of memories that have one is kept. See :func:`~lightning_sparse.flush`, which
        gives this to the optimizers.

        Returns:
            The pending average of each parameter that has a residual, of the parameter's shape and dtype.

        Raises:
            RuntimeError: within a step.
        """
        self._check_between_steps("Residuals can only be taken")
        return self.stepper.take_pending()

    def _parts_of(self, plan: Sequence[Group]) -> list[Group]:
        """Return groups with the sizes of what this rank has of their parameters."""
        lengths = {name: place.length for name, place in self.stepper.share.places.items()}
        parts = [group.resized(lengths) for group in plan]
        empty = [group.name for group in parts if not group.numel]
        meets = lengths and not self.stepper.share.cuts  # else averages are put together with those of other ranks
        for rank, names in enumerate(self._all_gather_object(empty) if meets else ()):
            if names:
                raise ValueError(
                    f"Expected groups of which each rank has some coordinates, but rank {rank} has none of group "
                    f"{names[0]!r}. Choose a coarser grouping, such as 'bucket' or 'model', or fewer ranks that "
                    "share a parameter."
                )
        return parts

    def state_dict(self, moment: Tensor | None = None) -> dict[str, Any]:
        """Return everything that this rank needs to continue from here: plain data, and copies of tensors on the CPU.

        Every rank has its own: residuals differ. It may be taken at any moment, also in a signal handler and by another
        thread. In a handler that runs while this rank waits for others in an exchange, the residuals hold the gradients
        of this step. The state of rank 0, whose weights are saved, has the averages that no optimizer has applied yet;
        loading puts them back into the residuals. For another number of ranks, see
        :func:`~lightning_sparse.merge_states`.

        Ranks may be asked at different moments, one before the end of an exchange and another one after it. Their
        states belong together if each rank takes one, all agree on the largest ``state["moment"]``, and a rank whose
        own is smaller takes another one, of that moment.

        Args:
            moment: (1,) the state after so many exchanges and flushes, as another rank has taken it: this rank waits
                until it has settled as many, and for no more. None: the latest one.

        Returns:
            ``moment``: how many exchanges and flushes of this engine have settled; ``step``, ``skipped_steps``,
            ``rank``, ``world_size``, ``settings``; ``part``: the number of this rank among those that have other
            parts of the same gradients, and how many these are, or nothing; ``parameters`` and ``counters``: what is
            remembered of each, by name; ``spans``: which coordinates of each parameter, as first one, number, and
            number of all; ``pending``: averages that are not applied; ``absorbed``: parameters of which a gradient
            was absorbed that is not exchanged; ``optimizers``: what optimizers keep of weights that drift;
            ``groups``: what sparsifiers have learned.

        Raises:
            RuntimeError: if this rank is past the given moment, or does not get there; or if an error has ended a step
                while residuals were being changed.
        """
        return self._state.take(moment)

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from the state of an engine of the same model; collective, before the first or between two steps.

        Residuals and momenta are matched by names of parameters. States of sparsifiers and schedules are taken over for
        groups that are the same, with the same settings and number of ranks, on all ranks; others start anew.

        Args:
            state: of :meth:`state_dict` on this rank, or of :func:`~lightning_sparse.merge_states`.

        Returns:
            Sentences about parts of the state that did not fit; none if the two engines are alike.

        Raises:
            ValueError: on all ranks, with nothing changed, if this is no such state on one of them, or if the states of
                the ranks do not belong together.
        """
        self._check_between_steps("A state can only be loaded")
        plan = self._state.load(state)
        return plan.misfits + plan.lost

    def _hand_over(self) -> dict[str, Any]:
        """Return the state for an engine that takes the place of this one, see :meth:`_take_over`.

        Optimizers keep what they have; the state has only what they have not been given yet.
        """
        return {**self.state_dict(), "optimizers": self._binding.waiting_states}

    def _take_over(self, state: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> list[str]:
        """Continue from the state of an engine of the same parameters, whose names and groups may differ; collective.

        Args:
            state: of :meth:`_hand_over` of that engine, on this rank.
            parameters: by the names that they have in the state; residuals of others are dropped.

        Returns:
            Sentences about residuals and momenta that did not fit. States of groups that no longer exist start anew
            without a sentence, as with :meth:`regroup`.

        Raises:
            ValueError: as :meth:`load_state_dict`.
        """
        self._check_between_steps("A state can only be loaded")
        now = {id(p): name for name, p in {**self.stepper.parameters, **self.frozen}.items()}
        kept, gone = renamed(state, {name: now[id(p)] for name, p in parameters.items() if id(p) in now})
        return gone + self._state.load(kept).lost

    def close(self) -> None:
        """Give the process groups back, and stop watching parameters and optimizers.

        Each rank does so by itself. Gradients that were not exchanged before stay its own, and an optimizer that would
        step with them raises an error.
        """
        self.closed = True
        for observer in self.observers:
            observer.close()
        self._binding.close()
        self.stepper.copies.close()
        self.stepper.close()

    def __reduce__(self) -> tuple[type[CopiedEngine], tuple[()]]:
        """Let a copy, pickled or not, be a :class:`CopiedEngine`."""
        return CopiedEngine, ()


def _overlapped() -> tuple[Any, Any]:
    """Return what exchanges within backward, which nobody else needs."""
    from lightning_sparse.engine.overlap import Overlapped, OverlappedBackward

    return Overlapped, OverlappedBackward


class StepObserver(Protocol):
    """Interface of observers: called at the start of every step of an engine, whose groups they may change."""

    def before_step(self, engine: Engine) -> bool | None:
        """Called on all ranks when the first gradients of a step are here and nothing is exchanged yet.

        Returns:
            True: done, do not call this again.
        """

    def close(self) -> None:
        """End with the engine, also when done."""


def can_observe(given: Any) -> bool:
    """Return True if something has the methods of a :class:`StepObserver`."""
    return all(callable(getattr(given, name, None)) for name in ("before_step", "close"))
