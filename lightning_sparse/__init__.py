"""lightning-sparse: PyTorch Lightning strategies that replace DDP's dense all-reduce by a sparsified exchange."""

from lightning_sparse.density import Constant, DensitySchedule, Warmup
from lightning_sparse.exchanges import Dense, Exchange, GatherPairs, ReduceUnion
from lightning_sparse.memory import Memory, NoMemory, Residual
from lightning_sparse.simulation import StepTrace, simulate
from lightning_sparse.sparsifiers import Everything, ExDyna, HardThreshold, MiCRO, Sparsifier, TopK
