"""What a run says without any callback, and what survives a checkpoint of it."""

from __future__ import annotations

import importlib
import logging
import re
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.integrations.monitor import plan_table
from lightning_sparse.ops.c import native
from lightning_sparse.ops.c.library import INSTEAD
from lightning_sparse.tuning.controllers.announcer import at_start
from tests.covering import by_default
from tests.ranks import Ranks
from tests.trainers import PACKAGES, make_data, make_module, make_trainer

HEADER = 8 * 14
"""Bytes of what ranks say to each other after a backward, and again at a step."""


class Lines(logging.Handler):
    """Ours, as Lightning's logger writes them."""

    def __init__(self, begin: str = "sparse_ddp: ") -> None:
        super().__init__(logging.INFO)
        self.begin = begin
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(self.begin):
            self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        rank_zero.log.addHandler(self)
        return self.lines

    def __exit__(self, *_: Any) -> None:
        rank_zero.log.removeHandler(self)


def fit(package: str, strategy: Any, **options: Any) -> tuple[list[str], Any]:
    with Lines() as lines:
        trainer = make_trainer(package, strategy=strategy, max_epochs=1, limit_val_batches=0, **options)
        trainer.fit(make_module(package), make_data(96), make_data(16))
    return lines, trainer


def two_lines(package: str) -> tuple[list[str], list[str], list[str]]:
    said, trainer = fit(package, {"sparsifier": "top_k"})
    sent = trainer.strategy.engine.stepper.totals.sent_bytes
    assert sent > 0
    ours = logging.getLogger("lightning_sparse")
    ours.setLevel(logging.WARNING)
    try:
        silent, _ = fit(package, {"sparsifier": "top_k"})
    finally:
        ours.setLevel(logging.NOTSET)
    watched, _ = fit(package, {"sparsifier": "top_k"}, callbacks=[ls.SparsityMonitor(table=False)])
    return said, silent, watched


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_run_says_what_it_does_and_what_it_sent(two_ranks: Ranks, package: str) -> None:
    (said, silent, watched), (other, *_) = two_ranks(two_lines, package)
    assert other == silent == [], "rank zero alone, and not above INFO"
    start, end = said
    assert start == (
        "sparse_ddp: TopK() selects 1 % of 300 parameters; 123 others stay dense (fewer than 2 dimensions or fewer "
        "than 256 coordinates). Residual(decay=1.0) keeps 0.0017 MB on each of 2 ranks. "
        "callbacks=[lightning_sparse.SparsityMonitor()] shows more."
    )
    # In a ring of two: two headers, 4 bytes of a count and 3 pairs of 8, and 123 dense float32.
    sent, dense = 6 * (2 * HEADER + 4 + 24 + 4 * 123), 6 * 4 * 423
    traffic = f"each rank sent {sent / 1e6:.3g} MB; dense DDP sends {dense / 1e6:.3g} MB"
    traffic += f", {dense / sent:.3g} times as much"

    assert end.startswith(f"sparse_ddp: in 6 steps {traffic}. Training waited ")
    assert re.search(r"waited [\d.e-]+ s of [\d.e-]+ s for the exchange\. No step was skipped", end)
    assert watched[0] == start.removesuffix(" callbacks=[lightning_sparse.SparsityMonitor()] shows more.")


def attached(adam: bool) -> tuple[list[str], list[str], float, float]:
    torch.manual_seed(0)
    outdated = f"{INSTEAD}built from other sources. To compile it again: python library.py" if adam else "compiled"
    with Lines() as lines, patch.object(native, "description", outdated):
        ddp = DistributedDataParallel(torch.nn.Linear(30, 20))
        engine = ls.attach(ddp, sparsifier="union_top_k" if adam else "top_k", density=0.1)
        optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(ddp.parameters(), lr=0.1)
        for step in range(3):
            ddp.zero_grad()
            bad = torch.full((2, 30), float("nan") if step == 1 else 1.0)
            ddp(bad).square().mean().backward()
            optimizer.step()
        before = list(lines)
        sent = engine.stepper.totals.sent_bytes
        engine._take_pending()
        flushed = engine.stepper.totals.sent_bytes - sent
        engine.close()
        engine.close()
    return before, lines[len(before) :], sent, flushed


