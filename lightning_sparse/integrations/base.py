"""Common base of the strategies for Trainer and for Fabric: settings, and their application to engines."""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import SyncBatchNorm
from torch.nn.parameter import is_lazy

from lightning_sparse.api.attach import DDP_ARGUMENTS, attach_config
from lightning_sparse.api.checkpoint import SideFiles, restore
from lightning_sparse.core.checks import is_number
from lightning_sparse.core.names import named_modules, named_parameters
from lightning_sparse.engine import Engine, StepObserver, check_equal_on_ranks
from lightning_sparse.engine.clipping import clip_by_norm, clip_by_value
from lightning_sparse.engine.config import StrategyConfig, from_keywords
from lightning_sparse.engine.metrics import Totals
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.grouping.groupings import CUDA_BUCKET_MB, DDP_BUCKET_MB, OVERLAPPED_MB

CHECKPOINT_KEY = "lightning_sparse"
"""Key of this package's entry in checkpoints."""
TWINS = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
"""The two packages for which each strategy exists."""
BY_LIGHTNING = ("module", "device_ids")
"""Arguments of ``DistributedDataParallel`` that Lightning gives."""
AVERAGING = "StochasticWeightAveraging", "WeightAveraging"
"""Lightning's callbacks that average weights over steps, and bases of such."""
Kind = TypeVar("Kind", bound="type[SparseStrategy]")


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
    broadcast_buffers: bool | None = True
    """Argument of ``DistributedDataParallel``; None: its default."""
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
        ours = {field.name for field in fields(StrategyConfig)} - {"bucket_cap_mb", "timeout"}
        given = [(field, getattr(self, field.name)) for field in fields(self) if field.name not in ours]
        return {field.name: value for field, value in given if value not in (field.default, None)}


class SparseStrategy:
    """Holds the settings, and applies them to ``DistributedDataParallel`` models."""

    package: ClassVar[str]
    """The Lightning package that takes this class."""
    host: ClassVar[str]
    """The class of that package that takes it."""
    unused: ClassVar[Mapping[str, inspect.Parameter]] = {}
    """Arguments of Lightning's strategy and of ``DistributedDataParallel`` that have no effect here, by name."""
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
            ValueError: for settings that cannot work, and for arguments of :attr:`unused` without their defaults.
            TypeError: for a keyword that the strategy does not know, or an argument without one.
        """
        unused = {name: keywords.pop(name) for name in self.unused if name in keywords}
        if asked := [name for name, value in unused.items() if value not in (None, self.unused[name].default)]:
            raise ValueError(
                f"{type(self).__name__} does not take {', '.join(asked)}: DDP has room for one communication hook, "
                "which is the sparsified exchange, and other arguments would conflict with it or be ignored. Leave "
                "them at their defaults, or use Lightning's DDPStrategy."
            )
        if given:
            name = "density" if is_number(given[0]) else "sparsifier"
            raise TypeError(
                f"{type(self).__name__} takes keywords only, but got {given[0]!r}: write "
                f"{type(self).__name__}({name}={given[0]!r})."
            )
        chosen: Any = from_keywords(arguments, keywords, type(self).__name__)
        self.config = StrategyConfig.of(chosen)
        self.observers: list[StepObserver] = []
        """Further observers, for the engine that is attached next."""
        self._side_files = SideFiles()
        told: dict[str, Any] = chosen.for_lightning()
        return {"bucket_cap_mb": OVERLAPPED_MB, **told} if self.config.overlap else told

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
            for name, p in named_parameters(model).items()
        ]
        synced = [name for name, layer in named_modules(model) if isinstance(layer, SyncBatchNorm)]
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
        on_cuda, overlap = self.root_device.type == "cuda", self.config.overlap
        return CUDA_BUCKET_MB if on_cuda and not self.config.fallback and not overlap else DDP_BUCKET_MB

    def _attach(self, ddp: Any) -> Engine:
        cap = self.config.bucket_cap_mb or self._default_bucket_mb
        config = replace(self.config, bucket_cap_mb=cap, timeout=self._timeout)
        return attach_config(ddp, config, self.observers)

    @property
    def _steppers(self) -> list[Stepper]:
        return [engine.stepper for engine in self.engines if not engine.closed]

    def _clip_by_norm(self, parameters: Iterable[Tensor], limit: float, **options: Any) -> Tensor:
        """Clip by the norm of the mean gradient, see :meth:`.Engine.clip_grad_norm_`."""
        return clip_by_norm(self._steppers, parameters, limit, **options)

    def _clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clip each rank's own values, see :func:`.clip_by_value`."""
        clip_by_value(self._steppers, parameters, limit)

    def _mean_over_ranks(self, numbers: Mapping[str, float]) -> dict[str, float]:
        comm, own = TorchCollective(), torch.tensor(list(numbers.values()), dtype=torch.float64, device="cpu")
        means = comm.all_reduce(own.to(self.root_device)).cpu() / comm.world_size
        return dict(zip(numbers, means.tolist(), strict=True))

    def _restore(self, engine: Engine, path: Any, own: dict[str, Any] | None) -> None:
        """Let an engine continue with the totals and residuals of a checkpoint; all ranks must call this.

        Args:
            engine: before its first step, or between two.
            path: of the checkpoint.
            own: this package's entry in the checkpoint, see :func:`readable`; None: it is of a dense training.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no residuals that fit.
        """
        if own is not None and "totals" in own:
            engine.stepper.totals.load_state_dict(own["totals"])
        self._load_residuals(engine, path, None if own is None else own.get("residuals"), own is None)

    def _load_residuals(self, engine: Engine, path: Any, marker: Any, dense: bool) -> None:
        """Let an engine continue with side files beside a checkpoint, see :func:`.checkpoint.restore`."""
        load = partial(self.checkpoint_io.load_checkpoint, weights_only=True)
        restore(engine, path, marker, load, self.config.resize, self.config.strict_resume, dense)


