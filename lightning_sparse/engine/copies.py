"""Weights that drift apart between ranks: those that all agree on are the model, for everybody but the training step.

The agreed weights are what ``state_dict()`` of a model returns, and what its parameters hold within :meth:`agreed` and
when the engine is closed. Somebody else may write to weights: fingerprints tell.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from lightning_sparse.core.layout import flattened, own, shaped
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.regrouping import Groups
from lightning_sparse.ops.fingerprint import fingerprint, same

WITHIN = (
    "A backward or a step was taken within engine.agreed(), where parameters hold the weights that all ranks agree on. "
    "Train outside of it, on each rank's own."
)


class Copies:
    """Holds this rank's own weights aside where others are looked at.

    Args:
        groups: of the engine.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._adopted = -1
        self._found: dict[str, GroupReducer] = {}
        self._model: Callable[[], Module | None] = lambda: None
        self._fingerprints: dict[str, Tensor] = {}
        """Fingerprints of each parameter, when the engine has written to it last."""
        self.aside: dict[str, Tensor] = {}
        """Flat weights of this rank, of the parameters that hold those that all agree on."""
        self._shown: dict[str, Tensor] = {}
        """Fingerprints of these parameters."""
        self._given: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        """Agreed weights that somebody has, by name: parameters that modules share are one tensor there, too."""
        self._given_at = -1, -1
        self._hooks: list[Any] = []
        self.shown = False
        """True while parameters hold the agreed weights."""
        self._moves = self._closed = False
        """True while an optimizer moves this rank's weights; true in the end."""

    @property
    def _drifting(self) -> Mapping[str, GroupReducer]:
        """The group of each parameter that drifts, by name."""
        groups = self._groups
        if self._adopted != groups.adoptions:
            self._adopted = groups.adoptions
            self._found = {name: group for group in groups.groups if group.drifts for name in group.spans}
            # What somebody has written to before groups changed is still to be noticed.
            self._fingerprints = {
                name: self._fingerprints[name] if name in self._fingerprints else self._fingerprint(name)
                for name in self._found
            }
            if self._found and not self._hooks and (model := self._model()) is not None:
                self._put_hooks(model)
        return self._found

    def __bool__(self) -> bool:
        """Return True if any weights drift."""
        return bool(self._drifting)

    def adopted(self) -> None:
        """Look at the weights of groups that are new."""
        self._drifting  # noqa: B018

    def begin_step(self) -> None:
        """Note that an optimizer is about to move weights: until :meth:`note`, nobody else does."""
        self._moves = True

    def note(self, names: Set[str] | None = None) -> None:
        """Take the weights as they are for those that the engine has written.

        Args:
            names: of those that it has moved; None: all. What others hold, somebody may have written.
        """
        self._moves = False
        moved = self._drifting if names is None else self._drifting.keys() & names
        self._fingerprints |= {name: self._fingerprint(name) for name in moved}

    def _fingerprint(self, name: str) -> Tensor:
        return fingerprint(flattened(self._groups.parameters[name]))

    def changed(self) -> list[str]:
        """Return the parameters that somebody else has written to; waits for the device."""
        if not self._drifting or self.shown or self._moves:
            return []
        before, now = self._fingerprints, {name: self._fingerprint(name) for name in self._drifting}
        alike = torch.stack([same(now[name], before[name]) for name in now]).tolist()
        return [name for name, one in zip(now, alike, strict=True) if not one]

    def check_apart(self) -> None:
        """Raise where parameters do not hold this rank's own weights.

        Raises:
            RuntimeError: within :meth:`agreed`.
        """
        if self.shown:
            raise RuntimeError(WITHIN)

    def of(self, name: str) -> Tensor:
        """Return a copy of the weights that all agree on, in the parameter's shape and dtype."""
        parameter = own(self._groups.parameters[name])
        return shaped(self.common(name).to(parameter.dtype, copy=True), parameter)

    def common(self, name: str) -> Tensor:
        """Return the flat weights that are equal on all ranks: the parameter's own, unless it drifts."""
        group = self._drifting.get(name)
        if group is None:
            return flattened(own(self._groups.parameters[name]))
        agreed: Tensor = group.state.memory.agreed[group.spans[name]]
        return agreed

    def mine(self, name: str) -> Tensor:
        """Return the flat weights of this rank, a view."""
        found = self.aside.get(name)
        return flattened(self._groups.parameters[name]) if found is None else found

    @torch.no_grad()
    def show(self) -> None:
        """Let parameters hold the agreed weights, but for those that somebody else has written to since the last step.

        Until :meth:`back`.
        """
        left, before, self.shown = set(self.changed()), self.shown, bool(self._drifting)
        for name in self._drifting if not before else ():
            if name not in left:
                flat = flattened(self._groups.parameters[name])
                self.aside[name] = flat.clone()
                flat.copy_(self.common(name))
                self._shown[name] = self._fingerprint(name)

    @torch.no_grad()
    def back(self) -> None:
        """Let parameters hold this rank's own weights again, but for those that somebody has written to meanwhile."""
        if self._closed:
            return
        aside, self.aside, self.shown = self.aside, {}, False
        shown, self._shown = self._shown, {}
        for name, mine in aside.items():
            if bool(same(self._fingerprint(name), shown[name])):
                flattened(self._groups.parameters[name]).copy_(mine)

    @torch.no_grad()
    def take(self, copies: Mapping[str, Tensor | None]) -> None:
        """Go on with the copies of a state; what it has none of goes on from the agreed weights."""
        for name in self._drifting:
            copy = copies.get(name)
            flat = flattened(self._groups.parameters[name])
            flat.copy_(self.common(name) if copy is None or len(copy) != len(flat) else copy)
        self.note()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let parameters hold the agreed weights within the block."""
        inner = self.shown
        self.show()
        try:
            yield
        finally:
            if not inner:
                self.back()

    def hand_out(self, name: str) -> Tensor | None:
        """Return a copy of the agreed weights for a state dict; None: a parameter holds what it should."""
        if name not in self._drifting or self.shown:
            return None
        if not self._moves and not bool(same(self._fingerprint(name), self._fingerprints[name])):
            return None
        agreed = self.of(name)
        if torch.equal(agreed, own(self._groups.parameters[name])):  # so that what is written there counts
            return None
        if self._given_at != (now := (self._groups.record.counts.number, self._groups.adoptions)):
            self._given.clear()
            self._given_at = now
        return self._given.setdefault(name, agreed)

    def watch(self, model: Module) -> None:
        """Let state dicts of a model have the agreed weights, from when weights drift on."""
        self._model = weakref.ref(model)

    def _put_hooks(self, model: Module) -> None:
        for module in model.modules():
            held = [p for p in module._parameters.values() if p is not None and id(p) in self._groups.names]
            if held:
                register: Any = module.register_state_dict_post_hook
                self._hooks.append(register(_put_agreed))
            for p in held:
                _known[id(p)] = self

    def close(self) -> None:
        """Leave the agreed weights in the parameters; :attr:`aside` still has this rank's own."""
        self.show()
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


_known: weakref.WeakValueDictionary[int, Copies] = weakref.WeakValueDictionary()
"""By the id of each parameter, the latest that watches it."""


def _put_agreed(module: Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replace weights that drift in a state dict: torch calls this, also where the module was pickled or copied."""
    for name, p in module._parameters.items():
        copies, key = _known.get(id(p)), prefix + name
        if p is None or copies is None or state.get(key) is p or key not in state:
            continue
        groups = copies._groups
        of = groups.names.get(id(p))
        if of is not None and groups.parameters[of] is p and (agreed := copies.hand_out(of)) is not None:
            state[key] = agreed
