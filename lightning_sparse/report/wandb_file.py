"""Files of W&B offline runs: LevelDB's log format around records, for which wandb has the classes and no reader."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1 << 15
"""Bytes of a block; no header of a piece reaches into the next one."""
START = 7
"""Bytes before the first piece: ``:W&B``, a magic number and a version."""
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
"""Kinds of pieces of a record."""


def read_wandb_file(file: Path) -> tuple[dict[str, Any], list[dict[str, float]], list[str]]:
    """Read a run's configuration and history.

    Args:
        file: ``run-*.wandb``; that of a run that still writes or was killed is read as far as it goes.

    Returns:
        The configuration; the numbers that were logged, a row for each call; what was odd, in sentences.

    Raises:
        ValueError: if it is no such file, or broken in the middle.
    """
    from wandb.proto import wandb_internal_pb2

    new_record: Any = vars(wandb_internal_pb2)["Record"]  # made when the module is imported
    data = file.read_bytes()
    if not data.startswith(b":W&B"):
        raise ValueError(f"Expected {file} to be the file of a W&B run, but it does not begin like one.")
    config: dict[str, Any] = {}
    rows: list[dict[str, float]] = []
    ended = False
    for message in _messages(data, file):
        record = new_record()
        record.ParseFromString(message)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append(_numbers({_name(item): json.loads(item.value_json) for item in record.history.item}))
        elif kind in ("config", "run"):
            updates = record.config.update if kind == "config" else record.run.config.update
            config |= {_name(item): json.loads(item.value_json) for item in updates}
        ended = ended or kind == "exit"
    config.pop("_wandb", None)
    return config, rows, [] if ended else [f"{file.name} has no end: the run still writes, or was killed."]


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """Without tables and pictures, of which there are numbers, too: their sizes."""
    media = tuple(name.removesuffix("_type") for name in row if name.endswith("/_type"))
    return {name: x for name, x in row.items() if isinstance(x, int | float) and not (media and name.startswith(media))}


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _messages(data: bytes, file: Path) -> Iterator[bytes]:
    """Whole records; one that was not finished at the end of the file is left out."""
    position, message = START, b""
    while position + 7 <= len(data):
        if (left := BLOCK - position % BLOCK) < 7:
            position += left
            continue
        check, size, kind = struct.unpack_from("<IHB", data, position)
        piece = data[position + 7 : position + 7 + size]
        if len(piece) < size:
            return
        found = zlib.crc32(piece, zlib.crc32(bytes([kind])))
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or check != found:
            raise ValueError(f"Expected {file} to be whole, but it is broken after {position} of {len(data)} bytes.")
        message = piece if kind in (WHOLE, FIRST) else message + piece
        position += 7 + size
        if kind in (WHOLE, LAST):
            yield message
