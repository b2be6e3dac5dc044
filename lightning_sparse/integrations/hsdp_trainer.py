"""The strategy of sharded replicas for the Trainer of either Lightning package.

The class translates between Lightning and the engine and decides nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_sparse.engine.config import keywords_of
from lightning_sparse.integrations.base import CHECKPOINT_KEY
from lightning_sparse.integrations.hsdp import FOLDER, HSDPArguments, HSDPStrategy
from lightning_sparse.integrations.trainer_steps import SparseTrainerMixin

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from pytorch_lightning.strategies import ModelParallelStrategy as Base
else:
    Base = object


class SparseHSDPMixin(HSDPStrategy, SparseTrainerMixin, Base):
    """FSDP2 within each replica, and a sparsified exchange with error feedback between replicas.

    Everything else is Lightning's ``ModelParallelStrategy``: override ``configure_model``, and call there
    ``fully_shard(module, mesh=self.device_mesh["data_parallel"])``. ``data_parallel_size`` is the number of ranks over
    which a replica is sharded, as in Lightning, and ``replicate_size`` that of replicas. All ranks get other samples.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, but those that
    need DDP's buckets, and those of :class:`~lightning_sparse.integrations.hsdp.HSDPArguments`.

    Raises:
        ValueError: for settings that cannot work; at the start of fit, for a model that is sharded in another way, for
            ``precision="16-mixed"``, or for an optimizer that does not go with the memory or with ``lr_aware``.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseHSDPStrategy(density=0.01, replicate_size=2, data_parallel_size=4)
        >>> strategy.config.exchange
        PackedUnion()
        >>> ls.SparseHSDPStrategy(tensor_parallel_size=2)
        Traceback (most recent call last):
        ...
        ValueError: Expected tensor_parallel_size=1, but got 2: the exchange is between replicas ...
    """

    @keywords_of(HSDPArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        for_lightning = self._choose(HSDPArguments, given, keywords)
        self._choose_sizes(keywords)
        self._have_no_engine()
        super().__init__(**for_lightning)

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
            self._begin(lambda _: self._attach_shards(self.model, self.precision_plugin))
            assert self.engine is not None
            self._follow_optimizers(self.engine)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Follow changes of optimizers since the last step, then call Lightning's step."""
        self._follow_others()
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in this context, and do not exchange them."""
        engine = self._open_engine
        with nullcontext() if engine is None else engine.no_sync():
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
            self._count_steps_left_out(engine)
            writing = self._residuals_in(path, engine, own)
        elif self.config.save_residuals:
            own["residuals"] = "it was saved after fit, or after an error, without them"
        with writing:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Lightning does, and the residuals of all ranks if there is an engine."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if engine := self._open_engine:
            self._load(engine, Path(self.broadcast(checkpoint_path)), checkpoint.get(CHECKPOINT_KEY))
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint as Lightning does, and the residuals beside one that is a single file."""
        super().remove_checkpoint(filepath)
        if self.global_rank == 0:
            shutil.rmtree(f"{filepath}.{FOLDER}", ignore_errors=True)
