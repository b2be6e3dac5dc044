"""What do overlap and grouping bring when ranks talk over slow links?

Four ranks, or as many as `--ranks` says, live in network namespaces of this machine. A virtual cable leads from each of
them to a bridge in one more namespace, and a token bucket filter at both ends of every cable limits what a rank sends
and what it receives to the given rate each. They train the models of `models14m.py` (10 to 15 million parameters) on
random data, with gloo.

Parts, each for every model and rate:

- overlap: every sparsifier with buckets of 25 MiB and with layers merged below 8192 coordinates, executors inline and
  thread. How much of the time for selection and exchange does backward still wait for?
- plans: one sparsifier on the communication thread with different groupings: layer, bucket, merge_below, model, and
  optimal_merge, which measures for some steps and regroups by itself.
- messages: those of all groups of a step together, and those of each group by themselves (`messages`), for UnionTopK by
  bucket and by layer.
- advice: `ls.advise` predicts step times of some sparsifiers; then they are measured with three groupings.

All parts also measure `dense` (plain DDP, which overlaps its all-reduce with backward) and `compute` (`no_sync`, no
exchange at all). All variants of a model, rate and part (of overlap: of a grouping, too) run in the same processes and
take turns of some steps, in an order that is reversed from round to round; a variant is made for its turn and is gone
after it, so that each has the machine's memory for itself. All ranks start a step together; a step's
time is the slowest rank's; `select_ms`, `exchange_ms` and `exposed_ms` are the library's, means over ranks. `dense` is
slow and takes part in some rounds only; other rounds are paired with the nearest of these. Ratios are medians of
paired rounds, with quartiles, below 1 is faster.

Held fixed: model, batch, SGD, one compute thread per rank; messages of each group travel by themselves, but in the part
messages, and in the part advice, where they travel as predicted. DDP's buckets are of 25 MiB after a first one of
1 MiB; as a group cannot start before DDP hands over the buckets that hold it, `--plan-bucket-mb` makes them smaller for
the plans other than bucket. The latency of the virtual cables is far below a real network's, and the ranks share the
cores of one machine: what this shows is bandwidth.

Needs root (network namespaces) and the commands ip and tc; says so and ends with 0 otherwise. Namespaces are removed at
the end whatever happens. Results are kept in the folder `--out` after every round; `--tables` prints them again.

    sudo python benchmarks/shaped_links.py
    sudo python benchmarks/shaped_links.py --parts plans --models vgg --mbit 100 --rounds 20 --csv plans.csv
    sudo python benchmarks/shaped_links.py --ranks 2 --parts overlap --models mlp --mbit 100 1000 10000
    python benchmarks/shaped_links.py --tables --out shaped_links
"""

import argparse
import csv
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

MOST = 16  # ranks
NAMESPACES = [f"shaped-{os.getpid()}-{rank}" for rank in range(MOST)]
MIDDLE = f"shaped-{os.getpid()}-bridge"
CABLE = "cable"
PORTS = [f"port{rank}" for rank in range(MOST)]
ADDRESSES = [f"10.78.0.{rank + 1}" for rank in range(MOST)]
GROUPINGS = ("layer", "bucket", "merge_below", "model", "optimal_merge")
EXECUTORS = ("inline", "thread")
MESSAGES = ("group", "step")
TIMES = ("step_ms", "select_ms", "exchange_ms", "exposed_ms")

Job = dict[str, Any]
"""The arguments of the command line, and part, model and rate of one launch."""
Result = dict[str, Any]
"""What a launch measured: job, parameters, groups of each variant, one record per variant and round, memory."""


# The network, and processes in it


def command(*words: str, check: bool = True) -> None:
    subprocess.run(words, check=check, stderr=subprocess.PIPE, text=True)


