"""The strategy of sharded replicas for Fabric of either Lightning package.

The class translates between Fabric and the engine and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import with_keywords_of
from lightning_sparse.integrations.base import CHECKPOINT_KEY
from lightning_sparse.integrations.fabric_steps import SparseFabricMixin, check_has_room
from lightning_sparse.integrations.hsdp import HSDPArguments, HSDPStrategy

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as Base
else:
    Base = object


class FabricSparseHSDPMixin(HSDPStrategy, SparseFabricMixin, Base):
    """FSDP2 within each replica, and a sparsified exchange with error feedback between replicas, for Fabric.

    Everything else is Fabric's ``ModelParallelStrategy``. ``parallelize_fn(module, mesh)`` shards a module with
    ``fully_shard(module, mesh=mesh["data_parallel"])`` and returns it. Set up modules before their optimizers are made.

    All other arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, but those
    that need DDP's buckets, and those of :class:`~lightning_sparse.integrations.hsdp.HSDPArguments`.

    Raises:
        ValueError: for settings that cannot work; when it is set up, for a module that is sharded in another way, or an
            optimizer that does not go with the memory or with ``lr_aware``.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> def shard(module, mesh):
        ...     return torch.distributed.fsdp.fully_shard(module, mesh=mesh["data_parallel"])
        >>> strategy = ls.FabricSparseHSDPStrategy(shard, density=0.01, replicate_size=2)
        >>> strategy.config.exchange
        PackedUnion()
    """

    @with_keywords_of(HSDPArguments)
    def __init__(self, parallelize_fn: Callable[[Any, Any], Any], *given: Any, **keywords: Any) -> None:
        for_lightning = self._choose(HSDPArguments, given, keywords)
        self._choose_sizes(keywords)
        self._have_no_engines()
        super().__init__(parallelize_fn, **for_lightning)
        self._backward_sync_control: Any = _NoSync(self)

    def engine_of(self, module: Module) -> Engine | None:
        """Return the engine of a module that was set up."""
        return next((engine for sharded, engine in self._wrapped if module is sharded), None)

    def setup_environment(self) -> None:
        """Set up processes as Fabric does, on a grid of replicas and their ranks."""
        with self._on_a_grid():
            super().setup_environment()

    def setup_module(self, module: Module) -> Any:
        """Shard a module as it is told to, and attach an engine, which continues from the module's engine before."""
        left, _, totals = self._end_before(module)
        sharded = super().setup_module(module)
        engine = self._attach_shards(sharded, self.precision)
        self._start(sharded, engine, totals)
        if left is not None:
            self._go_on(engine, left)
        return sharded

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint as Fabric does, with the residuals of all ranks if its state has an optimizer.

        Raises:
            ValueError: if the state uses the key of this package's entry.
        """
        check_has_room(state)
        path = Path(self.broadcast(path))
        engine = next((engine for engine in self._engines_in(state).values() if engine is not None), None)
        if engine is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        own: dict[str, Any] = {"totals": self._mean_over_ranks(engine.totals.state_dict())}
        with self._residuals_in(path, engine, own) if self.config.save_residuals else nullcontext():
            super().save_checkpoint(path, {**state, CHECKPOINT_KEY: own}, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Fabric does; the engine of the module in the state continues if it has an optimizer.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no matching residuals.
        """
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        own: dict[str, Any] | None = rest.pop(CHECKPOINT_KEY, None)
        engines = self._engines_in(state if isinstance(state, Mapping) else {}).values()
        for engine in (engine for engine in engines if engine is not None):
            self._load(engine, Path(self.broadcast(path)), own)
        return rest


class _NoSync:
    """Lets modules accumulate gradients, for ``fabric.no_backward_sync``.

    Args:
        strategy: whose engines exchange gradients.
    """

    def __init__(self, strategy: FabricSparseHSDPMixin) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients of a module are accumulated and not exchanged, if it is enabled."""
        engine = self._strategy.engine_of(module) if enabled else None
        return nullcontext() if engine is None else engine.no_sync()
