"""Plain PyTorch: the sparsified exchange between replicas of a model that FSDP2 shards within each of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_sparse.api.attach import (
    NOT_HERE,
    AttachArguments,
    facts_of,
    look_on,
    trained_and_frozen,
    warn_if_nothing_is_left,
    warn_of_slow_groups,
)
from lightning_sparse.core.checks import expect
from lightning_sparse.core.layout import own
from lightning_sparse.core.names import named_modules, named_parameters
from lightning_sparse.engine import Engine, StepObserver, check_equal_on_ranks, failing_together
from lightning_sparse.engine.agreement import checksum
from lightning_sparse.engine.config import SparsificationConfig, from_keywords, with_keywords_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.share import Place, Share
from lightning_sparse.hsdp.source import ShardSource, groups_of
from lightning_sparse.methods.grouping import DDP_BUCKET_MB, ParameterSize, dense_plan, make_plan
from lightning_sparse.tuning.controllers.announcer import Announcer

_sources: weakref.WeakKeyDictionary[Module, weakref.ref[ShardSource]] = weakref.WeakKeyDictionary()
"""The latest source of each model, which is kept by hooks on its parameters."""


class Networks(NamedTuple):
    """The process groups of a rank."""

    between: dist.ProcessGroup
    """Ranks of all replicas that hold the same part of the model."""
    within: dist.ProcessGroup
    """Ranks of this replica."""

    def made_anew(self, config: SparsificationConfig, device: torch.device) -> tuple[TorchCollective, TorchCollective]:
        """Return collectives for an engine, free of other traffic where they may be; all ranks call this."""
        groups = [dist.get_process_group_ranks(group) for group in self]
        found = TorchCollective(self.between).all_gather_object(groups, device)
        found = [each for row in TorchCollective(self.within).all_gather_object(found, device) for each in row]
        columns, rows = (sorted({tuple(ranks) for ranks in each}) for each in zip(*found, strict=True))
        comm = TorchCollective.of_its_own(self.between, config.timeout, beside=columns)
        return comm, TorchCollective.over(self.within, config.timeout, device, beside=rows)


@dataclass(frozen=True, kw_only=True)
class HSDPArguments(AttachArguments):
    """Arguments of :func:`attach_hsdp`; some of those of ``attach`` need DDP, and are refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_without_ddp(self)


def refuse_without_ddp(config: SparsificationConfig) -> None:
    """Raise for settings that need DDP's buckets, or whole weights.

    Raises:
        ValueError: naming the setting.
    """
    expect(not config.fallback, "fallback", "False for a sharded model", config.fallback)
    expect(not config.overlap, "overlap", "False for a sharded model", config.overlap)
    nodes = config.node_size
    expect(nodes is None, "node_size", "None for a sharded model, whose replicas are what nodes would be", nodes)
    memory = config.memory
    of_gradients = memory is None or memory.averages != "moves"
    instead = "one of gradients, such as 'residual', for a sharded model, of which no rank trains a copy"
    expect(of_gradients, "memory", instead, memory)


@with_keywords_of(HSDPArguments)
def attach_hsdp(model: Module, mesh: DeviceMesh, **keywords: Any) -> Engine:
    """Exchange the gradients of a model sharded by FSDP2 sparsely between its replicas. All ranks must call this.

    Each replica shards the model over its ranks with ``fully_shard``; FSDP averages gradients within it, densely. When
    an optimizer steps, each rank exchanges its own part of the gradients, sparsified and with error feedback, with the
    ranks of the other replicas that hold the same part. Until then ``.grad`` is the replica's own, and what is done to
    it between backward and step counts. At a density of 1 gradients are averaged at the end of backward, as FSDP does.

    ``mesh`` has two dimensions, replicas first, or is that of the replicas alone. ``model`` is sharded over its second
    dimension, such as ``mesh["shard"]``, and has run no backward yet. All other arguments are
    keywords: the settings of :class:`.SparsificationConfig`, and ``observers``. Parameters, and
    buffers, become those of the first replica.

    Optimizers of torch are found when they step; for others, see :meth:`.Engine.exchange`. Clip with
    ``engine.clip_grad_norm_(model.parameters(), max_norm)``, by the norm of all parts of the mean over replicas.
    Accumulate gradients as with FSDP2 alone, also with ``model.set_requires_all_reduce(False)``.

    Returns:
        The engine, for statistics and for :meth:`Engine.close`.

    Raises:
        ValueError: for settings that cannot work, or for a model that is sharded in another way, naming the parameter.
        TypeError: for a model that is not sharded, for something else than a mesh, or a keyword that it does not know.
        RuntimeError: on all ranks, if the ranks' settings or models differ; if the model has an open engine; on the
            other ranks, if something is refused on some only.

    Example:
        One rank that is a replica by itself, with nobody to send to.

        >>> import tempfile, torch, lightning_sparse as ls
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(torch.nn.Linear(20, 20, bias=False), mesh=mesh["shard"])
        >>> engine = ls.attach_hsdp(model, mesh, density=0.1, single_device="sparse")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 20)).sum().backward()
        >>> optimizer.step()
        >>> int(model.weight.grad.to_local().count_nonzero())
        40
        >>> engine.close()
        >>> dist.destroy_process_group()
    """
    _check_mesh(mesh)
    on_cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device(mesh.device_type)
    with ExitStack() as together:
        for dimension in range(mesh.ndim):
            together.enter_context(failing_together(TorchCollective(mesh.get_group(dimension)), device))
        networks = networks_of(model, mesh)
        arguments = from_keywords(HSDPArguments, keywords, "attach_hsdp", NOT_HERE)
    engine = attach_hsdp_config(model, networks, SparsificationConfig.of(arguments), arguments.observers)
    engine._add_observer(Announcer())
    return engine


