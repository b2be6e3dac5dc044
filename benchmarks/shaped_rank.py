"""What each rank of `shaped_links.py` does: variants of an exchange take turns, and rank 0 keeps what was measured."""

import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from links import interface_bytes
from machine import about
from models14m import MODELS
from paired import TIMES, Result
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.tuning.controllers import DenseFallback

DENSITIES = (0.01, 0.001)
"""Of the default, beside DDP's hooks."""
STEADY = 136
"""Steps after which UnionTopK has forgotten that it had to name twice as many picks as it turned out to need."""
WIDE = ("dense", "fp16")
"""Variants of which a slow link allows few steps only."""
SLOW = 1000
"""Mbit/s below which that is so."""
ADVISED = ("bucket", "layer", "model")
"""Groupings in which the advisor's predictions are tried."""

Job = dict[str, Any]
"""The arguments of the command line, and part, model and rate of one launch."""


class Spec(NamedTuple):
    """How one variant exchanges gradients."""

    name: str
    sparsifier: str | None = None
    grouping: str = "bucket"
    bucket_cap_mb: float = 25
    warm_up: int = 2  # DDP rebuilds its buckets after the first iteration
    density: float | None = None  # of all parameters, small ones, too; None: the command line's
    hook: Literal["noop", "fp16", "powersgd"] | None = None  # of DDP
    rank: int = 1  # of PowerSGD
    as_it_comes: bool = False  # sparse_ddp with its own defaults
    fallback: bool = False  # of that
    node_size: int | None = None  # of that


