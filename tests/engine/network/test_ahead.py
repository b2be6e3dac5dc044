"""Messages from each rank to all others: they wait for nobody but their senders, and carry any tensor."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sparse.core.messages import AllGather
from lightning_sparse.engine import network
from lightning_sparse.engine.ahead import MOST, Ahead
from lightning_sparse.engine.network import LostRankError, TorchCollective
from tests.ranks import Ranks


class Noting:
    """A process group that keeps what it has begun to send."""

    def __init__(self) -> None:
        self.group: Any = dist.new_group()
        self.sent: list[Any] = []

    def recv(self, *given: Any) -> Any:
        return self.group.recv(*given)

    def send(self, *given: Any) -> Any:
        self.sent.append(self.group.send(*given))
        return self.sent[-1]


def leaves_before_the_other_rank_begins() -> None:
    rank, group = dist.get_rank(), Noting()
    ahead, rows = Ahead(group, rank, 2), torch.zeros(2, 3)
    for _ in range(3):
        ahead.send(rows, group).wait()
    dist.barrier()
    if rank == 1:
        dist.barrier()
    arrival = ahead.send(rows, group)
    group.sent[-1].wait(timedelta(seconds=10))  # raises if it is too late
    if rank == 0:
        dist.barrier()
    arrival.wait()
    ahead.close()
    dist.destroy_process_group(group.group)


def test_a_message_leaves_before_its_receiver_begins(two_ranks: Ranks) -> None:
    two_ranks(leaves_before_the_other_rank_begins)


def goes_on_writing() -> list[float]:
    comm, x, found = far_apart(), torch.zeros(MOST // 4), []
    for number in range(20):
        found.append(comm.all_gather(x.fill_(number)).sum().item() / MOST * 2)
    comm.close()
    return found


def test_what_was_sent_may_be_written_to_at_once(two_ranks: Ranks) -> None:
    assert two_ranks(goes_on_writing) == [[*range(20)]] * 2


def far_apart() -> TorchCollective:
    """Return the ranks, as if each had a host of its own, far from the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: str(dist.get_rank()))
        patch.setattr(network, "FAR", 0.0)
        comm = TorchCollective.of_its_own(timeout=timedelta(seconds=60))
    assert comm.far
    return comm


SENT = [
    torch.tensor(3.0),
    torch.tensor([True, False, True]),
    torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
    torch.empty(0, 2),
    torch.arange(5, dtype=torch.int16),
    torch.ones(MOST // 4 + 1),
    torch.arange(4).to(torch.complex64),
    torch.ones(MOST // 4),
]


def gathered() -> tuple[list[Tensor], list[Tensor]]:
    comm = far_apart()
    mine = [x.roll(comm.rank) for x in SENT]
    every = [comm.all_gather(x) for x in mine]
    rows = [comm.all_to_all(torch.stack([x] * comm.world_size).roll(comm.rank, 0)) for x in mine]
    comm.close()
    return every, rows


def test_messages_of_any_dtype_and_length_arrive_as_they_were_sent(three_ranks: Ranks) -> None:
    for every, rows in three_ranks(gathered):
        for x, one, other in zip(SENT, every, rows, strict=True):
            expected = torch.stack([x.roll(rank) for rank in range(3)])
            assert torch.equal(one, expected)
            assert torch.equal(other, expected)


def answers_are_owned() -> list[list[float]]:
    comm = far_apart()
    x = torch.ones(2)
    with torch.inference_mode():
        comm.all_gather(x)
    first = comm.all_gather(x).add_(1)
    second = comm.all_gather(x.requires_grad_())
    assert not second.requires_grad
    second.add_(5)
    comm.all_gather(torch.zeros(2))
    comm.close()
    return [*first.tolist(), *second.tolist()]


def test_who_gets_an_answer_may_write_to_it_also_after_a_validation(two_ranks: Ranks) -> None:
    assert two_ranks(answers_are_owned) == [[[2.0, 2.0]] * 2 + [[6.0, 6.0]] * 2] * 2


def gives_up_on_the_way(kept: bool) -> float:
    """Return the seconds that a rank took to give up while one of its messages was on its way, or to hear of it."""
    comm = far_apart()
    comm.all_gather(torch.ones(1))
    dist.barrier()
    begin = time.monotonic()
    if dist.get_rank() == 0:
        waits = [comm.start(AllGather(torch.ones(3)))]  # nobody answers
        if not kept:
            waits.clear()
        time.sleep(0.2)
        comm.abort()
    else:
        with pytest.raises(LostRankError):
            comm.broadcast(torch.ones(3), 0)
    taken = time.monotonic() - begin
    dist.barrier()
    return taken


@pytest.mark.parametrize("kept", [False, True])
def test_a_rank_that_gives_up_while_a_message_is_on_its_way_ends_at_once_and_for_all(
    two_ranks: Ranks, kept: bool
) -> None:
    assert max(two_ranks(gives_up_on_the_way, kept)) < 5


def distances(hosts: str, seconds: float) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: hosts[dist.get_rank()])
        patch.setattr(TorchCollective, "_round_trip", lambda self: seconds * self.rank)
        comm = TorchCollective.of_its_own()
    comm.close()
    return comm.far


@pytest.mark.parametrize(("hosts", "seconds", "far"), [("ab", 2e-3, True), ("ab", 1.9e-3, False), ("aa", 1.0, False)])
def test_ranks_on_several_hosts_are_far_apart_by_the_longest_round_trip(
    two_ranks: Ranks, hosts: str, seconds: float, far: bool
) -> None:
    assert two_ranks(distances, hosts, seconds) == [far, far]
