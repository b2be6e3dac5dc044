"""Coroutines that ask for messages: one by one, several together, n ranks in one process, and without a network."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import (
    LARGE,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Message,
    Meter,
    SendRecv,
    Steps,
    in_hops,
    together,
)
from lightning_sparse.core.step import Context
from lightning_sparse.engine.ahead import Ahead
from lightning_sparse.engine.drivers import drive, drive_ranks, drive_together
from lightning_sparse.engine.network import TorchCollective, send
from lightning_sparse.engine.pipeline import init_group, reduce_group
from lightning_sparse.tools.traffic import count_bytes
from tests.contract.cases import CASES, PAIR_NAMES, PAIRS, Case, kinds
from tests.covering import covering, in_one_test
from tests.lockstep import Ranks as SimulatedRanks
from tests.lockstep import equal_states, noise, strict
from tests.ranks import Ranks
from tests.static_path import static_path

DENSITY = 0.2
SIZES = [257, 600, 301]
"""Of the groups of a step; all methods serve them."""


class Groups:
    """Some groups of one rank, with a method each."""

    def __init__(self, methods: list[tuple[ls.sparsifiers.Sparsifier, str]], rank: int, n: int) -> None:
        self.methods, self.first, self.number = methods, Context(0, DENSITY, rank, n), 0
        self.states = [
            init_group(
                numel,
                torch.float64,
                torch.device("cpu"),
                self.first,
                memory=ls.memories.Residual(),
                sparsifier=sparsifier,
            )
            for numel, (sparsifier, _) in zip(SIZES, methods, strict=True)
        ]
        self.grads: list[Tensor] = []

    def steps(self) -> list[Steps[Any]]:
        """The coroutines of the next step, one for each group."""
        rank, n = self.first.rank, self.first.world_size
        self.grads = [noise(n, numel, seed=10 * self.number + place)[rank] for place, numel in enumerate(SIZES)]
        parts = zip(self.grads, self.states, self.methods, strict=True)
        ctx, self.number = self.first._replace(step=self.number), self.number + 1
        return [
            reduce_group(
                grad,
                state,
                ctx,
                memory=ls.memories.Residual(),
                sparsifier=sparsifier,
                exchange=ls.exchanges.EXCHANGES.resolve(exchange),
            )
            for grad, state, (sparsifier, exchange) in parts
        ]

    def finish(self, results: list[Any]) -> tuple[Any, ...]:
        """Everything that a step leaves behind on this rank."""
        self.states, statistics = (list(part) for part in zip(*results, strict=True))
        seen = [(s.counts, s.union, s.indices, s.threshold, s.bytes_sent) for s in statistics]
        residuals = [ls.memories.Residual().residual(state.memory).clone() for state in self.states]
        return (*self.grads, *seen, *residuals, *(state[1:] for state in self.states))


def alike(case: Case, exchange: str) -> list[tuple[ls.sparsifiers.Sparsifier, str]]:
    return [(case.sparsifier, exchange)] * len(SIZES)


MIXED = [
    (ls.sparsifiers.UnionTopK(), "packed_union"),
    (ls.sparsifiers.Everything(), "dense"),
    (ls.sparsifiers.MiCRO(), "reduce_union"),
]


@pytest.mark.thorough
@in_one_test("case, exchange, n", covering(((*pair, n) for pair in PAIRS for n in (3, 1)), together=1, seen_as=kinds))
def test_groups_together_end_as_they_do_one_after_another(case: Case, exchange: str, n: int) -> None:
    end_as_they_do_one_after_another(alike(case, exchange), n)


@pytest.mark.parametrize("n", [3, 1])
def test_groups_of_several_kinds_end_as_they_do_one_after_another(n: int) -> None:
    end_as_they_do_one_after_another(MIXED, n)


def end_as_they_do_one_after_another(methods: list[tuple[ls.sparsifiers.Sparsifier, str]], n: int) -> None:
    apart, joined = ([Groups(methods, rank, n) for rank in range(n)] for _ in range(2))
    for _ in range(2):
        by_group = zip(*(groups.steps() for groups in apart), strict=True)
        results = list(zip(*(drive_ranks([strict(s) for s in steps]) for steps in by_group), strict=True))
        expected = [groups.finish(list(own)) for groups, own in zip(apart, results, strict=True)]
        results = drive_ranks([strict(together(groups.steps())) for groups in joined])
        found = [groups.finish(own) for groups, own in zip(joined, results, strict=True)]
        assert all(equal_states(a, b) for a, b in zip(found, expected, strict=True))


Calls = list[tuple[str, torch.dtype]]


def both_ways(names: list[str]) -> dict[str, tuple[Any, Any, list[Calls], Calls]]:
    """What this rank ends with when groups talk one after another and together, and the collectives of a step."""
    comm, found = TorchCollective.of_its_own(), {}
    for name in names:
        methods = MIXED if name == "mixed" else alike(*PAIRS[PAIR_NAMES.index(name)])
        apart, joined = (Groups(methods, comm.rank, comm.world_size) for _ in range(2))
        for _ in range(2):
            calls: list[Calls] = []

            def note(message: Message, comm: TorchCollective, calls: list[Calls] = calls) -> Tensor:
                calls[-1].append((message.kind, message.x.dtype))
                return send(message, comm)

            results = []
            for steps in apart.steps():
                calls.append([])
                results.append(drive(steps, comm, note))
            calls.append([])
            one, other = apart.finish(results), joined.finish(drive_together(joined.steps(), comm, note))
            assert equal_states(one, other), name
        found[name] = one[: len(SIZES)], other[: len(SIZES)], calls[:-1], calls[-1]
    comm.close()
    return found


@pytest.mark.thorough
def test_between_two_real_ranks_groups_end_the_same_bit_for_bit_with_fewer_collectives(two_ranks: Ranks) -> None:
    names = [name for name, (case, exchange) in zip(PAIR_NAMES, PAIRS, strict=True) if is_natural(case, exchange)]
    results = two_ranks(both_ways, [*names, "mixed"])
    for name in names:
        (one, joined, apart, calls), (other, *_) = (result[name] for result in results)
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, joined, other, strict=True))
        expected: Counter[Any] = Counter()
        for in_round in zip_longest(*apart):
            asked = Counter(call for call in in_round if call is not None)
            for kind in {kind for kind, _ in asked}:
                dtypes = [dtype for each, dtype in asked if each == kind]
                dtype = dtypes[0] if len(dtypes) == 1 else torch.uint8
                sent = "all_gather" if kind == "all_reduce" else kind
                expected[sent, dtype] += asked[kind, dtype] if kind == "send_recv" else 1
        assert Counter(calls) == expected, name
    *_, calls = results[0]["union_top_k-packed_union"]
    assert calls == [("all_gather", torch.int32)] * 2
    # Indices and a survey; the indices of MiCRO; all sums.
    assert [kind for kind, _ in results[0]["mixed"][-1]] == ["all_gather"] * 3


def is_natural(case: Case, exchange: str) -> bool:
    return exchange == case.sparsifier.exchange or (case.name == "top_k" and exchange != "dense")


def asks(*messages: Message) -> Steps[list[Tensor]]:
    answers = []
    for message in messages:
        answers.append((yield message))
    return answers


def test_what_can_travel_as_one_message_does_and_every_coroutine_gets_its_slice() -> None:
    seen: list[tuple[str, torch.dtype, int]] = []

    def rank(i: int) -> Steps[Any]:
        x, words = torch.full((2, 3), float(i)), torch.full((2,), i)
        steps = [
            asks(AllReduce(x.clone()), AllGather(words)),
            asks(AllReduce(torch.tensor(i + 0.5)), AllGather(x)),
            asks(AllReduce(words.clone())),
            asks(AllGather(words[0]), AllGather(words.clone())),
            asks(Broadcast(words.clone(), 1), Broadcast(words[:1].clone(), 1)),
            asks(Broadcast(words + 10, 1), Broadcast(words.clone(), 0)),
            asks(AllToAll(x + torch.tensor([[0.0], [10.0]]))),
            asks(AllToAll(torch.stack([x, x + 20]))),
            asks(SendRecv(x, None if i else 1, 0 if i else None)),
        ]
        joined = together(steps)
        answer = None
        while True:
            try:
                message = joined.send(answer)
            except StopIteration as end:
                return end.value
            if i == 0:
                seen.append((message.kind, message.x.dtype, message.x.numel()))
            answer = yield message

    zero, one = drive_ranks([strict(rank(i)) for i in range(2)])
    floats, integers = torch.float32, torch.int64
    assert seen == [
        ("all_gather", integers, 1),
        ("all_gather", integers, 2),
        ("broadcast", integers, 4),
        ("broadcast", integers, 1),
        ("broadcast", integers, 2),
        ("send_recv", floats, 6),
        ("all_to_all", floats, 18),
        ("all_reduce", floats, 7),
        ("all_reduce", integers, 2),
        ("all_gather", torch.uint8, 48),  # two words of 8 bytes, and six of 4
    ]
    expected = [
        [[[1.0] * 3] * 2, [[0, 0], [1, 1]]],
        [2.0, [[[0.0] * 3] * 2, [[1.0] * 3] * 2]],
        [[1, 1]],
        [[0, 1], [[0, 0], [1, 1]]],
        [[1, 1], [1]],
        [[11, 11], [0, 0]],
    ]
    for found in (zero, one):
        assert [[answer.tolist() for answer in answers] for answers in found[:6]] == expected
    assert zero[6][0].tolist() == [[0.0] * 3, [1.0] * 3]
    assert one[6][0].tolist() == [[10.0] * 3, [11.0] * 3]
    assert one[7][0].tolist() == [[[20.0] * 3] * 2, [[21.0] * 3] * 2]
    assert (zero[8][0].numel(), one[8][0].tolist()) == (0, [[0.0] * 3] * 2)


def test_rows_of_an_all_to_all_may_be_single_numbers_or_empty() -> None:
    def rank(i: int) -> Steps[Any]:
        numbers, empty = torch.tensor([i, 10 + i]), torch.zeros(2, 0, 3, dtype=torch.int64)
        return together([asks(AllToAll(numbers)), asks(AllToAll(empty)), asks(AllToAll(numbers.view(2, 1, 1)))])

    [first], [second], [third] = drive_ranks([strict(rank(i)) for i in range(2)])[1]
    assert first.tolist() == [10, 11]
    assert second.shape == (2, 0, 3)
    assert third.tolist() == [[[10]], [[11]]]


DTYPES = [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.float64, torch.complex128]


@pytest.mark.parametrize("made", [AllGather, AllToAll, lambda x: Broadcast(x, 1)], ids=["gather", "to_all", "from_one"])
def test_messages_of_several_dtypes_travel_as_bytes_and_come_out_as_they_were(made: Any) -> None:
    """In every order, of every length: what follows an odd number of bytes can be read."""
    shapes = [(2, 3), (2,), (2, 0, 5), (2, 7)]

    def contents(i: int) -> list[Tensor]:
        gen = torch.Generator().manual_seed(i)
        return [torch.randn(shape, generator=gen).to(dtype) for shape in shapes for dtype in DTYPES]

    def rank(i: int, order: int) -> Steps[Any]:
        return together([asks(made(x)) for x in contents(i)[::order]])

    for order in (1, -1):
        alone = [drive_ranks([asks(made(x)) for x in pair]) for pair in zip(contents(0), contents(1), strict=True)]
        for found, expected in zip(
            zip(*drive_ranks([strict(rank(i, order)) for i in range(2)]), strict=True), alone[::order], strict=True
        ):
            for [one], [other] in zip(found, expected, strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sums_of_parts_are_those_in_the_order_of_ranks(n: int, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (5,), (n,), (2, 3, 11), (0,)):
        xs = [(1e3 * torch.randn(shape)).to(dtype) for _ in range(n)]
        total = xs[0].clone()
        for x in xs[1:]:
            total += x
        meters = [Meter(n) for _ in range(n)]
        steps = [meter.watch(in_hops(asks(AllReduce(x.clone())), n)) for meter, x in zip(meters, xs, strict=True)]
        for meter, [found] in zip(meters, drive_ranks(steps), strict=True):
            assert (found.dtype, found.shape) == (dtype, total.shape)
            assert torch.equal(found, total)
            padding = 0 if n == 2 else -xs[0].numel() % n
            padded = (xs[0].numel() + padding) * dtype.itemsize
            assert meter.bytes_sent == pytest.approx(AllReduce(xs[0].new_empty(padded // dtype.itemsize)).bytes_sent(n))


@pytest.mark.parametrize("n", [2, 3])
def test_sums_that_travel_together_are_without_gaps(n: int) -> None:
    """Compiled code reads them as they lie in memory, also where each rank has added up one number of each."""

    def rank(i: int) -> Steps[Any]:
        return together([in_hops(asks(AllReduce(torch.tensor([i, 10 * i]) + j)), n) for j in (0, 5)])

    for [one], [other] in drive_ranks([strict(rank(i)) for i in range(n)]):
        assert one.is_contiguous()
        assert other.is_contiguous()
        first, second = ([sum(i * m + j for i in range(n)) for m in (1, 10)] for j in (0, 5))
        assert (one.tolist(), other.tolist()) == (first, second)


def test_long_sums_and_those_of_devices_are_left_to_the_library() -> None:
    for x in (torch.ones(LARGE // 4), torch.ones(3, device="meta")):
        assert next(in_hops(asks(AllReduce(x)), 2)).x is x
    assert next(in_hops(asks(Broadcast(x, 1)), 2)).kind == "broadcast"


def noting(name: str, operation: Any, seen: set[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        seen.add(name)
        return operation(*args, **kwargs)

    return call


def summed_over_hosts(hosts: list[str], far: bool) -> tuple[bool, Any, Any, set[str]]:
    """Return whether ranks on these hosts send to all at once, their answers, and the operations of torch."""
    rank, seen = dist.get_rank(), set[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: hosts[rank])
        comm = TorchCollective.of_its_own()
        sent, comm.far = comm.one_hop, far
        for owner, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (Ahead, "send")):
            patch.setattr(owner, name, noting(name, getattr(owner, name), seen))
        x = torch.arange(5, dtype=torch.int32) + rank
        total, rows = comm.all_reduce(x.clone()), comm.all_gather(x.to(torch.bfloat16))
        [joined], [gathered] = drive_together([asks(AllReduce(x.clone())), asks(AllGather(x.bool()))], comm)
        assert torch.equal(joined, total)
        assert torch.equal(gathered, rows.bool())
        comm.close()
    return sent, total.tolist(), rows.tolist(), seen


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("hosts", "at_once"), [("aaaa", True), ("abcd", True), ("aabb", False), ("abbb", False)])
def test_ranks_send_to_all_at_once_unless_some_share_one_of_several_hosts(
    four_ranks: Ranks, hosts: str, at_once: bool, far: bool
) -> None:
    for sent, total, rows, seen in four_ranks(summed_over_hosts, list(hosts), far):
        assert sent is at_once
        assert total == [6, 10, 14, 18, 22]
        assert rows == [[float(i + rank) for i in range(5)] for rank in range(4)]
        assert seen == ({"send" if far else "all_to_all_single"} if at_once else {"all_reduce"})


def test_large_messages_are_sent_by_themselves_without_a_copy() -> None:
    large, small, tiny = torch.ones(LARGE // 4), torch.ones(LARGE // 4 - 1), torch.ones(9)
    steps = together([asks(AllReduce(x)) for x in (small, large, tiny, large, tiny)])
    asked, answer = [], None
    with suppress(StopIteration):
        while True:
            message = steps.send(answer)  # type: ignore[arg-type]
            asked.append(message.x)
            answer = message.x
    assert [x.numel() for x in asked] == [small.numel(), 18, large.numel(), large.numel()]
    assert asked[0] is small
    assert all(x is large for x in asked[2:])


def test_a_message_that_is_alone_is_not_copied() -> None:
    x = torch.ones(3)
    steps = together([asks(AllReduce(torch.ones(2))), asks(AllGather(x))])
    assert next(steps).x is x


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([AllReduce(torch.ones(1)), AllGather(torch.ones(1))], "ask for one thing.*all_gather.*all_reduce"),
        ([AllReduce(torch.ones(1)), AllReduce(torch.ones(2))], r"ask for one thing.*\(1,\).*\(2,\)"),
        ([AllReduce(torch.ones(1)), AllReduce(torch.ones(1).long())], "ask for one thing.*float32.*int64"),
        ([Broadcast(torch.ones(1), 0), Broadcast(torch.ones(1), 1)], "ask for one thing"),
        (
            [SendRecv(torch.ones(1), 1, None), SendRecv(torch.ones(1), None, None)],
            r"give .* \[\(0, 1\)\] and take \[\]",
        ),
        ([SendRecv(torch.ones(1), 0, 0), SendRecv(torch.ones(1), None, None)], "Expected each rank to give to one"),
        ([AllReduce(torch.ones(1)), None], "1 of 2 ranks have ended, and the others ask for all_reduce"),
    ],
)
def test_what_would_hang_between_real_ranks_is_an_error_in_one_process(messages: list[Any], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        drive_ranks([asks(*[message] * (message is not None)) for message in messages])


def test_in_one_process_answers_share_memory_with_nothing() -> None:
    xs = [torch.ones(2, 2), torch.ones(2, 2)]
    for made in (AllReduce, AllGather, AllToAll, lambda x: Broadcast(x, 0), lambda x: SendRecv(x, 1, 1)):
        kept = drive_ranks([asks(made(x)) for x in xs] if made(xs[0]).kind != "send_recv" else swapped(xs))
        for [answer] in kept:
            answer.fill_(7.0)
        assert all(bool((x == 1).all()) for x in xs)
        [first], [second] = drive_ranks([asks(made(x)) for x in xs] if made(xs[0]).kind != "send_recv" else swapped(xs))
        first.fill_(7.0)
        assert bool((second != 7).all())


def swapped(xs: list[Tensor]) -> list[Steps[list[Tensor]]]:
    return [asks(SendRecv(x, 1 - rank, 1 - rank)) for rank, x in enumerate(xs)]


# Bytes without a network

ON_CPU_EXACT = {"top_k", "shared_top_k", "union_top_k", "striped_top_k", "striped_top_k-single"}
ON_CPU_EXACT |= {"clt_k", "random_k", "gtop_k", "everything"}
UNLIMITED = {"hard_threshold", "ok_top_k", "micro-published", "exdyna-published"}
"""On the CPU their selections are as long as they come."""


@in_one_test(
    "case, exchange, dtype, static",
    covering(
        (
            (*pair, dtype, static)
            for pair in PAIRS
            for dtype in (torch.float32, torch.bfloat16)
            for static in (True, False)
        ),
        together=1,
        seen_as=kinds,
    ),
)
def test_bytes_are_counted_as_they_are_sent(case: Case, exchange: str, dtype: torch.dtype, static: bool) -> None:
    n, numel, density = 4, 1000, 0.05
    counted = count_bytes(case.sparsifier, numel, n, density, exchange=exchange, dtype=dtype)
    found = simulated(case, exchange, n, numel, density, dtype, static)
    if static or exchange == "dense" or (case.name in ON_CPU_EXACT and exchange == case.sparsifier.exchange):
        known = found[:1] if case.name == "mean_top_k" else found  # its spare picks follow the union from then on
        assert known == [pytest.approx(counted.bytes_sent)] * len(known)
    elif case.name not in UNLIMITED and not case.name.startswith("published"):
        assert all(sent <= counted.bytes_sent + 8 * (n - 1) for sent in found)


def simulated(
    case: Case, exchange: str, n: int, numel: int, density: float, dtype: torch.dtype, static: bool
) -> list[float]:
    """Mean bytes of the ranks in three steps."""

    def run() -> list[float]:
        ranks = SimulatedRanks(n, numel, sparsifier=case.sparsifier, exchange=exchange, density=density, dtype=dtype)
        steps = [ranks.step(noise(n, numel, seed=seed, dtype=dtype)).statistics for seed in range(3)]
        return [sum(s.bytes_sent for s in of_ranks) / n for of_ranks in steps]

    if not static:
        return run()
    with static_path():
        return run()


def test_messages_are_listed_in_order() -> None:
    counted = count_bytes("micro", 10_000, 4, 0.01)
    assert [kind for kind, _ in counted.messages] == ["all_gather", "all_gather", "all_reduce"]
    assert [nbytes for _, nbytes in counted.messages] == [4 * 32, 4 * (1 + 50), 4 * 100]
    assert counted.bytes_sent == 3 * 4 * 32 + 3 * 4 * 51 + 1.5 * 400


def test_groups_that_a_method_cannot_serve_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="Unknown sparsifier"):
        count_bytes("tpok", 100, 4, 0.1)
    with pytest.raises(ValueError, match="needs groups of at least"):
        count_bytes(ls.sparsifiers.ExDyna(variant="published"), 100, 4, 0.1)
    for wrong in ({"numel": 0}, {"world_size": 1.5}, {"density": 2}, {"memory": 3}):
        with pytest.raises(ValueError, match=r"^Expected "):
            count_bytes("top_k", **{"numel": 100, "world_size": 4, "density": 0.1} | wrong)
    assert all(count_bytes(case.sparsifier, 1000, 1, 0.1).bytes_sent == 0 for case in CASES)
