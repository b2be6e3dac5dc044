"""Train the digits four times, with dense DDP, UnionTopK, ExDyna and Top-k, and put side by side what the runs logged.

    make demo                   # or: python examples/demo.py

Each run is `examples/train_digits.py` with `configs/base.yaml` and its own file over it, on two GPUs where there are
two and on two CPU processes elsewhere. Everything lands in `demo_results/`: one folder per run (CSV, W&B offline files,
output of the processes) and `demo.png`.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import mean, median

import matplotlib
import torch
from rich.console import Console
from rich.table import Table
from train_digits import DigitsClassifier

matplotlib.use("Agg")
import matplotlib.pyplot as plt

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path("demo_results").resolve()
RUNS = {"dense": "dense DDP", "union_topk": "UnionTopK", "exdyna": "ExDyna", "topk": "Top-k"}  # configuration -> title
NUM_RANKS = 2  # `devices` in the configurations
TIMEOUT_SECONDS = 600  # a rank that waits for ever for another one should not do so unseen

Series = list[tuple[int, float]]  # (step, value)


def train(name: str) -> dict[str, Series]:
    """Run one configuration in a process of its own and return what it logged; leave the demo if it fails."""
    folder = RESULTS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        str(REPOSITORY / "examples" / "train_digits.py"),
        "fit",
        f"--config={REPOSITORY / 'configs' / 'base.yaml'}",
        f"--config={REPOSITORY / 'configs' / name}.yaml",
        f"--trainer.accelerator={'gpu' if torch.cuda.device_count() >= NUM_RANKS else 'cpu'}",
        "--trainer.enable_progress_bar=false",
    ]
    output = folder / "output.txt"
    with output.open("w") as file:
        # The loggers write to relative paths, hence the working directory. One thread per rank: with more, the ranks
        # of a small machine take each other's cores. A process group of its own: rank 1 is a grandchild, and is
        # stopped together with rank 0 through their group.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"no end after {TIMEOUT_SECONDS} s", end=" ")
        finally:
            if process.poll() != 0:
                with suppress(ProcessLookupError):  # all of them may be gone
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode != 0:
        print(f"failed, {output} ends with:\n")
        print("\n".join(output.read_text(errors="replace").splitlines()[-30:]))
        sys.exit(1)
    [metrics] = folder.glob("lightning_logs/digits/*/metrics.csv")
    return read_metrics(metrics)


def read_metrics(path: Path) -> dict[str, Series]:
    """One series per key; a row leaves the cells empty of what was not logged with it."""
    series: dict[str, Series] = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for key, value in row.items():
                if value:
                    series[key].append((int(row["step"]), float(value)))
    return series


def values(series: Series) -> list[float]:
    return [value for _, value in series]


def table(logged: dict[str, dict[str, Series]]) -> Table:
    numel = sum(parameter.numel() for parameter in DigitsClassifier().parameters())
    # What one rank sends in a ring all-reduce of float32: n - 1 pieces of numel / n to add up, as many to spread.
    dense_bytes = 2 * (NUM_RANKS - 1) / NUM_RANKS * 4 * numel

    result = Table("run", title="Digits, 2 ranks, target density 1 %; means over the run, step time: median")
    for heading in (
        "validation\naccuracy",
        "MB sent per\nrank, step",
        "traffic ratio\ndense/sent",
        "density\nerror",
        "padding\nratio f(t)",
        "step\nms",
    ):
        result.add_column(heading, justify="right")
    for name, series in logged.items():
        is_sparse = "sparse/traffic/sent_mb" in series
        sent_bytes = 1e6 * mean(values(series["sparse/traffic/sent_mb"])) if is_sparse else dense_bytes
        result.add_row(
            RUNS[name],
            f"{series['val/accuracy'][-1][1]:.1%}",
            f"{sent_bytes / 1e6:.4f}",
            f"{dense_bytes / sent_bytes:.1f}",
            f"{mean(values(series['sparse/density_error'])):.2%}" if is_sparse else "-",
            f"{mean(values(series['sparse/padding_ratio'])):.2f}" if is_sparse else "-",
            f"{median(values(series['step_ms'])):.1f}",
        )
    return result


def plot(logged: dict[str, dict[str, Series]], path: Path) -> None:
    sparse = {name: series for name, series in logged.items() if "sparse/density" in series}
    colours = {name: f"C{number}" for number, name in enumerate(sparse)}  # the same in all panels: some lack a curve
    figure, (density, threshold, padding) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for axes, key in ((density, "sparse/density"), (threshold, "sparse/threshold"), (padding, "sparse/padding_ratio")):
        for name, series in sparse.items():
            if key in series:
                axes.plot(*zip(*series[key], strict=True), color=colours[name], label=RUNS[name])
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    target = next(iter(sparse.values()))["sparse/target_density"]
    # Broad and pale: a method that keeps its density lies on the target.
    density.plot(*zip(*target, strict=True), color="0.8", linewidth=6, zorder=1, label="target")
    density.set(title="density of the update", ylim=(0, None))
    density.legend()
    threshold.set(title="threshold", yscale="log")
    padding.set(title="padding ratio f(t), 1 is no padding")
    figure.savefig(path, dpi=120)


def main() -> None:
    console = Console()
    logged = {}
    for number, (name, title) in enumerate(RUNS.items(), start=1):
        print(f"{number}/{len(RUNS)} {title} ... ", end="", flush=True)
        started = time.perf_counter()
        logged[name] = train(name)
        print(f"{time.perf_counter() - started:.0f} s")
    plot(logged, RESULTS / "demo.png")
    console.print(table(logged))
    console.print(f"Curves of the sparse runs: {RESULTS.relative_to(Path.cwd()) / 'demo.png'}")
    console.print(
        "With two processes on one machine and a model of 58 thousand parameters the step times show overhead only, "
        "and dense DDP is expected to be the fastest; the traffic column is what a slow link would see, and whether "
        "it buys time is for a large model on a real network to show."
    )


if __name__ == "__main__":
    main()
