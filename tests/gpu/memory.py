"""How much memory does the exchange take, beside plain DDP's, on one of 8 ranks that bring the same?

Biases, which stay dense, lie between weights in DDP's buckets, as in ordinary models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import lightning_sparse as ls
from lightning_sparse.methods.grouping import make_plan
from tests.gpu.checks import Check, Clock, Numbers, synchronize
from tests.gpu.processes import one_rank
from tests.mirror import mirrored_ranks

STEPS, RANKS = 4, 8


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    # 151 million parameters in square layers; one step of plain DDP at this size takes 3 GB.
    width, depth = (4096, 9) if device.type == "cuda" else (32, 3)
    with one_rank(device):
        plain: Numbers = {}
        model = partial(build, device, width, depth)
        yield Check("plain DDP", partial(keep, plain, model))
        for grouping in ("bucket", "layer", "model"):
            yield Check(f"grouping {grouping}", partial(beside, plain, model, grouping))
        yield Check("regroup, model to layer", partial(beside, plain, model, "model", then="layer"))
        plain_adam: Numbers = {}
        yield Check("plain DDP, AdamW", partial(keep, plain_adam, model, adam=True))
        yield Check("AdamW", partial(beside, plain_adam, model, "bucket", adam=True))


def build(device: torch.device, width: int, depth: int) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def measure(model: Callable[[], nn.Sequential], grouping: str | None, then: str | None, adam: bool) -> Numbers:
    """Bytes per parameter after some steps, and at the peak of the last one, before which groups may change."""
    module = model()
    device, width = module[0].weight.device, module[0].in_features
    ddp = DistributedDataParallel(module)
    with mirrored_ranks(RANKS):
        engine = ls.attach(ddp, grouping=grouping, single_device="sparse") if grouping is not None else None
    kind = torch.optim.AdamW if adam else torch.optim.SGD  # which keeps nothing
    optimizer = kind(ddp.parameters(), lr=1e-3, fused=device.type == "cuda")
    numel = sum(p.numel() for p in ddp.parameters())
    batch = torch.randn(8, width, device=device)
    for step in range(STEPS):
        if step == STEPS - 1:
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            if then is not None and engine is not None:
                sizes = [p for group in engine.groups for p in group.parameters][::-1]
                engine.regroup(make_plan(sizes, then))
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
    synchronize(device)
    numbers: Numbers = {"parameters": numel}
    if device.type == "cuda":
        statistics = torch.cuda.memory_stats(device)
        for kind in ("allocated", "reserved"):
            numbers[kind] = statistics[f"{kind}_bytes.all.current"] / numel
            numbers[f"peak {kind}"] = statistics[f"{kind}_bytes.all.peak"] / numel
    if engine is not None:
        kept = [x for x in tree_leaves(engine.state_dict()["parameters"]) if isinstance(x, torch.Tensor)]
        numbers["in a checkpoint"] = sum(x.numel() * x.element_size() for x in kept) / numel
        engine.close()
    return numbers


def keep(plain: Numbers, model: Callable[[], nn.Sequential], adam: bool = False) -> Numbers:
    """Of DDP without a hook; what the others are compared with."""
    plain.update(measure(model, None, None, adam))
    return plain


def beside(
    plain: Numbers, model: Callable[[], nn.Sequential], grouping: str, then: str | None = None, adam: bool = False
) -> Numbers:
    """Bytes per parameter that a sparse run takes more than a plain one."""
    sparse = measure(model, grouping, then, adam)
    more = {name: round(value - plain.get(name, 0.0), 2) for name, value in sparse.items() if name != "parameters"}
    return {"bytes per parameter": more.get("allocated", more["in a checkpoint"]), **more}
