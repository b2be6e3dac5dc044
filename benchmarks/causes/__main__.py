"""Trains small models with several ranks, as built and with parts of the rule switched off: nanoGPT's above all.

    python -m benchmarks.causes --minutes 60 --data FOLDER
    python -m benchmarks.causes --report

Each finished training is a line of JSON in `benchmarks/results/causes`; the same command goes on with what is missing.
Schedules, tokens and decay are those of nanoGPT's script for a CPU, with 6 x 64 tokens a rank; results are validation
losses, and dense training has the same batches.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import lightning_sparse as ls
from benchmarks.adam import loss_of
from benchmarks.causes.rule import Rule, Variant
from benchmarks.causes.tables import DENSE, Run, behind, csv_tables
from benchmarks.race.flat import Flat
from benchmarks.race.results import FOLDER, commit
from benchmarks.race.tasks import TASKS, Loaded, Task
from lightning_sparse.core.step import Context
from lightning_sparse.engine.average import spread_divisor
from lightning_sparse.engine.diversity import Diversity
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.methods.exchanges import as_exchange

OWN = FOLDER / "causes" / "causes.jsonl"
TABLES = FOLDER / "reports"
LIBRARY, ROOT, EXACT = "library", "sqrt(n)", "exact factor"
"""The library; the same with steps that are longer by sqrt(n), as they were before the factor was measured; and by the
root of the mean of the ranks' squared norms over that of the mean, known exactly in every step."""
BY_LIBRARY: dict[str, Variant] = {
    name + more: variant
    for name in (LIBRARY, ROOT, EXACT)
    for more, variant in {
        "": Variant(),
        ", script's clipping": Variant("own"),
        ", MeanTopK": Variant(),
        ", density 0.02": Variant(density=0.02),
        ", density 0.1": Variant(density=0.1),
        ", density 0.013": Variant(density=0.013),
        ", 0.1 falling for 10 % of the steps": Variant(begin=0.1, warm_up=0.1),
    }.items()
}
"""Variants that the library exchanges."""
VARIANTS: dict[str, Variant] = {
    **BY_LIBRARY,
    "formulas": Variant(),
    "script's clipping": Variant("own"),
    "no clipping": Variant("none"),
    "density 1": Variant(density=1.0),
    "density 1, second moments of the mean": Variant(density=1.0, second="mean"),
    "second moments of the mean": Variant(second="mean"),
    "the best coordinates": Variant(selection="best"),
    "the best coordinates, second moments of the mean": Variant(selection="best", second="mean"),
    "4 times as many are named": Variant(selection="named"),
    "16 times as many are named": Variant(selection="named", names=16.0),
    "density 0.03": Variant(density=0.03),
    "density 0.1": Variant(density=0.1),
    "no limit of quotients": Variant(limit=False),
    "density 0.1, no limit of quotients": Variant(density=0.1, limit=False),
    "selected by steps": Variant(power=0.5),
    "selected by steps, density 0.1": Variant(power=0.5, density=0.1),
    "n to the 0.35": Variant(root=0.35),
    "n to the 0.65": Variant(root=0.65),
    "averages divided by age to the 0.25": Variant(late=0.25),
}


def wanted() -> Iterator[Run]:
    """What decides first, first."""
    first = (DENSE, LIBRARY, ROOT, "density 1", "density 0.1", "the best coordinates, second moments of the mean")
    next_ones = ("density 0.1, no limit of quotients", "selected by steps", "formulas", "no limit of quotients")
    mean = f"{LIBRARY}, MeanTopK"
    next_ones = (mean, f"{LIBRARY}, script's clipping", *next_ones)
    rest = [*next_ones, *(name for name in VARIANTS if name not in (*first, *next_ones))]
    yield from (Run(name, 8, 1000) for name in first)
    yield from (Run(name, 8, 1000) for name in rest)
    yield from (Run(name, 8, 1000, rate) for rate in (2.0, 4.0) for name in (DENSE, LIBRARY, mean))
    densities = ("density 0.1", "density 0.013", "0.1 falling for 10 % of the steps")
    yield from (Run(f"{LIBRARY}, {density}", 8, 1000, rate) for rate in (1.0, 4.0) for density in densities)
    yield Run(f"{LIBRARY}, density 0.02", 8, 1000, 4.0)
    yield from (Run(name, 8, 1000, 4.0, 1) for name in (DENSE, LIBRARY, mean))
    yield from (Run(name, 8, 2000) for name in (DENSE, LIBRARY, mean))
    yield Run(f"{DENSE}, beta1 0", 8, 1000)
    yield from (Run(name, 2, 1000) for name in first)
    yield from (Run(name, 8, 1000, seed=1) for name in (*first, *rest))
    words = (DENSE, LIBRARY, "formulas", "the best coordinates")
    yield from (Run(name, 4, 600, 16.0, seed, "lstm-600") for seed in (1, 2) for name in words)
    yield from (Run(name, 4, 300, 2.0, seed, "gpt-300") for seed in (1, 2) for name in words)


