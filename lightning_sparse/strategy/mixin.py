"""What the strategies of both Lightning packages have in common: everything.

Lightning registers communication hooks on CUDA only; here the engine is attached on every device. The class translates
between Lightning and the engine and decides nothing.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar, Literal

from lightning_sparse.checkpoint import Resize
from lightning_sparse.collective import TorchCollective
from lightning_sparse.density import DensitySchedule
from lightning_sparse.exchanges import Exchange
from lightning_sparse.grouping import Grouping, Rules
from lightning_sparse.hook import Engine
from lightning_sparse.interrupts import SAVING, uninterrupted
from lightning_sparse.memory import Memory
from lightning_sparse.sparsifiers import Sparsifier
from lightning_sparse.strategy.door import CHECKPOINT_KEY, TIMEOUT, Door, profile_of, refuse_unknown, without_defaults
from lightning_sparse.strategy.earlier import EarlierFit, Left
from lightning_sparse.watch import WATCH, Watch

UNUSED_PARAMETERS = (
    "It looks like your LightningModule has parameters that were not used in producing the loss returned by "
    "training_step. If this is intentional, let DDP look for them: set find_unused_parameters=True in the strategy, as "
    "in strategy=SparseDDPStrategy(find_unused_parameters=True), or add it to the strategy's name, as in "
    "strategy='sparse_ddp_find_unused_parameters_true'."
)
"""Instead of Lightning's sentence, which names strategies that exchange everything."""


