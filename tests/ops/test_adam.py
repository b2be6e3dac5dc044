"""Adam's steps on a device: in Triton's interpreter, and in few operations of torch, against plain formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_sparse.core.layout import shaped
from lightning_sparse.ops import adam
from lightning_sparse.ops.adam import Moved, Sparse, Step, Steps
from tests.costs import META, Costs
from tests.ops.interpreted import in_triton, interpret
from tests.ops.test_no_host_sync import no_waiting

interpret()

pytestmark = pytest.mark.usefixtures("silent")

from lightning_sparse.ops.addresses import PART  # noqa: E402

SHAPES = [(3, 5), (1,), (PART + 7,), (2, 3, 2, 2)]
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]
ONE = torch.ones(())
HOW: dict[str, tuple[Step, float]] = {
    "plain": (Step(0.3, 1.0), 1.0),
    "with decay": (Step(0.3, 0.96), 1.0),
    "rates on the device": (Step(0.3 * ONE, (0.96 * ONE).double()), 1.0),
    "scaled": (Step(0.3, 0.96, 7 * ONE, 0 * ONE), 7.0),
    "none": (Step(0.3, 0.96, 7 * ONE, ONE), 7.0),
}


def lists(weight: torch.dtype, grad: torch.dtype) -> list[Moved]:
    generator, made = torch.Generator().manual_seed(0), []
    for shape in SHAPES:
        x = torch.randn((3, *shape), generator=generator)
        x[1][x[0] < 0] = 0.0  # where no average has arrived
        divisor = x[2].abs()
        divisor[x[1] == 0] = 0.0
        parameter = x[0].to(weight)
        if len(shape) == 4:
            parameter, divisor = (y.to(memory_format=torch.channels_last) for y in (parameter, divisor))
        made.append(Moved(parameter, x[1].to(grad).as_strided(parameter.shape, parameter.stride()), divisor + 1e-8))
    return made


def expected(one: Moved, by: Step, scale: float) -> Tensor:
    if by.skip is not None and by.skip > 0:
        return one.parameter.clone()
    p, g, rate, keep = one.parameter.float(), one.grad.float() / scale, *map(torch.as_tensor, by[:2])
    return (p * keep.float() - g / one.divisor * rate.float()).to(one.parameter.dtype)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("weight", "grad"), DTYPES[:1] + [pytest.param(*x, marks=pytest.mark.thorough) for x in DTYPES[1:]]
)
def test_steps_are_rounded_one_by_one_in_triton_as_in_torch(how: str, weight: torch.dtype, grad: torch.dtype) -> None:
    by, scale = HOW[how]
    moved = lists(weight, grad)
    wanted = [expected(one, by, scale) for one in moved]
    in_torch = [one._replace(parameter=one.parameter.clone()) for one in moved]
    adam._in_torch(in_torch, by)
    versions = [one.parameter._version for one in moved]
    with in_triton() as chosen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "HOST", "none")
        Steps().take_(moved, by)
        assert chosen.trouble is None
        assert len(chosen._tried) == 1
    for one, other, right, version in zip(moved, in_torch, wanted, versions, strict=True):
        assert torch.equal(one.parameter, right)
        assert torch.equal(other.parameter, right)
        assert one.parameter._version > version


def arrivals() -> tuple[Sparse, list[Tensor], Tensor, Tensor]:
    """Averages at some coordinates of a group, one of them twice, with padding; one parameter belongs to others.

    Also the parameters, and averages and divisors at all coordinates.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, generator=generator) for shape in [(3, 5), (40,), (700, 30), (2, 3, 2, 2), (1,)]]
    parameters[3] = parameters[3].to(memory_format=torch.channels_last)
    numel = sum(p.numel() for p in parameters)
    places = torch.randperm(numel, generator=generator)[: numel // 2].sort().values
    values, divisors = torch.randn((2, len(places)), generator=generator)
    values[::7], divisors = 0.0, divisors.abs() + 1e-8
    grad, whole = torch.zeros(numel).index_copy_(0, places, values), torch.ones(numel).index_copy_(0, places, divisors)
    slots = torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(len(places)), torch.zeros(3, dtype=torch.int64)])
    indices = torch.cat([places[:1], places, torch.full((3,), numel)])
    offered = [p if number != 1 else p.numel() for number, p in enumerate(parameters)]
    return Sparse(offered, indices, values[slots], divisors[slots]), parameters, grad, whole


@pytest.mark.parametrize("how", HOW)
def test_steps_are_taken_where_averages_have_arrived(how: str) -> None:
    by, _ = HOW[how]
    arrived, parameters, grad, whole = arrivals()
    sizes = [p.numel() for p in parameters]
    parts = zip(parameters, grad.split(sizes), whole.split(sizes), strict=True)
    moved = [Moved(p.clone(), shaped(g, p), shaped(d, p)) for p, g, d in parts]
    wanted = [expected(one, by, 1.0) for one in moved]
    before, versions = [p.clone() for p in parameters], [p._version for p in parameters]
    with in_triton() as chosen:
        took = Steps().take_at_(arrived, by)
        assert chosen.trouble is None and not chosen.refused
    assert took == (by.scale is None)
    for number, (p, right) in enumerate(zip(parameters, wanted, strict=True)):
        stays = not took or number == 1
        assert torch.equal(p, before[number] if stays else right)
        assert (p._version > versions[number]) != stays


