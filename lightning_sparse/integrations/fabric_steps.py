"""The common part of the strategies for Fabric: an engine for each module, bound to the optimizers that are set up.

The class translates between Fabric and the engines and decides nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import Module
from torch.optim import Optimizer

from lightning_sparse.engine import Engine
from lightning_sparse.engine.metrics import Totals
from lightning_sparse.engine.optimizers.hooks import uninterrupted
from lightning_sparse.engine.optimizers.kinds import ids_of, stepping
from lightning_sparse.integrations.base import CHECKPOINT_KEY, SparseStrategy, profile_of
from lightning_sparse.integrations.earlier import Left
from lightning_sparse.tuning.controllers.announcer import Announcer

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from lightning_fabric.strategies.parallel import ParallelStrategy as Base
else:
    Base = object


def check_has_room(state: Mapping[str, Any]) -> None:
    """Raise if a state that a user saves has the key of this package's entry.

    Raises:
        ValueError: saying so.
    """
    if CHECKPOINT_KEY in state:
        raise ValueError(f"Expected a state without the key {CHECKPOINT_KEY!r}, which is used for residuals.")


class SparseFabricMixin(SparseStrategy, Base):
    """A strategy for Fabric whose averages come from engines."""

    host = "Fabric"

    def _have_no_engines(self) -> None:
        """Begin without engines; for the constructor."""
        self.optimizers: list[Optimizer] = []
        """Optimizers that were set up."""
        self._late: list[Optimizer] = []
        """Optimizers that were set up after the first step."""
        self._wrapped: list[tuple[Any, Engine]] = []
        self._waiting: dict[Module, tuple[str, dict[str, Any] | None]] = {}

    @property
    def engines(self) -> list[Engine]:
        """The engines, one for each module, in the order of their set-up."""
        return [engine for _, engine in self._wrapped]

    @property
    def engine(self) -> Engine | None:
        """The only engine; None before a module is set up.

        Raises:
            RuntimeError: if there are several.
        """
        engines = self.engines
        if len(engines) > 1:
            raise RuntimeError(f"There are {len(engines)} engines, one for each module: see strategy.engines.")
        return engines[0] if engines else None

    def engine_of(self, module: Module) -> Engine | None:
        """Return the engine of a module, given plain or wrapped by DDP."""
        return next((engine for ddp, engine in self._wrapped if module in (ddp, ddp.module)), None)

    def _end_before(self, module: Module) -> tuple[Left | None, dict[str, Any] | None, Totals]:
        """Close the engine that a module had before; return what it leaves, its profile and its totals."""
        before = self.engine_of(module)
        if before is None:
            return None, None, Totals()
        before.end_batch()
        left = Left.by(before), profile_of(before), before.totals
        before.close()
        self._wrapped = [(wrapped, engine) for wrapped, engine in self._wrapped if engine is not before]
        return left

    def _start(self, wrapped: Any, engine: Engine, totals: Totals) -> None:
        """Let the engine of a module that has been set up go on from totals, with all optimizers."""
        engine.add_observer(Announcer())
        engine.totals = totals
        self._wrapped.append((wrapped, engine))
        self._follow(engine)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer as Fabric does, and bind it to the engines.

        Raises:
            ValueError: if it does not go with the memory or with ``lr_aware``.
        """
        chosen: Optimizer = super().setup_optimizer(optimizer)
        self.optimizers.append(chosen)
        if any(engine.step for engine in self.engines):
            self._late.append(chosen)
        for engine in self.engines:
            self._follow(engine)
        return chosen

    def _follow(self, engine: Engine) -> None:
        own = {id(p) for p in engine.parameters.values()}
        applying: list[Optimizer] = []
        replaced: dict[type[Optimizer], set[int]] = {}
        for one in reversed(self.optimizers):
            kind, held = type(stepping(one)), ids_of(one) & own
            by_others = (ids for other, ids in replaced.items() if other is not kind)
            if held.difference(*by_others):
                applying.insert(0, one)
            if any(one is late for late in self._late):  # replaces earlier ones of another kind
                replaced.setdefault(kind, set()).update(held)
        self._follow_together(engine, applying)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take a step as Fabric does; skip it after non-finite gradients if no loss scaler does so.

        Signals wait while the optimizer updates parameters.
        """
        with uninterrupted():
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip as Fabric does; drop non-finite gradients before the norm is computed if no loss scaler skips the step.

        If :meth:`.Engine.clip_in_place_of_averages` applies, each rank's gradients are clipped from the next step on,
        before the exchange, and averages are not clipped.
        """
        self._skip_void(optimizer, self.precision, drop=True)
        given = inspect.signature(super().clip_gradients_norm).bind(module, optimizer, *args, **kwargs)
        values = given.arguments
        if values.get("norm_type", 2.0) == 2.0 and self._clips_locally(optimizer, values["max_norm"], "norm"):
            values["max_norm"] = math.inf
        return super().clip_gradients_norm(*given.args, **given.kwargs)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any) -> None:
        """Clip as Fabric does, or each rank's gradients as in :meth:`clip_gradients_norm`."""
        if self._clips_locally(optimizer, clip_val, "value"):
            self.precision.unscale_gradients(optimizer)
        else:
            super().clip_gradients_value(module, optimizer, clip_val)

    def _engines_in(self, state: Mapping[str, Any]) -> dict[str, Engine | None]:
        """Return the engines of the modules in a state, by key; none if the state has no optimizer."""
        if not any(isinstance(value, Optimizer) for value in state.values()):
            return {}
        return {key: self.engine_of(value) for key, value in state.items() if isinstance(value, Module)}

    def teardown(self) -> None:
        """Close the engines, then everything else."""
        for engine in self.engines:
            engine.close()
        super().teardown()
        self._side_files.sweep()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no engines until modules are set up."""
        return {**vars(self), "_wrapped": []}
