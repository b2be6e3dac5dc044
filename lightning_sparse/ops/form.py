"""The layout of a message of picks, in 32-bit words; the meaning of its parts: :mod:`~.packed_union`."""

from __future__ import annotations

from typing import NamedTuple

OCTET, NIBBLE = 8, 4
"""Bits of coordinates are told eight at once, the lowest, and then four by four."""
MOST_BITS = 28
ALIGNED = 4
"""Words of which messages are multiples: NCCL gathers what does not begin at multiples of 16 bytes byte by byte."""

CLASSES, CLASS_BITS = 8, 3
"""Classes of magnitude of a rank's picks, each 2**3 times smaller than the one before."""
LOWEST = -1100
"""A *level* is the exponent of a step, counted from here, below that of any number."""
SILENT, LEVELS, TROUBLE = 0, 4096, (1 << 20) - 1
"""The level of a rank that has picked nothing but zeros; what those of numbers are below; that of one with a value that
is not finite."""


class Form(NamedTuple):
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
    def of(cls, numel: int, slots: int, codes: bool = False) -> Form:
        """The shortest one.

        Example:
            >>> form = Form.of(14_000_000, 70_000)
            >>> form.filled, form.width
            (30149, 30152)
            >>> form.bits, round(32 * (form.classes - form.marks) / 70_000, 2)  # a coordinate
            (8, 9.78)
        """
        forms = [cls(numel, slots, bits, codes) for bits in range(OCTET, MOST_BITS + 1, NIBBLE)]
        return min(forms, key=lambda form: form.filled)

    @property
    def planes(self) -> int:
        """Of four bits each, beyond the lowest eight."""
        return (self.bits - OCTET) // NIBBLE

    @property
    def marks(self) -> int:
        """Where marks begin: behind the number of picks and the level of the largest."""
        return 2

    @property
    def octets(self) -> int:
        """Where the lowest eight bits of coordinates begin, four of these a word."""
        return self.marks + _words((self.numel >> self.bits) + self.slots, 32)

    @property
    def nibbles(self) -> int:
        """Where further bits of coordinates begin, plane by plane, eight of these a word."""
        return self.octets + _words(self.slots, 4)

    @property
    def classes(self) -> int:
        """Where four bits for each pick begin: a class of magnitude, and whether it is a spare one."""
        return self.nibbles + self.planes * _words(self.slots, 8)

    @property
    def seconds(self) -> int:
        """Where codes of second values begin."""
        return self.classes + _words(self.slots, 8)

    @property
    def filled(self) -> int:
        """Words that say something; zeros follow."""
        return self.seconds + self.codes * _words(self.slots, 4)

    @property
    def width(self) -> int:
        """Of a message."""
        return ALIGNED * _words(self.filled, ALIGNED)


def _words(items: int, each: int) -> int:
    return -(-items // each)
