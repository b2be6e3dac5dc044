"""Entrance to a router that exchanges parts of gradients: ``node_size``.

Ranks of a node average their gradients first, each its own part of every parameter, as the last of them have come. The
router exchanges these parts with the ranks of other nodes that have the same ones, and knows nothing of the rest. When
the exchange has settled, the averages of all parts are put together within the node, in the places of the gradients,
with the facts that step rules of optimizers need. A state has the averages of a rank's parts, as residuals.

All that is sent within the node is sent by the router's executor, between its own jobs: in one order on all ranks, and
so that a signal handler can run on the thread that trains, which may need other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.core.messages import Message, Steps
from lightning_sparse.engine.network import TorchCollective, drive, drive_together, send
from lightning_sparse.engine.parts import Parts
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.skip import digest_of
from lightning_sparse.engine.state.record import Averages, place

HOST = torch.device("cpu")


class WithinANode:
    """Takes gradients from a source, passes their parts on to a router, and puts averages together.

    It has the methods of a router that sources call, see :mod:`lightning_sparse.engine.sources`.

    Args:
        router: of the engine, which exchanges the parts.
        parts: its.
    """

    direct = False
    """False: parts are exchanged, also where all is dense."""

    def __init__(self, router: Reducer, parts: Parts) -> None:
        self._router, self._parts, self._within = router, parts, router.within
        self._hosts = router.within.between_hosts()
        self._digest = -1, -1, 0
        """Of settings and groups, and of which ones it is."""
        self.names = router.names
        """Of parameters, by id."""
        self.on_stream = router.on_stream
        """Where averages are in their places."""
        self.begin_step, self.failing_together = router.begin_step, router.failing_together
        self._places: dict[str, Tensor] = {}
        """Flat gradients of this backward, where they lie."""
        self._own: dict[tuple[str, ...], dict[str, Tensor]] = {}
        """Room for this rank's parts of gradients that come together."""

    @property
    def unused(self) -> set[str]:
        """Names of the parameters that no rank used in the latest backward."""
        return set(self._router.unused)

    def arrive(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Average gradients within the node, and pass this rank's parts of them on."""
        self.begin_step()
        self._router.arrive(self._parts_of(dict(gradients)))

    def finish(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Take the last gradients of a backward; averages are in their places when this returns.

        Args:
            gradients: (numel,) by name of the parameter.
        """
        self.begin_step()
        try:
            self._router.finish(self._parts_of(dict(gradients)), self._deliver)
        finally:
            self._places = {}

    def _parts_of(self, gradients: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Return this rank's parts of gradients, which are there when jobs run that are submitted from now on."""
        names = tuple(gradients)
        if names not in self._own:  # gradients come together in other ways after DDP's first step
            self._own = {other: parts for other, parts in self._own.items() if gradients.keys().isdisjoint(other)}
            self._own[names] = self._parts.empty(gradients)
        own = self._own[names]
        self._places.update(gradients)
        self._router.submit(partial(self._average, gradients, own), "in averaging gradients within the node")
        return own.items()

    def _average(self, gradients: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        drive(self._parts.mean(gradients, own), self._within)

    def _deliver(self, averages: Mapping[str, Averages], skipped: Tensor) -> None:
        """Put the averages that the exchange has made of this node's parts together, in the places of gradients."""
        router, places, scale = self._router, self._places, self._router.loss_scale()
        own = list({id(one): one for one in averages.values()}.values())
        whole = self.put_together(own)
        made = {id(mine): one for mine, one in zip(own, whole, strict=True)}
        given = {name: made[id(one)] for name, one in averages.items()}
        with router.record.changing():
            router.record.deliver({name: one.delivery for name, one in given.items()})
        place(given, places, scale, skipped)
        for one in whole:
            if one.delivery is not None:
                one.delivery.sample([places[name] for name in one.spans], scale)

    def put_together(self, own: Sequence[Averages]) -> list[Averages]:
        """Return averages of whole parameters, given those of this rank's parts; ranks of the node call this together.

        Raises:
            RuntimeError: on all of them, if they have drifted apart.
        """
        if not own:
            return []
        router = self._router
        if self._digest[:2] != (router.adoptions, id(router.settings)):
            named = [(group.plan.name, list(group.spans)) for group in router.groups]
            self._digest = router.adoptions, id(router.settings), digest_of(router.settings, named)
        header = router.header._replace(digest=self._digest[2])  # sizes of parts differ within a node
        compared: Steps[Any] = header.compare(HOST)
        _, whole = drive_together([compared, self._parts.together(own)], self._within, self._send)
        return whole

    def _send(self, message: Message, within: TorchCollective) -> Tensor:
        """Send what only hosts know between them, which waits for no device."""
        return send(message, self._hosts if message.x.device == HOST else within)

    def close(self) -> None:
        """Give the hosts' process group back."""
        self._hosts.close()
