"""What all doors into Lightning have in common, Trainer or Fabric: the settings, and what becomes of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_sparse.attach import attach, check_fallback
from lightning_sparse.checkpoint import Resize, SideFiles, check_resize, restore
from lightning_sparse.collective import TorchCollective
from lightning_sparse.density import DensitySchedule
from lightning_sparse.exchanges import Exchange
from lightning_sparse.grouping import GROUPINGS, Grouping, Rules, as_rules
from lightning_sparse.grouping.plan import DDP_BUCKET_MB, MIB
from lightning_sparse.hook import Engine, Settings, Tuner, check_equal_on_ranks, failing_together
from lightning_sparse.memory import Memory
from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier
from lightning_sparse.strategy.earlier import Left, go_on
from lightning_sparse.tuning import Planner
from lightning_sparse.watch import Watch, check_watch

DDP_KEYWORDS = (
    "broadcast_buffers",
    "bucket_cap_mb",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)
CHECKPOINT_KEY = "lightning_sparse"
"""Where checkpoints keep what belongs to this package."""
OWN_KEYWORDS = (
    "sparsifier",
    "density",
    "memory",
    "exchange",
    "grouping",
    "dense",
    "rules",
    "executor",
    "fallback",
    "nonfinite",
    "lr_aware",
    "save_residuals",
    "strict_resume",
    "resize",
    "watch",
)
DELIVERIES = 32
"""Buckets in which DDP hands over a large model, where exchanges go on beside backward: more cost more calls."""
TIMEOUT = timedelta(minutes=10)
"""PyTorch's default for NCCL; Lightning's is half an hour."""


class Door:
    """Holds what the user chose, and applies it to a ``DistributedDataParallel`` model."""

    _ddp_kwargs: dict[str, Any]

    def _choose(
        self,
        *,
        sparsifier: Sparsifier | str,
        density: float | DensitySchedule,
        memory: Memory | None,
        exchange: Exchange | str | None,
        grouping: Grouping | str,
        dense: Sequence[str],
        rules: Rules | None,
        executor: str,
        fallback: Literal["dense"] | None,
        nonfinite: str,
        lr_aware: bool,
        save_residuals: bool,
        strict_resume: bool,
        resize: Resize,
        watch: Watch | None,
        bucket_cap_mb: float | None,
    ) -> None:
        """Check the settings and keep them.

        Raises:
            ValueError: for settings that cannot work.
        """
        self.settings = Settings.check(sparsifier, density, memory, exchange, executor, nonfinite, lr_aware)
        self.grouping = GROUPINGS.resolve(grouping)
        self.rules = as_rules(rules, dense)
        check_fallback(fallback)
        self.fallback = fallback
        check_resize(resize)
        self.save_residuals, self.strict_resume, self.resize = save_residuals, strict_resume, resize
        check_watch(watch)
        self.watch = watch
        self.tuners: list[Tuner] = []
        """More that look on while the engine works, from the next one on."""
        self._bucket_cap_mb = bucket_cap_mb
        self._side_files = SideFiles()
        self._told_of_void: set[str] = set()

    @property
    def engines(self) -> list[Engine]:
        """Those that there are."""
        raise NotImplementedError

    def _check_equal_models(self, model: Any) -> None:
        """Raise on all ranks if their models differ: within DDP's constructor, rank 0 would wait for the others."""
        shapes = [
            (name, None if is_lazy(p) else tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in model.named_parameters()
        ]
        check_equal_on_ranks({"parameters": shapes}, TorchCollective(), self.root_device)  # type: ignore[attr-defined]

    @contextmanager
    def _small_deliveries(self, model: Any) -> Iterator[None]:
        """Where exchanges can begin beside backward, let DDP hand gradients over in small buckets."""
        given = self._ddp_kwargs
        beside = self.settings.executor != "inline" or self.root_device.type == "cuda"  # type: ignore[attr-defined]
        # A fallback to dense exchanges DDP's buckets as they are: large ones are faster then.
        if beside and self._bucket_cap_mb is None and self.fallback is None:
            size = sum(p.nbytes for p in model.parameters() if p.requires_grad) / MIB
            self._ddp_kwargs = given | {"bucket_cap_mb": min(DDP_BUCKET_MB, max(1.0, size / DELIVERIES))}
        try:
            yield
        finally:
            self._ddp_kwargs = given

    def _attach(self, ddp: Any, precision: Any, profile: dict[str, Any] | None) -> Engine:
        return attach(
            ddp,
            **self.settings._asdict(),
            grouping=self.grouping,
            rules=self.rules,
            fallback=self.fallback,
            watch=self.watch,
            scaler=getattr(precision, "scaler", None),
            bucket_cap_mb=self._bucket_cap_mb or DDP_BUCKET_MB,
            timeout=self._timeout,  # type: ignore[attr-defined]
            profile=profile,
            tuners=self.tuners,
        )

    def _go_on(self, engine: Engine, left: Left | None) -> None:
        """Let an engine go on where the one before was; what does not is told on rank zero."""
        if told := go_on(engine, left):
            rank_zero_warn(told)

    def _follow_together(self, engine: Engine, optimizers: Sequence[Any]) -> None:
        """Let an engine have a look at optimizers; what one rank refuses, all do."""
        with failing_together(engine.comm, engine.device):
            engine.follow(optimizers)

    def _restore(self, engine: Engine, path: Any, marker: dict[str, Any] | None) -> None:
        restore(engine, path, marker, self._load_side_file, self.resize, self.strict_resume)

    def _load_side_file(self, path: str) -> Any:
        return self.checkpoint_io.load_checkpoint(path, weights_only=True)  # type: ignore[attr-defined]

    def _skip_void(self, optimizer: Any, precision: Any, *, drop: bool = False) -> None:
        """Let the optimizer skip a void step, where no loss scaler does so.

        Args:
            optimizer: that steps next.
            precision: Lightning's plugin, which may have a scaler.
            drop: leave no gradients of such a step, whatever the optimizer could do with them.
        """
        scaler = getattr(precision, "scaler", None)
        if self.settings.nonfinite != "skip" or (scaler is not None and scaler.is_enabled()):
            return
        for engine in self.engines:
            if drop:
                engine.drop_void(optimizer)
            else:
                engine.skip_void(optimizer)
            known = engine.known_counts  # a fused optimizer has the flag, and the host hears of it one step later
            if known.void == 1 and known.streak == 1 and engine.run_id not in self._told_of_void:
                self._told_of_void.add(engine.run_id)
                rank_zero_warn(
                    f"A gradient was not finite on some rank in the backward after step {known.step}: no rank takes "
                    "this step, and residuals are as before. sparse/void_steps counts such steps from now on."
                )


def profile_of(engine: Engine | None) -> dict[str, Any] | None:
    """What was measured for groups and densities, see :class:`~lightning_sparse.grouping.Profile`; None without."""
    planners = [tuner for tuner in engine.tuners if isinstance(tuner, Planner)] if engine else []
    return planners[0].saved if planners else None


def without_defaults(**ddp: Any) -> dict[str, Any]:
    """DDP's keywords that say something: what is dumped with one torch version then stays valid with another."""
    defaults = {"bucket_cap_mb": None, "broadcast_buffers": True}
    return {name: value for name, value in ddp.items() if value != defaults.get(name, False)}


def refuse_unknown(others: Mapping[str, Any]) -> None:
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
