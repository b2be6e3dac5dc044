"""How much of an exchange hides behind backward with `overlap=True`, on slow links between two ranks?

Two ranks train the models of `models14m.py` on random data, with gloo, one compute thread each. Links:

- wait: messages go over loopback, and each one is over no sooner than a link of the given rate, with its round trip,
  would let it be. The thread that sends sleeps meanwhile: the link takes nothing of the processor.
- shaped: ranks live in network namespaces, and a token bucket filter limits what each sends and receives (`links.py`).
  The kernel's work for messages is on the same cores as backward. Needs root.

Variants take turns of some steps, in an order that is reversed from round to round; ranks start each step together, and
its time is the slower rank's:

- noop: a hook of DDP that sends nothing. What others take more is the exchange, with selection.
- step: `sparse_ddp` that exchanges when the optimizer steps; messages of all groups travel together.
- overlap: the same with `overlap=True`; messages of groups that are complete together travel together.

Columns: what `step` and `overlap` add to `noop`, medians of paired rounds; for how long training waits in both, as the
library counts it, with local work (`time/exposed_ms`); the messages of a step in `overlap`, by the time that the
link takes for their bytes, and those of groups that are complete at 80 % of backward ("early"); the part of these that
is hidden: by how much training waits less than without overlap, above 1 where ranks also wait less for each other; in
how many rounds the step is shorter. A cell that loses says so.

With `--groupings`, all with overlap, others take turns instead: each grouping that is named, such as `merge_below:1e6`,
`optimal_merge` (OMGS-SGD) by its own measurements among them, and `lags`, layers at densities that hide. Printed is
what each adds to `noop`, what its profile has predicted of that, the predicted step as a multiple of the shortest of
all ways to merge layers, and the ratio of the step to that of the best grouping that is not measured, medians of
paired rounds.

    sudo python benchmarks/overlap.py --links wait shaped --csv overlap.csv
    sudo python benchmarks/overlap.py --links wait shaped --densities 0.01 --groupings layer bucket merge_below \\
        merge_below:1e6 model optimal_merge lags --steps 1 --csv groupings.csv
    python benchmarks/overlap.py --docs docs/developers/overlap.md --rows overlap.csv groupings.csv

The last one writes the tables of a page, between two comments, and prints cells that lose.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from links import launch, limit, network, stop, why_not
from machine import about, free_port, in_words
from models14m import MODELS
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.console import Table
from lightning_sparse.core.messages import Message
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.grouping import Group, ParameterSize, make_plan
from lightning_sparse.tuning.controllers.planner import LATE, Planner

VARIANTS = ("noop", "step", "overlap")
MOST_OVER_BEST = 1.03
"""What a step by measured groups may take of the best one."""
MOST_LAYERS = 14
"""Ways to merge more layers are too many."""
MEASURED = ("optimal_merge", "lags")
"""Variants that time 15 steps first."""
BUCKET_MB = 4.0
"""Of DDP's buckets, in MiB: groups are complete early."""
EARLY = 0.8
"""Share of backward by which a group is complete whose messages are to hide."""
ROUND_TRIP = 2e-4
"""Seconds, of the link that waits."""


class Link:
    """A link of a rate beside that of loopback; what is sent waits for what was sent before.

    Args:
        mbit: Mbit/s.
        waits: whether messages are to wait for it; else they take the time that they take.
    """

    def __init__(self, mbit: float, waits: bool = True) -> None:
        self.mbit, self.free = mbit, 0.0
        self.taken: list[tuple[float, float]] = []
        """When each message began, and the seconds that it takes on the link."""
        start = TorchCollective.start

        def timed(comm: TorchCollective, message: Message) -> Any:
            begin = time.perf_counter()
            seconds = self.seconds(message)
            over = max(begin, self.free) + seconds
            answer = start(comm, message)

            def finished() -> Tensor:
                result = answer()
                if waits:
                    self.free = over
                    time.sleep(max(0.0, over - time.perf_counter()))
                self.taken.append((begin, seconds))
                return result

            return finished

        self._before = start
        TorchCollective.start = timed  # type: ignore[method-assign]

    def close(self) -> None:
        """Let messages take the time that they take again."""
        TorchCollective.start = self._before  # type: ignore[method-assign]

    def seconds(self, message: Message) -> float:
        """How long a message takes at least."""
        return ROUND_TRIP / 2 + 8 * message.bytes_sent(dist.get_world_size()) / (1e6 * self.mbit)