def attach_hsdp_config(
    model: Module, networks: Networks, config: SparsificationConfig, observers: Sequence[StepObserver]
) -> Engine:
    """Do the work of :func:`attach_hsdp` with checked settings."""
    replicas, parts = TorchCollective(networks.between), TorchCollective(networks.within)
    device = next(own(p).device for p in model.parameters())
    with failing_together(replicas, device), failing_together(parts, device):
        known = _sources.get(model)
        before = None if known is None else known()
        if before is not None and not before.engine.closed:
            raise RuntimeError("The model has an engine already: close it, or go on with it.")
        trained, frozen = _parameters_of(model)
        sizes = [ParameterSize.of(name, p) for name, p in trained.items()]
        cap = DDP_BUCKET_MB if config.bucket_cap_mb is None else float(config.bucket_cap_mb)
        config = replace(config, bucket_cap_mb=cap)
        plan = make_plan(sizes, config.grouping, config.rules, cap * parts.world_size, frozen=frozen)
        stays_dense = replicas.world_size == 1 and config.single_device == "dense"
        plan = dense_plan(sizes, cap * parts.world_size) if stays_dense else plan
    facts = facts_of(config, observers, plan)
    with failing_together(replicas, device):
        check_equal_on_ranks(facts, parts, device)
    also = {name: p for name, p in frozen.items() if _is_cut_over(p, dist.get_process_group_ranks(networks.within))}
    shards = {name: shard_of(p) for name, p in {**trained, **also}.items() if p.numel()}
    with failing_together(parts, device):
        check_equal_on_ranks({**facts, "parts of the parameters": shards}, replicas, device)
    if replicas.rank == parts.rank == 0 and not stays_dense:
        warn_if_nothing_is_left(plan, config)
        warn_of_slow_groups([group.resized({n: s.length for n, s in shards.items()}) for group in plan], device)
    if before is not None:
        before.release()
    with ExitStack() as undo:
        comm, within = networks.made_anew(config, device)
        undo.callback(comm.close)
        undo.callback(within.close)
        with failing_together(replicas, device, abort=comm.abort), failing_together(parts, device, abort=within.abort):
            broadcast_replica(model, comm, device)
            exchanged = {name: p for name, p in trained.items() if name in shards}
            given: dict[str, Any] = {"watch_usage": True, "frozen": frozen, "share": Share(within, shards)}
            engine = Engine(plan, exchanged, config, comm, device, **given)
            undo.callback(engine.close)
            source = ShardSource(engine, model)
            engine._add_observer(source)
            engine._add_observer(_ReplicasAreEqual())
            look_on(engine, config, stays_dense)
            for observer in observers:
                engine._add_observer(observer)
            _sources[model] = weakref.ref(source)
        undo.pop_all()
    return engine


def grid_of(device: torch.device, replicas: int, ranks: int) -> DeviceMesh:
    """Return a mesh of replicas and their ranks, with the names that Lightning gives to the dimensions of a replica."""
    names = ("replicate", "data_parallel", "tensor_parallel")
    return init_device_mesh(device.type, (replicas, ranks, 1), mesh_dim_names=names)


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
        came = f"one of {mesh.ndim}" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise TypeError(
            f"Expected a DeviceMesh of two dimensions, replicas first, or of replicas alone, but got {came}."
        )


def networks_of(model: Any, mesh: DeviceMesh) -> Networks:
    """Return the process groups of this rank, given a model and a mesh of replicas.

    Raises:
        ValueError: if the model is not sharded over the mesh, or in another way than within a replica.
        TypeError: for a model that is not sharded.
    """
    if not isinstance(model, Module) or not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise TypeError(
            f"Expected a model that FSDP2 has sharded, but got {type(model).__name__}: call "
            f"fully_shard(model, mesh={_within_name(mesh)}) first."
        )
    refuse_offload(model)
    first = ""
    within: DeviceMesh | None = None
    for name, p in named_parameters(model).items():
        if not p.requires_grad:
            continue
        _check_sharded(name, p, mesh)
        sharded: Any = p
        place: DeviceMesh = sharded.device_mesh
        if within is not None and not torch.equal(place.mesh, within.mesh):
            raise ValueError(
                f"Expected all parameters to be sharded over the same ranks, but {name} is over "
                f"{place.mesh.tolist()}, and {first} over {within.mesh.tolist()}."
            )
        first, within = first or name, place
    if within is None:
        raise ValueError("Expected a model with parameters that need gradients, but there is none.")
    between = mesh.get_group(0)
    _check_grid(mesh, dist.get_process_group_ranks(between), dist.get_process_group_ranks(within.get_group()))
    return Networks(between, within.get_group())


