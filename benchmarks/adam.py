"""AdamW behind a sparse exchange, at the user's own learning rate and at the best one.

n simulated ranks in one process, on the code that trains. Ways to step:

- `dense`: torch's AdamW on the mean gradient; `dense_beta0` the same without a first moment.
- `second_moment`: what `sparse_ddp` does with AdamW, see `lightning_sparse.memories.SecondMoment`.
- `residual`: torch's AdamW behind plain error feedback; `residual_beta0` the same without a first moment.
- `adam_correction`: Adam's directions formed on each rank before the exchange, see `ls.memories.AdamCorrection`.
- `sgd`: momentum SGD on the mean gradient; `sgd_spent` what `sparse_ddp` does with it, see `docs/reports/momentum.md`;
  `sgd_residual` behind plain error feedback; `sgd_score` the same, selected by the score of `SecondMoment`;
  `sgd_correction` DGC's momentum correction with factor masking. Rates are multiples of 0.05.

- `lion`: Lion on the mean gradient, betas 0.9 and 0.99, weight decay 1; `lion_residual` behind plain error feedback.
- `muon`: torch's Muon for the matrices of blocks and of the LSTM, AdamW for the others; `muon_residual` the same, with
  those of Muon behind plain error feedback, and the others dense. With `gpt` and `lstm`.

Parameters with fewer than 2 dimensions stay dense, as in the strategies. A seed decides initial parameters and batches.
Warm-up over a tenth of the steps, at most 50, and cosine to a tenth, AdamW(0.9, beta2), decoupled weight decay 0.1.
Gradients of each rank are clipped to a norm of 1 (`--clip`), for all ways alike, as local clipping would;
`--clip_averages true` clips averages instead, as a Trainer does with SGD. `--warm_up` lets the density begin at 0.25.
Rates are multiples of the user's: 1e-3 for `gpt` and `cnn`, 3e-3 for `lstm`. `--momentum` and `--weight_decay` are
SGD's.

`--multiple` lets `second_moment` send so many times the coordinates; the table says how its bytes compare with those
that MiCRO sends at the density that was asked for.

Every finished training is a line of JSON in `--out`; the same command again does only what is missing.

    OMP_NUM_THREADS=1 python benchmarks/adam.py --task gpt --train_files=[train.tokens] --valid_file valid.tokens
    OMP_NUM_THREADS=1 python benchmarks/adam.py --task cnn --train_files=[train.npz] --valid_file test.npz
    OMP_NUM_THREADS=1 python benchmarks/adam.py --task cnn --ways=[sgd,sgd_spent,sgd_residual] \
        --train_files=[train.npz] --valid_file test.npz
    python benchmarks/adam.py --table true
"""

from __future__ import annotations

import collections
import json
import lzma
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jsonargparse import CLI
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import lightning_sparse as ls
from lightning_sparse.engine.diversity import Diversity
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped

WORDS = {"gpt": 4096, "lstm": 2000}
LENGTH = {"gpt": 64, "lstm": 16}
RATE = {"gpt": 1e-3, "lstm": 3e-3, "cnn": 1e-3}
BATCH = {"gpt": 8, "lstm": 8, "cnn": 16}
SGD_RATE = 0.05
WARM = 0.25
"""Density that a warm-up begins with."""
DENSE = ("dense", "dense_beta0", "sgd", "lion", "muon")

Way = Literal[
    "dense",
    "dense_beta0",
    "second_moment",
    "residual",
    "residual_beta0",
    "adam_correction",
    "sgd",
    "sgd_spent",
    "sgd_residual",
    "sgd_score",
    "sgd_correction",
    "lion",
    "lion_residual",
    "muon",
    "muon_residual",
]


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """1.1 million parameters: three layers of width 128, tied embeddings."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS["gpt"], width), nn.Embedding(LENGTH["gpt"], width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(x) + self.places.weight[: x.shape[1]]))
        return hidden @ self.words.weight.T


class LSTM(nn.Module):
    """0.57 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS["lstm"], 96), nn.LSTM(96, 128, batch_first=True)
        self.out = nn.Linear(128, WORDS["lstm"])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.lstm(self.words(x))[0])
        return logits


def cnn() -> nn.Module:
    """0.29 million parameters, without normalisation over batches, which would tie ranks to batch sizes."""

    def stage(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(3, 64), *stage(64, 128), *stage(128, 160), nn.Flatten(), nn.Linear(160 * 16, 10))


class Data(NamedTuple):
    """What a task draws from, and how good a model is on what it has not seen."""

    draw: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    evaluate: Callable[[nn.Module], float]
    """Perplexity, or error in percent: less is better."""


