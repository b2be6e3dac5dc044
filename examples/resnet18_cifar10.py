"""ResNet-18 on CIFAR-10 with momentum SGD, with a gradient exchange chosen in YAML.

    python examples/resnet18_cifar10.py fit --config configs/base.yaml --fast               # 20 steps, 8 channels
    python examples/resnet18_cifar10.py fit --config configs/base.yaml --model.width=16     # for CPUs
    python examples/resnet18_cifar10.py fit --config configs/base.yaml --config configs/epochs.yaml    # 30, for GPUs
    python examples/resnet18_cifar10.py fit --config configs/base.yaml --config configs/dense.yaml \\
        --data.dir folder/with/cifar-10-batches-bin

Two processes: on GPUs, or on CPUs where there are none (OMP_NUM_THREADS=1 then). Where `--data.dir` (data/cifar10) has
no images, they are downloaded. What `--fast` prints:

    sparse_ddp: groups at Constant(density=0.01)
     group          parameters  coordinates  density now  k now  exchange     dense MB
     bucket0                19      174,848         0.01  1,748  PackedUnion     0.699
     dense.bucket0          43        1,554               1,554  dense         0.00622
    Epoch 0/-2 ━━━━━━━━━━━━━━━━━ 20/20 0:00:08 • 0:00:00 2.38it/s
        train/loss: 2.185 sparse/density: 0.010 val/accuracy: 0.110

After so few steps it guesses; docs/reports/examples.md compares longer trainings. Curves are in
`lightning_logs/version_N/metrics.csv`. Statistics of batch normalisation are those of each rank, as with plain DDP.
"""

import pytorch_lightning as pl
import torch
from cifar10 import CIFAR10
from command_line import ExampleCLI
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy


class Block(nn.Module):
    """Two convolutions, whose result is added to what came in."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet18(pl.LightningModule):
    """He et al. 2015, https://arxiv.org/abs/1512.03385, with a first layer for small images: 3x3, stride 1, no pooling.

    Args:
        width: channels of the first stage; 64 is ResNet-18 with 11.2 million parameters, 16 has 0.7 million.
        lr: the highest learning rate: it rises to it over 30 % of the steps and falls to 0 along a cosine.
        momentum: of SGD.
        weight_decay: of all parameters.
    """

    def __init__(self, width: int = 64, lr: float = 0.1, momentum: float = 0.9, weight_decay: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        stages: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width * 2**stage
            stages += [Block(before, after, stride=1 if stage == 0 else 2), Block(after, after, stride=1)]
            before = after
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(before, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        # The metric object is logged, not its value: Lightning then adds up the counts of all ranks before dividing.
        self.accuracy(self(images), labels)
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, int(self.trainer.estimated_stepping_batches), cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    ExampleCLI(
        ResNet18,
        CIFAR10,
        fast={
            "trainer.max_steps": 20,
            "trainer.val_check_interval": 10,
            "trainer.limit_val_batches": 2,
            "model.width": 8,
            "data.batch_size": 16,
        },
    )