def build(ranks: int) -> None:
    for name in (MIDDLE, *NAMESPACES[:ranks]):
        command("ip", "netns", "add", name)
        command("ip", "-n", name, "link", "set", "lo", "up")
    command("ip", "-n", MIDDLE, "link", "add", "bridge", "type", "bridge")
    command("ip", "-n", MIDDLE, "link", "set", "bridge", "up")
    for name, port, address in list(zip(NAMESPACES, PORTS, ADDRESSES, strict=True))[:ranks]:
        ends = f"{CABLE} type veth peer name {port} netns {MIDDLE}"
        command("ip", "-n", name, "link", "add", *ends.split())
        command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
        command("ip", "-n", name, "link", "set", CABLE, "up")
        command("ip", "-n", MIDDLE, "link", "set", port, "master", "bridge", "up")


def limit(mbit: int, ranks: int) -> None:
    """Both ends of every cable: a rank's own end limits what it sends, the bridge's end what it receives."""
    # A bucket of 1 ms at full rate: less and the kernel's timer decides the rate, more and messages that fit into the
    # bucket are as good as free. At least some frames.
    burst = max(16 * 1024, mbit * 1_000_000 // 8 // 1000)
    shape = f"tbf rate {mbit}mbit burst {burst} latency 100ms"
    for name, device in [*((name, CABLE) for name in NAMESPACES[:ranks]), *((MIDDLE, port) for port in PORTS[:ranks])]:
        command("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *shape.split())


@contextmanager
def network(ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Builds the namespaces; ends the processes that were put into the list and removes the namespaces at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        build(ranks)
        yield processes
    finally:
        end(processes)
        for name in (*NAMESPACES[:ranks], MIDDLE):
            command("ip", "netns", "del", name, check=False)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    processes.clear()


def stop(number: int, frame: Any) -> None:
    """A signal ends the program once, through all `finally`; a second one must not interrupt them."""
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def launch(job: Job, processes: list[subprocess.Popen[bytes]], seconds: float) -> str | None:
    """All ranks of one part, each in its namespace, as torchrun would start them; what went wrong, if anything."""
    for rank, name in enumerate(NAMESPACES[: job["ranks"]]):
        local = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "ROLE_RANK": rank,
            "GROUP_RANK": 0,
            "WORLD_SIZE": job["ranks"],
            "LOCAL_WORLD_SIZE": job["ranks"],
            "ROLE_WORLD_SIZE": job["ranks"],
            "GROUP_WORLD_SIZE": 1,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": 29400,
            "TORCHELASTIC_RUN_ID": NAMESPACES[0],
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": CABLE,
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # warns that addresses have no names
        }
        environment = os.environ | {key: str(value) for key, value in local.items()}
        words = ["ip", "netns", "exec", name, sys.executable, __file__, "--job", json.dumps(job)]
        processes.append(subprocess.Popen(words, env=environment))
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes):
                return f"ranks ended with {codes}"
            if None not in codes:
                return None
            time.sleep(0.1)
        return f"not finished after {seconds:.0f} s"
    finally:
        end(processes)


# Inside a rank


class Spec(NamedTuple):
    """How one variant exchanges gradients."""

    name: str
    sparsifier: str | None = None
    grouping: str = "bucket"
    executor: str = "inline"
    bucket_cap_mb: float = 25
    warm_up: int = 2  # DDP rebuilds its buckets after the first iteration
    messages: Literal["step", "group"] = "group"


class Variant:
    """One copy of the model with its own DDP."""

    def __init__(self, spec: Spec, job: Job) -> None:
        import torch
        from models14m import MODELS
        from torch.nn.parallel import DistributedDataParallel

        import lightning_sparse as ls

        self.spec = spec
        torch.manual_seed(0)
        model = MODELS[job["model"]]()
        # The models are equal already; to send them takes a while.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=spec.bucket_cap_mb, init_sync=False)
        self.engine: ls.Engine | None = None
        if spec.sparsifier is not None:
            self.engine = ls.attach(
                self.ddp,
                sparsifier=spec.sparsifier,
                density=job["density"],
                grouping=spec.grouping,
                messages=spec.messages,
                executor=spec.executor,
                rules=ls.Rules(dense_ndim=0, dense_numel=0),  # as the predictions that are compared assume
                watch=None,
                bucket_cap_mb=25,
            )
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)

    def step(self, batch: Any) -> float:
        """Milliseconds of one training step on this rank; the ranks start together."""
        import torch.distributed as dist

        dist.barrier()
        begin = time.perf_counter()
        with self.ddp.no_sync() if self.spec.name == "compute" else nullcontext():
            self.ddp(batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # here: variants that wait for their turn hold no gradients
        return 1e3 * (time.perf_counter() - begin)

    def times(self) -> dict[str, float]:
        """Of the latest step, outside the clock: asks all ranks."""
        summary = {} if self.engine is None else self.engine.summary()
        return {name: summary[name] for name in TIMES if name in summary}

    @property
    def groups(self) -> int | None:
        return None if self.engine is None else len(self.engine.plan)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def take_turns(job: Job, specs: list[Spec], result: Result, keep: Callable[[], None], **common: Any) -> None:
    """Add a record per variant and round to the result.

    Args:
        job: settings.
        specs: variants.
        result: gets `groups` and `records`.
        keep: called after every round.
        common: entries that all records get.
    """
    import torch
    import torch.distributed as dist
    from models14m import MODELS

    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1 + rank)
    batches = [MODELS[job["model"]].random_batch(generator, job["batch_size"]) for _ in range(4)]
    for round_ in range(job["rounds"]):
        turns = [spec for spec in specs if spec.name != "dense" or is_dense_round(round_, job)]
        for spec in turns[:: 1 if round_ % 2 == 0 else -1]:
            variant = Variant(spec, job)
            for step in range(spec.warm_up):
                variant.step(batches[step % len(batches)])
            for step in range(2 if spec.name == "dense" else job["steps"]):
                taken = torch.tensor(variant.step(batches[step % len(batches)]))
                times = variant.times()
                dist.all_reduce(taken, op=dist.ReduceOp.MAX)
                result["records"].append(
                    {**common, "round": round_, "variant": spec.name, "step_ms": taken.item(), **times}
                )
            result["groups"][spec.name] = variant.groups
            variant.close()
            del variant
            gc.collect()  # DDP refers to itself
        keep()