class Variant:
    """One copy of the model with its own DDP."""

    def __init__(self, spec: Spec, job: Job) -> None:
        self.spec = spec
        torch.manual_seed(0)
        kind = MODELS[job["model"]]
        # The models are equal already; to send them takes a while.
        self.ddp = DistributedDataParallel(kind(), bucket_cap_mb=spec.bucket_cap_mb, init_sync=False)
        self.engine: ls.Engine | None = None
        self.optimizer = kind.optimizer(self.ddp.parameters())
        if spec.hook == "powersgd":
            # The first iterations are dense; DDP rebuilds its buckets after one.
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=spec.rank, start_powerSGD_iter=2)
            self.ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif spec.hook == "noop":
            self.ddp.register_comm_hook(None, send_nothing)
        elif spec.hook == "fp16":  # DDP refuses that of bfloat16 on gloo
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif spec.as_it_comes:
            self.engine = ls.attach(
                self.ddp,
                sparsifier=spec.sparsifier or "union_top_k",
                density=spec.density,
                bucket_cap_mb=25,
                fallback=spec.fallback,
                node_size=spec.node_size,
            )
        elif spec.sparsifier is not None:
            self.engine = ls.attach(
                self.ddp,
                sparsifier=spec.sparsifier,
                density=spec.density or job["density"],
                grouping=spec.grouping,
                rules=ls.Rules(dense_ndim=0, dense_numel=0),  # as the predictions that are compared assume
                watch=None,
                bucket_cap_mb=25,
            )

    def step(self, batch: Any) -> dict[str, float]:
        """One training step on this rank, which all begin together: milliseconds, bytes on the cable, loss."""
        dist.barrier()
        received, sent = interface_bytes()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        loss = self.train(batch)
        taken, taken_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        dist.barrier()  # what others have sent has arrived
        now_received, now_sent = interface_bytes()
        return {
            "step_ms": 1e3 * taken,
            "cpu_ms": 1e3 * taken_cpu,
            "received": now_received - received,
            "sent": now_sent - sent,
            "loss": loss.item(),
        }

    def train(self, batch: Any) -> Tensor:
        """One training step; its loss."""
        with self.ddp.no_sync() if self.spec.name == "compute" else nullcontext():
            loss: Tensor = self.ddp(batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()  # here: variants that wait for their turn hold no gradients
        return loss

    def stride(self, batches: list[Any], steps: int) -> float:
        """Take steps one after the other, as a training does; milliseconds of one of them, but for the first."""
        dist.barrier()
        ends = []
        for number in range(steps):
            self.train(batches[number % len(batches)])
            ends.append(time.perf_counter())
        return 1e3 * (ends[-1] - ends[0]) / (steps - 1)

    def times(self) -> dict[str, float]:
        """Of the latest step, outside the clock: asks all ranks."""
        summary = {} if self.engine is None else self.engine.summary()
        found = {name: summary[f"time/{name}"] for name in TIMES if f"time/{name}" in summary}
        return found | ({"bytes_sent": 1e6 * summary["traffic/sent_mb"]} if summary else {})

    def warm_up(self, batches: list[Any]) -> int:
        """Take steps that do not count; how many."""
        taken = 0
        while taken < self.spec.warm_up or not self.decided:
            self.step(batches[taken % len(batches)])
            taken += 1
        return taken

    @property
    def decided(self) -> bool:
        """Whether a fallback to dense, if there is one, has compared both."""
        engines = [] if self.engine is None else [self.engine]
        choosers = [one for engine in engines for one in engine.observers if isinstance(one, DenseFallback)]
        return all(chooser.seconds for chooser in choosers)

    @property
    def groups(self) -> int | None:
        return None if self.engine is None else len(self.engine.groups)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def take_turns(job: Job, specs: list[Spec], result: Result, keep: Callable[[], None], **common: Any) -> None:
    """Add a record per variant and round to the result.

    Args:
        job: settings.
        specs: variants.
        result: gets `groups` and `records`.
        keep: called after every round.
        common: entries that all records get.
    """
    batches = batches_of(job)
    for round_ in range(job["rounds"]):
        turns = [spec for spec in specs if spec.name != "dense" or is_dense_round(round_, job)]
        for spec in turns[:: 1 if round_ % 2 == 0 else -1]:
            variant = Variant(spec, job)
            for step in range(spec.warm_up):
                variant.step(batches[step % len(batches)])
            for step in range(2 if spec.name == "dense" else job["steps"]):
                note(variant, batches[step % len(batches)], result, round=round_, **common)
            result["groups"][spec.name] = variant.groups
            variant.close()
            del variant
            gc.collect()  # DDP refers to itself
        keep()


def batches_of(job: Job) -> list[Any]:
    """A few of this rank, used again and again."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return [MODELS[job["model"]].random_batch(generator, job["batch_size"]) for _ in range(4)]


def note(variant: Variant, batch: Any, result: Result, **common: Any) -> None:
    """Take a step and add a record: of the slowest rank's time, and means over ranks."""
    taken = variant.step(batch)
    slowest = torch.tensor(taken["step_ms"])
    means = torch.tensor([taken[name] for name in taken], dtype=torch.float64)
    times = variant.times()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(means)
    shared = dict(zip(taken, (means / dist.get_world_size()).tolist(), strict=True))
    result["records"].append({**common, "variant": variant.spec.name, **shared, "step_ms": slowest.item(), **times})


def is_dense_round(round_: int, job: Job) -> bool:
    """At least twice."""
    every = min(job["dense_every"], job["rounds"] - 1)
    return round_ % every == 0


PLAIN = [Spec("compute", warm_up=1), Spec("dense", warm_up=1)]


def small_buckets(result: Result) -> float:
    """MiB of DDP's buckets, as the strategy sets them: up to 32 of them."""
    return max(1.0, result["parameters"] * 4 / (1 << 20) / 32)


def measure_advice(job: Job, result: Result, keep: Callable[[], None]) -> None:
    """Ask the advisor as a user would, then see whether it was right."""
    import pytorch_lightning as pl

    kind = MODELS[job["model"]]

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = kind()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch)

        def configure_optimizers(self) -> Any:
            return kind.optimizer(self.parameters())

    batches = batches_of(job)
    module = Module()
    begin = time.perf_counter()
    advice = ls.advise(
        module,
        train_dataloaders=torch.utils.data.DataLoader(batches, batch_size=None),
        trainer={"devices": job["ranks"], "accelerator": "cpu"},
        sparsifiers=job["sparsifiers"],
        densities=[job["density"]],
    )
    predicted = [p for p in advice.predictions if p.method in job["sparsifiers"] and p.grouping in ADVISED]
    result["advice"] = {
        "seconds": time.perf_counter() - begin,
        "verdict": advice.verdict(),
        "measured": advice.assumptions()[:2],
        "costs": {f"{method.name} {method.density:g}": str(method.cost) for method in advice.measured.methods},
        "predicted": {
            "compute": 1e3 * advice.measured.profile.compute_seconds,
            "dense": 1e3 * advice.step_seconds("dense"),
            **{f"{p.method} {p.grouping}": 1e3 * p.step_seconds for p in predicted},
        },
    }
    small = small_buckets(result)
    specs = [Spec(f"{p.method} {p.grouping}", p.method, p.grouping, small) for p in predicted]
    take_turns(job, [*PLAIN, *specs], result, keep)


def hook_specs(small: float, mbit: int) -> list[Spec]:
    """Variants of the part hooks. The fallback to dense compares both for 40 steps, which a slow link makes long."""
    names = (f"sparse {density:g}" for density in DENSITIES)
    return [
        Spec("compute", warm_up=4),
        Spec("noop", hook="noop", warm_up=4),
        Spec("dense", warm_up=4),
        Spec("fp16", hook="fp16", warm_up=4),
        # One bucket: the order in which those of several finish, and go on, differs between ranks, and gloo aborts.
        *(Spec(f"powersgd {n}", hook="powersgd", rank=n, bucket_cap_mb=1e3, warm_up=4) for n in (1, 2, 4)),
        *(
            Spec(name, bucket_cap_mb=small, density=density, as_it_comes=True, warm_up=4)
            for name, density in zip(names, DENSITIES, strict=True)
        ),
        *([Spec("fallback 0.01", density=0.01, as_it_comes=True, fallback=True)] if mbit >= SLOW else []),
    ]


