"""The strategies for Fabric of either Lightning package: their common base, and that of DDP.

Fabric wraps each module in its own DDP, any number of them, and has no communication hooks: every module gets its own
engine, bound to the optimizers that are set up. The classes translate between Fabric and the engines, and decide
nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_sparse.api.checkpoint import side_directory
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import keywords_of
from lightning_sparse.engine.metrics import Totals
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.hooks import uninterrupted
from lightning_sparse.engine.optimizers.kinds import ids_of, stepping
from lightning_sparse.integrations.base import (
    CHECKPOINT_KEY,
    SparseStrategy,
    StrategyArguments,
    readable,
    refuse_with_overlap,
)
from lightning_sparse.integrations.earlier import Left, go_on
from lightning_sparse.tuning.controllers.announcer import Announcer

if TYPE_CHECKING:  # at run time the class of each package has its own base
    from lightning_fabric.strategies.ddp import DDPStrategy
    from lightning_fabric.strategies.parallel import ParallelStrategy
else:
    DDPStrategy = ParallelStrategy = object


def check_has_room(state: Mapping[str, Any]) -> None:
    """Raise if a state that a user saves has the key of this package's entry.

    Raises:
        ValueError: saying so.
    """
    if CHECKPOINT_KEY in state:
        raise ValueError(f"Expected a state without the key {CHECKPOINT_KEY!r}, which is used for residuals.")


class SparseFabricMixin(SparseStrategy, ParallelStrategy):
    """A strategy for Fabric whose averages come from engines."""

    host = "Fabric"

    def _choose(self, *given: Any) -> dict[str, Any]:
        """Check and keep the settings; begin without engines."""
        self.optimizers: list[Optimizer] = []
        """Optimizers that were set up."""
        self._late: list[Optimizer] = []
        """Optimizers that were set up after the first step."""
        self._wrapped: list[tuple[Any, Engine]] = []
        self._waiting: dict[Module, tuple[str, dict[str, Any] | None]] = {}
        self._rounded: dict[Module, dict[str, tuple[Tensor, torch.dtype]]] = {}
        """Weights of checkpoints for modules that are not set up, and the other dtypes in which they were loaded."""
        return super()._choose(*given)

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

    def _end_before(self, module: Module) -> tuple[Left | None, Totals]:
        """Close the engine that a module had before; return its state and its totals."""
        before = self.engine_of(module)
        if before is None:
            return None, Totals()
        left = Left.by(before), before.stepper.totals
        before.close()
        self._wrapped = [(wrapped, engine) for wrapped, engine in self._wrapped if engine is not before]
        return left

    def _start(self, wrapped: Any, engine: Engine, totals: Totals) -> None:
        """Let the engine of a module that has been set up go on from totals, with all optimizers."""
        engine._add_observer(Announcer())
        engine.stepper.totals = totals
        self._wrapped.append((wrapped, engine))
        self._follow(engine)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Set up an optimizer as Fabric does, and bind it to the engines.

        Raises:
            ValueError: if it does not go with the memory.
        """
        chosen: Optimizer = super().setup_optimizer(optimizer)
        self.optimizers.append(chosen)
        if any(engine.step for engine in self.engines):
            self._late.append(chosen)
        for engine in self.engines:
            self._follow(engine)
        return chosen

    def _follow(self, engine: Engine) -> None:
        own = {id(p) for p in engine.stepper.parameters.values()}
        applying: list[Optimizer] = []
        replaced: dict[type[Optimizer], set[int]] = {}
        for one in reversed(self.optimizers):
            kind, held = type(stepping(one)), ids_of(one) & own
            by_others = (ids for other, ids in replaced.items() if other is not kind)
            if held.difference(*by_others):
                applying.insert(0, one)
            if any(one is late for late in self._late):  # replaces earlier ones of another kind
                replaced.setdefault(kind, set()).update(held)
        with engine._failing_together():
            refuse_with_overlap(engine, [], "", getattr(self.precision, "scaler", None))
            engine._show(applying)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take a step as Fabric does; signals wait while the optimizer updates parameters."""
        with uninterrupted():
            return super().optimizer_step(optimizer, **kwargs)

    def clip_gradients_norm(self, module: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip as Fabric does, by the norm of the mean gradient."""
        bound = inspect.signature(super().clip_gradients_norm).bind(module, optimizer, *args, **kwargs)
        bound.apply_defaults()
        options = {name: value for name, value in bound.arguments.items() if name not in ("module", "optimizer")}
        self.precision.unscale_gradients(optimizer)
        return self._clip_by_norm(self.precision.main_params(optimizer), options.pop("max_norm"), **options)

    def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any) -> None:
        """Clip values: each rank's own of gradients that are not averaged yet."""
        self.precision.unscale_gradients(optimizer)
        self._clip_by_value(self.precision.main_params(optimizer), clip_val)

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


@dataclass(frozen=True, kw_only=True)
class FabricArguments(StrategyArguments):  # type: ignore[misc]  # see StrategyConfig
    """Arguments of the strategies for Fabric."""

    precision: Any = None
    """Filled in by Fabric."""


