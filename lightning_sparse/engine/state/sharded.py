"""The state of an engine of shards, in a folder of ``torch.distributed.checkpoint``, for any number of ranks.

What a rank remembers of its part of a parameter is saved as a ``DTensor``, sharded as the parameter is, under the name
``replica<k>/<name>/<what>``. Whoever loads it reads the part that it has then, so that replicas may be sharded over
another number of ranks. What is no part of a parameter, such as thresholds, is saved by rank, as bytes.

Averages that nobody has applied yet go into the residuals of the first replica, as on the way back from a side file.
Those that come one step late are saved twice: with what is no part of a parameter, for as many ranks, and as vectors,
which go into the residuals of another number of ranks.
"""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.layout import own, sharded_as, sum_dtype
from lightning_sparse.engine.config import Resize
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.optimizers.kinds import stepping
from lightning_sparse.engine.optimizers.rules import WAITED
from lightning_sparse.engine.state.schema import State, check_state, dense, with_pending

LATE = "late"
"""Begins the names of averages that come one step late."""
APART = ("parameters", "pending", "spans")
"""Fields of a state that are saved as tensors, or follow from how parameters are sharded."""


class Saved(NamedTuple):
    """A folder that was saved."""

    path: Path
    shapes: dict[str, torch.Size]
    """Of the tensors, by name."""
    replicas: int
    ranks: int
    """Of a replica."""

    @classmethod
    def at(cls, path: Path) -> Saved:
        """Look at a folder.

        Raises:
            ValueError: if it is none of :func:`save_sharded`.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # a second, which few programs need

        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
        shapes = {name: about.size for name, about in metadata.items() if hasattr(about, "size")}
        found = [re.fullmatch(r"ranks(\d+)\.(\d+)", name) for name in shapes]
        places = [(int(match[1]), int(match[2])) for match in found if match]
        if not places:
            raise ValueError(f"Expected a folder of residuals, but {path} holds none.")
        replicas, ranks = (1 + max(each) for each in zip(*places, strict=True))
        return cls(path, shapes, replicas, ranks)

    def read(self, into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name, or the parts of them that this rank has; the other ranks need not read."""
        from torch.distributed.checkpoint.state_dict_loader import load

        with warnings.catch_warnings(action="ignore"):  # it says that a rank reads by itself
            load(into, checkpoint_id=self.path, no_dist=True)
        return into

    def rest(self, replica: int, rank: int) -> State:
        """Return what is no part of a parameter."""
        name = f"ranks{replica}.{rank}"
        read = self.read({name: torch.empty(self.shapes[name], dtype=torch.uint8, device="cpu")})[name]
        plain: State = torch.load(io.BytesIO(read.numpy().tobytes()), weights_only=True)
        return plain


