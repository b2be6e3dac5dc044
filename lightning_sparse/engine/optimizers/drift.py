"""The rule of weights that drift: each rank steps its own at a longer rate; the engine averages behind the step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_sparse.core.layout import flat_as
from lightning_sparse.engine.optimizers.kinds import ids_of, is_adam, is_called, is_in_parts, needs_closure, stepping
from lightning_sparse.engine.step import Stepper
from lightning_sparse.methods.memory import Drift

COUPLED = "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
"""torch's optimizers whose weight decay is added to gradients, unless they say otherwise."""
PLAIN = {
    "params",
    "param_names",
    "initial_lr",
    "lr",
    "weight_decay",
    "maximize",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}
"""Settings of steps that are linear in gradients."""
MEASURED = {
    "lion": (
        Drift(),
        "With four ranks at density 0.01 and rates searched, a small GPT ended at a perplexity 4.2 % above that of "
        "dense training, an LSTM 3.6 %",
    ),
    "muon": (
        Drift(longer="averages"),
        "With four ranks at density 0.01 and rates searched, a small GPT ended at a perplexity 14 % above that of "
        "dense training, an LSTM 6 %, and 1.7 % in a long training that began with a higher density",
    ),
    "adafactor": (
        Drift(),
        "With four ranks at density 0.01 and rates searched, an LSTM ended at a perplexity 16 % below that of dense "
        "training with PyTorch's Adafactor",
    ),
}
"""By part of the class's name: the memory, and how far behind dense training it ended."""


def measured(optimizer: Optimizer) -> tuple[Drift, str]:
    """Return the memory for copies that an optimizer steps, and what is known of it; empty: nothing."""
    return next((known for word, known in MEASURED.items() if is_called(word, optimizer)), (Drift(), ""))


def misfit(optimizer: Optimizer) -> str:
    """Say why ranks cannot step copies of the weights by an optimizer; empty: they can."""
    inner = stepping(optimizer)
    name = type(inner).__name__
    if is_in_parts(*type(optimizer).__mro__):
        return f"{type(optimizer).__name__} steps a part of the parameters on each rank"
    if needs_closure(inner):
        return f"the step of {name} evaluates the loss, which differs between ranks"
    held = vars(inner)
    if not isinstance(held.get("param_groups"), list) or any(map(_has_optimizer, held.values())):
        return f"{name} is made of several optimizers"
    if callable(getattr(inner, "eval", None)) and callable(getattr(inner, "train", None)):
        return f"{name} has other weights for evaluation"
    if any({"d0", "d_coef"} & group.keys() for group in inner.param_groups):
        return f"{name} finds its rate by itself, of all parameters together"
    rates = [group.get("lr") for group in inner.param_groups]
    if not all(isinstance(rate, (int, float, Tensor)) and not isinstance(rate, bool) for rate in rates):
        return f"a learning rate of {name} is no number, so that it cannot be made longer"
    return ""


def _has_optimizer(value: Any) -> bool:
    several = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
    return any(isinstance(one, Optimizer) for one in several)


def wanted(optimizer: Optimizer) -> bool:
    """Return True if the default memory of an optimizer is copies: no other rule serves it.

    An optimizer that has nothing but a rate and a decay is taken for one that is linear in gradients.
    """
    inner = stepping(optimizer)
    settings = inner.defaults.keys() | {key for group in inner.param_groups for key in group}
    served = _is_linear(inner) or isinstance(inner, torch.optim.ASGD) or is_adam(type(inner)) or not (settings - PLAIN)
    return not served and not misfit(optimizer)