def is_dense_round(round_: int, job: Job) -> bool:
    """At least twice."""
    every = min(job["dense_every"], job["rounds"] - 1)
    return round_ % every == 0


PLAIN = [Spec("compute", warm_up=1), Spec("dense", warm_up=1)]


def measure_overlap(job: Job, result: Result, keep: Callable[[], None]) -> None:
    for grouping in ("bucket", "merge_below"):
        specs = [
            Spec(f"{sparsifier} {grouping} {executor}", sparsifier, grouping, executor)
            for sparsifier in job["sparsifiers"]
            for executor in EXECUTORS
        ]
        take_turns(job, [*PLAIN, *specs], result, keep, grouping=grouping)


def measure_plans(job: Job, result: Result, keep: Callable[[], None]) -> None:
    import lightning_sparse as ls

    specs = [
        Spec(
            grouping,
            job["sparsifier"],
            grouping,
            "thread",
            25 if grouping == "bucket" else job["plan_bucket_mb"],
            job["profile_steps"] if grouping == "optimal_merge" else 2,
        )
        for grouping in GROUPINGS
        if grouping != "optimal_merge" or hasattr(ls, "OptimalMerge")
    ]
    take_turns(job, [*PLAIN, *specs], result, keep)


def measure_messages(job: Job, result: Result, keep: Callable[[], None]) -> None:
    # As the strategy does where exchanges go on beside backward: up to 32 buckets.
    small = max(1.0, result["parameters"] * 4 / (1 << 20) / 32)
    specs = [
        Spec(f"{grouping} {messages}", "union_topk", grouping, "thread", small, messages=messages)
        for grouping in ("bucket", "layer")
        for messages in MESSAGES
    ]
    take_turns(job, [*PLAIN, *specs], result, keep)


ADVISED = ("bucket", "layer", "model")
"""Groupings in which the advisor's predictions are tried."""