def save_sharded(engine: Engine, folder: str | Path, save: str = "") -> State:
    """Write what all ranks remember into a new folder; all ranks of the default process group must call this.

    For engines of :func:`~lightning_sparse.attach_hsdp`. All ranks save after the newest exchange of any of them.
    Averages that no optimizer has applied go into the residuals, so that the weights that are saved are those of before
    the optimizer's step, or of after it.

    Args:
        engine: of all these ranks.
        folder: on a file system that they share; made here.
        save: a name of the save, which is kept in the folder.

    Returns:
        The state of this rank, without what is saved as tensors.

    Raises:
        RuntimeError: on all ranks, if any could not take its state.

    Example:
        One rank that is a replica by itself.

        >>> import tempfile, torch, lightning_sparse as ls
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
        >>> mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(torch.nn.Linear(20, 20, bias=False), mesh=mesh["shard"])
        >>> engine = ls.attach_hsdp(model, mesh, density=0.1, single_device="sparse")
        >>> model(torch.ones(1, 20)).sum().backward()
        >>> folder = tempfile.mkdtemp() + "/sparse"
        >>> state = ls.save_sharded(engine, folder)        # the average in .grad counts as not applied
        >>> engine.close()
        >>> engine = ls.attach_hsdp(model, mesh, density=0.1, single_device="sparse")
        >>> ls.load_sharded(engine, folder)
        []
        >>> float(engine.residual("weight").sum())
        400.0
        >>> engine.close()
        >>> dist.destroy_process_group()
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    for network in engine.networks:
        engine._join_together(network)
    newest = engine._moment.to(engine.device)
    for network in engine.networks:
        newest = network.all_gather(newest).amax(0)
    content: dict[str, Any] = {}
    with engine._failing_together():
        state = with_pending(engine.state_dict(newest.cpu()), engine.comm.world_size)
        rest = {**{name: value for name, value in state.items() if name not in APART}, "save": save}
        content[f"ranks{engine.comm.rank}.{engine.router.within.rank}"] = _bytes_of(rest)
        for name, parameter in _known(engine).items():
            for key, vector in state["parameters"].get(name, {}).items():
                content[f"replica{engine.comm.rank}/{name}/{key}"] = _as_parameter(vector, parameter)
        for name, late in state["late"].items():
            content[f"{LATE}/{name}"] = _as_parameter(dense(late, state["spans"][name][1]), engine.parameters[name])
        for _, name, kept in _stepped(engine):
            if WAITED in kept:
                content[f"{WAITED}/{name}"] = kept[WAITED].cpu()
    save_together(content, checkpoint_id=folder)
    return rest


def load_sharded(engine: Engine, folder: str | Path, save: str | None = None, resize: Resize = "merge") -> list[str]:
    """Go on where another engine was, of any number of replicas, and of ranks in each; all ranks must call this.

    With as many of both, each rank continues bit for bit. With as many replicas, their residuals do; what was learned
    about groups starts anew.

    Args:
        engine: bound to its optimizers, whose states are loaded; before its first step or between two.
        folder: see :func:`save_sharded`.
        save: the name that the save has to have; None: any.
        resize: with another number of replicas, "merge" gives each the mean of what all remembered, so that the update
            that is still to be sent is unchanged; "flush" sends all of it in the first step; "zero" drops it.

    Returns:
        Sentences about what did not fit, on this rank.

    Raises:
        ValueError: on all ranks, with nothing changed, if the folder cannot be read, or holds something else.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    notes: list[str] = []
    with engine._failing_together():
        try:
            saved = Saved.at(Path(folder))
            resized = saved.replicas != engine.comm.world_size
            state = _state_for(engine, saved, resize, notes)
            waited = list(_waited_in(saved, engine))
        except (OSError, KeyError, RuntimeError, CheckpointException) as error:
            raise ValueError(f"{folder} cannot be read: {type(error).__name__}: {error}") from error
        if save not in (None, found := state.pop("save")):
            raise ValueError(f"Expected the residuals of save {save} in {folder}, but they are of {found}.")
    with engine._failing_together():
        notes += engine.load_state_dict(state)
    for kept, steps in waited:
        kept[WAITED] = steps
    if resized and resize == "flush":
        engine._flush_next_step()
    return notes


def remove_others(folder: Path) -> None:
    """Remove the saves beside one that is complete; on one rank."""
    for other in folder.parent.iterdir():
        if other != folder and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)


def _known(engine: Engine) -> dict[str, Parameter]:
    """Return parameters of which something may be remembered, also frozen ones, by name."""
    return {name: p for name, p in {**engine.parameters, **engine.frozen}.items() if name in engine.shards}


def _bytes_of(plain: State) -> Tensor:
    """Return plain data as a vector of bytes, which is read back without running any code."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _as_parameter(vector: Tensor, parameter: Tensor) -> Tensor:
    """Return the flat values of this rank's part, sharded as the parameter is, on the CPU."""
    part = own(parameter)
    return sharded_as(vector.to(part.device).view(part.shape), parameter).cpu()


