"""Plain PyTorch: the sparsified exchange as the communication hook of a ``DistributedDataParallel`` model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.core.checks import expect
from lightning_sparse.core.names import named_modules, named_parameters, plain_name
from lightning_sparse.core.version import __version__
from lightning_sparse.engine import Engine, StepObserver, check_equal_on_ranks, failing_together
from lightning_sparse.engine.backward import AllRanksDivide, register
from lightning_sparse.engine.config import SparsificationConfig, StrategyConfig, from_keywords, keywords_of
from lightning_sparse.engine.engine import can_observe
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import Group, ParameterSize, Rules, dense_plan, make_plan
from lightning_sparse.methods.grouping.groupings import CUDA_BUCKET_MB, LARGEST_GROUP, MIB
from lightning_sparse.methods.sparsifiers import Everything
from lightning_sparse.nodes.grid import nodes_of
from lightning_sparse.nodes.parts import Parts
from lightning_sparse.tuning.controllers import DenseFallback, StayDense
from lightning_sparse.tuning.controllers.announcer import Announcer
from lightning_sparse.tuning.controllers.planner import Planner
from lightning_sparse.tuning.controllers.watchdog import Watchdog

_settings, _strategies = ({field.name: None for field in fields(c)} for c in (SparsificationConfig, StrategyConfig))
DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
"""Arguments of ``DistributedDataParallel`` in this version of torch, by name."""
NOT_HERE = f" The strategies for Lightning alone know {', '.join(n for n in _strategies if n not in _settings)}."


@dataclass(frozen=True, kw_only=True)
class AttachArguments(SparsificationConfig):
    """Arguments of :func:`attach`: the settings, and values that strategies get from Lightning."""

    observers: Sequence[StepObserver] = ()
    """:class:`StepObserver <lightning_sparse.engine.StepObserver>` objects that look at each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = isinstance(self.observers, Sequence) and all(map(can_observe, self.observers))
        expect(fits, "observers", "a list of objects with before_step(engine) and close()", self.observers)


@keywords_of(AttachArguments)
def attach(ddp: DistributedDataParallel, **keywords: Any) -> Engine:
    """Replace the gradient all-reduce of a ``DistributedDataParallel`` model. All ranks must call this.

    ``ddp`` is the wrapped model, before its first backward, without a communication hook of its own. All other
    arguments are keywords: the settings of :class:`.SparsificationConfig`, and ``observers``.

    Nothing else changes in a training loop. Gradients are exchanged when an optimizer of torch steps parameters of the
    model: ``.grad`` is this rank's own before, and whatever is done to it counts. Steps with gradients that are not
    finite on some rank are left out on all. To clip as with plain DDP, call :meth:`.Engine.clip_grad_norm_`.

    With ``node_size``, ``.grad`` is the mean of this rank's node between backward and step.

    Returns:
        The engine, for statistics and for :meth:`Engine.close`.

    Raises:
        ValueError: for settings that cannot work, see :class:`.SparsificationConfig` and
            :func:`~lightning_sparse.methods.grouping.make_plan`.
        TypeError: for a model that is not wrapped, or a keyword that it does not know.
        RuntimeError: on all ranks, if the ranks' settings or models differ; if the model has a communication hook
            already; on the other ranks, if settings are refused on some only.
    """
    if wrapped(ddp) is None:
        raise TypeError(f"Expected a DistributedDataParallel model, but got {type(ddp).__name__}: wrap it first.")
    with failing_together(TorchCollective(ddp.process_group), ddp.device):
        arguments = from_keywords(AttachArguments, keywords, "attach", NOT_HERE)
    config = SparsificationConfig.of(arguments)
    engine = attach_config(ddp, config, arguments.observers)
    engine._add_observer(Announcer())
    return engine


