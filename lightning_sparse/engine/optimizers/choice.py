"""Which memory suits the optimizers that step an engine's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any
from weakref import WeakSet, ref

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import SGD, Optimizer

from lightning_sparse.core.console import page, say
from lightning_sparse.core.layout import fills_memory
from lightning_sparse.engine.agreement import check_equal_on_ranks
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.optimizers.drift import measured, misfit, wanted
from lightning_sparse.engine.optimizers.hooks import changes, in_life
from lightning_sparse.engine.optimizers.kinds import (
    adapts,
    check_pair,
    decays_of,
    holds,
    ids_of,
    listed,
    refusal,
    stepping,
)
from lightning_sparse.engine.optimizers.rules import AdamRule, go_on_from_dense
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.exchanges import EXCHANGES, as_exchange
from lightning_sparse.methods.memory import Drift, Memory, NoMemory, Residual, SecondMoment
from lightning_sparse.ops.momentum import has_velocities

SPENT = (
    "SGD applies averages that have waited together with the momentum that they would have had by now "
    f"({page('guide/optimizers')}). memory='residual' leaves momentum to the optimizer."
)


DRIFTS = (
    "{}: each rank trains a copy of the weights, and what has drifted furthest from the weights that all agree on is "
    f"averaged (memory Drift, {page('guide/optimizers')}). The model is the agreed weights, and each rank keeps 8 more "
    "bytes a parameter.{} memory='residual' exchanges gradients."
)
UNMEASURED = " How {} trains in this way was not measured: compare its loss with that of sparsifier='everything'.{}"
ADAPTING = (
    " With four ranks at density 0.01 and AdamW, NAdam or RMSprop, an LSTM ended 15 % behind dense training in this "
    "way; with memory='residual', 1 to 3 % behind at two to four times the rate. At the rate of dense training, a GPT "
    "with AdamW ended 91 % behind with memory='residual'."
)
LEFT = "their optimizer steps copies of the weights now. Call lightning_sparse.flush() before optimizers change."


class MemoryChoice:
    """Chooses the memory, and an exchange that carries it, by optimizers, where they were left open.

    Args:
        stepper: exchanges gradients by them.
        left_open: whether the memory may be chosen here.
        open_exchange: whether the exchange may follow the memory.
    """

    def __init__(self, stepper: Stepper, left_open: bool, open_exchange: bool) -> None:
        self._stepper, self._parameters, self._names = stepper, stepper.parameters, stepper.names
        self.left_open, self._open_exchange = left_open, open_exchange
        self._shown: list[Optimizer] = []
        """Those that :meth:`show` was given last, but for those that hold no parameter of the engine."""
        self._found: list[ref[Optimizer]] = []
        """Those that have stepped since then, in the order in which they came."""
        self._replaced: WeakSet[Optimizer] = WeakSet()
        """Those of which others have taken the place."""
        self._checked: WeakSet[Optimizer] = WeakSet()
        """Those that go with the memory."""
        self._read: tuple[int, list[Any]] = (0, [])
        """By what the memory was chosen in the latest step: for which groups, and by which settings."""
        self._second: tuple[int, set[int]] = (-1, set())
        """Parameters whose averages come with what Adam divides them by: for which groups, and their ids."""
        self._among = -1
        """The :func:`.changes` after which :attr:`_mine` was found."""
        self._own: Mapping[int, str] = {}
        self._told: set[str] = set()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that were shown, and those that have stepped, in the order in which they came."""
        found = list(self._shown)
        for known in self._found:
            if (one := known()) is not None and one not in found:
                found.append(one)
        return found

    @property
    def _mine(self) -> Mapping[int, str]:
        """Names of parameters by id, but for those of a later engine: an earlier one does nothing for them any more."""
        if self._among != (now := changes()):
            later = set().union(*(one._names for one in takewhile(lambda one: one is not self, reversed(in_life()))))
            self._among, self._own = now, {key: name for key, name in self._names.items() if key not in later}
        return self._own

    def show(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """See :meth:`.Engine._show`."""
        # Lightning has an optimizer of nothing where configure_optimizers returns None.
        chosen = [optimizer for optimizer in listed(optimizers) if self._stepper.record.hold(ids_of(optimizer))]
        self.suit(chosen)
        self._check(chosen)
        self._shown, self._found = chosen, []  # those that step on are found again
        for optimizer in chosen:
            self._spends(stepping(optimizer))

    def _replace(self, optimizer: Optimizer) -> None:
        """Forget optimizers of which one that steps for the first time has taken the place: it holds all they hold.

        They may live on for a while, on some ranks and not on others. One that steps again is known again, and stays.
        """
        if optimizer not in self._replaced:
            mine, held = self._mine.keys(), ids_of(optimizer)
            found = [one for known in self._found if (one := known()) is not None]
            self._replaced |= {one for one in found if (ids_of(one) & mine) <= held}
            self._found = [ref(one) for one in found if one not in self._replaced]

    def begin_step(self) -> None:
        """Choose the memory by optimizers as they are now, and check those that are new.

        Second moments of groups that are new go on from those of the optimizers, where they know none.

        Raises:
            ValueError: for an optimizer that does not go with the memory.
        """
        stepper, (adoptions, _), known = self._stepper, self._read, self.optimizers
        new = [one for one in known if one not in self._checked]
        facts = [changes(), *decays_of(known), *(len(group["params"]) for one in known for group in one.param_groups)]
        if (stepper.adoptions, facts) != self._read or new or not known:
            self.suit(known, begins=True)
        self._read = stepper.adoptions, facts
        if stepper.adoptions != adoptions:
            settings = stepper.settings
            chosen = {"memory for the optimizers": settings.memory_in_use, "exchange": settings.exchange_in_use}
            for network in reversed(stepper.networks):
                check_equal_on_ranks(chosen, network, stepper.device)
            with stepper.record.changing(), stepper.on_stream.between_steps():
                go_on_from_dense(stepper, [optimizer for optimizer in known if self.takes(optimizer)])
        if new:
            self._check(new)

    def suit(self, optimizers: Sequence[Optimizer], begins: bool = False) -> None:
        """Choose the memory that suits optimizers, and an exchange for it, where they were left open.

        Between two steps.

        Args:
            optimizers: all that apply averages.
            begins: whether a step has just begun. Settings of a memory that stays are changed then only: averages that
                nobody has applied yet are of the old ones.

        Raises:
            ValueError: if the sparsifier does not go with the memory.
        """
        if not self.left_open or not any(group.sparsified for group in self._stepper.groups):  # for a while, maybe
            return
        drifting = self._drifting(optimizers)
        others = [one for one in optimizers if not wanted(one)]
        sparsified = self._sparsified - {id(self._parameters[name]) for name in drifting}
        warn = partial(self._once, rank_zero_warn, kind="several settings")
        memory: Memory = (AdamRule.memory(others, sparsified, warn) if self._chooses else None) or Residual()
        if drifting and not any(holds(one, sparsified) for one in others):  # it is that of all
            memory = next(iter(drifting.values()))
        now = self._stepper.settings.memory_in_use
        if drifting != self._stepper.memories:
            self._leave_gradients(drifting)
            self._stepper.remember_by(self._with(memory), drifting)
            return
        if memory.needs_second and now.needs_second:
            if begins and memory != now:
                self._stepper.adapt(memory)
        elif memory != now:
            before, settings = self._stepper.settings.exchange_in_use, self._with(memory)
            self._stepper.remember_by(settings)
            if memory.needs_second:
                name, other = EXCHANGES.name_of(before), EXCHANGES.name_of(settings.exchange_in_use)
                if name != other:
                    self._once(
                        say,
                        f"The exchange {other!r} takes the place of {name!r}, which cannot carry Adam's second moments "
                        f"({page('guide/optimizers')}): exchange={other!r} chooses it without this line, and "
                        f"exchange={name!r} keeps the other and leaves steps to the optimizer.",
                    )
                self._once(
                    say,
                    "Adam's steps for parameters that are sparsified are taken with the second moments of all ranks' "
                    "own gradients and without a first moment, at the optimizer's learning rate "
                    f"({page('guide/optimizers')}). memory='residual' leaves them to the optimizer.",
                )

    @property
    def _may_drift(self) -> bool:
        """True if ranks can train copies of the weights: of these they exchange all, behind the optimizer's step."""
        settings, share = self._stepper.settings, self._stepper.share
        return not (settings.overlap or settings.fallback or share.cuts or share.places)

    def _drifting(self, optimizers: Iterable[Optimizer]) -> dict[str, Memory]:
        """Return the memory of each parameter of which ranks train copies, by name; tell the user of it once."""
        stepper, found = self._stepper, dict[str, Memory]()
        for optimizer in filter(wanted, optimizers) if self._may_drift else ():
            memory, known = measured(optimizer)
            held = ids_of(optimizer)
            names = [name for key, name in self._mine.items() if key in held and name in stepper.sparsified]
            if apart := [name for name in names if not fills_memory(self._parameters[name])]:
                self._once(
                    rank_zero_warn,
                    f"{apart[0]} leaves gaps in memory, so that ranks cannot train copies of it: its optimizer steps "
                    "sparse averages there. Call contiguous() before the parameter is made.",
                )
            names = [name for name in names if name not in apart]
            if not names:
                continue
            found.update(dict.fromkeys(names, memory))
            name = type(stepping(optimizer)).__name__
            if known:
                self._once(say, DRIFTS.format(name, f" {known}."))
            else:
                self._once(
                    rank_zero_warn,
                    DRIFTS.format(name, UNMEASURED.format(name, ADAPTING if adapts(optimizer) else "")),
                    kind=f"drift of {name}",
                )
        return found

    def _leave_gradients(self, drifting: Mapping[str, Memory]) -> None:
        """Warn if gradients wait of parameters that drift from now on."""
        groups = {id(self._stepper.group_of[name]): self._stepper.group_of[name] for name in drifting}
        waiting = [group for group in groups.values() if not group.drifts and group.waits]
        if waiting:
            self._once(rank_zero_warn, f"What waited of gradients is dropped, in {len(waiting)} groups: {LEFT}")

    @property
    def _chooses(self) -> bool:
        """True if the memory follows from optimizers."""
        return self.left_open and (self._open_exchange or self._stepper.settings.exchange_in_use.carries_second)

    def _with(self, memory: Memory) -> SparsificationConfig:
        """Return settings with a memory, and with an exchange that suits it, where that was left open."""
        settings = self._stepper.settings
        chosen = None if self._open_exchange else settings.exchange
        return replace(settings, memory=memory, exchange=as_exchange(chosen, settings.sparsifier, memory))

    @property
    def _sparsified(self) -> set[int]:
        """Ids of the parameters that are not always sent as a whole."""
        return {id(self._parameters[name]) for name in self._stepper.sparsified}

    def _spends(self, optimizer: Optimizer) -> bool:
        """Return True if momentum of an optimizer is spent as if averages had not waited; tell the user once."""
        if type(optimizer) is not SGD or not has_velocities(optimizer, self._sparsified):
            return False
        memory = self._stepper.settings.memory_in_use
        keeps_gradients = not isinstance(memory, NoMemory) and memory.averages == "gradients"
        plain = not self.left_open and memory == Residual()  # by choice
        if not keeps_gradients or plain:
            return False
        if not self.left_open:
            self._once(
                say,
                f"SGD's momentum is left to the optimizer, because memory={memory!r} was chosen: averages that have "
                f"waited are spent late. With the default memory they are not ({page('guide/optimizers')}).",
            )
            return False
        if memory.needs_second:  # an Adam's, which holds other parameters now
            return False
        self._once(say, SPENT)
        return True

    def settings_for(self, state: Mapping[str, Any]) -> SparsificationConfig:
        """Return settings with the memory of a state, where nothing else says which one is meant."""
        settings, memory = self._stepper.settings, chosen_in(state["settings"])
        decided, now = bool(self.optimizers and self._stepper.sparsified), settings.memory_in_use
        if memory is None or memory == now or (decided and not (now.needs_second and memory.needs_second)):
            return settings
        if memory.averages == "moves" and not self._may_drift:
            return settings
        refused = (self._open_exchange and settings.sparsifier.is_its_exchange) or not self._chooses
        if (memory.needs_second and refused) or not self.left_open:
            return settings
        return self._with(memory)

    def memories_for(self, state: Mapping[str, Any]) -> Mapping[str, Memory]:
        """Return the memories of parameters that drift: by a state with copies, if no optimizer is known."""
        if self.optimizers or not self.left_open or not self._may_drift:
            return self._stepper.memories
        counters = state["counters"]
        return {
            name: Drift("pushed" in vectors, "averages" if "owns" in counters.get(name, {}) else "steps")
            for name, vectors in state["parameters"].items()
            if "agreed" in vectors and name in self._stepper.sparsified
        }

    def takes(self, optimizer: Optimizer) -> bool:
        """Return True if Adam's steps of some of its parameters are taken here, also within one that is around it."""
        served = self._served(optimizer)
        return bool(served) and refusal(optimizer, served) is None

    def _served(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of an optimizer's parameters whose averages come with what Adam divides them by."""
        stepper = self._stepper
        if stepper.adoptions != self._second[0]:
            groups = [group for group in stepper.groups if group.memory.needs_second]
            self._second = stepper.adoptions, {id(self._parameters[name]) for group in groups for name in group.spans}
        second = self._second[1]
        return ids_of(optimizer) & second & self._mine.keys() if second and not stepper.direct else set()

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a ValueError for optimizers that do not go with the memory; warn where that may be."""
        # Where nobody has told processes their ranks, each of them counts as rank zero and would warn.
        with warnings.catch_warnings(action="ignore") if self._stepper.rank else nullcontext():
            for optimizer in optimizers:
                memory = self._stepper.settings.memory_in_use
                check_pair(memory, optimizer)
                if memory.averages == "moves" and (why := misfit(optimizer)):
                    raise ValueError(
                        f"Expected an optimizer that can step a copy of the weights, but {why}. Use memory='residual', "
                        "or keep its parameters dense."
                    )
        self._checked.update(optimizers)

    def _once(self, tell: Callable[[str], None], sentence: str, kind: str | None = None) -> None:
        """Tell the user on rank zero, which is one rank also where nobody has told processes their ranks.

        Args:
            tell: says or warns.
            sentence: to say.
            kind: of sentences of which one is said; None: of this one.
        """
        if self._stepper.rank == 0 and (kind or sentence) not in self._told:
            self._told.add(kind or sentence)
            tell(sentence)


def chosen_in(settings: object) -> Memory | None:
    """Return the memory that optimizers have chosen, by a state's settings; None: they have not.

    Args:
        settings: see :attr:`SparsificationConfig.algorithm`.
    """
    if not isinstance(settings, Mapping):
        return None
    for kind in (SecondMoment, Drift):
        if settings.get("class") == kind.__name__:
            return kind(**{name: value for name, value in settings.items() if name != "class"})
    return next(filter(None, map(chosen_in, settings.values())), None)