def test_other_steps_are_left_to_those_that_know_all_divisors() -> None:
    arrived, *_ = arrivals()
    narrow = [x.bfloat16() if isinstance(x, Tensor) else x for x in arrived.parameters]
    apart = [x[:, ::2] if isinstance(x, Tensor) and x.dim() == 2 else x for x in arrived.parameters]
    with in_triton() as chosen:
        for other in (
            arrived._replace(parameters=narrow),
            arrived._replace(parameters=apart),
            arrived._replace(values=arrived.values.double()),
            arrived._replace(indices=arrived.indices[:0]),
        ):
            assert not Steps().take_at_(other, HOW["plain"][0])
        chosen.trouble = "none today"
        assert not Steps().take_at_(arrived, HOW["plain"][0])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.0 * ONE])
def test_kernels_that_do_nothing_are_refused_at_a_rate_of_0_too(
    sparse: bool, rate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_sparse.ops.triton import tables

    for name in ("step_", "step_at_"):
        monkeypatch.setattr(tables, name, lambda *_: None)
    monkeypatch.setattr(adam, "HOST", "none")
    by = Step(rate, 1.0 if isinstance(rate, float) else ONE)
    with in_triton() as chosen, pytest.warns(UserWarning, match="compute something else"):
        if sparse:
            assert not Steps().take_at_(arrivals()[0], by)
        else:
            Steps().take_(lists(torch.float32, torch.float32), by)
        assert chosen.refused


class Largest(TorchDispatchMode):
    """The largest number of elements that an operation gives out, all tensors of one together; but for views."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            made = [x for x in (out if isinstance(out, list | tuple) else [out]) if isinstance(x, Tensor)]
            self.elements = max(self.elements, sum(x.numel() for x in made))
        return out


@pytest.mark.parametrize("how", ["with decay", "scaled"])
def test_operations_of_torch_take_a_bounded_room_on_the_way(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by, _ = HOW[how]
    monkeypatch.setattr(adam, "PIECE", 1000)
    generator = torch.Generator().manual_seed(0)
    shapes = [(700,), (50, 130), (3,), (40, 30, 5, 2), (2, 450)]
    moved = [Moved(*torch.randn((3, *shape), generator=generator).abs().unbind()) for shape in shapes]
    at_once = [one._replace(parameter=one.parameter.clone()) for one in moved]
    adam._at_once(at_once, by)
    with Largest() as largest:
        adam._in_torch(moved, by)
    assert 0 < largest.elements <= 1000
    assert all(torch.equal(one.parameter, other.parameter) for one, other in zip(moved, at_once, strict=True))


def test_tables_are_made_again_where_something_has_moved() -> None:
    steps, by = Steps(), Step(0.5, 1.0)
    with in_triton(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "HOST", "none")
        parameter = torch.zeros(9)
        for number in range(3):
            grad = torch.full((9,), 2.0**number)
            steps.take_([Moved(parameter, grad, torch.ones(9))], by)
        assert parameter.tolist() == [-3.5] * 9
        assert len(steps._addresses) == 1


def test_what_there_is_no_kernel_for_is_left_to_torch() -> None:
    x = torch.ones(4, 6)
    numbers = Step(0.5, 1.0)
    with in_triton() as chosen:
        assert adam._serves(Moved(x, x, x), numbers)
        assert not adam._serves(Moved(x.double(), x.double(), x.double()), numbers)
        assert not adam._serves(Moved(x[:0], x[:0], x[:0]), numbers)
        assert not adam._serves(Moved(x.t(), x.t(), x.t()), numbers)
        assert not adam._serves(Moved(x, x.t().contiguous().t(), x), numbers)
        chosen.trouble = "none today"
        assert not adam._serves(Moved(x, x, x), numbers)


@pytest.mark.parametrize(
    ("how", "operations", "bytes_each"), [("plain", 3, 32), ("with decay", 4, 40), ("scaled", 12, 68)]
)
def test_without_triton_steps_take_few_operations(how: str, operations: int, bytes_each: float) -> None:
    numel, number = 1 << 20, 5
    by = Step(*(x.to(META) if isinstance(x, Tensor) else x for x in HOW[how][0]))
    moved = [Moved(*torch.empty((3, numel), device=META)) for _ in range(number)]
    with no_waiting(), Costs(META) as costs:
        Steps().take_(moved, by)
    assert costs.operations.total() <= operations, costs.operations
    assert costs.bytes.total() / numel / number == pytest.approx(bytes_each, abs=0.1)