def words_of(path: Path, most: int) -> list[str]:
    read: Any = lzma.open if path.suffix == ".xz" else open
    with read(path, "rt", encoding="utf-8") as file:
        return [word for line in file for word in (*line.split(), "<eos>")][:most]


def text(task: str, train: Path, valid: Path) -> Data:
    seen, unseen = words_of(train, 1_500_000), words_of(valid, 100_000)
    frequent = collections.Counter(seen).most_common(WORDS[task] - 1)
    number = {word: i + 1 for i, (word, _) in enumerate(frequent)}
    tokens, others = (torch.tensor([number.get(word, 0) for word in part]) for part in (seen, unseen))

    def draw(source: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(source) - LENGTH[task] - 1, (rows,), generator=generator)
        window = source[starts[:, None] + torch.arange(LENGTH[task] + 1)]
        return window[:, :-1], window[:, 1:]

    x, y = draw(others, torch.Generator().manual_seed(99), 160 if task == "gpt" else 400)

    def perplexity(model: nn.Module) -> float:
        losses = [float(loss_of(model, x[i : i + 16], y[i : i + 16])) for i in range(0, len(x), 16)]
        return math.exp(min(50.0, fmean(losses)))

    return Data(lambda generator, rows: draw(tokens, generator, rows), perplexity)


def images(train: Sequence[Path], valid: Path) -> Data:
    def load(path: Path) -> tuple[Tensor, Tensor]:
        with np.load(path) as file:
            arrays = {file[name].ndim: torch.from_numpy(file[name]) for name in file.files}
        x = arrays[4].float()
        x = x.permute(0, 3, 1, 2) if x.shape[-1] == 3 else x
        return (x / 255 - 0.47) / 0.25, arrays[1].long()

    x, y = (torch.cat(parts) for parts in zip(*(load(path) for path in train), strict=True))
    unseen, labels = (part[:5000] for part in load(valid))

    def error(model: nn.Module) -> float:
        right = sum(
            int((model(a).argmax(1) == b).sum()) for a, b in zip(unseen.split(500), labels.split(500), strict=True)
        )
        return 100 - 100 * right / len(labels)

    def draw(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(x), (rows,), generator=generator)
        return x[chosen], y[chosen]

    return Data(draw, error)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x, y = (batch.to(next(model.parameters()).device) for batch in (x, y))
    logits = model(x)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


class Run(NamedTuple):
    """What is trained; the key of a result."""

    task: str
    way: str
    ranks: int
    density: float
    given_density: float
    rate: float
    """In multiples of the user's."""
    seed: int
    steps: int
    beta2: float


class Clip(NamedTuple):
    """What gradients are clipped to."""

    limit: float | None
    by_value: bool
    averages: bool
    """Whether averages are clipped, and not each rank's gradients."""

    def apply_(self, parameters: Sequence[nn.Parameter], averages: bool) -> None:
        """Clip gradients, if this is what is clipped."""
        if self.limit is not None and averages == self.averages:
            clip_ = nn.utils.clip_grad_value_ if self.by_value else nn.utils.clip_grad_norm_
            clip_(parameters, self.limit)


class Lion(torch.optim.Optimizer):
    """Signs of a first moment; Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 1.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters."""
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                direction = average.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
                average.lerp_(parameter.grad, 1 - beta2)


