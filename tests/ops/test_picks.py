"""The compiled work on picks against the reference in operations of torch, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import ops
from lightning_sparse.core.layout import Gradient, InRuns
from lightning_sparse.core.messages import Steps
from lightning_sparse.core.step import Context, Selection
from lightning_sparse.engine.drivers import drive_ranks
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.methods.exchanges import as_exchange
from lightning_sparse.methods.exchanges.base import Picks
from lightning_sparse.methods.exchanges.reduce_union import union_of
from lightning_sparse.methods.memory import Residual
from lightning_sparse.ops import host
from lightning_sparse.ops.c import library, native
from lightning_sparse.ops.form import Form
from tests.covering import by_default, covering
from tests.ops.test_variants import bits, values


@pytest.fixture(autouse=True)
def _compiled(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled once, for all levels of instructions."""
    monkeypatch.setattr(native, "library", native.Native(library.load(built)[0]))


def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", None)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "subnormal", "inf", "wide"])
def test_the_largest_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cases = [
        (values(size, kind).abs(), k, more)
        for size in (1, 5, 64, 3001)
        for k in {1, size // 3 + 1, size}
        for more in (k, k + 1, size + 1)
    ]
    given = [((torch.arange(7, 7 + 3 * len(m), 3, dtype=torch.int32), m), k, more) for m, k, more in cases]
    found = [host._picked(*case) for case in given]
    uncompiled(monkeypatch)
    for ((indices, magnitudes), k, more), (picked, reached) in zip(given, found, strict=True):
        expected, bound = host._picked((indices, magnitudes), k, more)
        assert picked.tolist() == expected.tolist()
        # The next step begins with a bound that enough reach. It need not be the highest such bound.
        assert 0.8 * bound <= reached <= bound or magnitudes.min() < 0.01 * magnitudes.max()
        assert (magnitudes >= reached).sum() >= (more if more < len(magnitudes) else k)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_largest_and_those_of_a_stripe_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int
) -> None:
    cases = [
        (values(numel, kind), share, spare, turn, ranks)
        for numel in (50, 70_001)
        for turn in {0, ranks - 1}
        for share, spare in ((0, 1), (numel // 50, 0), (numel // 50, 3), (1, numel // 100), (numel // 9, numel // 9))
    ]
    found = [[x.tolist() for x in host.top_k_and_stripe(*case)] for case in cases]
    uncompiled(monkeypatch)
    assert found == [[x.tolist() for x in host.top_k_and_stripe(*case)] for case in cases]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros"])
def test_the_largest_of_runs_are_those_of_one_vector(
    monkeypatch: pytest.MonkeyPatch, kind: str, compiled: bool
) -> None:
    if not compiled:
        uncompiled(monkeypatch)
    for numel, cuts in ((50, [1, 7]), (70_001, [3, 64, 30_000, 30_001])):
        x = values(numel, kind)
        runs = InRuns(Gradient([run.clone() for run in x.tensor_split(cuts)]))
        for step in (1, 3, 7, 40):
            assert all(runs.every(step, first).tolist() == x[first::step].tolist() for first in (0, step - 1))
        for k in (1, numel // 50 + 1, numel // 2, numel):
            assert ops.top_k(runs, k).tolist() == ops.top_k(x, k).tolist()
        for share, spare in ((0, 1), (numel // 50, 3), (1, numel // 100), (numel // 9, numel // 9)):
            found, expected = (host.top_k_and_stripe(one, share, spare, 1, 3) for one in (runs, x))
            assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def recorded(steps: Steps[object], messages: list[bytes]) -> Steps[object]:
    answer = None
    while True:
        try:
            message = steps.send(answer)  # type: ignore[arg-type]  # None starts it
        except StopIteration as end:
            return end.value
        messages.append(message.x.numpy().tobytes())
        answer = yield message


def journey(name: str, exchange: str | None, numel: int, density: float, n: int, kind: str) -> list[bytes]:
    """What five steps send and leave, with a step that is skipped for "nan"."""
    sparsifier, memory = ls.sparsifiers.SPARSIFIERS.resolve(name), Residual()
    parts = {"memory": memory, "sparsifier": sparsifier}
    contexts = [Context(0, density, rank, n) for rank in range(n)]
    states = [init_group(numel, torch.float32, torch.device("cpu"), ctx, **parts) for ctx in contexts]
    happened: list[bytes] = []
    for step in range(5):
        grads: list[Tensor] = [values(numel, kind if kind != "nan" else "normal", n * step + i) for i in range(n)]
        if kind == "silent":
            grads = [grads[0], *(torch.zeros(numel) for _ in grads[1:])]
        if kind == "nan" and step == 2:
            grads[0][numel // 2] = float("nan")
        coroutines = [
            reduce_group(grad, state, ctx._replace(step=step), exchange=as_exchange(exchange, sparsifier), **parts)
            for grad, state, ctx in zip(grads, states, contexts, strict=True)
        ]
        skipped = kind == "nan" and step == 2
        states, statistics = zip(
            *drive_ranks([recorded(each, [] if skipped else happened) for each in coroutines]), strict=True
        )
        happened += [bits(grad.nan_to_num(nan=7.0)) for grad in grads]
        happened += [bits(state.memory.residual) for state in states]
        happened += [bits(statistic.union) for statistic in statistics]
    return happened


KINDS_OF_STEPS = ["normal", "ties", "nan", "zeros", "subnormal", "wide", "silent"]


@pytest.mark.parametrize(
    ("name", "exchange", "kind"),
    by_default(
        [
            *product(["union_top_k"], [None], KINDS_OF_STEPS),
            *by_default(product(["top_k"], ["packed_union"], KINDS_OF_STEPS), 3),
            *by_default(product(["top_k"], [None], KINDS_OF_STEPS), 1),
        ],
        5,
    ),
)
def test_steps_send_and_leave_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, exchange: str | None, kind: str
) -> None:
    for numel, density, n in ((5, 0.4, 2), (997, 0.05, 3), (70_000, 0.01, 5), (131_072, 0.0005, 2)):
        found = journey(name, exchange, numel, density, n, kind)
        with monkeypatch.context() as patch:
            uncompiled(patch)
            assert journey(name, exchange, numel, density, n, kind) == found


def test_a_pick_outside_of_the_group_is_an_error() -> None:
    compiled, acc = ops.compiled(torch.device("cpu")), torch.zeros(4)
    assert compiled is not None
    outside = torch.tensor([4])
    with pytest.raises(IndexError, match="vector of 4"):
        compiled.tell(acc, outside, None, 1, 9, Form.of(3, 1))
    for second, tops in ((None, None), (acc, outside.to(torch.uint8))):
        with pytest.raises(IndexError, match="vector of 4"):
            compiled.round(acc, second, outside, outside, tops, 0, 0, 9, 0, False, 0, 0.0)


def test_a_union_is_as_long_as_promised_where_a_rank_raises_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It offers a coordinate that was not to be picked; all ranks' messages must have one length all the same."""
    selection = Selection(torch.tensor([5]), torch.tensor(1), None, total=1)
    picks = Picks([torch.tensor([5]), torch.tensor([0])], None, torch.tensor([1, 1]))
    ctx = Context(0, 0.01, 0, 2)
    found = union_of(picks, selection, 100, ctx)
    uncompiled(monkeypatch)
    expected = union_of(picks, selection, 100, ctx)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert found.indices.tolist() == [0]


def test_picks_need_not_lie_side_by_side() -> None:
    assert native.library is not None
    tell = native.library.tell
    acc, indices, spare = values(101, "normal"), torch.arange(100)[1::25], (torch.arange(8) % 3 == 0)[::2]
    assert not indices.is_contiguous()
    for given in (indices, indices.int()):
        words = tell(acc, given, spare, 4, 1000, Form.of(100, 4))
        plain = tell(acc, indices.contiguous(), spare.contiguous(), 4, 1000, Form.of(100, 4))
        assert words.tolist() == plain.tolist()


def exchanged(n: int, numel: int, kind: str, ascend: bool, beside: bool = True) -> list[list[bytes]]:
    """Of each rank, what an exchange of values gives, with or without second values beside them."""
    accs, coroutines = [], []
    for rank in range(n):
        acc, second = values(numel + 1, kind, rank), values(numel + 1, "wide", n + rank).square()
        second[::7], acc[numel], second[numel] = 0, 0, 0
        second[second.isinf()] = torch.finfo(torch.float32).max
        order = torch.randperm(numel, generator=torch.Generator().manual_seed(rank))[: max(1, numel // 40)]
        indices = order.sort().values if ascend else order
        selection = Selection(
            indices, torch.tensor(len(order)), spare=torch.arange(len(order)) % 3 == 0, limit=len(order), aligned=True
        )
        ctx = Context(5, 0.1, rank, n, second=second if beside else None)
        coroutines.append(as_exchange("packed_union", ls.sparsifiers.UnionTopK())(acc, selection, ctx))
        accs.append((acc, bits(acc)))
    updates = drive_ranks(coroutines)  # type: ignore[arg-type]
    assert all(bits(acc) == before for acc, before in accs), "it has been written to"
    return [[bits(x) for x in update if isinstance(x, Tensor)] for update in updates]


KINDS_OF_VALUES = ["normal", "ties", "zeros", "subnormal", "wide", "inf", "nan"]


@pytest.mark.parametrize(
    ("n", "numel", "kind"),
    [
        *covering(((*group, kind) for group in [(2, 300), (1, 90)] for kind in KINDS_OF_VALUES), together=1),
        *covering(
            (
                (*group, kind)
                for group in [(5, 9000), (3, 200_000), (17, 3000), (20, 70_000)]
                for kind in KINDS_OF_VALUES[::-1]
            ),
            together=1,
        ),
    ],
)
def test_values_and_second_values_travel_as_in_operations_on_tensors(
    n: int, numel: int, kind: str, each_kernel: Callable[[], Iterator[str]]
) -> None:
    for ascend, beside in ((True, True), (False, True), (True, False)):
        expected = None
        for kernel in each_kernel():
            found = exchanged(n, numel, kind, ascend, beside)
            expected = expected or found
            assert found == expected, (kernel, ascend, beside)


@pytest.mark.parametrize("kind", ["strided", "wide", "narrow", "short"])
def test_second_values_of_another_form_are_read_as_tensors_are(kind: str) -> None:
    acc = values(101, "normal", 1)
    acc[100] = 0
    whole = acc.square()
    given = {
        "strided": torch.stack([whole, -whole], 1)[:, 0],
        "wide": whole.double(),
        "narrow": whole.bfloat16(),
        "short": whole[:40],
    }[kind]
    indices = torch.arange(0, 100, 9)
    selection = Selection(indices, torch.tensor(len(indices)), aligned=True)

    def mean(second: Tensor) -> Tensor:
        steps = [
            as_exchange("packed_union", ls.sparsifiers.UnionTopK())(
                acc.clone(), selection, Context(0, 0.1, rank, 2, second=second)
            )
            for rank in range(2)
        ]
        [first, _] = drive_ranks(steps)  # type: ignore[arg-type]
        assert first.second is not None
        return first.second

    if kind == "short":
        with pytest.raises(IndexError):
            mean(given)
    else:
        torch.testing.assert_close(mean(given).float(), mean(given.float().contiguous()), rtol=0.01, atol=0)


@pytest.mark.parametrize("beside", [False, True])
def test_picks_are_spare_only_where_spare_ones_are_told(beside: bool, each_kernel: Callable[[], Iterator[str]]) -> None:
    acc = values(101, "normal", 1)
    acc[100] = 0
    selection = Selection(torch.arange(4), torch.tensor(4), limit=2, aligned=True)
    ctx = Context(0, 0.1, 0, 3, second=acc.square() if beside else None)
    found = []
    for marks in (marks for _ in each_kernel() for marks in (0, 0x8080)):
        steps = as_exchange("packed_union", ls.sparsifiers.UnionTopK())(acc.clone(), selection, ctx)
        rows = next(steps).x.repeat(3, 1)  # type: ignore[arg-type]
        rows[:, Form.of(100, 4).classes] |= marks  # of picks 1 and 3
        try:
            steps.send(steps.send(rows).x)  # type: ignore[arg-type, union-attr]
        except StopIteration as end:
            found.append(end.value.indices.tolist())
    assert len(found) > 1
    assert found == [found[0]] * len(found)
