"""Models of 10 to 15 million parameters that leave very different room for overlap.

- lstm: a language model of four layers. Its decoder finishes backward first, its embedding last, and each of them holds
  a third of the parameters: what the embedding has to exchange cannot overlap with anything.
- vgg: VGG16 for images of 32 x 32 with batch normalisation and a single linear layer on top. Its last six convolutions
  hold 88 % of the parameters and finish first, most of the time goes into those before them, with few parameters.
- gpt: a GPT of five layers, whose embedding is the decoder, too, and holds 2.2 of 14.3 M parameters; AdamW.
- mlp: ten equal linear layers of 1.05 M.

Inputs are random: what is measured with these models is time. Words are drawn by Zipf's law, so that there is something
to learn, at least.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, WORDS = 10_000, 5_000


class Trained(nn.Module):
    """What all of them have in common."""

    batch_size: int

    @classmethod
    def random_batch(cls, generator: torch.Generator, batch_size: int | None = None) -> Any:
        """Inputs and targets of one rank."""
        raise NotImplementedError

    @staticmethod
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """As one would train it."""
        return torch.optim.SGD(parameters, lr=0.01)


def words(most: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers below a limit, the probability of i proportional to about 1 / (i + 1)."""
    return torch.pow(float(most), torch.rand(shape, generator=generator)).long() - 1


class LSTMLanguageModel(Trained):
    """14.0 M parameters: embedding 5.0 M, two LSTM layers of 2.0 M, decoder 5.0 M."""

    batch_size, length = 16, 20

    def __init__(self, width: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.decoder = nn.Linear(width, TOKENS)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, for (batch, length + 1) tokens."""
        x = self.embedding(batch[:, :-1])
        for layer in self.layers:
            x, _ = layer(x)
        return nn.functional.cross_entropy(self.decoder(x).flatten(0, 1), batch[:, 1:].flatten())

    @classmethod
    def random_batch(cls, generator: torch.Generator, batch_size: int | None = None) -> Tensor:
        return words(TOKENS, (batch_size or cls.batch_size, cls.length + 1), generator)

    @staticmethod
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2.0)


class VGG(Trained):
    """14.7 M parameters: 13 convolutions, of which the last six hold 13.0 M, and a linear layer."""

    batch_size, classes = 8, 10

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        # Without running statistics there are no buffers, which DDP would send in every forward.
        norm = partial(nn.BatchNorm2d, track_running_stats=False)
        for width, depth in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), norm(width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(512, self.classes)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy, for (batch, 3, 32, 32) images and (batch,) classes."""
        images, targets = batch
        return nn.functional.cross_entropy(self.head(self.features(images).flatten(1)), targets)

    @classmethod
    def random_batch(cls, generator: torch.Generator, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        rows = batch_size or cls.batch_size
        images = torch.randn(rows, 3, 32, 32, generator=generator)
        return images, torch.randint(cls.classes, (rows,), generator=generator)


class GPT(Trained):
    """14.3 M parameters: five layers of width 448 with 2.4 M each, and tied embeddings."""

    batch_size, length = 4, 64

    def __init__(self, width: int = 448, layers: int = 5) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(WORDS, width), nn.Embedding(self.length, width)
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(self.length), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Mean cross-entropy of the next token, for (batch, length + 1) tokens."""
        x = self.embedding(batch[:, :-1]) * 0.02 + self.places.weight * 0.02
        x = self.layers(x, mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T * 0.02).flatten(0, 1), batch[:, 1:].flatten())

    @classmethod
    def random_batch(cls, generator: torch.Generator, batch_size: int | None = None) -> Tensor:
        return words(WORDS, (batch_size or cls.batch_size, cls.length + 1), generator)

    @staticmethod
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


class MLP(Trained):
    """10.5 M parameters: ten linear layers of width 1024."""

    batch_size, width = 64, 1024

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(10) for layer in (nn.Linear(self.width, self.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean squared error, for (batch, 1024) inputs and targets."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    @classmethod
    def random_batch(cls, generator: torch.Generator, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        inputs, targets = torch.randn(2, batch_size or cls.batch_size, cls.width, generator=generator)
        return inputs, targets


MODELS: dict[str, type[Trained]] = {"lstm": LSTMLanguageModel, "vgg": VGG, "gpt": GPT, "mlp": MLP}
