"""The layout of the messages of ``packed_union``, in 32-bit words; the meaning of its parts: :mod:`~.packed_union`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the compiler is told the numbers below where torch is not imported
    from torch import Tensor

OCTET, NIBBLE = 8, 4
"""Bits of coordinates are told eight at once, the lowest, and then four by four."""
MOST_BITS = 28
ALIGNED = 4
"""Words of which messages are multiples: NCCL gathers what does not begin at multiples of 16 bytes byte by byte."""

MARKS = 2
"""Where marks begin: behind the number of picks and the level of the largest."""
CODE_ZERO = 128
"""Code of the power of two 1."""
CLASSES, CLASS_BITS = 8, 3
"""Classes of magnitude of a rank's picks, each 2**3 times smaller than the one before."""
LOWEST = -1100
"""A *level* is the exponent of a step, counted from here, below that of any number."""
SILENT, LEVELS, TROUBLE = 0, 4096, (1 << 20) - 1
"""The level of a rank that has picked nothing but zeros; what those of numbers are below; that of one with a value that
is not finite."""

LANE = (1 << 15) - 1
"""Largest magnitude of a sum in half of a 32-bit word."""
FEWEST_LEVELS = 64
"""With so many ranks that each has fewer levels than this, values travel unrounded."""
NARROW_RANKS = 16
"""Up to so many ranks, a value and a second value share 16 bits."""


@dataclass(frozen=True)
class Form:
    """Of the messages of all ranks for one group in one step.

    Picks ascend. Of the coordinate j of pick i, the lowest :attr:`bits` are told as they are, ``low = j mod 2**bits``,
    and the rest, ``high = j // 2**bits``, by a mark: a bit that is set at place ``high + i`` (Elias-Fano coding). Marks
    ascend, so that the place of the i-th one, less i, is high again. They take one bit for each pick and one for each
    ``2**bits`` coordinates.
    """

    numel: int
    """Coordinates of the group, and the coordinate of slots without a pick."""
    slots: int
    """Picks of a rank, or slots for them."""
    bits: int
    """8, 12, ... 28."""
    codes: bool = False
    """True if there is a byte for the second value of each pick."""

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, numel: int, slots: int, codes: bool = False) -> Form:
        """Return the shortest one; groups ask for the same in each step.

        Example:
            >>> form = Form.of(14_000_000, 70_000)
            >>> form.filled, form.width
            (30149, 30152)
            >>> form.bits, round(32 * (form.classes - MARKS) / 70_000, 2)  # a coordinate
            (8, 9.78)
        """
        forms = [cls(numel, slots, bits, codes) for bits in range(OCTET, MOST_BITS + 1, NIBBLE)]
        return min(forms, key=lambda form: form.filled)

    @cached_property
    def planes(self) -> int:
        """Of four bits each, beyond the lowest eight."""
        return (self.bits - OCTET) // NIBBLE

    @cached_property
    def octets(self) -> int:
        """Where the lowest eight bits of coordinates begin, four of these a word."""
        return MARKS + _words((self.numel >> self.bits) + self.slots, 32)

    @cached_property
    def nibbles(self) -> int:
        """Where further bits of coordinates begin, plane by plane, eight of these a word."""
        return self.octets + _words(self.slots, 4)

    @cached_property
    def classes(self) -> int:
        """Where four bits for each pick begin: a class of magnitude, and whether it is a spare one."""
        return self.nibbles + self.planes * _words(self.slots, 8)

    @cached_property
    def seconds(self) -> int:
        """Where codes of second values begin."""
        return self.classes + _words(self.slots, 8)

    @cached_property
    def filled(self) -> int:
        """Words that say something; zeros follow."""
        return self.seconds + self.codes * _words(self.slots, 4)

    @cached_property
    def width(self) -> int:
        """Of a message."""
        return ALIGNED * _words(self.filled, ALIGNED)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """What C knows of it, see ``told.h``."""
        return self.numel, self.slots, self.octets, self.nibbles, self.classes, self.seconds, self.planes


class Lanes(NamedTuple):
    """The layout of a coordinate's integers in a word."""

    most: int
    """Largest magnitude of a rank's value, in steps."""
    fewest: int
    """With fewer, values travel unrounded."""
    low: int = 0
    """Bits for second values; 0: there are none."""
    wide: bool = False
    """True if a coordinate has 32 bits, and not 16."""
    parts: int = 0
    """Largest second value of a rank, in parts of the largest one that was told."""

    @classmethod
    def of(cls, n: int, second: bool) -> Lanes:
        """For n ranks, whose sums must not overflow."""
        if not second:
            return cls(max(1, LANE // n), FEWEST_LEVELS)
        wide = n > NARROW_RANKS
        bits, low = (31, 12) if wide else (15, 6 if n > NARROW_RANKS // 4 else 5)
        most, parts = ((1 << bits - low) - 1) // n, ((1 << low) - 1) // n
        return cls(most, 2 if parts else most + 1, low, wide, parts)

    @property
    def most_raised(self) -> int:
        """By how much levels are raised, at most, so that a pick keeps at least two of its levels."""
        return max(0, self.most.bit_length() - 7)


class Met(NamedTuple):
    """The union of what all ranks have told."""

    indices: Tensor
    """(u,) int64 coordinates, ascending; padding where shapes are static."""
    levels: Tensor
    """(u,) integers: the largest level that a rank gave each."""
    lowest: Any
    """The largest of all ranks' lowest levels."""
    tops: Tensor | None
    """(u,) integers: the largest code of a second value that a rank gave each; None: there are no codes."""
    trouble: Tensor
    """() bool: True if a rank has a value that is not finite."""
    counts: Tensor
    """(n,) int64 picks of each rank."""
    size: Tensor
    """() int64: different coordinates."""
    named: Tensor
    """() int64: different coordinates before the limit."""


class Rounded(NamedTuple):
    """A rank's values at the union, in steps of powers of two."""

    words: Tensor
    """int32: two coordinates in each, or one; parts of second values in the low bits."""
    units: Tensor
    """(u,) the steps."""
    sent: Tensor
    """(s,) int64 coordinates of those that are not rounded to zero; where shapes are static, zeros may be left in."""
    values: Tensor
    """(s,) what of them travels."""


def _words(items: int, each: int) -> int:
    return -(-items // each)
