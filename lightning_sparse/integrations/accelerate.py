"""Engines for models that an ``accelerate.Accelerator`` has wrapped: by its user, or by a ``transformers.Trainer``.

Users call :func:`attach`, as ``lightning_sparse.accelerate``.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO, Any
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_sparse.api.attach import attach_config, wrapped
from lightning_sparse.api.checkpoint import SideFiles, listing, restore
from lightning_sparse.core.checks import expect
from lightning_sparse.engine import Engine, failing_together
from lightning_sparse.engine.clipping import clip_by_norm, clip_by_value
from lightning_sparse.engine.config import SparsificationConfig, StrategyConfig, from_keywords, with_keywords_of
from lightning_sparse.engine.metrics import Totals
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.kinds import stepping
from lightning_sparse.engine.step import Stepper
from lightning_sparse.integrations.base import refuse_with_overlap
from lightning_sparse.integrations.earlier import Left, go_on
from lightning_sparse.tuning.controllers.announcer import Announcer

NAME = "lightning_sparse"
"""First part of the names of this package's files in a checkpoint's folder."""
INTERRUPTED = "the marker that is written last is missing, as where a process ends while it saves"
"""Problem of a folder with residuals of some ranks, and without a marker."""

_known: WeakSet[Accelerated] = WeakSet()
"""All that there are."""


class Accelerated:
    """Attaches an engine to a wrapped model, and moves clipping and files to it.

    Args:
        accelerator: that has prepared model and optimizers.
        config: settings.
    """

    def __init__(self, accelerator: Any, config: StrategyConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.engine: Engine | None = None
        """None with a single process, which has nobody to send to."""
        self._ddp: Any = None
        self._files = SideFiles()
        self.undo = ExitStack()
        """Callbacks that undo changes of the Accelerator, when the engine ends."""
        self._logged_step = 0
        self._place = 0
        """Number among the models of this Accelerator, for files of its own."""
        _known.add(self)

    def attach(self, model: Any, optimizers: Sequence[Any], clips: str = "") -> Engine | None:
        """Attach an engine, or let the one that the model has go on with these optimizers; collective.

        Args:
            model: as the Accelerator has prepared it.
            optimizers: that apply its averages, as the Accelerator has prepared them.
            clips: the host's setting that clips gradients, with its value, if it has one.

        Raises:
            ValueError: if the Accelerator has not wrapped the model in ``DistributedDataParallel``.
        """
        ddp = wrapped(model)
        if ddp is None:
            self._refuse_or_say(model)
            return None
        if self.engine is None or ddp is not self._ddp:
            left = self._close()
            self._take_place(ddp)
            self.engine = attach_config(ddp, SparsificationConfig.of(self.config), ())
            self.engine._add_observer(Announcer())
            self._ddp = ddp
            self._redirect_clipping()
            go_on(self.engine, left)
        self.engine.stepper.copies.back()
        with self.engine._failing_together():
            refuse_with_overlap(self.engine, optimizers, clips, self.accelerator.scaler)
            self.engine._show(map(stepping, optimizers))
        return self.engine

    @property
    def _beside(self) -> list[Accelerated]:
        """Those of this Accelerator that have an open engine, in the same order on all ranks."""
        mine = (one for one in _known if one.accelerator is self.accelerator and one.engine and not one.engine.closed)
        return sorted(mine, key=lambda one: one._place)

    def _take_place(self, ddp: Any) -> None:
        """Take the place of an earlier engine for these parameters, which ends; else one that no other model has."""
        own = {id(p) for p in ddp.parameters()}
        others = self._beside
        before = [one for one in others if one._ddp is not ddp and own & {id(p) for p in one._ddp.parameters()}]
        taken = {one._place for one in others}
        free = next(place for place in range(len(taken) + 1) if place not in taken)
        self._place = before[0]._place if before else free
        for one in before:
            one._close()

    def _refuse_or_say(self, model: Any) -> None:
        kind = getattr(self.accelerator.distributed_type, "value", self.accelerator.distributed_type)
        if self.accelerator.num_processes == 1:
            rank_zero_warn(
                "sparse_ddp: one process has nobody to send to, and trains as it would without this package. Start "
                "several: accelerate launch --num_processes 2, or torchrun --nproc-per-node 2."
            )
            return
        raise ValueError(
            f"Expected a model that Accelerate has wrapped in DistributedDataParallel, but got a "
            f"{type(model).__name__} with distributed_type {kind}. Sharded models (FSDP, DeepSpeed, Megatron) have no "
            "all-reduce of whole gradients that could be sparsified: choose plain data parallelism (MULTI_GPU, "
            "MULTI_CPU), and pass the model that accelerator.prepare() returned."
        )

    def _redirect_clipping(self) -> None:
        """Let the Accelerator clip by the mean gradient, which nobody has before the exchange."""
        norm, value = self.accelerator.clip_grad_norm_, self.accelerator.clip_grad_value_

        def clip_grad_norm_(parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
            given, steppers = self._exchanged_of(parameters)
            if not steppers or float(norm_type) != 2:
                return norm(given, max_norm, norm_type)
            self.accelerator.unscale_gradients()
            return clip_by_norm(steppers, given, max_norm)

        def clip_grad_value_(parameters: Any, clip_value: Any) -> None:
            given, steppers = self._exchanged_of(parameters)
            if not steppers:
                value(given, clip_value)
                return
            self.accelerator.unscale_gradients()
            clip_by_value(steppers, given, clip_value)

        for redirected in (clip_grad_norm_, clip_grad_value_):
            self.redirect(redirected.__name__, redirected)

    def _exchanged_of(self, parameters: Any) -> tuple[list[torch.Tensor], list[Stepper]]:
        """Return parameters as a list, and who exchanges some of them: maybe engines of several models."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        steppers = [one.engine.stepper for one in self._beside if one.engine]
        return given, [stepper for stepper in steppers if any(id(p) in stepper.names for p in given)]

    def redirect(self, name: str, redirected: Callable[..., Any]) -> None:
        """Replace a method of the Accelerator, until the engine ends."""
        own = vars(self.accelerator)
        before = own.get(name)
        own[name] = redirected

        def undo() -> None:
            if own.get(name) is not redirected:  # a later one calls this one, which then only passes calls on
                return
            if before is None:
                del own[name]
            else:
                own[name] = before

        self.undo.callback(undo)

    def end(self) -> None:
        """Close the engine, and leave the Accelerator as it was, without references to models that outlive it."""
        if self.engine is not None:
            self.engine.close()
        self.undo.close()
        self.engine = self._ddp = None

    def quantities(self) -> dict[str, float]:
        """Return logged quantities of the latest step as ``sparse/<name>``, once for each step; collective."""
        engine = self.engine
        if engine is None or engine.closed or engine.step == self._logged_step:
            return {}
        self._logged_step = engine.step
        return {f"sparse/{name}": value for name, value in engine.summary().items()}

    def save(self, folder: Any, global_step: int | None = None) -> None:
        """Write every rank's residuals into a checkpoint's folder, and then rank 0's marker; collective.

        Raises:
            RuntimeError: on all ranks, if one of them could not write.
        """
        engine = self.engine
        if engine is None or not self.config.save_residuals:
            return
        comm, totals = TorchCollective(), engine.stepper.totals.state_dict()
        beside = self._files.beside(self._inside(folder), engine, _write, comm, global_step)
        with beside as marker, failing_together(comm, engine.device):
            if comm.rank == 0:
                with _whole(self._marker(folder)) as file:
                    file.write(json.dumps({**marker, "totals": totals}, indent=1).encode())

    def unmark(self, folder: Any) -> None:
        """Remove the marker of an earlier save, before the folder is written to again; collective."""
        if self.engine is None:
            return
        comm = TorchCollective()
        with failing_together(comm, self.engine.device):
            if comm.rank == 0 and os.path.exists(self._marker(folder)):
                os.remove(self._marker(folder))

    def load(self, folder: Any) -> None:
        """Let the engine go on with the residuals in a checkpoint's folder; collective.

        A folder that was saved without this package has none, and error feedback starts empty. A folder whose save was
        interrupted before the marker was written is a warning, or an error with ``strict_resume``.
        """
        engine = self.engine
        if engine is None:
            return
        comm = TorchCollective()
        begun = bool(listing(self._inside(folder)))
        read = _read_marker(self._marker(folder)) if comm.rank == 0 else None
        found = comm.all_gather_object((read, begun), engine.device)
        marker, dense = found[0][0], False
        if marker is None:
            dense, marker = not any(begun for _, begun in found), INTERRUPTED
        totals = marker.get("totals") if isinstance(marker, dict) else None
        if totals is not None and not Totals.fits(totals):
            marker, totals = f"its totals are {reprlib.repr(totals)}, where numbers by name were saved", None
        restore(engine, self._inside(folder), marker, _read, self.config.resize, self.config.strict_resume, dense=dense)
        if totals is not None:
            engine.stepper.totals.load_state_dict(totals)

    def _inside(self, folder: Any) -> str:
        """Return the path beside which side files lie: the folder itself is the checkpoint, maybe of several models."""
        return os.path.join(os.fspath(folder), f"{NAME}.{self._place}" if self._place else NAME)

    def _marker(self, folder: Any) -> str:
        return f"{self._inside(folder)}.json"

    def _close(self) -> Left | None:
        """End; return the state for the next engine."""
        left = Left.by(self.engine) if self.engine is not None and self.engine.step else None
        self.end()
        return left


