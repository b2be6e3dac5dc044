"""Steps of a group on CUDA tensors without content: one device, and nothing that the host would have to read.

All sparsifiers x exchanges, and all memories, in float32 with a loss scale and in bfloat16. What the results are is
tested on CPU tensors that take the same path (tests/ops/test_static_path.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine.drivers import drive, drive_together
from lightning_sparse.engine.group import GroupReducer, any_set
from lightning_sparse.engine.optimizers.rules import AdamRule, Arrived
from lightning_sparse.engine.pipeline import exchange_group, init_group, settle_group
from lightning_sparse.methods.grouping import Group, ParameterSize
from tests.contract.cases import CASES, MEMORIES, PAIRS, Case, fit
from tests.costs import Costs
from tests.covering import by_default, covering
from tests.fake_cuda import CUDA, HostWaitsError, fake_cuda
from tests.mirror import Mirror

NUMEL = 10_007
DTYPES = [torch.float32, torch.bfloat16]
EVERY_MEMORY = [ls.memories.Residual(), ls.memories.NoMemory(), ls.memories.WeightDecay(1e-4), *MEMORIES]
# The published MiCRO computes its ranges on the host, in CPU tensors on purpose, and those have no content here either.
# tests/ops/test_no_host_sync.py walks it on meta tensors.
FAKEABLE = [(case, exchange) for case, exchange in PAIRS if case.name != "micro-published"]
NATURAL = [(case, exchange) for case, exchange in FAKEABLE if exchange == case.sparsifier.exchange]


def steps(case: Case, exchange: str, memory: ls.memories.Memory, dtype: torch.dtype, rank: int, count: int = 2) -> None:
    parts: dict[str, Any] = {"memory": memory, "sparsifier": case.sparsifier}
    with fake_cuda():
        parameters = [(slice(0, NUMEL), torch.zeros(NUMEL, dtype=dtype, device=CUDA))]
        ctx = Context(0, 0.05, rank, 4, parameters=parameters)
        state = init_group(NUMEL, dtype, CUDA, ctx, **parts)
        scale = torch.ones((), device=CUDA) if dtype is torch.float32 else None
        for step in range(count):
            grad = torch.zeros(NUMEL, dtype=dtype, device=CUDA)
            steps = exchange_group(
                grad,
                state,
                ctx._replace(step=step),
                **parts,
                exchange=ls.exchanges.EXCHANGES.resolve(exchange),
                scale=scale,
            )
            made = drive(steps, Mirror(rank, 4, CUDA))
            state = settle_group(state, made, False, memory)._replace(told=NUMEL // 20)
            assert {grad.device, made.skipped.device, made.statistics.union.device, state.counts.device} == {CUDA}


@pytest.mark.parametrize(
    ("case", "exchange"), covering(NATURAL, together=1, seen_as=lambda case, exchange: (type(case.sparsifier),))
)
def test_every_sparsifier_stays_on_the_device(case: Case, exchange: str) -> None:
    steps(case, exchange, ls.memories.Residual(), DTYPES[len(case.name) % 2], rank=3)


@pytest.mark.parametrize("exchange", sorted({exchange for _, exchange in FAKEABLE}))
def test_every_exchange_stays_on_the_device(exchange: str) -> None:
    [case, *_] = [case for case, accepted in FAKEABLE if accepted == exchange]
    for dtype in DTYPES:
        steps(case, exchange, ls.memories.Residual(), dtype, rank=1)


@pytest.mark.parametrize("memory", by_default(EVERY_MEMORY, 5), ids=repr)
def test_every_memory_stays_on_the_device(memory: ls.memories.Memory) -> None:
    [union_top_k] = [case for case in CASES if case.name == "union_top_k"]
    steps(union_top_k, "packed_union", memory, DTYPES[EVERY_MEMORY.index(memory) % 2], rank=2)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [ls.memories.Residual(), ls.memories.SecondMoment(beta2=0.5)], ids=repr)
@pytest.mark.parametrize(("case", "exchange"), FAKEABLE, ids=lambda part: getattr(part, "name", part))
def test_all_of_them_stay_on_the_device(case: Case, exchange: str, memory: ls.memories.Memory) -> None:
    if not fit(memory, exchange):
        pytest.skip("the exchange carries no second moments")
    for rank, dtype in enumerate(DTYPES):
        steps(case, exchange, memory, dtype, rank)


def group(
    name: str, numel: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[GroupReducer, dict[str, Tensor]]:
    """A group of two parameters of equal size, and their gradients, which lie in one bucket."""
    sizes = tuple(ParameterSize(f"{name}.{i}", numel // 2, dtype.itemsize, "") for i in range(2))
    parameters = {size.name: nn.Parameter(torch.zeros(size.numel, dtype=dtype, device=CUDA)) for size in sizes}
    dense = options.pop("dense", False)
    settings = ls.engine.config.SparsificationConfig(density=0.05, **options)
    made = GroupReducer(Group(name, sizes, dense), parameters, settings, Context(0, 0.05, 1, 4), flush=False)
    bucket = torch.zeros(numel, dtype=dtype, device=CUDA)
    return made, {name: bucket[span] for name, span in made.spans.items()}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")  # by which pieces of a bucket are known
def test_groups_that_travel_together_stay_on_the_device() -> None:
    with fake_cuda():
        groups = [
            group("a", 1000, memory=ls.memories.SecondMoment()),
            group("b", 2000),
            group("c", 600, torch.bfloat16, sparsifier="exdyna"),
            group("d", 100, dense=True),
        ]
        # The words of a header are pinned on the host, which a machine without CUDA cannot do.
        ctx = Context(0, 0.05, 1, 4)
        unused = [set[str](), {"b.1"}, set[str](), set[str]()]
        steps = [one.exchange_steps(ctx, pieces, names) for (one, pieces), names in zip(groups, unused, strict=True)]
        made = drive_together(steps, Mirror(1, 4, CUDA))
        skipped = any_set([each.proposed.skipped for each in made], CUDA, host_knows=False)
        for (one, _), each in zip(groups, made, strict=True):
            one.settle(each, False, 50)
            assert one.state.memory is not None
        assert {skipped.device, *(by.device for _, by in made[0].average.divisors().values())} == {CUDA}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(("dtype", "scaled"), list(zip(DTYPES, [False, True], strict=True)))
def test_steps_of_adam_stay_on_the_device(dtype: torch.dtype, scaled: bool) -> None:
    with fake_cuda():
        one, pieces = group("a", 1000, dtype, memory=ls.memories.SecondMoment())
        made = drive(one.exchange_steps(Context(0, 0.05, 1, 4), pieces), Mirror(1, 4, CUDA))
        one.settle(made, False, 50)
        parameters = {name: nn.Parameter(torch.zeros(500, dtype=dtype, device=CUDA)) for name in one.spans}
        optimizer = torch.optim.AdamW(parameters.values())
        for name, parameter in parameters.items():
            parameter.grad = pieces[name]
        if scaled:
            optimizer.grad_scale, optimizer.found_inf = (torch.ones((), device=CUDA) for _ in range(2))
        steps = AdamRule(keeps_moments=False)
        arrived = [Arrived(parameter, name, one, made.average) for name, parameter in parameters.items()]
        with Costs(CUDA) as costs:
            steps.before(optimizer, [(optimizer.param_groups[0], arrived)], 4)
            optimizer.step()
            steps.after()
        assert costs.operations["_foreach_copy_" if scaled else "_foreach_sub_"] == 1
        assert not optimizer.state


def on_device(*shape: int) -> Tensor:
    return torch.ones(shape, device=CUDA)


WRONG: dict[str, Callable[[], Any]] = {
    "two devices": lambda: on_device(3) + torch.ones(3, device="cpu"),
    "an index on the host": lambda: on_device(3).index_select(0, torch.zeros(1, dtype=torch.int64, device="cpu")),
    "a write from the host": lambda: on_device(3).index_copy_(0, on_device(1).long(), torch.ones(1, device="cpu")),
    "a number": lambda: on_device(3).sum().item(),
    "a flag": lambda: bool(on_device() > 0),
    "a mask": lambda: on_device(3)[on_device(3) > 0],
    "a range": lambda: on_device(3)[: on_device().long()],
    "a list": lambda: torch.tensor([1.0], device=CUDA),
    "a message of the host": lambda: Mirror(0, 4, CUDA).all_gather(torch.ones(1, device="cpu")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_fail_on_a_device_is_noticed(name: str) -> None:
    with fake_cuda(), pytest.raises((HostWaitsError, RuntimeError, AssertionError)):
        WRONG[name]()


def test_indexing_is_that_of_torch() -> None:
    with fake_cuda():
        x = on_device(4, 5, 6)
        found = [x[1], x[1:, None], x[:, :, 0], x[on_device(2).long(), :, 1], x[-1:, 2]]
        assert [tuple(y.shape) for y in found] == [(5, 6), (3, 1, 5, 6), (4, 5), (2, 5), (1, 6)]
        x[0] = 3
        x[on_device(2).long()] = on_device(2, 5, 6)
