"""Does sparsification make a step faster when the link is slow?

Two ranks live in two network namespaces of this machine, joined by one virtual cable whose rate is limited in both
directions (a token bucket filter), and train the multilayer perceptron of `executor.py` on random data with gloo. Per
link rate, every variant takes turns for a few steps, in an order that is reversed from round to round:

- compute: no exchange at all, the floor;
- dense: plain DDP, which overlaps its all-reduce with backward;
- <sparsifier> inline / thread: without / with overlap, density 0.01.

Held fixed: model, batch, optimizer, DDP's buckets of 25 MiB, one compute thread per rank. Times are of whole training
steps, medians over rounds of the slower rank's; ratios are medians of paired rounds, with quartiles, below 1 is faster
than dense. The latency of the virtual cable is that of one machine's kernel, far below a real network's, and both ranks
share its cores: what this shows is bandwidth.

Needs root (network namespaces); says so and ends with 0 otherwise. Namespaces are removed at the end whatever happens.

    sudo python benchmarks/limited_link.py
    sudo python benchmarks/limited_link.py --mbit 100 1000 10000 --models 2M 10M --csv links.csv
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median, quantiles
from typing import Any

RANKS = 2
NAMESPACES = [f"sparse-link-{os.getpid()}-{rank}" for rank in range(RANKS)]
CABLES = [f"cable{rank}" for rank in range(RANKS)]
SPARSIFIERS = ("union_topk", "exdyna", "topk")


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)


def build() -> None:
    for name in NAMESPACES:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
    ends = [f"type veth peer name {CABLES[1]} netns {NAMESPACES[1]}"]
    run("ip", "-n", NAMESPACES[0], "link", "add", CABLES[0], *ends[0].split())
    for rank, (name, cable) in enumerate(zip(NAMESPACES, CABLES, strict=True)):
        run("ip", "-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", cable)
        run("ip", "-n", name, "link", "set", cable, "up")


def limit(mbit: int) -> None:
    # A bucket of 1 ms at full rate, at least two large frames: less and the kernel's timer decides the rate.
    burst = max(2 * 64 * 1024, mbit * 1_000_000 // 8 // 1000)
    for name, cable in zip(NAMESPACES, CABLES, strict=True):
        shape = f"tbf rate {mbit}mbit burst {burst} latency 100ms"
        run("tc", "-n", name, "qdisc", "replace", "dev", cable, "root", *shape.split())


def remove() -> None:
    for name in NAMESPACES:
        run("ip", "netns", "del", name, check=False)


def launch(model: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both ranks, each in its namespace; what rank 0 measured."""
    result = folder / "result.json"
    processes = []
    for rank, (name, cable) in enumerate(zip(NAMESPACES, CABLES, strict=True)):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": cable,
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29400",
        }
        command = ["ip", "netns", "exec", name, sys.executable, __file__, "--rank", str(rank), "--result", str(result)]
        command += ["--models", model, "--rounds", str(arguments.rounds), "--steps", str(arguments.steps)]
        command += ["--density", str(arguments.density), "--batch-size", str(arguments.batch_size)]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        codes = [process.wait(arguments.timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return json.loads(result.read_text())


def rank_main(arguments: argparse.Namespace) -> None:
    """Inside a namespace: take turns, write step times of all variants in ms, (rounds,) medians of the slower rank."""
    import torch
    import torch.distributed as dist
    from executor import EXECUTORS, MODELS, Case, Variant

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=arguments.rank, world_size=RANKS)
    [model] = arguments.models
    arguments.bucket_cap_mb = 25
    variants = {name: Variant(name, Case(model, "topk"), arguments) for name in ("compute", "dense")}
    for sparsifier in SPARSIFIERS:
        for executor in EXECUTORS:
            variants[f"{sparsifier} {executor}"] = Variant(executor, Case(model, sparsifier), arguments)
    generator = torch.Generator().manual_seed(1 + arguments.rank)
    inputs = torch.randn(arguments.batch_size, MODELS[model][0], generator=generator)
    targets = torch.randn(inputs.shape, generator=generator)
    for variant in variants.values():  # DDP rebuilds its buckets after the first iteration
        for _ in range(2):
            variant.step(inputs, targets)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(arguments.rounds):
        for name in list(variants)[:: 1 if round_ % 2 == 0 else -1]:
            steps = torch.tensor([variants[name].step(inputs, targets) for _ in range(arguments.steps + 1)][1:])
            dist.all_reduce(steps, op=dist.ReduceOp.MAX)
            times[name].append(1e3 * float(steps.median()))
    if arguments.rank == 0:
        arguments.result.write_text(json.dumps({"numel": variants["dense"].numel, "times": times}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000, 10000], help="link rates")
    parser.add_argument("--models", nargs="+", default=["10M"], help="of executor.py")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=64, help="rows per rank")
    parser.add_argument("--rounds", type=int, default=6, help="turns of every variant, at least 2")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn, besides one to warm up")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for one model and rate")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments)
        return
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        print("skipped: network namespaces need root, and the commands ip and tc (iproute2)")
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{RANKS} ranks on {os.cpu_count()} cores, gloo over a limited link, density {arguments.density}, "
        f"batch {arguments.batch_size}",
        caption="step time: median; ratio: median (quartiles) over paired rounds, below 1 is faster than dense",
    )
    for heading in ("parameters", "link Mbit/s", "variant", "step ms", "step time / dense"):
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    rows = []
    build()
    try:
        for model in arguments.models:
            for mbit in arguments.mbit:
                limit(mbit)
                with tempfile.TemporaryDirectory() as folder:
                    measured = launch(model, arguments, Path(folder))
                dense = measured["times"]["dense"]
                for name, times in measured["times"].items():
                    ratios = [a / b for a, b in zip(times, dense, strict=True)]
                    low, _, high = quantiles(ratios, n=4)
                    row = [f"{measured['numel'] / 1e6:.1f} M", mbit, name, round(median(times), 1)]
                    rows.append([*row, round(median(ratios), 3), round(low, 3), round(high, 3)])
                    ratio = f"{median(ratios):.2f} ({low:.2f}-{high:.2f})" + (" slower" if median(ratios) > 1 else "")
                    table.add_row(*map(str, row), "-" if name in ("compute", "dense") else ratio)
                table.add_section()
                print(f"{model} at {mbit} Mbit/s: done", flush=True)
    finally:
        remove()
    Console(width=110).print(table)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["parameters", "mbit", "variant", "step_ms", "over_dense", "lower_quartile", "upper_quartile"]
            )
            writer.writerows(rows)


if __name__ == "__main__":
    main()
