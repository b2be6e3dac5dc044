"""The state of an engine of shards, in a folder of ``torch.distributed.checkpoint``, for any number of ranks.

What a rank remembers of its part of a parameter is saved as a ``DTensor``, sharded as the parameter is, under the name
``replica<k>/<name>/<what>``. Whoever loads it reads the part that it has then, so that replicas may be sharded over
another number of ranks. What is no part of a parameter, such as thresholds, is saved by rank, as bytes.

Averages that a step has not applied yet, in a handler of a signal, go into the residuals of the first replica, as on
the way back from a side file.

A folder has the checksums of its files. On the way back, each rank reads and compares its share of the files, and all
ranks go on or none does, as with side files.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.api.checkpoint import (
    DAMAGED,
    Found,
    SideFileError,
    emptied,
    is_whole,
    load_together,
    sealed,
    warn_of_dropped,
)
from lightning_sparse.core.layout import own, sum_dtype, whole_of
from lightning_sparse.engine.agreement import failing_together, reason
from lightning_sparse.engine.config import Resize, check_choice
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.kinds import stepping
from lightning_sparse.engine.optimizers.rules import WAITED
from lightning_sparse.engine.state.schema import State, check_state, checksum, with_pending

METADATA, CHECKSUMS = ".metadata", "checksums.json"
"""Files of a folder: what torch says about the others, and the checksums of all."""
APART = ("parameters", "spans")
"""Fields of a state that are saved as tensors, or follow from how parameters are sharded."""


class Saved(NamedTuple):
    """A folder that was saved."""

    path: Path
    reader: Any
    """Of the folder's files."""
    shapes: dict[str, torch.Size]
    """Of the tensors, by name."""
    replicas: int
    ranks: int
    """Of a replica."""

    @classmethod
    def at(cls, path: Path, rank: int, world_size: int) -> Saved:
        """Look at a folder, in which each rank compares its share of the files with their checksums.

        Raises:
            SideFileError: if it is none of :func:`save_sharded`, or a file of this rank's share is damaged.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # a second, which few programs need
        from torch.distributed.checkpoint.metadata import Metadata

        files = _checked_files(path, rank, world_size)
        with (path / METADATA).open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise SideFileError(f"{METADATA} holds something else than its name says")
        read = {METADATA} | {info.relative_path for info in metadata.storage_data.values()}
        if read - files:
            raise SideFileError(f"{METADATA} names files that were not written with it: {', '.join(read - files)}")

        class Reader(FileSystemReader):
            def read_metadata(self, *_: Any, **__: Any) -> Any:
                return metadata  # torch would run what a file tells it to

        shapes = {name: about.size for name, about in metadata.state_dict_metadata.items() if hasattr(about, "size")}
        found = [re.fullmatch(r"ranks(\d+)\.(\d+)", name) for name in shapes]
        places = [(int(match[1]), int(match[2])) for match in found if match]
        if not places:
            raise SideFileError("there are no residuals in it")
        replicas, ranks = (1 + max(each) for each in zip(*places, strict=True))
        return cls(path, Reader(path), shapes, replicas, ranks)

    def read(self, into: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by name, or the parts of them that this rank has; the other ranks need not read.

        Raises:
            SideFileError: if they cannot be read.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            with warnings.catch_warnings(action="ignore"):  # it says that a rank reads by itself
                load(into, storage_reader=self.reader, no_dist=True)
        except CheckpointException as error:
            [(cause, _), *_] = error.failures.values()
            raise SideFileError(f"its tensors cannot be read ({type(cause).__name__}: {cause})") from error
        return into

    def rest(self, replica: int, rank: int) -> State:
        """Return what is no part of a parameter."""
        name = f"ranks{replica}.{rank}"
        read = self.read({name: torch.empty(self.shapes[name], dtype=torch.uint8, device="cpu")})[name]
        plain: State = torch.load(io.BytesIO(read.numpy().tobytes()), weights_only=True)
        return plain


def save_sharded(engine: Engine, folder: str | Path, save: str = "") -> State:
    """Write what all ranks remember into a new folder; all ranks of the default process group must call this.

    For engines of :func:`~lightning_sparse.attach_hsdp`. In handlers of signals, too, which run while ranks wait for
    each other in a step: all ranks save after the newest exchange of any of them.

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
        >>> torch.optim.SGD(model.parameters(), lr=0.1).step()
        >>> folder = tempfile.mkdtemp() + "/sparse"
        >>> state = ls.save_sharded(engine, folder)
        >>> engine.close()
        >>> engine = ls.attach_hsdp(model, mesh, density=0.1, single_device="sparse")
        >>> ls.load_sharded(engine, folder)
        []
        >>> float(engine.residual("weight").sum())         # 40 of 400 coordinates, each of 1, were sent
        360.0
        >>> engine.close()
        >>> dist.destroy_process_group()
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_together

    # Not by the engine's networks, where an exchange may wait that a handler of a signal runs in.
    every = TorchCollective()
    newest = every.all_gather(torch.tensor([engine.stepper.record.counts.number], device=engine.device)).amax(0)
    content: dict[str, Any] = {}
    with failing_together(every, engine.device):
        state = with_pending(engine.state_dict(newest.cpu()), engine.comm.world_size)
        rest = {**{name: value for name, value in state.items() if name not in APART}, "save": save}
        content[f"ranks{engine.comm.rank}.{engine.stepper.within.rank}"] = _bytes_of(rest)
        for name, parameter in _known(engine).items():
            for key, vector in state["parameters"].get(name, {}).items():
                content[f"replica{engine.comm.rank}/{name}/{key}"] = _as_parameter(vector, parameter)
        for _, name, kept in _stepped(engine):
            if WAITED in kept:
                content[f"{WAITED}/{name}"] = kept[WAITED].cpu()
    save_together(content, checkpoint_id=folder)
    _write_checksums(Path(folder), every, engine.device)
    return rest


