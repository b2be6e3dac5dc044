"""The common part of the strategies of sharded replicas: a grid of ranks, residuals in distributed checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.api.hsdp import attach_hsdp_config, grid_of, networks_of, refuse_without_ddp
from lightning_sparse.core.checks import expect, is_integer
from lightning_sparse.engine import Engine, check_equal_on_ranks, failing_together
from lightning_sparse.engine.config import StrategyConfig
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.state.schema import NOTHING
from lightning_sparse.engine.state.sharded import load_sharded, remove_others, save_sharded
from lightning_sparse.integrations.base import TIMEOUT, SparseStrategy

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
        """Return keywords for Lightning's strategy."""
        return {
            "save_distributed_checkpoint": self.save_distributed_checkpoint,
            "process_group_backend": self.process_group_backend,
            "timeout": self.timeout or TIMEOUT,
        }


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
    _timeout: timedelta | None

    def _choose_sizes(self, keywords: dict[str, Any]) -> None:
        """Keep the sizes of the grid, for the constructor."""
        self._replicas = keywords.get("replicate_size", "auto")
        self._ranks = keywords.get("data_parallel_size", "auto")
        self._saves = 0

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

    def _attach_shards(self, model: Any, precision: Any) -> Engine:
        """Attach an engine to a model that is sharded now."""
        comm = TorchCollective()
        with failing_together(comm, self.root_device):
            if getattr(precision, "scaler", None) is not None:
                raise ValueError(
                    "Expected a precision without a loss scale, such as 'bf16-mixed', but got '16-mixed': each rank "
                    "would look at its own part of the gradients only."
                )
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
            own: this package's entry in the checkpoint, which gets the marker for :meth:`_load`.
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
        own["residuals"] = {"save": save, "step": rest["step"]}
        yield
        check_equal_on_ranks({"save": save}, comm, device)  # all ranks are here
        if comm.rank == 0:
            remove_others(folder)

    def _load(self, engine: Engine, path: Path, own: dict[str, Any] | None) -> None:
        """Let an engine continue with the totals and residuals of a checkpoint; all ranks must call this.

        Args:
            engine: bound to the optimizers, whose states are loaded.
            path: of the checkpoint.
            own: this package's entry in the checkpoint; None: it is of a dense training.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are none that fit.
        """
        if own is not None and "totals" in own:
            engine.totals.load_state_dict(own["totals"])
        marker = None if own is None else own.get("residuals")
        step, trouble, notes = 0, "", list[str]()
        if not isinstance(marker, dict):
            trouble = marker or "it was saved without them"
        else:
            step = int(marker["step"])
            try:
                notes = load_sharded(
                    engine, self._folder(path) / str(marker["save"]), str(marker["save"]), self.config.resize
                )
            except (ValueError, RuntimeError) as error:  # on all ranks
                trouble = str(error)
        if trouble:
            engine.load_state_dict({**engine.state_dict(), **NOTHING, "step": step})
            told = (
                f"The residuals of the sparsified exchange were not restored from checkpoint {path}: "
                f"{trouble.rstrip('.')}. Error feedback starts empty on all ranks."
            )
        else:
            every = TorchCollective().all_gather_object(notes, self.root_device)
            found = dict.fromkeys(note for each in every for note in each)
            told = f"The residuals in checkpoint {path} do not fit in every respect: {' '.join(found)}" if found else ""
        if told and self.config.strict_resume and own is not None:
            raise RuntimeError(told)
        if told and own is not None:
            rank_zero_warn(told)
