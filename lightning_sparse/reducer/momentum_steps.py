"""Momentum SGD for parameters that are sparsified: what averages have waited for is made up for after each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.momentum import Momentum, Stepped, spend_
from lightning_sparse.reducer.around_steps import AroundSteps
from lightning_sparse.reducer.group import GroupReducer


class MomentumSteps(AroundSteps):
    """Spends momentum of averages that have waited, see :func:`~lightning_sparse.momentum.spend_`.

    torch's own step is taken as ever; what is spent early is moved from the velocities to the parameters behind it.

    Args:
        names: of parameters, by id.
        group_of: the group of a parameter, by name; None where averages are dense.
        handed_out: names of the parameters that got an average since an optimizer that holds them took a step.
        serves: whether this is for an optimizer, which is ``torch.optim.SGD`` then, and none that is around it.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        group_of: Callable[[str], GroupReducer | None],
        handed_out: Callable[[], Set[str]],
        serves: Callable[[Optimizer], bool],
    ) -> None:
        super().__init__(names)
        self._group_of, self._handed_out, self._serves = group_of, handed_out, serves
        self._noted: list[_Noted] = []
        """The step that an optimizer is taking."""

    def before(self, optimizer: Optimizer) -> None:
        """Note with which averages it steps, and by which settings."""
        if not self._serves(optimizer):
            return
        skip, handed_out = getattr(optimizer, "found_inf", None), self._handed_out()
        for settings in optimizer.param_groups:
            by = Momentum.of(settings)
            waited: defaultdict[GroupReducer, list[Parameter]] = defaultdict(list)
            for parameter in settings["params"] if by else ():
                name = self.name(id(parameter))
                if name is None or name not in handed_out or parameter.grad is None:
                    continue
                group = self._group_of(name)
                if group is not None and group.share is not None:
                    waited[group].append(parameter)
            for group, parameters in waited.items():
                assert by is not None and group.share is not None
                self._noted.append(_Noted(optimizer, parameters, by, group.share, skip))

    def after(self) -> None:
        """Spend what is noted."""
        noted, self._noted = self._noted, []
        for optimizer, parameters, by, share, skip in noted:
            stepped = []
            for parameter in parameters:
                velocity = optimizer.state[parameter].get("momentum_buffer")
                if parameter.grad is not None and velocity is not None:
                    stepped.append(Stepped(parameter, parameter.grad, velocity))
            spend_(stepped, by, share, skip)

    def forget(self) -> None:
        """A step that has failed is not made up for."""
        self._noted = []


class _Noted(NamedTuple):
    """Parameters of one group that an optimizer steps."""

    optimizer: Optimizer
    parameters: list[Parameter]
    by: Momentum
    share: float | Tensor
    skip: Tensor | None
