"""Classes by name, as in settings and strategy names; the error for an unknown name lists the closest known ones."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes of one family by snake-case name; the look-up ignores case, hyphens and underscores.

    Args:
        kind: name of the family in error messages.
        base: their common base class.
    """

    def __init__(self, kind: str, base: type[T]) -> None:
        self.kind = kind
        self.base = base
        self._classes: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        """Register the decorated class by its ``name`` attribute, or by its class name in snake case.

        Raises:
            ValueError: if another class has that name. A class that is defined once more, as in a notebook, takes the
                place of its earlier form.
        """
        name = cls.__dict__.get("name") or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        for other, known in list(self.items()):
            if _key(other) == _key(name):
                if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                    raise ValueError(
                        f"Expected a name of its own for the {self.kind} {cls.__name__}, but {other!r} is "
                        f"{known.__module__}.{known.__qualname__}: rename it, or set the class attribute `name`."
                    )
                del self._classes[other]
        self._classes[name] = cls
        return cls

    def items(self) -> Iterator[tuple[str, type[T]]]:
        """Iterate over (name, class) pairs in order of registration."""
        return iter(self._classes.items())

    def name_of(self, instance: T) -> str:
        """Return the registered name of an instance's class; its class name if it was never registered."""
        return next((name for name, cls in self.items() if cls is type(instance)), type(instance).__name__)

    def resolve(self, given: T | str | None) -> T:
        """Return the given instance, or one of the named class with its defaults.

        Raises:
            ValueError: for an unknown name (the closest known ones are listed), a name of a class that needs arguments,
                a class instead of an instance, or anything else.
        """
        if isinstance(given, self.base):
            return given
        if isinstance(given, type) and issubclass(given, self.base):
            raise ValueError(f"Expected a {self.kind}, but got the class {given.__name__}: write {given.__name__}().")
        if not isinstance(given, str):
            names = ", ".join(sorted(self._classes))
            raise ValueError(f"Expected a {self.kind} or its name, but got {given!r}. Known names: {names}.")
        by_key = {_key(name): cls for name, cls in self.items()}
        if cls := by_key.get(_key(given)):
            parameters = inspect.signature(cls).parameters.values()
            variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
            if needed:
                arguments = ", ".join(f"{name}=..." for name in needed)
                raise ValueError(
                    f"{self.kind.capitalize()} {given!r} needs settings: write {cls.__name__}({arguments})."
                )
            return cls()
        raise unknown(self.kind, given, self._classes)


def _key(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def unknown(kind: str, given: str, known: Collection[str]) -> ValueError:
    """Return the error for an unknown name, with the closest known names.

    Example:
        >>> raise unknown("colour", "gren", ["blue", "green"])
        Traceback (most recent call last):
        ...
        ValueError: Unknown colour 'gren'. Did you mean 'green'? Known names: blue, green.
    """
    keys = {_key(name): name for name in known}
    close = [keys[key] for key in difflib.get_close_matches(_key(given), list(keys), n=3, cutoff=0.5)]
    hint = f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
    return ValueError(f"Unknown {kind} {given!r}.{hint} Known names: {', '.join(sorted(known))}.")
