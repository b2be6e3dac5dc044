"""Models of 10 to 15 million parameters that leave very different room for overlap.

- lstm: a language model of four layers. Its decoder finishes backward first, its embedding last, and each of them holds
  a third of the parameters: what the embedding has to exchange cannot overlap with anything.
- vgg: VGG16 for images of 32 x 32 with batch normalisation and a single linear layer on top. Its last six convolutions
  hold 88 % of the parameters and finish first, most of the time goes into those before them, with few parameters.
- mlp: ten equal linear layers of 1.05 M.

Inputs are random: what is measured with these models is time.
"""

from functools import partial

import torch
from torch import Tensor, nn

TOKENS = 10_000


class LSTMLanguageModel(nn.Module):
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
        return torch.randint(TOKENS, (batch_size or cls.batch_size, cls.length + 1), generator=generator)


class VGG(nn.Module):
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


class MLP(nn.Module):
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


MODELS: dict[str, type[LSTMLanguageModel] | type[VGG] | type[MLP]] = {"lstm": LSTMLanguageModel, "vgg": VGG, "mlp": MLP}