@contextmanager
def looking(engine: Engine | None) -> Iterator[None]:
    """Let a model hold the weights that all ranks agree on while a host evaluates; all ranks call this.

    Args:
        engine: of the model; None, or closed: weights are as they should be.
    """
    if engine is None or engine.closed:
        yield
        return
    with engine.agreed(together=True):
        yield


def refuse_with_overlap(engine: Engine, optimizers: Sequence[Any], clips: str, scaler: Any) -> None:
    """Raise for what cannot be with ``overlap=True``, as far as a host knows it before the first step.

    Args:
        engine: of any settings.
        optimizers: of the host.
        clips: the host's setting that clips gradients, with its value; empty: it does not.
        scaler: of losses; None: there is none.

    Raises:
        ValueError: naming the setting.
    """
    if not engine.settings.overlap or engine.stepper.direct:
        return
    instead = "with overlap=True, which exchanges gradients within backward"
    if clips:
        raise ValueError(f"Expected no clipping {instead}, before their norm is known, but got {clips}.")
    if scaler is not None:
        raise ValueError(f"Expected no scaled losses {instead}: take bfloat16 in place of float16.")
    if len(optimizers) > 1:
        raise ValueError(f"Expected one optimizer {instead}, but got {len(optimizers)}.")


def refuse_averages(callbacks: Iterable[Any]) -> None:
    """Raise for callbacks that average weights over steps: they read those of one rank.

    Raises:
        ValueError: naming the callback.
    """
    for callback in callbacks:
        if any(kind.__name__ in AVERAGING for kind in type(callback).__mro__):
            raise ValueError(
                f"Expected no callback that averages weights while each rank trains a copy of its own (memory Drift), "
                f"but got {type(callback).__name__}, which would read the copy of one rank. Average within "
                "engine.agreed(), or choose memory='residual'."
            )


def readable(entry: Any) -> dict[str, Any] | None:
    """Return a checkpoint's entry for an engine; of one that is damaged, a sentence in the place of the residuals.

    Args:
        entry: None: there is none.
    """
    if entry is None or (isinstance(entry, dict) and ("totals" not in entry or Totals.fits(entry["totals"]))):
        return entry
    found = reprlib.repr(entry["totals"] if isinstance(entry, dict) else entry)
    return {"residuals": f"its entry {CHECKPOINT_KEY!r} is damaged, and has {found} where numbers by name were saved"}


def takes_over(strategy: Kind) -> Kind:
    """Decorate a strategy: it accepts all arguments of Lightning's, so that a saved configuration becomes one of ours.

    Those that have no effect here are accepted as None or with their defaults. They are in the signature, because
    LightningCLI saves all arguments of a strategy, and accepts those of the signature only.

    Args:
        strategy: its last base is that of the same Lightning package, which passes further keywords on to DDP.
    """
    inherited: Any = strategy.__init__
    known = inspect.signature(inherited)
    theirs = {**DDP_ARGUMENTS, **inspect.signature(strategy.__bases__[-1]).parameters}
    left_out = {*known.parameters, *BY_LIGHTNING}
    strategy.unused = {
        name: p.replace(kind=p.KEYWORD_ONLY, annotation=Any)
        for name, p in theirs.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD and name not in left_out
    }

    @wraps(inherited)
    def init(self: Any, *given: Any, **keywords: Any) -> None:
        inherited(self, *given, **keywords)

    every = [*known.parameters.values(), *strategy.unused.values()]
    init.__signature__ = known.replace(parameters=every)  # type: ignore[attr-defined]
    strategy.__init__ = init  # type: ignore[method-assign]
    return strategy


def register(registry: Any, strategy: type) -> None:
    """Register the strategy under each name that Lightning has for ``ddp``, with ``sparse_`` in front of it.

    Args:
        registry: a Lightning package's StrategyRegistry.
        strategy: that package's class, derived from its ``DDPStrategy``.
    """
    for name, known in list(registry.items()):
        if known["strategy"] in strategy.__mro__[1:]:
            description = f"DDP with a sparsified gradient exchange, launched as {name}"
            registry.register(f"sparse_{name}", strategy, description, override=True, **known["init_params"])


def register_hsdp(registry: Any, strategy: type) -> None:
    """Register the strategy of sharded replicas, ``sparse_hsdp``, in the StrategyRegistry of a Lightning package."""
    description = "FSDP2 within replicas, a sparsified exchange between them"
    registry.register("sparse_hsdp", strategy, description=description, override=True)
