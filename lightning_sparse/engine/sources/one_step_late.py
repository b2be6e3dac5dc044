"""Entrance to a router whose exchanges run beside the next forward and backward: ``delay=1``.

In backward t, the exchange of backward t-1 is joined and settles; optimizers are given its averages, in the places of
the gradients; and the exchange of the new gradients begins, of which this rank hears in backward t+1. Gradients are
copied before, into 4 bytes a parameter: their places belong to DDP from then on. As exchange t-1 has settled before
gradient t is absorbed, residuals, selections and averages are those of the router alone, bit for bit, for the same
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.core.layout import own, shaped, sharded_as
from lightning_sparse.engine.executor import ExchangeStream, held
from lightning_sparse.engine.pipeline import GroupReducer
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.sources.gradient_hooks import on_gradients
from lightning_sparse.engine.state.record import place


class OneStepLate:
    """Takes gradients from a source in front of a router, and gives it averages one step later.

    It has the methods of a router that sources call, see :mod:`lightning_sparse.engine.sources`.

    Args:
        router: of the engine; it exchanges nothing for anybody else.
    """

    direct = False
    """False: nothing goes past the router, which would be in time."""

    def __init__(self, router: Reducer) -> None:
        self._router = router
        self.on_stream = ExchangeStream(torch.device("cpu"))
        """Where averages are in their places: on no stream but the source's own."""
        self.failing_together, self.put_together = router.failing_together, router.put_together
        self.names = router.names
        """Of parameters, by id."""
        self.unused: Set[str] = frozenset()
        """Names of the parameters that no rank used in the latest backward."""
        self._places: dict[str, Tensor] = {}
        """Flat gradients of this backward, where they lie."""
        self._observed = False
        """True while observers look at a step that begins: nothing is in flight then, and nothing has arrived."""
        self._copies: dict[GroupReducer, Tensor] = {}
        """(numel,) of each group, which its exchange works in."""
        self._cleared: set[str] = set()
        """Names of the parameters whose gradients were cleared since averages took their places."""
        self._meets: set[str] = set()
        """Names of the parameters whose new gradient would be added to an average."""
        self._looking = on_gradients(router.parameters, self._refuse)
        for name, p in router.parameters.items():
            self._looking.callback(p.register_hook(partial(self._look, name)).remove)  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Do nothing: a step begins when the one before has settled, in :meth:`finish`."""

    @property
    def busy(self) -> bool:
        """True within a backward."""
        return bool(self._places) and not self._observed

    def arrive(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Note gradients; they stay where they are until :meth:`finish`."""
        self._places.update(gradients)

    def finish(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take the last gradients of a backward; averages of the one before are in their places when this returns.

        Args:
            gradients: (numel,) by name of the parameter.
        """
        self.arrive(gradients)
        router = self._router
        router.join()
        places = self._places
        try:
            router.on_stream.join()
            self.unused = router.learn_unused(places)
            taking_part = places.keys() - self.unused
            router.take_back(taking_part)
            self._observed = True
            try:
                router.begin_step()
            finally:
                self._observed = False
            with held():
                copies = self._copied(places)
                for name in taking_part:
                    places[name].zero_()
                given = router.hand_over(taking_part)
                for kept in given:
                    place(kept, places, router.loss_scale())
                router.without_average += not given
                self._cleared.clear()
                router.start(copies.items())
        finally:
            self._places = {}

    def take(self) -> dict[str, Tensor]:
        """Hand over all that is left, between two steps: averages by name of the parameter, in its shape."""
        router = self._router
        router.join()
        router.on_stream.join()
        left = router.record.left().keys()
        router.take_back(router.parameters.keys())
        parts = {name: own(p) for name, p in router.parameters.items()}
        places = {name: torch.zeros(p.numel(), dtype=p.dtype, device=p.device) for name, p in parts.items()}
        for kept in router.hand_over(router.record.kept_names):
            place(kept, places, None)
        return {name: sharded_as(shaped(places[name], parts[name]), router.parameters[name]) for name in left}

    def close(self) -> None:
        """Stop looking at gradients."""
        self._looking.close()

    def _copied(self, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy gradients to where their groups will work on them."""
        router = self._router
        before, self._copies = self._copies, {}
        copies: dict[str, Tensor] = {}
        for group in dict.fromkeys(router.group_of[name] for name in places):
            room = before.get(group)
            if room is None:
                room = torch.empty(group.plan.numel, dtype=group.dtype, device=router.device)
            self._copies[group] = room
            copies |= {name: room[span] for name, span in group.spans.items()}
        with torch.no_grad():
            torch._foreach_copy_([copies[name] for name in places], list(places.values()))
        return copies

    def _look(self, name: str, _: Tensor) -> None:
        """Look at what a gradient would be added to; ``torch.autograd.grad`` adds it to nothing."""
        grad = self._router.parameters[name].grad
        self._meets.discard(name)
        if grad is None:
            self._cleared.add(name)
        elif name not in self._cleared and self._router.record.is_left(name):
            (self._meets if bool(grad.any()) else self._cleared).add(name)

    def _refuse(self, name: str, _: Tensor) -> None:
        if name in self._meets:
            self.refuse_sum(name)

    def refuse_sum(self, name: str) -> None:
        """Refuse a gradient that is added to an average of the backward before, unless somebody has applied that."""
        if not self._router.record.is_left(name):
            return
        with self.failing_together("in backward"):
            raise RuntimeError(
                f"The parameter {name} gets a new gradient on top of an average, as no optimizer has stepped since the "
                "backward before. With delay=1, gradients of several backwards are added up within no_sync(), which "
                "all but the last one need, and a step that is left out needs zero_grad() all the same."
            )
