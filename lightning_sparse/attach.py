"""The door for plain PyTorch: an engine, and what tunes it, for a ``DistributedDataParallel`` model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import Module, Parameter, SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.collective import TorchCollective
from lightning_sparse.density import DensitySchedule
from lightning_sparse.exchanges import Exchange
from lightning_sparse.grouping import GROUPINGS, Group, Grouping, ParameterSize, Rules, as_rules, make_plan
from lightning_sparse.grouping.plan import MIB
from lightning_sparse.hook import Engine, Settings, Tuner, check_equal_on_ranks, failing_together
from lightning_sparse.memory import Memory
from lightning_sparse.sparsifiers import Everything, Sparsifier
from lightning_sparse.tuning import Fallback, Planner
from lightning_sparse.watch import WATCH, Watch, Watchdog, check_watch


def attach(
    ddp: DistributedDataParallel,
    *,
    sparsifier: Sparsifier | str = "union_topk",
    density: float | DensitySchedule = 0.01,
    memory: Memory | None = None,
    exchange: Exchange | str | None = None,
    grouping: Grouping | str = "bucket",
    dense: Sequence[str] = (),
    rules: Rules | None = None,
    executor: str = "auto",
    fallback: Literal["dense"] | None = None,
    nonfinite: str = "skip",
    lr_aware: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    watch: Watch | None = WATCH,
    bucket_cap_mb: float | None = None,
    timeout: timedelta | None = None,
    profile: dict[str, Any] | None = None,
    tuners: Sequence[Tuner] = (),
) -> Engine:
    """Replace the gradient all-reduce of a ``DistributedDataParallel`` model. All ranks must call this.

    Args:
        ddp: the wrapped model, before its first backward, without a communication hook of its own.
        sparsifier: an instance or a name.
        density: target in (0, 1], or a schedule over synchronised backward passes.
        memory: error feedback; None: :class:`~lightning_sparse.Residual`. The optimizer is not seen here: call
            ``engine.follow([optimizer])`` to have it checked, most of all with memories that bring their own momentum.
        exchange: an instance, a name, or None for the sparsifier's natural one.
        grouping: an instance such as ``MergeBelow(8192)`` or a name such as "layer"; see
            :func:`~lightning_sparse.grouping.make_plan`.
        dense: patterns of parameter names that stay dense, next to those of ``rules``.
        rules: which parameters stay dense, and which have densities of their own; None: the default ones, which keep
            small parameters dense, see :class:`~lightning_sparse.grouping.Rules`.
        executor: "inline" runs groups inside the hook (on CUDA on a stream of its own); "thread" on a communication
            thread while backward goes on; "auto" is "thread" between ranks on CPUs, else "inline".
        fallback: "dense" measures some sparse and some dense steps at the start, and again when the step time changes
            by much, and goes on with what is faster.
        nonfinite: where a gradient is not finite on some rank, residuals stay as they were and all ranks get NaN.
            "skip": that step is not counted, and the caller has to skip it as well, where no ``scaler`` does: call
            ``engine.skip_void(optimizer)`` before ``optimizer.step()``, or ask ``engine.void``. "nan": whatever then
            happens is up to the caller, and on CUDA nobody waits to learn about it.
        lr_aware: keep what residuals are worth when the learning rate changes, see
            :class:`~lightning_sparse.hook.learning_rates.LearningRates`; needs ``engine.follow([optimizer])``.
        scaler: the ``GradScaler`` that scales the loss; residuals are then kept free of its factor.
        watch: warns, on rank 0, of ranks that drift apart, residuals that grow, thresholds that are off, and of
            Adam's first moment, see :class:`~lightning_sparse.Watch`; None: does not.
        bucket_cap_mb: size in MiB of groups that are cut by bucket; None: that of DDP's buckets, in which gradients are
            handed over. Where exchanges go on beside backward, small buckets of DDP start them early.
        timeout: of the engine's own process group. Inside hooks on CUDA, exchanges go through DDP's, with its timeout.
        profile: of an earlier run, see :attr:`~lightning_sparse.tuning.Planner.saved`; used by groupings and densities
            that need one, if model, settings and ranks are the same.
        tuners: more that look on, see :meth:`Engine.tune`.

    Returns:
        The engine, for statistics and for :meth:`Engine.close`.

    Raises:
        ValueError: for settings that cannot work, see :class:`Settings` and
            :func:`~lightning_sparse.grouping.make_plan`.
        RuntimeError: on all ranks, if the ranks' settings or models differ; if the model has a communication hook
            already; on the other ranks, if settings are refused on some only.
    """
    ranks, device = TorchCollective(ddp.process_group), ddp.device
    with failing_together(ranks, device):
        settings = Settings.check(sparsifier, density, memory, exchange, executor, nonfinite, lr_aware)
        grouping, rules = GROUPINGS.resolve(grouping), as_rules(rules, dense)
        check_fallback(fallback)
        check_watch(watch)
        _check_timeout(timeout)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ValueError(f"Expected scaler to be a GradScaler or None, but got {scaler!r}.")
        _check_ddp(ddp)
        parameters, frozen = _parameters_of(ddp)
        sizes = sizes_of(parameters)
        cap = ddp.bucket_bytes_cap / MIB if bucket_cap_mb is None else bucket_cap_mb
        plan = make_plan(sizes, grouping, rules, cap)
        refuse_two_orders(ddp.module, settings.executor, device)
        facts = {
            **settings._asdict(),
            "grouping": grouping,
            "rules": rules,
            "fallback": fallback,
            "watch": watch,
            "bucket_cap_mb": (cap, delivery_mb(ddp)),
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
            "broadcast_buffers": ddp.broadcast_buffers,
            "scaler": scaler.state_dict() if scaler is not None and scaler.is_enabled() else None,
            "tuners": [type(tuner).__name__ for tuner in tuners],
            "groups": plan,
        }
    check_equal_on_ranks(facts, ranks, device)
    if ranks.rank == 0 and not isinstance(settings.sparsifier, Everything):
        _warn_if_nothing_is_left(plan, rules)
    with ExitStack() as undo:
        comm = TorchCollective.over(ddp.process_group, timeout, device, settings.executor == "thread")
        undo.callback(comm.close)
        with failing_together(ranks, device, abort=comm.abort):
            usage = bool(ddp.find_unused_parameters or ddp.static_graph)
            exchanged = {name: p for name, p in parameters.items() if p.numel()}
            engine = Engine(plan, exchanged, settings, comm, device, watch_usage=usage, frozen=frozen)
            undo.callback(engine.close)
            if scaler is not None:
                engine.loss_scale = partial(getattr, scaler, "_scale", None)  # public get_scale() waits for the device
            if watch is not None:
                engine.tune(Watchdog(watch))
            planner = None
            if Planner.wanted(grouping, settings):
                planner = Planner(ddp, engine, sizes, grouping, rules, cap, delivery_mb(ddp), profile)
                engine.tune(planner)
            if fallback is not None:
                engine.tune(Fallback(sizes, cap, planner))
            for tuner in tuners:
                engine.tune(tuner)
            _register(ddp, engine)  # last: there is no way back
        undo.pop_all()
    return engine


def _check_timeout(timeout: timedelta | None) -> None:
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ValueError(f"Expected timeout to be a timedelta above 0, or None, but got {timeout!r}.")


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
    for name, module in ddp.module.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ValueError(
                f"The gradients of {name or type(module).__name__!r} are sparse tensors (sparse=True), which cannot be "
                "looked at as flat vectors. Set sparse=False: what is sent is sparsified anyway."
            )


def _parameters_of(ddp: DistributedDataParallel) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Parameters that need gradients, and those that do not; by name, in order of registration."""
    ignored = set(getattr(ddp, "parameters_to_ignore", ()))
    known = {name: p for name, p in ddp.module.named_parameters() if name not in ignored}
    for name, p in known.items():
        if p.requires_grad and not p.is_floating_point():
            raise ValueError(
                f"Expected floating-point parameters, but {name} is {p.dtype}: magnitudes would not compare."
            )
    trained = {name: p for name, p in known.items() if p.requires_grad}
    return trained, {name: p for name, p in known.items() if not p.requires_grad}