def load_sharded(engine: Engine, folder: str | Path, save: str | None = None, resize: Resize = "merge") -> list[str]:
    """Go on where another engine was, of any number of replicas, and of ranks in each; all ranks must call this.

    With as many of both, each rank continues bit for bit. With as many replicas, their residuals do; what was learned
    about groups starts anew, and with another number of ranks in each, so do the lengths of gradients.

    Args:
        engine: bound to its optimizers, whose states are loaded; before its first step or between two.
        folder: see :func:`save_sharded`.
        save: the name that the save has to have; None: any.
        resize: with another number of replicas, "merge" gives each the mean of what all remembered, so that the update
            that is still to be sent is unchanged; "flush" sends all of it in the first step; "zero" drops it, with a
            warning that says how much that is.

    Returns:
        Sentences about what did not fit, on this rank.

    Raises:
        ValueError: on all ranks, with nothing changed, if the folder cannot be read, or holds something else.
            Also for a ``resize`` that there is not; ranks that gave another one raise a RuntimeError with it.
    """
    with failing_together(TorchCollective(), engine.device):
        check_choice("resize", resize, Resize)
    try:
        return load_together(engine, lambda: read_sharded(engine, Path(folder), save, resize))
    except ValueError as error:
        raise ValueError(f"The residuals in {folder} cannot be loaded: {str(error).rstrip('.')}.") from error


def read_sharded(engine: Engine, folder: Path, save: str | None, resize: Resize) -> Found:
    """Read what this rank goes on with, see :func:`load_sharded`.

    Raises:
        SideFileError: if this rank's share of the folder cannot be read, or is of another save.
    """
    notes: list[str] = []
    saved = Saved.at(folder, engine._rank, engine._world_size)
    state = _state_for(engine, saved, notes)
    waited = list(_waited_in(saved, engine))
    if save not in (None, found := state.pop("save")):
        raise SideFileError(f"they are of save {found}, and those of {save} are asked for")
    replicas, resized = engine.comm.world_size, saved.replicas != engine.comm.world_size
    dropped = 0.0
    if resized and resize == "zero":
        state, dropped = emptied(state)

    def loaded() -> None:
        for kept, steps in waited:
            kept[WAITED] = steps
        if resized and resize == "flush":
            engine._flush_next_step()
        if resized and resize == "zero":
            square = sum(engine.stepper.within.all_gather_object(dropped, engine.device))
            if engine._rank == 0:
                warn_of_dropped(f"{replicas} replica{'s' if replicas > 1 else ''}", saved.replicas, square)

    return Found(state, notes, loaded)


def remove_others(folder: Path) -> None:
    """Remove the saves beside one that is complete; on one rank."""
    for other in folder.parent.iterdir():
        if other != folder and other.is_dir():
            shutil.rmtree(other, ignore_errors=True)


