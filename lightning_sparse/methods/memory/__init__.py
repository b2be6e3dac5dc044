"""Error feedback: the parts of gradients that a rank has not sent yet. Only memories write to the residual."""

from lightning_sparse.methods.memory.adam import AdamCorrection
from lightning_sparse.methods.memory.base import MEMORIES, Memory, NoMemory
from lightning_sparse.methods.memory.clip import ClipByNorm
from lightning_sparse.methods.memory.decay import WeightDecay
from lightning_sparse.methods.memory.drift import Drift
from lightning_sparse.methods.memory.low_pass import LowPass
from lightning_sparse.methods.memory.momentum import MomentumCorrection
from lightning_sparse.methods.memory.residual import Residual
from lightning_sparse.methods.memory.residual import as_memory as as_memory  # no public name
from lightning_sparse.methods.memory.second_moment import SecondMoment

__all__ = [
    "MEMORIES",
    "AdamCorrection",
    "ClipByNorm",
    "Drift",
    "LowPass",
    "Memory",
    "MomentumCorrection",
    "NoMemory",
    "Residual",
    "SecondMoment",
    "WeightDecay",
]
