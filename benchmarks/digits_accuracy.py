"""Does sparsified training reach the accuracy of dense training?

Trains the digits network of `examples/train_digits.py` with dense DDP and with some sparsifiers, each with several
seeds, on two CPU processes (gloo) that both run Lightning's Trainer.

Held fixed over all runs: model, data, split, batch size, learning rate and momentum, as `examples/train_digits.py` has
them, and the number of steps, as in `configs/base.yaml`; error feedback, exchange, grouping and the rest of each
strategy at its defaults, but for biases and small tensors, which are sparsified as well; the fixed threshold of
Hard-threshold as in `configs/hard_threshold.yaml`. Only the strategy and the seed differ. A seed decides the initial
weights and the order of the images, equally for all methods; the 360 validation images never change.

Accuracy is that of the last step, over all validation images. Density, padding ratio f(t) and bytes are means over all
steps and seeds; the bytes are what a rank sends under ring collectives, of dense DDP too.

The claim it checks: UnionTopK, ExDyna and Top-k are within one point of dense DDP at a density of 0.01, mean over three
seeds. Exits with 1 if they are not. The other rows are for information.

With --lr the learning rate is another one. With --adamw [LR,BETA1] the optimizer is AdamW(lr=LR, betas=(BETA1, 0.999))
instead of SGD. Nothing is claimed then.

    OMP_NUM_THREADS=1 python benchmarks/digits_accuracy.py
    OMP_NUM_THREADS=1 python benchmarks/digits_accuracy.py --density 0.05 --methods [exdyna,top_k] --csv digits.csv
    OMP_NUM_THREADS=1 python benchmarks/digits_accuracy.py --methods [union_top_k] --adamw [0.001,0.9]
    OMP_NUM_THREADS=1 python benchmarks/digits_accuracy.py --methods [union_top_k,late] --seeds [0,1,2,3,4] --lr 0.025
"""

import csv
import logging
import os
import pickle
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import pytorch_lightning as pl
import torch
import yaml
from jsonargparse import CLI
from machine import free_port
from pytorch_lightning.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "examples"))

from train_digits import Digits, DigitsClassifier  # noqa: E402

import lightning_sparse as ls  # noqa: E402
from lightning_sparse.core.messages import ring_all_reduce_bytes  # noqa: E402

NUM_RANKS = 2
METHODS = {
    "dense": "dense DDP",
    "union_top_k": "sparse_ddp_union_top_k",
    "late": "union_top_k, one step late",
    "exdyna": "sparse_ddp_exdyna",
    "top_k": "sparse_ddp_top_k",
    "micro": "sparse_ddp_micro",
    "hard_threshold": "sparse_ddp_hard_threshold",
    "shared_top_k": "sparse_ddp_shared_top_k",
    "striped_top_k": "sparse_ddp_striped_top_k",
}
CLAIMED = ("union_top_k", "exdyna", "top_k")
TOLERANCE = 1.0  # points of accuracy
TIMEOUT = timedelta(minutes=3)  # of a collective: a rank that lost its partner should not wait for half an hour


class Collector(pl.Callback):
    """Keep density and bytes of every step; a collective call, hence on all ranks."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            self.steps.append(engine.summary())

    def mean(self, name: str) -> float:
        return mean(step[name] for step in self.steps if name in step)  # one step late, the first has none


def read_config(name: str) -> dict[str, Any]:
    with (REPOSITORY / "configs" / f"{name}.yaml").open() as file:
        return yaml.safe_load(file)


def make_strategy(method: str, density: float) -> DDPStrategy:
    if method == "dense":
        return DDPStrategy(timeout=TIMEOUT)
    sparsifier: str | ls.sparsifiers.Sparsifier = method
    if method == "hard_threshold":
        chosen = read_config(method)["trainer"]["strategy"]["init_args"]["sparsifier"]
        sparsifier = ls.sparsifiers.HardThreshold(**chosen["init_args"])
    every, delay = ls.Rules(dense_ndim=0, dense_numel=0), 0
    if method == "late":
        sparsifier, delay = "union_top_k", 1
    return ls.SparseDDPStrategy(sparsifier=sparsifier, density=density, rules=every, delay=delay, timeout=TIMEOUT)


class WithAdamW(DigitsClassifier):
    """As the digits network, with another optimizer."""

    adamw: tuple[float, float]
    """Rate and beta1."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate, beta1 = self.adamw
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=(beta1, 0.999))


def train(
    method: str, seed: int, density: float, steps: int, lr: float | None, adamw: tuple[float, float] | None
) -> dict[str, float]:
    """One run, on every rank; equal results on all of them."""
    pl.seed_everything(seed, verbose=False)
    model = (DigitsClassifier if adamw is None else WithAdamW)(**({} if lr is None else {"lr": lr}))
    if isinstance(model, WithAdamW) and adamw is not None:
        model.adamw = adamw
    collector = Collector()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=make_strategy(method, density),
        max_steps=steps,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        callbacks=[collector],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    started = time.perf_counter()
    trainer.fit(model, Digits())
    if trainer.global_step != steps:
        raise RuntimeError(f"{method}, seed {seed}: stopped after {trainer.global_step} of {steps} steps")
    numel = sum(parameter.numel() for parameter in model.parameters())
    dense = method == "dense"
    return {
        "accuracy": 100 * float(trainer.callback_metrics["val/accuracy"]),
        "density": 1.0 if dense else collector.mean("density"),
        "padding_ratio": 1.0 if dense else collector.mean("padding_ratio"),
        "megabytes": ring_all_reduce_bytes(4 * numel, NUM_RANKS) / 1e6 if dense else collector.mean("traffic/sent_mb"),
        "seconds": time.perf_counter() - started,
    }