def _read_marker(path: str) -> Any:
    """Return the marker, a sentence if it cannot be read, None if there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # on this rank, and the others wait for an answer
        return f"{os.path.basename(path)} cannot be read as JSON: {error}"


def _write(content: dict[str, Any], target: str) -> None:
    """Save a dict with tensors."""
    with _whole(target) as file:
        torch.save(content, file)


@contextmanager
def _whole(target: str) -> Iterator[IO[bytes]]:
    """Open a file that is at its place when all of it is written, and not before."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    with open(f"{target}.part", "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{target}.part", target)


def _read(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


@with_keywords_of(StrategyConfig)
def attach(accelerator: Any, model: Any, optimizer: Any, **keywords: Any) -> Engine | None:
    """Replace the gradient all-reduce of a model that an ``Accelerator`` has prepared. All ranks must call this.

    Model and optimizer, or a list of optimizers, are those that ``accelerator.prepare`` returned. After this call,

    - gradients are exchanged when the optimizer steps, and steps of AdamW and of momentum are adapted to sparse
      averages; ``.grad`` is this rank's own before;
    - ``accelerator.clip_grad_norm_`` clips by the norm of the mean gradient and returns it, as with DDP, see
      :meth:`.Engine.clip_grad_norm_`; ``clip_grad_value_`` clips each rank's own (``docs/guide/optimizers.md``);
    - steps whose gradients are not finite on some rank are skipped on all ranks;
    - ``accelerator.save_state`` writes each rank's residuals into the checkpoint's folder, with a marker that is
      written last, and ``accelerator.load_state`` lets the engine continue with them;
    - ``accelerator.end_training`` closes the engine.

    Returns:
        The engine; None with a single process, which trains as before.

    Raises:
        ValueError: for settings that cannot work; for a model that is not wrapped in ``DistributedDataParallel``.
        TypeError: for a keyword that it does not know.
        RuntimeError: on all ranks, if settings or models differ between ranks.
    """
    several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in several:
        expect(isinstance(one, Optimizer), "optimizer", "an optimizer, or a list of them", one)
    attached = Accelerated(accelerator, from_keywords(StrategyConfig, keywords, "attach"))
    engine = attached.attach(model, several)
    if engine is not None:
        _refuse_to_register(attached, accelerator.register_for_checkpointing)
        _add_files(attached)
        attached.redirect("end_training", partial(_end, attached, accelerator.end_training))
    return engine


def _end(attached: Accelerated, original: Callable[[], None]) -> None:
    """End the engine before its process groups: where one refers to them, their threads outlive the interpreter."""
    attached.end()
    original()


def _refuse_to_register(attached: Accelerated, register: Callable[..., None]) -> None:
    """Let ``register_for_checkpointing`` refuse engines: it would keep the residuals of the main process only."""

    def checked(*objects: Any) -> None:
        if any(isinstance(one, Engine) for one in objects):
            raise ValueError(
                "Expected objects whose state is equal on all processes, but got an engine, whose residuals differ "
                "from rank to rank: register_for_checkpointing keeps those of the main process only. Leave it out: "
                "accelerator.save_state() saves the residuals of all ranks already."
            )
        register(*objects)

    attached.redirect("register_for_checkpointing", checked)


def _add_files(attached: Accelerated) -> None:
    """Save residuals after, and load them after, all that the Accelerator saves and loads.

    Hooks of the Accelerator tell the folder, and run before it writes or reads; the marker must be the last file.
    """
    accelerator = attached.accelerator
    folders: list[Any] = []

    def note(models: Sequence[Any], *rest: Any) -> None:
        folders[:] = rest[-1:]

    def remove_marker(models: Sequence[Any], weights: Any, folder: Any) -> None:
        note(models, folder)
        attached.unmark(folder)

    def then(original: Callable[..., Any], act: Callable[[Any], None], *args: Any, **keywords: Any) -> Any:
        result = original(*args, **keywords)
        for folder in folders:
            act(folder)
        folders.clear()
        return result

    attached.undo.callback(accelerator.register_save_state_pre_hook(remove_marker).remove)
    attached.undo.callback(accelerator.register_load_state_pre_hook(note).remove)
    attached.redirect("save_state", partial(then, accelerator.save_state, attached.save))
    attached.redirect("load_state", partial(then, accelerator.load_state, attached.load))
