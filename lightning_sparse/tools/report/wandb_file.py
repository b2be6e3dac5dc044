"""Files of W&B offline runs: LevelDB's log format around records, for which wandb has classes but no reader."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 15
"""Bytes of a block; no header of a piece crosses its end."""
START = 7
"""Bytes before the first piece: ``:W&B``, a magic number and a version."""
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Kinds of pieces of a record."""


def read_wandb_file(file: Path) -> tuple[dict[str, Any], list[dict[str, float]], list[str]]:
    """Read a run's configuration and history.

    Args:
        file: ``run-*.wandb``; an unfinished one, of a run that still writes or was killed, is read up to its end.

    Returns:
        The configuration; the logged numbers, a row for each call; sentences on problems.

    Raises:
        ValueError: if it is no such file, cannot be read, or is broken in the middle; in one sentence.
    """
    from wandb.proto import wandb_internal_pb2

    new_record: Any = vars(wandb_internal_pb2)["Record"]  # made when the module is imported
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"Expected {file} to be the file of a W&B run, but got: {error.strerror}.") from error
    if not data.startswith(b":W&B"):
        raise ValueError(f"Expected {file} to be the file of a W&B run, but it does not begin like one.")
    config: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    ended = False
    for position, message in _messages(data, file):
        record = new_record()
        try:
            record.ParseFromString(message)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append(_numbers({_name(item): json.loads(item.value_json) for item in record.history.item}))
            elif kind in ("config", "run"):
                updates = record.config.update if kind == "config" else record.run.config.update
                config |= {_name(item): json.loads(item.value_json) for item in updates}
        except Exception as error:  # of protobuf, which has two implementations, and of JSON
            why = f"that at byte {position} is none: {type(error).__name__}"
            raise ValueError(f"Expected records of W&B in {file}, but {why}.") from error
        ended = ended or kind == "exit"
    config.pop("_wandb", None)
    return config, rows, [] if ended else [f"{file.name} has no end: the run still writes, or was killed."]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a row, without those of tables and pictures, such as their sizes."""
    media = tuple(name.removesuffix("_type") for name in row if name.endswith("/_type"))
    numbers = {name: x for name, x in row.items() if isinstance(x, int | float)}
    return {name: float(x) for name, x in numbers.items() if not (media and name.startswith(media))}


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _messages(data: bytes, file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield whole records, with their positions, without an unfinished one at the end of the file."""
    position, begin, pieces = START, START, list[bytes]()
    while position + 7 <= len(data):
        if (left := BLOCK - position % BLOCK) < 7:
            position += left
            continue
        check, size, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + size]
        if len(piece) < size:
            return
        follows = kind in (MIDDLE, LAST)
        whole = kind in (WHOLE, FIRST, MIDDLE, LAST) and check == zlib.crc32(piece, zlib.crc32(bytes([kind])))
        if not whole or follows != bool(pieces):
            raise ValueError(f"Expected {file} to be whole, but it is broken after {position} of {len(data)} bytes.")
        begin = begin if follows else position
        pieces.append(piece)
        position += 7 + size
        if kind in (WHOLE, LAST):
            yield begin, b"".join(pieces)
            pieces.clear()