class _PlainUnpickler(pickle.Unpickler):
    """Reads what torch says about files, and runs nothing else that a file may name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of torch's metadata, or what is plain data in it."""
        found = super().find_class(module, name) if module.startswith(("torch", "pathlib")) else None
        of = found.__module__ if isinstance(found, type) else ""
        plain = isinstance(found, torch.dtype) or found in (torch.Size, torch.serialization._get_layout)
        if plain or of.startswith(("torch.distributed.checkpoint.", "pathlib")):
            return found
        raise SideFileError(f"{METADATA} names {module}.{name}, which is no part of it")


def _write_checksums(folder: Path, every: TorchCollective, device: torch.device) -> None:
    """Write the checksums of all files, of which each rank reads its share; collective."""
    with failing_together(every, device):
        names = sorted({file.name for file in folder.iterdir()} - {CHECKSUMS}) if every.rank == 0 else []
    names = every.all_gather_object(names, device)[0]
    with failing_together(every, device):
        own = {name: _checksum_of(folder / name) for name in names[every.rank :: every.world_size]}
    files = {name: known for each in every.all_gather_object(own, device) for name, known in each.items()}
    with failing_together(every, device):
        if every.rank == 0:
            (folder / CHECKSUMS).write_text(json.dumps(sealed({"files": files}), indent=1), encoding="utf-8")


def _checked_files(folder: Path, rank: int, world_size: int) -> set[str]:
    """Return the names of a folder's files, of which this rank has compared its share with their checksums.

    Raises:
        SideFileError: if one is missing or damaged.
    """
    file = folder / CHECKSUMS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        files, whole = dict[str, str](content["files"]), is_whole(content, "files")
        for number, name in enumerate(sorted(files)):
            if whole and (number % world_size == rank or name == METADATA):
                file = folder / name
                whole = _checksum_of(file) == files[name]
    except Exception as error:  # whatever a damaged file makes of a reader
        raise SideFileError(f"{file.name} cannot be read ({reason(error)})") from error
    if not whole:
        raise SideFileError(f"{file.name} is damaged: {DAMAGED}")
    return {*files}


def _checksum_of(file: Path) -> str:
    """Return the checksum of a file's bytes, which need not fit into memory."""
    size = file.stat().st_size
    if not size:  # which cannot be mapped into memory
        return checksum("")
    return checksum(torch.from_file(str(file), size=size, dtype=torch.uint8, device="cpu"))


def _known(engine: Engine) -> dict[str, Parameter]:
    """Return parameters of which something may be remembered, also frozen ones, by name."""
    every, places = {**engine.stepper.parameters, **engine.frozen}, engine.stepper.share.places
    return {name: p for name, p in every.items() if name in places}


def _bytes_of(plain: State) -> Tensor:
    """Return plain data as a vector of bytes, which is read back without running any code."""
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _as_parameter(vector: Tensor, parameter: Tensor) -> Tensor:
    """Return the flat values of this rank's part, sharded as the parameter is, on the CPU."""
    part = own(parameter)
    return whole_of(vector.to(part.device).view(part.shape), parameter).cpu()


def _stepped(engine: Engine) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Find the parameters of which a bound optimizer has a state: with their names and that state."""
    for optimizer in map(stepping, engine._binding.optimizers):
        for parameter, kept in optimizer.state.items():
            if id(parameter) in engine.stepper.names:
                yield parameter, engine.stepper.names[id(parameter)], kept


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
    return whole_of(torch.zeros_like(own(parameter), dtype=dtype), parameter)


def _state_for(engine: Engine, saved: Saved, notes: list[str]) -> State:
    """Return the state of this rank in a folder; a sentence is added for what does not fit."""
    comm = engine.comm
    alike = saved.replicas == comm.world_size
    same_parts = saved.ranks == engine._parts
    same = alike and same_parts
    rest = saved.rest(comm.rank if same else 0, engine.stepper.within.rank if same_parts else 0)
    spans = {name: list(part) for name, part in engine.stepper.share.places.items()}
    state: State = {**rest, "parameters": {name: {} for name in spans}, "spans": spans}
    if not same:
        state["groups"] = []
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
    return check_state(state)


def _vectors_in(saved: Saved) -> list[tuple[str, str]]:
    """Return the parameters of which a folder remembers something, and the names of it."""
    found = [re.fullmatch(r"replica0/(.+)/(\w+)", name) for name in saved.shapes]
    return [(match[1], match[2]) for match in found if match]
