"""What does sparse_ddp bring when ranks talk over slow links, beside plain DDP and its own hooks?

Four ranks, or as many as `--ranks` says, live in network namespaces of this machine. A virtual cable leads from each of
them to a bridge in one more namespace, and a token bucket filter at both ends of every cable limits what a rank sends
and what it receives to the given rate each. They train the models of `models14m.py` (10 to 15 million parameters) on
random data, with gloo.

Parts, each for every model and rate:

- hooks: `sparse_ddp` as it comes at densities 0.01 and 0.001, DDP's hook fp16 (it refuses bf16 on gloo) and PowerSGD
  of rank 1, 2 and 4, in one bucket, which gloo needs; bytes on the cable, processor time and training loss, too. All
  variants stay and go on training, each on the same few batches; `--variants` leaves some out, where memory is short.
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
    sudo python benchmarks/shaped_links.py --parts hooks --models lstm vgg gpt --mbit 100 1000 10000
    sudo python benchmarks/shaped_links.py --parts plans --models vgg --mbit 100 --rounds 20 --csv plans.csv
    sudo python benchmarks/shaped_links.py --ranks 2 --parts overlap --models mlp --mbit 100 1000 10000
    python benchmarks/shaped_links.py --tables --out shaped_links
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from links import MOST, launch, limit, network, stop, why_not
from paired import ROWS, show

from lightning_sparse.kernels import native

RANK = Path(__file__).with_name("shaped_rank.py")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--models", nargs="+", choices=["lstm", "vgg", "gpt", "mlp"], default=["lstm", "vgg"])
    parser.add_argument("--ranks", type=int, default=4, help=f"at most {MOST} (default: 4)")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100, 1000], help="link rates (default: 100 1000)")
    parser.add_argument("--variants", nargs="+", help="of the part hooks, and not all of them")
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
    arguments = parser.parse_args()
    if arguments.rounds < 2 or arguments.dense_every < 1 or not 2 <= arguments.ranks <= MOST:
        parser.error(f"expected 2 to {MOST} ranks, at least 2 rounds, and --dense-every to be at least 1")
    return arguments


def measure(arguments: argparse.Namespace) -> list[str]:
    """All parts; what failed."""
    failed = []
    settings = {k: v for k, v in vars(arguments).items() if k not in ("csv", "tables", "timeout")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(f"kernels on CPUs: {native.description}", flush=True)
    with network(arguments.ranks) as processes:
        for model in arguments.models:
            for mbit in arguments.mbit:
                limit(mbit, arguments.ranks)
                for part in arguments.parts:
                    job = settings | {"part": part, "model": model, "mbit": mbit, "out": str(arguments.out)}
                    begin = time.monotonic()
                    words = [sys.executable, RANK, json.dumps(job)]
                    problem = launch(words, arguments.ranks, processes, arguments.timeout)
                    took = f"{time.monotonic() - begin:.0f} s"
                    print(f"{part} {model} {mbit} Mbit/s: {problem or 'done'}, {took}", flush=True)
                    failed += [problem] if problem else []
    return failed


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
    show([json.loads(path.read_text()) for path in sorted(arguments.out.glob("*.json"))], arguments.csv)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