def wrapped(model: Any) -> DistributedDataParallel | None:
    """Return a model's ``DistributedDataParallel``, also if ``torch.compile`` has wrapped it; None if it has none."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def attach_config(
    ddp: DistributedDataParallel,
    config: SparsificationConfig,
    observers: Sequence[StepObserver],
) -> Engine:
    """Do the work of :func:`attach` with checked settings."""
    ranks, device = TorchCollective(ddp.process_group), ddp.device
    nodes = nodes_of(config.node_size, ranks, device)
    config = replace(config, node_size=nodes.size)  # 1 is None
    alone = ranks.world_size in (1, nodes.size)
    with failing_together(ranks, device):
        _check_ddp(ddp)
        if config.overlap and (ddp.find_unused_parameters or ddp.static_graph):
            raise ValueError(
                "Expected find_unused_parameters and static_graph to be False with overlap=True: which parameters a "
                "backward has used is known when it is over, and gradients are exchanged before."
            )
        parameters, frozen = _parameters_of(ddp)
        sizes = sizes_of(parameters)
        cap = ddp.bucket_bytes_cap / MIB if config.bucket_cap_mb is None else float(config.bucket_cap_mb)
        own = config.fallback or config.overlap
        if config.bucket_cap_mb is None and not own and device.type == "cuda":
            cap = max(cap, CUDA_BUCKET_MB)
        config = replace(config, bucket_cap_mb=cap)  # None means this size
        plan = make_plan(sizes, config.grouping, config.rules, cap, frozen=frozen)  # which checks rules, too
        stays_dense = alone and config.single_device == "dense"
        plan = dense_plan(sizes, cap) if stays_dense else plan
        in_parts = config.node_size is not None and not stays_dense
        facts = {
            **facts_of(config, observers, plan),
            "bucket_cap_mb": (cap, ddp.bucket_bytes_cap / MIB, ddp.bucket_bytes_cap_default),
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
            "broadcast_buffers": ddp.broadcast_buffers,
        }
    check_equal_on_ranks(facts, ranks, device)
    if ranks.rank == 0 and not stays_dense:
        warn_if_nothing_is_left(plan, config)
        warn_of_slow_groups(plan, device)
    with ExitStack() as undo:
        share = None
        if in_parts:
            comm, within = nodes.connect(config)
            undo.callback(within.close)
            share = Parts({name: p.numel() for name, p in (*parameters.items(), *frozen.items()) if p.numel()}, within)
        else:
            comm = TorchCollective.over(ddp.process_group, config.timeout, device)
        undo.callback(comm.close)
        with failing_together(ranks, device, abort=partial(_abort, comm, None if share is None else share.within)):
            usage = bool(ddp.find_unused_parameters or ddp.static_graph)
            exchanged = {name: p for name, p in parameters.items() if p.numel()}
            given: dict[str, Any] = {"watch_usage": usage, "frozen": frozen, "share": share}
            engine = Engine(plan, exchanged, config, comm, device, **given)
            undo.callback(engine.close)
            engine._add_observer(AllRanksDivide(ddp))
            look_on(engine, config, stays_dense)
            if Planner.wanted(config) and not stays_dense:
                engine._add_observer(Planner(ddp, engine, sizes))
            if config.fallback and not stays_dense:
                engine._add_observer(DenseFallback(sizes, cap))
            for observer in observers:
                engine._add_observer(observer)
            engine.stepper.copies.watch(ddp.module)
            register(ddp, engine)  # last: it cannot be undone
        undo.pop_all()
    return engine


def _abort(*networks: TorchCollective | None) -> None:
    for network in filter(None, networks):
        network.abort()


def _check_ddp(ddp: DistributedDataParallel) -> None:
    """Raise for settings of DDP and for models whose gradients would not arrive as flat vectors in buckets."""
    if getattr(torch._dynamo.config, "optimize_ddp", None) == "python_reducer":
        raise ValueError(
            "torch._dynamo.config.optimize_ddp = 'python_reducer' bypasses DDP's buckets, so nothing would be "
            "sparsified. Leave optimize_ddp at its default."
        )
    if getattr(ddp, "_delay_all_reduce_params", None):
        raise ValueError(
            "delay_all_reduce_named_params bypasses communication hooks: those gradients would stay dense."
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ValueError(
            "skip_all_reduce_unused_params=True keeps buckets back that no rank used, and groups would wait for them "
            "for ever. Leave it at False: find_unused_parameters=True sends nothing of groups that no rank used."
        )
    for name, p in named_parameters(ddp.module).items():
        if hasattr(p, "_in_backward_optimizers"):  # DDP learns of it in the first forward
            raise ValueError(
                f"The optimizer of {name} runs in backward, before gradients are exchanged. Call its step() after "
                "backward instead of _apply_optimizer_in_backward()."
            )
    for name, module in named_modules(ddp.module):
        # Other layers may use the word for anything; their gradients are checked in the first backward.
        if isinstance(module, Embedding | EmbeddingBag) and module.sparse:
            raise ValueError(
                f"The gradients of {name or type(module).__name__!r} are sparse tensors (sparse=True), which cannot be "
                "looked at as flat vectors. Set sparse=False: what is sent is sparsified anyway."
            )


def _parameters_of(ddp: DistributedDataParallel) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return the trained and the frozen parameters, by name, in order of registration."""
    ignored = set(map(plain_name, getattr(ddp, "parameters_to_ignore", ())))
    known = {name: p for name, p in named_parameters(ddp.module).items() if name not in ignored}
    trained, frozen = trained_and_frozen(known)
    where = {p.device: name for name, p in reversed(trained.items())}
    if len(where) > 1:
        places = ", ".join(f"{name} is on {device}" for device, name in reversed(where.items()))
        raise ValueError(
            f"Expected all parameters on one device, but {places}: gradients of one step are exchanged and looked at "
            "on one device."
        )
    return trained, frozen


