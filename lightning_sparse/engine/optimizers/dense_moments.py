"""Second moments that torch's Adam has formed in dense steps, from which those of sparsified parameters go on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.core.layout import flattened, laid_out, own
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.optimizers.kinds import stepping
from lightning_sparse.engine.parts import Parts


class Formed(NamedTuple):
    """The second moment that an optimizer has of a parameter."""

    second: Tensor
    """Corrected for its start at 0, in the parameter's shape."""
    steps: float


def go_on_from_dense(
    groups: Sequence[GroupReducer],
    optimizers: Iterable[Optimizer],
    parameters: Mapping[str, Parameter],
    comm: TorchCollective,
    device: torch.device,
    parts: Parts | None = None,
) -> None:
    """Start second moments where none are known yet, in a step that has just begun; collective.

    An optimizer's v holds squares of averages over n ranks, a rank's own the noise of one gradient, n times as much. So
    they start from n times the optimizer's: with ``sqrt(n)`` in the step, first steps are as long as those of
    dense training. The shortest history of a group counts for all of it, and one step where there is none: as Adam's
    do, second moments without a history start from the first gradients then.

    Args:
        groups: all of them.
        optimizers: that step parameters.
        parameters: by name.
        comm: the ranks. Where they hold states of different parameters, as in ``ZeroRedundancyOptimizer``, all of them
            start from what any of them holds.
        device: where gradients live.
        parts: which coordinates of each parameter groups have; None: all that this rank has.
    """
    served = {name: group for group in groups if group.memory.needs_second for name in group.spans}
    if not served:
        return
    here = _formed(optimizers, {id(parameters[name]): name for name in served})
    found = comm.all_gather_object({name: formed.steps for name, formed in here.items()}, device)
    holders = {name: rank for rank, each in reversed(list(enumerate(found))) for name in each}
    if not holders:
        return
    known = {name: group.memory.vectors(group.state.memory)["second"] for name, group in served.items()}
    unknown = {name for name in holders if not bool(known[name][served[name].spans[name]].any())}
    fresh = set.intersection(*comm.all_gather_object(unknown, device))
    for group in groups:
        names = [name for name in group.spans if name in fresh]
        if not names:
            continue
        start = torch.zeros(group.plan.numel, device=device, dtype=group.wide)
        for name in names:
            if holders[name] == comm.rank:
                parameter, span = own(parameters[name]), group.spans[name]
                second = flattened(laid_out(here[name].second, parameter))
                start[span] = second[slice(None) if parts is None else parts.of(name)]
        start = comm.all_reduce(start).mul_(comm.world_size)
        steps = min(found[holders[name]][name] if name in fresh else 1.0 for name in group.spans)
        group.memory.start_(group.state.memory, start, [group.spans[name] for name in names], steps)


def _formed(optimizers: Iterable[Optimizer], names: Mapping[int, str]) -> dict[str, Formed]:
    """Return what optimizers have formed of the parameters with names by id; by name."""
    formed = {}
    for optimizer in map(stepping, optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {}) if id(parameter) in names else {}
                second, steps = state.get("exp_avg_sq"), float(state.get("step", 0))
                if second is None or steps < 1:
                    continue
                second = own(second)
                if second.shape == own(parameter).shape and bool(second.isfinite().all()):
                    corrected = second / (1 - float(group["betas"][1]) ** steps)
                    formed[names[id(parameter)]] = Formed(corrected, steps)
    return formed
