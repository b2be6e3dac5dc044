"""What the strategies of both Lightning packages have in common: everything.

Lightning registers communication hooks on CUDA only; here the engine is attached on every device. The class translates
between Lightning and the engine and decides nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.attach import attach, check_fallback
from lightning_sparse.density import DensitySchedule
from lightning_sparse.exchanges import Exchange
from lightning_sparse.grouping import GROUPINGS, Grouping
from lightning_sparse.grouping.plan import DDP_BUCKET_MB, MIB
from lightning_sparse.hook import Engine, Settings, Tuner
from lightning_sparse.memory import Memory
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from lightning_sparse.tuning import Planner

DDP_KEYWORDS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
CHECKPOINT_KEY = "lightning_sparse"
"""Where checkpoints keep what belongs to this package."""
OWN_KEYWORDS = ("sparsifier", "density", "memory", "exchange", "grouping", "dense", "executor", "fallback")
DELIVERIES = 32
"""Buckets in which DDP hands over a large model, where exchanges go on beside backward: more cost more calls."""
HALF_HOUR = timedelta(minutes=30)
"""Lightning's default for process groups."""


class SparseDDPMixin:
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
        dense: shell-style patterns of parameter names that stay dense, such as ``["*.bias"]``.
        executor: "inline" exchanges inside DDP's hook (on CUDA on a stream of its own), "thread" on a communication
            thread while backward goes on; "auto" is "thread" between ranks on CPUs, else "inline".
        fallback: "dense" measures some sparse and some dense steps at the start of fit, and again when the step time
            changes by much, and goes on with what is faster.
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
        timeout: of the process groups; None: Lightning's half an hour.
        start_method: how Lightning starts the processes.
        ddp_comm_hook: refused, as are the next three: the sparsified exchange is the communication hook.
        ddp_comm_state: refused.
        ddp_comm_wrapper: refused.
        model_averaging_period: refused.
        others: refused with a sentence.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier, a second communication hook; at the start of fit, for a precision that scales the
            loss and for an optimizer that does not go with the memory.
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

    _ddp_kwargs: dict[str, Any]
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
        executor: str = "auto",
        fallback: Literal["dense"] | None = None,
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
        self.settings = Settings.check(sparsifier, density, memory, exchange, executor)
        self.grouping = GROUPINGS.resolve(grouping)
        self.dense = [dense] if isinstance(dense, str) else list(dense)
        check_fallback(fallback)
        self.fallback = fallback
        self.tuners: list[Tuner] = []
        """More that look on while the engine works, from the next fit on."""
        self._profile: dict[str, Any] | None = None
        self._resuming = False
        self.engine: Engine | None = None
        """At work during fit; ``step`` and ``hook_calls`` can still be read afterwards."""
        ddp = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
        }
        self._bucket_cap_mb = bucket_cap_mb
        defaults = {"bucket_cap_mb": None, "broadcast_buffers": True}
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout or HALF_HOUR,
            start_method=start_method,
            **{name: value for name, value in ddp.items() if value != defaults.get(name, False)},
        )  # type: ignore[call-arg]  # the next class in line is a DDPStrategy

    def _setup_model(self, model: Any) -> Any:
        """As in Lightning; DDP hands gradients over in small buckets where exchanges can begin beside backward."""
        given = self._ddp_kwargs
        beside = self.settings.executor != "inline" or self.root_device.type == "cuda"  # type: ignore[attr-defined]
        # A fallback to dense exchanges DDP's buckets as they are: large ones are faster then.
        if beside and self._bucket_cap_mb is None and self.fallback is None:
            size = sum(p.nbytes for p in model.parameters() if p.requires_grad) / MIB
            self._ddp_kwargs = given | {"bucket_cap_mb": min(DDP_BUCKET_MB, max(1.0, size / DELIVERIES))}
        try:
            return super()._setup_model(model)  # type: ignore[misc]
        finally:
            self._ddp_kwargs = given

    def _register_ddp_hooks(self) -> None:
        """Lightning calls this right after it wrapped the model; its own version does nothing on a CPU."""
        refuse_loss_scaling(self.precision_plugin)  # type: ignore[attr-defined]
        if self._resuming:
            rank_zero_warn(
                "Residuals of the sparsified exchange are not part of checkpoints: error feedback starts empty, and "
                "what was not sent before the checkpoint was written is lost. Expect a small dent in the curve."
            )
        profile = self._profile or self.profile  # from a checkpoint, or from an earlier fit
        self._close_engine()
        self.engine = attach(
            self.model,  # type: ignore[attr-defined]
            **self.settings._asdict(),
            grouping=self.grouping,
            dense=self.dense,
            fallback=self.fallback,
            bucket_cap_mb=self._bucket_cap_mb or DDP_BUCKET_MB,
            timeout=self._timeout,  # type: ignore[attr-defined]
            profile=profile,
            tuners=self.tuners,
        )

    def setup_optimizers(self, trainer: Any) -> None:
        """As in Lightning; then the memory has a look at the optimizers.

        Raises:
            ValueError: if one does not go with the memory.
        """
        super().setup_optimizers(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:  # type: ignore[attr-defined]
            self.settings.memory.check_optimizer(optimizer)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in Lightning; remembers that a fit which follows is a continued one, and what an earlier one measured."""
        self._resuming = True
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self._profile = checkpoint.get(CHECKPOINT_KEY, {}).get("profile")
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As in Lightning, with the profile in it if there is one."""
        if self.profile is not None:
            checkpoint[CHECKPOINT_KEY] = {"profile": self.profile}
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    @property
    def profile(self) -> dict[str, Any] | None:
        """What was measured for groups and densities, see :class:`~lightning_sparse.grouping.Profile`; None without."""
        planners = [tuner for tuner in self.engine.tuners if isinstance(tuner, Planner)] if self.engine else []
        return planners[0].saved if planners else None

    def teardown(self) -> None:
        """Close the engine, then everything else."""
        self._close_engine()
        self._resuming = False
        self._profile = None
        super().teardown()  # type: ignore[misc]

    def _close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()

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


def refuse_loss_scaling(precision: Any) -> None:
    """Raise if a precision plugin scales the loss.

    Raises:
        ValueError: saying what to use instead.
    """
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            "precision='16-mixed' scales the loss by a factor that changes, and a residual kept from one step to the "
            "next would be in the units of an old factor. Use precision='bf16-mixed' or '32-true' with sparse_ddp."
        )


