"""What does sparse_ddp bring when ranks talk over slow links, beside plain DDP and its own hooks?

Four ranks, or as many as `--ranks` says, live in network namespaces of this machine. A virtual cable leads from each of
them to a bridge in one more namespace, and a token bucket filter at both ends of every cable limits what a rank sends
and what it receives to the given rate each. They train the models of `models14m.py` (10 to 15 million parameters) on
random data, with gloo.

Parts, each for every model and rate:

- hooks: `sparse_ddp` as it comes at densities 0.01 and 0.001, and from 1 Gbit/s on with `fallback=True`; DDP's hook
  fp16 (it refuses bf16 on gloo) and PowerSGD of rank 1, 2 and 4; bytes on the cable, processor time and training loss,
  too. All variants stay and go on training, each on the same few batches. They take a vector of the model's size or
  more each: where the ranks' memory would not suffice, the part is refused, and `--variants` chooses from it.
- regions: `sparse_ddp` as it comes at densities 0.01 and 0.001, beside PowerSGD of rank 1, one step after the other
  without a barrier, and the time of a step is that of several in a row: over long round trips, a barrier takes as long
  as a step.
- nodes: several ranks in each namespace (`--node-size`), which is a node: bytes are those on the node's cable. Flat
  exchanges between all ranks, the same with `node_size`, Top-k, plain DDP and PowerSGD.
- advice: `ls.advise` predicts step times of some sparsifiers; then they are measured with three groupings.

All parts also measure `dense` (plain DDP, which overlaps its all-reduce with backward) and `compute` (`no_sync`, no
exchange at all). All variants of a model, rate and part run in the same processes and take turns of some steps, in an
order that is reversed from round to round; a variant is made for its turn and is gone after it (not in the part hooks),
so that each has the machine's memory for itself. All ranks start a step together; a step's time is the slowest rank's;
`select_ms`, `exchange_ms` and `exposed_ms` are the library's, means over ranks.
`dense` is slow and takes part in some rounds only (in hooks: in all, with fewer steps below 1 Gbit/s); other rounds are
paired with the nearest of these. Ratios are medians of paired rounds, with quartiles, below 1 is faster.

Held fixed: model, batch, optimizer, one compute thread per rank. DDP's buckets are of 25 MiB after a first one of
1 MiB, and those of sparse variants as the strategy sets them. The latency of the virtual cables is far below a real
network's, unless `--rtt` adds a round trip: cables then lead through a program that delays each frame
(`delay_line.py`). The ranks share the cores of one machine, with that program, too.

What the part hooks compares, and where it favours whom:

- `compute` lacks more than the exchange: without synchronisation DDP copies no gradients into its buckets and back,
  which all other variants do. `noop`, a hook that gives every bucket back as it came, is DDP with an exchange that
  costs nothing. Gradients, zero_grad (to None) and the optimizer are the same in all; `compute` trains each rank alone.
- `gradient_as_bucket_view` is False, the default of DDP and of both of Lightning's strategies; True saves dense DDP and
  its hooks two copies.
- PowerSGD is registered as its documentation says (error feedback, warm start), but compresses from its third step on,
  not from the 1000th. It is given one bucket, because gloo needs one order of messages on all ranks: it begins when
  backward has ended, which favours all others where backward leaves room for an exchange.
- `sparse_ddp` has what the strategy sets: small deliveries, watchdogs, skipping of steps.
  Its fallback has compared both before it is timed. In its first 64 steps UnionTopK names twice as many picks as it
  may need, and goes on to do so for as long again: bytes "when steady" are those after step 136, beyond what is timed.
- Lightning itself uses no hook of DDP on CPUs: there, a user's choice is between `dense` and `sparse`.

Needs root (network namespaces) and the commands ip and tc; says so and ends with 0 otherwise. Namespaces are removed at
the end whatever happens. Results are kept in the folder `--out` after every round, with machine and versions;
`--tables` prints them again. The part hooks also draws hooks_time.svg and hooks_loss.svg there.

    sudo python benchmarks/shaped_links.py
    sudo python benchmarks/shaped_links.py --parts hooks --models lstm vgg gpt --mbit 100 1000 10000 --ranks 2 4
    sudo python benchmarks/shaped_links.py --parts hooks --ranks 8 --variants compute dense "powersgd 1" "sparse 0.01"
    sudo python benchmarks/shaped_links.py --parts regions --models lstm --mbit 1000 --rtt 50 --steps 8
    sudo python benchmarks/shaped_links.py --parts nodes --node-size 2 --models lstm vgg --mbit 100 1000 --rounds 10
    sudo python benchmarks/shaped_links.py --parts advice --models vgg --mbit 100 --csv advice.csv
    python benchmarks/shaped_links.py --tables --out shaped_links
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hooks_figure import draw
from links import MOST, launch, limit, network, stop, why_not
from machine import memory
from models14m import MODELS
from paired import ROWS, show
from shaped_rank import SLOW, hook_specs

RANK = Path(__file__).with_name("shaped_rank.py")
PROCESS = 900 << 20
"""Bytes of a rank's process beside its variants: code, activations, gradients of the one whose turn it is."""
VECTORS = {"compute": 2, "noop": 2, "dense": 2, "fp16": 2, "powersgd": 4, "sparse": 6, "fallback": 6}
"""Of the model's size that a variant keeps: parameters, buckets, error feedback; optimizers apart."""
OF_ADAM = {"sparse": 3, "fallback": 5}
"""More of them with Adam; of all others two."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flat = [part for part in ROWS if part != "nodes"]
    parser.add_argument("--parts", nargs="+", choices=list(ROWS), default=flat)
    parser.add_argument("--models", nargs="+", choices=["lstm", "vgg", "gpt", "mlp"], default=["lstm", "vgg"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4], help=f"numbers of them, to {MOST} (default: 4)")
    parser.add_argument("--node-size", type=int, default=1, help="ranks in a namespace (default: 1)")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000], help="link rates (default: 100 1000)")
    named = [spec.name for spec in hook_specs(1.0, SLOW)]
    parser.add_argument("--rtt", type=float, default=0.0, help="milliseconds that a round trip takes longer (0)")
    parser.add_argument("--variants", nargs="+", choices=named, metavar="NAME", help=f"of hooks: {', '.join(named)}")
    parser.add_argument("--sparsifiers", nargs="+", default=["top_k", "exdyna", "shared_top_k", "union_top_k"])
    parser.add_argument("--density", type=float, default=0.01, help="(default: 0.01)")
    parser.add_argument("--batch-size", type=int, help="rows per rank (default: the model's own, see models14m.py)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every variant, at least 2 (default: 3)")
    parser.add_argument("--steps", type=int, default=4, help="per turn, besides 2 to warm up (default: 4)")
    parser.add_argument("--dense-every", type=int, default=2, help="dense takes part in one of so many (default: 2)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one model, rate and part (1800)")
    parser.add_argument("--out", type=Path, default=Path("shaped_links"), help="folder of results")
    parser.add_argument("--csv", type=Path, help="file for the rows of all tables")
    parser.add_argument("--tables", action="store_true", help="measure nothing, show what --out holds")
    arguments = parser.parse_args()
    if any(n % arguments.node_size for n in arguments.ranks) or ("nodes" in arguments.parts) != (
        arguments.node_size > 1
    ):
        parser.error("expected --node-size to divide --ranks, and to be above 1 for the part nodes, and for no other")
    if arguments.rounds < 2 or arguments.dense_every < 1 or not all(2 <= n <= MOST for n in arguments.ranks):
        parser.error(f"expected 2 to {MOST} ranks, at least 2 rounds, and --dense-every to be at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> list[str]:
    """All parts; what failed."""
    failed = []
    settings = {k: v for k, v in vars(arguments).items() if k not in ("csv", "tables", "timeout")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for ranks in arguments.ranks:
        nodes = ranks // arguments.node_size
        with network(nodes, arguments.rtt) as processes:
            for model in arguments.models:
                for mbit in arguments.mbit:
                    limit(mbit, nodes)
                    for part in arguments.parts:
                        job = settings | {"part": part, "model": model, "mbit": mbit, "ranks": ranks}
                        job["out"] = str(arguments.out)
                        begin = time.monotonic()
                        problem = too_large(job) if part == "hooks" else None
                        if problem is None:
                            words = [sys.executable, RANK, json.dumps(job)]
                            problem = launch(words, ranks, processes, arguments.timeout, arguments.node_size)
                        took = f"{time.monotonic() - begin:.0f} s"
                        link = f"{mbit} Mbit/s" + (f", {arguments.rtt:g} ms" if arguments.rtt else "")
                        print(f"{part} {model}, {ranks} ranks, {link}: {problem or 'done'}, {took}", flush=True)
                        failed += [problem] if problem else []
    return failed


def too_large(job: dict[str, Any]) -> str | None:
    """Why the variants of the part hooks do not fit into the memory that is free, if they do not."""
    names = [spec.name for spec in hook_specs(1.0, job["mbit"])]
    chosen = [name for name in names if job["variants"] is None or name in job["variants"]]
    with torch.device("meta"):
        model = MODELS[job["model"]]()
    size = sum(p.nbytes for p in model.parameters())
    adam = isinstance(model.optimizer(model.parameters()), torch.optim.AdamW)
    kinds = [name.split()[0] for name in chosen]
    vectors = sum(VECTORS[kind] + adam * OF_ADAM.get(kind, 2) for kind in kinds)
    needed = job["ranks"] * (PROCESS + vectors * size)
    if needed < memory():
        return None
    return (
        f"{job['ranks']} ranks with {len(chosen)} variants each take about {needed / 2**30:.0f} GiB, and "
        f"{memory() / 2**30:.0f} GiB are free: name some by --variants"
    )


def main() -> int:
    arguments = parse_arguments()
    failed = []
    if not arguments.tables:
        if reason := why_not():
            print(f"skipped: {reason}")
            return 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        try:
            failed = measure(arguments)
        except subprocess.CalledProcessError as error:
            print(f"skipped: {' '.join(error.cmd)} failed: {error.stderr.strip()}")
            return 0
    results = [json.loads(path.read_text()) for path in sorted(arguments.out.glob("*.json"))]
    show(results, arguments.csv)
    draw([result for result in results if result["job"]["part"] == "hooks"], arguments.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
