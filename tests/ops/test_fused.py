"""The default's step in Triton against the one in torch: bit for bit, how many launches, how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_sparse as ls
from lightning_sparse.core.step import Context
from lightning_sparse.engine import fused
from lightning_sparse.engine.network import drive
from lightning_sparse.engine.pipeline import exchange_group, settle_group
from lightning_sparse.ops.on_cuda import OnCuda
from tests.mirror import Mirror
from tests.ops.fused_steps import PARTS, first_of_equal, groups, walk
from tests.ops.interpreted import ExactRoots, in_triton, interpret
from tests.ops.test_no_host_sync import no_waiting
from tests.static_path import static_path

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402
from lightning_sparse.ops.triton import lanes as triton_lanes  # noqa: E402
from lightning_sparse.ops.triton import length as triton_length  # noqa: E402
from lightning_sparse.ops.triton import need as triton_need  # noqa: E402
from lightning_sparse.ops.triton import second as triton_second  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402
from lightning_sparse.ops.triton import sums as triton_sums  # noqa: E402
from lightning_sparse.ops.triton import union as triton_union  # noqa: E402
from lightning_sparse.ops.triton import values as triton_values  # noqa: E402
from tests.covering import by_default  # noqa: E402

KERNELS: list[ModuleType] = [
    triton_dense, triton_lanes, triton_length, triton_need, triton_second, triton_select, triton_sums, triton_union,
    triton_values,
]  # fmt: skip
thorough = pytest.mark.thorough
RESIDUAL, ADAM = ls.Residual(), ls.SecondMoment(1 - 2**-10)


@pytest.mark.parametrize(
    ("n", "numel", "density", "dtype", "scaled", "memory"),
    by_default(
        [
            (2, (100, 70), 0.05, torch.float32, False, RESIDUAL),  # groups that travel together
            pytest.param(2, (300, 170), 0.05, torch.float32, False, RESIDUAL, marks=thorough),
            (2, (100, 71), 0.05, torch.float32, False, ADAM),
            pytest.param(2, (200, 171), 0.05, torch.float32, False, ADAM, marks=thorough),
            pytest.param(2, 900, 0.05, torch.float32, False, RESIDUAL, marks=thorough),
            pytest.param(2, 400, 0.05, torch.bfloat16, False, ls.Residual(0.9), marks=thorough),
            pytest.param(3, 2600, 0.05, torch.float32, False, ls.Residual(0.7), marks=thorough),
            pytest.param(
                2, 1000, 0.004, torch.float16, True, RESIDUAL, marks=thorough
            ),  # coordinates travel as they are
            pytest.param(5, 4000, 0.3, torch.float32, True, RESIDUAL, marks=thorough),
            pytest.param(
                2, 66_000, 0.01, torch.float32, False, RESIDUAL, marks=[thorough, pytest.mark.timeout(900)]
            ),  # two blocks
            (2, 100, 0.05, torch.bfloat16, False, ls.SecondMoment(0.0)),  # some steps are bounded
            pytest.param(5, 2600, 0.05, torch.float32, False, ls.SecondMoment(1 - 2**-4, 0.1), marks=thorough),
            pytest.param(2, 1000, 0.004, torch.float16, True, ADAM, marks=thorough),
            pytest.param(17, 300, 0.3, torch.float32, True, ls.SecondMoment(0.0), marks=thorough),  # in 32 bits
            pytest.param(2, 66_000, 0.01, torch.float32, False, ADAM, marks=[thorough, pytest.mark.timeout(900)]),
        ],
        2,
    ),
)
def test_the_whole_step_equals_that_of_torch(
    n: int, numel: int | tuple[int, ...], density: float, dtype: torch.dtype, scaled: bool, memory: ls.Memory
) -> None:
    with static_path(), ExactRoots(), first_of_equal():
        expected = walk(n, numel, density, dtype, scaled, memory=memory)
    with in_triton() as chosen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_rehearse", lambda *_: None)  # it has a test of its own
        found = walk(n, numel, density, dtype, scaled, memory=memory)
        assert chosen.trouble is None
        assert {what[0] for what in chosen._tried if isinstance(what, tuple)} >= {dtype}
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            sums = 1e-14 if one.dtype == torch.float64 and not one.dim() else 0  # of norms, in another order
            torch.testing.assert_close(one, other, rtol=sums, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("trouble", "memory"),
    [
        ("compiler", ADAM),
        ("difference", RESIDUAL),
        *(pytest.param(None, memory, marks=thorough) for memory in (RESIDUAL, ls.SecondMoment())),
    ],
)
def test_where_kernels_do_not_work_training_goes_on_in_torch(
    trouble: str | None, memory: ls.Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_triton() as chosen, ExactRoots():
        if trouble == "compiler":
            monkeypatch.setattr(triton_select, "launch", lambda *_, **__: 1 / 0)
        elif trouble == "difference":
            accumulate = triton_dense.accumulate_

            def wrong(acc: Tensor, *others: Any) -> None:
                accumulate(acc, *others)
                acc[5] += 1

            monkeypatch.setattr(triton_dense, "accumulate_", wrong)
        [state] = groups(2, 300, 0.1, torch.float32, memory=memory)[:1]
        served = {
            **PARTS,
            "memory": memory,
            "plain": lambda *a, **k: exchange_group(*a, **k, exchange=PARTS["exchange"], kernels=False),
        }
        grad, ctx = torch.ones(300), Context(0, 0.1, 0, 2)
        if trouble is None:
            assert fused.serves(grad, state, ctx, **served)
            return
        with pytest.warns(UserWarning, match="Operations of torch take their place") as warnings:
            assert not fused.serves(grad, state, ctx, **served)
            assert not fused.serves(grad, state, ctx, **served)
        assert len(warnings) == 1
        if trouble == "compiler":
            assert "ZeroDivisionError" in str(chosen.trouble)
            return
        [reason] = chosen.refused.values()
        assert reason.startswith("residual, (4097,) torch.float32, differs at 1 of 4097 places, first at 5: ")
        assert "; the largest difference is 1 (" in reason
        assert "numel=4096, n=2, k=1, step=0, scale=None" in reason
        assert reason in str(warnings[0].message)
        assert chosen.tried("others", lambda: None)  # go on


def test_what_the_kernels_do_not_serve_is_left_to_torch() -> None:
    with in_triton() as chosen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_rehearse", lambda *_: None)

        def serves(n: int = 2, density: float = 0.1, dtype: torch.dtype = torch.float32, **others: Any) -> bool:
            [state] = groups(n, 300, density, dtype, memory=others.get("memory", RESIDUAL))[:1]
            ctx = Context(0, density, 0, n)
            return fused.serves(torch.ones(300, dtype=dtype), state, ctx, **{**PARTS, **others}, plain=exchange_group)

        assert serves()
        assert serves(dtype=torch.bfloat16)
        assert not serves(n=1)
        assert not serves(n=600)
        assert serves(memory=ADAM)
        assert serves(n=40, memory=ADAM)
        assert not serves(n=600, memory=ADAM)
        assert not serves(memory=ls.ClipByNorm(1.0, ADAM))
        assert not serves(dtype=torch.float64)
        assert not serves(sparsifier=ls.SharedTopK())
        assert not serves(exchange=ls.EXCHANGES.resolve("reduce_union"))
        chosen.trouble = "none today"
        assert not serves()


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
        weighed, codes = self.constants.get("WEIGHED", False), self.constants.get("LOW", 0) > 0
        tensors = [x for arg in self.args for x in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(x, Tensor)]
        total = float(sum(x.nbytes for x in {id(x): x for x in tensors}.values() if x.numel() < numel))
        total += {"_form": 16, "_weigh": 24, "_parts": 4}.get(self.name, 0) * numel
        lists = self.args[6:8] if self.name == "_collect" else self.args[3:5]
        if self.name in ("_collect", "_count_digits", "_count_picks", "_write_picks"):
            total -= sum(x.nbytes for x in lists) / 2
        if self.name == "_count_digits" and self.constants["SEARCH"] == 0 and self.constants["DIGIT"] < 4:
            total -= lists[0].nbytes / 2  # where candidates lie does not matter yet
        if self.name == "_collect":
            total += (1 + weighed) * SECTOR * lists[0].numel() / 2
        if self.name == "_write_picks" and weighed:
            total += SECTOR * self.args[8].numel()
        if self.name in ("_tell", "_round"):
            total += (1 + (codes or self.constants.get("CODES", False))) * SECTOR * self.args[2].numel()
        if self.name == "_average":
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
def test_rounding_of_narrow_gradients_takes_two_launches_more(memory: ls.Memory, launched: list[Launch]) -> None:
    parts, numel, counts = PARTS | {"memory": memory}, 1_000_000, []
    for dtype in (torch.float32, torch.bfloat16):
        [state] = groups(2, numel, 0.01, dtype, "meta", memory)[:1]
        grad, ctx = torch.empty(numel, dtype=dtype, device="meta"), Context(0, 0.01, 0, 2)
        launched.clear()
        with no_waiting(), Counted() as counted:
            proposed = drive(exchange_group(grad, state, ctx, **parts), Mirror(0, 2))
            settle_group(state, proposed, proposed.void, memory)
        counts.append(len(launched) + len(counted.names))
        assert [launch.name for launch in launched].count("_subtract_at") == 1 + (dtype != torch.float32)
    assert counts[1] == counts[0] + 2


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("n", [2, 8, 64])
@pytest.mark.parametrize("memory", [RESIDUAL, ADAM], ids=["residual", "second moment"])
def test_launches_and_bytes_stay_within_their_budget(
    n: int, density: float, memory: ls.Memory, launched: list[Launch]
) -> None:
    numel, parts = 25_000_000, PARTS | {"memory": memory}
    [state] = groups(n, numel, density, torch.float32, "meta", memory)[:1]
    for step in range(2):
        grad, ctx = torch.empty(numel, device="meta"), Context(step, density, 0, n)
        launched.clear()
        with no_waiting(), Counted() as counted:
            proposed = drive(exchange_group(grad, state, ctx, **parts), Mirror(0, n))
            exchanged = len(launched)
            state = settle_group(state, proposed, proposed.void, memory)
    assert exchanged == (21 if memory is RESIDUAL else 24)
    network = ["clone", "mul_"]
    moved = sum(launch.bytes_moved(numel) for launch in launched) / numel
    # When all groups have run, a flag decides whether what was sent leaves, and which numbers count.
    assert [launch.name for launch in launched[exchanged:]] == ["_subtract_at", "_choose"]
    if memory is RESIDUAL:
        assert counted.names == network
        assert 16 < moved <= {0.01: 23, 0.001: 18}[density]
    else:
        assert counted.names == ["add", "pow", "sqrt", "_to_copy", *network, "bitwise_not", "add_"]  # of single numbers
        assert 28 < moved <= {0.01: 37, 0.001: 31}[density]
