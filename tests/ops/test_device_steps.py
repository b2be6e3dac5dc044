"""The default's step in Triton against the one in torch: bit for bit, how many launches, how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_sparse as ls
from lightning_sparse.core.layout import Gradient
from lightning_sparse.core.messages import AllGather
from lightning_sparse.core.step import Context
from lightning_sparse.engine import group as engine_group
from lightning_sparse.engine import pipeline
from lightning_sparse.engine.drivers import drive
from lightning_sparse.engine.group import GroupReducer
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.engine.pipeline import exchange_group, settle_group
from lightning_sparse.integrations.shadow import Shadow
from lightning_sparse.methods.grouping import Group, ParameterSize
from lightning_sparse.methods.sparsifiers import union_top_k
from lightning_sparse.ops import adam
from lightning_sparse.ops.adam import Sparse
from lightning_sparse.ops.on_cuda import OnCuda
from tests.gpu.processes import one_rank
from tests.mirror import Mirror, mirrored_ranks
from tests.ops.device_steps import PARTS, first_of_equal, groups, walk
from tests.ops.interpreted import ExactRoots, in_triton, interpret
from tests.ops.test_no_host_sync import no_waiting
from tests.ranks import Ranks
from tests.static_path import static_path

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402
from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402
from lightning_sparse.ops.triton import numbers as triton_numbers  # noqa: E402
from lightning_sparse.ops.triton import packed as triton_packed  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402
from lightning_sparse.ops.triton import sums as triton_sums  # noqa: E402
from lightning_sparse.ops.triton import union as triton_union  # noqa: E402
from lightning_sparse.ops.triton import values as triton_values  # noqa: E402
from tests.covering import by_default  # noqa: E402

KERNELS: list[ModuleType] = [
    triton_dense, triton_numbers, triton_packed, triton_select, triton_sums, triton_union,
    triton_values,
]  # fmt: skip
thorough = pytest.mark.thorough
RESIDUAL, ADAM = ls.memories.Residual(), ls.memories.SecondMoment(1 - 2**-10)


@pytest.mark.parametrize(
    ("n", "numel", "density", "dtype", "scaled", "memory"),
    by_default(
        [
            # Groups that travel together.
            pytest.param(2, (100, 70), 0.05, torch.float32, False, RESIDUAL, marks=thorough),
            pytest.param(2, (300, 170), 0.05, torch.float32, False, RESIDUAL, marks=thorough),
            (2, (100, 71), 0.05, torch.float32, False, ADAM),
            pytest.param(2, (200, 171), 0.05, torch.float32, False, ADAM, marks=thorough),
            pytest.param(2, 900, 0.05, torch.float32, False, RESIDUAL, marks=thorough),
            pytest.param(2, 400, 0.05, torch.bfloat16, False, ls.memories.Residual(0.9), marks=thorough),
            pytest.param(3, 2600, 0.05, torch.float32, False, ls.memories.Residual(0.7), marks=thorough),
            pytest.param(
                2, 1000, 0.004, torch.float16, True, RESIDUAL, marks=thorough
            ),  # coordinates travel as they are
            pytest.param(5, 4000, 0.3, torch.float32, True, RESIDUAL, marks=thorough),
            pytest.param(
                2, 66_000, 0.01, torch.float32, False, RESIDUAL, marks=[thorough, pytest.mark.timeout(900)]
            ),  # two blocks
            (2, 100, 0.05, torch.bfloat16, False, ls.memories.SecondMoment(0.0)),  # some steps are bounded
            pytest.param(5, 2600, 0.05, torch.float32, False, ls.memories.SecondMoment(1 - 2**-4, 0.1), marks=thorough),
            pytest.param(2, 1000, 0.004, torch.float16, True, ADAM, marks=thorough),
            pytest.param(
                17, 300, 0.3, torch.float32, True, ls.memories.SecondMoment(0.0), marks=thorough
            ),  # in 32 bits
            pytest.param(2, 66_000, 0.01, torch.float32, False, ADAM, marks=[thorough, pytest.mark.timeout(900)]),
        ],
    ),
)
def test_the_whole_step_equals_that_of_torch(
    n: int, numel: int | tuple[int, ...], density: float, dtype: torch.dtype, scaled: bool, memory: ls.memories.Memory
) -> None:
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(n, numel, density, dtype, scaled, memory=memory)
    with in_triton() as chosen, ExactRoots():
        found = walk(n, numel, density, dtype, scaled, memory=memory)
        assert chosen.trouble is None
        assert not chosen.refused
        form = "accumulate_" if isinstance(memory, ls.memories.Residual) else "weigh_"
        assert {what[0] for what in chosen._tried} >= {form, "top_k_and_stripe", "packed", "hand_over_"}
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            sums = 1e-14 if one.dtype == torch.float64 and not one.dim() else 0  # of norms, in another order
            torch.testing.assert_close(one, other, rtol=sums, atol=0, equal_nan=True)


RUNS = [1, 5, 100, 104, 300, 2000, 2052, 2100]
"""Ends of runs: short ones, several within a tile, one of a whole tile, one that ends near a tile's end."""


