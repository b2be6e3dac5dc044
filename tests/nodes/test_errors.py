"""Ranks of nodes that do different things, or fail: all of all nodes end, and with a sentence."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.covering import by_default
from tests.engines import Raises
from tests.nodes.model import here, wrapped
from tests.ranks import Ranks, error_of

WITHIN = 10.0
"""Seconds in which all ranks have to end."""


def alone(what: str, odd: int) -> str:
    """What one rank is told that does something else than the others, or the others; and whether that was soon."""
    ddp, engine = wrapped(2, sparsifier="top_k", timeout=timedelta(seconds=60))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    few = torch.optim.SGD([ddp.module.get_parameter("few")], lr=0.125)
    begin = time.monotonic()
    try:
        for step in range(4):
            different = step == 1 and dist.get_rank() == odd
            for number in range(2):
                synchronised = number == 1 or (what == "micro-batches" and different)
                with nullcontext() if synchronised else ddp.no_sync():
                    ddp(here(2 * step + number)).backward()
            if what == "clips" and different:
                engine.clip_grad_norm_(ddp.parameters(), 1.0)
            if what == "flushes" and different:
                engine._flush_next_step()
            if what == "another optimizer" and different:
                few.step()
            elif not (what == "skips" and different):
                optimizer.step()
                if what == "steps twice" and different:
                    optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        engine.close()
        return f"{time.monotonic() - begin < WITHIN} {error}"
    return "nothing was said"


@pytest.mark.parametrize(
    ("what", "odd"),
    by_default(
        [
            ("skips", 3),
            ("steps twice", 0),
            ("micro-batches", 2),
            ("clips", 1),
            ("flushes", 1),
            ("another optimizer", 2),
            ("skips", 0),
            ("steps twice", 3),
            ("flushes", 2),
        ],
        5,
    ),
)
def test_a_rank_that_does_something_else_ends_all_ranks_of_all_nodes(four_ranks: Ranks, what: str, odd: int) -> None:
    found = four_ranks(alone, what, odd)
    node = odd // 2
    for rank, told in enumerate(found):
        near = rank // 2 == node
        expected = "The ranks have drifted apart, because they do different things" if near else "lost another rank"
        assert told.startswith("True ")
        assert expected in told, found
        assert not near or all(f"rank {number} " in told for number in (2 * node, 2 * node + 1)), told


def one_fails() -> tuple[str, float, str]:
    ddp, engine = wrapped(2, observers=[Raises(1, 1, OSError("as asked for"))], timeout=timedelta(seconds=60))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    ddp(here(0)).backward()
    optimizer.step()
    begin = time.monotonic()
    try:
        ddp(here(1)).backward()
        optimizer.step()
    except Exception as error:
        engine.close()
        return f"{type(error).__name__}: {error}", time.monotonic() - begin, " ".join(error.__notes__)
    return "", 0.0, ""


def test_an_error_on_one_rank_ends_the_step_on_all_of_all_nodes() -> None:
    with Ranks(4) as ranks:
        found = ranks(one_fails)
    assert found[1][0] == "OSError: as asked for"
    for rank, (told, seconds, note) in enumerate(found):
        assert told.startswith(f"LostRankError: Rank {rank} lost another rank" if rank != 1 else "OSError")
        assert note.endswith(f"rank {rank}")
        assert seconds < 20


def refused(what: str) -> str:
    ddp, _ = wrapped(2, density=1.0)
    if what == "LBFGS":
        optimizer: Any = torch.optim.LBFGS(ddp.parameters(), max_iter=3)

        def closure() -> Any:
            optimizer.zero_grad()
            loss = ddp(here(0)).square()
            loss.backward()
            return loss

        return error_of(lambda: optimizer.step(closure))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)

    def join() -> None:
        with ddp.join():
            for step in range(2 + dist.get_rank()):
                ddp(here(step)).backward()
                optimizer.step()

    return error_of(join)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("LBFGS", "LBFGS has called its closure a second time"), ("join", "join() lets ranks end before others")],
)
def test_what_needs_averages_behind_backward_is_refused_at_any_density(what: str, sentence: str) -> None:
    with Ranks(4) as ranks:
        for said in ranks(refused, what):
            assert sentence in said
            assert "Below a density of 1" not in said
