"""Momentum spent early on a device: in Triton's interpreter against operations of torch, bit for bit, and its cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_sparse.ops.addresses import PART
from lightning_sparse.ops.momentum import Momentum, Spending, Stepped
from tests.costs import META, Costs
from tests.ops.interpreted import in_triton, interpret
from tests.ops.test_no_host_sync import no_waiting
from tests.static_path import static_path

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.triton import tables as triton_tables  # noqa: E402
from tests.covering import by_default  # noqa: E402

SHAPES = [(3, 5), (1,), (PART + 7,), (2, 3, 2, 2)]
KINDS = [
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16, torch.float32),
]
HOW: dict[str, tuple[Momentum, Tensor | None]] = {
    "plain": (Momentum(0.1, 0.9, 1.0, False), None),
    "Nesterov, maximized": (Momentum(0.1, 0.9, -0.5, True), None),
    "rate on the device": (Momentum(torch.tensor(0.1), 0.99, 1.0, False), None),
    "with a flag": (Momentum(0.1, 0.9, 1.0, False), torch.zeros(())),
    "not stepped": (Momentum(0.1, 0.9, 1.0, False), torch.ones(())),
    "at a rate of zero": (Momentum(0.0, 0.9, 1.0, False), None),
}


def lists(parameter: torch.dtype, grad: torch.dtype, velocity: torch.dtype, *, broken: bool = False) -> list[Stepped]:
    generator, made = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        x = torch.randn((3, *shape), generator=generator)
        x[1][x[0] < 0] = 0.0  # where no average has arrived
        if broken:
            x[1].flatten()[-1] = float("nan")
        waited = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        vectors = x[0].to(parameter), x[1].to(grad), x[2].to(velocity), waited
        if len(shape) == 4:
            vectors = tuple(y.to(memory_format=torch.channels_last) for y in vectors)
        made.append(Stepped(*vectors))
    return made


def test_a_kernel_that_does_not_move_weights_is_refused_at_a_rate_of_0_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spend = triton_tables.spend_

    def at_rest(table: Any, kinds: Any, shares: Any, reach: Any, *others: Any) -> None:
        spend(table, kinds, shares, 0.0, *others)

    monkeypatch.setattr(triton_tables, "spend_", at_rest)
    x = torch.ones(20)
    stepped = [Stepped(x.clone(), x.clone(), x.clone(), torch.zeros(20, dtype=torch.uint8))]
    with in_triton() as chosen, pytest.warns(UserWarning, match="compute something else"):
        Spending().spend_(stepped, Momentum(0.0, 0.9, 1.0, False))
        assert chosen.refused


@pytest.mark.parametrize("how", by_default(HOW, 2))
@pytest.mark.parametrize("kinds", KINDS[:1] + [pytest.param(x, marks=pytest.mark.thorough) for x in KINDS[1:]])
def test_what_is_spent_in_triton_is_what_is_spent_in_torch(how: str, kinds: tuple[torch.dtype, ...]) -> None:
    by, skip = HOW[how]
    for broken, steps in ((False, 1), (True, 1), (False, 0)):
        ours, theirs = (lists(*kinds, broken=broken) for _ in range(2))
        versions = [one.parameter._version for one in ours]
        with static_path():
            Spending().spend_(theirs, by, skip, steps)
            with in_triton() as chosen:
                Spending().spend_(ours, by, skip, steps)
                assert chosen.trouble is None
                assert len(chosen._tried) == 1
        for one, other, version in zip(ours, theirs, versions, strict=True):
            for found, expected in zip(one, other, strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            assert one.parameter._version > version


def test_parameters_of_each_kind_are_served_by_themselves() -> None:
    ours, theirs = ([one for kinds in KINDS for one in lists(*kinds)] for _ in range(2))
    doubles = [Stepped(*(x.double() for x in one[:3]), one.waited.clone()) for one in ours[:1]]
    apart = [Stepped(*(x.t() for x in one)) for one in lists(*KINDS[0])[:1]]
    with static_path():
        Spending().spend_(theirs, *HOW["plain"])
        with in_triton() as chosen:
            Spending().spend_(
                [*doubles, *ours, *apart, doubles[0]._replace(parameter=torch.ones(3, 5).double())], *HOW["plain"]
            )
            assert len(chosen._tried) == len(KINDS)
    assert all(
        torch.equal(x, y) for one, other in zip(ours, theirs, strict=True) for x, y in zip(one, other, strict=True)
    )


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    spend = triton_tables.spend_

    def wrong(table: Any, kinds: Any, shares: Tensor, *others: Any) -> None:
        spend(table, kinds, shares * 1.001, *others)

    monkeypatch.setattr(triton_tables, "spend_", wrong)
    ours, theirs = (lists(*KINDS[0]) for _ in range(2))
    with static_path():
        Spending().spend_(theirs, *HOW["plain"])
        with (
            in_triton() as chosen,
            pytest.warns(UserWarning, match="compute something else here than"),
        ):
            Spending().spend_(ours, *HOW["plain"])
            [reason] = chosen.refused.values()
            assert reason.startswith("parameter, (1000,) torch.float32, differs at ")
            assert "step=SGD's momentum" in reason
    assert all(
        torch.equal(x, y) for one, other in zip(ours, theirs, strict=True) for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("how", "operations", "bytes_each"), [("plain", 14, 81), ("with a flag", 18, 92)])
def test_without_triton_it_takes_few_operations(how: str, operations: int, bytes_each: float) -> None:
    numel, number = 1 << 20, 5
    by, skip = HOW[how]
    stepped = [
        Stepped(*torch.empty((3, numel), device=META), torch.empty(numel, device=META, dtype=torch.uint8))
        for _ in range(number)
    ]
    skip = None if skip is None else skip.to(META)
    spending = Spending()
    with no_waiting(), static_path():
        spending.spend_(stepped, by, skip)
        with Costs(META) as costs:
            spending.spend_(stepped, by, skip)
    assert costs.operations.total() <= operations, costs.operations
    assert costs.bytes.total() / numel / number == pytest.approx(bytes_each, abs=0.1)


def test_all_parameters_of_a_kind_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = [], triton_tables.launch
    monkeypatch.setattr(triton_tables, "launch", lambda *a, **k: (launched.append(a[1]), launch(*a, **k)))
    spending = Spending()
    with in_triton():
        spending.spend_(lists(*KINDS[0]), *HOW["plain"])
        spending.spend_(lists(*KINDS[0]), *HOW["plain"])
    assert launched == [1, len(SHAPES) + 1, len(SHAPES) + 1]  # one to see whether it works; one vector has two parts