@pytest.mark.parametrize("memory", [RESIDUAL, ADAM], ids=["residual", "second moment"])
@pytest.mark.parametrize(
    ("n", "numel", "dtype", "scaled"),
    [
        (2, 330, torch.float32, False),
        pytest.param(2, 330, torch.bfloat16, True, marks=thorough),
        pytest.param(2, 6200, torch.float32, True, marks=thorough),
        pytest.param(3, 4100, torch.float16, False, marks=thorough),
    ],
)
def test_a_gradient_in_runs_is_exchanged_where_it_lies(
    n: int, numel: int, dtype: torch.dtype, scaled: bool, memory: ls.memories.Memory
) -> None:
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(n, numel, 0.05, dtype, scaled, memory=memory)
        in_torch = walk(n, numel, 0.05, dtype, scaled, memory=memory, cuts=RUNS)
    with in_triton() as chosen, ExactRoots():
        found = walk(n, numel, 0.05, dtype, scaled, memory=memory, cuts=RUNS)
        assert chosen.trouble is None
        assert not chosen.refused
        if memory is ADAM and dtype == torch.float32:
            assert "in runs" in {what[1] for what in chosen._tried if what[0] == "top_k_and_stripe"}
    for ours, torchs, theirs in zip(found, in_torch, expected, strict=True):
        for one, between, other in zip(ours, torchs, theirs, strict=True):
            sums = 1e-14 if one.dtype == torch.float64 and not one.dim() else 0  # of norms, in another order
            torch.testing.assert_close(one, other, rtol=sums, atol=0, equal_nan=True)
            torch.testing.assert_close(between, other, rtol=sums, atol=0, equal_nan=True)


