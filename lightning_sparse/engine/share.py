"""What a rank exchanges of each gradient: all that it has, unless other ranks near it exchange the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.futures import Future

from lightning_sparse.core.messages import Steps
from lightning_sparse.engine.average import Average
from lightning_sparse.engine.network import TorchCollective


class Place(NamedTuple):
    """Which coordinates of a parameter a rank exchanges."""

    start: int
    length: int
    numel: int
    """Coordinates of the whole parameter."""

    @classmethod
    def whole(cls, numel: int) -> Place:
        """Return all of a parameter."""
        return cls(0, numel, numel)


class Share:
    """All that this rank has of each gradient.

    Args:
        within: ranks that have the rest of each parameter; they take and skip the same steps, and a norm is that of all
            parts. None: this rank has whole parameters. Closed with this.
        places: of the parameters of which this rank exchanges a part, by name. All ranks that it exchanges with have
            the same part.
    """

    cuts = False
    """True if a rank has whole gradients and exchanges a part of each."""

    def __init__(self, within: TorchCollective | None = None, places: Mapping[str, Place] | None = None) -> None:
        self.places = dict(places or {})
        self.within = within or TorchCollective.of_one()
        self.hosts = self.within.between_hosts()
        """The same ranks, for small messages of CPU tensors."""

    def part(self, name: str, flat: Tensor) -> Tensor:
        """Return a view of what this rank exchanges, given all that it has of a parameter, in one dimension."""
        return flat

    def average(self, buffer: Tensor) -> Future[Tensor] | None:
        """Begin to average flat gradients over ranks near this one, in place, within backward; None: there are none."""
        return None

    def whole(self, averages: Sequence[Average]) -> Steps[Sequence[Average]]:
        """Return averages of all that this rank has, given those of its parts; messages are between ranks near it."""
        yield from ()
        return averages

    def close(self) -> None:
        """Give the process groups back."""
        self.hosts.close()
        self.within.close()