def tensors_of(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors in what an optimizer keeps of a parameter, with paths such as ``factors.0``."""
    if isinstance(state, Tensor):
        yield path, state
        return
    parts: Any = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list) else ()
    for key, part in parts:
        yield from tensors_of(part, f"{path}.{key}" if path else str(key))


class DriftRule:
    """Lets an optimizer step this rank's own weights.

    Args:
        stepper: exchanges weights behind the step.
    """

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._undo: list[Callable[[bool], None]] = []
        self._watched: WeakSet[Optimizer] = WeakSet()
        self._hooks: list[RemovableHandle] = []
        """On these."""
        self._loaded: Mapping[str, Mapping[str, Tensor]] = {}
        """What an optimizer of this rank kept of parameters when a state was saved, by name."""

    @property
    def waiting(self) -> dict[str, dict[str, Tensor]]:
        """What was loaded and optimizers have not been given yet, by name of the parameter."""
        return {name: dict(each) for name, each in self._loaded.items()}

    def own_states(self, optimizers: Iterable[Optimizer], parked: Mapping[int, str]) -> dict[str, dict[str, Tensor]]:
        """Return copies of what optimizers keep of parameters that drift: it differs between ranks.

        Args:
            optimizers: that are known.
            parked: names of those that are frozen now, by id.
        """
        found, group_of = self.waiting, self._stepper.group_of
        names = {key: name for key, name in self._stepper.names.items() if group_of[name].drifts} | dict(parked)
        for optimizer in map(stepping, optimizers):
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter))
                if name is not None and name not in self._loaded:
                    tensors = ((path, x) for path, x in tensors_of(state) if type(x) is Tensor)  # files take no others
                    found[name] = {path: x.detach().to("cpu", copy=True) for path, x in tensors}
        return found

    @torch.no_grad()
    def meet(self, optimizers: Iterable[Optimizer]) -> None:
        """Let optimizers keep the means over ranks of floats, and of all else what rank 0 has; collective."""
        stepper, kept = self._stepper, dict[str, Mapping[Any, Any]]()
        for optimizer in map(stepping, optimizers):
            kept |= {stepper.names[id(p)]: state for p, state in optimizer.state.items() if id(p) in stepper.names}
        moving = (name for name in stepper.parameters if name in kept and stepper.group_of[name].drifts)
        mine = {(name, path): x for name in moving for path, x in tensors_of(kept[name])}
        shapes = {key: (tuple(x.shape), str(x.dtype)) for key, x in mine.items()}
        theirs = stepper.comm.all_gather_object(shapes, stepper.device)
        for key, x in mine.items():
            if all(each.get(key) == shapes[key] for each in theirs):  # else a rank has not stepped it yet
                there = x.to(stepper.device)
                if x.is_floating_point():
                    x.copy_(stepper.comm.all_reduce(there.double()) / stepper.comm.world_size)
                else:
                    x.copy_(stepper.comm.broadcast(there.clone(), 0))

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give an optimizer its own state when it steps next: until then users may load that of rank 0."""
        self._loaded = {name: dict(each) for name, each in states.items()}

    def _restore(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        for parameter, state in optimizer.state.items():
            for path, x in tensors_of(state):
                kept = self._loaded.get(names.get(id(parameter), ""), {}).get(path)
                if kept is not None and kept.shape == x.shape and kept.dtype == x.dtype:
                    x.copy_(kept)
        held = {names.get(key) for key in ids_of(optimizer)}
        self._loaded = {name: each for name, each in self._loaded.items() if name not in held}

    def before(self, optimizer: Optimizer, names: Mapping[int, str], moving: Set[str], scale: Tensor | None) -> None:
        """Note gradients, and lengthen the rates of what moves.

        Args:
            optimizer: not one around it.
            names: of the engine's parameters, by id.
            moving: names of those that this rank steps by itself.
            scale: () of the loss, which gradients still have; None: none.
        """
        if not moving:
            return
        if self._loaded:
            self._restore(optimizer, names)
        if optimizer not in self._watched:  # after a step that has failed, its rates are still longer
            self._watched.add(optimizer)
            rule = ref(self)
            saving = optimizer.register_state_dict_pre_hook(lambda _: None if (one := rule()) is None else one.after())
            handle = optimizer.register_step_post_hook(lambda *_: None if (one := rule()) is None else one.after())
            optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            self._hooks += saving, handle
        self._stepper.copies.begin_step()
        stepper, factors = self._stepper, dict[str, tuple[float, float]]()
        with stepper.record.changing():
            for group in (group for group in stepper.groups if not moving.isdisjoint(group.spans)):
                if (memory := group.drift) is None:
                    continue
                factor = 1.0 if _is_linear(optimizer) else memory.factor(group.state.memory, stepper.comm.world_size)
                for name, span in group.spans.items():
                    factors[name] = factor if memory.longer == "steps" else 1.0, factor
                    if name in moving and (grad := stepper.parameters[name].grad) is not None:
                        memory.push_(group.state.memory, span, flat_as(grad, stepper.parameters[name]), scale)
        for settings in list(optimizer.param_groups):
            by: dict[tuple[float, float], list[Tensor]] = {}
            for p in settings["params"]:
                name = names.get(id(p), "")
                by.setdefault(factors[name] if name in moving else (1.0, 1.0), []).append(p)
            self._lengthen(optimizer, settings, by)

    def _lengthen(
        self, optimizer: Optimizer, settings: dict[str, Any], by: Mapping[tuple[float, float], list[Tensor]]
    ) -> None:
        """Give parameters of a group other rates, given these by factors of rate and of decay."""
        groups = [settings, *({k: _copied(x) for k, x in settings.items()} for _ in list(by)[1:])]
        whole = settings["params"]
        for one, (factors, parameters) in zip(groups, by.items(), strict=False):
            one["params"] = whole if len(by) == 1 else parameters
            self._scale(one, *factors, _decouples(optimizer, settings))
        optimizer.param_groups += groups[1:]

        def undo(failed: bool) -> None:
            optimizer.param_groups[:] = [one for one in optimizer.param_groups if all(one is not g for g in groups[1:])]
            settings["params"] = whole

        if len(groups) > 1:
            self._undo.append(undo)

    def _scale(self, settings: dict[str, Any], rate: float, decay: float, decouples: bool) -> None:
        for key, factor in (("lr", rate), ("weight_decay", 1 / decay if decouples else 1.0)):
            if factor != 1.0 and key in settings:
                self._undo.append(_scaled(settings, key, factor))

    def close(self) -> None:
        """Leave optimizers alone."""
        self.after(failed=True)
        for hook in self._hooks:
            hook.remove()

    def after(self, failed: bool = False) -> None:
        """Give optimizers their rates again: a step has ended, or has failed; then rates may be others meanwhile."""
        undo, self._undo = self._undo, []
        for each in reversed(undo):
            each(failed)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor that an optimizer may change, such as a count of steps."""
    return value.clone() if isinstance(value, Tensor) else value


def _scaled(settings: dict[str, Any], key: str, factor: float) -> Callable[[bool], None]:
    """Multiply a setting; return what undoes that, also where the optimizer has changed it meanwhile."""
    before = settings[key]
    settings[key] = now = before * factor

    def undo(failed: bool) -> None:
        if settings[key] is now:
            settings[key] = before
        elif not failed:  # the optimizer has changed it
            settings[key] = settings[key] / factor

    return undo


def _is_linear(optimizer: Optimizer) -> bool:
    """Return whether steps are linear in gradients: SGD of torch or another package, such as FusedSGD and SGD8bit."""
    names = (re.sub(r"^fused|\d+bit$", "", kind.__name__.lower()) for kind in type(optimizer).__mro__)
    return isinstance(optimizer, SGD) or "sgd" in names


def _decouples(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    """Return whether weight decay acts on weights beside the step: it does in all but some of torch's optimizers."""
    for key in ("decoupled_weight_decay", "weight_decouple", "decouple", "decoupled"):
        if isinstance(given := settings.get(key), bool):
            return given
    kind = type(optimizer)
    coupled = kind.__module__.startswith("torch.optim") and kind.__name__ in (*COUPLED, "Adam")
    return not coupled
