"""The optimizers that apply an engine's averages: which memory suits them, their step rules, and clipping.

One pair of torch's hooks around the steps of all optimizers of the process serves the bindings of all engines.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.amp import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_sparse.core.console import page, say
from lightning_sparse.engine.agreement import check_equal_on_ranks
from lightning_sparse.engine.config import SparsificationConfig
from lightning_sparse.engine.executor import Hold
from lightning_sparse.engine.optimizers.clipping import Clipping, Limit
from lightning_sparse.engine.optimizers.kinds import (
    check_pair,
    decays_of,
    holds,
    ids_of,
    listed,
    made_for,
    refusal,
    rehearses,
    stepping,
)
from lightning_sparse.engine.optimizers.momentum import has_velocities
from lightning_sparse.engine.optimizers.rules import AdamRule, Arrived, MomentumRule, OfGroup, go_on_from_dense
from lightning_sparse.engine.pipeline import GroupReducer
from lightning_sparse.engine.reducer import Reducer
from lightning_sparse.engine.state.schema import second_moment_in
from lightning_sparse.methods.exchanges import EXCHANGES, as_exchange
from lightning_sparse.methods.memory import Memory, NoMemory, Residual

HIDDEN = (
    "A GradScaler that the engine was not shown unscales gradients. In the residuals, each gradient waits with the "
    "loss scale of its own step, and is divided by that of a later one. Show it: attach(..., scaler=scaler)."
)
SPENT = (
    "SGD applies averages that have waited together with the momentum that they would have had by now "
    f"({page('momentum')}). memory='residual' leaves momentum to the optimizer."
)
ALONE = (
    "{} without a backward through the wrapped model: gradients are not averaged, unless you do so yourself, and ranks "
    "drift apart. Call the wrapped model, and in Lightning's manual optimization self.manual_backward(loss) in place "
    "of loss.backward()."
)
PATIENCE = 10
"""Steps after which that is said."""
_bindings: list[weakref.ref[OptimizerBinding]] = []
"""Of the engines of the process that are not closed, in the order in which they came."""
_holds: list[Hold] = []
"""Of contexts in which signals wait while optimizers step."""


class OptimizerBinding:
    """Binds an engine to the optimizers that apply its averages.

    It chooses the memory, and is called around the step of every optimizer of the process, also of those that nobody
    bound. Before a step: gradients of a skipped step are kept from it, if no loss scaler does so; clipping that nobody
    asked for ends; what has arrived is handed to the optimizer's rule, which takes Adam's steps, or notes what SGD
    steps with; then watchers look. After it: averages count as applied, gradients that Adam's rule took away come back,
    and momentum is spent.

    Args:
        reducer: whose averages are applied; it is told of memories, rates and clipping.
        left_open: whether the memory may be chosen here.
        open_exchange: whether the exchange may follow the memory.
    """

    exchanges = False
    """True if gradients are exchanged when optimizers step."""

    def __init__(self, reducer: Reducer, left_open: bool, open_exchange: bool) -> None:
        self.optimizers: list[Optimizer] = []
        """Those that :meth:`bind` was given last, but for those that hold no parameter of the engine."""
        self.left_open, self._open_exchange = left_open, open_exchange
        self.watchers: list[Callable[[Optimizer], None]] = []
        """Called before each step."""
        self._reducer, self._parameters, self._names = reducer, reducer.parameters, reducer.names
        self._read: tuple[int, list[Any]] = (0, [])
        """By what the memory was chosen in the latest step: for which groups, and by which settings."""
        self._second: tuple[int, set[int]] = (-1, set())
        """Parameters whose averages come with what Adam divides them by: for which groups, and their ids."""
        self._stepped_by: dict[str, weakref.ref[Optimizer]] = {}
        """The optimizer that has stepped each parameter last, while none was bound; of nested ones, the outermost."""
        self._outermost: Optimizer | None = None
        """The optimizer that is taking a step, of nested ones the outermost."""
        several = any(network.world_size > 1 for network in reducer.networks)
        self._alone: WeakKeyDictionary[Optimizer, int] | None = WeakKeyDictionary() if several else None
        """Steps by optimizer, until the first exchange; None from then on, and with one rank."""
        self._told: set[str] = set()
        self._rehearsing = False
        """True if the step that an optimizer is taking only makes its state."""
        self._saved_clippings: list[Mapping[str, Any]] = []
        """Of a state that was loaded, until the optimizers are bound whose gradients were clipped."""
        keeps = reducer.settings.fallback  # dense steps go on with them
        self._adam = AdamRule(reducer.lengths, self._warn_of_changes, keeps)
        self._momentum = MomentumRule()
        _register_hooks()
        _bindings.append(weakref.ref(self, _bindings.remove))

    @property
    def _mine(self) -> Mapping[int, str]:
        """Names of parameters by id, but for those of a later engine: an earlier one does nothing for them any more."""
        later = list(takewhile(lambda one: one is not self, reversed(in_life())))
        return {key: name for key, name in self._names.items() if not any(key in one._names for one in later)}

    def before(self, optimizer: Optimizer) -> None:
        """Act before an optimizer's step; its gradients are there. Of nested ones, the outer one comes first."""
        record = self._reducer.record
        held = record.hold(optimizer)
        names = self._mine
        mine = not ids_of(optimizer).isdisjoint(names)
        takes = self.takes(optimizer)
        self._rehearsing = rehearses(optimizer)
        if self._rehearsing:
            if takes:
                self._adam.rehearse(optimizer, self._served(optimizer))
            return
        if mine and self._outermost is None:
            self._outermost = optimizer
            self._count_alone(optimizer, names)
            if not self.optimizers:
                self._stepped_by.update(dict.fromkeys(held, weakref.ref(optimizer)))
        if mine and self._reducer.loss_scale() is None:
            self.ignore_skipped(optimizer)
        flushed = record.decision is None
        self._reducer.clipping.before_step(
            id(optimizer), lambda: not flushed and not record.waiting(optimizer).isdisjoint(held)
        )
        if takes and stepping(optimizer) is optimizer:
            self._adam.before(optimizer, list(self._arrived(optimizer)))
        elif type(optimizer) is SGD:
            spends, steps = self._spends(optimizer), 0 if flushed else 1
            self._momentum.before(optimizer, names, self._arrived(optimizer), spends, steps)
        unscaled = mine and not self._reducer.direct and self._reducer.loss_scale() is None
        if unscaled and not takes and steps_for_a_scaler():
            self._once(rank_zero_warn, HIDDEN)
        self._adam.leave(optimizer)
        for watch in self.watchers:
            watch(optimizer)

    def _count_alone(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Count a step with gradients that no exchange has averaged; warn if the user does not seem to know."""
        if self._alone is None:
            return
        sparsified = self._sparsified & names.keys()
        held = (p for group in optimizer.param_groups for p in group["params"] if id(p) in sparsified)
        if any(p.grad is not None for p in held):
            self._alone[optimizer] = steps = self._alone.get(optimizer, 0) + 1
            if steps == PATIENCE:
                self._once(rank_zero_warn, ALONE.format(f"{steps} steps"), kind="alone")

    def after(self, optimizer: Optimizer) -> None:
        """Act after an optimizer's step, maybe of one that had begun before there was this binding."""
        if not self._rehearsing:
            self._reducer.record.applied(optimizer)
        if self._outermost is optimizer:
            self._outermost = None
        self._reducer.skipped.take_back(optimizer)
        self._adam.after()
        self._momentum.after()

    def exchange(self, names: Sequence[str]) -> bool:
        """See :meth:`.Engine.exchange`."""
        raise RuntimeError("Gradients are exchanged in backward here: engine.exchange() is not needed.")

    def check_closure(self, optimizer: Optimizer, calls: int) -> None:
        """Look how often an optimizer has called its closure in one step: any number of times is fine here."""

    def forget(self) -> None:
        """Undo what :meth:`before` has done, if a step has failed since."""
        self._outermost = None
        self._adam.after()
        self._momentum.forget()

    def ignore_skipped(self, optimizer: Optimizer) -> None:
        """See :meth:`.Engine.ignore_skipped`."""
        reducer = self._reducer
        hand_over = reducer.loss_scale() is None
        if hand_over and reducer.skipped.could_spare_a_wait(optimizer):
            self._once(
                say,
                "sparse_ddp: the host waits for the device once in every step, to learn whether the optimizer may "
                f"step. {type(optimizer).__name__}(..., fused=True) learns it on the device, and nobody waits.",
                kind="waits",
            )
        reducer.skipped.skip(optimizer, hand_over)
        known = reducer.known_counts  # a fused optimizer has the flag, and the host learns it one step later
        if known.skipped == 1 and known.streak == 1:
            self._once(
                rank_zero_warn,
                f"A gradient was not finite on some rank in the backward after step {known.step}: no rank takes this "
                "step. What was finite waits in the residuals, but for gradients that are scaled by their norm, as "
                "with AdamW. sparse/steps/skipped counts such steps from now on.",
            )

    def takes(self, optimizer: Optimizer) -> bool:
        """Return True if Adam's steps of some of its parameters are taken here, also within one that is around it."""
        served = self._served(optimizer)
        return bool(served) and refusal(optimizer, served) is None

    def _served(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of an optimizer's parameters whose averages come with what Adam divides them by."""
        reducer = self._reducer
        if reducer.adoptions != self._second[0]:
            groups = [group for group in reducer.groups if group.memory.needs_second]
            self._second = reducer.adoptions, {id(self._parameters[name]) for group in groups for name in group.spans}
        return set() if reducer.direct else ids_of(optimizer) & self._second[1] & self._mine.keys()

    def _arrived(self, optimizer: Optimizer) -> Iterator[OfGroup]:
        """Find the averages that an optimizer is about to apply for the first time."""
        waiting, delivered, names = self._reducer.record.waiting(optimizer), self._reducer.record.delivered, self._mine
        for settings in optimizer.param_groups:
            named = [(p, names.get(id(p), "")) for p in settings["params"] if p.grad is not None]
            yield (
                settings,
                [Arrived(p, name, self._group_of(name), delivered.get(name)) for p, name in named if name in waiting],
            )

    def _group_of(self, name: str) -> GroupReducer | None:
        """Return the group whose averages are stepped here, given the name of a parameter; None: torch steps it."""
        group = None if self._reducer.direct else self._reducer.group_of.get(name)
        return None if group is None or group.always_whole else group

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise a ValueError for optimizers that do not go with the memory; warn where that may be."""
        # Where nobody has told processes their ranks, each of them counts as rank zero and would warn.
        with warnings.catch_warnings(action="ignore") if self._reducer.rank else nullcontext():
            for optimizer in optimizers:
                check_pair(self._reducer.settings.memory_in_use, optimizer)
        if self._reducer.settings.lr_aware:
            self._reducer.rates.follow(optimizers)

    def bind(self, optimizers: Optimizer | Iterable[Optimizer]) -> None:
        """See :meth:`.Engine.bind`."""
        reducer = self._reducer
        # Lightning has an optimizer of nothing where configure_optimizers returns None.
        chosen = [optimizer for optimizer in listed(optimizers) if reducer.record.hold(optimizer)]
        self.suit(chosen)
        self._check(chosen)
        self.optimizers = chosen
        for key in reducer.clipping.in_place.keys() - set(map(id, chosen)):
            reducer.clipping.stop_in_place(key)
        for optimizer in chosen:
            self._spends(stepping(optimizer))
        self._clip_as_before()

    @property
    def in_use(self) -> list[Optimizer]:
        """The optimizers that were bound; else those that have stepped parameters last, in the order of these."""
        seen = [self._stepped_by[name]() for name in self._parameters if name in self._stepped_by]
        return self.optimizers or list({id(one): one for one in seen if one is not None}.values())

    def begin_step(self) -> None:
        """Choose the memory by optimizers as they are now; where none is bound, by those of this package.

        Second moments of groups that are new go on from those of the optimizers, where they know none.
        """
        self._alone = None
        reducer, (adoptions, _) = self._reducer, self._read
        for optimizer in self.optimizers:
            if id(optimizer) in reducer.clipping.limits:
                reducer.clipping.follow(id(optimizer), reducer.record.hold(optimizer))
        optimizers = self.optimizers or made_for({id(p) for p in self._parameters.values()})
        decays = decays_of(optimizers)
        if (reducer.adoptions, decays) != self._read or not self.optimizers:
            self.suit(optimizers, begins=True)
        self._read = reducer.adoptions, decays
        if reducer.adoptions != adoptions:
            settings = reducer.settings
            chosen = {"memory for the optimizers": settings.memory_in_use, "exchange": settings.exchange_in_use}
            for network in reversed(reducer.networks):
                check_equal_on_ranks(chosen, network, reducer.device)
            with reducer.record.changing(), reducer.on_stream.between_steps():
                go_on_from_dense(reducer, [optimizer for optimizer in optimizers if self.takes(optimizer)])

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
        if not self._chooses or not any(group.sparsified for group in self._reducer.groups):  # for a while, maybe
            return
        sparsified = self._sparsified
        warn = partial(self._once, rank_zero_warn, kind="several settings")
        memory: Memory = AdamRule.memory(optimizers, sparsified, warn) or Residual()
        now = self._reducer.settings.memory_in_use
        if memory.needs_second and now.needs_second:
            if begins and memory != now:
                self._reducer.adapt(memory)
        elif memory != now:
            before, settings = self._reducer.settings.exchange_in_use, self._with(memory)
            self._reducer.remember_by(settings)
            if memory.needs_second:
                name, other = EXCHANGES.name_of(before), EXCHANGES.name_of(settings.exchange_in_use)
                if name != other:
                    self._once(
                        say,
                        f"The exchange {other!r} takes the place of {name!r}, which cannot carry Adam's second moments "
                        f"({page('adam')}): exchange={other!r} chooses it without this line, and exchange={name!r} "
                        "keeps the other and leaves steps to the optimizer.",
                    )
                self._once(
                    say,
                    "Adam's steps for parameters that are sparsified are taken with the second moments of all ranks' "
                    f"own gradients and without a first moment, at the optimizer's learning rate ({page('adam')}). "
                    "memory='residual' leaves them to the optimizer.",
                )

    @property
    def _chooses(self) -> bool:
        """True if the memory follows from optimizers."""
        return self.left_open and (self._open_exchange or self._reducer.settings.exchange_in_use.carries_second)

    def _with(self, memory: Memory) -> SparsificationConfig:
        """Return settings with a memory, and with an exchange that suits it, where that was left open."""
        settings = self._reducer.settings
        chosen = None if self._open_exchange else settings.exchange
        return replace(settings, memory=memory, exchange=as_exchange(chosen, settings.sparsifier, memory))

    @property
    def _sparsified(self) -> set[int]:
        """Ids of the parameters that are not always sent as a whole."""
        return {id(self._parameters[name]) for name in self._reducer.sparsified}

    def _spends(self, optimizer: Optimizer) -> bool:
        """Return True if momentum of an optimizer is spent as if averages had not waited; tell the user once."""
        if not has_velocities(optimizer, self._sparsified):
            return False
        memory = self._reducer.settings.memory_in_use
        keeps_gradients = not isinstance(memory, NoMemory) and memory.averages == "gradients"
        plain = not self.left_open and memory == Residual()  # by choice
        if not keeps_gradients or plain:
            return False
        if not self.left_open:
            self._once(
                say,
                f"SGD's momentum is left to the optimizer, because memory={memory!r} was chosen: averages that have "
                f"waited are spent late. With the default memory they are not ({page('momentum')}).",
            )
            return False
        if self.optimizers and not any(optimizer is stepping(each) for each in self.optimizers):
            self._once(
                rank_zero_warn,
                "An SGD with momentum that the engine was not shown, or that another optimizer has replaced, steps "
                f"parameters that are sparsified: averages that have waited are spent late ({page('momentum')}). Show "
                "the engine the optimizers that step now: with Fabric fabric.setup_optimizers, elsewhere "
                "engine.bind([...]).",
            )
            return False
        if memory.needs_second:  # an Adam's, which holds other parameters now
            return False
        self._once(say, SPENT)
        return True

    def settings_for(self, state: Mapping[str, Any]) -> SparsificationConfig:
        """Return settings with the memory of a state, where nothing else says which one is meant."""
        settings, memory = self._reducer.settings, second_moment_in(state["settings"])
        decided = self.optimizers and self._reducer.sparsified and not settings.memory_in_use.needs_second
        refused = self._open_exchange and settings.sparsifier.is_its_exchange
        if memory is None or memory == settings.memory_in_use or decided or refused or not self._chooses:
            return settings
        return self._with(memory)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Follow a state that was loaded: what has waited is what it remembers."""
        self._saved_clippings = list(state["clippings"])
        self._momentum.go_on({name for name, vectors in state["parameters"].items() if "residual" in vectors})
        self._reducer.lengths.load(state["squares"])
        self._clip_as_before()

    def clip(self, limit: float, algorithm: str, optimizer: Optimizer | None, in_place: bool = False) -> None:
        """See :meth:`.Engine.clip_gradients`; ``in_place``: of clipping averages."""
        if in_place:
            self._once(
                say,
                "Each rank's own gradients are clipped before they wait, and not their averages, to sqrt(n) times the "
                f"limit ({page('training')}). memory='residual' leaves clipping to averages.",
            )
        held = self._parameters.keys() if optimizer is None else self._reducer.record.hold(optimizer)
        key, clipping = None if optimizer is None else id(optimizer), self._reducer.clipping
        bound = set(map(id, self.optimizers))
        replaced = clipping.limits.keys() - {None, *bound} if key in bound else frozenset()
        clipping.set(Limit(Clipping(limit, algorithm), held, in_place), key, replaced)

    def clip_in_place_of_averages(
        self, limit: float, algorithm: str, optimizer: Optimizer, known: bool = False
    ) -> bool:
        """Clip each rank's gradients, from the next step on, in place of the averages that an optimizer applies.

        This serves Adam if the engine takes its steps, and with the default memory ``torch.optim.SGD`` (with momentum
        by norm only), as long as something is sparsified; nothing is done for other optimizers. It ends when the
        optimizer applies averages for which this was not called. All ranks must call this.

        Args:
            limit: as in :meth:`.Engine.clip_gradients`; 0 or infinite: nothing is clipped any more.
            algorithm: "norm" or "value".
            optimizer: that is about to step.
            known: whether this is before the first step. Later, nothing is begun for SGD.

        Returns:
            True if the gradients of the latest averages were clipped already: do not clip these averages.
        """
        reducer, key = self._reducer, id(optimizer)
        begun = key in reducer.clipping.in_place
        if not 0 < limit < math.inf:
            reducer.clipping.stop_in_place(key)
            return False
        if not begun and (reducer.direct or not self._suits_clipping(optimizer, algorithm, known)):
            return False
        self.clip(limit, algorithm, optimizer, in_place=True)
        reducer.clipping.asked.add(key)
        return not reducer.direct and not reducer.clipping.acting.isdisjoint(reducer.record.hold(optimizer))

    def _clip_as_before(self) -> None:
        """Clip what a state says was clipped, from the first step on: nobody asks before it is over."""
        for optimizer in self.optimizers:
            held = self._reducer.record.hold(optimizer)
            for saved in [one for one in self._saved_clippings if not held.isdisjoint(one["parameters"])]:
                self._saved_clippings.remove(saved)
                if self._suits_clipping(optimizer, saved["algorithm"], known=True):
                    self.clip(saved["limit"], saved["algorithm"], optimizer, in_place=True)

    def _suits_clipping(self, optimizer: Optimizer, algorithm: str, known: bool) -> bool:
        """Return True if an optimizer's gradients are clipped before they wait, where nothing else was chosen."""
        if self.takes(optimizer):
            return True
        # Gradients of the first step that are not clipped would wait, and move parameters without any limit later. Of
        # parameters that are cut over ranks, each rank sees a part.
        sparsified = self._sparsified
        if not known or not self.left_open or self._reducer.settings.memory_in_use.needs_second:
            return False
        if algorithm == "value":
            return type(optimizer) is SGD and holds(optimizer, sparsified)
        return has_velocities(optimizer, sparsified)  # without, clipping norms of averages was measured to be better

    def close(self) -> None:
        """Leave optimizers alone; warn if they have stepped alone until now, unless an error is the news."""
        self.forget()
        if (steps := max((self._alone or {}).values(), default=0)) and sys.exc_info()[0] is None:
            self._once(rank_zero_warn, ALONE.format("1 step" if steps == 1 else f"{steps} steps"), kind="alone")
        self._adam.close()
        _bindings[:] = [known for known in _bindings if known() is not self]

    def _warn_of_changes(self, sentence: str) -> None:
        """Warn of averages that were changed between backward and step, but for clipping that the engine takes over."""
        if not self._reducer.clipping.takes_over:
            self._once(rank_zero_warn, sentence, kind="changed averages")

    def _once(self, tell: Callable[[str], None], sentence: str, kind: str | None = None) -> None:
        """Tell the user on rank zero, which is one rank also where nobody has told processes their ranks.

        Args:
            tell: says or warns.
            sentence: to say.
            kind: of sentences of which one is said; None: of this one.
        """
        if self._reducer.rank == 0 and (kind or sentence) not in self._told:
            self._told.add(kind or sentence)
            tell(sentence)


def steps_for_a_scaler() -> bool:
    """Return True while an enabled ``GradScaler`` lets an optimizer step.

    Nothing on an optimizer that is not fused tells of its scaler, but the scaler's method is among the callers.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not GradScaler.step.__code__:
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


@contextmanager
def uninterrupted() -> Iterator[Hold]:
    """Hold back signals while optimizers step in this context, but not while their closures run.

    Signals are delivered when the context ends, which may be later than the step. Of optimizers without torch's hooks,
    only signals that the caller holds back are held.

    Yields:
        The :class:`Hold`, so that the caller can start it earlier.
    """
    _register_hooks()
    hold = Hold()
    _holds.append(hold)
    try:
        yield hold
    finally:
        _holds.remove(hold)
        hold.end()


def holding() -> list[Hold]:
    """Return what holds back signals while optimizers step, in contexts of :func:`uninterrupted`."""
    return _holds


def in_life() -> list[OptimizerBinding]:
    """Return the bindings of engines that are not closed, in the order in which they came."""
    return [binding for known in list(_bindings) if (binding := known()) is not None]


@cache
def _register_hooks() -> None:
    """Register them once, for all engines: torch goes through hooks when a step begins, before a closure makes others.

    Where an optimizer's step is compiled, they are not.
    """
    register_optimizer_step_pre_hook(torch.compiler.disable(_come_last))  # type: ignore[no-untyped-call]
    register_optimizer_step_post_hook(torch.compiler.disable(_end))  # type: ignore[no-untyped-call]


def _come_last(optimizer: Optimizer, *_: Any) -> None:
    """Put :func:`_begin` behind an optimizer's own hooks, which clip gradients or add noise to them.

    torch asks for the optimizer's own hooks when it has gone through those of all optimizers.
    """
    hooks = optimizer._optimizer_step_pre_hooks
    if next(reversed(hooks.values()), None) is not _last:
        if (handle := _handles.get(optimizer)) is not None:
            handle.remove()
        _handles[optimizer] = optimizer.register_step_pre_hook(_last)


def _begin(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let bindings act, at once or behind a closure that forms the gradients within the step."""
    for each in in_life():
        each.forget()
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # some optimizers take something else
        _before(optimizer)
        return None
    calls = 0

    def then_go_on() -> Any:
        nonlocal calls
        for hold in _holds:
            hold.end()
        result = closure()
        calls += 1
        for each in in_life():
            each.check_closure(optimizer, calls)
        _before(optimizer)
        return result

    if len(args) > 1:
        return (args[0], then_go_on, *args[2:]), kwargs
    return args, {**kwargs, "closure": then_go_on}


_last: Any = torch.compiler.disable(_begin)  # type: ignore[no-untyped-call]
_handles: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()


def _before(optimizer: Optimizer) -> None:
    every = in_life()
    for each in every:
        if each.exchanges:  # signals are heard while ranks wait for each other
            each.before(optimizer)
    for hold in _holds:
        hold.start()
    for each in every:
        if not each.exchanges:
            each.before(optimizer)


def _end(optimizer: Optimizer, *_: Any) -> None:
    for each in in_life():
        each.after(optimizer)