class Simulation:
    """All ranks of a training in this process.

    Args:
        run: what is trained.
        loaded: data and model.
    """

    def __init__(self, run: Run, loaded: Loaded) -> None:
        self.run, self.loaded, self.variant = run, loaded, VARIANTS.get(run.name, Variant())
        self.task: Task = replace(TASKS[run.task], steps=run.steps, ranks=run.ranks)
        torch.manual_seed(run.seed)
        self.model = loaded.model()
        self.flat = Flat(self.model)
        betas = (0.0, self.task.betas[1]) if run.name.endswith("beta1 0") else self.task.betas
        decays = zip(self.flat.both, self.task.decay, strict=True)
        groups = [{"params": [p], "weight_decay": decay} for p, decay in decays]
        self.dense = run.name.startswith(DENSE) and run.name not in VARIANTS
        numel = self.flat.matrices.numel()
        self.optimizer = torch.optim.AdamW(groups if self.dense else groups[1:], lr=1.0, betas=betas)
        self.rule = Rule(self.variant, run.ranks, numel if not self._by_library else 0, betas[1], run.steps)
        self.parts: dict[str, Any] = {
            "sparsifier": ls.sparsifiers.MeanTopK() if "MeanTopK" in run.name else ls.sparsifiers.UnionTopK(),
            "memory": ls.memories.SecondMoment(betas[1]),
        }
        self.exchange = as_exchange(None, *self.parts.values())
        first = Context(0, self.variant.density, 0, run.ranks)
        self.states = [
            init_group(numel, torch.float32, torch.device("cpu"), first._replace(rank=rank), **self.parts)
            for rank in range(run.ranks if self._by_library else 0)
        ]
        self.diversity, self.squares = Diversity(), (0.0, 0.0)
        """What gradients have in common, and running means of squared norms, of the mean and of the ranks."""
        self.generator = torch.Generator().manual_seed(run.seed + 1)

    @property
    def _by_library(self) -> bool:
        return self.run.name in BY_LIBRARY

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return (n, numel) gradients of matrices and of vectors, clipped."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for _ in range(self.run.ranks):
            self.flat.zero_()
            loss_of(self.model, *self.loaded.draw(self.generator, self.task.batch)).backward()  # type: ignore[no-untyped-call]
            if not self.dense and self.variant.clipping == "own":
                nn.utils.clip_grad_norm_(self.flat.both, self.task.clip)
            for rows, p in zip(found, self.flat.both, strict=True):
                rows.append(p.grad.clone())
        both = torch.stack(found[0]), torch.stack(found[1])
        if self.dense or self.variant.clipping == "mean":
            norm = torch.linalg.vector_norm(torch.cat([rows.mean(0) for rows in both]))
            for rows in both:
                rows.mul_(min(1.0, self.task.clip / (float(norm) + 1e-6)))
        return both

    def step(self, number: int) -> None:
        rate = self.task.rate_at(number, self.run.rate)
        matrices, vectors = self.gradients()
        self.flat.matrices.grad.copy_(matrices.mean(0))
        self.flat.vectors.grad.copy_(vectors.mean(0))
        if not self.dense:
            move = self._move_of_library(matrices, number) if self._by_library else self.rule.move(matrices, number)
            self.flat.matrices.data.mul_(1 - rate * self.task.decay[0]).sub_(move, alpha=rate)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()

    def _move_of_library(self, gradients: Tensor, number: int) -> Tensor:
        density = self.variant.density_at(number, self.run.steps)

        def one(rank: int) -> Any:
            grad = gradients[rank]
            ctx = Context(number, density, rank, self.run.ranks)
            made = yield from exchange_group(grad, self.states[rank], ctx, exchange=self.exchange, **self.parts)
            self.states[rank] = settle_group(self.states[rank], made, bool(made.skipped), self.parts["memory"])
            return made

        longer = self._factor(gradients, number)
        made = drive_ranks([one(rank) for rank in range(self.run.ranks)])[0]
        self.rule.sent += int(made.update.union)
        divisor = spread_divisor(made.update.indices, made.divisor, gradients.shape[1])
        return longer * gradients[0] / divisor

    def _factor(self, gradients: Tensor, number: int) -> float:
        """Return what a step is longer by."""
        if self.run.name.startswith(ROOT):
            return math.sqrt(self.run.ranks)
        if self.run.name.startswith(EXACT):
            mean, own = gradients.mean(0).square().sum(), gradients.square().sum(1).mean()
            self.squares = 0.9 * self.squares[0] + 0.1 * float(mean), 0.9 * self.squares[1] + 0.1 * float(own)
            return math.sqrt(self.squares[1] / self.squares[0])
        self.diversity.follow([list(gradients)], number)
        return self.diversity.factor(self.run.ranks)

    def train(self, deadline: float) -> dict[str, Any] | None:
        """Return the line to keep; None if time is up."""
        curve = []
        for number in range(self.run.steps):
            if time.time() > deadline:
                return None
            self.step(number)
            if (number + 1) % min(250, self.run.steps // 4) == 0:
                self.model.eval()
                with torch.no_grad():
                    curve.append([number + 1, round(self.loaded.evaluate(self.model), 5)])
                self.model.train()
        sent = self.rule.sent / (self.run.steps * self.flat.matrices.numel())
        return {
            "run": self.run._asdict(),
            "curve": curve,
            "density": 1.0 if self.dense else round(sent, 6),
            "commit": commit(),
        }


def known(path: Path) -> dict[Run, dict[str, Any]]:
    """What has been trained."""
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {Run(**line["run"]): line for line in lines}


def report(found: dict[Run, dict[str, Any]]) -> str:
    """Tables by number of ranks: how far each variant ends behind dense training, in nats."""
    rows = []
    for task, ranks in sorted({(run.task, run.ranks) for run in found}):
        rows += [
            f"\n{task}, {ranks} ranks",
            "",
            "| variant | steps | rate | density | seeds | loss | behind dense |",
            "| --- " * 7 + "|",
        ]
        for one in dict.fromkeys(run._replace(seed=0) for run in found if (run.task, run.ranks) == (task, ranks)):
            runs = [run for run in found if run._replace(seed=0) == one]
            pairs = [end for run in runs if (end := behind(found, run)) is not None]
            distance = f"{fmean(pairs):+.3f}" if pairs else ""
            density = found[runs[0]]["density"]
            mean = f"{fmean(found[run]['curve'][-1][1] for run in runs):.3f}"
            cells = one.name, str(one.steps), f"{one.rate:g}", f"{density:.4g}", str(len(runs)), mean, distance
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causes", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="that trainings may take (default: 60)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the texts (default: data)")
    parser.add_argument("--results", type=Path, default=OWN, help="file of the results")
    parser.add_argument("--before", nargs="+", help="variants that are trained before all others")
    parser.add_argument("--report", action="store_true", help="print and write tables, and train nothing")
    chosen = parser.parse_args()
    if chosen.report:
        found = known(chosen.results)
        print(report(found))
        for name, text in csv_tables(found).items():
            (TABLES / name).write_text(text)
        return
    torch.set_num_threads(1)
    deadline = time.time() + 60 * chosen.minutes
    load = functools.cache(lambda task: TASKS[task].load(chosen.data))
    before = chosen.before or []
    chosen_first = sorted(wanted(), key=lambda run: before.index(run.name) if run.name in before else len(before))
    for run in chosen_first:
        if run in known(chosen.results):
            continue
        line = Simulation(run, load(run.task)).train(deadline)
        if line is None:
            break
        chosen.results.parent.mkdir(parents=True, exist_ok=True)
        with chosen.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(run, line["curve"], line["density"], flush=True)


if __name__ == "__main__":
    main()
