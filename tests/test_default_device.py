"""A default device (``torch.set_default_device``, ``with torch.device(...)``) changes nothing: all tensors say where.

The default is "meta" here, where a tensor has no content: whatever is made there by mistake fails, or ends in another
result. In trainings it is "cuda", beside a flag that must lie on the host or ranks that train on the CPU.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.methods.grouping import make_plan
from tests.contract.cases import CASES, MEMORIES, PAIRS, Case
from tests.lockstep import equal_states
from tests.mirror import Mirror

CPU = torch.device("cpu")
NUMEL = 401
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tensor", "zeros"),
}
PACKAGE = Path(ls.__file__).parent


def unchanged(run: Callable[[], Any]) -> None:
    with torch.device("meta"):
        found = run()
    assert equal_states(found, run())


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu", generator=torch.Generator("cpu").manual_seed(0))


def steps(sparsifier: ls.sparsifiers.Sparsifier, exchange: str, memory: ls.memories.Memory) -> tuple:
    ctx = Context(0, 0.05, 0, 4)
    parts = {"memory": memory, "sparsifier": sparsifier, "exchange": ls.exchanges.EXCHANGES.resolve(exchange)}
    state = init_group(NUMEL, torch.float32, CPU, ctx, memory=memory, sparsifier=sparsifier)
    found: list[Any] = []
    for step, gradient in enumerate(normal(3, NUMEL)):  # led by each rank in turn
        ctx = ctx._replace(step=step, rank=step)
        state, statistics = drive(reduce_group(gradient, state, ctx, **parts), Mirror(step))
        found += [gradient, statistics.counts, statistics.union, statistics.threshold]
    return tuple(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_in_sparsifiers(case: Case) -> None:
    unchanged(lambda: steps(case.sparsifier, case.sparsifier.exchange, ls.memories.Residual()))


@pytest.mark.parametrize("exchange", sorted({exchange for _, exchange in PAIRS}))
def test_in_exchanges(exchange: str) -> None:
    [case, *_] = [case for case, accepted in PAIRS if accepted == exchange]
    unchanged(lambda: steps(case.sparsifier, exchange, ls.memories.Residual()))


@pytest.mark.parametrize("memory", MEMORIES, ids=repr)
def test_in_memories(memory: ls.memories.Memory) -> None:
    unchanged(lambda: steps(ls.sparsifiers.TopK(), "reduce_union" if memory.needs_second else "gather_pairs", memory))


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(20, 30, device="cpu"), nn.ReLU(), nn.Linear(30, 10, device="cpu"))
    for parameter in made.parameters():
        parameter.data.copy_(normal(*parameter.shape))
    return made


def training(**options: Any) -> tuple:
    """One rank, through all that an engine can be asked for."""
    ddp = DistributedDataParallel(model(), find_unused_parameters=True)
    chosen = {"density": 0.05, "watch": ls.Watch(every=1), "single_device": "sparse"}
    engine = ls.attach(ddp, **chosen | options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    found: list[Any] = []
    for step, batch in enumerate(normal(6, 8, 20)):
        (ddp(batch).square().mean() * (float("inf") if step == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [value for name, value in sorted(engine.summary().items()) if not name.startswith("time/")]
        engine._group_summaries()
        if step == 3:
            engine.regroup(make_plan([p for group in engine.groups for p in group.parameters][::-1], "layer"))
            engine.load_state_dict(engine.state_dict())
    ls.flush(engine, [optimizer])
    engine.close()
    assert engine.skipped_steps == 1
    return *found, *(p.detach() for p in ddp.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": ls.memories.Residual(rates=True)},
        {"sparsifier": "exdyna", "memory": ls.memories.WeightDecay(0.1)},
    ],
)
def test_in_training(one_rank: None, options: dict[str, Any]) -> None:
    unchanged(lambda: training(**options))


def test_in_simulations() -> None:
    def simulated() -> tuple:
        steps = ls.simulate(normal(3, 2, NUMEL), sparsifier="micro", density=0.05)
        return tuple((s.update, s.counts, s.indices, s.residual_norm, s.bytes_sent, s.partition) for s in steps)

    unchanged(simulated)


def calls_without_device(source: str) -> list[int]:
    """Lines that call a function of torch that makes a tensor, and leave the device open."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_calls_without_a_device_are_seen() -> None:
    source = (
        "x = torch.zeros(3)\ny = torch.zeros(3, device=d)\nz = f(\n    torch.arange(4, dtype=t))\nw = x.new_zeros(1)"
    )
    assert calls_without_device(source) == [1, 4]


def test_in_the_whole_package() -> None:
    found = {str(path.relative_to(PACKAGE)): calls_without_device(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 50
    assert {path: lines for path, lines in found.items() if lines} == {}