def test_so_does_plain_ddp_with_an_engine(two_ranks: Ranks) -> None:
    (start, end, sent, flushed), (_, nothing, *_) = two_ranks(attached, False)
    assert nothing == []
    assert len(start) == len(end) == 1
    assert start[0].startswith("sparse_ddp: TopK() selects 10 % of 600 parameters; 20 others stay dense")
    assert "in 3 steps each rank sent" in end[0]
    assert end[0].endswith("1 step was skipped because of gradients that were not finite.")
    assert sent > 2 * (2 * HEADER + 4 * 20)
    assert "kernels" not in start[0]
    # A ring of two sends each of the residuals once, and a byte for each of two groups.
    assert flushed == 4 * 600 + 2
    (start, *_, flushed), _ = two_ranks(attached, True)
    assert flushed == 2 * 4 * 600 + 2, "the second moments, too"
    told = "which takes several times as long: built from other sources. To compile it again: python library.py."
    assert [line.endswith(told) for line in start] == [True]


def with_nothing_but_bad_steps(package: str) -> list[str]:
    module = make_module(package)
    with torch.no_grad():
        module.net[0].weight.fill_(float("nan"))
    with Lines() as lines, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A gradient was not finite")
        make_trainer(package, strategy="sparse_ddp", max_epochs=1).fit(module, make_data(96), make_data(16))
    return lines


def test_a_run_that_skips_every_step_says_in_its_last_line_that_nothing_was_learned(two_ranks: Ranks) -> None:
    for package in PACKAGES:
        lines, _ = two_ranks(with_nothing_but_bad_steps, package)
        assert lines[-1].startswith("sparse_ddp: in 6 steps ")
        assert lines[-1].endswith(
            "Every step was skipped because of gradients that were not finite: nothing was learned. Lower the learning "
            "rate, use bf16 instead of fp16, and look for the layer with Trainer(detect_anomaly=True) or "
            "torch.autograd.set_detect_anomaly(True)."
        )


