"""Agreement between ranks: equal settings, errors that all ranks raise together, notes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from lightning_sparse.engine.network import LostRankError, TorchCollective

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


def check_equal_on_ranks(facts: Mapping[str, Any], comm: TorchCollective, device: torch.device) -> None:
    """Raise on all ranks unless they were given equal values; collective.

    Args:
        facts: by name, the same names on all ranks; compared by their ``repr``.
        comm: the ranks.
        device: for the messages.

    Raises:
        RuntimeError: on all ranks, with the names that differ, the ranks, and two of the values.
    """
    texts = {name: repr(value) for name, value in facts.items()}
    own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    digests = comm.all_gather_object(own, device)
    told, others = [], set()
    for name, text in texts.items():
        if ranks := [rank for rank, digest in enumerate(digests) if digest[name] != digests[0][name]]:
            values = comm.all_gather_object(text, device)
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
