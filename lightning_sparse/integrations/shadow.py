"""Shadow sparsifiers: they run on copies of the gradients of a training that does not use them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.core.messages import ring_all_reduce_bytes
from lightning_sparse.core.step import Agreement, Context
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.drivers import drive_together
from lightning_sparse.engine.group import GroupReducer, any_set, hear
from lightning_sparse.engine.metrics import MB, Step, norm_of
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.integrations.callback import LocalGradients
from lightning_sparse.methods.grouping import DDP_BUCKET_MB, ParameterSize, make_plan
from lightning_sparse.methods.grouping.groupings import MIB
from lightning_sparse.methods.sparsifiers import SPARSIFIERS, Sparsifier

DENSE = "dense"
"""Name beside those of the sparsifiers, for DDP's traffic."""


class Shadow:
    """Runs sparsifiers on copies of a training's gradients, without any effect on the training.

    Each has its own error feedback (8 bytes for each float32 coordinate and sparsifier), and sends its messages
    between the real ranks. Residuals contain the gradients of the shadow's steps only.

    Args:
        parameters: by name.
        sparsifiers: instances or names.
        settings: density, grouping and rules; other settings are those of each sparsifier.
        comm: the ranks.
        frozen: names of the other parameters, which rules may name.

    Raises:
        ValueError: for an unknown name, or a sparsifier that is named twice.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        sparsifiers: Sequence[Sparsifier | str],
        settings: SparsificationConfig,
        comm: TorchCollective,
        frozen: Iterable[str] = (),
    ) -> None:
        self._comm, self._parameters = comm, dict(parameters)
        self._device = next(iter(self._parameters.values())).device
        sizes = [ParameterSize.of(name, p) for name, p in self._parameters.items()]
        cap = settings.bucket_cap_mb or DDP_BUCKET_MB
        plan = make_plan(sizes, settings.grouping, settings.rules, cap, frozen=frozen)
        self._methods: dict[str, tuple[SparsificationConfig, list[GroupReducer]]] = {}
        for given in sparsifiers:
            one = SPARSIFIERS.resolve(given)
            name = SPARSIFIERS.name_of(one)
            if name in self._methods:
                raise ValueError(f"Expected sparsifiers with different names, but got {name!r} twice.")
            config = replace(settings, sparsifier=one, exchange=None, memory="residual")
            first = Context(0, config.density(0), comm.rank, comm.world_size)
            groups = [GroupReducer(group, self._parameters, config, first, flush=False) for group in plan]
            self._methods[name] = config, groups
        self.gradients = LocalGradients(parameters)
        """Copies for :meth:`step`."""
        self._steps = 0
        self.quantities: dict[str, float] = {}
        """Quantities of the latest step, by ``<name>/<quantity>``; equal on all ranks."""

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Run all sparsifiers on a step's gradients; collective.

        Args:
            gradients: of this rank, flat, by name; a parameter without one counts as zeros. Not modified.
        """
        rows = {name: self._run(*method, gradients) for name, method in self._methods.items()}
        if None in rows.values():  # not finite: skipped for all of them, on all ranks
            return
        self._steps += 1
        found = {name: row for name, row in rows.items() if row is not None}
        own = torch.tensor([row.of_this_rank for row in found.values()], dtype=torch.float64, device="cpu")
        ranks = self._comm.all_gather(own.to(self._device)).cpu()
        self.quantities = {}
        for (name, row), of_ranks in zip(found.items(), ranks.unbind(1), strict=True):
            before, after, sent = of_ranks.mean(0).tolist()
            numbers = {
                **row.of_all_ranks,
                "energy": 1 - after / before if before else 1.0,
                "sent_mb": sent / MB,
            }
            self.quantities |= {f"{name}/{quantity}": number for quantity, number in numbers.items()}
        most, whole = int(DDP_BUCKET_MB * MIB), sum(p.nbytes for p in self._parameters.values())
        sizes = [min(most, whole - begin) for begin in range(0, whole, most)]  # of DDP's buckets, as if all were full
        dense = sum(ring_all_reduce_bytes(b, self._comm.world_size) for b in sizes)
        self.quantities[f"{DENSE}/sent_mb"] = dense / MB

    def _run(
        self, config: SparsificationConfig, groups: list[GroupReducer], gradients: Mapping[str, Tensor]
    ) -> _Row | None:
        """Run a method on a step's gradients and return its numbers; None if the step is skipped."""
        comm, sparse = self._comm, [group for group in groups if not group.plan.dense]
        pieces: dict[str, Tensor] = {}
        for name in (name for group in groups for name in group.spans):
            parameter, gradient = self._parameters[name], gradients.get(name)
            flat = parameter.new_zeros(parameter.numel()) if gradient is None else gradient.clone()
            pieces[name] = flat.detach()
        before = sum(_acc_square(group, pieces) for group in sparse)
        ranks, numel = (comm.rank, comm.world_size), sum(group.plan.numel for group in sparse) or None
        contexts = [Context(self._steps, group.density(self._steps), *ranks, model_numel=numel) for group in groups]
        steps = [group.exchange_steps(ctx, pieces) for group, ctx in zip(groups, contexts, strict=True)]
        made = drive_together(steps, comm)
        flag = any_set([one.proposed.skipped for one in made], self._device, self._device.type == "cpu")
        named, [skipped] = hear(made, flag.double().view(1), lambda facts: facts)
        for number, (group, one) in enumerate(zip(groups, made, strict=True)):
            group.settle(one, bool(skipped), named.get(number))
        if skipped:
            return None
        step = Step([group.statistics for group in groups if group.statistics is not None], [])
        selected = float(step.union)
        if config.sparsifier.agreement is Agreement.INDEPENDENT:  # each rank selects k
            selected = sum(float(one.counts.double().mean()) for one in step.sparse)
        left, sent = sum(group.residual_norm() ** 2 for group in sparse), sum(one.bytes_sent for one in step.groups)
        return _Row(
            {"density": step.union / step.numel, "threshold_error": abs(selected / step.k - 1)},
            (before, left, sent),
        )


class _Row(NamedTuple):
    of_all_ranks: dict[str, float]
    of_this_rank: tuple[float, float, float]
    """Squared norm of residual and gradient before and after, bytes sent."""


def _acc_square(group: GroupReducer, pieces: Mapping[str, Tensor]) -> float:
    """Return the squared norm of residual plus gradient, the input of a sparsifier."""
    residual = group.memory.residual(group.state.memory)
    gradient = torch.cat([pieces[name] for name in group.spans]).to(group.wide)
    return norm_of(gradient if residual is None else gradient.add_(residual)) ** 2
