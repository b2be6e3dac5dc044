"""Hooks on the gradients of single parameters: detection of unused parameters and of sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.engine.network import TorchCollective


class Usage:
    """Records the parameters that take part in a backward, for trainings in which a backward may omit some.

    Args:
        parameters: parameters by name.
        comm: the ranks.
    """

    def __init__(self, parameters: Mapping[str, Parameter], comm: TorchCollective) -> None:
        self.comm = comm.between_hosts()
        """Collective for facts of the hosts, without a device."""
        used = self._used = set[str]()

        def note(name: str, _: Tensor) -> None:  # keeps no more than the set alive
            used.add(name)

        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]

    def here(self, names: Iterable[str]) -> list[bool]:
        """Return for each parameter True if this rank has used it since the last synchronised backward."""
        return [name in self._used for name in names]

    def anywhere(self, used: list[bool]) -> tuple[list[bool], float]:
        """Return for each parameter True if any rank has used it, and the bytes that this rank sends; collective."""
        flags = torch.tensor(used, dtype=torch.uint8, device="cpu")
        return self.comm.all_gather(flags).amax(0).bool().tolist(), (self.comm.world_size - 1) * flags.nbytes

    def end_step(self) -> None:
        """Forget the uses of a synchronised backward that has ended."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.comm.close()


class SparseGradients:
    """Refuses sparse gradients with an error that names the parameter, unlike DDP's; in the first step only.

    Args:
        parameters: parameters by name.
        failing_together: context for raising errors.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], failing_together: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._failing_together = failing_together
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._refuse, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]

    def _refuse(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            with self._failing_together():
                raise RuntimeError(
                    f"The gradient of {name!r} is a sparse tensor, as torch.nn.functional.embedding makes it with "
                    "sparse=True, which cannot be looked at as a flat vector. Set sparse=False: what is sent is "
                    "sparsified anyway."
                )

    def close(self) -> None:
        """Remove the hooks: a layer with sparse gradients produces them from the first step on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
