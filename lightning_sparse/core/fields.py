"""A dataclass as the only list of a function's keywords, for editors, type checkers and jsonargparse.

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
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_origin, get_type_hints, overload

Accepted = TypeVar("Accepted")
Kept = TypeVar("Kept")
Keywords = ParamSpec("Keywords")
First = TypeVar("First")
Result = TypeVar("Result")
Made = TypeVar("Made")


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
        >>> from lightning_sparse.config import SparsificationConfig
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
