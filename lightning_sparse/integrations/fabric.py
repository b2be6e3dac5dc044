"""The strategy for Fabric of either Lightning package.

Fabric wraps each module in its own DDP, any number of them, and has no communication hooks: every module gets its own
engine. The class translates between Fabric and the engines and decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from torch.nn import Module
from torch.optim import Optimizer

from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import keywords_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.state.checkpoint import side_directory
from lightning_sparse.integrations.base import CHECKPOINT_KEY, StrategyArguments, planner_of, profile_of
from lightning_sparse.integrations.fabric_steps import SparseFabricMixin, check_has_room

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from lightning_fabric.strategies.ddp import DDPStrategy as Base
else:
    Base = object


@dataclass(frozen=True, kw_only=True)
class FabricArguments(StrategyArguments):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of the strategies for Fabric."""

    precision: Any = None
    """Filled in by Fabric."""


class FabricSparseDDPMixin(SparseFabricMixin, Base):
    """DDP whose gradient all-reduce is a sparsified exchange with error feedback, for Fabric.

    Everything else is Fabric's ``DDPStrategy``: launchers, cluster environments, ``fabric.no_backward_sync``. Clipping
    acts on each rank's gradients with AdamW, and on averages otherwise (``docs/training.md``). Each module that is set
    up has its own engine; see :attr:`engines`. A single device trains as plain DDP does, unless
    ``single_device="sparse"`` applies the method there, too.

    ``fabric.save`` writes each rank's residuals beside every checkpoint whose state holds a module and an optimizer;
    ``fabric.load`` into such a state lets the engines continue.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, and those of
    Lightning's ``DDPStrategy`` in :class:`FabricArguments`.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier; when it is set up, for an optimizer that does not go with the memory or with
            ``lr_aware``.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.FabricSparseDDPStrategy(sparsifier="topk", density=0.01, dense=["*.bias"])
        >>> strategy.config.exchange
        GatherPairs()
        >>> ls.FabricSparseDDPStrategy(densty=0.01)
        Traceback (most recent call last):
        ...
        TypeError: FabricSparseDDPStrategy does not know the keyword 'densty'. Did you mean density? ...
    """

    host = "Fabric"

    @keywords_of(FabricArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        for_lightning = self._choose(FabricArguments, given, keywords)
        self._have_no_engines()
        super().__init__(**for_lightning)

    def setup_module(self, module: Module) -> Any:
        """Wrap a module as Fabric does, and attach an engine; at a second set-up it continues from the one before."""
        left, profile, totals = self._end_before(module)
        loaded = self._waiting.pop(module, None)
        if loaded is not None:
            profile = (loaded[1] or {}).get("profile")
        self._check_model(module)
        with self._small_deliveries(module):
            ddp = super().setup_module(module)
        engine = self._attach(ddp, self.precision, profile)
        self._start(ddp, engine, totals)
        if loaded is not None:
            self._resume(engine, *loaded)
        elif left is not None:
            self._go_on(engine, left)
        return ddp

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a checkpoint as Fabric does, with every rank's residuals beside it if its state has an optimizer.

        Raises:
            ValueError: if the state uses the key of this package's entry.
            RuntimeError: on all ranks, if residuals could not be written.
        """
        check_has_room(state)
        modules = {key: engine for key, engine in self._engines_in(state).items() if engine is not None}
        write = partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        if modules:  # names may hold metrics, which may differ from rank to rank: rank 0 writes the checkpoint
            path = self.broadcast(path)
        own: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            for key, engine in modules.items():
                profile = profile_of(engine)
                own[key] = {} if profile is None else {"profile": profile}
                own[key]["totals"] = self._mean_over_ranks(engine.totals.state_dict())
                if self.config.save_residuals:
                    place = _place(path, key, len(modules))
                    own[key]["residuals"] = stack.enter_context(
                        self._side_files.beside(place, engine, write, TorchCollective())
                    )
            kept = {CHECKPOINT_KEY: own} if own else {}
            super().save_checkpoint(path, {**state, **kept}, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Fabric does; engines of modules in the state continue if it has an optimizer, too.

        The engine of a module that has not been set up yet continues when it is.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no matching residuals.
        """
        for key, engine in self._engines_in(state if isinstance(state, Mapping) else {}).items():
            if engine is None:  # Fabric changes its precision later: weights in float64 would be rounded before
                self.precision.convert_module(state[key])
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, (Module, Optimizer)):
            return rest
        own: dict[str, dict[str, Any]] | None = rest.pop(CHECKPOINT_KEY, None)
        for key, engine in self._engines_in(state or {}).items():
            found = None if own is None else own.get(key, {})
            place = _place(path, key, len(own or ()))
            if engine is None:
                self._waiting[state[key]] = place, found
                continue
            if planner := planner_of(engine):
                planner.resume((found or {}).get("profile"), engine)
            self._resume(engine, place, found)
        return rest

    def _resume(self, engine: Engine, place: str, found: dict[str, Any] | None) -> None:
        """Let an engine continue from a checkpoint's entry; None: there is none."""
        self._restore(engine, place, found)
        if found and "totals" in found:
            engine.totals.load_state_dict(found["totals"])


def _place(path: Any, key: str, modules: int) -> str:
    """Return the path beside which a module's side files are; with several modules, in the checkpoint's directory."""
    return str(path) if modules <= 1 else f"{side_directory(path)}/{quote(key, safe='')}"
