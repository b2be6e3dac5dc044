"""Logs of a Trainer's run without any callback: two lines, and settings and warnings to all loggers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lightning_sparse.core.console import say
from lightning_sparse.core.registry import Registry
from lightning_sparse.core.version import __version__
from lightning_sparse.engine import Engine
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.metrics import MB, Totals, totals_of
from lightning_sparse.integrations.loggers import PREFIX, log_settings, log_warning
from lightning_sparse.integrations.monitor import SparsityMonitor
from lightning_sparse.methods.exchanges import EXCHANGES
from lightning_sparse.methods.grouping import GROUPINGS
from lightning_sparse.methods.memory import MEMORIES
from lightning_sparse.methods.sparsifiers import SPARSIFIERS
from lightning_sparse.tuning.controllers.announcer import MORE, Counted, at_end, at_start


class Telling:
    """Logger of the engines of a strategy, from fit to fit."""

    def __init__(self) -> None:
        self.totals = Totals()
        """Totals of all fits."""
        self._warnings: list[str] = []
        self._trainer: Any = None
        self._before = Counted({}, 0, 0)

    def follow(self, engine: Engine, trainer: Any) -> None:
        """Let an engine continue with the totals and warnings of the one before."""
        self._trainer = trainer
        engine.stepper.totals, engine.warnings, engine.on_warning = self.totals, self._warnings, self._pass_on

    def start(self, engine: Engine, config: SparsificationConfig) -> None:
        """Log the start of fit, when the settings of the first step are known."""
        trainer = self._trainer
        self._before = Counted.of(engine)
        self.totals.start()
        if not trainer.is_global_zero:
            return
        say(at_start(engine) if self._watched else f"{at_start(engine)} {MORE}")
        for logger in trainer.loggers:
            log_settings(logger, {"sparse_ddp": settings_of(engine, config)})

    def end(self, engine: Engine) -> None:
        """Log the end of fit and the totals, after all callbacks, of which one may flush."""
        self.totals.pause()
        own = self.totals.state_dict()
        ranks = [json.loads(told) for told in engine.comm.leave(json.dumps([own, self._before.totals]))]
        now, before = (
            {name: fmean(one.get(name, 0.0) for one in each) for name in own} for each in zip(*ranks, strict=True)
        )
        line = at_end(engine, self._before._replace(totals=before), Counted.of(engine)._replace(totals=now))
        if line and self._trainer.is_global_zero:
            if self._watched:
                self._log(now)
            say(line)

    @property
    def _watched(self) -> bool:
        return any(isinstance(callback, SparsityMonitor) for callback in self._trainer.callbacks)

    def _log(self, numbers: Mapping[str, float]) -> None:
        """Log the final totals, with unlogged steps and a flush, in the row of a validation at this moment."""
        totals = Totals()
        totals.load_state_dict(numbers)
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped - 1  # Lightning's own, without a public name
        for logger in self._trainer.loggers:
            logger.log_metrics({f"{PREFIX}{name}": value for name, value in totals_of(totals).items()}, step)
            logger.save()

    def _pass_on(self, kind: str, sentence: str) -> None:
        for logger in self._trainer.loggers:
            log_warning(logger, kind, sentence, self._trainer.global_step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose counts start at zero."""
        return {**vars(self), "totals": Totals(), "_warnings": [], "_trainer": None}


def settings_of(engine: Engine, config: SparsificationConfig) -> dict[str, Any]:
    """Return the settings for a logger: plain values, by which runs can be filtered.

    Objects are given by name, as in ``sparsifier="exdyna"``, and by their settings, as in
    ``sparsifier_settings={"class": "ExDyna", "alpha": 1.1, ...}``. Further values are the number of ranks, the version
    of this package, the numbers of all and of sparsified parameters, and the MB that a rank keeps.
    """
    now = engine.settings
    registries: dict[str, Registry[Any]] = {
        "sparsifier": SPARSIFIERS,
        "memory": MEMORIES,
        "exchange": EXCHANGES,
        "grouping": GROUPINGS,
    }
    plain = now.as_dict()
    return {
        **config.as_dict(),
        **{name: registry.name_of(getattr(now, name)) for name, registry in registries.items()},
        **{f"{name}_settings": plain[name] for name in registries},
        "ranks": engine._world_size,
        "version": __version__,
        "parameters": sum(group.numel for group in engine.groups),
        "sparsified_parameters": sum(group.numel for group in engine.groups if not group.dense),
        "residual_mb": engine.memory_bytes / MB,
    }
