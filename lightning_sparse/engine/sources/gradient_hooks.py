"""Hooks on gradients of single parameters: all that look at them begin here; which were used, and sparse tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_sparse.core.layout import own
from lightning_sparse.engine.network import TorchCollective


def on_gradients(parameters: Mapping[str, Parameter], act: Callable[[str, Tensor], None]) -> ExitStack:
    """Call a function whenever a backward has finished the gradient of a parameter, before DDP sees it.

    Args:
        parameters: by name.
        act: is given a name, and the parameter.

    Returns:
        Removes the hooks when it is closed.
    """
    hooks = ExitStack()
    for name, p in parameters.items():
        hook = p.register_post_accumulate_grad_hook(partial(act, name))  # type: ignore[no-untyped-call]
        hooks.callback(hook.remove)
    return hooks


class Usage:
    """Notes which parameters took part in a backward. Needed where a backward may leave some out.

    Args:
        parameters: parameters by name.
        comm: the ranks.
        within: ranks near this one, where the mean of their gradients is exchanged; None: each rank's own are.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], comm: TorchCollective, within: TorchCollective | None = None
    ) -> None:
        self.comm = comm.between_hosts()
        """Collective for facts of the hosts, without a device."""
        self.within = None if within is None else within.between_hosts()
        """Ranks near this one, likewise."""
        used = self._used = set[str]()

        def note(name: str, _: Tensor) -> None:  # keeps no more than the set alive
            used.add(name)

        self._hooks = on_gradients(parameters, note)

    def here(self, names: Iterable[str]) -> list[bool]:
        """Return for each of these if it was used on this rank since the last synchronised backward."""
        return [name in self._used for name in names]

    def nowhere(self, names: Sequence[str], used: Sequence[bool]) -> tuple[set[str], float]:
        """Return the names of those that no rank used, and the bytes that this rank sends to learn it; collective.

        Args:
            names: of parameters, equal on all ranks.
            used: whether this rank used them, see :meth:`here`.
        """
        flags = torch.tensor(list(used), dtype=torch.uint8, device="cpu")
        anywhere = self.comm.all_gather(flags).amax(0)
        if self.within is not None:
            anywhere = self.within.all_gather(anywhere).amax(0)
        sent = float((self.comm.world_size - 1) * flags.nbytes)
        return {name for name, one in zip(names, anywhere.tolist(), strict=True) if not one}, sent

    def end_step(self) -> None:
        """Begin anew: a synchronised backward is over."""
        self._used.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self.comm.close()
        if self.within is not None:
            self.within.close()


def refuse_sparse_gradients(
    parameters: Mapping[str, Parameter], failing_together: Callable[[str], AbstractContextManager[None]]
) -> list[RemovableHandle]:
    """Look at the first gradient of each parameter, before DDP ends with an error that names none for a sparse one.

    Args:
        parameters: by name.
        failing_together: within which errors are raised, given a place for a note.

    Returns:
        The hooks, to be removed when the engine ends.
    """
    handles: dict[str, RemovableHandle] = {}

    def look(name: str, parameter: Tensor) -> None:
        handles[name].remove()  # what makes sparse gradients does so from the first step on
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            with failing_together("in backward"):
                raise RuntimeError(
                    f"The gradient of {name!r} is a sparse tensor, as torch.nn.functional.embedding makes it with "
                    "sparse=True, which cannot be looked at as a flat vector. Set sparse=False: what is sent is "
                    "sparsified anyway."
                )

    for name, p in parameters.items():
        if own(p) is p:  # gradients of parts are dense
            handles[name] = p.register_post_accumulate_grad_hook(partial(look, name))  # type: ignore[no-untyped-call]
    return list(handles.values())
