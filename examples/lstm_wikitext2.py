"""An LSTM on WikiText-2 with momentum SGD, with a gradient exchange chosen in YAML.

    python examples/lstm_wikitext2.py fit --config configs/base.yaml --fast                 # 20 steps, to try it
    python examples/lstm_wikitext2.py fit --config configs/base.yaml                        # UnionTopK, density 0.01
    python examples/lstm_wikitext2.py fit --config configs/base.yaml --config configs/dense.yaml
    python examples/lstm_wikitext2.py fit --config configs/base.yaml --config configs/top_k.yaml \\
        --trainer.strategy.density=0.001 --data.dir folder/with/wikitext-2

Two processes: on GPUs, or on CPUs where there are none (OMP_NUM_THREADS=1 then). What it prints begins like this:

    sparse_ddp: groups at Constant(density=0.01)
     group          parameters  coordinates  density now  k now  exchange     dense MB
     bucket0                 3      655,360         0.01  6,553  PackedUnion      2.62
     dense.bucket0           3        5,120               5,120  dense          0.0205

`--fast` ends near a perplexity of 270, dense training of 300 steps near 113 (docs/reports/examples.md compares). Curves
are in `lightning_logs/version_N/metrics.csv`. Where `--data.dir` (data/wikitext-2) has no text, it is downloaded.
"""

import pytorch_lightning as pl
import torch
from command_line import ExampleCLI
from torch import Tensor, nn
from torchmetrics.text import Perplexity
from wikitext2 import WikiText2


class LSTM(pl.LightningModule):
    """One recurrent layer between embeddings and a softmax, which share their weights: 0.66 million parameters.

    The state starts at zero in each piece of text and is not carried over.

    Args:
        width: of embeddings and state.
        vocabulary: number of different words; the example reads it from the data.
        lr: learning rate, constant.
        momentum: of SGD.
    """

    def __init__(self, width: int = 128, vocabulary: int = 4096, lr: float = 2.0, momentum: float = 0.9) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.momentum = lr, momentum
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=0.1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.perplexity = Perplexity()

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.words(x))
        return hidden @ self.words.weight.T + self.bias

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        # The metric object is logged, not its value: Lightning then adds up the words of all ranks before dividing.
        self.perplexity(self(x), y)
        self.log("val/perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


if __name__ == "__main__":
    ExampleCLI(
        LSTM,
        WikiText2,
        fast={"trainer.max_steps": 20, "trainer.val_check_interval": 10, "trainer.limit_val_batches": 5},
        linked={"data.vocabulary": "model.vocabulary"},
        trainer={"gradient_clip_val": 1.0, "limit_val_batches": 50},
    )
