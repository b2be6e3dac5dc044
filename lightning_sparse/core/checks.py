"""Checks of settings: the error names the expected and the given value, in one sentence."""

from __future__ import annotations

import math
import sys
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, TypeGuard

import numpy as np

TINY = 2.0**-126
"""Smallest normal number of float32."""


def plain(value: Any) -> Any:
    """Return Python's number for another one, such as numpy's, also within lists and tuples; else the value itself.

    Example:
        >>> plain(np.int64(4)), plain([np.float64(0.5), np.True_]), plain("4")
        (4, [0.5, True], '4')
    """
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


class Settings:
    """Base class of dataclasses of settings: numbers are kept as Python's, also if numpy's are given."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Convert numbers before the checks of a subclass."""
        super().__init_subclass__(**given)
        if check := vars(cls).get("__post_init__"):

            @wraps(check)
            def convert_and_check(self: Settings, *given: Any) -> None:
                Settings.__post_init__(self)
                check(self, *given)

            cls.__post_init__ = convert_and_check  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Convert numbers."""
        for field in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            vars(self)[field.name] = plain(getattr(self, field.name))


def is_integer(value: object) -> TypeGuard[int]:
    """Return True if a value is an integer, Python's or another one such as numpy's, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value is an integer or a real number, Python's or another one such as numpy's, and not a bool.

    nan is one, and integers beyond floats are none.
    """
    if is_integer(value):
        return abs(int(value)) <= sys.float_info.max
    return isinstance(value, Real) and not isinstance(value, bool)


def expect(holds: bool, name: str, what: str, value: object, hint: str = "") -> None:
    """Raise unless a condition holds; the hint ends the message.

    Raises:
        ValueError: naming the setting, the expected and the given value.

    Example:
        >>> expect(False, "port", "even", 7)
        Traceback (most recent call last):
        ...
        ValueError: Expected port to be even, but got 7.
    """
    if not holds:
        raise ValueError(f"Expected {name} to be {what}, but got {value!r}.{hint}")


def check_integer(value: object, name: str, least: int = 1) -> int:
    """Return a setting as Python's integer; raise a ValueError unless it is one of at least ``least``, of 64 bits."""
    what = "a positive integer" if least == 1 else f"an integer of at least {least}"
    hint = " It has to be below 2**63." if is_integer(value) and value >= 1 << 63 else ""
    expect(is_integer(value) and least <= value < 1 << 63, name, what, value, hint)
    return plain(value)  # type: ignore[no-any-return]


def check_number(value: float, name: str, what: str = "a finite number of at least 0") -> None:
    """Raise a ValueError unless a setting is a finite number of at least 0."""
    expect(is_number(value) and 0 <= value < math.inf, name, what, value)


def check_positive(value: float, name: str, *, infinite: bool = False) -> None:
    """Raise a ValueError unless a setting is a number above 0, and finite or allowed to be infinite."""
    expect(is_number(value) and value > 0 and (infinite or value < math.inf), name, "a positive number", value)


def check_eps(value: float) -> None:
    """Raise a ValueError unless a setting keeps divisors above 0 in float32."""
    expect(is_number(value) and TINY <= value < math.inf, "eps", f"a number of at least {TINY:.2g}", value)


def check_flag(value: bool, name: str) -> None:
    """Raise a ValueError unless a setting is a bool, maybe numpy's: a text such as "False" would count as true."""
    expect(isinstance(value, bool | np.bool_), name, "True or False", value)


def check_share(value: float, name: str, *, zero: bool = False, one: bool = True) -> None:
    """Raise a ValueError unless a setting is a number between 0 and 1.

    Args:
        value: value of the setting.
        name: name of the setting.
        zero: True if 0 is allowed.
        one: True if 1 is allowed.
    """
    inside = is_number(value) and 0 <= value <= 1 and (zero or value != 0) and (one or value != 1)
    expect(inside, name, f"a number in {'[' if zero else '('}0, 1{']' if one else ')'}", value)
