"""Counts of an engine's exchanges, and the averages that they have made, until optimizers have applied them.

An exchange settles in backward, and its average is applied later, by an optimizer: between the two, it is *kept* until
it is *handed over* to optimizers, in the same backward or, one step late, in the next one. All that time the average is
neither in the residuals nor in the weights: a state that is saved then holds it beside them.
Handed over is what lies in the places of gradients in DDP's buckets.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_sparse.core.layout import Gradient, own
from lightning_sparse.engine.delivery import Delivery, scatter_average_
from lightning_sparse.engine.executor import held
from lightning_sparse.engine.optimizers.kinds import ids_of
from lightning_sparse.engine.skip import Decision
from lightning_sparse.ops import static_shapes


class Counts(NamedTuple):
    """Numbers of exchanges so far."""

    step: int = 0
    """Exchanges that counted."""
    skipped: int = 0
    """Exchanges that were skipped."""
    streak: int = 0
    """Exchanges skipped since the last one that counted."""
    flushes: int = 0
    """Times that residuals were emptied between two steps."""

    @property
    def number(self) -> int:
        """Exchanges and flushes that counted: equal on ranks whose states belong together."""
        return self.step + self.flushes

    @property
    def settled(self) -> int:
        """Exchanges and flushes so far, also those that were skipped."""
        return self.number + self.skipped


class Averages(NamedTuple):
    """Averages of a group, as optimizers get them, but free of the loss scale."""

    spans: Mapping[str, slice]
    """Of each parameter in the group."""
    indices: Tensor | None
    """(u,) int64 coordinates in any order, maybe repeated, maybe the padding index; None: all."""
    values: Tensor | None
    """(u,) averages; None: nobody will ask for them any more."""
    delivery: Delivery | None = None
    """Facts for the step rules of optimizers; None: there are none."""
    returns: bool = True
    """True if the group has a residual that can take them back."""

    def of(self, name: str) -> tuple[Tensor | None, Tensor]:
        """Return the coordinates within a parameter, ascending, each once, and the averages there; on the CPU.

        Coordinates of None are all of them.
        """
        assert self.values is not None
        return self._sorted(name, self.values)

    def divisor_of(self, name: str) -> Tensor | None:
        """Return what the averages of :meth:`of` are divided by, on the CPU; None: by nothing."""
        by = None if self.delivery is None else self.delivery.by
        return None if by is None else self._sorted(name, by)[1]

    def _sorted(self, name: str, values: Tensor) -> tuple[Tensor | None, Tensor]:
        span = self.spans[name]
        if self.indices is None:
            return None, values[span].to("cpu", copy=True)
        inside = (self.indices >= span.start) & (self.indices < span.stop)
        places, values = (self.indices[inside] - span.start).cpu(), values[inside].cpu()
        different, first = torch.unique(places, return_inverse=True)
        return different, values.new_empty(len(different)).index_copy_(0, first, values)

    def scale_(self, name: str, factor: float) -> None:
        """Multiply the averages of a parameter."""
        span, values = self.spans[name], self.values
        assert values is not None
        if self.indices is None:
            values[span].mul_(factor)
        else:
            inside = (self.indices >= span.start) & (self.indices < span.stop)
            values.copy_(torch.where(inside, values * factor, values))


class Kept(NamedTuple):
    """An exchange that has settled, and those of its averages that no optimizer has been given yet."""

    decision: Decision
    """True if it was skipped."""
    skipped: Tensor | None
    """() the same as a flag where gradients live; None: it counted."""
    clipped: Set[str]
    """Names of the parameters whose gradients were clipped before it, see :class:`.GradientClipping`."""
    averages: Mapping[str, Averages | None]
    """By parameter; None: nobody can take them back, or ask where they arrived."""
    sent: Sequence[Averages] = ()
    """Averages that have left this rank's residuals, as it has sent them."""

    def part(self, names: Set[str]) -> Kept:
        """Return it with some of its averages."""
        return self._replace(averages={name: one for name, one in self.averages.items() if name in names})