SPARSE = tuple(method for method in METHODS if method != "dense")


@dataclass(frozen=True)
class Arguments:
    """How accurate is training behind each sparsifier, on the digits of scikit-learn, with real ranks?

    Args:
        density: target of the sparsified runs.
        steps: of a training.
        seeds: of trainings.
        methods: to compare with dense.
        lr: learning rate of SGD; None: that of the example.
        adamw: learning rate and beta1 of AdamW, instead of SGD.
        csv: file for one row per run; None: none.
    """

    density: float = 0.01
    steps: int = read_config("base")["trainer"]["max_steps"]
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[Literal[SPARSE], ...] = SPARSE
    lr: float | None = None
    adamw: tuple[float, float] | None = None
    csv: Path | None = None


def run_rank(rank: int, port: int, arguments: Arguments, results: str) -> None:
    """Everything, on one rank. The processes live through all runs: starting them takes longer than a run."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NUM_RANKS),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "TORCHELASTIC_RUN_ID": "benchmark",  # as under torchrun: Lightning then starts no processes of its own
    }
    torch.set_num_threads(1)  # with more, the ranks of a small machine take each other's cores
    logging.disable(logging.WARNING)  # Lightning would repeat its greetings and advice in every run
    warnings.filterwarnings("ignore")
    rows = []
    for seed in arguments.seeds:
        for method in arguments.methods:
            row = {"method": method, "seed": seed} | train(
                method, seed, arguments.density, arguments.steps, arguments.lr, arguments.adamw
            )
            rows.append(row)
            if rank == 0:
                done, total = len(rows), len(arguments.seeds) * len(arguments.methods)
                name = f"{done:>2}/{total} {METHODS[method]}, seed {seed}:"
                print(f"{name:<40} {row['accuracy']:.2f} % in {row['seconds']:.1f} s", flush=True)
    torch.distributed.destroy_process_group()
    if rank == 0:
        Path(results).write_bytes(pickle.dumps(rows))


def summarize(rows: list[dict[str, Any]], methods: list[str]) -> dict[str, dict[str, Any]]:
    """Per method: accuracies by seed and the means over seeds."""
    summary = {}
    for method in methods:
        runs = [row for row in rows if row["method"] == method]
        summary[method] = {"by_seed": [run["accuracy"] for run in runs]} | {
            name: mean(run[name] for run in runs) for name in ("accuracy", "density", "padding_ratio", "megabytes")
        }
    return summary


def standard_error(differences: list[float]) -> str:
    """How far the mean over seeds may be from the mean over all seeds there are, in words."""
    if len(differences) < 2:
        return ""
    return f" (standard error {stdev(differences) / len(differences) ** 0.5:.2f})"


def make_table(summary: dict[str, dict[str, Any]], arguments: Arguments) -> Table:
    table = Table(
        title=f"Digits, {NUM_RANKS} ranks, {arguments.steps} steps, target density {arguments.density:g}",
        caption="validation accuracy in %; one of the 360 images is 0.28 points",
    )
    table.add_column("strategy", no_wrap=True)
    seeds = [f"seed {seed}" for seed in arguments.seeds]
    for heading in (
        *seeds,
        "mean",
        "minus dense\npoints",
        "density\n%",
        "f(t)",
        "MB per rank\nand step",
        "bytes\ndense/sent",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    dense = summary["dense"]
    for method, row in summary.items():
        table.add_row(
            METHODS[method],
            *(f"{accuracy:.2f}" for accuracy in row["by_seed"]),
            f"{row['accuracy']:.2f}",
            "-" if method == "dense" else f"{row['accuracy'] - dense['accuracy']:+.2f}",
            f"{100 * row['density']:.3f}",
            f"{row['padding_ratio']:.2f}",
            f"{row['megabytes']:.4f}",
            f"{dense['megabytes'] / row['megabytes']:.1f}",
        )
    return table


def write_csv(path: Path, rows: list[dict[str, Any]], density: float) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["target_density", *rows[0]])
        writer.writeheader()
        writer.writerows({"target_density": density} | row for row in rows)


def main(arguments: Arguments) -> int:
    arguments = replace(arguments, methods=("dense", *arguments.methods))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "rows.pickle"
        torch.multiprocessing.spawn(run_rank, (free_port(), arguments, str(results)), nprocs=NUM_RANKS)
        rows = pickle.loads(results.read_bytes())
    summary = summarize(rows, arguments.methods)
    width = 105 + 9 * len(arguments.seeds)  # of the table, whatever the terminal: cells must not be cut off
    Console(width=width).print(make_table(summary, arguments))
    if arguments.csv:
        write_csv(arguments.csv, rows, arguments.density)
    passed = True
    for method in (method for method in CLAIMED if method in summary and not (arguments.lr or arguments.adamw)):
        behind = summary["dense"]["accuracy"] - summary[method]["accuracy"]
        passed &= behind <= TOLERANCE
        verdict = "PASS" if behind <= TOLERANCE else "FAIL"
        pairs = zip(summary[method]["by_seed"], summary["dense"]["by_seed"], strict=True)
        print(
            f"{verdict}: {METHODS[method]} at density {arguments.density:g} is {-behind:+.2f} points from dense DDP, "
            f"mean of {len(arguments.seeds)} seeds{standard_error([own - dense for own, dense in pairs])}; "
            f"at most {TOLERANCE:g} behind was claimed"
        )
    print(f"{len(rows)} runs in {time.perf_counter() - started:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(CLI(Arguments, as_positional=False)))