def measure_advice(job: Job, result: Result, keep: Callable[[], None]) -> None:
    """Ask the advisor as a user would, then see whether it was right."""
    import pytorch_lightning as pl
    import torch
    import torch.distributed as dist
    from models14m import MODELS

    import lightning_sparse as ls

    kind = MODELS[job["model"]]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [kind.random_batch(generator, job["batch_size"]) for _ in range(4)]
    module = Module()
    begin = time.perf_counter()
    advice = ls.advise(
        module,
        train_dataloaders=torch.utils.data.DataLoader(batches, batch_size=None),
        trainer={"devices": job["ranks"], "accelerator": "cpu"},
        sparsifiers=job["sparsifiers"],
        densities=[job["density"]],
    )
    predicted = [p for p in advice.predictions if p.method in job["sparsifiers"] and p.grouping in ADVISED]
    result["advice"] = {
        "seconds": time.perf_counter() - begin,
        "verdict": advice.verdict(),
        "measured": advice.assumptions()[:2],
        "costs": {f"{method.name} {method.density:g}": str(method.cost) for method in advice.measured.methods},
        "predicted": {
            "compute": 1e3 * advice.measured.profile.compute_seconds,
            "dense": 1e3 * advice.step_seconds("dense"),
            **{f"{p.method} {p.grouping}": 1e3 * p.step_seconds for p in predicted},
        },
    }
    # As the strategy does where exchanges go on beside backward.
    small = max(1.0, sum(p.nbytes for p in module.parameters()) / (1 << 20) / 32)
    specs = [
        Spec(f"{p.method} {p.grouping}", p.method, p.grouping, "thread", small, messages=p.messages) for p in predicted
    ]
    take_turns(job, [*PLAIN, *specs], result, keep)