def send_nothing(_: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Give gradients back as they came."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class Variant:
    """One copy of the model with its own way to exchange."""

    def __init__(self, name: str, model: str, density: float, grouping: str) -> None:
        torch.manual_seed(0)
        kind = MODELS[model]
        self.ddp = DistributedDataParallel(kind(), bucket_cap_mb=BUCKET_MB, init_sync=False)
        self.optimizer = kind.optimizer(self.ddp.parameters())
        self.engine = None
        if name == "noop":
            self.ddp.register_comm_hook(None, send_nothing)
        else:
            settings: dict[str, Any] = {"density": density, "grouping": grouping, "watch": None}
            if name == "lags":
                settings |= {"density": ls.tuning.HiddenDensity(density / 10, 10 * density), "grouping": "layer"}
            elif name not in VARIANTS:
                kind, _, numel = name.partition(":")
                settings["grouping"] = ls.grouping.MergeBelow(float(numel)) if numel else kind
            self.engine = ls.attach(self.ddp, overlap=name != "step", bucket_cap_mb=BUCKET_MB, **settings)

    def step(self, batch: Any, link: Link) -> dict[str, float]:
        """One step that ranks start together: milliseconds of it, of its messages, and of early ones."""
        self.optimizer.zero_grad()
        loss = self.ddp(batch)
        dist.barrier()
        link.taken.clear()
        begin = time.perf_counter()
        loss.backward()
        middle = time.perf_counter()
        self.optimizer.step()
        end = time.perf_counter()
        early = begin + EARLY * (middle - begin)
        return {
            "ms": 1e3 * (end - begin),
            "messages": 1e3 * sum(seconds for _, seconds in link.taken),
            "early": 1e3 * sum(seconds for start, seconds in link.taken if start < early),
            "waits": 0.0 if self.engine is None else self.engine.stepper.exposed_ms() or 0.0,
        }

    def promised(self) -> dict[str, float]:
        """By the profile of a grouping that is measured, if it has one: what the exchange adds, in milliseconds, and
        the step as a multiple of the shortest of all ways to merge layers."""
        found = [one for one in self.engine.observers if isinstance(one, Planner)] if self.engine else []
        if not found or (profile := found[0].profile) is None:
            return {}
        assert self.engine is not None
        settings = self.engine.settings
        density, plan = settings.density(LATE), list(self.engine.groups)
        seconds = profile.step_seconds(plan, density)
        promised = {"adds": 1e3 * (seconds - profile.compute_seconds)}
        sizes = [ParameterSize.of(name, p) for name, p in self.ddp.module.named_parameters()]
        layers = make_plan(sizes, "layer", settings.rules, BUCKET_MB)
        ordered, _ = profile.timeline(layers)
        if not settings.density.needs_profile and len(ordered) <= MOST_LAYERS:
            dense = [group for group in layers if group.dense]
            best = min(profile.step_seconds([*dense, *groups], density) for groups in merged(ordered))
            promised["of all"] = seconds / best
        return promised

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def merged(layers: Sequence[Group]) -> Iterator[list[Group]]:
    """All ways to merge neighbours."""
    for cuts in product((False, True), repeat=len(layers) - 1):
        groups = [layers[0]]
        for layer, apart in zip(layers[1:], cuts, strict=True):
            if apart:
                groups.append(layer)
            else:
                groups[-1] = groups[-1]._replace(parameters=(*groups[-1].parameters, *layer.parameters))
        yield groups


def measure(job: dict[str, Any]) -> None:
    """What each rank does; rank 0 writes the rounds to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    link = Link(job["mbit"], waits=job["link"] == "wait")
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batch = MODELS[job["model"]].random_batch(generator)
    names = job["variants"]
    variants = {name: Variant(name, job["model"], job["density"], job["grouping"]) for name in names}
    for name, variant in variants.items():  # DDP rebuilds its buckets after the first step, optimizers are known then
        for _ in range(18 if name in MEASURED else 3):
            variant.step(batch, link)
    rounds = []
    for number in range(job["rounds"]):
        found = {}
        for name in names if number % 2 == 0 else names[::-1]:
            steps = [variants[name].step(batch, link) for _ in range(1 + job["steps"])][1:]
            middle = torch.tensor([median(step[key] for step in steps) for key in steps[0]])
            dist.all_reduce(middle, op=dist.ReduceOp.MAX)
            found[name] = dict(zip(steps[0], middle.tolist(), strict=True))
        rounds.append(found)
    if dist.get_rank() == 0:
        promised = {name: variant.promised() for name, variant in variants.items()}
        Path(job["out"]).write_text(json.dumps({"rounds": rounds, "promised": promised}))
    for variant in variants.values():
        variant.close()
    dist.destroy_process_group()


def run(job: dict[str, Any], seconds: float) -> str | None:
    """Start both ranks; what went wrong, if anything."""
    words = [sys.executable, str(Path(__file__)), "--job", json.dumps(job)]
    if job["link"] == "shaped":
        with network(2) as processes:
            limit(int(job["mbit"]), 2)
            return launch(words, 2, processes, seconds)
    port = free_port()
    ranks = [subprocess.Popen(words, env=_environment(rank, port)) for rank in range(2)]
    try:
        codes = [rank.wait(timeout=seconds) for rank in ranks]
        return f"ranks ended with {codes}" if any(codes) else None
    except subprocess.TimeoutExpired:
        return f"not finished after {seconds:.0f} s"
    finally:
        for rank in ranks:
            rank.kill()


def _environment(rank: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {**os.environ, **{key: str(value) for key, value in own.items()}}


def row_of(job: dict[str, Any], rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds."""

    def middle(of: Any) -> float:
        return median(of(one) for one in rounds)

    saved = [one["step"]["ms"] - one["overlap"]["ms"] for one in rounds]
    early = middle(lambda one: one["overlap"]["early"])
    return {
        "link": f"{job['link']}, {job['mbit']:g} Mbit/s",
        "model": job["model"],
        "density": job["density"],
        "noop ms": middle(lambda one: one["noop"]["ms"]),
        "step adds": middle(lambda one: one["step"]["ms"] - one["noop"]["ms"]),
        "overlap adds": middle(lambda one: one["overlap"]["ms"] - one["noop"]["ms"]),
        "step waits": middle(lambda one: one["step"]["waits"]),
        "overlap waits": middle(lambda one: one["overlap"]["waits"]),
        "messages": middle(lambda one: one["overlap"]["messages"]),
        "early": early,
        "hidden of early": middle(lambda one: one["step"]["waits"] - one["overlap"]["waits"]) / early if early else 0.0,
        "shorter": f"{sum(one > 0 for one in saved)}/{len(saved)}" + ("" if median(saved) > 0 else " LOSES"),
    }


def grouping_rows(
    job: dict[str, Any], rounds: list[dict[str, dict[str, float]]], promised: dict[str, dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each grouping."""
    names = [name for name in rounds[0] if name != "noop"]
    fixed = [name for name in names if name not in MEASURED]
    best = min(fixed, key=lambda name: median(one[name]["ms"] for one in rounds))
    return [
        {
            "link": f"{job['link']}, {job['mbit']:g} Mbit/s",
            "model": job["model"],
            "density": job["density"],
            "grouping": name,
            "step ms": median(one[name]["ms"] for one in rounds),
            "adds": median(one[name]["ms"] - one["noop"]["ms"] for one in rounds),
            "predicted": promised[name].get("adds", ""),
            "predicted / of all": promised[name].get("of all", ""),
            "/ best fixed": median(one[name]["ms"] / one[best]["ms"] for one in rounds),
        }
        for name in names
    ]


def save(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write rows of a table, those before included."""
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


PAGE = {
    "exposed": ("link", "model", "density", "step waits", "overlap waits", "early", "hidden of early", "shorter"),
    "groupings": ("link", "model", "grouping", "adds", "predicted", "predicted / of all", "/ best fixed"),
}
HEADINGS = {
    "step waits": "training waits, ms",
    "overlap waits": "with overlap",
    "early": "messages of early groups",
    "hidden of early": "hidden of these",
    "shorter": "rounds with a shorter step",
    "adds": "added to a step, ms",
    "predicted": "predicted",
    "predicted / of all": "predicted step / shortest of all groupings",
    "/ best fixed": "step / best fixed grouping",
}


def write_page(page: Path, files: Sequence[Path]) -> None:
    """Write tables of measured rows between the comments of a page, and print cells that lose."""
    text = page.read_text()
    every: list[dict[str, str]] = []
    for file in files:
        with file.open(newline="") as opened:
            every += csv.DictReader(opened)
    for kind, names in PAGE.items():
        rows = [row for row in every if ("grouping" in row) == (kind == "groupings")]
        if not rows:
            continue
        lines = ["| " + " | ".join(HEADINGS.get(name, name) for name in names) + " |", "| --- " * len(names) + "|"]
        lines += ["| " + " | ".join(map(shown, (row[name] for name in names))) + " |" for row in rows]
        begin, end = f"<!-- {kind} -->", f"<!-- end of {kind} -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = "\n".join([before + begin, "", *lines, "", end + after])
    for row in every:
        if loses(row):
            print("loses:", ", ".join(map(shown, row.values())))
    page.write_text(text)


def loses(row: dict[str, str]) -> bool:
    """True if overlap, measured groups or densities do not hold what they promise."""
    if row.get("grouping") == "lags":
        promised, adds = float(row["predicted"]), float(row["adds"])
        return adds > promised + max(3.0, 0.1 * promised)
    return row.get("shorter", "").endswith("LOSES") or (
        row.get("grouping") == "optimal_merge" and float(row["/ best fixed"]) > MOST_OVER_BEST
    )


def shown(cell: str) -> str:
    """A number with three digits, and words as they are."""
    try:
        return f"{float(cell):.3g}"
    except ValueError:
        return cell.replace(" LOSES", ", **loses**")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", choices=["wait", "shaped"], default=["wait"])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["lstm", "vgg"])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.001])
    parser.add_argument("--grouping", default="layer")
    parser.add_argument("--groupings", nargs="+", help="compare these, with overlap: names, and lags")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="per turn, besides one to warm up (default: 3)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one cell (default: 900)")
    parser.add_argument("--csv", type=Path, help="file for the rows of the table")
    parser.add_argument("--docs", type=Path, help="page whose tables are written anew, from files of --rows")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="files that --csv has written")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.docs:
        write_page(arguments.docs, arguments.rows)
        return
    if arguments.job:
        measure(json.loads(arguments.job))
        return
    if "shaped" in arguments.links and (reason := why_not()):
        print(f"No shaped links: {reason}.")
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # namespaces and ranks do not outlive this
        signal.signal(number, stop)
    rows = []
    for link in arguments.links:
        for model in arguments.models:
            for mbit in arguments.mbit:
                for density in arguments.densities:
                    with tempfile.TemporaryDirectory() as folder:
                        job = {"link": link, "model": model, "mbit": mbit, "density": density}
                        job |= {"rounds": arguments.rounds, "steps": arguments.steps, "grouping": arguments.grouping}
                        job["variants"] = ["noop", *arguments.groupings] if arguments.groupings else list(VARIANTS)
                        job["out"] = str(Path(folder) / "rounds.json")
                        problem = run(job, arguments.timeout)
                        print(f"{link} {model} {mbit:g} Mbit/s, density {density:g}: {problem or 'done'}", flush=True)
                        if Path(job["out"]).exists():
                            found = json.loads(Path(job["out"]).read_text())
                            rounds, groupings = found["rounds"], arguments.groupings
                            rows += grouping_rows(job, *found.values()) if groupings else [row_of(job, rounds)]
                            if arguments.csv:
                                save(rows, arguments.csv)
    if not rows:
        return
    texts = [[f"{one:.3g}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    Table("what an exchange adds to a step, in ms", list(rows[0]), texts, left=(0, 1)).show()
    print(in_words(about()))


if __name__ == "__main__":
    main()
