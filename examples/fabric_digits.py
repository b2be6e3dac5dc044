"""The digits with Fabric: a training loop of your own, with the sparse exchange in `Fabric(strategy=...)`.

python examples/fabric_digits.py
python examples/fabric_digits.py --sparsifier exdyna --density 0.001
python examples/fabric_digits.py --dense
"""

import argparse

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import CSVLogger
from torch.nn import functional
from train_digits import Digits, DigitsClassifier

import lightning_sparse as ls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsifier", default="union_top_k", help="any of ls.sparsifiers.SPARSIFIERS")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--dense", action="store_true", help="plain DDP instead")
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fast", action="store_true", help="20 steps")
    args = parser.parse_args()
    steps, every = (20, 10) if args.fast else (args.steps, 100)

    strategy = "ddp" if args.dense else ls.FabricSparseDDPStrategy(sparsifier=args.sparsifier, density=args.density)
    logger = CSVLogger(root_dir=".", name="lightning_logs")
    fabric = Fabric(accelerator=args.accelerator, devices=2, strategy=strategy, loggers=logger)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)

    digits = Digits()
    digits.setup("fit")
    train, val = fabric.setup_dataloaders(digits.train_dataloader(), digits.val_dataloader())
    network = DigitsClassifier().network
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9))

    def accuracy() -> float:
        """Over the validation images of all ranks."""
        model.eval()
        with torch.no_grad():
            right = torch.stack([(model(images).argmax(1) == labels).float().mean() for images, labels in val])
        model.train()
        return float(fabric.all_reduce(right.mean(), reduce_op="mean"))

    step = 0
    while step < steps:
        for images, labels in train:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            fabric.backward(loss)  # exchanges
            optimizer.step()
            step += 1
            if step % 10 == 0:
                logged = {"train/loss": loss.item()}
                if not args.dense:  # of all ranks together, which is why all of them ask
                    logged |= {f"sparse/{name}": value for name, value in fabric.strategy.engine.summary().items()}
                fabric.log_dict(logged, step)
            if step % every == 0:
                found = accuracy()
                fabric.log("val/accuracy", found, step)
                fabric.print(f"step {step}: loss {loss.item():.3f}, validation accuracy {found:.1%}")
            if step == steps:
                break
    if not args.dense:
        norm = ls.flush(fabric)  # one dense step with what was not sent; leave it out, or keep it in a checkpoint
        fabric.print(f"after a last step with what was not sent (norm {norm:.3f}): {accuracy():.1%}")
    logger.finalize("success")


if __name__ == "__main__":
    main()
