"""A flush between two steps: the average of what ranks have not sent yet leaves the residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.core.layout import own, shaped, sharded_as
from lightning_sparse.core.messages import AllGather, AllReduce, Message
from lightning_sparse.engine.network import send
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.state.record import Averages


@contextmanager
def gradients_aside(optimizers: Iterable[Optimizer], more: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters, also those of optimizers, have no gradients within the block; then those of before again."""
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    parameters = list({id(p): p for p in (*held, *more)}.values())
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


def take_pending(
    reducer: Reducer, put_together: Callable[[Sequence[Averages]], Sequence[Averages]]
) -> dict[str, Tensor]:
    """Return the average of each parameter that has a residual on any rank, and forget the residuals; collective.

    The averages are ``(1/n) sum_i residual_i``, in the parameter's shape and dtype. See :meth:`.Engine.take_pending`.

    Args:
        reducer: between two steps.
        put_together: gives averages as optimizers get them, given those of what this rank exchanges.
    """
    comm, record, sent = reducer.comm, reducer.record, 0.0

    def answer(message: Message) -> Tensor:
        nonlocal sent
        sent += message.bytes_sent(comm.world_size)
        return send(message, comm)

    def mean(x: Tensor) -> Tensor:
        return answer(AllReduce(x.clone())) / comm.world_size

    reducer.skipped.resolve()
    if reducer.settings.lr_aware and reducer.rates.known:
        reducer.rescale()
    with reducer.on_stream.between_steps():
        groups, made, rounded = reducer.groups, list[Averages](), list[tuple[Tensor, Tensor]]()
        have = torch.tensor([group.residual is not None for group in groups], dtype=torch.uint8, device=reducer.device)
        anywhere = answer(AllGather(have)).amax(0).tolist()
        for group in (group for group, wanted in zip(groups, anywhere, strict=True) if wanted):
            residual = group.residual
            kept = residual is not None
            if residual is None:
                residual = torch.zeros(group.plan.numel, device=reducer.device, dtype=group.wide)
            average = mean(residual)
            if kept and group.dtype != group.wide:  # each rank keeps the rounding error of the mean
                rounded.append((residual, average - average.to(group.dtype)))
            by = group.memory.divide_all(group.state.memory, average, mean, group.density(reducer.step))
            whole = group.statistics is not None and group.statistics.indices is None
            delivery = group.delivery(None, by, comm.world_size, whole)
            made.append(Averages(group.spans, None, average.to(group.dtype), delivery))
        reducer.totals.add(sent, 0.0)
        given = _by_name(put_together(made))
        with record.changing():
            reducer.lengths.begin_step()
            for group in groups:
                group.scale({name: 0.0 for each in made for name in each.spans})
            for residual, error in rounded:
                residual.add_(error)
            record.flush(_by_name(made), {name: one.delivery for name, one in given.items()})
    return {name: _shaped(one, name, reducer.parameters[name]) for name, one in given.items()}


def _by_name(averages: Sequence[Averages]) -> dict[str, Averages]:
    return {name: each for each in averages for name in each.spans}


def _shaped(averages: Averages, name: str, parameter: Tensor) -> Tensor:
    """Return the averages of a parameter, of all its coordinates here, in its shape."""
    assert averages.values is not None
    return sharded_as(shaped(averages.values[averages.spans[name]], own(parameter)), parameter)
