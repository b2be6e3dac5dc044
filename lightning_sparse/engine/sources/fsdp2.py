"""Source of gradients in ``.grad`` of a model that FSDP2 shards: each rank exchanges its own part of every parameter.

``fully_shard`` averages gradients within a replica, adds up micro-batches, and leaves this rank's part in ``.grad``.
When a backward is over, the parts are exchanged with the ranks of other replicas that hold the same part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter

from lightning_sparse.core.layout import flattened, own, sharded_as
from lightning_sparse.engine.engine import Engine
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.sources.gradient_hooks import on_gradients


class ShardSource:
    """Passes ``.grad`` to an engine's router when a backward is over; averages take its place.

    It also observes the engine, see :class:`~lightning_sparse.engine.StepObserver`.

    FSDP runs the hooks of parameters behind their reduction, on CUDA on the stream of that reduction. The exchange
    comes in a callback at the end of backward, behind FSDP's own callback, which lets the stream of backward wait for
    all reductions. It is one step later than that where a model has several roots, each with a callback of its own.

    Args:
        engine: its ``comm`` connects the replicas.
        model: that FSDP has sharded.
    """

    def __init__(self, engine: Engine, model: Module) -> None:
        self.engine = engine
        self._parameters = engine.parameters
        states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
        self._contexts = {id(context): context for state in states if (context := state._state_ctx)}
        """FSDP's own notes about a backward, one for each root."""
        self._backward = -1
        """Id of the backward at whose end gradients are exchanged."""
        self._hooks = on_gradients(self._parameters, self._note)

    def before_step(self, engine: Engine) -> None:
        """Do nothing: gradients are passed on at the end of backward."""

    def close(self) -> None:
        """Keep the hooks: a backward that nobody exchanges is an error, until :meth:`release` is called."""

    def release(self) -> None:
        """Remove the hooks: another engine takes over, or nobody."""
        self._hooks.close()

    def _note(self, name: str, _: Tensor) -> None:
        """Let gradients be exchanged at the end of this backward: FSDP has reduced some."""
        if self.engine.closed:
            raise RuntimeError("The engine is closed, and replicas would drift apart. Attach a new one to train on.")
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not self.engine.accumulates:
            self._backward = backward
            _at_the_end(lambda: _at_the_end(self._exchange))

    @torch.no_grad()
    def _exchange(self) -> None:
        router = self.engine.entrance
        with router.failing_together("in backward"):
            if any(context.post_backward_final_callback_queued for context in self._contexts.values()):
                raise RuntimeError(
                    "A backward within another one has ended, as torch.utils.checkpoint runs it, and gradients of the "
                    "outer one are not here yet. Call checkpoint(..., use_reentrant=False)."
                )
            router.begin_step()
            alone = self.engine.comm.world_size == 1  # nobody else can have used what this rank did not
            needed = {name: p for name, p in self._parameters.items() if p.grad is not None or not alone}
            grads = {name: _grad_of(p) for name, p in (needed if router.direct else self._parameters).items()}
            flat = {name: flattened(own(grad)) for name, grad in grads.items()}
            if router.direct:
                assert isinstance(router, Reducer)  # what stands in front of it is never direct
                router.pass_by([(router.comm.start_average(values, wait=True), values) for values in flat.values()])
            else:
                router.finish(flat.items())
                router.on_stream.join()
            for name in grads.keys() - router.unused:
                self._parameters[name].grad = grads[name]


def _at_the_end(act: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running, behind all that is to be called until now."""
    Variable._execution_engine.queue_callback(act)


def _grad_of(parameter: Parameter) -> Tensor:
    """Return the gradient of a parameter, contiguous; zeros where this rank did not use it, as others may have."""
    if parameter.grad is None:
        return sharded_as(torch.zeros_like(own(parameter)), parameter)
    part = own(parameter.grad)
    return parameter.grad if part.is_contiguous() else sharded_as(part.contiguous(), parameter)