def rank_main(job: Job) -> None:
    """Run a part; rank 0 keeps what was measured."""
    import resource

    import torch
    import torch.distributed as dist
    from models14m import MODELS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numel = sum(p.numel() for p in MODELS[job["model"]]().parameters())
    result: Result = {"job": job, "parameters": numel, "groups": {}, "records": [], "finished": False}

    def keep() -> None:
        if dist.get_rank() == 0:
            result["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            path = path_of(job)
            path.with_suffix(".new").write_text(json.dumps(result))
            path.with_suffix(".new").replace(path)

    PARTS[job["part"]].measure(job, result, keep)
    result["finished"] = True
    keep()
    dist.barrier()
    dist.destroy_process_group()


def path_of(job: Job) -> Path:
    return Path(job["out"]) / f"{job['part']}-{job['model']}-{job['mbit']}.json"


# Tables


class Ratio(NamedTuple):
    """Over paired rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Ratio":
        low, middle, high = quantiles(ratios * 2 if len(ratios) == 1 else ratios, n=4, method="inclusive")
        return cls(middle, low, high)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


class Rounds:
    """The records of variants that took turns."""

    def __init__(self, result: Result, **chosen: Any) -> None:
        self.result = result
        self.records = [r for r in result["records"] if all(r[key] == value for key, value in chosen.items())]
        self.variants = list(dict.fromkeys(r["variant"] for r in self.records))
        self.sparse = [name for name in self.variants if name not in ("compute", "dense")]

    def values(self, variant: str, *names: str) -> dict[int, float]:
        """By round, medians over its steps; of several quantities, their sum."""
        steps: dict[int, list[float]] = {}
        for record in self.records:
            if record["variant"] == variant:
                steps.setdefault(record["round"], []).append(sum(record[name] for name in names))
        return {round_: median(found) for round_, found in steps.items()}

    def median(self, variant: str, *names: str) -> float:
        return median(self.values(variant, *names).values())

    def ratio(self, variant: str, names: tuple[str, ...], other: str, other_names: tuple[str, ...]) -> Ratio:
        """Each round of one paired with the nearest round of the other."""
        above, below = self.values(variant, *names), self.values(other, *other_names)
        return Ratio.of([value / below[min(below, key=lambda r: abs(r - round_))] for round_, value in above.items()])

    def steps(self, variant: str, other: str) -> Ratio:
        return self.ratio(variant, ("step_ms",), other, ("step_ms",))


Row = dict[str, Any]


def overlap_rows(result: Result) -> list[Row]:
    """A row for inline and a row for thread of each sparsifier and grouping."""
    rows = []
    for grouping in dict.fromkeys(r["grouping"] for r in result["records"]):
        rounds = Rounds(result, grouping=grouping)
        rows += [
            {"variant": f"{name} (beside {grouping})", "step ms": rounds.median(name, "step_ms")}
            for name in ("compute", "dense")
        ]
        for thread in (name for name in rounds.sparse if name.endswith("thread")):
            inline = thread.removesuffix("thread") + "inline"
            for name in (inline, thread):
                row = described(rounds, name)
                if name == thread:
                    row |= {
                        "step / inline": rounds.steps(thread, inline),
                        "exposed / inline's": rounds.ratio(thread, ("exposed_ms",), inline, ("exposed_ms",)),
                        "exposed / own sum": rounds.ratio(
                            thread, ("exposed_ms",), thread, ("select_ms", "exchange_ms")
                        ),
                    }
                rows.append(row)
    return rows


def plans_rows(result: Result) -> list[Row]:
    rounds = Rounds(result)
    if not rounds.sparse:
        return []
    best = min((n for n in rounds.sparse if n != "optimal_merge"), key=lambda name: rounds.median(name, "step_ms"))
    rows: list[Row] = [{"variant": name, "step ms": rounds.median(name, "step_ms")} for name in ("compute", "dense")]
    for name in sorted(rounds.sparse, key=GROUPINGS.index):
        row = described(rounds, name)
        row["step / best fixed"] = "best" if name == best else rounds.steps(name, best)
        rows.append(row)
    return rows


def messages_rows(result: Result) -> list[Row]:
    rounds = Rounds(result)
    rows: list[Row] = [{"variant": name, "step ms": rounds.median(name, "step_ms")} for name in ("compute", "dense")]
    for name in rounds.sparse:
        row = described(rounds, name)
        grouping, messages = name.split()
        if messages == "step" and (by_group := f"{grouping} group") in rounds.sparse:
            row["step / group's"] = rounds.steps(name, by_group)
        rows.append(row)
    return rows


def described(rounds: Rounds, name: str) -> Row:
    return {
        "variant": name,
        "groups": rounds.result["groups"][name],
        **{f"{quantity[:-3]} ms": rounds.median(name, quantity) for quantity in TIMES},
        "step / dense": rounds.steps(name, "dense"),
    }


def advice_rows(result: Result) -> list[Row]:
    """In order of the predictions."""
    rounds = Rounds(result)
    predicted = result["advice"]["predicted"]
    return [
        {
            "variant": name,
            "step ms": rounds.median(name, "step_ms"),
            "predicted ms": predicted[name],
            "predicted / measured": Ratio.of([predicted[name] / ms for ms in rounds.values(name, "step_ms").values()]),
        }
        | ({} if name in ("compute", "dense") else {"step / dense": rounds.steps(name, "dense")})
        for name in sorted(rounds.variants, key=predicted.__getitem__)
    ]


class Part(NamedTuple):
    """What ranks do, and how it is shown."""

    measure: Callable[[Job, Result, Callable[[], None]], None]
    rows: Callable[[Result], list[Row]]


PARTS = {
    "overlap": Part(measure_overlap, overlap_rows),
    "plans": Part(measure_plans, plans_rows),
    "messages": Part(measure_messages, messages_rows),
    "advice": Part(measure_advice, advice_rows),
}


def show(results: list[Result], csv_path: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=165)
    flat: list[Row] = []
    for result in results:
        job = result["job"]
        rows = PARTS[job["part"]].rows(result)
        headings = list(dict.fromkeys(key for row in rows for key in row))
        rounds = 1 + max((record["round"] for record in result["records"]), default=-1)
        table = Table(
            title=f"{job['part']}: {job['model']}, {result['parameters']:,} parameters, {job['mbit']} Mbit/s; "
            f"{job['ranks']} ranks on {os.cpu_count()} cores, gloo, density {job['density']:g}",
            caption=f"{rounds} rounds{'' if result['finished'] else ', interrupted'}, up to {result['memory_mib']} MiB "
            "a rank; times: medians; ratios: medians (quartiles) of paired rounds, below 1 is faster",
        )
        for heading in headings:
            wide = heading == "variant" or " / " in heading
            table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=wide)
        for row in rows:
            table.add_row(*(text(heading, row.get(heading)) for heading in headings))
            settings = {key: job[key] for key in ("part", "model", "mbit", "density", "rounds")}
            flat.append({**settings, "parameters": result["parameters"]})
            for heading, value in row.items():
                flat[-1] |= spread(heading, value)
        console.print(table)
    if csv_path and flat:
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in flat for key in row)))
            writer.writeheader()
            writer.writerows(flat)


def text(heading: str, value: Any) -> str:
    if isinstance(value, Ratio):
        return f"{value}{' slower' if heading.startswith('step') and value.middle > 1 else ''}"
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def spread(heading: str, value: Any) -> Row:
    """For the CSV file: a ratio as three columns."""
    name = heading.replace("'s", "").replace(" / ", "_over_").replace(" ", "_")
    if isinstance(value, Ratio):
        return {name: value.middle, f"{name}_lower_quartile": value.low, f"{name}_upper_quartile": value.high}
    return {name: value}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=["lstm", "vgg", "mlp"], default=["lstm", "vgg"])
    parser.add_argument("--ranks", type=int, default=4, help=f"at most {MOST} (default: 4)")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000], help="link rates (default: 100 1000)")
    parser.add_argument("--sparsifiers", nargs="+", default=["topk", "exdyna", "shared_topk", "union_topk"])
    parser.add_argument("--sparsifier", default="topk", help="of the plans (default: topk)")
    parser.add_argument("--density", type=float, default=0.01, help="(default: 0.01)")
    parser.add_argument("--batch-size", type=int, help="rows per rank (default: the model's own, see models14m.py)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant, at least 2 (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="per turn, besides 2 to warm up (default: 4)")
    parser.add_argument("--dense-every", type=int, default=2, help="dense takes part in one of so many (default: 2)")
    parser.add_argument("--profile-steps", type=int, default=20, help="of optimal_merge, not timed (default: 20)")
    parser.add_argument("--plan-bucket-mb", type=float, default=25, help="DDP's, not of the plan bucket (default: 25)")
    parser.add_argument("--timeout", type=float, default=400, help="seconds for one model, rate and part")
    parser.add_argument("--out", type=Path, default=Path("shaped_links"), help="folder of results")
    parser.add_argument("--csv", type=Path, help="file for the rows of all tables")
    parser.add_argument("--tables", action="store_true", help="measure nothing, show what --out holds")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.dense_every < 1 or not 2 <= arguments.ranks <= MOST:
        parser.error(f"expected 2 to {MOST} ranks, at least 2 rounds, and --dense-every to be at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> list[str]:
    """All parts; what failed."""
    failed = []
    settings = {k: v for k, v in vars(arguments).items() if k not in ("csv", "tables", "job", "timeout")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    with network(arguments.ranks) as processes:
        for model in arguments.models:
            for mbit in arguments.mbit:
                limit(mbit, arguments.ranks)
                for part in arguments.parts:
                    job = settings | {"part": part, "model": model, "mbit": mbit, "out": str(arguments.out)}
                    begin = time.monotonic()
                    problem = launch(job, processes, arguments.timeout)
                    took = f"{time.monotonic() - begin:.0f} s"
                    print(f"{part} {model} {mbit} Mbit/s: {problem or 'done'}, {took}", flush=True)
                    failed += [problem] if problem else []
    return failed


def main() -> int:
    arguments = parse_arguments()
    if arguments.job is not None:
        rank_main(arguments.job)
        return 0
    failed = []
    if not arguments.tables:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
            print("skipped: network namespaces need root, and the commands ip and tc (iproute2)")
            return 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        try:
            failed = measure(arguments)
        except subprocess.CalledProcessError as error:
            print(f"skipped: {' '.join(error.cmd)} failed: {error.stderr.strip()}")
            return 0
    show([json.loads(path.read_text()) for path in sorted(arguments.out.glob("*.json"))], arguments.csv)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
