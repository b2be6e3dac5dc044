"""Do several ranks over NCCL exchange and train as they do over gloo on the CPU?

There are as many ranks as GPUs. On one GPU there are two, which NCCL takes for two hosts: each has a ``NCCL_HOSTID`` of
its own, and they talk through sockets on loopback. NVIDIA does not support that. Where NCCL refuses it, all is skipped,
with its reason. On a CPU, gloo takes NCCL's place.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.ops.on_cuda import on_cuda
from tests.gpu.checks import Check, Clock, Numbers, SkipError, require, synchronize
from tests.gpu.collectives import GRADIENTS, VALUES, WORDS
from tests.gpu.doors import a_sharded_model_trains_as_on_the_cpu, nodes_train_as_on_the_cpu
from tests.gpu.models import Transformer
from tests.gpu.one_training import TOPK, Training, train
from tests.gpu.training import JOBS, quietly, title
from tests.ranks import RankError, Ranks

APART = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
}
"""What ranks on one device need beside a host's name."""
WAYS = [*product(("Ring", "Tree"), ("LL", "LL128", "Simple")), ("NVLS", "Simple")]
"""Algorithms and protocols of NCCL; where one does not exist, NCCL takes another or refuses."""
SIZES = {"cuda": (1, 3, 1000, 2**18 + 5, 2**21), "cpu": (1, 3, 1000)}
STEPS = {"cuda": 40, "cpu": 6}
SOON = 30.0
"""Seconds within which a rank has to notice that another one has failed."""


