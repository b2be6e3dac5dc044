"""SplitMix64: random words that all ranks and devices compute alike, without a random number generator.

Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)
"""Increment, shifts and multipliers of the generator."""


def mix(x: int) -> int:
    """Apply SplitMix64's bijection of 64-bit words: every bit of the result depends on every bit of x.

    Example:
        >>> hex(mix(GOLDEN))  # the first output of the generator with seed 0
        '0xe220a8397b1dcdaf'
    """
    x %= 1 << 64
    for shift, factor in FACTORS:
        x = (x ^ (x >> shift)) * factor % (1 << 64)
    return x ^ (x >> 31)


def outputs(seed: int, numbers: Tensor) -> Tensor:
    """Return outputs of the generator as int64, which have the bits of the unsigned words.

    Args:
        seed: of the generator, any integer.
        numbers: which ones, int64; 1 is the first.

    Example:
        >>> import torch
        >>> outputs(0, torch.tensor([1])).item() % (1 << 64) == mix(GOLDEN)
        True
    """
    x = numbers * _signed(GOLDEN) + _signed(seed % (1 << 64))
    for shift, factor in FACTORS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)  # products wrap around as those of unsigned words do
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, shift: int) -> Tensor:
    """Shift to the right and fill with zeros, where torch repeats the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
