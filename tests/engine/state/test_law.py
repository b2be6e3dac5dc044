"""Nothing that was absorbed is missing in a state, and nothing is there twice: at any moment, and whoever loads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import lightning_sparse as ls
from tests.covering import covering, in_one_test, in_turns
from tests.engine.state.account import Case, Training, check
from tests.ranks import Ranks

HALF = ls.MomentumCorrection(0.5)
ROUNDED = 1e-5
"""Where sums are not of integers."""
ADAMW: dict[str, Any] = {"optimizer": torch.optim.AdamW, "settings": {"lr": 0.01}}
CASES: dict[str, Case] = {
    "residual": Case(),
    "union": Case({"sparsifier": "union_topk"}),
    "reduce union": Case({"sparsifier": "union_topk", "exchange": "reduce_union", "grouping": "model"}),
    "exdyna": Case({"sparsifier": "exdyna", "density": 0.1}),
    "own messages": Case({"messages": "group"}),
    "decay": Case({"memory": ls.Residual(decay=0.5)}),
    "momentum": Case({"memory": ls.MomentumCorrection(0.5, masking=False)}),
    "momentum masked": Case({"memory": HALF}),
    "nesterov": Case({"memory": ls.MomentumCorrection(0.5, nesterov=True), "sparsifier": "union_topk"}),
    "low pass": Case({"memory": ls.LowPass(0.5)}),
    "adam": Case({"memory": ls.AdamCorrection(beta1=0.5)}, off=ROUNDED),
    "second moment": Case({"sparsifier": "union_topk"}, **ADAMW),
    "clip by norm": Case({"memory": ls.ClipByNorm(100.0)}, off=ROUNDED),
    "clip and momentum": Case({"memory": ls.ClipByNorm(100.0, HALF)}, off=ROUNDED),
    "weight decay": Case({"memory": ls.WeightDecay(0.5)}),
    "scaled": Case(scale=1024.0),
    "scaled second moment": Case({"sparsifier": "union_topk"}, scale=1024.0, **ADAMW),
    "clipped by hand": Case(clip=1.0),
    "clipped and scaled": Case({"memory": HALF}, clip=1.0, scale=64.0),
    "accumulated": Case(local=2),
    "two optimizers": Case(optimizers=2),
    "four optimizers of Adam": Case({"sparsifier": "union_topk"}, optimizers=4, **ADAMW),
    "two exchanges": Case({"executor": "inline"}, exchanges=2),
    "bfloat16": Case(dtype=torch.bfloat16),
    "bfloat16 momentum": Case({"memory": HALF, "sparsifier": "union_topk"}, dtype=torch.bfloat16),
    "float16 scaled": Case(dtype=torch.float16, scale=4.0, settings={"lr": 1 / 64}),
    "density 1": Case({"density": 1.0}),
    "density 1 in bfloat16": Case({"density": 1.0}, dtype=torch.bfloat16),
    "warm-up": Case({"density": ls.Warmup(1.0, 0.02, 3)}),
    "accordion": Case({"density": ls.Accordion(0.02, 0.2, interval=2)}),
    "flushed": Case(flush=2),
    "flushed momentum": Case({"memory": HALF}, flush=1, optimizers=2),
    "emptied": Case(empties=2),
    "emptied second moment": Case({"sparsifier": "union_topk"}, empties=2, **ADAMW),
    "skipped": Case(bad=1),
    "skipped momentum": Case({"memory": HALF}, bad=1),
    "skipped low pass": Case({"memory": ls.LowPass(0.5)}, bad=2),
    "skipped second moment": Case({"sparsifier": "union_topk"}, bad=1, **ADAMW),
    "unused": Case(unused={1: ("third",), 2: ("first", "second")}, ddp={"find_unused_parameters": True}),
    "unused in one group": Case(
        {"grouping": "model", "sparsifier": "union_topk"}, unused={1: ("third",)}, ddp={"find_unused_parameters": True}
    ),
}
MADE = [("thread", False), ("inline", True), ("thread", True), ("inline", False)]
"""Executor, and whether gradients are views of DDP's buckets."""


def train(name: str, executor: str, view: bool) -> bytes:
    case = CASES[name]
    options, ddp = {"executor": executor, **case.options}, {**case.ddp, "gradient_as_bucket_view": view}
    training = Training(replace(case, options=options, ddp=ddp))
    training.run(case.steps)
    return training.close()


def memory_of(case: Case) -> Any:
    if "memory" in case.options:
        return case.options["memory"]
    return ls.Residual() if case.optimizer is torch.optim.SGD else ls.SecondMoment()


@in_one_test("name, made", covering(((name, made) for name, made in in_turns(list(CASES), MADE)), together=1), apart=0)
def test_all_that_was_absorbed_is_in_the_state_at_any_moment(two_ranks: Ranks, name: str, made: Any) -> None:
    check(two_ranks(train, name, *made), memory_of(CASES[name]), CASES[name].off)
