"""Agreement between ranks: equal settings, errors that all ranks raise together, notes, checksums of tensors."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.engine.network import LostRankError, TorchCollective
from lightning_sparse.ops import static_shapes

REASON_CHARACTERS = 300
"""Length at which the text of an error is cut; file systems write very long ones."""
SHOWN = 8
"""Number of reasons that a message lists."""
VALUE_CHARACTERS = 120
"""Length at which a value is cut in a message."""
CONTEXT = 30
"""Characters of a value that are shown before the first difference."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The address of an object in its ``repr``."""
ROW = 1 << 16
"""Words of a row; each place in a row has its own weight in a checksum. There may be as many rows, and one more."""
ROWS_ON_DEVICES = 64
"""Rows that are summed at a time on a device."""


def check_equal_on_ranks(facts: Mapping[str, Any], comm: TorchCollective, device: torch.device) -> None:
    """Raise on all ranks unless they were given equal values; collective.

    Args:
        facts: by name; compared by their ``repr``.
        comm: the ranks.
        device: for the messages.

    Raises:
        RuntimeError: on all ranks, with the names that differ, the ranks, and two of the values.
    """
    texts = {name: repr(value) for name, value in facts.items()}
    own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    digests = comm.all_gather_object(own, device)
    told, others = [], set()
    for name in dict.fromkeys(name for digest in digests for name in digest):  # other versions may have other facts
        if ranks := [rank for rank, digest in enumerate(digests) if digest.get(name) != digests[0].get(name)]:
            values = comm.all_gather_object(texts.get(name, "nothing"), device)
            here, there = values[0], values[ranks[0]]
            others.update(ranks)
            if ADDRESS.sub("", here) == ADDRESS.sub("", there):
                shown = ADDRESS.sub("", here)[:VALUE_CHARACTERS]
                told.append(
                    f"{name} ({shown}: its repr holds an address in memory; settings need a repr that says what they "
                    "are and is equal on all ranks, as that of a frozen dataclass)"
                )
            else:
                here, there = _from_difference([here, there])
                told.append(f"{name} ({here} on rank 0, {there} on rank {ranks[0]})")
    if told:
        raise RuntimeError(
            f"The ranks disagree: rank(s) {sorted(others)} have other settings or other parameters than rank 0. Every "
            "rank must build the same model and give it the same settings. What differs: "
            f"{'; '.join(told)}."
        )


@contextmanager
def failing_together(
    comm: TorchCollective, device: torch.device, abort: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise an error of the block on all ranks if any rank has one; collective at the end of the block.

    Args:
        comm: the ranks; must not be used within the block.
        device: for the messages.
        abort: called first if the block fails, to wake up ranks that wait for this one within it.

    Raises:
        RuntimeError: on ranks without an error of their own, naming a rank that has one, and its error.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
        abort()
    # The error of a rank that only lost another one is not the cause.
    kind = 0 if failed is None else 1 if isinstance(failed, LostRankError) else 2
    outcomes = comm.all_gather_object((kind, "" if failed is None else f"{type(failed).__name__}: {failed}"), device)
    worst = max(kinds := [kind for kind, _ in outcomes])
    if not worst:
        return
    if failed is not None and kind == worst:
        raise failed
    first = kinds.index(worst)
    raise RuntimeError(f"Rank {first} failed, so that no rank goes on. Its error: {outcomes[first][1]}") from failed


def _from_difference(texts: list[str]) -> list[str]:
    """Return the texts from shortly before the first difference, cut to the length that a message can show."""
    shortest, longest = sorted(map(len, texts))
    common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), shortest)
    start = 0 if longest <= VALUE_CHARACTERS else max(0, common - CONTEXT)
    before, stop = "..." if start else "", start + VALUE_CHARACTERS
    return [f"{before}{text[start:stop]}{'...' if stop < len(text) else ''}" for text in texts]


class Note(NamedTuple):
    """A message of a rank to the others."""

    fact: str
    """One line."""
    problem: str
    """Empty if there is none."""


def by_reason(notes: Sequence[Note]) -> str:
    """List the problems with the ranks that have them; empty if there are none."""
    ranks: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        if note.problem:
            ranks.setdefault(note.problem, []).append(rank)
    shown = [f"{name_ranks(those)}: {problem}" for problem, those in list(ranks.items())[:SHOWN]]
    hidden = sum(len(those) for those in list(ranks.values())[SHOWN:])
    return "; ".join(shown) + (f"; and {hidden} more ranks" if hidden else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as words for a message.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def reason(error: Exception, *plain: type[Exception]) -> str:
    """Return an error as one short line, with its type unless that is one of ``plain``, whose texts suffice."""
    text = " ".join((str(error) if isinstance(error, plain) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]} ..."


def checksum(x: Tensor) -> Tensor:
    """Return a number that differs between ranks if their tensors do, so that these need not be sent.

    It is the sum of bit patterns, as signed words of at most 32 bits, times a weight per place, as () int64.

    The sum is modulo 2**64. Weights are odd, so that a single different word always changes it. Several different
    words, words that change places or words that change their signs together are missed with a chance of about 2**-32:
    weights are random numbers, the same ones on all ranks and devices.

    Example:
        >>> given = torch.tensor([1.0, 2.0, 3.0])
        >>> [bool(checksum(torch.tensor(x)) == checksum(given)) for x in ([1.0, 2, 3], [2.0, 1, 3], [-1.0, -2, 3])]
        [True, False, False]
    """
    bits = x.detach().reshape(-1).contiguous().view({1: torch.int8, 2: torch.int16}.get(x.element_size(), torch.int32))
    columns, rows = place_weights(x.device)
    whole = bits.numel() // ROW
    # On a CPU a row at a time, which fits into the cache; on a device enough rows to outweigh a kernel's launch.
    at_once = ROWS_ON_DEVICES if static_shapes(x.device) else 1
    pieces = torch.split(bits[: whole * ROW].view(whole, ROW), at_once) if whole else ()
    sums = [(piece.long() * columns).sum(1) for piece in pieces]
    rest = bits[whole * ROW :]
    sums.append((rest.long() * columns[: rest.numel()]).sum().view(1))
    return (torch.cat(sums) * rows[: whole + 1]).sum()


@functools.cache
def place_weights(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return odd random numbers of 64 bits, for places in a row and for rows."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (2, ROW + 1), generator=generator, dtype=torch.int64, device="cpu") | 1
    columns, rows = drawn.to(device)
    return columns[:ROW], rows