class Place:
    """Where ranks run.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self.kind = device.type
        self.devices = torch.cuda.device_count() if device.type == "cuda" else 1
        self.n = max(2, self.devices)
        self.refused = ""
        """Why NCCL does not take these ranks."""

    def ranks(self, n: int, **environment: str) -> Ranks:
        """Return so many, not started yet."""
        backend = "cpu:gloo,cuda:nccl" if self.kind == "cuda" else "gloo"
        apart = APART if n > self.devices else {}
        return Ranks(n, backend, partial(_environment, apart | environment, n > self.devices))


def _environment(given: dict[str, str], apart: bool, rank: int) -> dict[str, str]:
    return given | ({"NCCL_HOSTID": f"rank{rank}"} if apart else {})


def checks(device: torch.device, clock: Clock) -> Iterator[Check]:
    place = Place(device)
    with place.ranks(place.n) as ranks:
        yield Check(f"{place.n} ranks on {place.devices} devices meet", partial(meet, place, ranks))
        yield Check("sums, copies, parts", partial(on, place, ranks, sums_are_those_of_the_cpu))
        for job in [kernels_and_torch_train_together, late_ranks_train_alike, *JOBS]:
            yield Check(title(job), partial(on, place, ranks, job))
        yield Check("steps beside DDP", partial(on, place, ranks, times_beside_ddp))
    with place.ranks(4) as four:
        yield Check("2 nodes of 2 ranks", partial(on, place, four, nodes_train_as_on_the_cpu, 2))
        yield Check("2 replicas of 2 ranks", partial(on, place, four, a_sharded_model_trains_as_on_the_cpu, 2))
    for how in ("raises", "is killed"):
        yield Check(f"a rank {how}", partial(lose_one, place, how))
    for algorithm, protocol in WAYS if place.kind == "cuda" else ():
        with place.ranks(place.n, NCCL_ALGO=algorithm, NCCL_PROTO=protocol) as ranks:
            job = partial(on, place, ranks, sums_are_those_of_the_cpu)
            yield Check(f"sums by {algorithm}, {protocol}", job)


def meet(place: Place, ranks: Ranks) -> Numbers:
    try:
        return ranks(here, place.kind, first_message)[0]
    except RankError as error:
        if place.devices > 1 or place.kind == "cpu":
            raise
        said = [line for line in str(error).splitlines() if "NCCL" in line or "nccl" in line]
        place.refused = f"NCCL does not take two ranks on one device: {' '.join(said[-2:]) or str(error)[-300:]}"
        raise SkipError(place.refused) from None


def on(place: Place, ranks: Ranks, job: Callable[..., Numbers | None], *args: Any) -> Numbers | None:
    """Let all ranks do a job, and return what the first one has found."""
    if place.refused:
        raise SkipError(place.refused)
    return ranks(here, place.kind, job, *args)[0]


def here(kind: str, job: Callable[..., Numbers | None], *args: Any) -> Numbers | None:
    """On one rank, with the name of its device."""
    device = f"cuda:{torch.cuda.current_device()}" if kind == "cuda" else kind
    return quietly(lambda device: job(device, *args), device)


# ---- Jobs


def first_message(device: str) -> Numbers:
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    require(x.tolist() == 4 * [dist.get_world_size()], f"the first sum is {x.tolist()}")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if x.is_cuda else "none"  # type: ignore[no-untyped-call]
    return {"ranks": dist.get_world_size(), "NCCL": nccl}


def sums_are_those_of_the_cpu(device: str) -> Numbers:
    """Whole numbers in all types and many lengths, also of views that begin within 16 bytes; random ones are alike."""
    n, rank, count = dist.get_world_size(), dist.get_rank(), 0
    for dtype, size, first in product(dict.fromkeys(WORDS + GRADIENTS), SIZES[torch.device(device).type], (0, 3)):
        given = [(torch.arange(size + first) * (one + 3) % 4).to(dtype) for one in range(n)]
        mine, about = given[rank].to(device, copy=True)[first:], f"{size} of {dtype} from {first} on"
        total = mine.clone() if not first else mine
        dist.all_reduce(total)
        expected = torch.stack([one[first:].long() for one in given]).sum(0).to(dtype)
        require(torch.equal(total.cpu(), expected), f"the sum of {about} is wrong")
        count += 1
        if dtype not in WORDS + VALUES:
            continue
        mine = given[rank].to(device, copy=True)[first:]
        gathered = torch.empty(n * size, dtype=dtype, device=device)
        dist.all_gather_into_tensor(gathered, mine)
        require(torch.equal(gathered.cpu(), torch.cat([one[first:] for one in given])), f"{about}: gathered wrongly")
        parts = torch.stack([given[rank][first:] + one for one in range(n)]).to(device)
        got = torch.empty_like(parts)
        dist.all_to_all_single(got, parts)
        require(torch.equal(got.cpu(), torch.stack([one[first:] + rank for one in given])), f"{about}: to wrong ranks")
        dist.broadcast(mine, n - 1)
        require(torch.equal(mine.cpu(), given[-1][first:]), f"{about}: not that of the last rank")
    for dtype in GRADIENTS:
        x = torch.randn(10_001, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        dist.all_reduce(x)
        rows = _all_of(x)
        require(all(torch.equal(row, rows[0]) for row in rows), f"ranks have different sums of {dtype}")
    return {"sums": count}


def _all_of(x: Tensor) -> Tensor:
    """(n, ...) of all ranks."""
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return torch.stack(rows)


def kernels_and_torch_train_together(device: str) -> None:
    """Kernels on the first rank and operations of torch on the others: weights stay equal, bit for bit."""
    trouble = on_cuda.trouble if dist.get_rank() == 0 else "compared with torch"
    adam = partial(torch.optim.AdamW, lr=0.01)
    with mock.patch.object(on_cuda, "trouble", trouble):
        for optimizer, layout in product((None, adam), ("default", "view")):
            train(device, {"density": 0.05}, layout, dtype=torch.float32, steps=10, optimizer=optimizer)


def late_ranks_train_alike(device: str) -> None:
    """Host and device of each rank are late at random, before forward, in backward and before the optimizer's step."""
    results, kind = [], torch.device(device).type
    for late in (True, False):
        training, chance = Training(device, {"density": 0.05}, dtype=torch.float32), random.Random(dist.get_rank())

        def pause(*_: Any, chance: random.Random = chance) -> None:
            time.sleep(0.004 * chance.random())
            if kind == "cuda":
                torch.cuda._sleep(chance.randrange(1, 4_000_000))

        if late:
            training.ddp.register_forward_pre_hook(pause)
            training.ddp.module.trunk.weight.register_post_accumulate_grad_hook(pause)
            training.optimizer.register_step_pre_hook(pause)
        results.append(training.end([training.step() for _ in range(STEPS[kind])]))
    require(torch.equal(results[0][1], results[1][1]), "late ranks end with other weights")


