"""The strategies of sharded replicas, for the Trainer and for Fabric: a grid of ranks, and distributed checkpoints.

The classes translate between Lightning and the engine and decide nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from lightning_sparse.api.checkpoint import FORMAT, MARKER, Found, SideFileError, resume
from lightning_sparse.core.checks import expect, is_integer
from lightning_sparse.engine import Engine, check_equal_on_ranks, failing_together
from lightning_sparse.engine.config import StrategyConfig, keywords_of, with_keywords_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.hsdp.attach import attach_hsdp_config, grid_of, networks_of, refuse_without_ddp
from lightning_sparse.hsdp.source import apart
from lightning_sparse.hsdp.state import read_sharded, remove_others, save_sharded
from lightning_sparse.integrations.base import CHECKPOINT_KEY, SparseStrategy, readable
from lightning_sparse.integrations.earlier import go_on
from lightning_sparse.integrations.fabric import SparseFabricMixin, check_has_room
from lightning_sparse.integrations.trainer import SparseTrainerMixin

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from lightning_fabric.strategies.model_parallel import ModelParallelStrategy as FabricBase
    from pytorch_lightning.strategies import ModelParallelStrategy as TrainerBase
else:
    FabricBase = TrainerBase = object

FIELDS = {field: MARKER[field] for field in ("save", "step")}
"""Of the marker, see those of side files."""
FOLDER = "sparse"
"""Folder of residuals in a distributed checkpoint; the ending of the folder beside a checkpoint that is one file."""


@dataclass(frozen=True, kw_only=True)
class HSDPArguments(StrategyConfig):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of the strategies of sharded replicas: the settings, and Lightning's of ``ModelParallelStrategy``."""

    replicate_size: int | str = "auto"
    """Number of replicas, between which gradients are exchanged sparsely; "auto": of nodes."""
    data_parallel_size: int | str = "auto"
    """Number of ranks over which a replica is sharded, as in Lightning; "auto": of those of a node."""
    tensor_parallel_size: int | str = 1
    """1: parts of tensors are not exchanged."""
    save_distributed_checkpoint: bool = True
    """Save checkpoints as folders, to which each rank writes its part; False: as one file."""
    process_group_backend: str | None = None
    """Argument of Lightning's ``ModelParallelStrategy``; None: by device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("replicate_size", "data_parallel_size"):
            size = getattr(self, name)
            expect(size == "auto" or (is_integer(size) and size >= 1), name, "'auto' or an integer from 1 on", size)
        if self.tensor_parallel_size not in (1, "auto"):
            raise ValueError(
                f"Expected tensor_parallel_size=1, but got {self.tensor_parallel_size!r}: the exchange is between "
                "replicas that are sharded in one way only. Use Lightning's ModelParallelStrategy for tensor "
                "parallelism."
            )
        refuse_without_ddp(self)

    def for_lightning(self) -> dict[str, Any]:
        """Return keywords for Lightning's strategy, without defaults that are None."""
        names = "save_distributed_checkpoint", "process_group_backend", "timeout"
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class HSDPStrategy(SparseStrategy):
    """Shards each replica with FSDP2, and exchanges gradients sparsely between replicas."""

    # Attributes of Lightning's strategies:
    num_nodes: int
    num_processes: int
    global_rank: int
    world_size: int
    _data_parallel_size: Any
    _tensor_parallel_size: Any
    _save_distributed_checkpoint: bool
    _device_mesh: Any

    def _choose(
        self, arguments: type[StrategyConfig], given: tuple[Any, ...], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """Check and keep the settings, and the sizes of the grid."""
        self._replicas = keywords.get("replicate_size", "auto")
        self._ranks = keywords.get("data_parallel_size", "auto")
        self._saves = 0
        return super()._choose(arguments, given, keywords)

    def _sizes(self) -> tuple[int, int]:
        """Return the number of replicas, and of ranks in each.

        Raises:
            ValueError: if their product is not the number of processes.
        """
        count = self.num_nodes * self.num_processes
        replicas, ranks = self._replicas, self._ranks
        if replicas == "auto":
            replicas = self.num_nodes if ranks == "auto" else count // ranks
        if ranks == "auto":
            ranks = count // replicas
        if replicas * ranks != count:
            raise ValueError(
                f"Expected replicate_size x data_parallel_size to be the number of processes, {count}, but got "
                f"{replicas} x {ranks}."
            )
        return replicas, ranks

    @contextmanager
    def _on_a_grid(self) -> Iterator[None]:
        """Let Lightning set up processes in the block, then put the grid in the place of its mesh."""
        replicas, ranks = self._sizes()
        self._data_parallel_size, self._tensor_parallel_size = replicas * ranks, 1
        yield
        self._data_parallel_size = ranks
        self._device_mesh = grid_of(self.root_device, replicas, ranks)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers: all ranks of all replicas have different samples."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def _attach_shards(self, model: Any) -> Engine:
        """Attach an engine to a model that is sharded now."""
        comm = TorchCollective()
        with failing_together(comm, self.root_device):
            networks = networks_of(model, self._device_mesh["replicate", "data_parallel"])
        config = replace(self.config, timeout=self._timeout)
        return attach_hsdp_config(model, networks, config, self.observers)

    def _folder(self, path: Any) -> Path:
        """Return the folder of a checkpoint's residuals: in a distributed one, else beside it."""
        return Path(path) / FOLDER if Path(path).is_dir() else Path(f"{os.fspath(path)}.{FOLDER}")

    @contextmanager
    def _residuals_in(self, path: Path, engine: Engine, own: dict[str, Any]) -> Iterator[None]:
        """Write the residuals of all ranks, then let the checkpoint be written, then remove those of earlier saves.

        Args:
            path: of the checkpoint.
            engine: whose residuals these are.
            own: this package's entry in the checkpoint, which gets the marker for :meth:`_load_residuals`.
        """
        comm, device = TorchCollective(), self.root_device
        self._saves += 1
        save = f"{engine.run_id}-{self._saves}"
        with failing_together(comm, device):
            if self._save_distributed_checkpoint and comm.rank == 0:
                if path.is_file():
                    path.unlink()
                path.mkdir(parents=True, exist_ok=True)
        inside = self._save_distributed_checkpoint
        folder = (path / FOLDER if inside else Path(f"{path}.{FOLDER}")) / save
        rest = save_sharded(engine, folder, save)
        own["residuals"] = {"format": FORMAT, "save": save, "step": rest["step"]}
        yield
        check_equal_on_ranks({"save": save}, comm, device)  # all ranks are here
        if comm.rank == 0:
            remove_others(folder)

    def _load_residuals(self, engine: Engine, path: Any, marker: Any, dense: bool) -> None:
        """Let an engine, bound to the optimizers whose states are loaded, continue with a folder of residuals."""
        folder, config = self._folder(path), self.config

        def read(marker: dict[str, Any]) -> Found:
            found = read_sharded(engine, folder / marker["save"], marker["save"], config.resize)
            if found.state["step"] != marker["step"]:
                raise SideFileError(f"they are of step {found.state['step']}, and the checkpoint of {marker['step']}")
            return found

        resume(engine, path, marker, FIELDS, folder, read, config.strict_resume, dense)


class SparseHSDPMixin(HSDPStrategy, SparseTrainerMixin, TrainerBase):
    """FSDP2 within each replica, and a sparsified exchange with error feedback between replicas.

    Everything else is Lightning's ``ModelParallelStrategy``: override ``configure_model``, and call there
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])``. ``data_parallel_size`` is the number of ranks over
    which a replica is sharded, as in Lightning, and ``replicate_size`` that of replicas. All ranks get other samples.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, but those that
    need DDP's buckets, and those of :class:`~lightning_sparse.integrations.hsdp.HSDPArguments`.

    Raises:
        ValueError: for settings that cannot work; at the start of fit, for a model that is sharded in another way, or
            for an optimizer that does not go with the memory.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseHSDPStrategy(density=0.01, replicate_size=2, data_parallel_size=4)
        >>> strategy.config.exchange_in_use
        PackedUnion()
        >>> ls.SparseHSDPStrategy(tensor_parallel_size=2)
        Traceback (most recent call last):
        ...
        ValueError: Expected tensor_parallel_size=1, but got 2: the exchange is between replicas ...
    """

    @keywords_of(HSDPArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(**self._choose(HSDPArguments, given, keywords))

    def setup_environment(self) -> None:
        """Set up processes as Lightning does, on a grid of replicas and their ranks."""
        with self._on_a_grid():
            super().setup_environment()
        module: Any = self.lightning_module
        module._device_mesh = self._device_mesh

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does; then attach the engine, if there is something to train."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._begin(lambda: self._attach_shards(self.model))
            assert self.engine is not None
            self._follow_optimizers(self.engine)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Follow changes of optimizers since the last step, then call Lightning's step."""
        self._follow_others()
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients within each replica in this context."""
        model: Any = self.model
        with apart(model):
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as Lightning does, with the residuals of all ranks.

        After an error, when others may not take part, residuals are not saved.
        """
        engine = self.engine
        if engine is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        path = Path(self.broadcast(filepath))
        totals = self._telling.totals.state_dict()
        own: dict[str, Any] = {"totals": totals if self._trainer.interrupted else self._mean_over_ranks(totals)}
        checkpoint[CHECKPOINT_KEY] = own
        writing: AbstractContextManager[Any] = nullcontext()
        if self.config.save_residuals and not (self._trainer.interrupted or engine.closed):
            writing = self._residuals_in(path, engine, own)
        elif self.config.save_residuals:
            own["residuals"] = "it was saved after fit, or after an error, without them"
        with writing:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does, and the residuals of all ranks if there is an engine."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if engine := self._open_engine:
            self._restore(engine, Path(self.broadcast(checkpoint_path)), readable(checkpoint.get(CHECKPOINT_KEY)))
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint as Lightning does, and the residuals beside one that is a single file."""
        super().remove_checkpoint(filepath)
        if self.global_rank == 0:
            shutil.rmtree(f"{filepath}.{FOLDER}", ignore_errors=True)


class FabricSparseHSDPMixin(HSDPStrategy, SparseFabricMixin, FabricBase):
    """FSDP2 within each replica, and a sparsified exchange with error feedback between replicas, for Fabric.

    Everything else is Fabric's ``ModelParallelStrategy``. ``parallelize_fn(module, mesh)`` shards a module with
    ``fully_shard(module, mesh=mesh["data_parallel"])`` and returns it. Set up modules before their optimizers are made.

    All other arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, but those
    that need DDP's buckets, and those of :class:`~lightning_sparse.integrations.hsdp.HSDPArguments`.

    Raises:
        ValueError: for settings that cannot work; when it is set up, for a module that is sharded in another way, or an
            optimizer that does not go with the memory.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> def shard(module, mesh):
        ...     return torch.distributed.fsdp.fully_shard(module, mesh=mesh["data_parallel"])
        >>> strategy = ls.FabricSparseHSDPStrategy(shard, density=0.01, replicate_size=2)
        >>> strategy.config.exchange_in_use
        PackedUnion()
    """

    @with_keywords_of(HSDPArguments)
    def __init__(self, parallelize_fn: Callable[[Any, Any], Any], *given: Any, **keywords: Any) -> None:
        super().__init__(parallelize_fn, **self._choose(HSDPArguments, given, keywords))
        self._backward_sync_control: Any = self  # whose method fabric.no_backward_sync calls

    def engine_of(self, module: Module) -> Engine | None:
        """Return the engine of a module that was set up."""
        return next((engine for sharded, engine in self._wrapped if module is sharded), None)

    def setup_environment(self) -> None:
        """Set up processes as Fabric does, on a grid of replicas and their ranks."""
        with self._on_a_grid():
            super().setup_environment()

    def setup_module(self, module: Module) -> Any:
        """Shard a module as it is told to, and attach an engine, which continues from the module's engine before."""
        left, totals = self._end_before(module)
        sharded = super().setup_module(module)
        engine = self._attach_shards(sharded)
        self._start(sharded, engine, totals)
        if left is not None:
            go_on(engine, left)
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
        own: dict[str, Any] = {"totals": self._mean_over_ranks(engine.stepper.totals.state_dict())}
        with self._residuals_in(path, engine, own) if self.config.save_residuals else nullcontext():
            super().save_checkpoint(path, {**state, CHECKPOINT_KEY: own}, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Fabric does; the engine of the module in the state continues if it has an optimizer.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no matching residuals.
        """
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        own = readable(rest.pop(CHECKPOINT_KEY, None))
        engines = self._engines_in(state if isinstance(state, Mapping) else {}).values()
        for engine in (engine for engine in engines if engine is not None):
            self._restore(engine, Path(self.broadcast(path)), own)
        return rest

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which gradients of a module are accumulated within each replica, if it is enabled."""
        return apart(module) if enabled else nullcontext()
