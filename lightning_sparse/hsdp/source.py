"""The end of a backward of a model that FSDP2 shards: ``.grad`` holds this rank's part of its replica's gradients.

``fully_shard`` averages gradients within a replica, adds up micro-batches, and leaves this rank's part in ``.grad``.
When a backward is over, all ranks agree whether gradients are finite. ``model.set_requires_all_reduce(False)`` leaves
that out, as it leaves out the messages between replicas where FSDP2 averages over them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from lightning_sparse.core.layout import flattened, own
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.gradient_hooks import on_gradients


class ShardSource:
    """Tells an engine when a backward is over.

    It also observes the engine, see :class:`~lightning_sparse.engine.StepObserver`.

    FSDP runs the hooks of parameters behind their reduction, on CUDA on the stream of that reduction. Ranks agree in a
    callback at the end of backward, behind FSDP's own callback, which lets the stream of backward wait for
    all reductions. It is one step later than that where a model has several roots, each with a callback of its own.

    Args:
        engine: its ``comm`` connects the replicas.
        model: that FSDP has sharded.
    """

    def __init__(self, engine: Engine, model: Module) -> None:
        self.engine, self._stepper = engine, engine.stepper
        self._parameters = engine.stepper.parameters
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        self._contexts = {id(context): context for state in states if (context := state._state_ctx)}
        """FSDP's own notes about a backward, one for each root."""
        self._groups = list(groups_of(model))
        self._backward = -1
        """Id of the latest backward."""
        self._used = set[str]()
        """Parameters that this rank has used since ranks agreed last; others may still have an old average."""
        self._hooks = on_gradients(self._parameters, self._note)
        self._ended = False
        """Whether there was a synchronised backward since the latest forward."""
        for root in roots_of(model):
            before = torch.compiler.disable(self._begin_forward)  # type: ignore[no-untyped-call]
            self._hooks.callback(root.register_forward_pre_hook(before, prepend=True).remove)

    def before_step(self, engine: Engine) -> None:
        """Do nothing: all is done at the end of backward."""

    def close(self) -> None:
        """Keep the hooks: a backward of a closed engine is an error, until :meth:`release` is called."""

    def release(self) -> None:
        """Remove the hooks: another engine takes over, or nobody."""
        self._hooks.close()

    def _note(self, name: str, _: Tensor) -> None:
        """Let ranks agree at the end of this backward: FSDP has reduced some of its gradients."""
        if self.engine.closed:
            raise RuntimeError("The engine is closed, and replicas would drift apart. Attach a new one to train on.")
        if self._stepper.paused:
            return
        self._used.add(name)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            if any(group.all_reduce_grads for group in self._groups):
                _at_the_end(lambda: _at_the_end(self._end))

    def _begin_forward(self, *_: Any) -> None:
        """Look whether all ranks of this replica go on with a forward: a rank that skips a step would wait in FSDP.

        FSDP gathers parameters in the first forward after a backward, whatever it keeps.
        """
        if self._ended and not self.engine.closed:
            self._ended = False
            self._stepper.begin_forward()

    @torch.no_grad()
    def _end(self) -> None:
        """Agree whether gradients are finite; below a density of 1 they stay this replica's own."""
        stepper, self._ended = self._stepper, True
        with stepper.failing_together("in backward"):
            if any(context.post_backward_final_callback_queued for context in self._contexts.values()):
                raise RuntimeError(
                    "A backward within another one has ended, as torch.utils.checkpoint runs it, and gradients of the "
                    "outer one are not here yet. Call checkpoint(..., use_reentrant=False)."
                )
            aside, parameters = stepper.steps_aside, self._parameters
            used = [name in self._used and p.grad is not None for name, p in parameters.items()]
            with_grad = [p.grad for p, one in zip(parameters.values(), used, strict=True) if one]
            grads = [own(grad) for grad in with_grad if grad is not None]
            self._used.clear()
            finite, anywhere = stepper.end_backward(list(parameters), grads, aside, used)
            if aside or not finite:
                every = [p for p, one in zip(parameters.values(), anywhere, strict=False) if one]  # on any replica
                for p in every:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                stepper.average_densely([flattened(own(p.grad)) for p in every if p.grad is not None])


def roots_of(model: Module) -> Iterator[Module]:
    """Return those of FSDP's modules that are within no other one."""
    if isinstance(model, FSDPModule):
        yield model
        return
    for child in model.children():
        yield from roots_of(child)


def groups_of(model: Module, recurse: bool = True) -> Iterator[Any]:
    """Return FSDP's groups of a model's parameters, each of which it gathers and reduces together."""
    for module in model.modules() if recurse else [model]:
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            one = [state._fsdp_param_group] if "_fsdp_param_group" in vars(state) else state._fsdp_param_groups
            yield from filter(None, one)  # torch had one group a module at first


@contextmanager
def apart(model: Module) -> Iterator[None]:
    """Accumulate gradients within each replica in the context, and send nothing between replicas."""
    groups = list(groups_of(model))
    before = [group.all_reduce_grads for group in groups]
    for group in groups:
        group.all_reduce_grads = False
    try:
        yield
    finally:
        for group, reduces in zip(groups, before, strict=True):
            group.all_reduce_grads = reduces


def _at_the_end(act: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running, behind all that is to be called until now."""
    Variable._execution_engine.queue_callback(act)
