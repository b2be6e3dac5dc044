"""Common base of the strategies for Trainer and for Fabric: settings, and their application to engines."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch.nn import SyncBatchNorm
from torch.nn.parameter import is_lazy

from lightning_sparse.api.attach import attach_config
from lightning_sparse.engine import Engine, StepObserver, check_equal_on_ranks
from lightning_sparse.engine.config import StrategyConfig, from_keywords
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.kinds import ids_of
from lightning_sparse.engine.state.checkpoint import SideFiles, restore
from lightning_sparse.methods.grouping.groupings import CUDA_BUCKET_MB, DDP_BUCKET_MB, MIB, Bucket
from lightning_sparse.methods.sparsifiers import SPARSIFIERS
from lightning_sparse.tuning.controllers import Planner

NAME = "sparse_ddp"
"""The strategy's name, and the prefix of its variants' names."""
HSDP_NAME = "sparse_hsdp"
"""The name of the strategy of sharded replicas."""
CHECKPOINT_KEY = "lightning_sparse"
"""Key of this package's entry in checkpoints."""
DELIVERIES = 32
"""DDP's buckets of a large model if exchanges overlap with backward: more of them cost more calls."""
TIMEOUT = timedelta(minutes=10)
"""PyTorch's default for NCCL; Lightning's is half an hour."""
TWINS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""The two packages for which each strategy exists."""
METHODS: list[dict[str, str]] = [{}, *({"sparsifier": name} for name, _ in SPARSIFIERS.items())]
"""Settings of the strategies that are registered by name: the defaults, and each sparsifier."""
OTHERS = " Other keywords of DistributedDataParallel would be ignored or conflict with the sparsified exchange."


@dataclass(frozen=True, kw_only=True)
class StrategyArguments(StrategyConfig):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of a strategy: its settings, and the arguments of Lightning's ``DDPStrategy``.

    Of DistributedDataParallel's keywords, only those that are compatible with the sparsified exchange are passed on.
    """

    find_unused_parameters: bool = False
    """Argument of ``DistributedDataParallel``."""
    static_graph: bool = False
    """Argument of ``DistributedDataParallel``."""
    gradient_as_bucket_view: bool = False
    """Argument of ``DistributedDataParallel``."""
    broadcast_buffers: bool = True
    """Argument of ``DistributedDataParallel``."""
    forward_sync_buffers: bool | None = None
    """Argument of ``DistributedDataParallel`` from torch 2.13 on, which deprecates ``broadcast_buffers`` for it."""
    accelerator: Any = None
    """Filled in by Lightning."""
    parallel_devices: Any = None
    """Filled in by Lightning."""
    cluster_environment: Any = None
    """Argument of Lightning's ``DDPStrategy``."""
    checkpoint_io: Any = None
    """Argument of Lightning's ``DDPStrategy``."""
    process_group_backend: str | None = None
    """Argument of Lightning's ``DDPStrategy``; None: by device."""
    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    """Method by which Lightning starts the processes."""

    def for_lightning(self) -> dict[str, Any]:
        """Return keywords for Lightning's strategy, without defaults, so that no version must know all of them."""
        ours = {field.name for field in fields(StrategyConfig)} - {"bucket_cap_mb"}
        given = [(field, getattr(self, field.name)) for field in fields(self) if field.name not in ours]
        told = {field.name: value for field, value in given if value != field.default}
        return {**told, "timeout": self.timeout or TIMEOUT}