def _stepped(engine: Engine) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Find the parameters of which a bound optimizer has a state: with their names and that state."""
    for optimizer in map(stepping, engine.optimizers):
        for parameter, kept in optimizer.state.items():
            if id(parameter) in engine.router.names:
                yield parameter, engine.router.names[id(parameter)], kept


def _waited_in(saved: Saved, engine: Engine) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Read what momentum SGD counts of each parameter, for the state of its optimizer."""
    states = {
        f"{WAITED}/{name}": (kept, _like(parameter, torch.uint8))
        for parameter, name, kept in _stepped(engine)
        if saved.shapes.get(f"{WAITED}/{name}") == parameter.shape
    }
    read = saved.read({name: empty for name, (_, empty) in states.items()}) if states else {}
    for name, (kept, _) in states.items():
        yield kept, read[name]


def _like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros that are sharded as a parameter."""
    return sharded_as(torch.zeros_like(own(parameter), dtype=dtype), parameter)


def _state_for(engine: Engine, saved: Saved, resize: Resize, notes: list[str]) -> State:
    """Return the state of this rank in a folder; a sentence is added for what does not fit."""
    comm = engine.comm
    alike = saved.replicas == comm.world_size
    same = alike and saved.ranks == engine._ranks_of_a_replica
    rest = saved.rest(*((comm.rank, engine.router.within.rank) if same else (0, 0)))
    spans = {name: list(part) for name, part in engine.shards.items()}
    state: State = {**rest, "parameters": {name: {} for name in spans}, "spans": spans}
    if not same:
        state["groups"], state["late"] = [], {}
    if not alike and resize == "zero":
        return check_state({**state, "counters": {}})
    here, wanted = _known(engine), list[tuple[str, str]]()
    for name, key in _vectors_in(saved):
        if name not in here:
            notes.append(f"There is no parameter {name} any more.")
        elif (shape := saved.shapes[f"replica0/{name}/{key}"]) != here[name].shape:
            notes.append(f"{name} had the shape {tuple(shape)}, and has {tuple(here[name].shape)}: {key} is dropped.")
        else:
            wanted.append((name, key))
    replicas = [comm.rank] if alike else range(saved.replicas)
    for replica in replicas:
        empty = {f"replica{replica}/{n}/{key}": _like(here[n], sum_dtype(here[n].dtype)) for n, key in wanted}
        read = saved.read(empty) if empty else {}
        for name, key in wanted:
            found = own(read[f"replica{replica}/{name}/{key}"]).flatten()
            so_far = state["parameters"][name].get(key, 0.0)
            state["parameters"][name][key] = found if alike else so_far + found.double()
    for name, key in wanted:
        total = state["parameters"][name][key] / len(replicas)
        state["parameters"][name][key] = total.to(device="cpu", dtype=sum_dtype(here[name].dtype))
    for name, average in [] if same else _late_in(saved, engine):  # in each of n residuals: their mean is the average
        vectors = state["parameters"][name]
        vectors["residual"] = vectors.get("residual", 0.0) + average.to(device="cpu", dtype=sum_dtype(here[name].dtype))
    return check_state(state)


def _late_in(saved: Saved, engine: Engine) -> list[tuple[str, Tensor]]:
    """Read this rank's part of averages that optimizers were to be given in the next step."""
    parameters = {name: p for name, p in engine.parameters.items() if saved.shapes.get(f"{LATE}/{name}") == p.shape}
    read = saved.read({f"{LATE}/{name}": _like(p, p.dtype) for name, p in parameters.items()}) if parameters else {}
    return [(name, own(read[f"{LATE}/{name}"]).flatten()) for name in parameters]


def _vectors_in(saved: Saved) -> list[tuple[str, str]]:
    """Return the parameters of which a folder remembers something, and the names of it."""
    found = [re.fullmatch(r"replica0/(.+)/(\w+)", name) for name in saved.shapes]
    return [(match[1], match[2]) for match in found if match]
