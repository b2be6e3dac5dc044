"""``python -m tests.recorder.record``: make recordings in this tree. It is run in the tree of each commit.

Compositions come as lines of JSON; of each, a file with everything it did is left in a folder.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.recorder import inside

SHAPES = ((24, 20), (20, 20), (30, 16), (9, 3))
"""Of the weights of layers; the last one is so small that it stays dense. Each layer has a bias beside it."""
LR, PULL = 0.05, 0.3
EXCHANGES = "where gradients are exchanged"
"""What the first entry of a recording says."""


class Entry(NamedTuple):
    """One thing that a rank did, or has, in a step."""

    step: int
    rank: int
    what: str
    value: Any
    """A numpy array, where 16-bit floats are words; a number, or a text."""
    dtype: str


Recording = list[Entry]


class Layers(nn.Module):
    """Its gradients are what it is given, and a little of its weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for number, shape in enumerate(SHAPES):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.linspace(-1, 1, shape[0] * shape[1]).view(shape).to(dtype))
            layer.bias = nn.Parameter(torch.linspace(0, 1, shape[0]).to(dtype))
            self.add_module(str(number), layer)

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        parameters = dict(self.named_parameters())
        parts = [(parameters[name] * given).sum() for name, given in gradients.items()]
        return torch.stack([part.float() for part in parts]).sum()


class Plan(NamedTuple):
    """In which steps something happens."""

    steps: int

    def at(self, share: float) -> int:
        return int(share * self.steps)

    @property
    def events(self) -> dict[int, str]:
        """Where a step that is skipped stands late, all before it is as if there were none."""
        names = {0.2: "unused on one rank", 0.3: "a hundred times larger", 0.5: "unused", 0.6: "flush", 0.8: "skipped"}
        return {self.at(share): name for share, name in names.items()}


