"""Fine-tune a GPT with LoRA: only small adapters are trained, so that only they are exchanged.

    python examples/lora_gpt.py fit --config configs/base.yaml --fast          # an untrained GPT, to try it

    # A GPT of bytes, and its adaptation to another kind of text, with dense messages:
    python examples/gpt_wikitext2.py fit --config configs/base.yaml --config configs/dense.yaml \\
        --data.words=null --data.length=128 --trainer.enable_checkpointing=true
    python examples/lora_gpt.py fit --config configs/base.yaml --config configs/everything.yaml \\
        --model.base lightning_logs/version_0/checkpoints/*.ckpt

**Stay dense here**, unless the link is very slow: adapters are small. All of these are 0.2 MB a step, which few
networks notice. What is sparsified is in the table, adapters and nothing else:

     group    parameters  coordinates  density now  k now  exchange     dense MB
     bucket0          24       49,152         0.01    491  PackedUnion     0.197

Where adapters of a large model are large, too, `lightning-sparse advise` says whether it pays.
"""

from pathlib import Path
from pydoc_data.topics import topics

import pytorch_lightning as pl
import torch
from command_line import ExampleCLI
from gpt_wikitext2 import GPT
from torch import Tensor, nn
from torch.utils.data import DataLoader
from wikitext2 import Windows


class LoRA(nn.Module):
    """A linear layer that stays as it is, plus a trained product of two thin matrices, which is zero at first.

    Hu et al. 2021, https://arxiv.org/abs/2106.09685.

    Args:
        linear: the layer.
        rank: columns of the thin matrices.
        alpha: scale of their product, times `rank`.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.down.T) @ self.up.T


class FineTunedGPT(GPT):
    """A GPT of bytes whose linear layers have adapters; everything else is frozen.

    Frozen parameters have no gradients: DDP leaves them out of its buckets, and so are they left out here. The adapters
    are matrices with more than 256 elements each, so that all of them are sparsified (`lightning_sparse.Rules`).

    Args:
        base: checkpoint of `gpt_wikitext2.py`, trained with `--data.words=null`; None: an untrained GPT, for trying.
        rank: of the adapters.
        alpha: their scale, times `rank`.
        lr: the highest learning rate.
    """

    def __init__(self, base: Path | None = None, rank: int = 8, alpha: float = 16.0, lr: float = 2e-3) -> None:
        settings = {"vocabulary": 256, "length": 128}
        if base is not None:
            if not base.exists():
                raise SystemExit(f"There is no checkpoint {base}. This file says at its top how to train one.")
            checkpoint = torch.load(base, map_location="cpu", weights_only=True)
            settings |= {name: checkpoint["hyper_parameters"][name] for name in ("width", "heads", "layers", *settings)}
        super().__init__(**settings, lr=lr, weight_decay=0.0)
        if base is not None:
            self.load_state_dict(checkpoint["state_dict"])
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.out = LoRA(block.qkv, rank, alpha), LoRA(block.out, rank, alpha)
            block.mlp[0], block.mlp[2] = LoRA(block.mlp[0], rank, alpha), LoRA(block.mlp[2], rank, alpha)


class PythonReference(pl.LightningDataModule):
    """The language reference that comes with Python, as bytes; every tenth topic is for validation.

    Args:
        length: of the pieces that the text is cut into, in bytes.
        batch_size: pieces per process and step.
    """

    def __init__(self, length: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def setup(self, stage: str) -> None:
        ordered = [text.encode() for _, text in sorted(topics.items())]
        val, train = ordered[::10], [text for number, text in enumerate(ordered) if number % 10]
        self.train_set, self.val_set = (
            Windows(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8).long(), self.length)
            for part in (train, val)
        )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, 2 * self.batch_size)


if __name__ == "__main__":
    ExampleCLI(
        FineTunedGPT,
        PythonReference,
        fast={"trainer.max_steps": 20, "trainer.val_check_interval": 10, "trainer.limit_val_batches": 2},
        trainer={"gradient_clip_val": 1.0},
    )
