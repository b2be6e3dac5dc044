"""Measurements of a training with its ranks: backward, network, and every method."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_sparse import Engine
from lightning_sparse.core.step import Agreement
from lightning_sparse.density import check_density
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.grouping import ParameterSize
from lightning_sparse.memories import Residual
from lightning_sparse.sparsifiers import SPARSIFIERS
from lightning_sparse.tools.advisor.prediction import Measured, Method
from lightning_sparse.tuning.measuring.profiler import Profiler
from lightning_sparse.tuning.measuring.rank_sync import measure
from lightning_sparse.tuning.performance.cost import NOTHING, Line
from lightning_sparse.tuning.performance.profile import GroupCost, Traffic
from lightning_sparse.tuning.unsuited import unsuited

POWER_SGD_RANK = 4
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Survey:
    """Observer that times some steps of a training, then measures; see :attr:`result`.

    Args:
        strategy: its ``model`` is the wrapped module during training.
        methods: names of sparsifiers.
        densities: to try with each of them, in (0, 1].
        warmup: steps that are not timed.
        steps: steps that are timed.
        path: rank 0 also writes the result there, for launchers that end the training's process.
        progress: called on rank 0 with the next part and the share that is done.

    Raises:
        ValueError: for unknown sparsifiers or densities outside (0, 1].
    """

    def __init__(
        self,
        strategy: Any,
        methods: Sequence[str],
        densities: Sequence[float],
        warmup: int,
        steps: int,
        path: Path,
        progress: Callable[[str, float], None],
    ) -> None:
        self.result: Measured | None = None
        self._strategy = strategy
        self._sparsifiers = {name: SPARSIFIERS.resolve(name) for name in methods}
        self._densities = [check_density(density, "densities") for density in densities]
        self._warmup, self._steps, self._path, self._progress = warmup, steps, path, progress
        self._profiler: Profiler | None = None

    def before_step(self, engine: Engine) -> None:
        """Count steps, then measure everything within one step."""
        if self.result is not None:
            return
        if self._profiler is None:
            self._profiler = Profiler(self._strategy.model, engine, self._warmup, self._steps)
            self._tell(engine, "timing backward", 0.0)
        if self._profiler.before_step():
            own = self._measure(self._profiler, engine)
            self.result = engine.comm.all_gather_object(own, engine.device)[0]
            if engine.comm.rank == 0:
                self._path.write_text(json.dumps(own.as_dict()))

    def close(self) -> None:
        """Stop timing backward."""
        if self._profiler is not None:
            self._profiler.close()

    def _measure(self, profiler: Profiler, engine: Engine) -> Measured:
        sizes = [ParameterSize.of(name, p) for name, p in engine.stepper.parameters.items()]
        numel = sum(size.numel for size in sizes)
        dtype = next(iter(engine.stepper.parameters.values())).dtype
        self._tell(engine, "timing the network", 0.1)
        profiler.measure_step()
        all_reduce = profiler.network.all_reduce
        dense = GroupCost(1.0, NOTHING, NOTHING, all_reduce.per(dtype.itemsize), (_reduce(1, dtype.itemsize),))
        methods = [Method("dense", 1.0, dense, builtin=True)]
        if dtype.itemsize > 2:
            methods += [_halved(name, half, dtype, engine) for name, half in HALVES.items()]
        methods.append(_power_sgd(engine, all_reduce))
        jobs = [
            (name, sparsifier, density)
            for name, sparsifier in self._sparsifiers.items()
            for density in ([1.0] if sparsifier.agreement is Agreement.EVERYTHING else self._densities)
        ]
        own = {id(parameter) for parameter in engine.stepper.parameters.values()}
        suited = engine.settings.memory_in_use
        refused = sorted({name for name, one, _ in jobs if suited.needs_second and one.is_its_exchange})
        jobs = [job for job in jobs if job[0] not in refused]
        for done, (name, sparsifier, density) in enumerate(jobs):
            memory = suited if density < 1 else Residual()
            exchange = SparsificationConfig(sparsifier=sparsifier, memory=memory).exchange_in_use
            self._tell(engine, f"timing {name} at {density:g}", 0.2 + 0.8 * done / len(jobs))
            cost = profiler.group_cost(
                numel,
                sparsifier=sparsifier,
                exchange=exchange,
                memory=memory,
                density=density,
                repeats=3,
                seconds=0.3,
            )
            methods.append(Method(name, density, cost, second_moments=memory.needs_second))
        unfit = [found for one in engine._binding.optimizers if (found := unsuited(one, own)) is not None]
        return Measured(sizes, profiler.profile([dense]), methods, unfit[0] if unfit else None, refused)

    def _tell(self, engine: Engine, what: str, done: float) -> None:
        if engine.comm.rank == 0:
            self._progress(what, done)


def _reduce(calls: float, bytes_each: float) -> Traffic:
    return Traffic("library_all_reduce", calls, Line(0.0, bytes_each))


def _line(job: Callable[[Tensor], Any], dtype: torch.dtype, engine: Engine) -> Line:
    """Measure the seconds of a job, by coordinates of its vector."""
    numels, seconds = [], []
    for numel in (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22):
        x = torch.zeros(numel, dtype=dtype, device=engine.device)
        taken = measure(lambda x=x: job(x), engine.comm, engine.device, repeats=5, seconds=0.3)  # type: ignore[misc]
        numels += [float(numel)] * len(taken)
        seconds += taken
    return Line.fit(numels, seconds)


def _halved(name: str, half: torch.dtype, dtype: torch.dtype, engine: Engine) -> Method:
    """Measure one of DDP's compression hooks: cast, all-reduce, cast back."""
    process = _line(lambda x: x.to(half).to(x.dtype), dtype, engine)
    transfer = (
        _line(partial(engine.comm.start_average, wait=True), half, engine) if engine.comm.world_size > 1 else NOTHING
    )
    cost = GroupCost(1.0, NOTHING, process, transfer, (_reduce(1, half.itemsize),))
    return Method(name, 1.0, cost, builtin=True)


