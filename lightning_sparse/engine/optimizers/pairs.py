"""Memories and optimizers that do not go together: what one forms, the other must not form again."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_sparse.methods.memory import Memory

ADAPTING = {"betas", "rho", "alpha", "etas", "lr_decay", "beta2_decay", "history_size"}
"""Settings of torch's optimizers other than SGD, each of which has one of these."""


def adapts(optimizer: Optimizer) -> bool:
    """Return True if an optimizer divides gradients by a size of its own, as all of torch's do but SGD."""
    return any(ADAPTING & group.keys() for group in optimizer.param_groups)


def check_pair(memory: Memory, optimizer: Optimizer) -> None:
    """Look at an optimizer that will be given the averages of a memory; warn where the two may not go together.

    Raises:
        ValueError: if they do not.
    """
    name = type(optimizer).__name__
    if memory.decays and any(group.get("weight_decay", 0) for group in optimizer.param_groups):
        rank_zero_warn(
            f"WeightDecay adds the decay to the gradients, and {name} would apply its own on top of it. Set its "
            "weight_decay to 0, or use the memory without WeightDecay."
        )
    if memory.averages == "gradients":
        return
    has_momentum = any(group.get("momentum", 0) or group.get("betas", (0,))[0] for group in optimizer.param_groups)
    if memory.averages == "velocities" and has_momentum:
        rank_zero_warn(
            f"MomentumCorrection sends velocities, and {name} would apply momentum to them a second time. Use "
            "torch.optim.SGD with momentum=0, or memory=Residual()."
        )
    if memory.averages == "directions" and (adapts(optimizer) or has_momentum):
        raise ValueError(
            "AdamCorrection sends Adam's directions, and the optimizer must only apply them, but got "
            f"{name}{'' if adapts(optimizer) else ' with momentum'}. Set torch.optim.SGD(lr=<the lr you would give "
            "AdamW>, momentum=0, weight_decay=<AdamW's>)."
        )
