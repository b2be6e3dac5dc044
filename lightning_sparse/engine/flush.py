"""The average of what ranks have not sent yet, for a flush between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.layout import shaped
from lightning_sparse.core.messages import AllGather, AllReduce, Message
from lightning_sparse.engine.group import Divided, GroupReducer
from lightning_sparse.engine.network import TorchCollective, send


def average_residuals(
    groups: Sequence[GroupReducer],
    parameters: Mapping[str, Parameter],
    comm: TorchCollective,
    device: torch.device,
    step: int,
) -> tuple[dict[str, Tensor], float]:
    """``(1/n) sum_i residual_i`` of each parameter that has a residual on any rank, in its shape and dtype; collective.

    Args:
        groups: all of them.
        parameters: by name.
        comm: the ranks.
        device: where gradients live.
        step: number of the next one.

    Returns:
        The averages by name, and the bytes that this rank has sent for them.
    """
    sent = 0.0

    def answer(message: Message) -> Tensor:
        nonlocal sent
        sent += message.bytes_sent(comm.world_size)
        return send(message, comm)

    def mean(x: Tensor) -> Tensor:
        return answer(AllReduce(x.clone())) / comm.world_size

    residuals = [group.residual for group in groups]
    have = torch.tensor([r is not None for r in residuals], dtype=torch.uint8, device=device)
    anywhere = answer(AllGather(have)).amax(0).tolist()
    pending = {}
    for group, residual, wanted in zip(groups, residuals, anywhere, strict=True):
        if not wanted:
            continue
        if residual is None:
            residual = torch.zeros(group.plan.numel, device=device, dtype=group.wide)
        average = mean(residual)
        by = group.memory.divide_all(group.state.memory, average, mean, group.density(step))
        group.divided = None if by is None else Divided(None, by)
        group.handed = None  # nobody can have changed these
        for name, span in group.spans.items():
            parameter = parameters[name]
            pending[name] = shaped(average[span].to(parameter.dtype), parameter)
    return pending, sent