def _power_sgd(engine: Engine, all_reduce: Line) -> Method:
    """Measure PowerSGD of rank 4: matrices as two factors, all other parameters in full.

    For an m x n matrix M: P = M Q, averaged and orthogonalised; Q = M^T P, averaged; P Q^T is the update. A matrix is
    compressed if its factors have at most half of its coordinates. Three all-reduces a bucket: the rest, P, Q.

    References:
        Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, NeurIPS 2019.
    """
    parameters, device = engine.stepper.parameters, engine.device
    numel = sum(p.numel() for p in parameters.values())
    matrices = [(p.shape[0], p.numel() // p.shape[0]) for p in parameters.values() if p.dim() > 1]
    factored = [(m, n) for m, n in matrices if 2 * POWER_SGD_RANK * (m + n) < m * n]
    sent = numel - sum(m * n for m, n in factored) + sum(POWER_SGD_RANK * (m + n) for m, n in factored)
    gradients = [(torch.randn(m, n, device=device), torch.randn(n, POWER_SGD_RANK, device=device)) for m, n in factored]

    def compress() -> None:
        for matrix, right in gradients:
            left = torch.linalg.qr(matrix @ right).Q
            right = matrix.T @ left
            matrix - left @ right.T  # the residual

    seconds = min(measure(compress, engine.comm, device, repeats=3)) if gradients else 0.0
    traffic = _reduce(3, 4 * sent / numel)
    transfer = Line(3 * all_reduce.alpha, all_reduce.beta * 4 * sent / numel)
    cost = GroupCost(1.0, NOTHING, Line(0.0, seconds / numel), transfer, (traffic,))
    return Method("powersgd", 1.0, cost, builtin=True)