class SparseStrategy:
    """Holds the settings, and applies them to ``DistributedDataParallel`` models."""

    package: ClassVar[str]
    """The Lightning package that takes this class."""
    host: ClassVar[str]
    """The class of that package that takes it."""
    config: StrategyConfig
    """The settings; for a logger, ``config.as_dict()``."""
    # Attributes of Lightning's strategies:
    checkpoint_io: Any
    root_device: torch.device
    _ddp_kwargs: dict[str, Any]
    _timeout: timedelta | None

    def _choose(
        self, arguments: type[StrategyConfig], given: tuple[Any, ...], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Check and keep the settings.

        Args:
            arguments: class of this strategy's arguments.
            given: positional arguments, which must be empty.
            keywords: of the constructor.

        Returns:
            The keywords for Lightning's strategy.

        Raises:
            ValueError: for settings that cannot work.
            TypeError: for a keyword that the strategy does not know, or an argument without one.
        """
        if given:
            name = "density" if isinstance(given[0], float) else "sparsifier"
            raise TypeError(
                f"{type(self).__name__} takes keywords only, but got {given[0]!r}: write "
                f"{type(self).__name__}({name}={given[0]!r})."
            )
        chosen: Any = from_keywords(arguments, keywords, type(self).__name__, OTHERS)
        self.config = StrategyConfig.of(chosen)
        self.observers: list[StepObserver] = []
        """Further observers, for the engine that is attached next."""
        self._side_files = SideFiles()
        told: dict[str, Any] = chosen.for_lightning()
        return told

    def __repr__(self) -> str:
        """Name the class to import instead: Lightning prints this if its Trainer or Fabric is of the other package."""
        other = (TWINS | {twin: package for package, twin in TWINS.items()})[self.package]
        name, where = type(self).__name__, f"lightning_sparse.integrations.{other.partition('.')[0]}"
        return (
            f"<{name}({self.config.sparsifier}, {self.config.density}) for {self.package}.{self.host}; "
            f"a {other}.{self.host} needs the {name} of {where}>"
        )

    @property
    def engines(self) -> list[Engine]:
        """The attached engines."""
        raise NotImplementedError

    def _check_model(self, model: Any) -> None:
        """Raise on all ranks for a model that DDP cannot wrap, or if the models differ.

        In DDP's constructor, rank 0 would wait for the others.
        """
        shapes = [
            (name, None if is_lazy(p) else tuple(p.shape), p.dtype, p.requires_grad)
            for name, p in model.named_parameters()
        ]
        synced = [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]
        facts = {"parameters": shapes, "SyncBatchNorm layers": synced}
        check_equal_on_ranks(facts, TorchCollective(), self.root_device)
        if synced and self.root_device.type == "cpu":
            raise ValueError(
                f"Expected a model without SyncBatchNorm on CPUs, where torch cannot compute it, but {synced[0]!r} is "
                "one. Leave out Trainer(sync_batchnorm=True) or convert_sync_batchnorm(), or train on GPUs."
            )

    @property
    def _default_bucket_mb(self) -> float:
        """Size in MiB of groups that are cut by bucket. A fallback to dense exchanges DDP's own buckets."""
        on_cuda = self.root_device.type == "cuda"
        return CUDA_BUCKET_MB if on_cuda and self.config.fallback is None else DDP_BUCKET_MB

    @contextmanager
    def _small_deliveries(self, model: Any) -> Iterator[None]:
        """Make DDP's buckets small within the block, if exchanges can overlap with backward.

        On CUDA, groups that are cut by bucket are processed in DDP's buckets, which are then equal to them.
        """
        given = self._ddp_kwargs
        beside = self.config.executor != "inline" or self.root_device.type == "cuda"
        # A fallback to dense exchanges DDP's buckets: large ones are faster then.
        if beside and self.config.bucket_cap_mb is None and self.config.fallback is None:
            size = sum(p.nbytes for p in model.parameters() if p.requires_grad) / MIB
            cap = min(DDP_BUCKET_MB, max(1.0, size / DELIVERIES))
            if self._default_bucket_mb == CUDA_BUCKET_MB and isinstance(self.config.grouping, Bucket):
                cap = CUDA_BUCKET_MB
            self._ddp_kwargs = given | {"bucket_cap_mb": cap}
        try:
            yield
        finally:
            self._ddp_kwargs = given

    def _attach(self, ddp: Any, precision: Any, profile: dict[str, Any] | None) -> Engine:
        cap = self.config.bucket_cap_mb or self._default_bucket_mb
        config = replace(self.config, bucket_cap_mb=cap, timeout=self._timeout)
        return attach_config(ddp, config, getattr(precision, "scaler", None), profile, self.observers)

    def _clips_locally(self, optimizer: Any, limit: Any, algorithm: str, known: bool = False) -> bool:
        """Let an engine clip each rank's gradients from the next step on, if that is better than clipping averages.

        If several engines share the optimizer's parameters, none knows the norm of all.

        Returns:
            True if the gradients of this step were clipped so already, and their averages must not be clipped.
        """
        held = ids_of(optimizer)
        engines = [engine for engine in self.engines if any(id(p) in held for p in engine.parameters.values())]
        if len(engines) != 1:
            return False
        return engines[0]._clip_in_place_of_averages(float(limit or 0.0), algorithm, optimizer, known)

    def _mean_over_ranks(self, numbers: Mapping[str, float]) -> dict[str, float]:
        comm, own = TorchCollective(), torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
        means = comm.all_reduce(own.to(self.root_device)).cpu() / comm.world_size
        return dict(zip(numbers, means.tolist(), strict=True))

    def _restore(self, engine: Engine, path: Any, own: dict[str, Any] | None) -> None:
        """Let an engine continue with the residuals of a checkpoint.

        Args:
            engine: before its first step, or between two.
            path: of the checkpoint, beside which side files are.
            own: this package's entry in the checkpoint; None: there is none.
        """
        config, marker = self.config, None if own is None else own.get("residuals")
        load = partial(self.checkpoint_io.load_checkpoint, weights_only=True)
        restore(engine, path, marker, load, config.resize, config.strict_resume, dense=own is None)

    def _ignore_skipped(self, optimizer: Any, precision: Any, *, drop: bool = False) -> None:
        """Let the optimizer skip a step with non-finite gradients, if no loss scaler does so.

        Args:
            optimizer: that steps next.
            precision: Lightning's plugin, which may have a scaler.
            drop: remove the gradients of such a step, for any optimizer.
        """
        scaler = getattr(precision, "scaler", None)
        if self.config.nonfinite != "skip" or (scaler is not None and scaler.is_enabled()):
            return
        for engine in self.engines:
            (engine.drop_skipped if drop else engine.ignore_skipped)(optimizer)


def planner_of(engine: Engine | None) -> Planner | None:
    """Return the planner of an engine, if it has one."""
    return next((one for one in (engine.observers if engine else ()) if isinstance(one, Planner)), None)


def profile_of(engine: Engine | None) -> dict[str, Any] | None:
    """Return the measured :class:`~lightning_sparse.tuning.performance.Profile` for groups and densities, or None."""
    planner = planner_of(engine)
    return None if planner is None else planner.saved


class Names(list[str]):
    """The names in a Lightning registry; Lightning refuses other names of strategies."""

    def __contains__(self, name: object) -> bool:
        """Return True if the name is known.

        Raises:
            ValueError: that of Lightning, for an unknown name that is close to one of ours.
        """
        known = super().__contains__(name)
        close = difflib.get_close_matches(name, self, n=1) if isinstance(name, str) and not known else []
        if close and close[0].startswith((NAME, HSDP_NAME)):
            raise ValueError(f"You selected an invalid strategy name: `strategy={name!r}`. Did you mean {close[0]!r}?")
        return known


def register(registry: Any, strategy: type) -> None:
    """Register the strategy by name, in all variants that DDP has.

    ``sparse_ddp`` and ``sparse_ddp_<sparsifier>``, each with ``_spawn``, ``_fork`` or ``_notebook`` and with
    ``_find_unused_parameters_true`` or ``_false``.

    Args:
        registry: a Lightning package's StrategyRegistry.
        strategy: that package's class.
    """
    launches = [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
    flags: list[dict[str, Any]] = [{}, {"find_unused_parameters": False}, {"find_unused_parameters": True}]
    for method, (launch, start_method), flag in product(METHODS, launches, flags):
        ending = "".join(f"_{name}_{value}".lower() for name, value in flag.items())
        name = "_".join([NAME, *method.values()]) + launch + ending
        description = f"DDP with a sparsified gradient exchange ({name})"
        given = {**method, **flag, "start_method": start_method}
        registry.register(name, strategy, description=description, override=True, **given)
    listed = type(registry).available_strategies
    registry.available_strategies = lambda: Names(listed(registry))


def register_hsdp(registry: Any, strategy: type) -> None:
    """Register the strategy of sharded replicas by name: ``sparse_hsdp`` and ``sparse_hsdp_<sparsifier>``.

    Args:
        registry: the StrategyRegistry of a Lightning package's Trainer.
        strategy: that package's class.
    """
    for method in METHODS:
        name = "_".join([HSDP_NAME, *method.values()])
        description = f"FSDP2 within replicas, a sparsified exchange between them ({name})"
        registry.register(name, strategy, description=description, override=True, **method)
