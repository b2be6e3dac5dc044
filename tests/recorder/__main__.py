"""``python -m tests.recorder BASE``: record the commit BASE and this tree side by side, and compare them bit for bit.

Every sparsifier runs 20 steps with every exchange that accepts it, half of them also not compiled, with many memories,
groupings, densities, dtypes and optimizers; among the steps are a skipped one, a flush, parameters that are not used,
and a jump of the gradients. What is compared: picks, messages, averages, weights, states, logged quantities. Ends with
1 where something differs that :data:`tests.recorder.compare.ALLOWED` does not name.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

from tests.recorder import inside
from tests.recorder.compare import ALLOWED, Difference, differences
from tests.recorder.compositions import Composition, chosen, name_of

ROOT = Path(__file__).parents[2]
SHOWN = 20
"""Compositions that differ and are shown, each with its first difference."""


def checked_out(base: str, into: Path) -> Path:
    """The tree of a commit, with the recorder of this one."""
    archive = subprocess.run(["git", "archive", base], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
    here = into / "tests" / "recorder"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(Path(__file__).parent, here, ignore=shutil.ignore_patterns("__pycache__"))
    return into


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", inside.SWITCH: ""}


class Worker:
    """A process that makes recordings in a tree.

    Args:
        tree: where.
        compiled: whether with the C library.
        compositions: what it records, one after another.
        steps: of each.
        out: an empty folder.
    """

    def __init__(self, tree: Path, compiled: bool, compositions: Sequence[Composition], steps: int, out: Path) -> None:
        out.mkdir(parents=True)
        self.out, self.log, asked = out, out / "log", out / "asked"
        asked.write_text("".join(json.dumps([number, one]) + "\n" for number, one in enumerate(compositions)))
        command = [sys.executable, "-m", "tests.recorder.record", f"--steps={steps}", f"--out={out}"]
        command += ["--compiled"] * compiled
        with asked.open() as given, self.log.open("w") as log:
            where = {"cwd": tree, "env": environment(tree)}
            self.process = subprocess.Popen(command, stdin=given, stdout=log, stderr=log, **where)

    def take(self, number: int) -> Any:
        """A recording, as soon as it is there; it is not kept."""
        file = self.out / f"{number}.pickle"
        while not file.exists():
            if self.process.poll() is not None and not file.exists():
                said = self.log.read_text()[-4000:]
                raise RuntimeError(f"A recording has ended with {self.process.returncode}: {said}")
            time.sleep(0.02)
        found = pickle.loads(file.read_bytes())
        file.unlink()
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def compared(
    trees: tuple[Path, Path], compiled: bool, compositions: Sequence[Composition], steps: int, out: Path
) -> Iterator[list[Difference]]:
    """The differences of each composition, in two processes beside each other."""
    workers = [Worker(tree, compiled, compositions, steps, out / str(n)) for n, tree in enumerate(trees)]
    try:
        for number, one in enumerate(compositions):
            before, now = (worker.take(number) for worker in workers)
            name = name_of(one) + ("" if compiled else " | not compiled")
            yield list(differences(name, before, now))
    finally:
        for worker in workers:
            worker.end()


def report(found: Sequence[tuple[bool, list[Difference]]], seconds: float) -> bool:
    """Print a table and the first differences; whether all of them are allowed."""
    print(f"{'':14}{'compositions':>14}{'equal':>8}{'allowed':>10}{'different':>12}")
    wrong: list[Difference] = []
    used: dict[str, list[Difference]] = {}
    for compiled in (True, False):
        rows = [differing for kind, differing in found if kind is compiled]
        not_allowed = [[one for one in row if not one.allowed] for row in rows]
        different, equal = sum(map(bool, not_allowed)), sum(not row for row in rows)
        allowed = len(rows) - equal - different
        print(f"{'compiled' if compiled else 'not compiled':14}{len(rows):14}{equal:8}{allowed:10}{different:12}")
        wrong += [row[0] for row in not_allowed if row]
        for row in rows:
            firsts = {one.allowed: one for one in reversed(row) if one.allowed}
            for name, first in firsts.items():
                used.setdefault(name, []).append(first)
    print(f"{seconds:.0f} s; allowed differences: " + ("" if used else "none used"))
    for one in ALLOWED:
        if one.name in used:
            print(f"- {one.name}, in {len(used[one.name])} compositions. {one.reason} The first one:")
            print(f"  {used[one.name][0]}")
    for one in islice(wrong, SHOWN):
        print(f"- {one}")
    if len(wrong) > SHOWN:
        print(f"and {len(wrong) - SHOWN} more")
    return not wrong


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=__doc__)
    parser.add_argument("base", help="the commit to compare with, such as HEAD")
    parser.add_argument("--only", default="", help="compositions in whose names this regular expression is found")
    parser.add_argument("--steps", type=int, default=20, help="at least 10 (default: 20)")
    parser.add_argument("--jobs", type=int, default=2, help="processes, two of which belong together (default: 2)")
    parser.add_argument("--all", action="store_true", help="twice as many, all of them also not compiled")
    arguments = parser.parse_args(args)
    if arguments.steps < 10:
        parser.error("--steps has to be at least 10, so that each event has a step of its own")
    compositions = [one for one in chosen(2 if arguments.all else 1) if re.search(arguments.only, name_of(one))]
    if not compositions:
        parser.error(f"no composition has {arguments.only!r} in its name")
    begin = time.monotonic()
    pairs = max(1, arguments.jobs // 2)
    shards = [compositions[start :: (pairs + 1) // 2] for start in range((pairs + 1) // 2)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(pairs) as pool:
        out = Path(folder)
        (out / "base").mkdir()
        trees = checked_out(arguments.base, out / "base"), ROOT
        for tree in trees:
            subprocess.run([sys.executable, str(inside.builder(tree))], env=environment(tree), check=True)

        def run(task: tuple[bool, int]) -> list[tuple[bool, list[Difference]]]:
            compiled, shard = task
            some = shards[shard] if compiled or arguments.all else shards[shard][::2]
            return [
                (compiled, row) for row in compared(trees, compiled, some, arguments.steps, out / f"{compiled}{shard}")
            ]

        tasks = [(compiled, shard) for compiled in (True, False) for shard in range(len(shards))]
        found = [row for rows in pool.map(run, tasks) for row in rows]
    return 0 if report(found, time.monotonic() - begin) else 1


if __name__ == "__main__":
    sys.exit(main())
