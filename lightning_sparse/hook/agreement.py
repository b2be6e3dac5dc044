"""What ranks tell each other before they go on: so that all of them do, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_sparse.collective import Collective

NOTE_BYTES = 1024
"""What a rank can tell the others in one gather."""
REASON_CHARACTERS = 300
"""Of an error of a file system, which can be very long."""
SHOWN = 8
"""Reasons in a message."""


class Note(NamedTuple):
    """What a rank tells the others."""

    fact: str
    """One line."""
    problem: str
    """Empty: none."""


def gather_notes(own: Note, comm: Collective, device: torch.device) -> list[Note]:
    """The notes of all ranks; collective."""
    text = "\n".join(own).encode()[:NOTE_BYTES]
    message = torch.zeros(NOTE_BYTES, dtype=torch.uint8, device="cpu")
    message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [
        bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in comm.all_gather(message.to(device)).cpu()
    ]
    return [Note(*text.split("\n", 1)) for text in texts]


def by_reason(notes: Sequence[Note]) -> str:
    """Which ranks have which problem; empty if none has one."""
    ranks: dict[str, list[int]] = {}
    for rank, note in enumerate(notes):
        if note.problem:
            ranks.setdefault(note.problem, []).append(rank)
    shown = [f"{name_ranks(those)}: {problem}" for problem, those in list(ranks.items())[:SHOWN]]
    hidden = sum(len(those) for those in list(ranks.values())[SHOWN:])
    return "; ".join(shown) + (f"; and {hidden} more ranks" if hidden else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """In words.

    Example:
        >>> name_ranks([1]), name_ranks([0, 2])
        ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def reason(error: Exception, *plain: type[Exception]) -> str:
    """One line, not too long for a note; without the type of an error whose text says it all, one of ``plain``."""
    text = " ".join((str(error) if isinstance(error, plain) else f"{type(error).__name__}: {error}").split())
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]} ..."
