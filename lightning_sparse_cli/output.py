"""The output of commands: tables or JSON, and progress."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sparse.core.console import Table


def tell(what: str, done: float) -> None:
    """Progress of profiling; a plain function, so that launchers can send it to other processes."""
    if not sys.stderr.isatty():
        return print(f"[{done:4.0%}] {what}", file=sys.stderr, flush=True)
    bar = "━" * round(40 * done)
    print(f"\x1b[2K{bar:<40} {done:4.0%} {what}", end="\r", file=sys.stderr, flush=True)


def show(path: Path, tables: Sequence[Table], rows: Any, notes: str = "") -> None:
    """Write tables in markdown, and show them, or rows as JSON if they are not None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*(table.markdown() for table in tables), *([notes] if notes else [])]), encoding="utf-8")
    if rows is not None:
        return print_json(rows)
    for table in tables:
        table.show()
    print(f"Tables, numbers and figures are in {path.parent}.")


def print_json(value: Any) -> None:
    """Named tuples become objects, and numbers that are not finite, which JSON does not have, null."""
    print(json.dumps(_plain(value), indent=1))


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
