"""Dataclasses of measurements as plain data for files."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_type_hints

if TYPE_CHECKING:
    from cattrs import Converter


class Plain:
    """Base class of dataclasses that are plain dictionaries, lists and numbers in checkpoints and in JSON."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers."""
        plain: dict[str, Any] = _converter().unstructure(self)
        return plain

    @classmethod
    def from_dict(cls, plain: Any) -> Self:
        """Make an instance from the result of :meth:`as_dict`.

        Raises:
            ValueError: if a value is missing, of another kind, or refused by the class.
        """
        try:
            return _converter().structure(plain, cls)
        except Exception as error:  # cattrs raises errors of any type
            name = cls.__name__
            raise ValueError(f"Expected a {name.lower()} as {name}.as_dict() gives it, but: {error!r}.") from error


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _named_tuple(values: Any, kind: Any) -> Any:
    fields = get_type_hints(kind)  # cattrs does not evaluate the postponed annotations of named tuples
    return kind(*(_converter().structure(value, field) for value, field in zip(values, fields.values(), strict=True)))


@cache
def _converter() -> Converter:
    from cattrs import Converter  # here: few programs need it, and it is a fifth of the package's import

    converter = Converter(detailed_validation=False)
    converter.register_structure_hook_func(_is_named_tuple, _named_tuple)
    converter.register_unstructure_hook_func(
        _is_named_tuple, lambda values: [converter.unstructure(value) for value in values]
    )
    converter.register_structure_hook_func(lambda kind: kind is Hashable, lambda value, _: value)
    return converter
