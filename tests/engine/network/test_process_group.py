"""Bytes on the wire by hand, and one rank without a process group."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec, module_from_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.core.messages import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Message,
    Meter,
    SendRecv,
    Steps,
    ring_all_reduce_bytes,
)
from lightning_sparse.engine.drivers import drive_mirrored
from lightning_sparse.engine.network import LostRankError, TorchCollective
from tests.ranks import Ranks, error_of


# Ring algorithms over 4 ranks: an all-gather passes each contribution through 3 other ranks; an all-reduce moves 3/4 of
# the payload twice; broadcast and all-to-all move 3/4 of it once. What is given to one rank moves as it is.
# 40 float32 are 160 bytes.
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (lambda x: AllGather(x), 480),
        (lambda x: AllReduce(x), 240),
        (lambda x: Broadcast(x, 2), 120),
        (lambda x: AllToAll(x), 120),
        (lambda x: SendRecv(x, 2, 0), 160),
        (lambda x: SendRecv(x, 2, None), 160),
        (lambda x: SendRecv(x, None, 0), 0),
        (lambda x: SendRecv(x, None, None), 0),
    ],
)
def test_messages_count_the_bytes_of_ring_algorithms(message: Callable[[Tensor], Message], expected: float) -> None:
    assert message(torch.ones(4, 10)).bytes_sent(4) == expected
    assert message(torch.ones(4, 10, dtype=torch.bfloat16)).bytes_sent(4) == expected / 2


def test_one_rank_sends_nothing() -> None:
    x = torch.ones(1, 10)
    for message in (AllGather(x), AllReduce(x), Broadcast(x, 0), AllToAll(x), SendRecv(x, None, None)):
        assert message.bytes_sent(1) == 0


def test_a_meter_sums_over_messages_and_passes_answers_on() -> None:
    def asks() -> Steps[Tensor]:
        rows = yield AllGather(torch.ones(2))
        return (yield AllReduce(rows.sum(0)))

    meter = Meter(4)
    total, messages = drive_mirrored(meter.watch(asks()), 4)
    assert total.tolist() == [16, 16]
    assert [message.kind for message in messages] == ["all_gather", "all_reduce"]
    assert meter.bytes_sent == 3 * 8 + 1.5 * 8


@pytest.mark.parametrize(("n", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_ring_all_reduce_sends_almost_twice_the_payload(n: int, factor: float) -> None:
    assert ring_all_reduce_bytes(1000, n) == factor * 1000


def test_without_a_process_group_there_is_one_rank_and_results_are_what_it_brought() -> None:
    for comm in (TorchCollective(), TorchCollective.of_its_own()):
        x = torch.tensor([1.0, 2.0])
        assert (comm.rank, comm.world_size) == (0, 1)
        assert comm.all_gather(x).tolist() == [[1.0, 2.0]]
        assert comm.all_gather(torch.tensor(3)).tolist() == [3]
        assert comm.all_reduce(x).tolist() == [1.0, 2.0]
        assert comm.broadcast(x, 0).tolist() == [1.0, 2.0]
        assert comm.all_to_all(x.unsqueeze(0)).tolist() == [[1.0, 2.0]]
        comm.close()
        comm.close()  # twice does no harm


# What libraries raise, cut short.
LOSSES = [
    RuntimeError("[/build/gloo/transport/tcp/pair.cc:551] Connection closed by peer [127.0.0.1]:3"),
    RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection reset by peer"),
    RuntimeError("[/build/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation"),
    RuntimeError("Application timeout caused pair closure"),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
    dist.DistBackendError(
        "NCCL error in: x.cpp:1, remote process exited or there was a network error\nncclRemoteError: "
    ),
    dist.DistBackendError("NCCL communicator was aborted on rank 0."),
]
OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    dist.DistBackendError("NCCL error in: x.cpp:1, invalid usage\nncclInvalidUsage: Duplicate GPU detected : rank 1"),
    dist.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error\nCuda failure 2 'out of memory'"),
    RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
    RuntimeError("output tensor must have the same type as input tensor"),
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], TorchCollective]:
    """Rank 0 of two, whose collectives raise."""

    def made(error: Exception) -> TorchCollective:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        replaced = {"is_initialized": lambda: True, "get_rank": lambda *_: 0, "get_world_size": lambda _: 2}
        for name, value in {**replaced, "all_reduce": fail}.items():
            monkeypatch.setattr(dist, name, value)
        return TorchCollective()

    return made


@pytest.mark.parametrize("error", LOSSES, ids=str)
def test_a_rank_that_is_gone_is_told(failing: Callable, error: RuntimeError) -> None:
    with pytest.raises(LostRankError, match="Rank 0 lost another rank in all_reduce") as raised:
        failing(error).all_reduce(torch.ones(1))
    assert raised.value.__cause__ is error
    assert str(error) in str(raised.value)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_stay_what_they_are(failing: Callable, error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised:
        failing(error).all_reduce(torch.ones(1))
    assert raised.value is error


def sum_of_short_integers() -> str:
    try:
        TorchCollective().all_reduce(torch.ones(3, dtype=torch.int16))
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


def test_what_a_backend_cannot_do_is_no_lost_rank(two_ranks: Ranks) -> None:
    assert two_ranks(sum_of_short_integers) == ["RuntimeError", "RuntimeError"]


def wait_for_a_device(name: str) -> tuple[str, float]:
    comm = TorchCollective()  # the default group, shared with others
    comm.listen(name)
    comm.all_reduce(torch.ones(1))
    if comm.rank == 1:
        comm.abort()
        return "", float(comm.all_reduce(torch.ones(1)))  # a shared group goes on
    begin = time.monotonic()
    try:
        comm.wait_until(lambda: False, "a sum")
    except LostRankError as error:
        comm.all_reduce(torch.ones(1))
        return str(error), time.monotonic() - begin
    return "nothing", 0.0


def test_a_rank_that_waits_for_its_device_hears_of_one_that_cannot_go_on(two_ranks: Ranks) -> None:
    for name in ("first", "second"):  # a key is read by those that it is meant for
        (message, waited), (_, total) = two_ranks(wait_for_a_device, name)
        assert message.startswith("Rank 0 lost another rank in a sum")
        assert message.endswith("Rank 1 has failed.")
        assert waited < 10
        assert total == 2


def test_waiting_for_a_device_ends_when_it_is_done() -> None:
    answers = iter([False, False, True])
    TorchCollective().wait_until(lambda: next(answers), "a sum")
    assert list(answers) == []


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def share(backend: str, device: torch.device) -> tuple[bool, float]:
    """Whether the given group is used itself; then the engine ends, and the given group must still work."""
    given = dist.group.WORLD
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: backend)
        comm = TorchCollective.over(given, None, device)
    shared = comm.group is given
    assert float(comm.all_reduce(torch.ones(1))) == 2
    comm.abort()
    comm.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    return shared, float(total)


@pytest.mark.parametrize(
    ("backend", "device", "shared"),
    [
        ("nccl", CUDA, True),
        ("nccl", CPU, False),
        ("gloo", CUDA, False),
        ("gloo", CPU, False),
    ],
)
def test_inside_hooks_on_cuda_ddps_own_group_is_used_and_stays(
    two_ranks: Ranks, backend: str, device: torch.device, shared: bool
) -> None:
    assert two_ranks(share, backend, device) == [(shared, 2.0)] * 2


def gives_up_beside_its_thread() -> tuple[str, str]:
    """Rank 1 gives up while its own thread waits for rank 0, which comes later."""
    comm, said = TorchCollective.of_its_own(), []
    comm.all_reduce(torch.ones(1))
    if comm.rank == 0:
        time.sleep(0.5)
        return error_of(comm.broadcast, torch.ones(1), 1), ""
    wait = comm.start(AllReduce(torch.ones(1 << 21)))
    thread = threading.Thread(target=lambda: said.append(error_of(wait)))
    thread.start()
    time.sleep(0.2)
    comm.abort()
    thread.join(5)
    return "".join(said), error_of(comm.broadcast, torch.ones(1), 1)


def test_a_rank_that_gives_up_ends_what_its_other_threads_wait_for(two_ranks: Ranks) -> None:
    (said, _), (of_thread, later) = two_ranks(gives_up_beside_its_thread)
    assert "lost another rank" in said
    assert "lost another rank" in of_thread
    assert "has ended on this rank" in later


def give_back() -> str:
    comm = TorchCollective.of_its_own()
    comm.close()
    return error_of(comm.all_reduce, torch.ones(1))


def test_a_group_that_was_given_back_is_not_replaced_by_the_default_one(two_ranks: Ranks) -> None:
    told = "RuntimeError: The exchange has ended on this rank, which cannot take part in all_gather any more."
    assert two_ranks(give_back) == [told] * 2


class Given:
    """Stands for a process group."""

    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1

    def recv(self, *_: Any) -> Any:
        raise RuntimeError("nobody is there")


@pytest.mark.parametrize(("backends", "aborted"), [("cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 1), ("cpu:gloo", 0)])
def test_groups_of_nccl_are_aborted_also_beside_gloo(
    backends: str, aborted: int, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm, given, destroyed = TorchCollective(), Given(), []
    comm.group, comm._owned = given, True  # type: ignore[assignment]
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: backends)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroyed.append)
        comm.abort()
    assert (given.aborted, destroyed) == (aborted, [given])


def test_the_group_between_hosts_beside_a_shared_one_keeps_the_timeout(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple] = []
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    comm = TorchCollective.over(dist.group.WORLD, timedelta(seconds=7), CUDA)
    comm.world_size = 2
    assert comm.timeout is None  # it is not that of the shared group
    monkeypatch.setattr(TorchCollective, "of_its_own", lambda _, *given: made.append(given))
    comm.between_hosts()
    assert made == [(comm.group, timedelta(seconds=7), "gloo", ())]


def test_the_module_is_imported_where_torch_has_no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.delattr(dist, name, raising=False)
    spec = find_spec("lightning_sparse.engine.network")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))


def facts() -> list[list[str]]:
    """Facts of two departures, to the second of which rank 1 comes later."""
    comm = TorchCollective.of_its_own()
    comm.listen("twice")
    found = [comm.leave(f"{dist.get_rank()} first")]
    time.sleep(0.5 * dist.get_rank())
    found.append(comm.leave(f"{dist.get_rank()} second"))
    comm.close()
    return found


def test_each_departure_has_facts_of_its_own(two_ranks: Ranks) -> None:
    assert two_ranks(facts) == [[["0 first", "1 first"], ["0 second", "1 second"]]] * 2


def attach_to_a_group_of_some() -> str:
    groups, told = [dist.new_group([0, 1]), dist.new_group([0, 2])], ""
    if dist.get_rank() < 2:
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32), process_group=groups[0])
        with pytest.raises(RuntimeError, match="equally many process groups") as caught:
            ls.attach(ddp)
        told = str(caught.value)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return told


def test_ranks_in_other_groups_do_not_wait_for_each_other(three_ranks: Ranks) -> None:
    first, second, third = three_ranks(attach_to_a_group_of_some)
    assert first == second != third
