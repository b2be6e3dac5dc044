"""What ranks tell each other in objects: complete, of different lengths, and within the group's timeout."""

from __future__ import annotations

import warnings
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.agreement import Note, check_equal_on_ranks
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.ops.on_cuda import on_cuda
from tests.engines import exchange
from tests.ranks import Ranks, error_of

CPU = torch.device("cpu")


def tell() -> list[Note]:
    comm, rank = TorchCollective(), dist.get_rank()
    return comm.all_gather_object(Note(f"line\nof rank {rank}" * (1 + 1000 * rank), "é"), CPU)


def test_objects_of_any_length_reach_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks(tell)
    assert first == second
    assert [note.fact.count("line") for note in first] == [1, 1001]
    assert {note.problem for note in first} == {"é"}


def do_not_come() -> str:
    """What rank 0 is told in a gather to which the other one does not come."""
    comm = TorchCollective.of_its_own(timeout=timedelta(seconds=1))
    told = error_of(comm.all_gather_object, "", CPU) if dist.get_rank() == 0 else ""
    dist.barrier()
    comm.close()
    return told


def test_a_rank_that_does_not_come_is_told_within_the_timeout(two_ranks: Ranks) -> None:
    assert two_ranks(do_not_come)[0].startswith("LostRankError: Rank 0 lost another rank in all_gather_object")


def differ() -> str:
    facts = {"seed": 1, "long": "x" * 500 + str(dist.get_rank()), "density": 0.1 * (1 + dist.get_rank())}
    return error_of(check_equal_on_ranks, facts, TorchCollective(), CPU)


class Unnamed:
    """Its repr is as ``object`` makes it."""

    def __repr__(self) -> str:
        return f"<Unnamed object at {hex(4096 + dist.get_rank())}>"


def differ_in_addresses() -> str:
    return error_of(check_equal_on_ranks, {"seed": 1, "sparsifier": Unnamed()}, TorchCollective(), CPU)


def test_settings_that_only_differ_in_where_they_lie_in_memory_need_a_repr(two_ranks: Ranks) -> None:
    first, second = two_ranks(differ_in_addresses)
    assert first == second
    assert "sparsifier (<Unnamed object>: its repr holds an address in memory; settings need a repr" in first
    assert "0x" not in first


def test_all_that_differs_is_named_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks(differ)
    assert first == second
    assert "rank(s) [1]" in first
    assert "density (0.1 on rank 0, 0.2 on rank 1)" in first
    assert "seed" not in first.split("What differs")[1]
    assert "long (..." in first


def fall_back_on_one() -> list[str]:
    """Warnings of a training in which rank 1 alone has no kernels in Triton; nothing here is on CUDA."""
    trouble = "CompilationError: no compiler" if dist.get_rank() == 1 else None
    with (
        mock.patch("lightning_sparse.engine.engine.static_shapes", lambda device: True),
        mock.patch.object(on_cuda, "trouble", trouble),
        warnings.catch_warnings(action="ignore"),
    ):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        engine = ls.attach(ddp, rules=ls.Rules(dense_ndim=0, dense_numel=0), density=0.5)
        for _ in range(2):
            ddp(torch.ones(1, 4)).sum().backward()
            exchange(engine)
    return engine.warnings


def test_a_rank_that_alone_has_no_kernels_is_named_once(two_ranks: Ranks) -> None:
    first, second = two_ranks(fall_back_on_one)
    assert first == second
    [warning] = first
    assert "rank 1: CompilationError: no compiler" in warning
    assert "wait for them in every step" in warning
