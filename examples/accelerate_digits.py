"""The digits in a loop of your own with Accelerate, and one line for the exchange.

    accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py --fast      # or torchrun --nproc-per-node 2
    accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py --density 0.001
    accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py --dense

Needs `pip install accelerate`. Accumulation over two batches, clipping and checkpoints are Accelerate's own.
`--checkpoint FOLDER` saves a state at the end, residuals of all ranks included, and goes on from one that is there.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader
from train_digits import Digits, DigitsClassifier

from lightning_sparse.accelerate import attach

LIMIT = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--dense", action="store_true", help="DDP as Accelerate does it")
    parser.add_argument("--fast", action="store_true", help="40 steps")
    parser.add_argument("--checkpoint", help="folder to save to, and to go on from")
    args = parser.parse_args()
    steps = 40 if args.fast else 400
    torch.manual_seed(0)

    digits = Digits()
    digits.setup("fit")
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    network = DigitsClassifier().network
    model, optimizer, train, valid = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=2e-3),
        DataLoader(digits.train_set, 16, shuffle=True, drop_last=True),
        DataLoader(digits.val_set, 64),
    )
    if not args.dense:
        attach(accelerator, model, optimizer, density=args.density)
    if args.checkpoint and os.path.isdir(args.checkpoint):
        accelerator.load_state(args.checkpoint)

    step = 0
    while step < steps:
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                optimizer.step()
                optimizer.zero_grad()
            step += accelerator.sync_gradients
            if step == steps:
                break

    with torch.no_grad():
        pairs = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in valid]
    right = sum(int((found == wanted).sum()) for found, wanted in pairs)
    accelerator.print(f"step {step}: accuracy {right / sum(len(wanted) for _, wanted in pairs):.1%}")
    if args.checkpoint:
        accelerator.save_state(args.checkpoint)
    accelerator.end_training()


if __name__ == "__main__":
    main()