class SparseDDPMixin(Door):
    """DDP whose gradient all-reduce is a sparsified exchange with error feedback.

    Everything else is Lightning's ``DDPStrategy``: launchers, cluster environments, SyncBatchNorm, accumulation. With
    one device nothing is communicated, and gradients still pass through the sparsifier, so that a script behaves alike
    everywhere.

    Args:
        sparsifier: who picks which coordinates: an instance such as ``ExDyna(alpha=1.1)`` or a name such as "topk".
        density: share of coordinates to send, in (0, 1], or a schedule such as ``Warmup(0.25, 0.01, steps=500)``.
        memory: error feedback; None: ``Residual()``.
        exchange: how picks travel: an instance, a name such as "reduce_union", or None for the sparsifier's natural
            one.
        grouping: which gradients are looked at together: "layer", "bucket" (about ``bucket_cap_mb`` each), "model",
            or an instance such as ``MergeBelow(8192)``, which merges small layers, or ``OptimalMerge()``, which
            measures the first steps and merges layers so that a step ends soonest.
        dense: shell-style patterns of parameter names that stay dense, such as ``["*.bias"]``, next to those of
            ``rules``.
        rules: which parameters stay dense, and which have densities of their own; None: the default ones, which keep
            parameters with fewer than 2 dimensions or fewer than 256 coordinates dense, see
            :class:`~lightning_sparse.Rules`.
        executor: "inline" exchanges inside DDP's hook (on CUDA on a stream of its own), "thread" on a communication
            thread while backward goes on; "auto" is "thread" between ranks on CPUs, else "inline".
        fallback: "dense" measures some sparse and some dense steps at the start of fit, and again when the step time
            changes by much, and goes on with what is faster.
        nonfinite: where a gradient is not finite on some rank, all ranks agree, and residuals stay as they were. With
            loss scaling the scaler skips the step. Without: "skip" leaves the optimizer's step out on all ranks (on
            CUDA, the host waits for backward to learn about it, but for fused optimizers), "nan" hands NaN to it, as
            plain DDP does.
        lr_aware: keep what residuals are worth when the learning rate changes: multiply those of each parameter group
            by ``lr_old / lr_new``. For SGD; refused with optimizers that scale gradients by themselves, such as Adam.
        save_residuals: save what each rank remembers beside every checkpoint that holds optimizer states, so that a
            resumed run continues bit for bit; see docs/checkpoints.md for what that takes.
        strict_resume: raise, on all ranks, where a checkpoint comes without residuals that fit, instead of starting
            with empty ones and a warning.
        resize: what becomes of residuals when a run is resumed with another number of ranks: "merge" gives every rank
            their mean, "flush" sends them in the first step, densely, "zero" drops them.
        watch: warns, on rank 0, of ranks that drift apart, residuals that grow, thresholds that are off, and of
            Adam's first moment, see :class:`~lightning_sparse.Watch`; None: does not.
        find_unused_parameters: as in ``DistributedDataParallel``.
        static_graph: as in ``DistributedDataParallel``.
        gradient_as_bucket_view: as in ``DistributedDataParallel``.
        bucket_cap_mb: as in ``DistributedDataParallel``; None: groups by bucket have its default of 25 MiB, and where
            exchanges go on beside backward (CUDA, "thread", no fallback) DDP hands gradients over in smaller pieces.
        broadcast_buffers: as in ``DistributedDataParallel``.
        accelerator: filled in by the Trainer.
        parallel_devices: filled in by the Trainer.
        cluster_environment: as in Lightning's ``DDPStrategy``.
        checkpoint_io: as in Lightning's ``DDPStrategy``.
        precision_plugin: filled in by the Trainer.
        process_group_backend: as in Lightning's ``DDPStrategy``; None: by device.
        timeout: how long ranks wait for each other, in the exchange and elsewhere, before they end with an error; None:
            10 minutes.
        start_method: how Lightning starts the processes.
        ddp_comm_hook: refused, as are the next three: the sparsified exchange is the communication hook.
        ddp_comm_state: refused.
        ddp_comm_wrapper: refused.
        model_averaging_period: refused.
        others: refused with a sentence.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier, a second communication hook; at the start of fit, for an optimizer that does not go
            with the memory or with ``lr_aware``.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(sparsifier="topk", density=0.01, dense=["*.bias"])
        >>> strategy.settings.exchange
        GatherPairs()
        >>> ls.SparseDDPStrategy(sparsifier="exdina")
        Traceback (most recent call last):
        ...
        ValueError: Unknown sparsifier 'exdina'. Did you mean 'exdyna'? Known names: clt_k, dgc, ...
    """

    model: Any
    package: ClassVar[str]
    """The Lightning package whose Trainer takes this class."""

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
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        ddp_comm_hook: Any = None,
        ddp_comm_state: Any = None,
        ddp_comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        **others: Any,
    ) -> None:
        refuse_unknown(others)
        refuse_second_hook(
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
        )
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
        self._profile: dict[str, Any] | None = None
        self._resume: tuple[Any, dict[str, Any] | None] | None = None
        self._earlier: EarlierFit | None = None
        self._left: Left | None = None
        self.engine: Engine | None = None
        """At work during fit; ``step`` and ``hook_calls`` can still be read afterwards."""
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
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
        """The engine, if there is one."""
        return [] if self.engine is None else [self.engine]

    def _setup_model(self, model: Any) -> Any:
        """As in Lightning; DDP hands gradients over in small buckets where exchanges can begin beside backward."""
        self._check_equal_models(model)
        with self._small_deliveries(model):
            return super()._setup_model(model)  # type: ignore[misc]

    def _register_ddp_hooks(self) -> None:
        """Lightning calls this right after it wrapped the model; its own version does nothing on a CPU."""
        profile = self._profile or self.profile  # from a checkpoint, or from an earlier fit
        left, self._left = self._left, None
        if self._earlier is not None and self._resume is None:  # a checkpoint knows better
            left = self._earlier.leave()
        self._close_engine()
        self.engine = self._earlier = None  # frees their buffers
        self.engine = self._attach(self.model, self.precision_plugin, profile)  # type: ignore[attr-defined]
        self._go_on(self.engine, left)
        self._continue()

    def _continue(self) -> None:
        """Give the engine the residuals of the checkpoint that was loaded last, once."""
        resume, self._resume = self._resume, None
        if resume is not None and self.engine is not None and not self.engine.closed:
            self._restore(self.engine, *resume)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """As in Lightning; residuals go with optimizers, also where a callback goes back to a checkpoint within fit."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        self._continue()

    def setup_optimizers(self, trainer: Any) -> None:
        """As in Lightning; then the engine has a look at the optimizers.

        Raises:
            ValueError: if one does not go with the memory or with ``lr_aware``.
            RuntimeError: if Lightning has wrapped the model without attaching the exchange, as a later version might.
        """
        super().setup_optimizers(trainer)  # type: ignore[misc]
        if self.engine is None or self.engine.closed:
            version = importlib.import_module(self.package).__version__
            raise RuntimeError(
                f"{self.package} {version} wrapped the model without calling _register_ddp_hooks, so that gradients "
                "would be averaged densely. Use a version that lightning-sparse is tested with, see its README."
            )
        self._follow_together(self.engine, self.optimizers)  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """As in Lightning; a void step is left out where no loss scaler does so.

        Signals wait while the optimizer updates parameters. Those that ask for a checkpoint wait from the end of
        backward on, so that ranks save the same step; Ctrl-C does not, because callbacks run in between.
        """
        with uninterrupted(optimizer) as hold:

            def then_skip() -> Any:
                result = closure()
                self._skip_void(optimizer, self.precision_plugin)  # type: ignore[attr-defined]
                hold.start(SAVING)
                return result

            return super().optimizer_step(optimizer, then_skip, model, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As in Lightning; parameters that were frozen or unfrozen since the last step leave or join the exchange."""
        if self._membership_changed():
            self._wrap_again()
        return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def _membership_changed(self) -> bool:
        engine = self.engine
        if engine is None or engine.closed:
            return False
        thawed = any(p.requires_grad for p in engine.frozen.values())
        if self._ddp_kwargs.get("find_unused_parameters", False):
            return thawed  # what is frozen is unused, for as long as it is
        return thawed or not all(p.requires_grad for p in engine.parameters.values())

    def _wrap_again(self) -> None:
        """A new DDP, for the parameters that need gradients now; what is remembered of all of them moves on."""
        assert self.engine is not None
        self.engine.count_as_applied()
        self._left = Left.by(self.engine)
        self._close_engine()
        wrapped = self.model
        model, self.model, self.engine = wrapped.module, None, None
        del wrapped
        gc.collect()  # the old reducer hears of every backward until it is gone
        self.model = self._setup_model(model)
        self._register_ddp_hooks()
        assert self.engine is not None
        self._follow_together(self.engine, self.optimizers)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in Lightning; remembers where a fit that follows finds residuals, and what an earlier one measured."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        own = checkpoint.get(CHECKPOINT_KEY, {})
        self._profile = own.get("profile")
        residuals = own.get("residuals")
        if residuals and "global_step" in residuals:  # as the checkpoint says now, for the side files to agree with
            residuals = {**residuals, "global_step": checkpoint.get("global_step")}
        self._resume = checkpoint_path, residuals
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As in Lightning, with the profile in it if there is one, and with every rank's residuals beside it."""
        own = {} if self.profile is None else {"profile": self.profile}
        with self._residuals_beside(checkpoint, filepath, storage_options) as marker:
            if marker is not None:
                own["residuals"] = marker
            if own:
                checkpoint[CHECKPOINT_KEY] = own
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)  # type: ignore[misc]

    def _residuals_beside(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any
    ) -> AbstractContextManager[dict[str, Any] | None]:
        if not self.save_residuals or self.engine is None or "optimizer_states" not in checkpoint:
            return nullcontext()

        def write(content: dict[str, Any], place: str) -> None:
            self.checkpoint_io.save_checkpoint(content, place, storage_options=storage_options)  # type: ignore[attr-defined]

        trainer, step = self.lightning_module.trainer, checkpoint.get("global_step")  # type: ignore[attr-defined]
        batches = trainer.fit_loop.epoch_loop.batch_progress.current
        if batches.ready == batches.processed:  # whether all of its optimizers have taken a step is the user's business
            self.engine.count_as_applied()
        # After an error, Lightning lets callbacks save on the ranks that had it; others may not come.
        if trainer.interrupted:
            return self._side_files.beside(path, self.engine, write, None, step)
        # Names may hold metrics, which may differ from rank to rank: the checkpoint is where rank 0 writes it.
        path = self.broadcast(path)  # type: ignore[attr-defined]
        return self._side_files.beside(path, self.engine, write, TorchCollective(), step)

    def remove_checkpoint(self, filepath: Any) -> None:
        """As in Lightning, with the residuals beside it."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        self._side_files.remove(filepath, self.global_rank, self.world_size)  # type: ignore[attr-defined]

    @property
    def profile(self) -> dict[str, Any] | None:
        """What was measured for groups and densities, see :class:`~lightning_sparse.grouping.Profile`; None without."""
        return profile_of(self.engine)

    def teardown(self) -> None:
        """Close the engine, then everything else."""
        at_work = None if self.engine is None or self.engine.closed else self.engine
        self._close_engine()
        if at_work is not None:
            self._earlier = EarlierFit(at_work)
        self._resume = None
        self._profile = None
        super().teardown()  # type: ignore[misc]
        self._side_files.sweep()

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()

    def on_exception(self, exception: BaseException) -> None:
        """As in Lightning; advice on unused parameters leads to this strategy, not to one that is dense."""
        super().on_exception(exception)  # type: ignore[misc]
        exception.args = tuple(
            UNUSED_PARAMETERS if isinstance(arg, str) and "find_unused_parameters_true" in arg else arg
            for arg in exception.args
        )

    def __getstate__(self) -> dict[str, Any]:
        """As in Lightning; a copy has no engine until it is set up."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, "engine": None, "_earlier": None}

    def __repr__(self) -> str:
        """Lightning prints this when its Trainer is of the other package: say what to import instead."""
        other = {"pytorch_lightning": "lightning", "lightning.pytorch": "pytorch_lightning"}[self.package]
        trainer = {"pytorch_lightning": "lightning.pytorch", "lightning.pytorch": "pytorch_lightning"}[self.package]
        return (
            f"<SparseDDPStrategy({self.settings.sparsifier}, {self.settings.density}) for {self.package}.Trainer; "
            f"a {trainer}.Trainer needs the SparseDDPStrategy of lightning_sparse.strategy.{other}>"
        )


def refuse_second_hook(**given: Any) -> None:
    """Raise if any of these is not None.

    Raises:
        ValueError: naming what was given.
    """
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"SparseDDPStrategy does not take {', '.join(names)}: DDP has room for one communication hook, and the "
            "sparsified exchange is it. Use Lightning's DDPStrategy for other hooks."
        )
