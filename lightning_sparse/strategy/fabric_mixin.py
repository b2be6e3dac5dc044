"""What the strategies of both Fabric packages have in common: everything.

Fabric wraps each module in DDP by itself, any number of them, and knows no communication hooks: every module gets an
engine of its own. The class translates between Fabric and the engines and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, ClassVar, Literal
from urllib.parse import quote

from torch.nn import Module
from torch.optim import Optimizer

from lightning_sparse.checkpoint import Resize, side_directory
from lightning_sparse.collective import TorchCollective
from lightning_sparse.density import DensitySchedule
from lightning_sparse.exchanges import Exchange
from lightning_sparse.grouping import Grouping, Rules
from lightning_sparse.hook import Engine
from lightning_sparse.interrupts import uninterrupted
from lightning_sparse.memory import Memory
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategy.door import (
    CHECKPOINT_KEY,
    TIMEOUT,
    Door,
    profile_of,
    refuse_unknown,
    without_defaults,
)
from lightning_sparse.strategy.earlier import Left
from lightning_sparse.tuning import Planner
from lightning_sparse.watch import WATCH, Watch


class FabricSparseDDPMixin(Door):
    """DDP whose gradient all-reduce is a sparsified exchange with error feedback, for Fabric.

    Everything else is Fabric's ``DDPStrategy``: launchers, cluster environments, ``fabric.no_backward_sync``. Clipping
    acts on the averages, after the exchange. Each module that is set up has an engine of its own; see
    :attr:`engines`. With one device nothing is communicated, and gradients still pass through the sparsifier.

    ``fabric.save`` writes what each rank remembers beside every checkpoint whose state holds a module and an optimizer;
    ``fabric.load`` into such a state lets the engines continue.

    Args:
        sparsifier: who picks which coordinates: an instance such as ``ExDyna(alpha=1.1)`` or a name such as "topk".
        density: share of coordinates to send, in (0, 1], or a schedule such as ``Warmup(0.25, 0.01, steps=500)``.
        memory: error feedback; None: ``Residual()``.
        exchange: how picks travel: an instance, a name such as "reduce_union", or None for the sparsifier's natural
            one.
        grouping: which gradients are looked at together: "layer", "bucket" (about ``bucket_cap_mb`` each), "model",
            or an instance such as ``MergeBelow(8192)`` or ``OptimalMerge()``.
        dense: shell-style patterns of parameter names that stay dense, next to those of ``rules``; each has to match in
            every module.
        rules: which parameters stay dense, and which have densities of their own; None: the default ones, see
            :class:`~lightning_sparse.Rules`.
        executor: "inline" exchanges inside DDP's hook (on CUDA on a stream of its own), "thread" on a communication
            thread while backward goes on; "auto" is "thread" between ranks on CPUs, else "inline".
        fallback: "dense" measures some sparse and some dense steps at the start, and again when the step time changes
            by much, and goes on with what is faster.
        nonfinite: where a gradient is not finite on some rank, all ranks agree, and residuals stay as they were. With
            loss scaling the scaler skips the step. Without: "skip" leaves the optimizer's step out on all ranks, "nan"
            hands NaN to it, as plain DDP does.
        lr_aware: keep what residuals are worth when the learning rate changes: multiply those of each parameter group
            by ``lr_old / lr_new``. For SGD; refused with optimizers that scale gradients by themselves, such as Adam.
        save_residuals: save what each rank remembers with ``fabric.save``; see docs/checkpoints.md.
        strict_resume: raise, on all ranks, where ``fabric.load`` finds no residuals that fit, instead of starting with
            empty ones and a warning.
        resize: what becomes of residuals with another number of ranks: "merge" gives every rank their mean, "flush"
            sends them in the first step, densely, "zero" drops them.
        watch: warns, on rank 0, of ranks that drift apart, residuals that grow, thresholds that are off, and of
            Adam's first moment, see :class:`~lightning_sparse.Watch`; None: does not.
        find_unused_parameters: as in ``DistributedDataParallel``.
        static_graph: as in ``DistributedDataParallel``.
        gradient_as_bucket_view: as in ``DistributedDataParallel``.
        bucket_cap_mb: as in ``DistributedDataParallel``; None: groups by bucket have its default of 25 MiB, and where
            exchanges go on beside backward (CUDA, "thread", no fallback) DDP hands gradients over in smaller pieces.
        broadcast_buffers: as in ``DistributedDataParallel``.
        accelerator: filled in by Fabric.
        parallel_devices: filled in by Fabric.
        cluster_environment: as in Fabric's ``DDPStrategy``.
        checkpoint_io: as in Fabric's ``DDPStrategy``.
        precision: filled in by Fabric.
        process_group_backend: as in Fabric's ``DDPStrategy``; None: by device.
        timeout: how long ranks wait for each other, in the exchange and elsewhere, before they end with an error; None:
            10 minutes.
        start_method: how Fabric starts the processes.
        others: refused with a sentence.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier; when it is set up, for an optimizer that does not go with the memory or with
            ``lr_aware``.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.FabricSparseDDPStrategy(sparsifier="topk", density=0.01, dense=["*.bias"])
        >>> strategy.settings.exchange
        GatherPairs()
        >>> ls.FabricSparseDDPStrategy(densty=0.01)
        Traceback (most recent call last):
        ...
        TypeError: SparseDDPStrategy does not know the keyword 'densty'. Did you mean density? ...
    """

    package: ClassVar[str]
    """The package whose Fabric takes this class."""

    def __init__(
        self,
        sparsifier: Sparsifier | str = "union_topk",
        density: float | DensitySchedule = 0.01,
        memory: Memory | None = None,
        exchange: Exchange | str | None = None,
        grouping: Grouping | str = "bucket",
        dense: Sequence[str] = (),
        rules: Rules | None = None,
        executor: str = "auto",
        fallback: Literal["dense"] | None = None,
        nonfinite: Literal["skip", "nan"] = "skip",
        lr_aware: bool = False,
        save_residuals: bool = True,
        strict_resume: bool = False,
        resize: Resize = "merge",
        watch: Watch | None = WATCH,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **others: Any,
    ) -> None:
        refuse_unknown(others)
        self._choose(
            sparsifier=sparsifier,
            density=density,
            memory=memory,
            exchange=exchange,
            grouping=grouping,
            dense=dense,
            rules=rules,
            executor=executor,
            fallback=fallback,
            nonfinite=nonfinite,
            lr_aware=lr_aware,
            save_residuals=save_residuals,
            strict_resume=strict_resume,
            resize=resize,
            watch=watch,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.optimizers: list[Optimizer] = []
        """Those that were set up."""
        self._wrapped: list[tuple[Any, Engine]] = []
        self._waiting: list[tuple[Module, Any, dict[str, Any]]] = []
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout or TIMEOUT,
            start_method=start_method,
            **without_defaults(
                find_unused_parameters=find_unused_parameters,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view,
                bucket_cap_mb=bucket_cap_mb,
                broadcast_buffers=broadcast_buffers,
            ),
        )  # type: ignore[call-arg]  # the next class in line is a DDPStrategy

    @property
    def engines(self) -> list[Engine]:
        """One for each module, in the order in which they were set up."""
        return [engine for _, engine in self._wrapped]

    @property
    def engine(self) -> Engine | None:
        """The only one; None before a module is set up.

        Raises:
            RuntimeError: if there are several.
        """
        engines = self.engines
        if len(engines) > 1:
            raise RuntimeError(f"There are {len(engines)} engines, one for each module: see strategy.engines.")
        return engines[0] if engines else None

    def engine_of(self, module: Module) -> Engine | None:
        """That of a module, as it was set up or as DDP wraps it."""
        return next((engine for ddp, engine in self._wrapped if module in (ddp, ddp.module)), None)

    def setup_module(self, module: Module) -> Any:
        """As in Fabric; the engine of a module that is set up again goes on where the one before was."""
        before, profile = self.engine_of(module), None
        left = None
        if before is not None:
            before.count_as_applied()
            left = Left.by(before)
            profile = profile_of(before)
            before.close()
            self._wrapped = [(ddp, engine) for ddp, engine in self._wrapped if engine is not before]
        loaded = next(((path, own) for waiting, path, own in self._waiting if waiting is module), None)
        if loaded is not None:
            self._waiting = [entry for entry in self._waiting if entry[0] is not module]
            profile = loaded[1].get("profile")
        self._check_equal_models(module)
        with self._small_deliveries(module):
            ddp = super().setup_module(module)  # type: ignore[misc]
        engine = self._attach(ddp, self.precision, profile)  # type: ignore[attr-defined]
        self._wrapped.append((ddp, engine))
        self._follow(engine)
        if loaded is not None:
            self._restore(engine, loaded[0], loaded[1].get("residuals"))
        elif left is not None:
            self._go_on(engine, left)
        return ddp

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """As in Fabric; then the engines have a look at it.

        Raises:
            ValueError: if it does not go with the memory or with ``lr_aware``.
        """
        chosen: Optimizer = super().setup_optimizer(optimizer)  # type: ignore[misc]
        self.optimizers.append(chosen)
        for engine in self.engines:
            self._follow(engine)
        return chosen

    def _follow(self, engine: Engine) -> None:
        own = {id(p) for p in engine.parameters.values()}
        applying = [o for o in self.optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
        self._follow_together(engine, applying)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """As in Fabric; a void step is left out where no loss scaler does so.

        Signals wait while the optimizer updates parameters.
        """
        closure: Callable[[], Any] | None = kwargs.pop("closure", None)

        def then_skip() -> Any:
            result = closure() if closure is not None else None
            self._skip_void(optimizer, self.precision)  # type: ignore[attr-defined]
            return result

        with uninterrupted(optimizer):
            if closure is None:
                then_skip()
                return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
            return super().optimizer_step(optimizer, closure=then_skip, **kwargs)  # type: ignore[misc]

    def clip_gradients_norm(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Fabric; where no loss scaler does so, a void step is left out before its norm is looked at."""
        self._skip_void(optimizer, self.precision, drop=True)  # type: ignore[attr-defined]
        return super().clip_gradients_norm(module, optimizer, *args, **kwargs)  # type: ignore[misc]

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """As in Fabric, with every rank's residuals beside it if there is an optimizer in it.

        Raises:
            ValueError: if the state uses the key under which checkpoints say where residuals are.
            RuntimeError: on all ranks, if residuals could not be written.
        """
        if CHECKPOINT_KEY in state:
            raise ValueError(f"Expected a state without the key {CHECKPOINT_KEY!r}, which is used for residuals.")
        modules = {key: engine for key, engine in self._engines_in(state).items() if engine is not None}

        def write(content: dict[str, Any], place: str) -> None:
            self.checkpoint_io.save_checkpoint(content, place, storage_options=storage_options)  # type: ignore[attr-defined]

        if modules:  # names may hold metrics, which may differ from rank to rank: rank 0 writes the checkpoint
            path = self.broadcast(path)  # type: ignore[attr-defined]
        own: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            for key, engine in modules.items():
                profile = profile_of(engine)
                own[key] = {} if profile is None else {"profile": profile}
                if self.save_residuals:
                    place = _place(path, key, len(modules))
                    own[key]["residuals"] = stack.enter_context(
                        self._side_files.beside(place, engine, write, TorchCollective())
                    )
            kept = {CHECKPOINT_KEY: own} if any(own.values()) else {}
            super().save_checkpoint(path, {**state, **kept}, storage_options, filter)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in Fabric; engines of modules in the state go on if there is an optimizer in it, too.

        A module that has not been set up yet goes on when it is.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no residuals that fit.
        """
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)  # type: ignore[misc]
        if isinstance(state, (Module, Optimizer)):
            return rest
        own: dict[str, dict[str, Any]] = rest.pop(CHECKPOINT_KEY, {})
        for key, engine in self._engines_in(state or {}).items():
            found = own.get(key, {})
            place = _place(path, key, len(own))
            if engine is None:
                self._waiting = [entry for entry in self._waiting if entry[0] is not state[key]]
                self._waiting.append((state[key], place, found))
                continue
            for tuner in engine.tuners:
                if isinstance(tuner, Planner):
                    tuner.resume(found.get("profile"), engine)
            self._restore(engine, place, found.get("residuals"))
        return rest

    def _engines_in(self, state: Mapping[str, Any]) -> dict[str, Engine | None]:
        """Engines of the modules in a state, by key; none where it is no training state, but weights alone."""
        if not any(isinstance(value, Optimizer) for value in state.values()):
            return {}
        return {key: self.engine_of(value) for key, value in state.items() if isinstance(value, Module)}

    def teardown(self) -> None:
        """Close the engines, then everything else."""
        for engine in self.engines:
            engine.close()
        super().teardown()  # type: ignore[misc]
        self._side_files.sweep()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no engines until modules are set up."""
        return {**vars(self), "_wrapped": []}

    def __repr__(self) -> str:
        """Fabric prints this when it is of the other package: say what to import instead."""
        module = {"lightning_fabric": "fabric", "lightning.fabric": "lightning_fabric"}[self.package]
        other = {"lightning_fabric": "lightning.fabric", "lightning.fabric": "lightning_fabric"}[self.package]
        return (
            f"<SparseDDPStrategy({self.settings.sparsifier}, {self.settings.density}) for {self.package}.Fabric; "
            f"a {other}.Fabric needs the SparseDDPStrategy of lightning_sparse.strategy.{module}>"
        )


def _place(path: Any, key: str, modules: int) -> str:
    """Where the side files of a module are written beside: all are within the directory of the checkpoint."""
    return str(path) if modules <= 1 else f"{side_directory(path)}/{quote(key, safe='')}"
