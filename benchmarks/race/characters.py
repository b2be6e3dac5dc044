"""nanoGPT's character model in its settings for a CPU: tinyshakespeare, 4 layers, 4 heads, width 128, 64 characters."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.adam import loss_of, words_of
from benchmarks.race.data import shakespeare, wikitext

Draw = Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
PRETRAINING = 2000
"""Steps."""
LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 4


class Layer(nn.Module):
    """Attention and two linear layers, each behind a norm, all without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class CharacterModel(nn.Module):
    """0.8 million parameters; the embedding is the last layer, too."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if ends else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.characters(x) + self.places.weight[: x.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        return self.norm(hidden) @ self.characters.weight.T


class Characters(NamedTuple):
    """A text as numbers."""

    alphabet: str
    draw: Draw
    evaluate: Callable[[nn.Module], float]


def character_data(folder: Path) -> Characters:
    """The first nine tenths train, 3000 windows of the rest validate, always the same ones."""
    written = shakespeare(folder)
    alphabet = "".join(sorted(set(written)))
    tokens = numbers(written, alphabet)
    seen, unseen = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    chosen = torch.Generator().manual_seed(1)
    batches = [drawn(unseen, chosen, 100) for _ in range(30)]

    def evaluate(model: nn.Module) -> float:
        return fmean(float(loss_of(model, x, y)) for x, y in batches)

    return Characters(alphabet, functools.partial(drawn, seen), evaluate)


def numbers(written: str, alphabet: str) -> Tensor:
    """Places in the alphabet; what is not in it becomes a space."""
    number = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([number.get(character, number[" "]) for character in written])


def drawn(source: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Windows of a text, and what follows each of their characters."""
    starts = torch.randint(len(source) - LENGTH, (rows,), generator=generator)
    window = source[starts[:, None] + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def pretrained(folder: Path, alphabet: str, cache: Path) -> dict[str, Tensor]:
    """The model after 2000 steps on WikiText-2 in the same alphabet; trained once, then read.

    Args:
        folder: of the texts.
        alphabet: of what is learned later.
        cache: file that is read, or written.
    """
    if cache.exists():
        return torch.load(cache)
    path, _ = wikitext(folder)
    tokens = numbers(" ".join(words_of(path, 1_000_000)), alphabet)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CharacterModel(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(PRETRAINING):
        rise = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = 1e-3 * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / PRETRAINING)))
        optimizer.zero_grad()
        loss_of(model, *drawn(tokens, generator, 12)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    cache.parent.mkdir(parents=True, exist_ok=True)
    beside = cache.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), beside)
    beside.replace(cache)
    return model.state_dict()