def _register(ddp: DistributedDataParallel, engine: Engine) -> None:
    try:
        ddp.register_comm_hook(engine, _hook)
    except RuntimeError as error:
        raise RuntimeError(
            "This DistributedDataParallel model has a communication hook already: of another attach(), of your own, or "
            f"of mixed_precision=... or an optimizer in backward. Wrap the model again, without it. ({error})"
        ) from error


def delivery_mb(ddp: DistributedDataParallel) -> tuple[float, float]:
    """MiB of the first bucket in which DDP hands over gradients, and of the others."""
    size = ddp.bucket_bytes_cap / MIB
    # DDP cuts the first bucket short only where no size was given.
    return (1.0 if ddp.bucket_bytes_cap_default else size), size


def sizes_of(parameters: dict[str, Parameter]) -> list[ParameterSize]:
    """What plans need to know of parameters, by name."""
    return [
        ParameterSize(name, p.numel(), p.element_size(), f"{p.dtype}.{p.device}".removeprefix("torch."), p.dim())
        for name, p in parameters.items()
    ]


def _warn_if_nothing_is_left(plan: Sequence[Group], rules: Rules) -> None:
    """Warn if the sizes of a model's parameters keep all of it dense; to name all of them is a decision."""
    parameters = [p for group in plan for p in group.parameters]
    named = Rules(rules.dense, dense_ndim=0, dense_numel=0)
    unnamed = [p for p in parameters if not named.keeps_dense(p.name, p.numel, p.ndim)]
    if unnamed and all(group.dense for group in plan):
        warnings.warn(
            f"Nothing is sparsified: all {len(parameters)} parameters stay dense ({rules.reasons()}). Set "
            "rules=Rules(dense_ndim=0, dense_numel=0) to sparsify small parameters, too.",
            stacklevel=3,
        )


def refuse_two_orders(module: Module, executor: str, device: torch.device) -> None:
    """Raise if a thread's messages could come in another order than those of SyncBatchNorm, from rank to rank.

    Raises:
        ValueError: naming the layer.
    """
    if executor != "thread" or device.type != "cuda":
        return
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm):
            raise ValueError(
                f"Expected executor='inline' or 'auto' beside SyncBatchNorm ({name!r}) on CUDA, but got 'thread': its "
                "messages and those of a communication thread would start in an order that differs between ranks, and "
                "NCCL may then wait for ever."
            )


def check_fallback(fallback: str | None) -> None:
    """Raise unless there is such a fallback.

    Raises:
        ValueError: saying which there are.
    """
    if fallback not in (None, "dense"):
        raise ValueError(f"Expected fallback to be 'dense' or None, but got {fallback!r}.")


# Without annotations: DDP compares them by identity, and here they would be strings.
def _hook(engine, bucket):  # type: ignore[no-untyped-def]
    return engine.receive(bucket)