TILE, FEW = triton_dense.TILE, 4


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program works on several tiles, as in large groups: launches have at most four, not 1,024."""
    for module in [triton_launch, *KERNELS]:
        if hasattr(module, "PROGRAMS"):
            monkeypatch.setattr(module, "PROGRAMS", FEW)


SIZES = [TILE - 1, TILE, TILE + 1, FEW * TILE - 1, FEW * TILE, FEW * TILE + 1, 2 * FEW * TILE - 1, 2 * FEW * TILE + 1]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEVERAL = [
    (numel, DTYPES[number % 3], memory, cuts)
    for memory, cuts in product((RESIDUAL, ADAM), ([], RUNS))
    for number, numel in enumerate(SIZES)
]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("numel", "dtype", "memory", "cuts"),
    [pytest.param(*one, marks=[] if one == (SIZES[5], DTYPES[2], RESIDUAL, RUNS) else thorough) for one in SEVERAL],
)
def test_programs_of_several_tiles_equal_torch(
    numel: int, dtype: torch.dtype, memory: ls.memories.Memory, cuts: list[int]
) -> None:
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(2, numel, 0.01, dtype, False, memory=memory, count=2)
    with in_triton() as chosen, ExactRoots():
        found = walk(2, numel, 0.01, dtype, False, memory=memory, count=2, cuts=cuts)
        assert chosen.trouble is None
        assert not chosen.refused
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            sums = 1e-14 if one.dtype == torch.float64 and not one.dim() else 0  # of norms, in another order
            torch.testing.assert_close(one, other, rtol=sums, atol=0, equal_nan=True)


@pytest.mark.parametrize("trouble", by_default(["difference", "compiler"]))
def test_where_kernels_do_not_work_training_goes_on_in_torch(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(2, 300, 0.1, torch.float32, False)
    with in_triton() as chosen, ExactRoots(), first_of_equal():
        if trouble == "compiler":
            monkeypatch.setattr(triton_dense, "launch", lambda *_, **__: 1 / 0)
        else:
            accumulate = triton_dense.accumulate_

            def wrong(acc: Tensor, *others: Any) -> None:
                accumulate(acc, *others)
                acc[5] += 1

            monkeypatch.setattr(triton_dense, "accumulate_", wrong)
        with pytest.warns(UserWarning, match="Operations of torch take their place") as warnings:
            found = walk(2, 300, 0.1, torch.float32, False)
        assert len(warnings) == 1
        if trouble == "compiler":
            assert "ZeroDivisionError" in str(chosen.trouble)
        else:
            [reason] = chosen.refused.values()
            assert "differs at 1 of 1000 places, first at 5: " in reason
            assert "; the largest difference is 1 (" in reason
            assert reason in str(warnings[0].message)
            assert ("top_k_and_stripe", torch.device("cpu")) in chosen._tried  # other kernels go on
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("sparsifier", "memory"),
    by_default(
        [
            ("micro", ls.memories.Residual(0.9)),
            ("union_top_k", ls.memories.ClipByNorm(1.0, ADAM)),
            ("top_k", ADAM),
            ("shared_top_k", RESIDUAL),
        ]
    ),
)
def test_other_parts_use_the_kernels_that_fit(sparsifier: str, memory: ls.memories.Memory) -> None:
    parts = {"sparsifier": ls.sparsifiers.SPARSIFIERS.resolve(sparsifier), "memory": memory}
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(2, 300, 0.1, torch.float32, False, **parts)
    with in_triton() as chosen, ExactRoots():
        found = walk(2, 300, 0.1, torch.float32, False, **parts)
        assert chosen.trouble is None
        assert not chosen.refused
        assert {"hand_over_", "packed"} <= {what[0] for what in chosen._tried}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def trained(optimizer: type[torch.optim.Optimizer], **options: Any) -> list[Tensor]:
    """Weights after steps of an engine, as one of two ranks; biases lie between matrices, and one step is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 30))
    ddp = DistributedDataParallel(model)
    with mirrored_ranks(2):
        engine = ls.attach(ddp, density=0.1, rules=ls.Rules(dense_numel=0), watch=None, single_device="sparse")
    made = optimizer(ddp.parameters(), lr=0.01, **options)
    for step in range(3):
        loss = ddp(torch.randn(4, 12)).square().mean()
        (loss * (float("inf") if step == 1 else 1.0)).backward()
        made.step()
        made.zero_grad()
    assert engine.skipped_steps == 1
    engine.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    by_default(
        [
            (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
            (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
            (torch.optim.Adam, {"weight_decay": 0.0, "foreach": True}),
        ]
    ),
)
def test_an_engine_trains_alike_with_kernels_and_without(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adam, "HOST", "nowhere")
    monkeypatch.setattr(pipeline, "say", lambda line: None)
    with one_rank(torch.device("cpu")), static_path(), ExactRoots(), first_of_equal():
        expected = trained(optimizer, **options)
    with one_rank(torch.device("cpu")), in_triton() as chosen, ExactRoots():
        found = trained(optimizer, **options)
        assert chosen.trouble is None
        assert not chosen.refused
        runs = {what[-2] for what in chosen._tried if what[0] in ("accumulate_", "weigh_")}
        assert True in runs, "gradients were joined"
        assert any(what[0] is Sparse for what in chosen._tried) == (optimizer is not torch.optim.SGD)
    assert all(map(torch.equal, found, expected))


def prepared(in_runs: bool) -> set[Any]:
    """What is tried before a step of AdamW."""
    with in_triton() as chosen, ExactRoots():
        given = torch.float32, torch.device("cpu"), Context(0, 1.0, 0, 2), ADAM, PARTS["sparsifier"], PARTS["exchange"]
        pipeline.rehearse(*given, in_runs)
        assert chosen.trouble is None and not chosen.refused
        before = set(chosen._tried)
        walk(2, 330, 0.05, torch.float32, False, memory=ADAM, cuts=RUNS if in_runs else ())
        return set(chosen._tried) - before


@pytest.mark.parametrize("in_runs", by_default([True, False]))
def test_kernels_are_tried_before_the_first_step_in_runs_too(in_runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "say", lambda line: None)
    assert not prepared(in_runs)


def test_kernels_that_fail_on_aligned_runs_alone_are_noticed_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    weigh = triton_dense.weigh_

    def wrong(acc: Tensor, second: Tensor, score: Any, grad: Any, *others: Any) -> None:
        weigh(acc, second, score, grad, *others)
        if getattr(grad, "aligned", False):
            acc[5] += 1

    monkeypatch.setattr(triton_dense, "weigh_", wrong)
    with in_triton() as chosen, ExactRoots(), pytest.warns(UserWarning, match="compute something else"):
        walk(2, 330, 0.05, torch.float32, False, memory=ADAM, cuts=RUNS, count=1)
        assert [what[0] for what in chosen.refused] == ["weigh_"]


def groups_of_one(runs: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> int:
    """In how many runs a step of an engine's group takes a gradient."""
    seen: list[int] = []

    def noted(grad: Gradient, *others: Any, **more: Any) -> Any:
        seen.append(len(grad.runs))
        return exchange_group(grad, *others, **more)

    monkeypatch.setattr(engine_group, "exchange_group", noted)
    sizes = [ParameterSize(str(i), run.numel(), 4, "") for i, run in enumerate(runs)]
    plan = Group("group", tuple(sizes), False)
    settings = ls.engine.config.SparsificationConfig(density=0.1)
    parameters = {str(i): nn.Parameter(torch.zeros(run.numel())) for i, run in enumerate(runs)}
    group = GroupReducer(plan, parameters, settings, Context(0, 0.1, 0, 2), flush=False)
    drive(group.exchange_steps(Context(0, 0.1, 0, 2), dict(zip(parameters, runs, strict=True))), Mirror(0, 2))
    return seen[0]


def test_what_kernels_do_not_take_in_runs_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of which a user has made one narrower, and all of them where a kernel was refused."""
    narrow = [torch.ones(300), torch.ones(300, dtype=torch.bfloat16)]
    with in_triton() as chosen, ExactRoots():
        assert groups_of_one([torch.ones(300), torch.ones(300)], monkeypatch) == 2
        assert groups_of_one(narrow, monkeypatch) == 1
        assert narrow[1].dtype == torch.bfloat16 and bool(narrow[1].isfinite().all())
        chosen.refused["a kernel"] = "differs"
        assert groups_of_one([torch.ones(300), torch.ones(300)], monkeypatch) == 1


WINDOW = 6
"""Steps after which a need is known here."""


def bytes_of_steps(on_device: bool, memory: str) -> tuple[list[float], list[float], Tensor]:
    """Of a rank whose gradients hardly overlap with those of others; a state is loaded on the way.

    Also those that a shadow of the method would have sent, and the weights.
    """
    torch.manual_seed(0)
    where = static_path() if on_device else nullcontext()
    with where, first_of_equal(), patch.object(union_top_k, "WINDOW", WINDOW):
        ddp = DistributedDataParallel(nn.Linear(60, 50, bias=False))
        rules = ls.Rules(dense_numel=0, dense_ndim=0)
        engine = ls.attach(ddp, density=0.1, rules=rules, watch=None, memory=memory)
        shadow = Shadow(dict(ddp.named_parameters()), ["union_top_k"], engine.stepper.settings, TorchCollective())
        made, sent, shadowed = torch.optim.SGD(ddp.parameters(), lr=0.1), [], []
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(4 * WINDOW):
            x, y = torch.randn(4, 60, generator=generator), torch.randn(4, 50, generator=generator)
            (ddp(x) - y).square().mean().backward()
            made.step()
            made.zero_grad()
            [group] = engine.stepper.groups
            sent.append(group.statistics.bytes_sent)
            shadow.step({"module.weight": torch.randn(3000, generator=generator)})
            shadowed += [value for name, value in shadow.quantities.items() if name == "union_top_k/sent_mb"]
            if step == 4 * WINDOW - 4:
                engine.load_state_dict(engine.state_dict())
        return sent, shadowed, next(ddp.parameters()).detach().clone()


@pytest.mark.parametrize("memory", ["residual", "drift"])
def test_messages_of_a_device_are_as_long_as_those_of_a_cpu(two_ranks: Ranks, memory: str) -> None:
    """They have the most slots for a window, and behind it as many as were needed."""
    found, expected = (two_ranks(bytes_of_steps, on_device, memory)[0] for on_device in (True, False))
    sent, shadowed, weights = found
    for numbers in (sent, shadowed):
        assert len(set(numbers[:WINDOW])) == 1
        assert numbers[-1] < 0.9 * numbers[0]
    assert (sent, shadowed) == expected[:2]
    assert torch.equal(weights, expected[2])


def test_scores_of_narrow_gradients_are_let_go_before_messages() -> None:
    with in_triton(), ExactRoots():
        [state] = groups(2, 300, 0.1, torch.bfloat16, memory=ADAM)[:1]
        grad = Gradient([torch.ones(300, dtype=torch.bfloat16)])
        steps = exchange_group(grad, state, Context(0, 0.1, 0, 2), **PARTS | {"memory": ADAM})
        assert isinstance(next(steps), AllGather)
        assert not grad.rooms


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    with in_triton() as chosen, ExactRoots():
        torch.set_default_dtype(dtype)
        try:
            given = torch.float32, torch.device("cpu"), Context(0, 1.0, 1, 2), RESIDUAL, *list(PARTS.values())[1:]
            pipeline.rehearse(*given)
        finally:
            torch.set_default_dtype(before)
        assert chosen.trouble is None
        assert not chosen.refused
        assert ("hand_over_", torch.float32) in {what[:2] for what in chosen._tried}


@pytest.mark.thorough
def test_what_reads_parameters_is_rehearsed_too() -> None:
    with in_triton() as chosen, ExactRoots():
        memory = ls.memories.WeightDecay(0.1)
        pipeline.rehearse(torch.float32, torch.device("cpu"), Context(0, 1.0, 1, 2), memory, *list(PARTS.values())[1:])
        assert chosen.trouble is None
        assert {"accumulate_", "packed", "hand_over_"} <= {what[0] for what in chosen._tried}


def test_kernels_are_tried_before_the_first_step() -> None:
    with in_triton() as chosen, ExactRoots(), pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(pipeline, "say", said.append)
        given = torch.float32, torch.device("cpu"), Context(0, 1.0, 0, 2), ADAM, PARTS["sparsifier"], PARTS["exchange"]
        for _ in range(2):
            pipeline.rehearse(*given)
        assert len(said) == 1
        assert chosen.trouble is None
        assert not chosen.refused
        before = set(chosen._tried)
        walk(2, 100, 0.05, torch.float32, False, memory=ADAM)
        assert set(chosen._tried) == before


class Counted(TorchDispatchMode):
    """Operations of torch that launch something."""

    NOTHING = ("empty", "view", "slice", "select", "split", "unbind", "detach", "as_strided", "alias", "expand", "unsq")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        if not any(part in name for part in self.NOTHING):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


SECTOR = 32
"""Bytes that are read or written for a value somewhere in a vector."""


class Launch(NamedTuple):
    name: str
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def bytes_moved(self, numel: int) -> float:
        """Read and written: of vectors of the group what the kernel touches, and all of everything else.

        Of lists of candidates, half is counted: to that the bound is steered.
        """
        second = self.constants.get("CODES", False) or self.constants.get("LOW", 0) > 0
        tensors = [x for arg in self.args for x in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(x, Tensor)]
        total = float(sum(x.nbytes for x in {id(x): x for x in tensors}.values() if x.numel() < numel))
        total += {"_form": 16, "_weigh": 24, "_parts": 4}.get(self.name, 0) * numel
        lists = self.args[4:6] if self.name == "_collect" else self.args[1:3]
        if self.name in ("_collect", "_count_digits", "_count_picks", "_write_picks"):
            total -= sum(x.nbytes for x in lists) / 2
        if self.name == "_count_digits" and self.constants["SEARCH"] == 0 and self.constants["DIGIT"] < 4:
            total -= lists[0].nbytes / 2  # where candidates lie does not matter yet
        if self.name == "_collect":
            total += SECTOR * lists[0].numel() / 2
        if self.name in ("_tell", "_round"):
            total += (1 + second) * SECTOR * self.args[2].numel()
        if self.name in ("_largest", "_hand_over"):
            total += SECTOR * self.args[1].numel()
        if self.name == "_subtract_at":  # read and written
            total += 2 * SECTOR * self.args[1].numel()
        return total


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches on the meta device, which has shapes and no content."""
    seen: list[Launch] = []

    def note(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
        assert programs > 0
        seen.append(Launch(kernel.__name__, args, constants))

    for module in KERNELS:
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(OnCuda, "tried", lambda *_: True)
    with in_triton():
        yield seen


@pytest.mark.parametrize("memory", [RESIDUAL, ADAM], ids=["residual", "second moment"])
def test_rounding_of_narrow_gradients_takes_two_launches_more(
    memory: ls.memories.Memory, launched: list[Launch]
) -> None:
    parts, numel, counts = PARTS | {"memory": memory}, 1_000_000, []
    for dtype in (torch.float32, torch.bfloat16):
        [state] = groups(2, numel, 0.01, dtype, "meta", memory)[:1]
        grad, ctx = torch.empty(numel, dtype=dtype, device="meta"), Context(0, 0.01, 0, 2)
        launched.clear()
        with no_waiting(), Counted() as counted:
            proposed = drive(exchange_group(grad, state, ctx, **parts), Mirror(0, 2))
            settle_group(state, proposed, False, memory)
        counts.append(len(launched) + len(counted.names))
        assert [launch.name for launch in launched].count("_subtract_at") == 1 + (dtype != torch.float32)
    assert counts[1] == counts[0] + 2


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("memory", [RESIDUAL, ADAM], ids=["residual", "second moment"])
def test_launches_and_bytes_stay_within_their_budget(
    n: int, density: float, memory: ls.memories.Memory, launched: list[Launch]
) -> None:
    numel, parts = 25_000_000, PARTS | {"memory": memory}
    [state] = groups(n, numel, density, torch.float32, "meta", memory)[:1]
    for step in range(2):
        grad, ctx = torch.empty(numel, device="meta"), Context(step, density, 0, n)
        launched.clear()
        with no_waiting(), Counted() as counted:
            proposed = drive(exchange_group(grad, state, ctx, **parts), Mirror(0, n))
            exchanged = len(launched)
            # When all groups have run, the host is told whether the step counts, and of the union.
            state = settle_group(state, proposed, False, memory)._replace(told=int(density * numel))
    assert exchanged == (23 if memory is RESIDUAL else 27)
    network = ["clone", "new_zeros", "mul_"]  # bitmaps of the union are made between the messages
    moved = sum(launch.bytes_moved(numel) for launch in launched) / numel + 2 / 8
    assert [launch.name for launch in launched[exchanged:]] == ["_subtract_at"]
    if memory is RESIDUAL:
        assert counted.names == ["full", *network]  # the number of spare picks
        assert 16 < moved <= {0.01: 23, 0.001: 18}[density]
    else:
        # Of single numbers, but for the score's place, which is emptied for the average.
        assert counted.names == ["add", "pow", "full", *network, "zero_", "add_"]
        assert 32 < moved + 4 <= {0.01: 41, 0.001: 35}[density]
