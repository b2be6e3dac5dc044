"""What gradients of single parameters tell before DDP collects them: which were used, and which are sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.engine.network import TorchCollective


class Usage:
    """Which parameters took part in a backward. Needed where a backward may leave some out.

    Args:
        parameters: by name.
        comm: the ranks.
    """

    def __init__(self, parameters: Mapping[str, Parameter], comm: TorchCollective) -> None:
        self.comm = comm.between_hosts()
        """For what hosts know."""
        used = self._used = set[str]()

        def note(name: str, _: Tensor) -> None:  # keeps no more than the set alive
            used.add(name)

        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(note, name))  # type: ignore[no-untyped-call]
            for name, p in parameters.items()
        ]

    def here(self, names: Iterable[str]) -> list[bool]:
        """Whether each of these was used on this rank since the last synchronised backward."""
        return [name in self._used for name in names]

    def anywhere(self, used: list[bool]) -> tuple[list[bool], float]:
        """Whether each was used on any rank, and the bytes that this rank sends to learn it; collective."""
        flags = torch.tensor(used, dtype=torch.uint8, device="cpu")
        return self.comm.all_gather(flags).amax(0).bool().tolist(), (self.comm.world_size - 1) * flags.nbytes

    def end_step(self) -> None:
        """A synchronised backward is over."""
        self._used.clear()

    def close(self) -> None:
        """Stop noting."""
        for hook in self._hooks:
            hook.remove()
        self.comm.close()


class SparseGradients:
    """Refuses sparse gradients, before DDP ends with an error that names no parameter; in the first step only.

    Args:
        parameters: by name.
        failing_together: within which errors are raised.
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
        """Stop looking: what makes sparse gradients does so from the first step on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
