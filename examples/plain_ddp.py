"""The digits in plain PyTorch: DistributedDataParallel, and one line for the sparse exchange.

    torchrun --nproc-per-node 2 examples/plain_ddp.py
    torchrun --nproc-per-node 2 examples/plain_ddp.py --sparsifier exdyna --density 0.001
    torchrun --nproc-per-node 2 examples/plain_ddp.py --dense
    bash examples/two_nodes.sh --fast          # as two nodes, each with an agent of its own

What `--fast` prints:

    step 10: loss 2.300, density 0.0100, accuracy 10.0%
    step 20: loss 2.281, density 0.0100, accuracy 33.3%

`--checkpoint` keeps what each rank has not sent yet beside weights and optimizer, and goes on from there.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from train_digits import Digits, DigitsClassifier

import lightning_sparse as ls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsifier", default="union_top_k", help="any of ls.sparsifiers.SPARSIFIERS")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--dense", action="store_true", help="plain DDP instead")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--fast", action="store_true", help="20 steps")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to go on from")
    args = parser.parse_args()
    steps, every = (20, 10) if args.fast else (args.steps, 100)

    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    digits = Digits()
    digits.setup("fit")
    sampler = DistributedSampler(digits.train_set, seed=0)
    train = DataLoader(digits.train_set, 32, sampler=sampler, drop_last=True)
    images, labels = (each[rank::ranks].to(device) for each in digits.val_set[:])

    model = DistributedDataParallel(DigitsClassifier().network.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = None if args.dense else ls.attach(model, sparsifier=args.sparsifier, density=args.density)

    step = 0
    if args.checkpoint and (args.checkpoint / "shared.pt").exists():
        shared = torch.load(args.checkpoint / "shared.pt", map_location=device)
        model.module.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        step = shared["step"]
        if engine is not None:
            engine.load_state_dict(torch.load(args.checkpoint / f"sparse_{rank}.pt"))

    def accuracy() -> float:
        """Over the validation images of all ranks."""
        with torch.no_grad():
            right = (model.module(images).argmax(1) == labels).sum()
        counts = torch.stack([right, torch.tensor(len(labels), device=device)])
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    while step < steps:
        sampler.set_epoch(step)
        for x, y in train:
            loss = functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()  # exchanges
            optimizer.step()
            step += 1
            if step % every == 0:
                found = accuracy()
                density = 1.0 if engine is None else engine.summary()["density"]  # all ranks ask, together
                if rank == 0:
                    print(
                        f"step {step}: loss {loss.item():.3f}, density {density:.4f}, accuracy {found:.1%}", flush=True
                    )
            if step == steps:
                break

    if args.checkpoint:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
        if engine is not None:
            torch.save(engine.state_dict(), args.checkpoint / f"sparse_{rank}.pt")  # every rank its own
        if rank == 0:
            shared = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(shared, args.checkpoint / "shared.pt")
    if engine is not None:
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
