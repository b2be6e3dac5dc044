"""`attach` on real processes: what it refuses, on all ranks at once, and that it then leaves nothing behind."""

from __future__ import annotations

import gc
import os
import time
import warnings
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.api.attach import warn_of_slow_groups
from lightning_sparse.engine import failing_together
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from tests.ranks import Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "sparsifier": "top_k", "density": 0.1}


class Spare(nn.Module):
    """Two layers of which only the second is used, each larger than a bucket of 0.01 MiB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spare = nn.Linear(60, 60)
        self.used = nn.Linear(60, 60)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def on_rank(rank: int, here: Any, elsewhere: Any) -> Any:
    return here if dist.get_rank() == rank else elsewhere


def told(ddp: DistributedDataParallel, **options: Any) -> str:
    """What a call that must fail says, at once."""
    return error_of(partial(ls.attach, ddp, **options))


# Who calls it, and how


def test_a_model_that_is_not_wrapped_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError) as caught:
        ls.attach(nn.Sequential(nn.Linear(2, 2)))  # type: ignore[arg-type]
    assert str(caught.value) == "Expected a DistributedDataParallel model, but got Sequential: wrap it first."


def test_settings_of_strategies_are_told_to_be_theirs(two_ranks: Ranks) -> None:
    for said in two_ranks(told_of_strict_resume):
        assert "TypeError: attach does not know the keyword 'strict_resume'." in said
        assert "The strategies for Lightning alone know save_residuals, strict_resume, resize." in said


class NeverClosed:
    def before_step(self, engine: ls.Engine) -> None: ...


def told_of_observers() -> list[str]:
    return [told(DistributedDataParallel(nn.Linear(3, 3)), observers=given) for given in (3, [3], [NeverClosed()])]


def test_what_cannot_observe_is_refused_before_the_first_step(two_ranks: Ranks) -> None:
    for said in two_ranks(told_of_observers):
        assert all("Expected observers to be a list of objects with before_step(engine)" in one for one in said)


class Counting:
    def __init__(self, last: int) -> None:
        self.last, self.calls, self.closed = last, 0, False

    def before_step(self, engine: ls.Engine) -> bool:
        self.calls += 1
        return self.calls == self.last

    def close(self) -> None:
        self.closed = True


def test_an_observer_that_is_done_is_not_called_again_and_closed_at_the_end(one_rank: None) -> None:
    observers = [Counting(2), Counting(1), Counting(9)]
    ddp = DistributedDataParallel(nn.Linear(60, 60))
    engine = ls.attach(ddp, **SPARSE, single_device="sparse", observers=observers)
    for _ in range(4):
        ddp(torch.ones(1, 60)).sum().backward()
        engine.exchange(ddp.parameters())
    assert not any(one.closed for one in observers)
    engine.close()
    assert [(one.calls, one.closed) for one in observers] == [(2, True), (1, True), (4, True)]


def told_of_wrong_arguments() -> list[str]:
    engine = ls.attach(DistributedDataParallel(nn.Linear(60, 60)), **SPARSE)
    calls = {
        "observer": (engine._add_observer,),
        "name": (engine.residual,),
    }
    said = []
    for name, several in calls.items():
        for call in several:
            with pytest.raises(ValueError, match=rf"^Expected {name} to be .*, but got 3\.$") as caught:
                call(3)
            said.append(str(caught.value))
    return said


def test_engines_refuse_what_cannot_be_an_argument(two_ranks: Ranks) -> None:
    assert [len(said) for said in two_ranks(told_of_wrong_arguments)] == [2, 2]


def told_of_strict_resume() -> str:
    return told(DistributedDataParallel(nn.Linear(3, 3)), strict_resume=True)


# DDP's keywords


def train(ddp: dict[str, Any], sparse: bool) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        warnings.filterwarnings("ignore", message="The `check_reduction` argument")
        model = DistributedDataParallel(nn.Sequential(nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 9)), **ddp)
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    if sparse:
        ls.attach(model, **SPARSE | {"density": 1.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(8, 60, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


KEYWORDS = [
    {"bucket_cap_mb_list": [1, 2]},
    {"bucket_cap_mb_list": [1]},
    {"batched_grad_copy": True},
    {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    {"batched_grad_copy": True, "find_unused_parameters": True},
    {"batched_grad_copy": True, "static_graph": True},
    {"forward_sync_buffers": False},
    {"broadcast_buffers": False},
    {"init_sync": False},
    {"check_reduction": True},
]


def test_keywords_of_ddp_change_nothing_at_full_density(two_ranks: Ranks) -> None:
    known = DistributedDataParallel.__init__.__code__.co_varnames
    for keywords in KEYWORDS:
        if keywords.keys() <= set(known):  # some came with torch 2.13
            for plain, sparse in zip(two_ranks(train, keywords, False), two_ranks(train, keywords, True), strict=True):
                assert torch.equal(plain, sparse), keywords


def skipping() -> str:
    ddp = DistributedDataParallel(
        Spare(), bucket_cap_mb=0.01, find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    said = told(ddp, **SPARSE)
    if said == "nothing":
        for _ in range(2):
            ddp(torch.ones(2, 60)).sum().backward()
    return said


def test_buckets_that_ddp_would_keep_back_are_refused(two_ranks: Ranks) -> None:
    if "skip_all_reduce_unused_params" not in DistributedDataParallel.__init__.__code__.co_varnames:
        pytest.skip("this torch has no such keyword")
    for said in two_ranks(skipping):
        assert said.startswith("ValueError: skip_all_reduce_unused_params=True keeps buckets back")


def stepping_in_backward() -> str:
    with warnings.catch_warnings(action="ignore"):  # torch uses what torch itself has deprecated
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = nn.Linear(60, 60)
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return told(DistributedDataParallel(model), **SPARSE)


def test_optimizers_in_backward_are_refused_before_training(two_ranks: Ranks) -> None:
    for said in two_ranks(stepping_in_backward):
        assert said.startswith("ValueError: The optimizer of weight runs in backward, before gradients are exchanged.")


# Uneven inputs


def train_uneven(sparse: dict[str, Any] | None, **join: Any) -> Tensor | str:
    """Rank 0 has 2 batches, rank 1 has 5."""
    model = DistributedDataParallel(Spare(), find_unused_parameters=True)
    if sparse is not None:
        ls.attach(model, **SPARSE | sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        with warnings.catch_warnings(), model.join(**join):  # join() changes the filters
            for _ in range(on_rank(0, 2, 5)):
                model(torch.full((2, 60), 1.0 + dist.get_rank())).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    except ValueError as error:
        return str(error)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_ranks_with_fewer_batches_join_as_with_ddp(two_ranks: Ranks) -> None:
    plain, _ = two_ranks(train_uneven, None)
    for ours in two_ranks(train_uneven, {"density": 1.0}):
        assert torch.equal(ours, plain)


def test_ranks_with_fewer_batches_are_refused_below_a_density_of_1(two_ranks: Ranks) -> None:
    for said in two_ranks(train_uneven, {}):
        assert said.startswith("join() lets ranks end before others")


def test_averages_over_fewer_ranks_are_refused(two_ranks: Ranks) -> None:
    for said in two_ranks(partial(train_uneven, divide_by_initial_world_size=False), {}):
        assert said.startswith("join(divide_by_initial_world_size=False) divides by the ranks that still have data")


# Ranks that differ


def differing(what: str) -> str:
    ddp = {
        "find_unused_parameters": on_rank(1, True, False),
        "static_graph": on_rank(1, True, False),
        "bucket_cap_mb": on_rank(1, 1, 2),
    }
    options = {
        "rules": ls.Rules(dense_ndim=0, dense_numel=on_rank(1, 0, 1)),
        "watch": on_rank(1, None, ls.Watch()),
        "density": on_rank(1, 0.2, 0.1),
    }
    version = on_rank(1, "0.0.7", "0.0.6") if what == "version" else "0.0.6"
    model = DistributedDataParallel(Spare(), **({what: ddp[what]} if what in ddp else {}))
    with mock.patch("lightning_sparse.api.attach.__version__", version):
        said = told(model, **SPARSE | ({what: options[what]} if what in options else {}))
    dist.barrier()  # nobody is left inside
    return said


DIFFERENT = {
    "find_unused_parameters": "find_unused_parameters (False on rank 0, True on rank 1)",
    "static_graph": "static_graph (False on rank 0, True on rank 1)",
    "bucket_cap_mb": "bucket_cap_mb (",
    "version": "version of lightning-sparse ('0.0.6' on rank 0, '0.0.7' on rank 1)",
    "rules": "rules (Rules(",
    "watch": "watch (Watch(every=100",
    "density": "density (Constant(density=0.1) on rank 0, Constant(density=0.2) on rank 1)",
}


def same_buckets() -> int:
    """DDP's size of buckets, given on one rank in words of its own."""
    ddp = DistributedDataParallel(nn.Linear(20, 20), bucket_cap_mb=25)
    engine = ls.attach(ddp, **SPARSE, bucket_cap_mb=on_rank(1, None, 25))
    ddp(torch.ones(2, 20)).sum().backward()
    engine.exchange(ddp.parameters())
    engine.regroup(engine.groups)
    return engine.step