def added(parts: Sequence[tuple[Tensor | None, Tensor]]) -> tuple[Tensor | None, Tensor]:
    """Add up sparse vectors of one length: ascending coordinates, or None for all of them, and values.

    Example:
        >>> added([(torch.tensor([1, 4]), torch.tensor([0.5, 2.0])), (torch.tensor([4]), torch.tensor([3.0]))])
        (tensor([1, 4]), tensor([0.5000, 5.0000]))
    """
    if len(parts) == 1:
        return parts[0]
    sparse = [(indices, values) for indices, values in parts if indices is not None]
    if len(sparse) < len(parts):
        total = torch.stack([values for indices, values in parts if indices is None]).sum(0)
        for indices, values in sparse:
            total.index_add_(0, indices, values.to(total.dtype))
        return None, total
    places, values = (torch.cat(each) for each in zip(*sparse, strict=True))
    different, where = torch.unique(places, return_inverse=True)
    return different, values.new_zeros(len(different)).index_add_(0, where, values)


class Handout:
    """The averages that an exchange has handed out, and who has applied them.

    A parameter has taken its average when it was written to, or when an optimizer that holds it has finished a step.

    Args:
        parameters: those that got an average, by name.
        averages: those that a residual can take back, by parameter.
        decision: whether the exchange counted.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], averages: Mapping[str, Averages], decision: Decision | None
    ) -> None:
        self.names = parameters.keys()
        """Of the parameters that got an average."""
        self._parameters, self._decision = parameters, decision
        self._averages = dict(averages)
        self._taken: Set[str] = frozenset()
        self._stepped: Set[str] = frozenset()
        self._before = {name: own(parameter)._version for name, parameter in parameters.items()}

    def step(self, names: Set[str]) -> None:
        """Note that an optimizer that holds these has finished a step."""
        self._stepped = self._stepped | names

    def close(self) -> None:
        """Let nobody apply averages from now on: DDP, too, writes to the parameters of a model that it wraps again."""
        self._stepped, self._before = self._stepped | self._written, {}

    @property
    def _written(self) -> Set[str]:
        """Names of the parameters that somebody has written to."""
        return {name for name, number in self._before.items() if own(self._parameters[name])._version != number}

    def absorb(self, names: Set[str], held: Set[str]) -> None:
        """Note that a new gradient of these is absorbed: averages that were still in ``.grad`` came with it."""
        self._taken = self._taken | (names & self.left(held).keys())

    @property
    def taken(self) -> dict[str, Averages]:
        """Averages that have come back with a gradient, by parameter; none of an exchange that was skipped.

        May wait for the device.
        """
        return {} if self._decision else {name: one for name, one in self._averages.items() if name in self._taken}

    def replace(self, names: Iterable[str]) -> None:
        """Forget averages of these: with new gradients that were exchanged they have come back, or never will."""
        for name in names:
            self._averages.pop(name, None)

    def take_back(self, names: Set[str], held: Set[str]) -> dict[str, Averages]:
        """Return the averages of these that nobody has applied, and forget all of these."""
        left = {name: each for name, each in self.waiting(held).items() if name in names}
        self.replace(names)
        return left

    def waiting(self, held: Set[str]) -> dict[str, Averages]:
        """Return what is :meth:`left`; nothing of an exchange that was skipped. May wait for the device."""
        return {} if self._decision else self.left(held)

    def left(self, held: Set[str]) -> dict[str, Averages]:
        """Return the averages that have not been applied, by parameter; none, when no other one will be.

        Whether the exchange counted is not looked at, so that nothing is waited for.

        Args:
            held: parameters that optimizers hold; empty: nobody knows yet.
        """
        done = self._stepped | self._written
        expected = self.names & held if held else self.names
        if done and expected <= done:
            return {}
        return {name: each for name, each in list(self._averages.items()) if name not in done}


class Record:
    """Counts exchanges, keeps what they have handed out, and guards what is remembered while it changes.

    Args:
        parameters: by name.
        names: of parameters, by id.
    """

    def __init__(self, parameters: Mapping[str, Parameter], names: Mapping[int, str]) -> None:
        self._names = names
        self._parameters = parameters
        self.start = Counts()
        """Counts before the latest exchange."""
        self.decision: Decision | None = None
        """Of the latest exchange; None: there was none since :attr:`start`."""
        self.handed: Decision | None = None
        """Of the exchange whose averages optimizers were given last; None: there was none, or it was a flush."""
        self.without: Set[str] = frozenset()
        """Parameters that took part in a backward for which there was no average."""
        self.delivered: dict[str, Delivery | None] = {}
        """Of the averages that optimizers were given last, by parameter."""
        self.lock = threading.RLock()
        """Held while a state is read, and while what is remembered changes; never while a message is waited for."""
        self.held: Set[str] = frozenset()
        """Parameters that optimizers hold, as far as they have been seen."""
        self.absorbed: Set[str] = frozenset()
        """Parameters of which a gradient was absorbed whose exchange is not settled."""
        self._whole = True
        self._handouts: Sequence[Handout] = ()
        self._earlier: Sequence[Handout] = ()
        """Those of :attr:`_handouts` that there were when the latest exchange began."""
        self._latest: Kept | None = None
        """The exchange that has settled last, if this rank knows what it has sent."""
        self.kept: Sequence[Kept] = ()
        """Exchanges with averages that optimizers have not been given."""
        self._unstepped: dict[str, tuple[int, Decision]] = {}
        """Parameters that were given an average and have not been stepped since: version and decision."""
        self._number = 0
        self._handed_out: dict[str, int] = {}
        """The number of the handout in which a parameter got its latest average."""
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The number of handouts when an optimizer took its latest step."""

    @property
    def counts(self) -> Counts:
        """Counts after the latest exchange; may wait for the device."""
        step, skipped, streak, flushes = self.start
        if self.decision is None:
            return self.start
        return (
            Counts(step, skipped + 1, streak + 1, flushes) if self.decision else Counts(step + 1, skipped, 0, flushes)
        )

    @property
    def skipped(self) -> bool:
        """True if the exchange that gradients are of counted for nothing; may wait for the device."""
        return bool(self.handed)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let what is remembered change: nobody reads it meanwhile, and signals wait.

        An error in between leaves some of it changed: states are refused from then on.
        """
        with held(), self.lock:
            whole, self._whole = self._whole, False
            yield
            self._whole = whole

    def check_whole(self) -> None:
        """Raise if an error has ended a change of what is remembered half-way.

        Raises:
            RuntimeError: saying so.
        """
        if not self._whole:
            raise RuntimeError(
                "An error has ended a step while residuals were being changed: some of them are of before it and some "
                "of after it. They cannot be saved; go on from an earlier checkpoint."
            )

    def restart(self, start: Counts) -> None:
        """Count from here, with other groups, between two steps."""
        self.start, self.decision, self.handed, self.absorbed = start, None, None, frozenset()
        self._handed_out = {}

    def forget_averages(self) -> None:
        """Forget all averages: another state takes the place of the one that they belonged to."""
        self._handouts = self._earlier = self.kept = ()
        self._latest = None
        self._unstepped, self.without = {}, frozenset()

    def begin_step(self) -> None:
        """Begin a step, whose first gradients are here."""
        self._drop_applied()
        self._earlier = self._handouts

    def absorb(self, names: Set[str]) -> None:
        """Note that a new gradient of these parameters is absorbed, within :meth:`changing`."""
        self.absorbed = self.absorbed | names
        for handout in self._earlier:
            handout.absorb(names, self.held)

    def settle(self, settled: Kept) -> None:
        """Count an exchange that has settled, and keep its averages, within :meth:`changing`."""
        for handout in self._earlier:
            handout.replace(self.absorbed | settled.averages.keys())
        self.start, self.decision, self.absorbed = self.counts, settled.decision, frozenset()
        self._latest = settled if settled.sent else None  # else its averages would stay until the next exchange
        self.keep(settled)

    def keep(self, kept: Kept) -> None:
        """Keep averages until they are handed over; also those of a state that was loaded."""
        self.kept = [*self.kept, kept]

    def hand_over(self, names: Set[str]) -> list[Kept]:
        """Let optimizers have the averages that are kept of some parameters; within :meth:`changing`.

        Returns:
            The averages, of the oldest exchange first.
        """
        given = [part for kept in self.kept if (part := kept.part(names)).averages]
        self.kept = [rest for kept in self.kept if (rest := kept.part(kept.averages.keys() - names)).averages]
        self.without = self.without | names
        for part in given:
            self.handed = part.decision
            returning = {name: one for name, one in part.averages.items() if one is not None and one.returns}
            self._hand_over(part.averages.keys(), returning, part.decision)
            deliveries = {name: None if one is None else one.delivery for name, one in part.averages.items()}
            self.delivered = {**self.delivered, **deliveries}
            for name in part.averages:
                self._unstepped[name] = own(self._parameters[name])._version, part.decision
        return given

    def flush(self, averages: Mapping[str, Averages], deliveries: Mapping[str, Delivery | None]) -> None:
        """Count a flush: all residuals have been handed out as averages, and are empty; within :meth:`changing`.

        Args:
            averages: by parameter.
            deliveries: their facts for step rules, by parameter.
        """
        counts = self.counts
        self.start, self.decision, self.handed = counts._replace(flushes=counts.flushes + 1), None, None
        self.delivered = {**self.delivered, **deliveries}
        self._hand_over(averages.keys(), averages, None)

    def _hand_over(self, names: Set[str], averages: Mapping[str, Averages], decision: Decision | None) -> None:
        self._number += 1
        self._handed_out.update(dict.fromkeys(names, self._number))
        handout = Handout({name: self._parameters[name] for name in names}, averages, decision)
        self._handouts = [*self._handouts, handout]
        self.without = self.without - names

    def is_left(self, name: str) -> bool:
        """Return True if a parameter was given an average that neither an optimizer nor anybody else has applied."""
        version, decision = self._unstepped.get(name, (-1, None))
        if version != own(self._parameters[name])._version or (self.held and name not in self.held):
            return False
        return not decision

    @property
    def latest(self) -> Kept | None:
        """The exchange that has settled last, if it counted and this rank knows what it has sent; or None.

        May wait for the device.
        """
        latest = self._latest
        return None if latest is None or latest.decision else latest

    @property
    def revocable(self) -> Kept | None:
        """:attr:`latest`, if no optimizer has applied any of its averages; or None. May wait for the device."""
        latest = self.latest
        if latest is None:
            return None
        waiting = {name for kept in self.kept if kept.decision is latest.decision for name in kept.averages}
        return latest if all(name in waiting or self.is_left(name) for name in latest.averages) else None

    def take_back(self, names: Set[str]) -> dict[str, Averages]:
        """Return the averages of these parameters that were handed out and not applied; they never will be.

        Within :meth:`changing`; may wait for the device.
        """
        left: dict[str, Averages] = {}
        for handout in self._handouts:
            left |= handout.take_back(names, self.held)
        for name in names:
            self._unstepped.pop(name, None)
        self._drop_applied()
        return left

    def hold(self, optimizer: Optimizer) -> Set[str]:
        """Note that an optimizer holds its parameters; return the names of the engine's among them."""
        names = {self._names[key] for key in ids_of(optimizer) & self._names.keys()}
        if not names <= self.held:
            self.held = self.held | names
        return names

    def applied(self, optimizer: Optimizer) -> None:
        """Count an optimizer's averages as applied after its step, also where a later engine owns them."""
        names = self.hold(optimizer)
        self.without = self.without - names
        self._seen[optimizer] = self._number
        for name in names:
            self._unstepped.pop(name, None)
        for handout in self._handouts if names else ():
            handout.step(names)
        self._drop_applied()

    def count_as_applied(self) -> None:
        """Count all that was handed out as applied, because it is, or never will be."""
        for handout in self._handouts:
            handout.step(handout.names)
        self._drop_applied()

    def close(self) -> None:
        """Let no average be applied any more, whatever is done to parameters."""
        for handout in self._handouts:
            handout.close()

    def _drop_applied(self) -> None:
        """Give the memory of averages free that nobody waits for."""
        self._handouts = [each for each in self._handouts if each.left(self.held)]

    def waiting(self, optimizer: Optimizer) -> Set[str]:
        """Return the parameters that got an average, of any exchange, since this optimizer has taken a step."""
        seen = self._seen.get(optimizer, 0)
        return {name for name, number in self._handed_out.items() if number > seen}

    def pending(self, without: Kept | None = None) -> dict[str, tuple[Tensor | None, Tensor]]:
        """Return averages that have been handed out and not applied, by parameter, on the CPU, see :func:`added`.

        May wait for the device.

        Args:
            without: an exchange whose averages do not count.
        """
        gone = {} if without is None else without.averages
        parts = [each.waiting(self.held) for each in self._handouts]
        return _joined([{name: one for name, one in part.items() if gone.get(name) is not one} for part in parts])

    def left(self, without: Kept | None = None) -> dict[str, Averages]:
        """Return averages that are kept, by parameter; none of exchanges that were skipped. May wait for the device.

        Args:
            without: an exchange whose averages do not count.
        """
        gone = None if without is None else without.decision
        counted = [kept.averages for kept in self.kept if kept.decision is not gone and not kept.decision]
        return {name: one for averages in counted for name, one in averages.items() if one is not None}

    @property
    def kept_names(self) -> Set[str]:
        """Names of the parameters of which averages are kept, also of exchanges that were skipped."""
        return {name for kept in self.kept for name in kept.averages}

    @property
    def clipped(self) -> Set[str]:
        """Names of the parameters of which averages are kept, and whose gradients were clipped before the exchange."""
        return {name for kept in self.kept for name in kept.averages.keys() & kept.clipped}

    @property
    def taken(self) -> dict[str, tuple[Tensor | None, Tensor]]:
        """Averages of :meth:`pending` that this rank has absorbed with a new gradient, while others may not have."""
        return _joined([handout.taken for handout in self._handouts])


