"""A training loop without Lightning that changes gradients before the optimizer steps, densely and with `ls.attach`.

A character model of 0.8 million parameters on one text file, two processes. `--change` says what the loop does with
gradients after backward: `clip` clips their norm at 1, `tokens` divides them by the number of tokens and clips nothing,
`scaler` lets a GradScaler unscale them.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/own_loop.py --text input.txt --change clip --sparse false
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/own_loop.py --text input.txt --change clip
"""

from __future__ import annotations

import lzma
import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from adam import loss_of
from jsonargparse import CLI
from plain_gpt import LENGTH, Block, drawn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls

WIDTH, HEADS, LAYERS, BATCH = 128, 4, 4, 12
RATE, LEAST_RATE, WARM_UP, DECAY, BETAS = 1e-3, 1e-4, 100, 0.1, (0.9, 0.99)


class CharacterModel(nn.Module):
    """A small transformer."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.characters(x) + self.places.weight))
        return hidden @ self.characters.weight.T


def main(
    text: Path,
    change: Literal["nothing", "clip", "tokens", "scaler"] = "clip",
    sparse: bool = True,
    steps: int = 1000,
    seed: int = 0,
    density: float = 0.01,
) -> float:
    """Train, and print the validation loss on rank zero.

    Args:
        text: to learn; a tenth of it is for validation. May be .xz.
        change: what is done with gradients before each step.
        sparse: attach an engine.
        steps: of the training.
        seed: of parameters and batches.
        density: of the exchange.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    opened: Any = lzma.open if text.suffix == ".xz" else open
    with opened(text, "rt", encoding="utf-8") as file:
        written = file.read()
    number = {character: i for i, character in enumerate(sorted(set(written)))}
    tokens = torch.tensor([number[character] for character in written])
    seen, unseen = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    torch.manual_seed(seed)
    model = DistributedDataParallel(CharacterModel(len(number)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
    engine = ls.attach(model, density=density) if sparse else None
    scaler = torch.amp.GradScaler("cpu", enabled=change == "scaler", init_scale=1024.0)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for step in range(steps):
        share = 0.5 * (1 + math.cos(math.pi * max(0, step - WARM_UP) / max(1, steps - WARM_UP)))
        for group in optimizer.param_groups:
            group["lr"] = RATE * (step + 1) / WARM_UP if step < WARM_UP else LEAST_RATE + share * (RATE - LEAST_RATE)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *drawn(seen, generator, BATCH))).backward()
        if change == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        elif change == "tokens":
            for parameter in model.parameters():
                parameter.grad.div_(BATCH * LENGTH)
        scaler.step(optimizer)
        scaler.update()
    if engine is not None:
        engine.close()
    with torch.no_grad():
        chosen = torch.Generator().manual_seed(1)
        loss = sum(float(loss_of(model.module, *drawn(unseen, chosen, 50))) for _ in range(40)) / 40
    if rank == 0:
        print(f"{change}, {'sparse' if sparse else 'dense'}, seed {seed}, {steps} steps: {loss:.4f}")
    dist.destroy_process_group()
    return loss


if __name__ == "__main__":
    CLI(main, as_positional=False)