def test_ranks_that_mean_the_same_size_of_buckets_agree_in_every_step(two_ranks: Ranks) -> None:
    assert two_ranks(same_buckets) == [1, 1]


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_are_told_what_differs(two_ranks: Ranks, what: str) -> None:
    for said in two_ranks(differing, what):
        assert said.startswith("RuntimeError: The ranks disagree: rank(s) [1] have"), said
        assert DIFFERENT[what] in said


def differing_models(init_sync: bool) -> str:
    model = nn.Sequential()
    for name in ("first", on_rank(2, "renamed", "second")):  # DDP itself compares shapes alone
        model.add_module(name, nn.Linear(20, 20))
    return told(DistributedDataParallel(model, init_sync=init_sync), **SPARSE)


def test_ranks_with_other_parameters_are_told_which(three_ranks: Ranks) -> None:
    for init_sync in (True, False):
        for said in three_ranks(differing_models, init_sync):
            assert "rank(s) [2]" in said
            assert "groups (" in said
            assert "renamed" in said


class Failing(ls.sparsifiers.Sparsifier):
    """Cannot begin on rank 1."""

    agreement = ls.sparsifiers.TopK.agreement
    exchange = "gather_pairs"

    def init(self, *args: Any) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("no state on rank 1")
        return ls.sparsifiers.TopK().init(*args)

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        return ls.sparsifiers.TopK().select(acc, state, ctx)

    def __repr__(self) -> str:
        return "Failing()"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "density": ({"density": 2.0}, "ValueError: Expected density"),
    "name": ({"sparsifier": "topq"}, "ValueError: Unknown sparsifier 'topq'. Did you mean"),
    "pattern": ({"dense": ["nowhere.*"]}, "ValueError: "),
    "timeout": ({"timeout": 5}, "ValueError: Expected timeout to be a timedelta"),
    "watch": ({"watch": 5}, "ValueError: Expected watch to be a Watch"),
    "type": ({"density": "high"}, "Error: "),
}


