"""Train a small convolutional network on scikit-learn's digits, with a gradient exchange chosen in YAML.

    python examples/train_digits.py fit --config configs/base.yaml --config configs/dense.yaml
    python examples/train_digits.py fit --config configs/base.yaml --config configs/exdyna.yaml
    python examples/train_digits.py fit --config configs/base.yaml --trainer.strategy.sparsifier=TopK
    python examples/train_digits.py fit --config configs/base.yaml --trainer.strategy.density=0.05

Nothing below knows about sparsification: the model and the data are what plain DDP would be given, and the strategy
in the configuration file decides what travels between the processes.
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class DigitsClassifier(pl.LightningModule):
    """Three convolutions and a linear layer for 8x8 grey images, trained by SGD with momentum.

    There is no batch normalisation: its running statistics would differ between the ranks and blur a comparison
    that is about gradients only.

    Args:
        width: channels of the first convolution, the others have twice as many; 32 gives 58 314 parameters.
        lr: learning rate.
        momentum: momentum of SGD.
    """

    def __init__(self, width: int = 32, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.momentum = momentum
        self.network = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        # The metric object is logged, not its value: Lightning then adds up the counts of all ranks before dividing,
        # and no average of per-rank or per-batch averages is taken.
        self.accuracy(self(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class Digits(pl.LightningDataModule):
    """The 1797 digits that ship with scikit-learn, so that nothing is downloaded.

    Args:
        batch_size: images per process and step; the global batch is this times the number of processes.
        split_seed: decides which 360 images are for validation. It is apart from the seed of the training, so that
            runs with different seeds are judged on the same images.
        num_workers: loader processes per rank. The whole data set is a tensor of half a megabyte: 0 is fastest.
    """

    def __init__(self, batch_size: int = 32, split_seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.split_seed = split_seed
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # grey levels are 0..16
        labels = torch.tensor(digits.target)
        # 360 divides by 2, 3, 4, 5 and 6 ranks: the distributed sampler then has no image to repeat, and the validation
        # accuracy is exact.
        train, val = train_test_split(
            torch.arange(len(labels)).numpy(), test_size=360, random_state=self.split_seed, stratify=digits.target
        )
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=180, num_workers=self.num_workers)


if __name__ == "__main__":
    from command_line import ExampleCLI  # here: whoever imports the model may have other folders on the path

    ExampleCLI(DigitsClassifier, Digits, fast={"trainer.max_steps": 20, "trainer.val_check_interval": 10})
