"""The only list of the library's settings, and how functions accept them as keywords.

Strategies, :func:`~lightning_sparse.attach`, checkpoints, the agreement between ranks and a logger's config take it as
it is: a new setting is one field here, and what uses it.

``attach`` and the strategies accept the same settings, and each has a few arguments of its own. Written as signatures,
the settings would stand in three places and in as many docstrings. Here they are the fields of a dataclass, and
:func:`keywords_of` gives a function the signature of its constructor: by ``ParamSpec`` for mypy and Pyright, which then
complete names and refuse misspelt ones, and as ``__signature__`` and docstring for ``help()``, IPython and
jsonargparse. The alternatives are worse: a ``TypedDict`` to unpack is a second list; a stub file has to be generated
and kept; editors know nothing of ``**settings`` alone.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from lightning_sparse.core.checks import Settings, check_flag, check_integer, expect, is_integer, is_number, plain
from lightning_sparse.methods.density import Constant, DensitySchedule, as_schedule
from lightning_sparse.methods.exchanges import Exchange, as_exchange
from lightning_sparse.methods.grouping import GROUPINGS, Grouping, Rules, as_rules
from lightning_sparse.methods.memory import Memory, Residual, as_memory
from lightning_sparse.methods.sparsifiers import SPARSIFIERS, Sparsifier

Accepted = TypeVar("Accepted")
Kept = TypeVar("Kept")
Keywords = ParamSpec("Keywords")
First = TypeVar("First")
Result = TypeVar("Result")
Made = TypeVar("Made")
Resize = Literal["merge", "flush", "zero"]


class Resolved(Generic[Accepted, Kept]):
    """A dataclass field that accepts more than it keeps, such as a name for an object.

    Type checkers see ``Accepted`` in the constructor and ``Kept`` in the attribute; see *descriptor-typed fields* in
    Python's documentation of dataclasses.

    Args:
        default: default of the field, as a caller would write it.
        resolve: converts an accepted value to the kept one, and must accept kept values, too, for
            ``dataclasses.replace``; None: left to ``__post_init__``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Point:
        ...     x: Resolved[int | str, int] = Resolved("7", int)
        >>> Point(), Point("8").x
        (Point(x=7), 8)
    """

    def __init__(self, default: Accepted, resolve: Callable[[Accepted], Kept] | None = None) -> None:
        self._default = default
        self._resolve = resolve
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Accepted: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Kept: ...
    def __get__(self, instance: object | None, owner: type) -> Accepted | Kept:
        """Return the value; for the class, the default, which a dataclass looks up there."""
        return self._default if instance is None else vars(instance)[self._name]

    def __set__(self, instance: object, value: Accepted) -> None:
        vars(instance)[self._name] = value if self._resolve is None else self._resolve(value)


def keywords_of(
    dataclass: Callable[Keywords, Any],
) -> Callable[[Callable[Concatenate[First, ...], Result]], Callable[Concatenate[First, Keywords], Result]]:
    """Decorate a function ``f(first, /, **keywords)``: its keywords are the fields of a dataclass.

    The function passes its keywords to :func:`from_keywords`. Its docstring gets the fields as ``Args``.

    Args:
        dataclass: dataclass with keyword-only fields.
    """
    return with_keywords_of(dataclass)


def with_keywords_of(dataclass: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorate a function as :func:`keywords_of` does, after any number of arguments that are no keywords.

    Type checkers complete the keywords of :func:`keywords_of` only, which knows one argument before them.
    """

    def decorate(function: Any) -> Any:
        own = inspect.signature(function)
        named = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        before = [p for p in own.parameters.values() if p.kind in named]
        function.__signature__ = own.replace(parameters=[*before, *_parameters(dataclass)])
        text = function.__doc__ or "The keywords are those of a dataclass."
        function.__doc__ = _with_arguments(text, dataclass)
        return function

    return decorate


def documented(dataclass: type[Made]) -> type[Made]:
    """Decorate a dataclass: ``help()`` shows the types that its constructor accepts, and its fields' docstrings."""
    init: Any = dataclass.__init__
    own = inspect.signature(init)
    init.__signature__ = own.replace(parameters=[own.parameters["self"], *_parameters(dataclass)])
    dataclass.__doc__ = _with_arguments(dataclass.__doc__ or "", dataclass)
    return dataclass