def wrong_on_one(name: str, rank: int) -> str:
    said = told(DistributedDataParallel(Spare()), **SPARSE | on_rank(rank, WRONG[name][0], {}))
    dist.barrier()
    return said


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_are_wrong_on_one_rank_are_heard_of_on_all(three_ranks: Ranks, name: str) -> None:
    results = three_ranks(wrong_on_one, name, 1)
    assert WRONG[name][1] in results[1]
    for rank in (0, 2):
        assert results[rank] == f"RuntimeError: Rank 1 failed, so that no rank goes on. Its error: {results[1]}"


def wrong_models() -> list[str]:
    said = []
    for kind in ("sparse", "complex", "hook", "state"):
        # DDP itself compares shapes alone, and those only with init_sync.
        dtype = on_rank(1, torch.complex64, torch.float64) if kind == "complex" else torch.float32
        first = nn.Embedding(20, 20, sparse=kind == "sparse" and dist.get_rank() == 0)
        model = nn.Sequential(first, nn.Linear(20, 20, dtype=dtype))
        ddp = DistributedDataParallel(model, init_sync=kind != "complex")
        if kind == "hook" and dist.get_rank() == 1:
            ddp.register_comm_hook(None, other_hook)
        said.append(told(ddp, **SPARSE | ({"sparsifier": Failing()} if kind == "state" else {})))
        dist.barrier()
    return said


