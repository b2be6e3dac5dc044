"""What is trained: models, data, schedules. A task decides all but the method, its settings and the seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.adam import BATCH, GPT, LSTM, RATE, text
from benchmarks.race.characters import CharacterModel, character_data, pretrained
from benchmarks.race.data import wikitext

CACHE = Path(__file__).parents[2] / "data" / "race"
"""For what is made once and not committed."""


class Loaded(NamedTuple):
    """A task's data, in this process."""

    model: Callable[[], nn.Module]
    """A new one; parameters by torch's own generator."""
    draw: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    evaluate: Callable[[nn.Module], float]
    """Loss on what is not trained on, in nats for each word or character."""


@dataclass(frozen=True)
class Task:
    """A training for n ranks.

    Attributes:
        name: of the file of results.
        version: raised when results change.
        load: reads data from a folder.
        steps: of a training.
        batch: rows of a rank and step.
        rate: that rates are multiples of.
        warm_up: steps in which the rate rises.
        floor: share of the rate that the cosine ends at.
        betas: of AdamW.
        decay: weight decay of matrices, and of vectors.
        clip: norm of gradients.
        clips: `rank`: each rank's, always; `average`: of averages where there are dense ones, as DDP does it; where a
            method has none, each rank's, to sqrt(n) times the limit, or to the limit if it trains alone.
        every: steps between points of the curve.
        perplexity: whether results are shown as perplexities.
        ranks: n.
    """

    name: str
    load: Callable[[Path], Loaded]
    steps: int
    batch: int
    rate: float
    warm_up: int
    floor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    decay: tuple[float, float] = (0.1, 0.1)
    clip: float = 1.0
    clips: str = "rank"
    every: int = 60
    perplexity: bool = True
    ranks: int = 4
    version: int = 1

    def rate_at(self, step: int, multiple: float) -> float:
        """Warm-up, then a cosine."""
        rise = min(1.0, (step + 1) / self.warm_up) if self.warm_up else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rate * multiple * rise * (self.floor + (1 - self.floor) * cosine)

    def clip_of_ranks(self, method_clips_averages: bool, local: bool) -> float | None:
        """What each rank clips its gradients to."""
        if self.clips == "rank" or local:
            return self.clip
        return None if method_clips_averages else self.clip * math.sqrt(self.ranks)

    @property
    def clip_of_averages(self) -> float | None:
        """What dense averages are clipped to."""
        return self.clip if self.clips == "average" else None


def words(task: str) -> Callable[[Path], Loaded]:
    """WikiText-2 as `benchmarks/adam.py` reads it."""

    def load(folder: Path) -> Loaded:
        data = text(task, *wikitext(folder))
        model = {"gpt": GPT, "lstm": LSTM}[task]
        return Loaded(model, data.draw, lambda net: math.log(data.evaluate(net)))

    return load


def characters(folder: Path) -> Loaded:
    """Shakespeare, letter by letter."""
    data = character_data(folder)
    return Loaded(lambda: CharacterModel(len(data.alphabet)), data.draw, data.evaluate)


def shifted(folder: Path) -> Loaded:
    """Shakespeare for a model that has learned Wikipedia."""
    data = character_data(folder)
    begin = pretrained(folder, data.alphabet, CACHE / "pretrained-1.pt")

    def model() -> nn.Module:
        made = CharacterModel(len(data.alphabet))
        made.load_state_dict(begin)
        return made

    return Loaded(model, data.draw, data.evaluate)


LSTM_600 = Task("lstm-600", words("lstm"), 600, BATCH["lstm"], RATE["lstm"], warm_up=50)
GPT_300 = Task("gpt-300", words("gpt"), 300, BATCH["gpt"], RATE["gpt"], warm_up=30, every=30)
SHAKESPEARE = Task(
    "shakespeare-2000",
    characters,
    2000,
    batch=6,  # of two ranks: the 12 of nanoGPT's settings for a CPU
    rate=1e-3,
    warm_up=100,
    betas=(0.9, 0.99),
    decay=(0.1, 0.0),
    clips="average",
    every=100,
    perplexity=False,
    ranks=2,
)
TASKS = {
    task.name: task
    for task in (
        LSTM_600,
        GPT_300,
        replace(LSTM_600, name="lstm-600-nodes", ranks=2, batch=2 * LSTM_600.batch),
        replace(GPT_300, name="gpt-300-nodes", ranks=2, batch=2 * GPT_300.batch),
        *(replace(task, name=f"{task.name}-{n}", ranks=n) for task in (LSTM_600, GPT_300) for n in (2, 8, 32)),
        replace(LSTM_600, name="lstm-3000", steps=3000, every=150),
        replace(GPT_300, name="gpt-3000", steps=3000, every=150, warm_up=50),
        replace(LSTM_600, name="lstm-3000-wide", steps=3000, every=150, batch=4 * LSTM_600.batch),
        replace(GPT_300, name="gpt-3000-wide", steps=3000, every=150, warm_up=50, batch=4 * GPT_300.batch),
        SHAKESPEARE,
        replace(SHAKESPEARE, name="shakespeare-alone", batch=12, ranks=1),
        replace(SHAKESPEARE, name="shakespeare-pair"),
        replace(SHAKESPEARE, name="shift-300", load=shifted, steps=300, ranks=4, rate=1e-4, warm_up=30, every=30),
        replace(LSTM_600, name="lstm-150", steps=150, every=30, warm_up=15),
    )
}
"""By name."""