def refuse_unknown(others: dict[str, Any]) -> None:
    """Raise if anything is left over.

    Raises:
        TypeError: naming it, what is close, and the DDP keywords that are passed on.
    """
    for name in others:
        close = difflib.get_close_matches(name, [*OWN_KEYWORDS, *DDP_KEYWORDS], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise TypeError(
            f"SparseDDPStrategy does not know the keyword {name!r}.{hint} Of DistributedDataParallel's keywords it "
            f"passes on {', '.join(DDP_KEYWORDS)}; others would be ignored or conflict with the sparsified exchange."
        )


def register(registry: Any, strategy: type) -> None:
    """Make the strategy known by name, in all the variants that DDP has.

    ``sparse_ddp`` and ``sparse_ddp_<sparsifier>``, each with ``_spawn``, ``_fork`` or ``_notebook`` and with
    ``_find_unused_parameters_true`` or ``_false``.

    Args:
        registry: a Lightning package's StrategyRegistry.
        strategy: that package's class.
    """
    launches: list[tuple[str, str]] = [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
    unused: list[tuple[str, dict[str, bool]]] = [
        ("", {}),
        ("_find_unused_parameters_false", {"find_unused_parameters": False}),
        ("_find_unused_parameters_true", {"find_unused_parameters": True}),
    ]
    sparsifiers: list[tuple[str, dict[str, str]]] = [("", {})] + [
        (f"_{name}", {"sparsifier": name}) for name, _ in SPARSIFIERS.items()
    ]
    for method, choice in sparsifiers:
        for launch, start_method in launches:
            for ending, flag in unused:
                name = f"sparse_ddp{method}{launch}{ending}"
                registry.register(
                    name,
                    strategy,
                    description=f"DDP with a sparsified gradient exchange ({name})",
                    override=True,
                    start_method=start_method,
                    **choice,
                    **flag,
                )
