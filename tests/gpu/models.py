"""Two models: a small one with branches, and a transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Branches(nn.Module):
    """A trunk and two branches, of which a forward may use any."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(20, 60)
        self.left = nn.Linear(60, 60)
        self.right = nn.Linear(60, 60)
        self.head = nn.Linear(60, 5)

    def forward(self, x: Tensor, use: str = "both") -> Tensor:
        x = self.trunk(x).relu()
        left = self.left(x) if use in ("left", "both") else 0
        right = self.right(x) if use in ("right", "both") else 0
        return self.head((left + right).relu())


class Transformer(nn.Module):
    """A decoder of GPT-2's shape, its embedding tied to its head; the defaults have 124 million parameters."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50_257, length: int = 512
    ) -> None:
        super().__init__()
        self.words, self.length = words, length
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of the next words."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.layers(self.embedding(inputs) + self.positions[:length], mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