def trained_and_frozen(known: Mapping[str, Parameter]) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return those of a model's parameters that need gradients, and the others.

    Raises:
        ValueError: for a gradient that is no floating-point number.
    """
    for name, p in known.items():
        if p.requires_grad and not p.is_floating_point():
            raise ValueError(
                f"Expected floating-point parameters, but {name} is {p.dtype}: magnitudes would not compare."
            )
    trained, frozen = ({name: p for name, p in known.items() if p.requires_grad is one} for one in (True, False))
    return trained, frozen


def sizes_of(parameters: dict[str, Parameter]) -> list[ParameterSize]:
    """Return the sizes of parameters, for plans."""
    return [ParameterSize.of(name, p) for name, p in parameters.items()]


def facts_of(config: SparsificationConfig, observers: Sequence[StepObserver], plan: Sequence[Group]) -> dict[str, Any]:
    """Return what has to be equal on all ranks; other versions may speak of other messages."""
    names = [type(one).__name__ for one in observers]
    return {"version of lightning-sparse": __version__, **vars(config), "observers": names, "groups": plan}


def look_on(engine: Engine, config: SparsificationConfig, stays_dense: bool) -> None:
    """Let a watchdog look on, unless the settings have none; let an engine with nobody to send to average densely."""
    if config.watch is not None:
        engine._add_observer(Watchdog(config.watch))
    if stays_dense:
        engine._go_direct()
        engine._add_observer(StayDense())  # a loaded state may hold residuals, which are sent first


def warn_if_nothing_is_left(plan: Sequence[Group], config: SparsificationConfig) -> None:
    """Warn if the sizes of a model's parameters keep all of it dense; a user who names all of them means it."""
    parameters, rules = [p for group in plan for p in group.parameters], config.rules
    named = Rules(rules.dense, dense_ndim=0, dense_numel=0)
    unnamed = [p for p in parameters if not named.keeps_dense(p.name, p.numel, p.ndim)]
    if unnamed and all(group.dense for group in plan) and not isinstance(config.sparsifier, Everything):
        warnings.warn(
            f"Nothing is sparsified: all {len(parameters)} parameters stay dense ({rules.reasons()}). Set "
            "rules=Rules(dense_ndim=0, dense_numel=0) to sparsify small parameters, too.",
            stacklevel=4,
        )


def warn_of_slow_groups(plan: Sequence[Group], device: torch.device) -> None:
    """Warn of groups that kernels in Triton do not take: :func:`make_plan` cannot cut a single parameter."""
    large = [group.parameters[0].name for group in plan if not group.dense and group.numel > LARGEST_GROUP]
    if large and device.type == "cuda":
        warnings.warn(
            f"Kernels in Triton take at most 2**30 - 1 coordinates, and {', '.join(large)} has more: operations of "
            "torch take their place there, which are slower and need more memory.",
            stacklevel=4,
        )