class Both:
    """Two optimizers, one after the other."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self._each = first, second
        self.param_groups = first.param_groups + second.param_groups

    def step(self) -> None:
        """Of both."""
        for optimizer in self._each:
            optimizer.step()


def train(
    run: Run,
    data: Data,
    clip: Clip,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    warm_up: int = 0,
    sparsifier: str = "union_top_k",
) -> dict[str, float]:
    """Train once; momentum and weight decay are SGD's, the warm-up is the density's."""
    torch.manual_seed(run.seed)
    model = {"gpt": GPT, "lstm": LSTM, "cnn": cnn}[run.task]()
    parameters = list(model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith(("blocks", "lstm"))]
    if run.way.startswith("muon") and not matrices:
        raise ValueError(f"Expected gpt or lstm for {run.way}, but got {run.task}.")
    sparse = [p for p in parameters if p.dim() > 1] if run.way not in DENSE else []
    sparse = matrices if run.way == "muon_residual" else sparse
    dense = [p for p in parameters if all(p is not other for other in sparse)]
    beta1 = 0.0 if run.way in ("dense_beta0", "residual_beta0") else 0.9
    settings: dict[str, Any] = {"lr": 1.0, "betas": (beta1, run.beta2), "weight_decay": 0.1}
    takes_steps = run.way in ("second_moment", "adam_correction")
    stepped = dense if takes_steps else parameters
    optimizer: torch.optim.Optimizer | Both = torch.optim.AdamW(stepped, **settings)
    if run.way.startswith("sgd"):
        optimizer = torch.optim.SGD(stepped, lr=1.0, momentum=momentum, weight_decay=weight_decay)
    if run.way == "sgd_correction":
        groups = [
            {"params": sparse, "momentum": 0.0, "weight_decay": weight_decay / (1 - momentum)},
            {"params": dense},
        ]  # decay as far as before
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=momentum, weight_decay=weight_decay)
    elif run.way.startswith("lion"):
        optimizer = Lion(stepped)
    elif run.way.startswith("muon"):
        others = [p for p in parameters if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        optimizer = Both(muon, torch.optim.AdamW(others, **settings))
    generator = torch.Generator().manual_seed(run.seed + 1)
    waited = [torch.zeros_like(p, dtype=torch.uint8) for p in sparse]
    spending = Spending()
    losses: list[float] = []
    sent = begin = 0.0
    means: list[Tensor] = []

    diversity = Diversity()

    def gradients() -> Iterator[Tensor]:
        for step in range(run.steps):
            rows, own, total = [], [], 0.0
            for _ in range(run.ranks):
                model.zero_grad()
                loss = loss_of(model, *data.draw(generator, BATCH[run.task]))
                loss.backward()
                clip.apply_(parameters, averages=False)
                total += float(loss.detach()) / run.ranks
                rows.append(torch.cat([p.grad.flatten() for p in sparse] or [torch.zeros(1)]))
                own.append([p.grad.clone() for p in dense])
            losses.append(total)
            means[:] = [torch.stack(each).mean(0) for each in zip(*own, strict=True)]
            diversity.follow([rows], step)
            yield torch.stack(rows)

    def rate_at(step: int) -> float:
        warm = min(50, run.steps // 10)
        cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * step / run.steps))
        full = SGD_RATE if run.way.startswith("sgd") else RATE[run.task]
        return full * run.rate * min(1.0, (step + 1) / warm) * cosine

    memories = {
        "second_moment": ls.memories.SecondMoment(run.beta2),
        "sgd_score": ls.memories.SecondMoment(run.beta2),
        "adam_correction": ls.memories.AdamCorrection(beta2=run.beta2),
        "sgd_correction": ls.memories.MomentumCorrection(momentum),
    }
    memory = memories.get(run.way, ls.memories.Residual())
    density = ls.Warmup(WARM, run.given_density, warm_up) if warm_up else run.given_density
    traces = ls.simulate(gradients(), sparsifier=sparsifier, density=density, memory=memory)
    begin = time.perf_counter()
    for trace in traces:
        rate = rate_at(trace.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, mean in zip(dense, means, strict=True):
            parameter.grad = mean
        parts = trace.update.split([p.numel() for p in sparse]) if sparse else ()
        if takes_steps:
            longer, update = 1.0, trace.update
            if run.way == "second_moment":
                assert trace.divisor is not None
                longer, update = diversity.factor(run.ranks), trace.update / trace.divisor
            with torch.no_grad():
                for parameter, part in zip(sparse, update.split([p.numel() for p in sparse]), strict=True):
                    parameter.mul_(1 - rate * 0.1).sub_(part.view_as(parameter), alpha=rate * longer)
        else:
            for parameter, part in zip(sparse, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        clip.apply_(parameters, averages=True)
        optimizer.step()
        by = Momentum.of(optimizer.param_groups[0]) if run.way == "sgd_spent" else None
        if by is not None and isinstance(optimizer, torch.optim.Optimizer):
            velocities = [optimizer.state[p]["momentum_buffer"] for p in sparse]
            grads = [part.view_as(p) for p, part in zip(sparse, parts, strict=True)]
            spending.spend_([Stepped(*each) for each in zip(sparse, grads, velocities, waited, strict=True)], by)
        sent += float(trace.bytes_sent.mean())
        if not math.isfinite(losses[-1]):
            break
    with torch.no_grad():
        result = data.evaluate(model) if math.isfinite(losses[-1]) else math.inf
    seconds = time.perf_counter() - begin
    numel = sum(p.numel() for p in sparse)
    return {
        "micro": micro_megabytes(run, numel),
        "result": result,
        "loss": fmean(losses[-40:]),
        "megabytes": sent / 1e6,
        "seconds": seconds,
    }


def micro_megabytes(run: Run, sparse: int) -> float:
    """What MiCRO sends at the density that was asked for: 4 bytes an index, 8 a value there and back."""
    n, k = run.ranks, run.density * sparse
    return run.steps * (4 * (n - 1) * k / n + 8 * (n - 1) / n * k) / 1e6


def main(
    task: Literal["gpt", "lstm", "cnn"] = "gpt",
    train_files: list[Path] | None = None,
    valid_file: Path | None = None,
    ways: list[Way] | None = None,
    ranks: list[int] | None = None,
    densities: list[float] | None = None,
    rates: list[float] | None = None,
    seeds: list[int] | None = None,
    steps: list[int] | None = None,
    beta2: float = 0.95,
    multiple: float = 1.0,
    clip: float | None = 1.0,
    clip_by_value: bool = False,
    clip_averages: bool = False,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    warm_up: int = 0,
    sparsifier: str = "union_top_k",
    out: Path = Path("adam.jsonl"),
    table: bool = False,
) -> None:
    """Train what is missing, and print all that there is.

    Args:
        task: a small GPT or LSTM on text, or a convolutional network on images.
        train_files: text, maybe compressed with xz, or arrays of numpy: images in 4 dimensions, labels in 1.
        valid_file: of the same kind, not trained on.
        ways: to step; None: dense, second_moment and residual.
        ranks: numbers of simulated ranks; None: 4.
        densities: of the exchange; None: 0.01.
        rates: in multiples of the user's; None: 1.
        seeds: None: 0.
        steps: lengths of trainings; None: 300.
        beta2: of AdamW.
        multiple: of the density, for ``second_moment``.
        clip: norm that gradients are clipped to; None: not. Keep results of this and the next six options in an
            ``out`` of their own.
        clip_by_value: clip each value instead.
        clip_averages: clip averages, and not the gradients of each rank; for ``dense`` and all ways of SGD.
        momentum: of SGD.
        weight_decay: of SGD.
        warm_up: steps in which the density falls from 0.25; 0: none.
        sparsifier: of all ways but the dense ones.
        out: where results are kept, a line each.
        table: only print.
    """
    torch.set_num_threads(1)
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {tuple(row["run"]) for row in known}
    clipping = Clip(clip, clip_by_value, clip_averages)
    if not table:
        if not train_files or valid_file is None:
            raise SystemExit("Expected --train_files and --valid_file, see the top of the file.")
        data = images(train_files, valid_file) if task == "cnn" else text(task, train_files[0], valid_file)
        wanted = [
            Run(task, way, n, density, given, rate, seed, length, beta2)
            for length in steps or [300]
            for n in ranks or [4]
            for seed in seeds or [0]
            for rate in rates or [1.0]
            for way in ways or ["dense", "second_moment", "residual"]
            for density in ([1.0] if way in DENSE else densities or [0.01])
            for given in [density * multiple if way == "second_moment" else density]
        ]
        for run in dict.fromkeys(wanted):
            if tuple(run) not in done:
                row = {"run": list(run), **train(run, data, clipping, momentum, weight_decay, warm_up, sparsifier)}
                known.append(row)
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
    show(known)


def show(rows: list[dict[str, Any]]) -> None:
    """Means over seeds, and their ratio to dense at the same rate and at its best one."""
    results: dict[tuple[Any, ...], list[float]] = collections.defaultdict(list)
    megabytes: dict[tuple[Any, ...], float] = {}
    for row in rows:
        run = Run(*row["run"])
        key = run._replace(seed=-1)
        results[key].append(row["result"])
        megabytes[key] = row["megabytes"] / row["micro"] if row["micro"] else math.nan
    table = Table(title="perplexity, or error in percent: less is better")
    for heading in (
        "task",
        "steps",
        "ranks",
        "density",
        "way",
        "rate",
        "result",
        "seeds",
        "/ dense",
        "/ best dense",
        "MB",
    ):
        table.add_column(heading)
    for key, values in sorted(results.items(), key=lambda item: (item[0][0], item[0][7], item[0][2:4], item[0][1:])):
        run = Run(*key)
        alike = {
            Run(*other).rate: fmean(found)
            for other, found in results.items()
            if Run(*other)._replace(rate=0, way="", density=0, given_density=0)
            == run._replace(rate=0, way="", density=0, given_density=0)
            and Run(*other).way == ("sgd" if run.way.startswith("sgd") else "dense")
        }
        mean = fmean(values)
        ratios = [
            f"{mean / alike[run.rate]:.3f}" if run.rate in alike else "",
            f"{mean / min(alike.values()):.3f}" if alike else "",
        ]
        given = f"{run.density:g}" if run.given_density == run.density else f"{run.density:g} ({run.given_density:.4g})"
        table.add_row(
            run.task,
            str(run.steps),
            str(run.ranks),
            given,
            run.way,
            f"{run.rate:g}",
            f"{mean:.2f}",
            " ".join(f"{value:.1f}" for value in values),
            *ratios,
            f"{megabytes[key]:.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    CLI(main, as_positional=False)
