"""Scalars of TensorBoard events, by tensorboard's reader of records, which is silent if it ends before the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from lightning_sparse.tools.report.files import EVENTS

FRAME = 16
"""Bytes of a record beside its content: length, its checksum, and that of the content."""


class Scalar(NamedTuple):
    """A logged value."""

    step: int
    seconds: float
    name: str
    value: float


def read_tensorboard_files(folder: Path) -> tuple[list[Scalar], list[str]]:
    """Read the scalars of all event files of a folder.

    Args:
        folder: of one run.

    Returns:
        Scalars in the order of logging, without those that a restart has replaced; sentences on problems.

    Raises:
        ValueError: if a record is no event, or a file cannot be read; in one sentence.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    found: list[Scalar | int] = []
    notes = []
    for file in sorted(folder.glob(EVENTS)):
        position = 0
        try:
            for record in RawEventFileLoader(str(file)).Load():
                event = Event.FromString(record)
                if event.session_log.status == SessionLog.START:
                    found.append(event.step)
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        found.append(Scalar(event.step, event.wall_time, value.tag, value.simple_value))
                position += len(record) + FRAME
        except Exception as error:  # of protobuf, which has two implementations, of the file system, of memory
            why = type(error).__name__
            raise ValueError(f"Expected events in {file}, but what follows byte {position} is none: {why}.") from error
        if position < (size := file.stat().st_size):
            notes.append(f"{file.name} was read as far as byte {position} of {size}; the rest is broken or not whole.")
    replaced: float = math.inf
    kept = []
    for one in reversed(found):
        if isinstance(one, int):
            replaced = min(replaced, one)
        elif one.step < replaced:
            kept.append(one)
    return kept[::-1], notes
