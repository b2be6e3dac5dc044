"""What residuals are worth when the learning rate has changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.optim import Optimizer

from lightning_sparse.memory.adam import ADAPTING


class LearningRates:
    """Follows the learning rate of every parameter.

    A residual e that was accumulated at a rate ``lr_old`` stands for a step of ``lr_old e``. At ``lr_new`` it has to be
    ``e lr_old / lr_new`` to stand for the same. A rate of 0 says nothing about steps: residuals wait as they are for
    the next rate above it.

    Args:
        names: of parameters, by id.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._optimizers: list[Optimizer] = []
        self.latest: dict[str, float] = {}
        """Latest rate above 0, by parameter."""

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Read rates from these from now on.

        Raises:
            ValueError: for an optimizer that does not multiply gradients by its rate alone, such as Adam.
        """
        chosen = list(optimizers)
        for optimizer in chosen:
            if any(ADAPTING & group.keys() for group in optimizer.param_groups):
                raise ValueError(
                    f"lr_aware=True needs steps of lr * gradient, as torch.optim.SGD takes them, but got "
                    f"{type(optimizer).__name__}, which divides gradients by a size of its own: there is no factor "
                    "that would keep the residual's share of a step. Leave lr_aware=False."
                )
        self._optimizers = chosen

    @property
    def known(self) -> bool:
        """Whether there is an optimizer to follow."""
        return bool(self._optimizers)

    def factors(self) -> dict[str, float]:
        """``lr_old / lr_new`` of the parameters whose rate has changed since the last call."""
        factors = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if not (rate := float(group["lr"])) > 0:
                    continue
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is None:
                        continue
                    before = self.latest.get(name, rate)
                    if before != rate:
                        factors[name] = before / rate
                    self.latest[name] = rate
        return factors
