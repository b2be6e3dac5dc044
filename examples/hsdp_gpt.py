"""A small GPT in plain PyTorch: FSDP2 shards it within each replica, and replicas exchange gradients sparsely.

    torchrun --nproc-per-node 4 examples/hsdp_gpt.py                  # 2 replicas of 2 ranks
    torchrun --nproc-per-node 4 examples/hsdp_gpt.py --replicas 4
    torchrun --nproc-per-node 4 examples/hsdp_gpt.py --dense          # FSDP2's own HSDP

What `--fast` prints (losses differ with the version of Python, whose reference is the text):

    step 10: loss 4.759
    step 20: loss 3.340
    a rank keeps 1.88 MB for the exchange, and has sent 0.70 MB to other replicas; densely 18.82 MB

The text is Python's language reference, as bytes. `--checkpoint` saves weights, optimizer and what has not been sent
yet in the format of torch.distributed.checkpoint, and goes on from there, also with another number of replicas.
"""

import argparse
import os
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import lightning_sparse as ls

CONTEXT, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


class Block(nn.Module):
    """Attention and a small network, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next byte at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="between which gradients are exchanged")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--dense", action="store_true", help="FSDP2's own HSDP instead")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fast", action="store_true", help="20 steps")
    parser.add_argument("--checkpoint", type=Path, help="folder to save to, and to go on from")
    args = parser.parse_args()
    steps, every = (20, 10) if args.fast else (args.steps, 50)

    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(
        device.type, (args.replicas, ranks // args.replicas), mesh_dim_names=("replicate", "shard")
    )

    torch.manual_seed(0)
    model = GPT().to(device)
    over = mesh if args.dense else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = None if args.dense else ls.attach_hsdp(model, mesh, density=args.density)
    first = 0
    if args.checkpoint and args.checkpoint.is_dir():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=args.checkpoint / "shared")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = int(state["step"])
        if engine is not None:
            ls.load_sharded(engine, args.checkpoint / "sparse")

    text = torch.tensor(list("".join(topics.topics.values()).encode()), dtype=torch.uint8)
    for step in range(first + 1, steps + 1):
        generator = torch.Generator().manual_seed(step * ranks + rank)  # all ranks have other samples
        starts = torch.randint(len(text) - CONTEXT - 1, (8,), generator=generator)
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long().to(device)
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ if engine is None else engine.clip_grad_norm_
        clip_grad_norm_(model.parameters(), 1.0)  # by the norm of the mean over replicas
        optimizer.step()  # exchanges
        if step % every == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / ranks:.3f}", flush=True)

    if args.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.tensor(steps)}
        dcp.save(state, checkpoint_id=args.checkpoint / "shared")
        if engine is not None:
            ls.save_sharded(engine, args.checkpoint / "sparse")
    if engine is not None:
        logged = engine.summary()  # means over ranks
        if rank == 0:
            sent, dense = (logged[f"traffic/{name}total_mb"] for name in ("", "dense_"))
            print(
                f"a rank keeps {engine.memory_bytes / 1e6:.2f} MB for the exchange, and has sent {sent:.2f} MB to "
                f"other replicas; densely {dense:.2f} MB"
            )
        engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
