"""What does AdamW behind sparse_ddp reach in how many seconds? Through the Trainer, over slow links, against plain DDP.

The GPT of `examples/gpt_wikitext2.py` (1.1 million parameters, AdamW, warm-up and cosine over the steps of the
training, gradients clipped at 1) is trained by ranks in network namespaces of this machine, over cables of a limited
rate (`links.py`), one after another with every strategy and number of steps of `--trainings`: a training that takes
less for a step can take more steps in the same time. Every rank computes with one thread and shares the cores of the
machine with the others. Seconds are those of training steps, with the exchange and the optimizer, from the second step
to the last; validations are left out.

Every finished training is a line of JSON in `--out`; the same command again does only what is missing.

Needs root (network namespaces) and the commands ip and tc; says so and ends with 0 otherwise.

    sudo python benchmarks/adam_seconds.py --text data/wikitext-2 --mbit [100,1000]
    sudo python benchmarks/adam_seconds.py --text data/wikitext-2 --trainings [ddp:300,sparse_ddp:1000] --seeds [0,1,2]
    python benchmarks/adam_seconds.py --table true
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytorch_lightning as pl
import torch
from jsonargparse import CLI
from links import launch, limit, network, stop, why_not
from machine import about, in_words
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
VALIDATIONS = 5
"""In a training."""
WORDS = 4096
"""Of the vocabulary."""


class Clock(pl.Callback):
    """Seconds that steps of training take, and perplexities beside them.

    Attributes:
        steps: seconds of each step, with what waits for its data.
        curve: (step, seconds, perplexity) at each validation, seconds without the first step and validations.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.curve: list[tuple[int, float, float]] = []
        self._since = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin."""
        self._since = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        """One more step."""
        now = time.perf_counter()
        self.steps.append(now - self._since)
        self._since = now

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note what has been reached; the clock has stood still meanwhile."""
        if not trainer.sanity_checking:
            perplexity = float(trainer.callback_metrics["val/perplexity"])
            self.curve.append((trainer.global_step, sum(self.steps[1:]), perplexity))
            self._since = time.perf_counter()


def train(strategy: str, steps: int, seed: int, ranks: int, text: Path, out: Path | None) -> None:
    """One rank of a training; rank 0 writes what the clock has seen."""
    sys.path.insert(0, str(EXAMPLES))
    gpt, wikitext2 = (importlib.import_module(name) for name in ("gpt_wikitext2", "wikitext2"))
    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    clock = Clock()
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        gradient_clip_val=1.0,
        val_check_interval=max(1, steps // VALIDATIONS),
        check_val_every_n_epoch=None,
        limit_val_batches=50,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    trainer.fit(gpt.GPT(vocabulary=WORDS), datamodule=wikitext2.WikiText2(text, words=WORDS))
    if trainer.is_global_zero and out is not None:
        found = {"seconds": sum(clock.steps[1:]), "step": median(clock.steps[1:]), "curve": clock.curve}
        out.write_text(json.dumps(found))


def main(
    text: Path = Path("data/wikitext-2"),
    trainings: list[str] | None = None,
    mbit: list[int] | None = None,
    ranks: int = 2,
    seeds: list[int] | None = None,
    out: Path = Path("adam_seconds.jsonl"),
    table: bool = False,
    timeout: float = 3600,
    as_rank: Path | None = None,
) -> int:
    """Train what is missing, and print all that there is.

    Args:
        text: folder of WikiText-2, as the example takes it.
        trainings: ``strategy:steps``; None: ddp:300, sparse_ddp:300 and sparse_ddp:1000.
        mbit: rates of the cables; None: 100 and 1000.
        ranks: number of processes.
        seeds: None: 0.
        out: where results are kept, a line each.
        table: only print.
        timeout: seconds for one training.
        as_rank: be a rank, of the first of all of these, and write to this file.
    """
    wanted = [word.rpartition(":") for word in trainings or ["ddp:300", "sparse_ddp:300", "sparse_ddp:1000"]]
    if as_rank is not None:
        train(wanted[0][0], int(wanted[0][2]), (seeds or [0])[0], ranks, text, as_rank)
        return 0
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    failed = []
    if not table:
        if reason := why_not():
            print(f"skipped: {reason}")
            return 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        done = {tuple(row["run"]) for row in known}
        with network(ranks) as processes:
            for rate in mbit or [100, 1000]:
                limit(rate, ranks)
                for seed in seeds or [0]:
                    for strategy, _, steps in wanted:
                        run = strategy, int(steps), seed, ranks, rate
                        if run in done:
                            continue
                        found = out.with_suffix(".rank0")
                        words = [sys.executable, __file__, f"--text={text}", f"--trainings=[{strategy}:{steps}]"]
                        words += [f"--seeds=[{seed}]", f"--ranks={ranks}", f"--as_rank={found}"]
                        if problem := launch(words, ranks, processes, timeout):
                            failed.append(f"{run}: {problem}")
                            continue
                        known.append({"run": run, **json.loads(found.read_text()), **about()})
                        found.unlink()
                        with out.open("a") as file:
                            file.write(json.dumps(known[-1]) + "\n")
                        print(f"{run}: {known[-1]['seconds']:.0f} s", flush=True)
    show(known)
    for sentence in failed:
        print(sentence)
    return 1 if failed else 0


def show(rows: list[dict[str, Any]]) -> None:
    """Seconds and perplexities, means over seeds."""
    table = Table(title="GPT with AdamW: what is reached in how many seconds")
    for heading in ("Mbit/s", "ranks", "strategy", "steps", "ms a step", "seconds", "perplexity", "of seeds"):
        table.add_column(heading, justify="right")
    alike: dict[tuple[int, int, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        strategy, steps, _, ranks, rate = row["run"]
        alike.setdefault((rate, ranks, strategy, steps), []).append(row)
    for (rate, ranks, strategy, steps), found in sorted(alike.items()):
        ends = [row["curve"][-1][2] for row in found]
        table.add_row(
            str(rate),
            str(ranks),
            strategy,
            str(steps),
            f"{1e3 * fmean(row['step'] for row in found):.0f}",
            f"{fmean(row['seconds'] for row in found):.1f}",
            f"{fmean(ends):.1f}",
            ", ".join(f"{end:.1f}" for end in ends),
        )
    console = Console(width=140)
    console.print(table)
    if rows:
        told = {key: rows[-1][key] for key in about()}
        console.print(in_words(told))


if __name__ == "__main__":
    sys.exit(CLI(main, as_positional=False))
