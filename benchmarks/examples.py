"""What the models of `examples/` learn in 300 steps, densely and with a part of the gradient, against what they send.

Each training is one of docs/guide/quick-start.md, with two processes. The only thing that differs in a row is the
density; 1 is dense training through the same machinery (`configs/everything.yaml`). A seed decides initial parameters
and the order of the data. Megabytes are those that a rank sends under ring collectives, in the whole training.

Every finished training is a line of JSON in `--out`; the same command again does only what is missing.

    OMP_NUM_THREADS=1 python benchmarks/examples.py --examples [gpt,lstm] --text data/wikitext-2
    OMP_NUM_THREADS=1 python benchmarks/examples.py --examples [resnet] --images data/cifar10 --seeds [0,1,2]
    OMP_NUM_THREADS=1 python benchmarks/examples.py --examples [lora] --base gpt_of_bytes.ckpt
    python benchmarks/examples.py --table true --logs logs --figure docs/examples.svg

`--logs` keeps the curves of each training; `lightning-sparse report logs` draws all of them, `--figure` means of seeds.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from jsonargparse import CLI
from rich.console import Console
from rich.table import Table

from lightning_sparse.tools.report.runs import Run, read_runs
from lightning_sparse.tools.style import label_ends, look, panels, plain_numbers, save

REPOSITORY = Path(__file__).resolve().parent.parent


class Example(NamedTuple):
    """A script, what it is judged by, and what a CPU needs to get through it."""

    script: str
    result: str
    options: list[str]


EXAMPLES = {
    "gpt": Example("gpt_wikitext2", "val/perplexity", []),
    "lstm": Example("lstm_wikitext2", "val/perplexity", []),
    "resnet": Example(
        "resnet18_cifar10",
        "val/accuracy",
        ["--model.width=16", "--data.batch_size=32", "--model.lr=0.05", "--trainer.limit_val_batches=10"],
    ),
    "lora": Example("lora_gpt", "val/perplexity", []),
}


def train(example: Example, density: float, seed: int, options: list[str], kept: Path | None) -> dict[str, float]:
    """The last validation's result, and megabytes that a rank has sent.

    Args:
        example: what is trained.
        density: 1 is dense training.
        seed: of parameters and order.
        options: further ones of the example.
        kept: folder that `metrics.csv` and `hparams.yaml` are copied to, for `lightning-sparse report`.

    Raises:
        CalledProcessError: the training failed.
    """
    configs = ["base", "everything"] if density == 1 else ["base"]
    command = [sys.executable, str(REPOSITORY / "examples" / f"{example.script}.py"), "fit"]
    command += [f"--config={REPOSITORY / 'configs' / name}.yaml" for name in configs]
    command += [f"--trainer.strategy.density={density}", f"--seed_everything={seed}", *example.options, *options]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, check=True)
        log = Path(folder) / "lightning_logs" / "version_0"
        with (log / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.csv", "hparams.yaml"):
                shutil.copy(log / name, kept)

    def last(name: str) -> float:
        return [float(row[name]) for row in rows if row[name]][-1]

    return {"result": last(example.result), "megabytes": last("sparse/traffic/total_mb")}


def main(
    examples: list[Literal["gpt", "lstm", "resnet", "lora"]] | None = None,
    densities: list[float] | None = None,
    seeds: list[int] | None = None,
    text: Path | None = None,
    images: Path | None = None,
    base: Path | None = None,
    options: list[str] | None = None,
    out: Path = Path("examples.jsonl"),
    logs: Path | None = None,
    figure: Path | None = None,
    table: bool = False,
) -> None:
    """Train what is missing, and print all that there is.

    Args:
        examples: which; None: gpt and lstm.
        densities: None: 1, 0.01 and 0.001.
        seeds: None: 0.
        text: folder of WikiText-2; None: the example's own, which it downloads.
        images: folder of CIFAR-10; None: the example's own.
        base: what LoRA starts from, a checkpoint of `examples/gpt_wikitext2.py` in bytes.
        options: further ones of the examples, such as --fast.
        out: where results are kept, a line each.
        logs: folder for the curves of each training, such as `gpt_0.01_seed0`.
        figure: SVG file of all curves in `logs`.
        table: only print.
    """
    if figure is not None and logs is None:
        raise SystemExit("Expected --logs with the curves that --figure draws.")
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {tuple(row["run"]) for row in known}
    given = {"gpt": ("data.dir", text), "lstm": ("data.dir", text), "resnet": ("data.dir", images)}
    given["lora"] = ("model.base", base)
    for seed in seeds or [0]:
        for name in examples or ["gpt", "lstm"]:
            for density in densities or [1.0, 0.01, 0.001]:
                if table or (name, density, seed) in done:
                    continue
                option, path = given[name]
                own = [] if path is None else [f"--{option}={path.resolve()}"]
                kept = logs and logs / f"{name}_{density:g}_seed{seed}"
                found = train(EXAMPLES[name], density, seed, own + (options or []), kept)
                row: dict[str, Any] = {"run": [name, density, seed], **found}
                known.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    show(known)
    if figure is not None and logs is not None:
        draw(read_runs([logs]), figure)


def draw(runs: list[Run], path: Path) -> None:
    """Training loss against steps and against megabytes, a line of panels for each example.

    Args:
        runs: named as `--logs` names their folders; seeds are averaged, and 5 logged steps.
        path: of an SVG or PNG file.
    """
    found: dict[str, dict[float, list[Run]]] = {}
    for run in runs:
        name, density, _ = run.name.rsplit("_", 2)
        found.setdefault(name, {}).setdefault(float(density), []).append(run)
    figure, places = panels(2 * len(found), 2, 5.5, 3.2)
    for (name, densities), (left, right) in zip(
        found.items(), zip(places[::2], places[1::2], strict=True), strict=True
    ):
        for place, (density, seeds) in enumerate(sorted(densities.items(), reverse=True)):
            steps = seeds[0].series["train/loss"].steps
            losses = np.mean([run.series["train/loss"].at(steps) for run in seeds], axis=0)
            sent = np.mean([run.series["sparse/traffic/total_mb"].at(steps) for run in seeds], axis=0)
            smooth = np.convolve(losses, np.full(5, 0.2), mode="valid")
            for panel, across in ((left, steps + 1), (right, sent)):
                label = "dense" if density == 1 else f"{density:g}"
                panel.plot(across[4:], smooth, label=label, **look(place).line | {"markevery": 6})
        seeds_of = " ".join(sorted({run.name.rpartition("seed")[2] for one in densities.values() for run in one}))
        left.set_title(f"{name}: training loss, seeds {seeds_of}", loc="left", fontsize=10)
        left.set_xlabel("steps")
        right.set(xscale="log", xlabel="MB sent by a rank")
        plain_numbers(right.xaxis)
        for panel in (left, right):
            label_ends(panel)
    save(figure, path)


def show(rows: list[dict[str, Any]]) -> None:
    """One row for each example and density."""
    table = Table(title="perplexity: less is better; accuracy: more is; each seed from 0 on")
    for heading in ("example", "density", "result", "seeds", "MB sent per rank", "dense / sent"):
        table.add_column(heading)
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["run"][0], -row["run"][1], row["run"][2])):
        runs.setdefault((row["run"][0], row["run"][1]), []).append(row)
    for (name, density), found in runs.items():
        sent = fmean(row["megabytes"] for row in found)
        dense = [row["megabytes"] for row in runs.get((name, 1.0), [])]
        results = [row["result"] for row in found]
        table.add_row(
            f"{name}, {EXAMPLES[name].result.removeprefix('val/')}",
            f"{density:g}",
            f"{fmean(results):.4g}",
            " ".join(f"{result:.4g}" for result in results),
            f"{sent:.2f}",
            f"{fmean(dense) / sent:.0f}" if dense else "",
        )
    Console().print(table)


if __name__ == "__main__":
    CLI(main, as_positional=False)
