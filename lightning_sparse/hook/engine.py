"""From DDP's buckets to groups, through the pipeline, and back.

DDP hands over gradients in buckets whose composition changes after the first iteration. The engine keeps groups of its
own over parameter names: a group runs as soon as its last piece has arrived, and a bucket is answered as soon as all
groups with a piece in it have run. *When and where* a group runs is up to an executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import Parameter

from lightning_sparse.collective import TorchCollective, ring_all_reduce_bytes
from lightning_sparse.grouping import Group
from lightning_sparse.hook.executors import Executor, Inline, Threaded
from lightning_sparse.hook.running import Delivery, Running
from lightning_sparse.hook.settings import Settings, check_equal_on_ranks
from lightning_sparse.memory import NoMemory
from lightning_sparse.statistics import Stamp, summarize, summarize_direct
from lightning_sparse.types import Context


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
        watch_usage: note which parameters took part in a backward. Needed where a backward may leave some out.
    """

    def __init__(
        self,
        plan: Sequence[Group],
        parameters: dict[str, Parameter],
        settings: Settings,
        comm: TorchCollective,
        watch_usage: bool = False,
    ) -> None:
        self.settings = settings
        self.comm = comm
        self.step = 0
        """Synchronised backward passes so far."""
        self.hook_calls = 0
        self._closed = False
        self._names = {id(p): name for name, p in parameters.items()}
        self._device = next(iter(parameters.values())).device
        self._used: set[str] | None = set() if watch_usage else None
        self._watchers = [
            p.register_post_accumulate_grad_hook(Watcher(name, self._used))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
            if self._used is not None
        ]
        self._parameters = parameters
        self._adopt([self._start(group) for group in plan])
        on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None  # type: ignore[no-untyped-call]
        threaded = settings.executor == "thread" or (
            settings.executor == "auto" and not on_cuda and comm.world_size > 1
        )
        self._executor: Executor = Threaded(self._device) if threaded else Inline()
        self._exposed: Callable[[], float] = lambda: 0.0
        self._held_up_before = 0.0
        self._begun = False
        self.tuners: list[Tuner] = []
        self._direct = False

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
            >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
            >>> engine = ls.attach(DistributedDataParallel(model), grouping="model")
            >>> sizes = [p for group in engine.plan for p in group.parameters][::-1]
            >>> engine.regroup(make_plan(sizes, "layer"))
            >>> [group.name for group in engine.plan]
            ['1', '0']
            >>> engine.close()
            >>> dist.destroy_process_group()
        """
        if any(group.arrived for group in self.groups):
            raise RuntimeError("Groups can only be changed between two steps, not within a backward.")
        check_equal_on_ranks((self.settings, list(plan)), self.comm, self._device)
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
        with self._on_stream():
            for group in plan:
                before = {p.name: self._group_of[p.name] for p in group.parameters}
                running = self._start(group, flush=any(old.remembers for old in before.values()))
                for name, old in before.items():
                    running.carry(name, old)
                groups.append(running)
        self._adopt(groups)
        self._direct = False

    def _start(self, group: Group, flush: bool = False) -> Running:
        ctx = Context(self.step, self.settings.density(self.step), self.comm.rank, self.comm.world_size)
        return Running(group, self._parameters, self.settings, ctx, flush)

    def _adopt(self, groups: list[Running]) -> None:
        self.groups = groups
        self._group_of = {p.name: group for group in groups for p in group.plan.parameters}
        self._model_numel = sum(g.plan.numel for g in groups if not g.plan.dense) or None

    def receive(self, bucket: Any) -> Future[Tensor]:
        """DDP's communication hook: take the gradients of a ``GradBucket``, answer with averages in its own buffer."""
        self.hook_calls += 1
        buffer = bucket.buffer()
        if not self._begun:
            self._begun = True
            for tuner in self.tuners:
                tuner.before_step(self)
        if self._direct:
            return self._pass_on(bucket)
        delivery = Delivery(buffer)
        for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[id(parameter)]
            start = view.storage_offset() - buffer.storage_offset()
            self._group_of[name].receive(name, delivery, start)
        begin = Stamp.now(self._device)
        for group in dict.fromkeys(self._group_of[self._names[id(p)]] for p in bucket.parameters()):
            if group.complete:
                self._submit(group)
        if bucket.is_last():
            self._finish(begin)
        return delivery.future

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Where groups run."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _submit(self, group: Running) -> None:
        ctx = Context(
            step=self.step,
            density=group.density(self.step),
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            model_numel=self._model_numel,
        )
        used = None if self._used is None else [p.name in self._used for p in group.plan.parameters]
        ready = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

        def job() -> None:
            with self._on_stream():
                if self._stream is not None and ready is not None:
                    self._stream.wait_event(ready)
                group.run(ctx, self.comm, used)

        self._executor.submit(job)

    def _finish(self, begin: Stamp) -> None:
        """The last bucket is here: backward has nothing left to compute, so nothing is lost by waiting."""
        self._executor.drain()
        incomplete = [group.plan.name for group in self.groups if group.arrived]
        assert not incomplete, f"DDP delivered only some gradients of the groups {incomplete}"
        self._exposed = self._measure_exposed(begin)
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self._begun = False
        if self._used is not None:
            self._used.clear()

    def _pass_on(self, bucket: Any) -> Future[Tensor]:
        """Average a bucket just as DDP does without a hook."""
        last = bucket.is_last()
        if last:
            self._end_step()
        return self.comm.start_average(bucket.buffer(), wait=last)

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
            return summarize_direct(sent, [group.residual_norm() for group in self.groups], self._mean_over_ranks)
        seen = [group for group in self.groups if group.statistics is not None]
        if not seen:
            return {}
        norms = [group.residual_norm() for group in seen]
        statistics = [group.statistics for group in seen if group.statistics is not None]
        return summarize(statistics, norms, self._exposed(), self._mean_over_ranks)

    def group_summaries(self) -> dict[str, dict[str, float]]:
        """Like :meth:`summary`, for each group by name; without ``exposed_ms``, which no single group causes."""
        summaries: dict[str, dict[str, float]] = {}
        for group in [] if self._direct else self.groups:
            if group.statistics is not None:
                summary = summarize([group.statistics], [group.residual_norm()], 0.0, self._mean_over_ranks)
                del summary["exposed_ms"]
                summaries[group.plan.name] = summary
        return summaries

    def residual(self, name: str) -> Tensor | None:
        """(numel,) view of what this rank has not sent yet of a parameter, or None where nothing is remembered."""
        group = self._group_of[name]
        residual = group.memory.residual(group.state.memory)
        return None if residual is None else residual[group.spans[name]]

    def close(self) -> None:
        """Stop the communication thread, give the process group back, stop watching parameters."""
        self._closed = True
        for tuner in self.tuners:
            tuner.close()
        self._executor.close()
        for watcher in self._watchers:
            watcher.remove()
        self._watchers = []
        self.comm.close()

    def _mean_over_ranks(self, x: Tensor) -> Tensor:
        if self._closed and self.comm.world_size > 1:
            raise RuntimeError(
                "The engine is closed: ask for summaries before the end of fit, in on_train_end at the latest."
            )
        return self.comm.all_reduce(x.to(self._device)).cpu() / self.comm.world_size


class Watcher:
    """Notes that a parameter's gradient was computed since the last synchronised backward."""

    def __init__(self, name: str, used: set[str]) -> None:
        self.name = name
        self.used = used

    def __call__(self, parameter: Tensor) -> None:
        self.used.add(self.name)