def _within_name(mesh: DeviceMesh) -> str:
    name = (mesh.mesh_dim_names or ("replicate", "shard"))[-1] if mesh.ndim == 2 else "shard"
    return f"mesh[{name!r}]"


def _check_sharded(name: str, parameter: Parameter, mesh: DeviceMesh) -> None:
    """Raise unless FSDP shards a parameter over one dimension of a mesh, and nothing else does."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"The parameter {name} needs gradients and is not sharded: FSDP ignores it, and nobody averages it. Shard "
            "its module with fully_shard, or freeze it with requires_grad_(False)."
        )
    *outer, last = parameter.placements
    if outer and all(placement.is_replicate() for placement in outer) and last.is_shard():
        raise ValueError(
            f"The parameter {name} is averaged over replicas already, densely, by FSDP itself, because fully_shard was "
            f"given a mesh of {parameter.device_mesh.ndim} dimensions. Write fully_shard(model, "
            f"mesh={_within_name(mesh)})."
        )
    if outer or not last.is_shard():
        raise ValueError(
            f"The parameter {name} is laid out as {parameter.placements}, as tensor parallelism does it, and only "
            f"parameters that fully_shard(model, mesh={_within_name(mesh)}) alone has sharded can be exchanged."
        )


def _check_grid(mesh: DeviceMesh, between: Sequence[int], within: Sequence[int]) -> None:
    """Raise unless replicas and their ranks are the rows and columns of a mesh."""
    expected = [*within] if mesh.ndim == 1 else mesh.mesh[mesh.get_coordinate()[0]].tolist()  # type: ignore[index]
    if list(within) != expected or len({*within} & {*between}) != 1:
        raise ValueError(
            f"Expected a model that is sharded over the ranks {expected} of this replica, but it is over "
            f"{list(within)}, and replicas are {list(between)}: call fully_shard(model, mesh={_within_name(mesh)}) "
            "with the mesh that is given here."
        )


def refuse_offload(model: Module) -> None:
    """Raise if FSDP keeps parameters of a model on the CPU.

    Raises:
        ValueError: naming the module.
    """
    for name, module in named_modules(model):
        of_module = groups_of(module, recurse=False)
        if any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in of_module):
            raise ValueError(
                f"FSDP keeps the parameters of {name or type(module).__name__!r} on the CPU (CPUOffloadPolicy): "
                "their gradients come there one by one, while backward goes on. Leave offload_policy out."
            )


def _parameters_of(model: Module) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Return the trained and the frozen parameters, by name, in order of registration."""
    known = named_parameters(model)
    for name, p in known.items():
        if p.is_meta:
            raise ValueError(f"The parameter {name} is on the meta device: give the model its weights first.")
    return trained_and_frozen(known)


def _is_cut_over(parameter: Any, ranks: Sequence[int]) -> bool:
    """Return True if a parameter is sharded over these ranks, as those that are trained are."""
    placements: Any = getattr(parameter, "placements", ())
    alone = len(placements) == 1 and placements[0].is_shard()
    return bool(alone and parameter.device_mesh.mesh.flatten().tolist() == list(ranks))


def shard_of(parameter: Any) -> Place:
    """Return which coordinates of a parameter this rank has: whole rows, the first dimension being cut.

    Where another dimension is cut, the parts are counted in the order of ranks.
    """
    mesh, part = parameter.device_mesh, own(parameter)
    cut = parameter.placements[0].dim
    length, ranks = parameter.shape[cut], mesh.size()
    per_rank = -(-length // ranks)
    before = min(length, per_rank * mesh.get_local_rank())
    return Place(before * (parameter.numel() // length), part.numel(), parameter.numel())


def broadcast_replica(model: Module, comm: TorchCollective, device: torch.device) -> None:
    """Give all replicas the parameters and buffers of the first one; collective.

    Args:
        model: sharded.
        comm: the ranks of all replicas that hold the same part.
        device: for the messages.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            part = own(tensor).detach()
            if part.numel():
                part.copy_(comm.broadcast(part.to(device, copy=True, memory_format=torch.contiguous_format), 0))


class _ReplicasAreEqual:
    """Observer that compares the parameters of replicas in the first step, and in the first one after a state."""

    def __init__(self) -> None:
        self._seen = -1

    def before_step(self, engine: Engine) -> None:
        """Raise on all ranks that hold a part of which replicas differ."""
        if engine._state.loads == self._seen or engine.comm.world_size == 1:
            return
        self._seen = engine._state.loads
        sums = torch.stack([checksum(own(p)) for p in engine.stepper.parameters.values()])
        differ = (engine.comm.all_gather(sums) != sums).any(0).cpu().tolist()
        names = [name for name, one in zip(engine.stepper.parameters, differ, strict=True) if one]
        if names:
            raise RuntimeError(
                f"The replicas have different parameters: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. "
                "They were equal when the engine was attached. Load weights on all replicas, or before."
            )

    def close(self) -> None:
        """Do nothing."""