def times_beside_ddp(device: str) -> Numbers:
    """Medians of steps in turns, with momentum SGD and AdamW; every rank on a device of its own."""
    on_device = torch.device(device).type == "cuda"
    if on_device and torch.cuda.device_count() < dist.get_world_size():
        raise SkipError("ranks share a device")
    size: dict[str, int] = {} if on_device else {"layers": 1, "width": 32, "heads": 2, "words": 50, "length": 9}
    numbers: Numbers = {}
    for name, optimizer in {
        "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=on_device),
        "AdamW": partial(torch.optim.AdamW, lr=1e-4, fused=on_device),
    }.items():
        steps = [_stepping(device, size, optimizer, sparse) for sparse in (False, True)]
        times: list[list[float]] = [[], []]
        for _ in range(20 if on_device else 4):
            for one, taken in zip(steps, times, strict=True):
                began = time.perf_counter()
                one()
                synchronize(torch.device(device))
                taken.append(time.perf_counter() - began)
        plain, sparse = (1e3 * median(taken[3:]) for taken in times)
        numbers |= {f"{name}: DDP ms": round(plain, 2), f"{name}: ms": round(sparse, 2)}
    return numbers


def _stepping(device: str, size: dict[str, int], optimizer: Any, sparse: bool) -> Callable[[], None]:
    """A function that takes a step of a transformer."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(**size)
    ddp = DistributedDataParallel(model)
    if sparse:
        ls.attach(ddp, watch=None)
    chosen = optimizer(ddp.parameters())
    tokens = torch.randint(model.words, (8, model.length), device=device)

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = ddp(tokens)
        loss.backward()
        chosen.step()
        chosen.zero_grad()

    return step


# ---- Ranks that fail


def lose_one(place: Place, how: str) -> Numbers:
    """The last rank fails in a step; all others end with an error soon."""
    if place.refused:
        raise SkipError(place.refused)
    with place.ranks(place.n) as ranks:
        try:
            told = [str(one) for one in ranks(here, place.kind, fail_on_the_last, how)[:-1]]
        except RankError as error:  # of a rank that is killed there is no answer
            told = [line.split("noticed: ")[1] for line in str(error).splitlines() if "AssertionError: noticed" in line]
    require(len(told) == place.n - 1, f"{len(told)} of {place.n - 1} ranks have noticed: {told}")
    for one in told:
        name, seconds, *_ = one.split()
        # DDP itself has messages, too, when it cuts its buckets anew.
        noticed = name in ("LostRankError", "RuntimeError", "DistBackendError")
        require(noticed and float(seconds) < SOON, f"another rank has seen {one}")
    return {"seconds": max(float(one.split()[1]) for one in told)}


def fail_on_the_last(device: str, how: str) -> Any:
    training = Training(device, TOPK)
    training.step()
    last, began = dist.get_rank() == dist.get_world_size() - 1, time.monotonic()
    if last and how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    broken = mock.patch.object(ls.sparsifiers.TopK, "select", side_effect=ZeroDivisionError("as planned"))
    seen = "nothing"
    try:
        if last:
            with broken:
                training.step()
        for _ in range(3):
            training.step()
    except Exception as error:
        seen = f"{type(error).__name__} {time.monotonic() - began:.1f} {error}"
    if how == "is killed":
        raise AssertionError(f"noticed: {seen}")
    return seen
