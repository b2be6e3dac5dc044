"""The strategy for Ray Train, as ``lightning_sparse.ray``."""

from __future__ import annotations

from typing import Any

from ray.train.lightning import RayDDPStrategy

from lightning_sparse.engine.config import keywords_of
from lightning_sparse.integrations.trainer import SparseDDPMixin, TrainerArguments

BY_RAY = {"timeout": "TorchConfig(timeout_s=600)", "process_group_backend": "TorchConfig(backend='gloo')"}
"""Arguments of the strategy that Ray decides, which starts the process group; and how to tell Ray."""


class RaySparseDDPStrategy(SparseDDPMixin, RayDDPStrategy):  # type: ignore[misc]  # without types
    """``sparse_ddp`` in workers of Ray Train, in place of Ray's ``RayDDPStrategy``.

    Devices, ranks and the process group are Ray's. Every rank writes its residuals beside the checkpoint that *it*
    saves: Ray collects the folders of all workers, also from nodes without access to each other's disks. A restarted
    worker continues with the residuals in the folder that Ray returns, on the same or another number of workers.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, and those of
    Lightning's ``DDPStrategy``.

    Raises:
        ValueError: for settings that cannot work; for ``timeout`` and ``process_group_backend``, which Ray decides.
        TypeError: for keywords that this strategy does not know.
    """

    package = next(
        base.__module__.partition(".strategies")[0]
        for base in RayDDPStrategy.__mro__
        if not base.__module__.startswith("ray.")
    )

    @keywords_of(TrainerArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        for name, instead in BY_RAY.items():
            if keywords.get(name) is not None:
                raise ValueError(
                    f"Expected no {name}, but got {keywords[name]!r}: Ray starts the process group. Tell Ray: "
                    f"TorchTrainer(..., torch_config={instead})."
                )
        super().__init__(*given, **keywords)
        self._timeout = None  # that of the process group

    def _place_of_residuals(self, path: Any) -> Any:
        """Return this rank's own path: rank 0's may be on a disk of another node."""
        return path
