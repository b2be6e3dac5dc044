"""Counts of an engine's exchanges, and the averages that they have made, until optimizers have applied them.

An exchange settles in backward, and its average is applied later, by an optimizer. In between, the average is neither
in the residuals nor in the weights: a state that is saved then holds it beside them.
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
        values, span = self.values, self.spans[name]
        assert values is not None
        if self.indices is None:
            return None, values[span].to("cpu", copy=True)
        inside = (self.indices >= span.start) & (self.indices < span.stop)
        places, values = (self.indices[inside] - span.start).cpu(), values[inside].cpu()
        different, first = torch.unique(places, return_inverse=True)
        return different, values.new_empty(len(different)).index_copy_(0, first, values)


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
        """Whether the latest exchange counted for nothing; None: there was none since :attr:`start`."""
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
        self.start, self.decision, self.absorbed = start, None, frozenset()
        self._handed_out = {}

    def forget_averages(self) -> None:
        """Forget all averages: another state takes the place of the one that they belonged to."""
        self._handouts = ()

    def absorb(self, names: Set[str]) -> None:
        """Note that a new gradient of these parameters is absorbed, within :meth:`changing`."""
        self.absorbed = self.absorbed | names
        for handout in self._handouts:
            handout.absorb(names, self.held)

    def settle(self, decision: Decision, averages: Mapping[str, Averages | None]) -> None:
        """Count an exchange that has settled, and hand its averages over to optimizers; within :meth:`changing`.

        Args:
            decision: whether it is skipped.
            averages: by parameter; None: nobody can take them back, or ask where they arrived.
        """
        for handout in self._handouts:
            handout.replace(self.absorbed | averages.keys())
        self.start, self.decision, self.absorbed = self.counts, decision, frozenset()
        returning = {name: one for name, one in averages.items() if one is not None and one.returns}
        self._hand_over(averages.keys(), returning, decision)
        self.deliver({name: None if one is None else one.delivery for name, one in averages.items()})

    def count(self, decision: Decision) -> None:
        """Count an exchange that has settled, whose averages nobody has to be handed; within :meth:`changing`."""
        self.start, self.decision, self.absorbed = self.counts, decision, frozenset()

    def deliver(self, deliveries: Mapping[str, Delivery | None]) -> None:
        """Note the facts for step rules of averages that are handed over, by parameter."""
        self.delivered = {**self.delivered, **deliveries}

    def flush(self, averages: Mapping[str, Averages], deliveries: Mapping[str, Delivery | None]) -> None:
        """Count a flush: all residuals have been handed out as averages, and are empty; within :meth:`changing`.

        Args:
            averages: by parameter.
            deliveries: their facts for step rules, by parameter.
        """
        counts = self.counts
        self.start, self.decision = counts._replace(flushes=counts.flushes + 1), None
        self.deliver(deliveries)
        self._hand_over(averages.keys(), averages, None)

    def _hand_over(self, names: Set[str], averages: Mapping[str, Averages], decision: Decision | None) -> None:
        self._number += 1
        self._handed_out.update(dict.fromkeys(names, self._number))
        handout = Handout({name: self._parameters[name] for name in names}, averages, decision)
        self._handouts = [*self._handouts, handout]

    def hold(self, optimizer: Optimizer) -> Set[str]:
        """Note that an optimizer holds its parameters; return the names of the engine's among them."""
        names = {self._names[key] for key in ids_of(optimizer) & self._names.keys()}
        if not names <= self.held:
            self.held = self.held | names
        return names

    def applied(self, optimizer: Optimizer) -> None:
        """Count an optimizer's averages as applied after its step, also where a later engine owns them."""
        names = self.hold(optimizer)
        self._seen[optimizer] = self._number
        for handout in self._handouts if names else ():
            handout.step(names)
        self.drop_applied()

    def count_as_applied(self) -> None:
        """Count all that was handed out as applied, because it is, or never will be."""
        for handout in self._handouts:
            handout.step(handout.names)
        self.drop_applied()

    def close(self) -> None:
        """Let no average be applied any more, whatever is done to parameters."""
        for handout in self._handouts:
            handout.close()

    def drop_applied(self) -> None:
        """Give the memory of averages free that nobody waits for."""
        self._handouts = [each for each in self._handouts if each.left(self.held)]

    def waiting(self, optimizer: Optimizer) -> Set[str]:
        """Return the parameters that got an average, of any exchange, since this optimizer has taken a step."""
        seen = self._seen.get(optimizer, 0)
        return {name for name, number in self._handed_out.items() if number > seen}

    def pending(self) -> dict[str, tuple[Tensor | None, Tensor]]:
        """Return averages that have been handed out and not applied, by parameter, on the CPU, see :func:`added`.

        May wait for the device.
        """
        return _joined([each.waiting(self.held) for each in self._handouts])

    @property
    def taken(self) -> dict[str, tuple[Tensor | None, Tensor]]:
        """Averages of :meth:`pending` that this rank has absorbed with a new gradient, while others may not have."""
        return _joined([handout.taken for handout in self._handouts])


def _joined(parts: Sequence[Mapping[str, Averages]]) -> dict[str, tuple[Tensor | None, Tensor]]:
    """Add up averages by parameter, on the CPU, see :func:`added`."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: added([part[name].of(name) for part in parts if name in part]) for name in names}


@torch.no_grad()
def place(
    averages: Mapping[str, Averages], places: Mapping[str, Tensor], scale: Tensor | None, skipped: Tensor
) -> None:
    """Put averages where gradients lay, times the present scale of the loss; NaN, if the step is skipped.

    Args:
        averages: by parameter, in the coordinates of the places.
        places: flat gradients by parameter, of all that the averages name.
        scale: () of the loss; None: none.
        skipped: () flag: the step counts for nothing.
    """
    host_knows = not static_shapes(skipped.device)
    if not (host_knows and skipped):
        parts: dict[int, tuple[Averages, list[str]]] = {}
        for name, one in averages.items():
            parts.setdefault(id(one), (one, []))[1].append(name)
        for one, names in parts.values():
            _scatter(one, {name: places[name] for name in names}, scale)
    if not host_knows or skipped:
        fill_nan_((places[name] for name in averages), skipped)


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
        scatter_average_(flat, averages.indices, values)
        if flat is not place:
            place.spread_(flat.runs[0])
        return
    whole = values.new_empty(max(span.stop for span in averages.spans.values()))
    scatter_average_(Gradient([whole]), averages.indices, values)
    for name, piece in places.items():
        piece.copy_(whole[averages.spans[name]])
