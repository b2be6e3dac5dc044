"""A small GPT on WikiText-2 with AdamW, with a gradient exchange chosen in YAML.

    python examples/gpt_wikitext2.py fit --config configs/base.yaml --fast                  # 20 steps, to try it
    python examples/gpt_wikitext2.py fit --config configs/base.yaml                         # UnionTopK, density 0.01
    python examples/gpt_wikitext2.py fit --config configs/base.yaml --config configs/dense.yaml
    python examples/gpt_wikitext2.py fit --config configs/base.yaml --config configs/exdyna.yaml \\
        --trainer.strategy.density=0.001 --config configs/wandb.yaml --data.dir folder/with/wikitext-2

Two processes: on GPUs, or on CPUs where there are none (OMP_NUM_THREADS=1 then). The configurations `dgc` and
`adam_correction` are for SGD with momentum, and do not fit. AdamW needs no change (docs/guide/optimizers.md);
it is said once:

    Adam's steps for parameters that are sparsified are taken with the second moments of all ranks' own gradients ...
    sparse_ddp: groups at Constant(density=0.01)
     group          parameters  coordinates  density now  k now  exchange     dense MB
     bucket0                 5      262,144         0.01  2,621  PackedUnion      1.05
     bucket1                 9      860,160         0.01  8,601  PackedUnion      3.44
     dense.bucket0          26        5,248               5,248  dense           0.021
    Epoch 0/-2 ━━━━━━━━━━━━━━━━━ 20/20 0:00:16 • 0:00:00 1.19it/s
        train/loss: 6.724 sparse/density: 0.010 val/perplexity: 879.568

`--fast` ends near a perplexity of 880, dense training of 300 steps near 150 (docs/reports/examples.md compares). Curves
are in `lightning_logs/version_N/metrics.csv`. Where `--data.dir` (data/wikitext-2) has no text, it is downloaded.
"""

import math

import pytorch_lightning as pl
import torch
from command_line import ExampleCLI
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.text import Perplexity
from wikitext2 import WikiText2


class Block(nn.Module):
    """A layer of a transformer: attention to what came before, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(pl.LightningModule):
    """A transformer that predicts the next token: 1.1 million parameters as it comes, half of them embeddings.

    Args:
        width: of the layers.
        heads: of the attention.
        layers: how many.
        vocabulary: number of different tokens; the example reads it from the data.
        length: the most tokens that it can look back on; read from the data, too.
        lr: the highest learning rate: it is reached after a tenth of the steps, and falls to a tenth along a cosine.
        weight_decay: of matrices; biases and norms have none.
    """

    def __init__(
        self,
        width: int = 128,
        heads: int = 4,
        layers: int = 3,
        vocabulary: int = 4096,
        length: int = 64,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay = lr, weight_decay
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.perplexity = Perplexity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(x) + self.places.weight[: x.shape[1]]))
        return hidden @ self.words.weight.T

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        # The metric object is logged, not its value: Lightning then adds up the words of all ranks before dividing.
        self.perplexity(self(x), y)
        self.log("val/perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        steps = int(self.trainer.estimated_stepping_batches)
        warm = max(1, steps // 10)

        def share(step: int) -> float:
            cosine = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / steps)))
            return min(1.0, (step + 1) / warm) * cosine

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    ExampleCLI(
        GPT,
        WikiText2,
        fast={"trainer.max_steps": 20, "trainer.val_check_interval": 10, "trainer.limit_val_batches": 5},
        linked={"data.vocabulary": "model.vocabulary", "data.length": "model.length"},
        trainer={"gradient_clip_val": 1.0, "limit_val_batches": 50},
    )