def _joined(parts: Sequence[Mapping[str, Averages]]) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Add up averages by parameter, on the CPU, see :func:`added`."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: added([part[name].of(name) for part in parts if name in part]) for name in names}


@torch.no_grad()
def place(kept: Kept, places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Put averages where gradients lay, times the present scale of the loss; NaN, if they are of a skipped step.

    Args:
        kept: averages by parameter, in the coordinates of the places.
        places: flat gradients by parameter, of all that the averages name.
        scale: () of the loss; None: none.
    """
    host_knows = not static_shapes(next(iter(places.values())).device)
    if not (host_knows and kept.decision):
        parts: dict[int, tuple[Averages, list[str]]] = {}
        for name, averages in kept.averages.items():
            if averages is not None:  # of a skipped step that a state holds
                parts.setdefault(id(averages), (averages, []))[1].append(name)
        for averages, names in parts.values():
            _scatter(averages, {name: places[name] for name in names}, scale)
    if kept.skipped is not None and (not host_knows or kept.skipped):
        fill_nan_((places[name] for name in kept.averages), kept.skipped)


def fill_nan_(gradients: Iterable[Tensor], skipped: Tensor) -> None:
    """Write NaN into flat gradients of a skipped step; if only the device knows it, into the first of each.

    Args:
        gradients: on one device.
        skipped: () flag, which is set where the host knows it.
    """
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    for flat in gradients:
        if not static_shapes(skipped.device):
            flat.fill_(float("nan"))
        elif flat.numel():
            of_dtype.setdefault(flat.dtype, []).append(flat[:1])
    for dtype, firsts in of_dtype.items():
        factor = torch.ones((), dtype=dtype, device=skipped.device).masked_fill_(skipped, float("nan"))
        torch._foreach_mul_(firsts, factor)


def _scatter(averages: Averages, places: Mapping[str, Tensor], scale: Tensor | None) -> None:
    """Write averages of some parameters of a group to their places."""
    assert averages.values is not None
    dtype = next(iter(places.values())).dtype
    values = (averages.values if scale is None else averages.values * scale).to(dtype)
    if places.keys() == averages.spans.keys():
        place = Gradient.of(places[name] for name in averages.spans)
        flat = place if len(place.runs) == 1 or not static_shapes(place.device) else Gradient([place.flat()])
    else:
        place = flat = Gradient([values.new_empty(max(span.stop for span in averages.spans.values()))])
    scatter_average_(flat, averages.indices, values)
    if flat is not place:
        place.spread_(flat.runs[0])
    for name, piece in places.items() if places.keys() != averages.spans.keys() else ():
        piece.copy_(flat[averages.spans[name]])
    if averages.delivery is not None and places.keys() == averages.spans.keys():
        averages.delivery.sample([places[name] for name in averages.spans], scale)
