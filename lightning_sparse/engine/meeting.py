"""Ranks meet: before they do something together, each says what it is about to do, and looks at what others say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

from lightning_sparse.engine.calls import Call, Met, bits_of, compare, digest_of
from lightning_sparse.engine.regrouping import Groups


class Meeting:
    """Sends words of this rank with the first message of each call, see :mod:`lightning_sparse.engine.calls`.

    Where ranks near each other share what is exchanged, these meet first, and then those that exchange the same.

    Args:
        groups: of the engine.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.hosts = groups.comm.between_hosts()
        """The ranks that exchange the same, for words of the hosts."""
        self.backwards = self.steps = 0
        """Synchronised backwards, and steps of optimizers that hold parameters of the engine."""
        self.bytes = 0.0
        """Sent for no single group since the latest step."""
        within, ranks = groups.within, range(groups.comm.world_size)
        self._alike = [number * within.world_size + within.rank for number in ranks]
        """Numbers among all of the ranks that exchange the same."""

    def meet(
        self,
        kind: int,
        names: Collection[str],
        finite: bool,
        used: Sequence[bool] = (),
        sums: Sequence[float] = (),
        changed: bool = False,
    ) -> Met:
        """Return what ranks say that do the same; collective.

        Raises:
            RuntimeError: on all ranks, if they are about to do different things.
        """
        found: list[Met] = []
        self.announce(kind, names, finite, used, found.append, sums=sums, changed=changed)
        self.hosts.hear()
        return found[0]

    def announce(
        self,
        kind: int,
        names: Collection[str],
        finite: bool,
        used: Sequence[bool],
        look: Callable[[Met], None],
        rates: Mapping[str, float] | None = None,
        sums: Sequence[float] = (),
        changed: bool = False,
        density: object = None,
    ) -> None:
        """Begin a call that all ranks take part in; what they say is looked at before a later message is waited for."""
        groups, flags = self._groups, used or [False] * len(self._groups.parameters)
        call = self.call(kind, names, rates, density)
        if groups.within.world_size > 1:  # first those near this one
            near: list[Met] = []
            self._announce_near(call, finite, flags, near.append)
            groups.share.hosts.hear()
            finite, flags = near[0].finite, near[0].used[: len(groups.parameters)]
        words = call.words(finite, flags, sums, changed)
        self.bytes += words.nbytes * (groups.comm.world_size - 1)
        self.hosts.announce(words, lambda rows: look(compare(rows, self._alike)))

    def begin(self, kind: int) -> None:
        """Begin a call of the ranks near this one, who say nothing but what they do."""
        self._announce_near(self.call(kind, ()), True, [False] * len(self._groups.parameters), look)

    def call(
        self,
        kind: int,
        names: Collection[str],
        rates: Mapping[str, float] | None = None,
        density: object = None,
    ) -> Call:
        """Return what this rank says that it is about to do; a density is what a schedule has given."""
        groups, by = self._groups, digest_of(sorted(rates.items())) if rates else 0
        told, flush = _digest_of(tuple(names)), groups.flush_asked
        return Call(kind, told, self.backwards, self.steps, flush, groups.digest, by, bits_of(density))

    def _announce_near(self, call: Call, finite: bool, used: Sequence[bool], look: Callable[[Met], None]) -> None:
        """Begin a call of the ranks near this one, whose parts have other sizes."""
        groups = self._groups
        alike = groups.digest_of_names if groups.share.cuts else _digest_of(tuple(groups.parameters))
        call, several = call._replace(settings=alike), groups.within.world_size
        ranks = [groups.comm.rank * several + number for number in range(several)]
        groups.share.hosts.announce(call.words(finite, used), lambda rows: look(compare(rows, ranks)))


@lru_cache(maxsize=64)
def _digest_of(names: tuple[str, ...]) -> int:
    """Return a digest of names in any order; the same ones come in every step."""
    return digest_of(sorted(names))


def look(*_: object) -> None:
    """Look at nothing but whether ranks do the same."""