class FabricSparseDDPMixin(SparseFabricMixin, DDPStrategy):
    """DDP whose gradient all-reduce is a sparsified exchange with error feedback, for Fabric.

    Everything else is Fabric's ``DDPStrategy``: launchers, cluster environments, ``fabric.no_backward_sync``. Clipping
    by norm is by that of the mean gradient, as with DDP; by value, it acts on each rank's own. Each module that is set
    up has its own engine; see :attr:`engines`. A single device trains as plain DDP does, unless
    ``single_device="sparse"`` applies the method there, too.

    ``fabric.save`` writes each rank's residuals beside every checkpoint whose state holds a module and an optimizer;
    ``fabric.load`` into such a state lets the engines continue.

    All arguments are keywords: the settings of :class:`~lightning_sparse.engine.config.StrategyConfig`, and those of
    Lightning's ``DDPStrategy`` in :class:`FabricArguments`. Arguments at the end of the signature, of
    ``DistributedDataParallel``, have to be None or at their defaults.

    Raises:
        ValueError: for settings that cannot work: unknown names, a density outside (0, 1], an exchange that does not
            accept the sparsifier; when it is set up, for an optimizer that does not go with the memory.
        TypeError: for keywords that this strategy does not know.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.FabricSparseDDPStrategy(sparsifier="top_k", density=0.01, dense=["*.bias"])
        >>> strategy.config.exchange_in_use
        GatherPairs()
        >>> ls.FabricSparseDDPStrategy(densty=0.01)
        Traceback (most recent call last):
        ...
        TypeError: FabricSparseDDPStrategy does not know the keyword 'densty'. Did you mean density? ...
    """

    @keywords_of(FabricArguments)
    def __init__(self, *given: Any, **keywords: Any) -> None:
        super().__init__(**self._choose(FabricArguments, given, keywords))

    def setup_module(self, module: Module) -> Any:
        """Wrap a module as Fabric does, and attach an engine; at a second set-up it continues from the one before."""
        left, totals = self._end_before(module)
        loaded = self._waiting.pop(module, None)
        self._load_exactly(module)
        self._check_model(module)
        ddp = super().setup_module(module)
        engine = self._attach(ddp)
        self._start(ddp, engine, totals)
        if loaded is not None:
            self._restore(engine, *loaded)
        elif left is not None:
            go_on(engine, left)
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
        for engine in self.engines:
            if not engine.closed:
                engine.stepper.follow_changes()
        modules = {key: engine for key, engine in self._engines_in(state).items() if engine is not None}
        write = partial(self.checkpoint_io.save_checkpoint, storage_options=storage_options)
        if modules:  # names may hold metrics, which may differ from rank to rank: rank 0 writes the checkpoint
            path = self.broadcast(path)
        own: dict[str, dict[str, Any]] = {}
        with ExitStack() as stack:
            for key, engine in modules.items():
                own[key] = {"totals": self._mean_over_ranks(engine.stepper.totals.state_dict())}
                if self.config.save_residuals:
                    place = _place(path, key, len(modules))
                    beside = self._side_files.beside(place, engine, write, TorchCollective())
                    own[key]["residuals"] = stack.enter_context(beside)
            kept = {CHECKPOINT_KEY: own} if own else {}
            super().save_checkpoint(path, {**state, **kept}, storage_options, filter)

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load weights as Fabric does, and keep those that are rounded: set-up may change the precision."""
        super().load_module_state_dict(module, state_dict, strict)
        if self.engine_of(module) is None:
            own = module.state_dict()
            given = {name: x for name, x in state_dict.items() if isinstance(x, Tensor) and name in own}
            self._rounded[module] = {n: (x, own[n].dtype) for n, x in given.items() if x.dtype != own[n].dtype}

    def _load_exactly(self, module: Module) -> None:
        """Load what was rounded again, in the precision that Fabric has given a module, where nobody has changed it."""
        own = module.state_dict()
        kept = {name: one for name, one in self._rounded.pop(module, {}).items() if name in own}
        same = {n: x for n, (x, dtype) in kept.items() if torch.equal(own[n].cpu().to(dtype), x.cpu().to(dtype))}
        module.load_state_dict(same, strict=False)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint as Fabric does; engines of modules in the state continue if it has an optimizer, too.

        The engine of a module that has not been set up yet continues when it is.

        Raises:
            RuntimeError: on all ranks, with ``strict_resume``, if there are no matching residuals.
        """
        rest: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if isinstance(state, (Module, Optimizer)):
            return rest
        own = rest.pop(CHECKPOINT_KEY, None)
        entries: dict[str, Any] = own if isinstance(own, dict) else {}
        for key, engine in self._engines_in(state or {}).items():
            found = None if own is None else readable(entries.get(key, {}) if entries is own else own)
            place = _place(path, key, len(entries))
            if engine is None:
                self._waiting[state[key]] = place, found
                continue
            self._restore(engine, place, found)
        return rest


def _place(path: Any, key: str, modules: int) -> str:
    """Return the path beside which a module's side files are; with several modules, in the checkpoint's directory."""
    return str(path) if modules <= 1 else f"{side_directory(path)}/{quote(key, safe='')}"
