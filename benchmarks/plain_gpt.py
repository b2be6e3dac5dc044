"""A GPT as a new user would write it, with AdamW, densely and behind the exchange of `sparse_ddp`.

Two simulated ranks of 8 sequences, on the code that trains: groups as DDP's buckets cut them, small parameters dense.
Nothing is tuned: AdamW(1e-3), weight decay 0.1, a warm-up of 50 steps, cosine to 0. `--init small` draws all matrices
with a standard deviation of 0.02, as GPT-2 does; `--init torch` leaves linear layers to torch's default.

    OMP_NUM_THREADS=1 python benchmarks/plain_gpt.py --train_file train.tokens --valid_file valid.tokens
    OMP_NUM_THREADS=1 python benchmarks/plain_gpt.py --clips=[1.0] --beta2=[0.999] --init torch \
        --train_file train.tokens --valid_file valid.tokens

Clipping is that of a Trainer: one factor for all ranks, from the norm of the mean gradient. Every
finished training is a line of JSON in `--out`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from adam import loss_of, words_of
from jsonargparse import CLI
from torch import Tensor, nn
from torch.nn import functional

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.average import spread_divisor
from lightning_sparse.engine.diversity import Diversity
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.methods.exchanges import as_exchange

WORDS, LENGTH, BATCH, RANKS = 4096, 64, 8, 2
RATE, DECAY, WARM_UP = 1e-3, 0.1, 50
FIRST_BUCKET = 1 << 18
"""Coordinates of the first bucket of DDP, 1 MiB; all others are in the second one."""


class Block(nn.Module):
    """Attention, and two linear layers, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (part(y).view(rows, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """1.1 million parameters, tied embeddings."""

    def __init__(self, init: str, width: int = 128, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        for parameter in self.parameters() if init == "small" else ():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y)
        logits: Tensor = self.norm(y) @ self.words.weight.T
        return logits


def drawn(tokens: Tensor, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
    """Pieces of a text, and what follows each of their tokens."""
    starts = torch.randint(len(tokens) - LENGTH - 1, (rows,), generator=generator)
    window = tokens[starts[:, None] + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


def cut(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """In two groups, the last ones first."""
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if len(groups) == 1 and sum(p.numel() for p in groups[0]) >= FIRST_BUCKET:
            groups.append([])
        groups[-1].append(parameter)
    return groups


def train(
    tokens: Tensor, init: str, sparse: bool, seed: int, beta2: float, clip: float, steps: int, density: float
) -> nn.Module:
    """One training."""
    torch.manual_seed(seed)
    model, generator = GPT(init), torch.Generator().manual_seed(seed + 1000)
    parameters = list(model.parameters())
    groups = cut([p for p in parameters if p.dim() > 1]) if sparse else []
    dense = [p for p in parameters if p.dim() <= 1 or not sparse]
    optimizer = torch.optim.AdamW(dense, lr=RATE, betas=(0.9, beta2), weight_decay=DECAY)
    union, memory = ls.sparsifiers.UnionTopK(), ls.memories.SecondMoment(beta2)
    exchange = as_exchange(None, union, memory)
    at = Context(0, density, 0, RANKS)
    device = torch.device("cpu")
    states = [
        [
            init_group(sum(p.numel() for p in group), torch.float32, device, at, memory=memory, sparsifier=union)
            for _ in range(RANKS)
        ]
        for group in groups
    ]
    diversity = Diversity()
    for step in range(steps):
        rate = RATE * min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        gradients = []
        for _ in range(RANKS):
            model.zero_grad()
            loss_of(model, *drawn(tokens, generator, BATCH)).backward()
            gradients.append({p: p.grad for p in parameters})
            for parameter in parameters:
                parameter.grad = None
        means = [torch.stack([own[parameter] for own in gradients]).mean(0) for parameter in parameters]
        factor = min(1.0, clip / (float(nn.utils.get_total_norm(means)) + 1e-6)) if clip else 1.0
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean * factor
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        optimizer.step()
        every = [[torch.cat([own[p].flatten() for p in group]) * factor for own in gradients] for group in groups]
        if sparse:
            diversity.follow(every, step)
        for number, (group, rows) in enumerate(zip(groups, every, strict=True)):
            before = states[number]
            exchanged = [
                exchange_group(
                    row, state, at._replace(step=step, rank=rank), memory=memory, sparsifier=union, exchange=exchange
                )
                for rank, (row, state) in enumerate(zip(rows, before, strict=True))
            ]
            made = drive_ranks(exchanged)
            states[number] = [
                settle_group(state, one, bool(one.skipped), memory) for state, one in zip(before, made, strict=True)
            ]
            divisor = spread_divisor(made[0].update.indices, made[0].divisor, len(rows[0]))
            moves = (rows[0] / divisor * (rate * diversity.factor(RANKS))).split([p.numel() for p in group])
            with torch.no_grad():
                for parameter, move in zip(group, moves, strict=True):
                    parameter.mul_(1 - rate * DECAY).sub_(move.view_as(parameter))
    return model


@torch.no_grad()
def perplexity(model: nn.Module, tokens: Tensor) -> float:
    rows = (len(tokens) - 1) // LENGTH
    x, y = (tokens[first : first + rows * LENGTH].view(rows, LENGTH) for first in (0, 1))
    losses = [float(loss_of(model, a, b)) * len(a) for a, b in zip(x.split(32), y.split(32), strict=True)]
    return math.exp(sum(losses) / rows)


def main(
    train_file: Path,
    valid_file: Path,
    init: Literal["small", "torch"] = "small",
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    beta2: Sequence[float] = (0.95, 0.999),
    clips: Sequence[float] = (0.0, 1.0),
    steps: int = 300,
    density: float = 0.01,
    out: Path = Path("plain_gpt.jsonl"),
) -> None:
    """Train each seed densely and behind the exchange.

    Args:
        train_file: text, words separated by spaces; may be .xz.
        valid_file: the same.
        init: of matrices.
        seeds: of parameters and batches.
        beta2: of AdamW, each.
        clips: limits of norms, each; 0: none.
        steps: of each training.
        density: of the exchange.
        out: gets a line for each training.
    """
    torch.set_num_threads(1)
    seen, unseen = words_of(train_file, 2_000_000), words_of(valid_file, 30_001)
    number = {word: i + 1 for i, (word, _) in enumerate(Counter(seen).most_common(WORDS - 1))}
    tokens, others = (torch.tensor([number.get(word, 0) for word in part]) for part in (seen, unseen))
    for clip in clips:
        for decay in beta2:
            for seed in seeds:
                found = [
                    perplexity(train(tokens, init, sparse, seed, decay, clip, steps, density), others)
                    for sparse in (False, True)
                ]
                line = {"init": init, "clip": clip, "beta2": decay, "seed": seed, "steps": steps, "density": density}
                line |= {"dense": round(found[0], 2), "sparse": round(found[1], 2)}
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line)


if __name__ == "__main__":
    CLI(main, as_positional=False)
