"""A small vision transformer of `transformers`, trained on digits by its own Trainer, and one line for the exchange.

    torchrun --nproc-per-node 2 examples/huggingface_digits.py --fast
    torchrun --nproc-per-node 2 examples/huggingface_digits.py --density 0.001
    torchrun --nproc-per-node 2 examples/huggingface_digits.py --dense
    torchrun --nproc-per-node 2 examples/huggingface_digits.py --resume       # from the latest checkpoint

Needs `pip install transformers accelerate`. Everything else is what a Trainer is given without this package: AdamW,
clipping at its default of 1.0, checkpoints every 100 steps.
"""

import argparse

import torch
from torch import Tensor
from torch.utils.data import Dataset
from train_digits import Digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from lightning_sparse.huggingface import prepare_trainer


class Pictures(Dataset[dict[str, Tensor]]):
    """Digits with the names that models of transformers expect."""

    def __init__(self, digits: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, label = self.digits[index]
        return {"pixel_values": image, "labels": label}


def accuracy(prediction) -> dict[str, float]:  # type: ignore[no-untyped-def]
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--dense", action="store_true", help="DDP as the Trainer does it")
    parser.add_argument("--fast", action="store_true", help="60 steps")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--output", default="huggingface_digits", help="folder of checkpoints")
    args = parser.parse_args()
    torch.manual_seed(0)

    digits = Digits()
    digits.setup("fit")
    shape = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, num_labels=10, hidden_dropout_prob=0.0,
    )  # fmt: skip
    steps = 60 if args.fast else 600
    trainer = Trainer(
        model=ViTForImageClassification(shape),
        args=TrainingArguments(
            args.output,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            logging_steps=steps // 6,
            eval_strategy="steps",
            eval_steps=steps // 2,
            save_steps=steps // 2,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0,
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Pictures(digits.train_set),
        eval_dataset=Pictures(digits.val_set),
        compute_metrics=accuracy,
    )
    if not args.dense:
        prepare_trainer(trainer, density=args.density)
    trainer.train(resume_from_checkpoint=args.resume or None)


if __name__ == "__main__":
    main()
