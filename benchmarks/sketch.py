"""Is a sketch's norm that of the mean gradient, for the gradients of trainings, and what does it cost?

The models of `models14m.py` are trained densely on WikiText-2 and CIFAR-10. Before some steps, gradients of further
batches are those of n ranks: the norm of their mean sketch (`lightning_sparse/ops/sketch.py`) is divided by the norm of
their mean. A cell is a model, a step and n; it has one such ratio for each seed of the signs. Then both are timed on
25 million float32 coordinates in 60 pieces, in turns, against `torch.linalg.vector_norm` of each piece, in one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.sketch --text data/wikitext-2 --images data/cifar10
    OMP_NUM_THREADS=1 python -m benchmarks.sketch --models [] --turns 100

It ends with 1 if a ratio is outside of 0.95 to 1.05, if the root mean square of a cell's deviations exceeds 1.5 %, or
if the sketch takes more than 1.3 times as long as the norm. Data are downloaded where folders have none.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from jsonargparse import CLI
from torch import Tensor, nn

from benchmarks import models14m
from benchmarks.adam import words_of
from benchmarks.race.data import wikitext
from lightning_sparse.ops.c import native
from lightning_sparse.ops.length import joint_norm
from lightning_sparse.ops.sketch import sketch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LOWEST, HIGHEST, MOST_RMS, MOST_TIME = 0.95, 1.05, 0.015, 1.3
NUMEL, PIECES = 25_000_000, 60
Draw = Callable[[torch.Generator], Any]


def words(folder: Path, most: int, shape: tuple[int, int]) -> Draw:
    """Windows of WikiText-2; all but the most frequent words are one."""
    seen = words_of(wikitext(folder)[0], 1_500_000)
    number = {word: i + 1 for i, (word, _) in enumerate(collections.Counter(seen).most_common(most - 1))}
    tokens = torch.tensor([number.get(word, 0) for word in seen])
    rows, length = shape

    def draw(generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(tokens) - length, (rows, 1), generator=generator)
        return tokens[starts + torch.arange(length + 1)]

    return draw


def pictures(folder: Path, rows: int) -> Draw:
    """Images of CIFAR-10."""
    sys.path.append(str(EXAMPLES))
    from cifar10 import CIFAR10

    data = CIFAR10(folder)
    data.prepare_data()
    pixels, labels = data.load("train").tensors

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(labels), (rows,), generator=generator)
        return (pixels[chosen] / 255 - 0.47) / 0.25, labels[chosen]

    return draw


def ratios(model: nn.Module, draw: Callable[[], Any], ranks: Sequence[int], seeds: Sequence[int]) -> dict[int, Tensor]:
    """(seeds,) norms of sketches over norms, for each number of ranks, whose batches are the first ones."""
    parameters = list(model.parameters())
    total, sketches = [torch.zeros_like(p) for p in parameters], torch.zeros((), dtype=torch.float64)
    found = {}
    for rank in range(max(ranks)):
        gradients = torch.autograd.grad(model(draw()), parameters)
        torch._foreach_add_(total, gradients)
        sketches = sketches + torch.stack([sketch(gradients, seed) for seed in seeds])
        if rank + 1 in ranks:
            found[rank + 1] = sketches.norm(dim=1) / joint_norm([x.flatten() for x in total])
    return found


def train(
    name: str, model: Any, draw: Draw, steps: Sequence[int], ranks: Sequence[int], seeds: int, batches: int
) -> bool:
    """Print the cells of a training; whether all of them are good."""
    optimizer, batch = model.optimizer(model.parameters()), functools.partial(draw, torch.Generator().manual_seed(0))
    good = True
    for step in range(max(steps) + 1):
        if step in steps:
            others = functools.partial(draw, torch.Generator().manual_seed(step + 1))
            for n, found in ratios(model, others, ranks, range(step * seeds, step * seeds + seeds)).items():
                low, high, rms = float(found.min()), float(found.max()), float((found - 1).square().mean().sqrt())
                good &= low >= LOWEST and high <= HIGHEST and rms <= MOST_RMS
                print(f"{name:5}{step:5}{n:4} ranks{low:9.4f} to {high:.4f}, RMS {rms:.2%}", flush=True)
        optimizer.zero_grad()
        for _ in range(batches):
            (model(batch()) / batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return good


def cost(turns: int, numel: int = NUMEL) -> bool:
    """Print times, and return whether they are good."""
    pieces = torch.randn(numel, generator=torch.Generator().manual_seed(0)).split(-(-numel // PIECES))
    forms = {"sketch": lambda: sketch(pieces, 0), "norm": lambda: [torch.linalg.vector_norm(x) for x in pieces]}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(turns + 1):
        for name, form in forms.items():
            begin = time.perf_counter()
            form()
            if turn:  # the first one takes the memory
                seconds[name].append(time.perf_counter() - begin)
    ratio = median(own / other for own, other in zip(seconds["sketch"], seconds["norm"], strict=True))
    words = ", ".join(f"{name} {1e3 * median(each):.2f} ms" for name, each in seconds.items())
    print(
        f"{numel:,} coordinates in {len(pieces)} pieces, {native.description}: {words}, ratio {ratio:.2f}", flush=True
    )
    return ratio <= MOST_TIME


def main(
    text: Path = Path("data/wikitext-2"),
    images: Path = Path("data/cifar10"),
    models: list[Literal["lstm", "gpt", "vgg"]] | None = None,
    steps: list[int] | None = None,
    ranks: list[int] | None = None,
    seeds: int = 32,
    batches: int = 2,
    turns: int = 40,
) -> int:
    """Print all cells, and times.

    Args:
        text: folder of WikiText-2.
        images: folder of CIFAR-10.
        models: None: all; an empty list: only time.
        steps: before which gradients are looked at; None: 0, 50 and 400.
        ranks: None: 2, 8 and 64.
        seeds: of signs.
        batches: that a step of the training averages over.
        turns: of timing.
    """
    torch.set_num_threads(1)
    good = True
    for name in ["lstm", "gpt", "vgg"] if models is None else models:
        made: dict[str, Callable[[], Draw]] = {
            "lstm": lambda: words(text, models14m.TOKENS, (16, models14m.LSTMLanguageModel.length)),
            "gpt": lambda: words(text, models14m.WORDS, (4, models14m.GPT.length)),
            "vgg": lambda: pictures(images, 8),
        }
        torch.manual_seed(0)
        model = models14m.MODELS[name]()
        good &= train(name, model, made[name](), steps or [0, 50, 400], ranks or [2, 8, 64], seeds, batches)
    good &= cost(turns)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(CLI(main, as_positional=False))