def measure_hooks(job: Job, result: Result, keep: Callable[[], None]) -> None:
    """`sparse_ddp` as it comes beside plain DDP and its own hooks; every variant goes on training in its turns."""
    specs = hook_specs(small_buckets(result), job["mbit"])
    batches = batches_of(job)
    variants = [Variant(spec, job) for spec in specs if job["variants"] is None or spec.name in job["variants"]]
    taken = [variant.warm_up(batches) for variant in variants]
    for round_ in range(job["rounds"]):
        for place in range(len(variants))[:: 1 if round_ % 2 == 0 else -1]:
            few = job["mbit"] < SLOW and variants[place].spec.name in WIDE
            for _ in range(2 if few else job["steps"]):
                batch = batches[taken[place] % len(batches)]
                taken[place] += 1
                note(variants[place], batch, result, round=round_, number=taken[place])
        for variant in variants:
            result["groups"][variant.spec.name] = variant.groups
            if variant.engine is not None:
                result["direct"][variant.spec.name] = variant.engine.stepper.direct
        keep()
    for place, variant in enumerate(variants):
        if variant.spec.as_it_comes and not variant.spec.fallback:
            result["steady"][variant.spec.name] = steady_bytes(variant, batches, taken[place], job["steps"])
            keep()
    for variant in variants:
        variant.close()


def measure_nodes(job: Job, result: Result, keep: Callable[[], None]) -> None:
    """`sparse_ddp` as it comes between all ranks, and with nodes; and Top-k, of which every rank's picks travel."""
    small = small_buckets(result)
    specs = [
        Spec(
            f"{name} {density:g}{' nodes' if size else ''}",
            sparsifier,
            bucket_cap_mb=small,
            density=density,
            as_it_comes=True,
            warm_up=4,
            node_size=size,
        )
        for name, sparsifier, density in [("sparse", None, 0.01), ("sparse", None, 0.001), ("top_k", "top_k", 0.01)]
        for size in (None, job["node_size"])
    ]
    power = Spec("powersgd 1", hook="powersgd", bucket_cap_mb=1e3, warm_up=4)  # one bucket, see hook_specs
    take_turns(job, [*PLAIN, power, *specs], result, keep)


def measure_regions(job: Job, result: Result, keep: Callable[[], None]) -> None:
    """The sparse exchange, without a barrier between steps: over long distances it takes as long as a step."""
    batches = batches_of(job)
    for round_ in range(job["rounds"]):
        for spec in regions_specs(result)[:: 1 if round_ % 2 == 0 else -1]:
            variant = Variant(spec, job)
            variant.stride(batches, max(2, spec.warm_up))
            slowest = torch.tensor(variant.stride(batches, job["steps"] + 1))
            times = variant.times()
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            record = {"round": round_, "variant": spec.name, "step_ms": slowest.item(), **times}
            result["records"].append(record)
            variant.close()
            del variant
            gc.collect()
        keep()


def regions_specs(result: Result) -> list[Spec]:
    """The sparse exchange, beside no exchange, the dense one and PowerSGD."""
    small = small_buckets(result)
    specs = [
        Spec(f"sparse {density:g}", bucket_cap_mb=small, density=density, as_it_comes=True, warm_up=4)
        for density in DENSITIES
    ]
    power = Spec("powersgd 1", hook="powersgd", bucket_cap_mb=1e3, warm_up=4)  # one bucket, see hook_specs
    return [*PLAIN, power, *specs]


def steady_bytes(variant: Variant, batches: list[Any], taken: int, steps: int) -> float:
    """Bytes that a rank receives in a step once the need for spare picks is known: mean over ranks and last steps."""
    received = []
    for number in range(taken, max(taken, STEADY) + steps):
        received.append(variant.step(batches[number % len(batches)])["received"])
    mean = torch.tensor(sum(received[-steps:]) / steps, dtype=torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


# Without annotations: DDP compares them by identity.
def send_nothing(state, bucket):  # type: ignore[no-untyped-def]
    """A hook that gives every bucket back as it came."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def rank_main(job: Job) -> None:
    """Run a part; rank 0 keeps what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numel = sum(p.numel() for p in MODELS[job["model"]]().parameters())
    result: Result = {
        "job": job,
        "parameters": numel,
        "groups": {},
        "direct": {},
        "records": [],
        "finished": False,
        "steady": {},
    }
    result["machine"] = about()

    def keep() -> None:
        if dist.get_rank() == 0:
            result["memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            path = path_of(job)
            path.with_suffix(".new").write_text(json.dumps(result))
            path.with_suffix(".new").replace(path)

    MEASURE[job["part"]](job, result, keep)
    result["finished"] = True
    keep()
    dist.barrier()
    dist.destroy_process_group()


def path_of(job: Job) -> Path:
    rtt = f"-rtt{job['rtt']:g}" if job.get("rtt") else ""
    nodes = f"-in{job['node_size']}" if job.get("node_size", 1) > 1 else ""
    return Path(job["out"]) / f"{job['part']}-{job['model']}-{job['mbit']}-{job['ranks']}{rtt}{nodes}.json"


MEASURE: dict[str, Callable[[Job, Result, Callable[[], None]], None]] = {
    "hooks": measure_hooks,
    "regions": measure_regions,
    "nodes": measure_nodes,
    "advice": measure_advice,
}

if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]))
