"""What ranks are about to do together: words of one size that begin each call, and what a rank is told that differs.

Ranks decide by themselves when they end a backward, take a step, clip or flush. If one of them does something else than
the others, for instance because it decides by its own gradients, messages of different kinds would meet. The words are
sent with the first message of each call and looked at before that message is waited for, so that all ranks end at once
and with a sentence.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.checks import is_number
from lightning_sparse.engine.agreement import name_ranks

BITS = 62
"""Flags of parameters in a word."""
SUMS = 4
"""Numbers that ranks may compare with each other, a word each."""
KINDS = (
    "ends a backward",
    "takes a step of an optimizer",
    "exchanges gradients (engine.exchange)",
    "clips by the norm of all gradients",
    "flushes",
    "begins a backward",
    "begins a forward",
    "takes a step of an optimizer with averages of backward",
    "looks at the weights that all ranks agree on",
)
"""What a call may be; its number is sent."""
BACKWARD, STEP, EXCHANGE, NORM, FLUSH, BEGIN, FORWARD, HIDDEN, AGREED = range(len(KINDS))


class Call(NamedTuple):
    """What a rank is about to do."""

    kind: int
    """Number in :data:`KINDS`."""
    names: int
    """Digest of the names of the parameters that it is about."""
    backwards: int
    """Synchronised backwards so far, this one included."""
    steps: int
    """Steps of optimizers so far that hold parameters of the engine, also those without an exchange."""
    flush: bool
    """Whether everything will be sent."""
    settings: int
    """Digest of settings and groups."""
    rates: int = 0
    """Digest of the learning rates of these parameters, where residuals are in units of them; else 0."""
    density: int = 0
    """Bits of the density that a schedule gives for the step, see :func:`bits_of`; else 0."""

    def words(self, finite: bool, used: Sequence[bool], sums: Sequence[float] = (), changed: bool = False) -> Tensor:
        """Return (length,) int64 on the CPU; the length follows from the number of parameters.

        Args:
            finite: whether all gradients of this rank are finite.
            used: of each parameter of the engine, whether this rank has a gradient that would be exchanged.
            sums: numbers that the others see as they are; none: zeros.
            changed: whether somebody else has written to weights of this rank that drift.
        """
        bits = struct.unpack(_WORDS, struct.pack(_NUMBERS, *sums)) if sums else (0,) * SUMS
        return torch.tensor(
            [*map(int, self), int(finite) | int(changed) << 1, *bits, *_written(tuple(used))],
            dtype=torch.int64,
            device="cpu",
        )


LENGTH = len(Call._fields)
HEAD = LENGTH + 1 + SUMS
"""Words before the flags."""
_NUMBERS, _WORDS = f"{SUMS}d", f"{SUMS}q"


class Met(NamedTuple):
    """What ranks have said that do the same."""

    finite: bool
    """Whether gradients are finite on all of them."""
    used: Sequence[bool]
    """Of each parameter whether any of them uses it; as long as all flags in the words."""
    words: Sequence[Sequence[int]]
    """Of each rank, those of its sums."""
    changed: bool = False
    """Whether somebody else has written to weights that drift on any of them."""

    def sums(self) -> list[tuple[float, ...]]:
        """Return the sums of each rank."""
        return [struct.unpack(_NUMBERS, struct.pack(_WORDS, *row)) for row in self.words]


def bits_of(density: object) -> int:
    """Return the bits of a density; 0 where there is none, or no number, which the step of a group refuses."""
    bits: int = struct.unpack("q", struct.pack("d", density if is_number(density) else 0.0))[0]
    return bits


def digest_of(*facts: Any) -> int:
    """Return 62 bits of a hash of the facts, by their ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:8], "big") >> 2


def compare(rows: Tensor, ranks: Sequence[int]) -> Met:
    """Return what ranks have said that do the same.

    Args:
        rows: (n, length) words of some ranks, see :meth:`Call.words`.
        ranks: their numbers.

    Raises:
        RuntimeError: if ranks are about to do different things, saying what each of them does.
    """
    every = rows.tolist()
    lead, finite, changed, flags = every[0][:LENGTH], True, False, every[0][HEAD:]
    for row in every:
        if row[:LENGTH] != lead:
            raise RuntimeError(_told({rank: Call(*one[:LENGTH]) for rank, one in zip(ranks, every, strict=True)}))
        finite, flags = finite and bool(row[LENGTH] & 1), list(map(or_, flags, row[HEAD:]))
        changed = changed or bool(row[LENGTH] & 2)
    return Met(finite, _read(tuple(flags)), [row[LENGTH + 1 : HEAD] for row in every], changed)


@lru_cache(maxsize=64)
def _written(used: Sequence[bool]) -> list[int]:
    """Return the words with these flags; the same ones come in every step."""
    return [int("".join(["01"[bit] for bit in used[i : i + BITS]])[::-1], 2) for i in range(0, len(used), BITS)]


@lru_cache(maxsize=64)
def _read(words: Sequence[int]) -> tuple[bool, ...]:
    """Return the flags in words; more than were written."""
    return tuple([bool(word >> place & 1) for word in words for place in range(BITS)])


def _told(calls: Mapping[int, Call]) -> str:
    """Say what ranks do that is not the same; calls are by rank."""
    lead, first = next(iter(calls.items()))
    differ = [f for f in Call._fields if any(getattr(call, f) != getattr(first, f) for call in calls.values())]
    alike: dict[str, list[int]] = {}
    for rank, call in calls.items():
        facts = [KINDS[call.kind] if 0 <= call.kind < len(KINDS) else "does something unknown"]
        facts += (
            [f"after {call.backwards} backwards and {call.steps} steps"] if {"backwards", "steps"} & {*differ} else []
        )
        others = call.kind == first.kind and call.names != first.names
        facts += [f"of other parameters than rank {lead}"] if others else []
        facts += ["which flushes" if call.flush else "which does not flush"] if "flush" in differ else []
        facts += [f"with other settings or groups than rank {lead}"] if call.settings != first.settings else []
        facts += [f"at other learning rates than rank {lead}"] if call.rates != first.rates else []
        facts += (
            [f"at density {struct.unpack('d', struct.pack('q', call.density))[0]!r}"] if "density" in differ else []
        )
        alike.setdefault(", ".join(facts), []).append(rank)
    said = "; ".join(f"{name_ranks(ranks)} {what}" for what, ranks in alike.items())
    return (
        f"The ranks have drifted apart, because they do different things: {said}. Every rank must do the same steps, "
        "with the same settings. Ranks that decide by their own gradients or losses whether to step have to decide "
        "together: engine.clip_grad_norm_ returns a norm that is equal on all of them. Restart from a checkpoint."
    )
