"""Train the digits four times, with dense DDP, UnionTopK, ExDyna and Top-k, and put side by side what the runs logged.

    make demo                   # or: python examples/demo.py

Each run is `examples/train_digits.py` with `configs/base.yaml` and its own file over it, on two GPUs where there are
two and on two CPU processes elsewhere. Everything lands in `demo_results/`: one folder per run (CSV, W&B offline files,
output of the processes), `demo.svg` with loss and accuracy against megabytes, and `report.html` with all figures.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from lightning_sparse.tools.report.figures import Panel, megabytes, parts_of
from lightning_sparse.tools.report.page import write_page
from lightning_sparse.tools.report.runs import Run, read_runs
from lightning_sparse.tools.report.static import draw_lines
from lightning_sparse.tools.style import panels, save

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path("demo_results").resolve()
RUNS = {
    "dense": "dense DDP",
    "union_top_k": "UnionTopK",
    "exdyna": "ExDyna",
    "top_k": "Top-k",
}  # configuration -> title
NUM_RANKS = 2  # `devices` in the configurations
TIMEOUT_SECONDS = 600  # a rank that waits for ever for another one should not do so unseen


def train(name: str) -> Path:
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
        f"--config={REPOSITORY / 'configs' / 'wandb.yaml'}",
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
    [logged] = folder.glob("lightning_logs/wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 20
    while read_runs([logged])[0].notes and time.monotonic() < deadline:
        time.sleep(0.2)  # W&B's own process writes the end
    return logged


def table(runs: Sequence[Run]) -> Table:
    result = Table("run", title="Digits of scikit-learn, 2 ranks, density 0.01")
    for heading in (
        "training\nloss at end",
        "validation\naccuracy",
        "MB sent\nper rank",
        "dense MB\n/ MB sent",
        "padding\nratio",
        "step\nms",
    ):
        result.add_column(heading, justify="right")
    dense = max(sent_by(runs, run) for run in runs)
    for run in runs:
        padding = run.series.get("sparse/padding_ratio")
        result.add_row(
            run.name,
            f"{run.series['train/loss'].values[-5:].mean():.3f}",
            f"{run.series['val/accuracy'].values[-1]:.1%}",
            f"{sent_by(runs, run):.2f}",
            f"{dense / sent_by(runs, run):.0f}",
            f"{padding.values.mean():.2f}" if padding else "-",
            f"{np.median(run.series['step_ms'].values):.1f}",
        )
    return result


def sent_by(runs: Sequence[Run], run: Run) -> float:
    sent = megabytes(runs, run, np.array([run.steps - 1.0]))
    return float("nan") if sent is None else float(sent[0])


def plot(runs: Sequence[Run], path: Path) -> None:
    """Loss and accuracy against megabytes."""
    shown = [p for part in parts_of(runs) for p in part.panels if isinstance(p, Panel) and p.x_title.startswith("MB")]
    figure, places = panels(len(shown), 2, 6.0, 4.0)
    for axes, panel in zip(places, shown, strict=True):
        draw_lines(axes, panel)
        axes.set_title(panel.title, loc="left", fontsize=10)
    save(figure, path)


def main() -> None:
    console = Console()
    logged = []
    for number, (name, title) in enumerate(RUNS.items(), start=1):
        print(f"{number}/{len(RUNS)} {title} ... ", end="", flush=True)
        started = time.perf_counter()
        logged.append(train(name))
        print(f"{time.perf_counter() - started:.0f} s")
    runs = read_runs(logged, list(RUNS.values()))
    plot(runs, RESULTS / "demo.svg")
    write_page(runs, RESULTS / "report.html", "Digits: dense DDP beside three sparsifiers")
    console.print(table(runs))
    folder = RESULTS.relative_to(Path.cwd())
    console.print(f"Loss and accuracy against megabytes: {folder / 'demo.svg'}")
    console.print(f"All figures, to be opened in a browser: {folder / 'report.html'}")
    console.print(
        "Training loss: mean of the last five logged values. Padding ratio: longest selection of a rank / mean "
        "selection, mean over the run; 1 is best. Step: median."
    )
    console.print(
        "Between two processes on one machine, dense DDP is expected to have the fastest steps. Fewer bytes save time "
        "on slow links and with large models: see docs/guide/should-i-use-it.md, and lightning-sparse advise for your "
        "own training."
    )


if __name__ == "__main__":
    main()