class Nothing(torch.nn.Module):
    """DDP takes a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = torch.nn.Parameter(torch.zeros(0, 30))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.none.sum()


def where_nothing_is_sparse() -> list[str]:
    with Lines() as lines, warnings.catch_warnings(action="ignore"):
        for module in (torch.nn.Linear(30, 20), Nothing()):
            ddp = DistributedDataParallel(module)
            engine = ls.attach(ddp, dense=["*"])
            ddp(torch.ones(2, 30)).sum().backward()
            torch.optim.SGD(ddp.parameters()).step()
            lines += [at_start(engine)] if engine.step == 0 else []
            engine.close()
    return lines


def test_where_nothing_is_sparse_it_is_said_in_plain_words(two_ranks: Ranks) -> None:
    lines, _ = two_ranks(where_nothing_is_sparse)
    assert lines[0].startswith("sparse_ddp: all 620 parameters stay dense (")
    assert lines[1].startswith("sparse_ddp: in 1 step each rank sent 0.00248 MB, as much as dense DDP. Training waited")
    assert lines[2].startswith("sparse_ddp: the model has no parameters to train, on 2 ranks.")
    assert len(lines) == 3, "no step had anything to exchange, and nothing is said by itself"
    assert "times as much" not in " ".join(lines) and "()" not in " ".join(lines)


def attached_with_adam() -> list[str]:
    """In plain processes Lightning knows of no ranks."""
    with patch.object(rank_zero.rank_zero_only, "rank", 0), Lines("Adam's steps for parameters") as lines:
        for level in (logging.NOTSET, logging.WARNING):
            ddp = DistributedDataParallel(torch.nn.Linear(30, 20))
            logging.getLogger("lightning_sparse").setLevel(level)
            try:
                engine = ls.attach(ddp, density=0.1)
                engine._show([torch.optim.AdamW(ddp.parameters())])
                engine.close()
            finally:
                logging.getLogger("lightning_sparse").setLevel(logging.NOTSET)
    return lines


def test_that_steps_of_adam_are_taken_is_said_once(two_ranks: Ranks) -> None:
    assert [len(lines) for lines in two_ranks(attached_with_adam)] == [1, 0], "rank zero alone, and not above INFO"


def totals_of_resumed_runs(folder: str) -> tuple[list[float], list[float], list[float], list[str]]:
    def run(max_epochs: int, load: str | None, trainer: Any = None) -> Any:
        trainer = trainer or make_trainer("pytorch_lightning", strategy={"sparsifier": "top_k"}, max_epochs=max_epochs)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
            trainer.fit(make_module("pytorch_lightning"), make_data(), make_data(16), ckpt_path=load)
        return trainer

    def totals(trainer: Any) -> list[float]:
        totals = trainer.strategy.engine.stepper.totals
        return [totals.sent_bytes, totals.dense_bytes, totals.seconds]

    whole = run(2, None)
    saving = importlib.import_module("pytorch_lightning.callbacks").ModelCheckpoint(dirpath=folder, filename="one")
    half = make_trainer(
        "pytorch_lightning",
        strategy={"sparsifier": "top_k"},
        max_epochs=1,
        callbacks=[saving],
        enable_checkpointing=True,
    )
    run(1, None, half)
    with Lines() as lines:
        resumed = run(2, f"{folder}/one.ckpt")
    return totals(whole), totals(half), totals(resumed), [line.split(" MB;")[0] for line in lines[1:]]


def test_totals_go_on_where_a_checkpoint_was_and_the_last_line_counts_from_there(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    for rank, (whole, half, resumed, said) in enumerate(two_ranks(totals_of_resumed_runs, str(tmp_path))):
        sent = half[0] / 1e6
        assert said == [f"sparse_ddp: in 3 steps after the first 3 each rank sent {sent:.3g}"][rank:]
        assert resumed[:2] == whole[:2] == [2 * half[0], 2 * half[1]]
        assert resumed[2] > half[2] > 0


def everything() -> tuple[str, dict[str, float], str]:
    ddp = DistributedDataParallel(torch.nn.Linear(30, 20))
    engine = ls.attach(ddp, sparsifier="everything", density=0.01)
    ddp(torch.ones(2, 30)).square().mean().backward()
    engine.exchange(ddp.parameters())
    told, numbers, table = at_start(engine), engine.summary(), str(plan_table(engine).rows)
    engine.close()
    return told, numbers, table


def test_what_is_sent_in_full_has_reached_its_density(two_ranks: Ranks) -> None:
    (told, numbers, table), _ = two_ranks(everything)
    assert told == "sparse_ddp: Everything() sends all of 620 parameters, on 2 ranks."
    names = ("density", "target_density", "density_error", "padding_ratio", "build_up")
    assert [numbers[name] for name in names] == [1, 1, 0, 1, 1]
    assert "'1', '600', 'dense'" in table
    assert "0.01" not in table


def tables_of_a_schedule() -> list[tuple[str, str, str]]:
    ddp = DistributedDataParallel(torch.nn.Linear(30, 20, bias=False))
    engine = ls.attach(ddp, sparsifier="top_k", density=ls.Warmup(1.0, 0.01, steps=1), watch=None)
    cells = []
    for _ in range(2):
        [row] = plan_table(engine).rows
        cells.append((row[3], row[4], row[5]))
        ddp(torch.ones(2, 30)).square().mean().backward()
        engine.exchange(ddp.parameters())
    engine.close()
    return cells


def test_the_table_names_the_exchange_that_is_used_now(two_ranks: Ranks) -> None:
    for cells in two_ranks(tables_of_a_schedule):
        assert cells == [("1", "600", "dense"), ("0.01", "6", "GatherPairs")]