def _parameters(dataclass: Any) -> list[inspect.Parameter]:
    """Return the parameters of the constructor, with the types that it accepts."""
    accepted = hints_of(dataclass)
    return [p.replace(annotation=accepted[p.name]) for p in inspect.signature(dataclass).parameters.values()]


def _with_arguments(text: str, dataclass: Any) -> str:
    """Return a docstring with the fields of a dataclass as ``Args``, before its other sections."""
    told = docstrings_of(dataclass)
    names = inspect.signature(dataclass).parameters
    lines = [f"    {name}: {textwrap.indent(told.get(name, ''), ' ' * 8).strip()}" for name in names]
    text = inspect.cleandoc(text)
    section = re.search(r"^(Returns|Raises|Example|References):$", text, flags=re.MULTILINE)
    start = section.start() if section else len(text)
    return "\n".join([text[:start].rstrip(), "", "Args:", *lines, "", text[start:]]).rstrip()


def from_keywords(dataclass: Callable[..., Made], keywords: Mapping[str, Any], who: str, note: str = "") -> Made:
    """Make a dataclass from the keywords that a function was called with.

    Args:
        dataclass: the dataclass that was given to :func:`keywords_of`.
        keywords: values by name.
        who: name of the function that was called, for the message.
        note: end of the message.

    Raises:
        TypeError: for an unknown name; the message has the closest known one.
    """
    known = list(inspect.signature(dataclass).parameters)
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"{who} does not know the keyword {name!r}.{hint} It knows {', '.join(known)}.{note}")
    return dataclass(**keywords)


@cache  # evaluating annotations takes 4 ms, most of what making settings takes
def hints_of(dataclass: Any) -> Mapping[str, Any]:
    """Return the types that the constructor accepts, by field."""
    hints = get_type_hints(dataclass)
    return {name: get_args(hint)[0] if get_origin(hint) is Resolved else hint for name, hint in hints.items()}


