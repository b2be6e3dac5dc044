"""Gradients that were each rank's own when their engine was closed: no optimizer steps with them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.engine.gradient_hooks import on_gradients
from lightning_sparse.engine.optimizers.hooks import ask_before_steps, in_life

CLOSED = (
    "The engine was closed between a backward and this step of {}, so that gradients, such as that of {}, are each "
    "rank's own, and ranks would drift apart. Close an engine when optimizers have stepped, or clear the gradients."
)

MARK = "_of_a_closed_engine"
"""Attribute of such gradients. A weak reference would not let a module's ``to`` replace them."""


class LeftOver:
    """Refuses steps with gradients that a closed engine has not exchanged.

    Ranks do not average them together when they close: one that does so alone, in an exception, would wait for others
    that never come. A later backward adds to what is there, and its sum is averaged, or left alone, by whoever that
    backward belongs to; a later engine also exchanges what it finds of a parameter that its backwards leave out. Hooks
    on the parameters keep this.

    Args:
        parameters: with such gradients, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._left = {id(p): name for name, p in parameters.items() if p.grad is not None}
        for p in parameters.values():
            if p.grad is not None:
                setattr(p.grad, MARK, True)
        self._hooks = on_gradients(parameters, self._arrived)
        ask_before_steps(self)

    def _arrived(self, _: str, parameter: Tensor) -> None:
        self._left.pop(id(parameter), None)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse a step with gradients that are still what they were.

        Raises:
            RuntimeError: on each rank that takes it.
        """
        if not self._left:
            self._hooks.close()  # not in one of them: they may be iterated over
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            name = self._left.get(id(p))
            if name is None or p.grad is None or not hasattr(p.grad, MARK) or not p.grad.any():
                continue
            if not any(one.exchanges(p) for one in in_life()):
                raise RuntimeError(CLOSED.format(type(optimizer).__name__, name))
            del self._left[id(p)]
