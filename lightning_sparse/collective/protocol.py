"""The network as one rank sees it: five operations on equal shapes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """n ranks that call the same operations in the same order with equal shapes.

    What an operation gives to several ranks is equal on all of them, bit for bit.
    """

    @property
    def rank(self) -> int:
        """This rank, in 0 .. n - 1."""

    @property
    def world_size(self) -> int:
        """Number of ranks n."""

    def all_gather(self, x: Tensor) -> Tensor:
        """``(*shape)`` of each rank to ``(n, *shape)`` on all."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks. May use x for the result: do not read x afterwards."""

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """What rank ``src`` gave, on all ranks. May use x for the result."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """``(n, *shape)``: row j of rank i becomes row i of rank j."""

    def send_recv(self, x: Tensor, to: int | None, source: int | None) -> Tensor | None:
        """Give x to rank ``to`` and take what rank ``source`` gives to this one, both other ranks or None.

        All ranks call it, also those that neither give nor take. Who gives and who takes must fit together.

        Returns:
            What ``source`` gave, of x's shape and dtype; None without a source.
        """