def docstrings_of(dataclass: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its bases; none if there is no source.

    Example:
        >>> from lightning_sparse.engine.config import SparsificationConfig
        >>> docstrings_of(SparsificationConfig)["sparsifier"]
        'Selects the coordinates to send: ...'
    """
    found: dict[str, str] = {}
    for base in reversed(dataclass.__mro__):
        found |= _docstrings_in(base.__module__).get(base.__name__, {})
    return found


@cache  # of the text alone: a syntax tree is ten thousand objects for the garbage collector
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of a module's classes, by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    for definition in tree.body:
        if isinstance(definition, ast.ClassDef):
            of_class = found.setdefault(definition.name, {})
            for field, doc in pairwise(definition.body):
                match field, doc:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        of_class[name] = inspect.cleandoc(text)
    return found


@dataclass(frozen=True)
class Watch(Settings):
    """Settings of the watchdog, which looks for these problems. Each is reported in one warning, on rank 0.

    - *Divergence*: parameters are no longer equal on all ranks, bit for bit. Buffers are not compared.
    - *Residual growth*: a group's residual has become several times as large as it was when it had filled.
    - *Starving parameters*: a parameter gets gradients, but nothing of it is ever sent.
    - *Dead threshold*: nothing at all is selected in a group, although its residual is not empty.
    - *Saturation*: far more is selected than the density asks for.
    - *Shortage*: far less is selected than the density asks for, although the residual is not empty.
    - *Skipped steps*: many steps in a row were skipped, because a gradient was not finite on some rank.
    - *Parameters without an optimizer*: their gradients compete for the density, and no optimizer steps them.
    - *Unsuited optimizers*: one keeps a first moment or momentum of sparsified parameters, divides by second moments of
      averages (RMSprop), steps by signs (Lion) or orthogonal matrices (Muon), or is of an unknown class that keeps
      tensors of its own.

    At first, residuals grow by themselves, because a coordinate waits for about ``1 / density`` steps until it is sent
    again. The reference for growth is therefore the norm (Euclidean, mean over ranks) at the first check that comes
    ``3 / density`` steps after the first one at the same density: with ``every=100`` step 400 at 0.01, step 3100 at
    0.001. It is taken anew when a schedule changes the density, or when groups change. Before that, the residuals of
    all groups together are judged from step 8 on, against the largest norm so far times the steps since, as filling
    explains. With ``Residual(rates=True)``, residuals change with the learning rate, and their growth is not watched.

    Starvation is judged by the update of the step before each check, that is one step of ``every``. For a parameter
    with ``m`` coordinates, ``density * m`` of them are expected in it. The expected numbers of successive checks are
    added up until a coordinate is sent. A check does not count for a parameter whose residual did not change on any
    rank: it was not used.

    A check is one all-gather of a few bytes per parameter, and on a device the only time that the host waits. The first
    check is at the second exchange. Skipped steps are counted at every step. Optimizers are looked at in the first
    exchange after they were set up, or at their own first step if the engine was not told of them.

    Args:
        every: exchanges between two checks, at least 1.
        growth: factor by which a residual may exceed its reference, above 1; at three checks in a row.
        missed: coordinates of a parameter that were expected and not sent before it counts as starving, at least 1; at
            five checks or more.
        excess: factor by which the number of selected coordinates may differ from the density's, up or down, above 1;
            at three checks in a row. It is that of the rank with most picks for methods whose ranks select by
            themselves, and the size of the union for all others.
        skips: skipped steps in a row, at least 1.
        adam: whether to warn of optimizers, also where one rank rehearses.

    Raises:
        ValueError: if a setting is outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> strategy = ls.SparseDDPStrategy(density=0.01, watch=ls.Watch(every=1000))
        >>> ls.Watch(growth=0.5)
        Traceback (most recent call last):
        ...
        ValueError: Expected growth to be a finite number above 1, but got 0.5.
    """

    every: int = 100
    growth: float = 10.0
    missed: int = 200
    excess: float = 3.0
    skips: int = 20
    adam: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "missed", "skips"):
            check_integer(getattr(self, name), name)
        for name in ("growth", "excess"):
            value = getattr(self, name)
            expect(is_number(value) and 1 < value < math.inf, name, "a finite number above 1", value)
        check_flag(self.adam, "adam")


@documented
@dataclass(frozen=True, kw_only=True)
class SparsificationConfig(Settings):
    """Settings of sparsification and exchange: checked where they are made, with names resolved to objects.

    Raises:
        ValueError: for a setting that cannot work, or settings that do not go together.

    Example:
        >>> config = SparsificationConfig(sparsifier="top_k", density=0.05)
        >>> config.exchange_in_use
        GatherPairs()
        >>> config.as_dict()["density"], config.as_dict()["sparsifier"]
        (0.05, {'class': 'TopK'})
        >>> SparsificationConfig(single_device="spars")
        Traceback (most recent call last):
        ...
        ValueError: Expected single_device to be 'dense' or 'sparse', but got 'spars'. Did you mean 'sparse'?
    """

    sparsifier: Resolved[Sparsifier | str, Sparsifier] = Resolved("union_top_k", SPARSIFIERS.resolve)
    """Selects the coordinates to send: an instance such as ``ExDyna(alpha=1.1)`` or a name such as "top_k"."""
    density: Resolved[float | DensitySchedule, DensitySchedule] = Resolved(0.01, as_schedule)
    """Share of coordinates to send, in (0, 1], or a schedule such as ``Warmup(0.25, 0.01, steps=500)`` over backward
    passes with an exchange."""
    memory: Resolved[Memory | str | None, Memory | None] = Resolved(
        None, lambda given: None if given is None else as_memory(given)
    )
    """Error feedback: an instance, a name such as "low_pass", or None. None chooses by the optimizer:
    ``SecondMoment()`` for torch's Adam and AdamW unless an exchange was given that cannot carry second moments, else
    ``Residual()``; with torch's SGD, averages that come late get at once the momentum that they have missed.
    The setting stays None; :attr:`Engine.settings` has the memory in use."""
    exchange: Resolved[Exchange | str | None, Exchange | None] = Resolved(None)  # with the sparsifier, below
    """Carries the selected values to the other ranks: an instance, a name such as "reduce_union", or None for the
    sparsifier's natural one; where that cannot carry the second moments of Adam and AdamW, "reduce_union" takes its
    place. The setting stays None; :attr:`Engine.settings` has the exchange in use."""
    grouping: Resolved[Grouping | str, Grouping] = Resolved("bucket", GROUPINGS.resolve)
    """Which gradients are selected from together: "layer", "bucket" (about ``bucket_cap_mb`` each), "model", or an
    instance such as ``MergeBelow(8192)``, which merges small layers. Messages of all groups travel together, so that a
    step takes two or three collectives however many groups there are."""
    dense: Sequence[str] = ()
    """Shell-style patterns of parameter names that stay dense, such as ``["*.bias"]``, next to those of ``rules``; each
    has to match."""
    rules: Resolved[Rules | None, Rules] = Resolved(None, as_rules)
    """Which parameters stay dense, and which have densities of their own; None: the default ones, which keep parameters
    with fewer than 2 dimensions or fewer than 256 coordinates dense, see :class:`~lightning_sparse.Rules`."""
    node_size: int | Literal["auto"] | None = None
    """Number of ranks of a node, whose links are fast: gradients are averaged densely within a node and exchanged
    sparsely between nodes, by each rank a part of them. "auto": ranks of a host, by its name; None
    or 1: each rank exchanges its own gradients."""
    overlap: bool = False
    """True: exchange gradients within backward, as DDP hands them over, while it goes on. Gradients may not be changed
    between backward and the optimizer's step then, and one optimizer steps after each synchronised backward: no
    clipping, no loss scaling; see docs/developers/overlap.md."""
    fallback: bool = False
    """True: time some sparse and some dense steps at the start, and again when the step time changes by much, and
    continue with the faster ones."""
    single_device: Literal["dense", "sparse"] = "dense"
    """Way to train with one rank only: "dense" trains as plain DDP does, "sparse" selects coordinates and keeps
    residuals as with several ranks, to try a method."""
    watch: Watch | None = Watch()
    """Watchdog that warns, on rank 0, of ranks that drift apart, residuals that grow, thresholds that are off, and
    unsuited optimizers, see :class:`~lightning_sparse.Watch`; None: no warnings."""
    bucket_cap_mb: float | None = None
    """Size in MiB of groups that are cut by bucket, above 0. None: the size of DDP's buckets in ``attach``, 25 (DDP's
    default) in strategies; on CUDA, but for ``fallback`` and ``overlap``, at least 1024. With ``overlap``, strategies
    make DDP's own buckets 4 MiB small, so that groups are complete early."""
    timeout: timedelta | None = None
    """Time that ranks wait for each other before they end with an error. None: that of Lightning in strategies, of the
    model's process group in ``attach``. Inside hooks on CUDA, exchanges go through DDP's group, with its timeout."""

    def __post_init__(self) -> None:
        exchange = as_exchange(self.exchange, self.sparsifier, self.memory)
        vars(self)["exchange"] = None if self.exchange is None else exchange
        patterns = self.rules.also_dense(self.dense).dense
        vars(self)["dense"] = patterns[len(self.rules.dense) :]
        vars(self)["rules"] = replace(self.rules, dense=tuple(dict.fromkeys(patterns)))
        for name, hint in hints_of(type(self)).items():  # type: ignore[arg-type]
            check_choice(name, getattr(self, name), hint)
        for name, instead in (("grouping", "MergeBelow(8192)"), ("density", "0.01")):
            if (given := getattr(self, name)).needs_profile and not self.overlap:
                raise ValueError(
                    f"Expected {name} to be one such as {instead}, but got {given!r}, which hides messages behind "
                    f"backward, while gradients are exchanged after it, in optimizer.step(): use {name}={instead}, or "
                    "overlap=True."
                )
        if self.memory is not None and self.memory.averages == "moves":
            others = {"overlap": self.overlap, "fallback": self.fallback, "node_size": self.node_size not in (None, 1)}
            for name, given in others.items():
                instead = "left out with memory Drift: copies of the weights are averaged behind the optimizer's step"
                expect(not given, name, instead, getattr(self, name))
        alone = not self.overlap or not self.fallback
        expect(alone, "fallback", "False with overlap=True: dense steps are not timed beside it", self.fallback)
        self._check_nodes()
        watch, size, timeout = self.watch, self.bucket_cap_mb, self.timeout
        fits = watch is None or isinstance(watch, Watch)
        expect(fits, "watch", "a Watch such as Watch(every=1000), or None", watch)
        fits = size is None or (is_number(size) and 0 < size < math.inf)
        expect(fits, "bucket_cap_mb", "a number above 0, or None", size)
        fits = timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta())
        expect(fits, "timeout", "a timedelta above 0 such as timedelta(seconds=60), or None", timeout)

    def _check_nodes(self) -> None:
        """Raise for what cannot be a node, and for settings that do not go with nodes."""
        size = self.node_size
        if size is None or size == 1:
            vars(self)["node_size"] = None
            return
        fits = size == "auto" or (is_integer(size) and int(size) >= 1)
        expect(fits, "node_size", "'auto', an integer from 1 on or None", size)
        expect(not self.fallback, "fallback", "False with node_size: DDP's own steps are not timed", self.fallback)
        expect(not self.overlap, "overlap", "False with node_size: nodes average gradients in backward", self.overlap)

    @property
    def memory_in_use(self) -> Memory:
        """The memory; if it is None, the one that is used until optimizers are known."""
        return Residual() if self.memory is None else self.memory

    @property
    def exchange_in_use(self) -> Exchange:
        """The exchange; if it is None, the one that suits sparsifier and memory."""
        return as_exchange(self.exchange, self.sparsifier, self.memory_in_use)

    @property
    def algorithm(self) -> dict[str, Any]:
        """Settings that a saved state depends on, as in :meth:`as_dict`."""
        kinds = {"sparsifier": self.sparsifier, "density": self.density, "exchange": self.exchange_in_use}
        return {name: _plain(value) for name, value in {**kinds, "memory": self.memory_in_use}.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for a logger: ``log_hyperparams(config.as_dict())``.

        These are texts, numbers, True, False, None, lists, and dicts with text as keys. A constant density is a number,
        a timeout is in seconds, and any other object is a dict of its class and its own settings.
        """
        plain = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {**plain, "memory": _plain(self.memory_in_use), "exchange": _plain(self.exchange_in_use)}

    @classmethod
    def of(cls, arguments: SparsificationConfig) -> Self:
        """Return the settings alone, of a subclass with more fields."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})


# As if not frozen for mypy, which takes what the inherited fields of a frozen class accept for what they keep.
@documented
@dataclass(frozen=not TYPE_CHECKING, kw_only=True)  # type: ignore[literal-required]
class StrategyConfig(SparsificationConfig):  # type: ignore[misc]
    """The settings of the strategies for Lightning: those of the exchange, and of residuals in checkpoints."""

    save_residuals: bool = True
    """Save the residuals of each rank beside every checkpoint that holds optimizer states (with Fabric: a module and an
    optimizer), so that a resumed run continues bit for bit."""
    strict_resume: bool = False
    """Raise, on all ranks, where a checkpoint comes without residuals that fit, instead of starting with empty ones and
    a warning."""
    resize: Resize = "merge"
    """Treatment of residuals when a run is resumed with another number of ranks: "merge" gives every rank their
    mean, "flush" sends them in the first step, densely, "zero" drops them."""


def check_choice(name: str, given: Any, hint: Any) -> None:
    """Raise unless this is one of what a ``bool`` or a ``Literal`` allows; other types are for their own checks."""
    parts = (hint, *get_args(hint))
    allowed: list[Any] = [one for part in parts if get_origin(part) is Literal for one in get_args(part)]
    allowed += [True, False] if bool in parts else []
    if allowed and type(None) in parts:
        allowed.append(None)
    words = [repr(option) for option in allowed]
    if not allowed or int in parts or repr(given) in words:
        return
    close = difflib.get_close_matches(repr(given), words, n=1)
    expected = " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    mean = f" Did you mean {close[0]}?" if close else ""
    raise ValueError(f"Expected {name} to be {expected}, but got {given!r}.{mean}")


def _plain(value: Any) -> Any:
    if isinstance(value, Constant):
        return value.density
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if is_dataclass(value):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"class": type(value).__name__, **own}
    value = plain(value)
    return value if isinstance(value, (int, float, str, type(None))) else repr(value)
