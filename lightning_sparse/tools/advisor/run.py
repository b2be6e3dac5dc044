"""The advisor: profiles a model with its Trainer, and predicts step times."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse import Rules, Watch
from lightning_sparse.core.checks import check_integer, plain
from lightning_sparse.core.console import page
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.integrations import packages
from lightning_sparse.sparsifiers import SPARSIFIERS
from lightning_sparse.tools.advisor.prediction import (
    ALL_SPARSE,
    BEST_TRAINED,
    EVERYTHING,
    HALVED,
    MARGIN,
    Measured,
    Prediction,
    Scenario,
    best_groupings,
    overlapped,
    predict,
    scenarios,
    winner,
)
from lightning_sparse.tools.advisor.survey import Survey

MANY = 8
"""Ranks from which on trainings depend more on the rate than dense ones."""
OWN_OPTIONS = {
    "logger": False,
    "callbacks": None,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": -1,
    "max_time": None,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "accumulate_grad_batches": 1,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "profiler": None,
    "barebones": False,
}
"""Options of the Trainer that profiling overrides."""
KEPT = {
    "find_unused_parameters": False,
    "static_graph": False,
    "gradient_as_bucket_view": False,
    "broadcast_buffers": True,
    "forward_sync_buffers": None,
    "start_method": "popen",
}
"""Settings of a DDP strategy that profiling and the advice keep, and their defaults."""

LEFT_OUT = ("random_k",)
"""Sparsifiers that are tried only if named: fast ones that diverge at low densities (docs/reports/equal-bytes.md)."""


@dataclass(frozen=True, repr=False)
class Advice:
    """Predicted step times, and decisions by them; printed, it shows the decisions.

    Args:
        measured: the measurements.
        predictions: for every scenario, method, density and grouping.
    """

    measured: Measured
    predictions: tuple[Prediction, ...]

    def __repr__(self) -> str:
        told = ((self.verdict(scenario), *self.remarks(scenario)) for scenario in self.scenarios)
        return "\n".join(itertools.chain.from_iterable(told))

    @property
    def scenarios(self) -> list[Scenario]:
        """Ranks and networks, the measured one first."""
        return list(dict.fromkeys(p.scenario for p in self.predictions))

    def best(self, scenario: Scenario | None = None) -> Prediction:
        """Return the best prediction, see :func:`~lightning_sparse.tools.advisor.prediction.winner`."""
        served = {method.name for method in self.measured.methods if method.second_moments}
        suited = served if self.measured.unsuited is not None else ()
        return winner(self.predictions, scenario or self.scenarios[0], not self.measured.on_cpu, suited)

    def step_seconds(
        self, method: str, density: float = 1.0, grouping: str | None = None, scenario: Scenario | None = None
    ) -> float:
        """Return a predicted step time; with the fastest grouping, if none is named.

        Raises:
            KeyError: if there is no such prediction.
        """
        wanted = scenario or self.scenarios[0]
        found = [
            p.step_seconds
            for p in self.predictions
            if p.scenario == wanted
            and p.method == method
            and abs(p.density - density) < 1e-12
            and grouping in (None, p.grouping)
        ]
        if not found:
            raise KeyError(f"There is no prediction of {method} at density {density} with grouping {grouping}.")
        return min(found)

    def verdict(self, scenario: Scenario | None = None) -> str:
        """Return the decision in one sentence."""
        scenario = scenario or self.scenarios[0]
        best = self.best(scenario)
        rows = best_groupings([p for p in self.predictions if p.scenario == scenario])
        dense = next(p for p in rows if p.method == "dense")
        step = f"dense DDP's {1e3 * dense.step_seconds:.3g} ms a step"
        if best.sparse:
            halved = min((p.over_dense for p in rows if p.method in HALVED), default=None)
            return (
                f"{scenario.label}: {best.method} at density {best.density:g}, grouping {best.grouping}, takes "
                f"{best.over_dense:.2f} times {step}"
                + (f" (DDP with 16 bits: {halved:.2f})." if halved is not None else ".")
            )
        sentence = f"{scenario.label}: stay dense"
        if best.method in HALVED:
            sentence += f", with DDP's {best.method} hook ({best.over_dense:.2f} times {step})"
        elif best.method == EVERYTHING:
            sentence += (
                f"; sparsifier={EVERYTHING!r} with grouping={best.grouping!r} takes {best.over_dense:.2f} times {step}"
            )
        fastest = min((p for p in rows if p.sparse), key=lambda p: p.step_seconds, default=None)
        if fastest is None:
            return sentence + "."
        return (
            f"{sentence}. The fastest sparsifier, {fastest.method} at {fastest.density:g}, takes "
            f"{fastest.over_dense:.2f} times {step}."
        )

    def remarks(self, scenario: Scenario | None = None) -> list[str]:
        """Return further changes to the training if this advice is followed, one paragraph each."""
        unsuited, best = self.measured.unsuited, self.best(scenario)
        served = any(method.second_moments for method in self.measured.methods if method.name == best.method)
        told = [unsuited.remedy()] if unsuited is not None and best.sparse and not served else []
        beside = overlapped(self.predictions, best)
        if best.sparse and beside.overlapped_seconds < (1 - MARGIN) * best.step_seconds:
            hidden = best.step_seconds - beside.overlapped_seconds
            told.append(
                f"overlap=True with grouping={beside.grouping!r} hides {1e3 * hidden:.4g} ms of the "
                f"{1e3 * best.exposed_seconds:.4g} ms of its exchange behind backward: a step of "
                f"{1e3 * beside.overlapped_seconds:.4g} ms. It goes without clipping and loss scaling."
            )
        return told

    def assumptions(self) -> list[str]:
        """Return the assumptions of the predictions, one sentence each."""
        network, profile = self.measured.profile.network, self.measured.profile
        sentences = [
            f"Measured: a step without exchange takes {1e3 * profile.compute_seconds:.4g} ms, "
            f"{1e3 * (profile.compute_seconds - profile.rest_seconds):.4g} ms of it backward.",
            "Every rank computes as fast as here, whatever their number, and none waits for another.",
            "Gradients for these measurements are made up: heavy-tailed, ranks agree on half of their variance.",
            "Small parameters are counted as sparsified; by default they stay dense, which is one short message more. "
            "Those that patterns of names keep dense are one all-reduce more, after backward.",
            "DDP's all-reduces go on beside backward, bucket by bucket. A sparsified exchange comes after it, in the "
            "optimizer's step: messages of all groups travel together, and nothing hides them. With overlap=True those "
            "of a group go beside the rest of backward, and take nothing of the processor.",
            f"A sparsifier must shorten the step by {MARGIN:.0%} at least. Of those within {MARGIN:.0%} of the "
            "fastest, the mildest density wins, then the sparsifier that trains best at equal traffic "
            f"({', '.join(BEST_TRAINED[:3])}, ...): step time is not training time, and a lower density may need more "
            "steps.",
            "Gradients are exchanged after every batch: where they are accumulated, the exchange weighs less.",
            "fp16, bf16 and powersgd (rank 4) are DDP's communication hooks, for reference; Lightning has them on CUDA "
            "only. everything is dense, too, in other groups than DDP's buckets.",
        ]
        if any(scenario.ranks >= MANY for scenario in self.scenarios):
            sentences.append(
                f"Nothing is said of the loss. With {MANY} ranks and AdamW at density 0.01, an LSTM ended 1 % behind "
                "dense training and a GPT ahead of it, at the best rates of both, and 3 to 7 % behind at half or twice "
                f"these ({page('reports/race-ranks')}). With 32 ranks the LSTM ended 6 % behind, 2 % at density 0.02, "
                "level at 0.04; the GPT 8 % behind with one seed and 5 % ahead with another. nanoGPT's model, at its "
                "script's rate, which is far below the best, ended 5 % higher in loss, whatever the density "
                f"({page('reports/causes')}): compare both before a long run."
            )
        if self.measured.refused:
            sentences.append(f"Left out, because they refuse the optimizer: {', '.join(self.measured.refused)}.")
        if network.ranks > 1:
            sentences.insert(
                1,
                f"Measured between {network.ranks} ranks: all-reduce {1e6 * network.all_reduce.alpha:.3g} us + "
                f"{1e9 * network.all_reduce.beta:.3g} ns a byte, all-gather {1e6 * network.all_gather.alpha:.3g} us + "
                f"{1e9 * network.all_gather.beta:.3g} ns a byte of each rank.",
            )
        if any(scenario != Scenario(network.ranks, None) for scenario in self.scenarios):
            sentences += [
                "Other networks: a fixed price and a price for each byte. "
                + (
                    "An all-reduce's fixed price grows as ranks - 1; exchanges send from each rank to all others at "
                    "once, for one price"
                    if network.one_hop
                    else "An all-reduce's fixed price grows as log2 of the ranks, an all-gather's as ranks - 1"
                )
                + "; bytes cost what a ring at the given rate takes, and the "
                + (
                    "fixed prices are those measured here."
                    if network.ranks > 1
                    else "fixed price of a hop is taken to be 30 us."
                ),
                "More ranks: where each rank picks by itself, messages stay as long and their union grows up to "
                "everything; where ranks share a budget, messages shrink and the union stays.",
            ]
        return sentences


def advise(
    module: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    trainer: dict[str, Any] | None = None,
    ranks: Sequence[int] = (),
    gbit: Sequence[float] = (),
    rtt: Sequence[float] = (),
    sparsifiers: Sequence[str] | None = None,
    densities: Sequence[float] = (0.1, 0.01, 0.001),
    warmup: int = 5,
    steps: int = 10,
    progress: Callable[[str, float], None] | None = None,
) -> Advice:
    """Profile some training steps of a module, and predict the step time of every way to exchange its gradients.

    It runs ``warmup + steps + 2`` steps of the module's own training with a Trainer, times backward, the network
    between the ranks and every sparsifier, and predicts: dense DDP, DDP's fp16, bf16 and PowerSGD hooks, and each
    sparsifier at each density under each grouping, for the measured network and for others. The module's parameters
    are restored; modules that ``configure_model`` makes stay.

    With launchers that start this script again for each rank, all of it runs on every rank, with the same advice.

    Args:
        module: a LightningModule.
        train_dataloaders: of ``Trainer.fit``: a DataLoader or several, or a LightningDataModule; None: the module's.
        val_dataloaders: of ``Trainer.fit``; validation is left out.
        datamodule: a LightningDataModule, instead of loaders.
        trainer: settings of the module's Trainer: devices, num_nodes, accelerator, precision, plugins. Loggers,
            callbacks, checkpoints and validation are left out; of the strategy, only its start method and DDP's
            treatment of parameters and buffers are kept.
        ranks: other numbers of ranks to predict for.
        gbit: rates to predict for, of a link in one direction, in Gbit/s.
        rtt: milliseconds to add to each round trip; all networks are predicted for with and without.
        sparsifiers: names; None: all but ``random_k``, which is fast and diverges. ``everything`` is dense in other
            groups.
        densities: to predict for, in (0, 1].
        warmup: steps that are not timed, at least 1.
        steps: steps that are timed, at least 2.
        progress: called on rank 0 with the next part and the share that is done; a function of a module, if processes
            are spawned.

    Raises:
        ValueError: for settings outside their ranges; for a datamodule of another Lightning package; for one rank
            only, without ``ranks`` and ``gbit`` to predict for.
        RuntimeError: if no backward pass ran.

    Example:
        >>> import torch, lightning_sparse as ls, pytorch_lightning as pl
        >>> class Toy(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(8, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer(batch).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.01)
        >>> data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
        >>> advice = ls.advise(Toy(), train_dataloaders=data, trainer={"devices": 1, "accelerator": "cpu"},
        ...                    ranks=[8], gbit=[100], sparsifiers=["top_k"], densities=[0.01])
        >>> advice.best().method
        'dense'
        >>> torch.distributed.destroy_process_group()
    """
    for name, value, least in (("warmup", warmup, 1), ("steps", steps, 2)):
        check_integer(value, name, least)
    warmup, steps, densities = plain((warmup, steps, list(densities)))
    name = package_of(type(module))
    package = importlib.import_module(name)
    _check_data(package.LightningDataModule, train_dataloaders, datamodule)
    strategy_class = importlib.import_module(
        f"lightning_sparse.integrations.{name.partition('.')[0]}"
    ).SparseDDPStrategy
    options = dict(trainer or {})
    given = options.pop("strategy", None)
    kept = kept_settings(given)
    strategy = strategy_class(grouping="model", rules=ALL_SPARSE, watch=None, single_device="sparse", **kept)
    every = [name for name, _ in SPARSIFIERS.items() if name not in LEFT_OUT]
    names = every if sparsifiers is None else list(sparsifiers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.json"
        survey = Survey(strategy, names, densities, warmup, steps, path, progress or _silent)
        strategy.observers = [survey]
        options |= OWN_OPTIONS | {"max_steps": warmup + steps + 2, "strategy": strategy}
        profiler = package.Trainer(**options)
        wanted = scenarios(profiler.world_size, ranks, gbit, rtt)
        data = train_dataloaders if datamodule is None else datamodule
        if isinstance(data, package.LightningDataModule) and profiler.is_global_zero:
            # Before other ranks are started, whose own errors would hide that data is missing.
            data.prepare_data()
        with _put_back(module):
            profiler.fit(module, train_dataloaders, val_dataloaders, datamodule)
        if survey.result is None and path.exists():  # training ran in other processes
            survey.result = Measured.from_dict(json.loads(path.read_text()))
    if survey.result is None:
        ran = strategy.engine.step if strategy.engine else 0
        raise RuntimeError(
            f"Expected {warmup + steps + 1} training steps with a backward pass each, but {ran} ran: "
            "does training_step return a loss that depends on the parameters, and is there data to train on?"
        )
    measured = survey.result
    advice = Advice(measured, tuple(predict(measured, wanted, rules_of(given))))
    remarks = [remark for scenario in advice.scenarios for remark in advice.remarks(scenario)]
    if remarks and not silenced(given):
        rank_zero_warn(f"{remarks[0]} watch=ls.Watch(adam=False) of the strategy silences this.")
    return advice


def _check_data(wanted: type, train_dataloaders: Any, datamodule: Any) -> None:
    """Raise for a datamodule on which ``fit`` would fail without a reason; all else is checked by ``fit``."""
    given = train_dataloaders if datamodule is None else datamodule
    is_datamodule = any(base.__name__ == wanted.__name__ for base in type(given).__mro__)
    if (is_datamodule or datamodule is not None) and not isinstance(given, wanted):
        raise ValueError(
            f"Expected a datamodule for a module of {wanted.__module__.partition('.')[0]}, the same package, but got a "
            f"{type(given).__name__} of {type(given).__module__}. DataLoaders are given as train_dataloaders."
        )


@contextmanager
def _put_back(module: Any) -> Iterator[None]:
    """Restore a module after the block, and run the block without the module's callbacks."""
    before, attached = copy.deepcopy(module.state_dict()), module._trainer
    module.configure_callbacks = list
    try:
        yield
    finally:
        del module.configure_callbacks
        module.trainer = attached
        module.load_state_dict(before, strict=False)  # configure_model may have added some


def package_of(module_class: type) -> str:
    """Return the Lightning package of a module's class.

    Raises:
        ValueError: if it is of neither package.
    """
    for name in packages.installed() if isinstance(module_class, type) else ():
        if name in sys.modules and issubclass(module_class, sys.modules[name].LightningModule):
            return name
    raise ValueError(f"Expected a LightningModule, but got {getattr(module_class, '__name__', module_class)}.")


def kept_settings(strategy: Any) -> dict[str, Any]:
    """Return the settings of the user's strategy that are kept: start method and arguments of DDP, without defaults.

    Args:
        strategy: an instance, a name, the ``class_path`` and ``init_args`` of a configuration, or None.

    Raises:
        ValueError: for a strategy that shards the model instead of averaging its gradients.
    """
    given: dict[str, Any] = {}
    if isinstance(strategy, dict):
        name = str(strategy.get("class_path"))
        if any(other in name for other in ("FSDP", "DeepSpeed", "ModelParallel")):
            raise ValueError(f"Expected a strategy that is DDP or like it, but got {name}.")
        given = {**arguments_of(strategy), **(strategy.get("dict_kwargs") or {})}
    elif isinstance(strategy, str):
        if not strategy.startswith(("auto", "ddp", "sparse_ddp")):
            raise ValueError(
                f"Expected a strategy that is DDP or builds on it, such as 'ddp_spawn', but got {strategy!r}."
            )
        for ending, method in {"_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
            if ending in strategy:
                given["start_method"] = method
        given["find_unused_parameters"] = "find_unused_parameters_true" in strategy
    elif strategy is not None:
        given = {**getattr(strategy, "_ddp_kwargs", {}), "start_method": getattr(strategy, "_start_method", "popen")}
    return {name: given[name] for name, default in KEPT.items() if given.get(name, default) not in (default, None)}


def arguments_of(strategy: Any) -> dict[str, Any]:
    """Return the ``init_args`` of a configuration of a strategy; nothing of an instance or a name."""
    return dict(strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}


def rules_of(strategy: Any) -> Rules:
    """Return which parameters our strategy keeps dense by name, or at a density of their own; small ones are sparse.

    Args:
        strategy: as for :func:`kept_settings`.
    """
    config = getattr(strategy, "config", None)
    own = arguments_of(strategy)
    given = config.rules if isinstance(config, SparsificationConfig) else own.get("rules")
    if isinstance(given, dict):
        given = Rules(**(given.get("init_args") or {name: x for name, x in given.items() if name != "class_path"}))
    rules: Rules = (given or Rules()).also_dense(own.get("dense") or ())
    whole = [pattern for pattern, density in rules.densities.items() if density == 1.0]
    densities = {pattern: density for pattern, density in rules.densities.items() if density < 1.0}
    return replace(rules.also_dense(whole), densities=densities, dense_ndim=0, dense_numel=0)


def silenced(strategy: Any) -> bool:
    """Return True if the settings of our strategy turn warnings of optimizers off.

    Args:
        strategy: as for :func:`kept_settings`.
    """
    config = getattr(strategy, "config", None)
    watch = config.watch if isinstance(config, SparsificationConfig) else Watch()
    watch = arguments_of(strategy).get("watch", watch)
    if isinstance(watch, dict):
        return (watch.get("init_args") or watch).get("adam") is False
    return watch is None or not watch.adam


def _silent(what: str, done: float) -> None:
    pass