def other_hook(state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError


def test_models_that_are_wrong_on_one_rank_are_heard_of_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks(wrong_models)
    assert first[0].startswith("ValueError: The gradients of '0' are sparse tensors")
    assert second[0].startswith("RuntimeError: Rank 0 failed, so that no rank goes on. Its error: ValueError: The grad")
    assert second[1].startswith("ValueError: Expected floating-point parameters")
    assert second[2].startswith("RuntimeError: This DistributedDataParallel model has a communication hook already")
    assert second[3] == "ArithmeticError: no state on rank 1"
    for one, other in zip(first[1:], second[1:], strict=True):
        assert one == f"RuntimeError: Rank 1 failed, so that no rank goes on. Its error: {other}"


def meeting() -> str:
    everybody, own = TorchCollective(), TorchCollective.of_its_own(timeout=timedelta(seconds=30))
    try:
        with failing_together(everybody, torch.device("cpu"), abort=own.abort):
            if dist.get_rank() == 1:
                raise ArithmeticError("not on rank 1")
            own.all_reduce(torch.ones(1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        own.close()
    return "nothing"


def test_an_error_beside_a_collective_wakes_up_who_waits(two_ranks: Ranks) -> None:
    for rank, said in enumerate(two_ranks(meeting)):
        assert "ArithmeticError: not on rank 1" in said
        assert said.startswith(("RuntimeError: Rank 1 failed", "ArithmeticError")[rank])


# What is left behind


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def grew(counts: list[tuple[int, int]]) -> bool:
    return any(last > first for first, last in zip(counts[0], counts[-1], strict=True))


def leaks(kind: str) -> list[tuple[int, int]]:
    counts = []
    ddp = DistributedDataParallel(Spare())
    if kind == "hook":
        ls.attach(ddp, **SPARSE)
    options = {
        "density": {"density": on_rank(0, 0.1, 0.2)},
        "invalid": {"density": on_rank(0, 0.1, 2.0)},
        "state": {"sparsifier": Failing()},
        "hook": {},
    }[kind]
    for _ in range(3):
        assert told(ddp, **SPARSE | options) != "nothing"
        dist.barrier()
        gc.collect()
        counts.append(held())
    # Before Python 3.13, join() returns before the system has ended a thread: half a second on a busy machine.
    deadline = time.monotonic() + 20
    while grew(counts) and time.monotonic() < deadline:
        time.sleep(0.01)
        counts[-1] = held()
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads and files as Linux lists them")
@pytest.mark.parametrize("kind", ["density", "invalid", "state", "hook"])
def test_a_failing_attach_leaves_nothing_open(two_ranks: Ranks, kind: str) -> None:
    for counts in two_ranks(leaks, kind):
        assert not grew(counts), counts  # what other tests have left may go meanwhile


def after_closing() -> str:
    ddp = DistributedDataParallel(Spare(), find_unused_parameters=True)
    ls.attach(ddp, **SPARSE).close()
    return error_of(lambda: ddp(torch.ones(2, 60)).sum().backward())


def test_a_backward_after_closing_says_so(two_ranks: Ranks) -> None:
    for said in two_ranks(after_closing):
        assert said.startswith("RuntimeError: The engine is closed.")


# Gradients that are no flat vectors


class Functional(nn.Module):
    """Its first gradient is a sparse tensor, and no module says so."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(50, 20))
        self.head = nn.Linear(20, 3)

    def forward(self, index: Tensor, sparse: bool) -> Tensor:
        return self.head(nn.functional.embedding(index, self.table, sparse=sparse))


def looked_up(sparse_on: list[int]) -> str:
    ddp = DistributedDataParallel(Functional())
    ls.attach(ddp, **SPARSE)
    return error_of(lambda: ddp(torch.arange(8), dist.get_rank() in sparse_on).sum().backward())


def test_functional_sparse_gradients_are_named(two_ranks: Ranks) -> None:
    for sparse_on in ([0, 1], [1]):
        first, second = two_ranks(looked_up, sparse_on)
        assert second.startswith("RuntimeError: The gradient of 'table' is a sparse tensor")
        assert "Set sparse=False" in second
        assert first == second if 0 in sparse_on else "lost another rank" in first


# CUDA


def test_a_model_on_several_devices_is_refused(one_rank: None) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ddp.module[1].to("meta")
    with pytest.raises(ValueError, match=r"one device, but 0.weight is on cpu, 1.weight is on meta"):
        ls.attach(ddp)


def test_a_parameter_that_kernels_do_not_take_is_named_at_attach(recwarn: pytest.WarningsRecorder) -> None:
    plan = make_plan([ParameterSize(name, 2**30 - (name == "fits"), 4, "") for name in ("fits", "huge")], "model")
    for device in ("cpu", "cuda"):
        warn_of_slow_groups(plan, torch.device(device))
        warn_of_slow_groups(plan[1:], torch.device(device))
    (warning,) = recwarn
    assert "2**30 - 1 coordinates, and huge has more" in str(warning.message)