def gradients_of(model: nn.Module, step: int, rank: int, n: int, event: str, layout: str) -> dict[str, Tensor]:
    """What a rank's backward gives; closed loops, in which what is different once stays so."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    given = {}
    for number, (name, p) in enumerate(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64) * (1 + number)
        noise = noise * (100 if event == "a hundred times larger" else 1)
        given[name] = (noise + PULL * p.detach().double()).to(p.dtype)
    if event == "skipped" and rank == n - 1:
        given["0.weight"][0, 3] = float("nan")
    if layout != "all used" and (event == "unused" or (event == "unused on one rank" and rank == 0)):
        del given["1.weight"], given["3.weight"]
    return given


def optimizer_of(name: str, model: nn.Module) -> Any:
    if name in ("SGD", "momentum"):
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9 if name == "momentum" else 0)
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)


def steps_of(one: dict[str, str], steps: int = 20) -> Recording:
    """What a composition does."""
    import lightning_sparse as ls
    from tests.recorder.compositions import keywords
    from tests.recorder.network import Threads

    n, plan = int(one["ranks"]), Plan(steps)
    threads = Threads(n)
    entries: list[Recording] = [[] for _ in range(n)]
    picks: list[list[Any]] = [[] for _ in range(n)]

    def attach(ddp: Any, optimizer: Any, scaler: Any) -> Any:
        inside.pin_digest()
        return inside.attached(ddp, optimizer, scaler, keywords(one), one["also"])

    def job(rank: int) -> None:
        model = Layers(getattr(torch, one["dtype"]))
        layout, also = one["layout"], one["also"]
        unused, views = layout != "all used", layout == "unused in views"

        def wrapped() -> Any:
            return DistributedDataParallel(
                model, find_unused_parameters=unused, gradient_as_bucket_view=views, bucket_cap_mb=0.004
            )

        ddp, optimizer = wrapped(), optimizer_of(one["optimizer"], model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if also == "scaler" else None
        engine = attach(ddp, optimizer, scaler)
        entries[rank].extend(plain(0, rank, EXCHANGES, "in steps" if inside.in_steps(engine) else "in backward"))
        for step in range(steps):
            event = plan.events.get(step, "")

            def note(what: str, value: Any, step: int = step) -> None:
                entries[rank].extend(plain(step, rank, what, value))

            if step == plan.at(0.7) and also == "resume":
                kept = engine.state_dict()
                engine.close()
                ddp = wrapped()
                engine = attach(ddp, optimizer, scaler)
                note("said by load_state_dict", len(engine.load_state_dict(kept)))
            if step == plan.at(0.4) and also == "regroup":
                first, *others = inside.member(engine, "groups")
                engine.regroup([*others, first])
            if step == plan.at(0.7) and also == "slower":
                optimizer.param_groups[0]["lr"] /= 4
            threads.sent[rank].clear()  # what is sent when an engine is attached has random numbers in it
            picks[rank].clear()
            if event == "flush":
                inside.member(engine, "_flush_next_step")()
            optimizer.zero_grad()
            parts = 2 if also == "accumulate" else 1
            for part in range(parts):
                ddp.require_backward_grad_sync = part == parts - 1
                loss = ddp(gradients_of(model, parts * step + part, rank, n, event, layout))
                (loss if scaler is None else scaler.scale(loss)).backward()
            if also == "norm" and inside.in_steps(engine):
                engine.clip_grad_norm_(model.parameters(), inside.LIMIT)
            if also == "value" and inside.in_steps(engine):
                torch.nn.utils.clip_grad_value_(model.parameters(), inside.LIMIT)
            if scaler is None:
                inside.ignore_skipped(engine, optimizer)
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            skipped = inside.member(engine, "stepper.record.latest_skipped")
            for name, p in model.named_parameters() if not skipped else ():
                note(f"gradient of {name}", p.grad)
            for number, indices in enumerate(sorted(picks[rank], key=lambda found: found.tolist())):
                note(f"picks {number}", indices)
            for number, (kind, x) in enumerate(threads.sent[rank]):
                note(f"message {number} ({kind})", x)
            for name, p in model.named_parameters():
                note(f"weight {name}", p)
            note("state", inside.state_of(engine))
            note("skipped", skipped)
            note("logged", inside.logged_by(engine))
        ls.flush(engine, [optimizer])
        for name, p in model.named_parameters():
            entries[rank].extend(plain(steps, rank, f"weight {name} after ls.flush", p))
        entries[rank].extend(plain(steps, rank, "state after ls.flush", inside.state_of(engine)))
        engine.close()

    with ExitStack() as undo:
        undo.callback(inside.watch_picks(lambda indices: picks[dist.get_rank()].append(indices)))
        undo.enter_context(warnings.catch_warnings(action="ignore"))
        undo.enter_context(inside.ranks_apart())
        threads.run(job)
    order = [entry for of_rank in entries for entry in of_rank]
    return sorted(order, key=lambda entry: entry.step)  # and by rank, as they were


def plain(step: int, rank: int, what: str, value: Any) -> Iterator[Entry]:
    """Entries of a value, of each part of it one."""
    if isinstance(value, Tensor):
        x, dtype = value.detach().cpu(), str(value.dtype).removeprefix("torch.")
        x = x.view(torch.int16) if x.dtype in (torch.bfloat16, torch.float16) else x
        yield Entry(step, rank, what, x.numpy().copy(), dtype)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from plain(step, rank, f"{what} / {key}", part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(part, (int, float)) for part in value):
            yield Entry(step, rank, what, np.array(value, dtype=np.float64), "numbers")
            return
        for number, part in enumerate(value):
            yield from plain(step, rank, f"{what} / {number}", part)
    else:
        yield Entry(step, rank, what, value, type(value).__name__)


def recorded(one: dict[str, str], steps: int) -> Recording | str:
    """A recording, or the error that it ended with."""
    try:
        return steps_of(one, steps)
    except Exception as error:
        return "".join(traceback.format_exception(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    inside.import_package(arguments.compiled)
    ask: Callable[[], str] = sys.stdin.readline
    while line := ask():
        number, one = json.loads(line)
        with redirect_stdout(sys.stderr):
            found = recorded(one, arguments.steps)
        done = arguments.out / f"{number}.part"
        done.write_bytes(pickle.dumps(found))
        done.rename(arguments.out / f"{number}.pickle")
        print(number, flush=True)


if __name__ == "__main__":
    from tests.recorder import record as this  # whose classes can be found in a pickle

    this.main()
