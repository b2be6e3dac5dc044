"""``python -m tests.gpu``: parts that measure one by one, the others four at once; a row and a JSON file after each."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu.parts import (
    GRACE,
    PARTS,
    ROOT,
    TOGETHER,
    TOO_SHORT,
    Part,
    PartResult,
    missing_packages,
    run_part,
    skipped,
)

PACKAGES = ["torch", "triton", "numpy", "pytorch-lightning", "lightning", "pytest", "hypothesis"]


def parse_arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the same at toy sizes")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="(default: all)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for everything (default: 8.5)")
    out = Path(os.environ.get("OUT") or ROOT / "gpu_results") / "gpu.json"
    parser.add_argument("--out", type=Path, default=out, help="JSON file (default: gpu.json in $OUT or gpu_results/)")
    for internal in ("--part", "--lines"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found


def why_not(device: str) -> str:
    """Why no part can run here; empty if they can."""
    if missing := missing_packages():
        return f"package missing: {', '.join(missing)}"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device" if torch.version.cuda else f"no CUDA: torch {torch.__version__} is built without it"
    return ""


def run_checks(name: str, device: str, seconds: float, lines: Path) -> None:
    """One part, in this process."""
    import torch

    from tests.gpu.checks import Clock, run

    clock, where = Clock(seconds), torch.device(device, 0) if device == "cuda" else torch.device(device)
    checks = importlib.import_module(f"tests.gpu.{name}").checks(where, clock)
    with lines.open("w", buffering=1) as file:
        for outcome in run(checks, clock, where, lambda check: print(json.dumps({"begin": check}), file=file)):
            print(json.dumps(outcome._asdict()), file=file)
            numbers = ", ".join(f"{name} {value}" for name, value in outcome.numbers.items())
            said = f"{outcome.result:<8}{outcome.seconds:6.1f} s  {outcome.check}  {numbers}  {outcome.why}".rstrip()
            print(f"  {name:<12}{said}")  # of several parts at once


def run_all(arguments: argparse.Namespace, end: float) -> Iterator[PartResult]:
    """Results, each as soon as it is there; the command ends before ``end`` on the monotonic clock."""
    reason = why_not(arguments.device)
    chosen = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    here = [part for part in chosen if not (reason or (part.cuda_only and arguments.device == "cpu"))]
    yield from (skipped(part, reason or part.cuda_only) for part in chosen if part not in here)
    alone, others = [part for part in here if part.alone], [part for part in here if not part.alone]

    def run(part: Part, waiting: float) -> PartResult:
        """Give a part its share of the time that is left, which it has to itself where few are chosen."""
        left = end - time.monotonic() - GRACE
        if left < TOO_SHORT:
            return skipped(part, "out of time")
        print(f"{part.name}: {part.title}", flush=True)
        seconds = min(max(part.seconds, left * part.seconds / waiting), left)
        return run_part(part, arguments.device, seconds, arguments.out.parent)

    at_once = sum(part.seconds for part in others) / min(TOGETHER, len(others) or 1)
    for number, part in enumerate(alone):
        yield run(part, sum(other.seconds for other in alone[number:]) + at_once)
    with ThreadPoolExecutor(TOGETHER) as pool:
        longest = max((part.seconds for part in others), default=0)
        running = [pool.submit(run, part, max(at_once, longest)) for part in others]
        for done in as_completed(running):
            yield done.result()


def row_of(result: PartResult) -> tuple[str, str, str, str]:
    what = "; ".join(text for text in (result.keys, result.why) if text)
    return f"{result.name} ({result.title})", result.result, f"{result.seconds:.1f}", what


def make_table(results: list[PartResult]) -> str:
    rows = [("part", "result", "seconds", "what"), *map(row_of, results)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{part:<{widths[0]}}  {result:<{widths[1]}}  {seconds:>{widths[2]}}  {what}"
        for part, result, seconds, what in rows
    )


def write(file: Path, everything: dict[str, Any]) -> None:
    """At once: who ends this process finds the file as it was or as it is to be."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(everything, indent=1) + "\n")
    draft.replace(file)


def main(args: list[str] | None = None) -> int:
    arguments = parse_arguments(args)
    if arguments.part:
        run_checks(arguments.part, arguments.device, arguments.seconds, Path(arguments.lines))
        return 0
    began = time.monotonic()  # before torch is imported, which may take long
    found = versions()
    print(", ".join(f"{name} {number}" for name, number in found.items()), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results, names = [], [part.name for part in PARTS]
    for result in run_all(arguments, began + 60 * arguments.minutes):
        results = sorted([*results, result], key=lambda one: names.index(one.name))
        print("  ".join(row_of(result)), flush=True)
        seconds = round(time.monotonic() - began, 1)
        parts = [result._asdict() for result in results]
        write(arguments.out, {"versions": found, "device": arguments.device, "seconds": seconds, "parts": parts})
    print(f"\n{make_table(results)}\n{seconds} s; all numbers and errors: {arguments.out}")
    return int(any(result.result == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
