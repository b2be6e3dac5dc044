"""The way back to dense: by a clock that the tests move, and on real gloo processes."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.methods.grouping import Group, ParameterSize, make_plan
from lightning_sparse.tuning.controllers import DenseFallback
from lightning_sparse.tuning.controllers import dense_fallback as module
from tests.covering import by_default, covering
from tests.integrations.test_fabric import FABRICS, SPARSE, Run, close
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE
from tests.tuning.controllers.models import Balance, batches, flat, grads, residuals, still, wrapped

SIZES = [ParameterSize("a.weight", 30, 4, "float32"), ParameterSize("b.weight", 20, 4, "float32")]


class Engine:
    """What a fallback sees of an engine, and nothing behind it."""

    def __init__(self, plan: list[Group], willing: bool = True) -> None:
        self.comm, self.device = TorchCollective(), torch.device("cpu")
        self.groups, self.stepper, self.willing = plan, SimpleNamespace(direct=False), willing
        self.asked = 0

    def regroup(self, plan: list[Group]) -> None:
        self.groups, self.stepper.direct = plan, False

    def _go_direct(self) -> bool:
        assert all(group.dense for group in self.groups)
        self.asked += 1
        self.stepper.direct = self.willing
        return self.willing


class Training:
    """Steps that take as long as they are told, after the fallback has had its look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, willing: bool = True) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.engine = Engine(make_plan(SIZES, "layer", EVERYTHING_SPARSE), willing)
        self.fallback = DenseFallback(SIZES, 25)
        self.modes: list[str] = []

    def run(self, steps: int, seconds: Callable[[str, int], float]) -> list[str]:
        """Modes of some steps; ``seconds`` by mode and by how many steps of this mode came right before."""
        begin = len(self.modes)
        for _ in range(steps):
            self.fallback.before_step(self.engine)  # type: ignore[arg-type]
            mode = self.fallback.mode
            alike = 0
            while alike < len(self.modes) and self.modes[-1 - alike] == mode:
                alike += 1
            self.modes.append(mode)
            self.now += seconds(mode, alike)
        return self.modes[begin:]


def either(sparse: float, dense: float) -> Callable[[str, int], float]:
    return lambda mode, alike: {"sparse": sparse, "dense": dense}[mode]


TURN = module.WARMUP + module.STEPS
"""The first turn has a step more: nothing is known of the time before it."""


@pytest.mark.parametrize(("sparse", "dense", "wins"), [(1.0, 2.0, "sparse"), (2.0, 1.0, "dense"), (1.0, 1.0, "sparse")])
def test_both_take_turns_and_the_faster_one_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sparse: float, dense: float, wins: str
) -> None:
    training = Training(monkeypatch)
    modes = training.run(6 * TURN, either(sparse, dense))
    turns = [modes[0]] + [later for before, later in pairwise(modes) if later != before]
    assert turns == ["sparse", "dense", "sparse", "dense", *(["sparse"] if wins == "sparse" else [])]
    assert modes[-TURN:] == [wins] * TURN
    assert training.fallback.seconds == {"sparse": sparse, "dense": dense}
    assert training.engine.stepper.direct == (wins == "dense")
    assert training.engine.groups == make_plan(
        SIZES, *(["layer", EVERYTHING_SPARSE] if wins == "sparse" else ["bucket", ls.Rules(["*"])])
    )
    told = capsys.readouterr().out
    assert told.count("training goes on") == 1
    assert f"training goes on {wins} (fallback=True)" in told
    assert f"dense steps take {1e3 * dense:.4g} ms and sparse ones {1e3 * sparse:.4g} ms" in told


def test_the_first_steps_of_a_turn_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)

    def seconds(mode: str, alike: int) -> float:
        if mode == "sparse":
            return 0.01 if alike < module.WARMUP else 4.0
        # Sending residuals and new buffers, then 1 to 6 s: 3.5 by the median, were it not for the first ones.
        return 100.0 if alike <= module.WARMUP else float(alike - module.WARMUP)

    assert training.run(5 * TURN, seconds)[-1] == "dense"
    assert training.fallback.seconds == {"sparse": 4.0, "dense": 3.5}


@pytest.mark.parametrize("wins", ["sparse", "dense"])
@pytest.mark.parametrize(("factor", "again"), [(1.45, False), (0.7, False), (1.6, True), (0.6, True)])
def test_both_are_measured_again_when_the_step_time_has_changed(
    monkeypatch: pytest.MonkeyPatch, wins: str, factor: float, again: bool
) -> None:
    training = Training(monkeypatch)
    first = either(1.0, 2.0) if wins == "sparse" else either(2.0, 1.0)
    training.run(6 * TURN, first)
    assert set(training.run(3 * module.CHECK, first)) == {wins}
    # Single slow steps are no change.
    assert set(training.run(2 * module.CHECK, lambda mode, alike: 1.0 + 9 * (alike % 3 == 0))) == {wins}
    changed = {wins: factor, ({"sparse", "dense"} - {wins}).pop(): factor / 2}
    modes = training.run(2 * module.CHECK, lambda mode, alike: changed[mode])
    assert (set(modes) == {"sparse", "dense"}) == again
    assert (modes[-1] != wins) == again
    if again:
        assert training.fallback.seconds == pytest.approx(changed)


def test_engines_that_do_not_go_direct_are_asked_in_every_dense_step(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch, willing=False)
    modes = training.run(7 * TURN, either(2.0, 1.0))
    assert not training.engine.stepper.direct
    dense = modes.count("dense")
    assert dense - 2 <= training.engine.asked <= dense  # not in the first step of a turn


# On real ranks.

SHORT = {"WARMUP": 1, "STEPS": 3, "CHECK": 8}


@contextmanager
def shortened(clock: Callable[[], float] | None = None) -> Iterator[pytest.MonkeyPatch]:
    """Turns of a few steps; silence."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        for name, value in SHORT.items():
            patch.setattr(module, name, value)
        if clock is not None:
            patch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
        yield patch


class Rigged:
    """A clock on which steps take what the list says, by mode."""

    def __init__(self, sparse: float, dense: float) -> None:
        self.now, self.seconds = 0.0, {"sparse": sparse, "dense": dense}
        self.fallback: Any = None

    def __call__(self) -> float:
        if self.fallback is not None:
            self.now += self.seconds[self.fallback.mode]
        return self.now

    def watch(self, engine: Any) -> None:
        self.fallback = fallback_of(engine)


def fallback_of(engine: Any) -> DenseFallback:
    [found] = [observer for observer in engine.observers if isinstance(observer, DenseFallback)]
    return found


NAP = 0.06
"""Seconds; other steps take a few milliseconds."""


class Slow(ls.sparsifiers.Sparsifier):
    """Top-k, after a nap."""

    agreement = ls.sparsifiers.TopK.agreement
    exchange = "gather_pairs"

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        time.sleep(NAP)
        return ls.sparsifiers.TopK().select(acc, state, ctx)

    def __repr__(self) -> str:
        return "Slow()"


def sgd(model: Any, options: dict[str, Any] | None) -> torch.optim.SGD:
    """With momentum, unless the memory has its own; options of None are plain DDP."""
    memory = (options or {}).get("memory")
    has_own = memory is not None and memory.averages != "gradients"
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if has_own else 0.9)


def with_naps(sparsifier: Any, dense_nap: float) -> tuple[list[str], list[bool], dict[str, float], Tensor]:
    """Modes, whether DDP was left alone, and times of 26 steps, by the real clock."""
    with shortened() as patch:
        start = TorchCollective.start_average

        def slow_start(self: TorchCollective, x: Tensor, wait: bool = False) -> Any:
            time.sleep(dense_nap)
            return start(self, x, wait)

        patch.setattr(TorchCollective, "start_average", slow_start)
        options = {"sparsifier": sparsifier, "density": 0.05, "grouping": "model", "fallback": True}
        model, engine = wrapped(options, {"bucket_cap_mb": 25})
        optimizer = sgd(model, options)
        modes, direct = [], []
        for batch in batches(26):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            modes.append(fallback_of(engine).mode)
            direct.append(engine.stepper.direct)
        seconds = fallback_of(engine).seconds
        engine.close()
    return modes, direct, seconds, flat(model)


@pytest.mark.thorough
@pytest.mark.parametrize(("slow", "wins"), [("sparse", "dense"), ("dense", "sparse")])
def test_what_is_slow_by_the_real_clock_is_left(two_ranks: Ranks, slow: str, wins: str) -> None:
    first, second = two_ranks(with_naps, *((Slow(), 0.0) if slow == "sparse" else ("top_k", NAP)))
    assert first[0] == second[0]
    assert first[2] == second[2]
    assert torch.equal(first[3], second[3])
    modes, direct, seconds, _ = first
    assert modes[-5:] == [wins] * 5
    assert "dense" in modes and any(direct)
    assert direct[-4:] == [wins == "dense"] * 4
    assert not any(now for now, mode in zip(direct, modes, strict=True) if mode == "sparse")
    assert seconds[slow] > max(NAP, seconds[wins])


@contextmanager
def rigged_training(
    options: dict[str, Any],
    rigged: tuple[float, float] = (2.0, 1.0),
    ddp: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[Rigged, Any, Any]]:
    """The clock, the model and its engine."""
    clock = Rigged(*rigged)
    with shortened(clock):
        model, engine = wrapped({"density": 0.05, **options, "fallback": True}, ddp, dtype)
        clock.watch(engine)
        yield clock, model, engine
        engine.close()


def take_step(model: Any, batch: Tensor) -> None:
    model.zero_grad()
    model(batch).square().mean().backward()
    still(model).step()


LAYERS = {"sparsifier": "top_k", "grouping": "layer"}


def balance(options: dict[str, Any], rigged: tuple[float, float]) -> list[tuple[str, bool, Tensor, Tensor]]:
    """After each step: mode, whether direct, all residuals, and what was given without being applied."""
    with rigged_training(options, rigged, dtype=torch.float64) as (clock, model, engine):
        books, seen = Balance(model), []
        for batch in batches(26, torch.float64):
            books.step(batch)
            seen.append((clock.fallback.mode, engine.stepper.direct, residuals(model, engine), books.missing.clone()))
    return seen


RIGGED = [(1.0, 2.0), (2.0, 1.0)]


@pytest.mark.parametrize(
    ("sparsifier", "rigged"), by_default(covering(product(["top_k", "union_top_k", "exdyna"], RIGGED), together=1))
)
def test_no_residual_is_lost_between_sparse_and_dense(
    two_ranks: Ranks, sparsifier: str, rigged: tuple[float, float]
) -> None:
    options = {"sparsifier": sparsifier, "density": 0.05, "grouping": "layer"}
    for seen in two_ranks(balance, options, rigged):
        modes = [mode for mode, *_ in seen]
        assert modes[-1] == ("sparse" if rigged[0] < rigged[1] else "dense")
        changes = sum(before != later for before, later in pairwise(modes))
        assert changes == (4 if modes[-1] == "sparse" else 3)
        for before, mode, direct, held, missing in zip(["sparse", *modes], *zip(*seen, strict=True), strict=False):
            torch.testing.assert_close(held, missing, rtol=0, atol=1e-13)
            assert bool((held == 0).all()) == ("dense" in (before, mode))  # groups change after backward
            assert mode == "dense" or not direct
        # The first dense step sends what was left; the others are DDP's own.
        firsts = [i for i in range(1, len(modes)) if (modes[i - 1], modes[i]) == ("sparse", "dense")]
        assert len(firsts) == 2
        for i in firsts:
            assert [direct for _, direct, *_ in seen[i : i + 3]] == [False, True, True]


def train(
    options: dict[str, Any] | None,
    ddp: dict[str, Any] | None = None,
    rigged: tuple[float, float] = (2.0, 1.0),
    accumulate: int = 1,
    uses: tuple[str, ...] = ("both",),
) -> tuple[Tensor, list[Tensor], list[bool]]:
    """Parameters after 24 steps, gradients and directness of each."""
    clock = Rigged(*rigged)
    with shortened(clock):
        model, engine = wrapped(None if options is None else {**options, "fallback": True}, ddp)
        if engine is not None:
            clock.watch(engine)
        optimizer = sgd(model, options)
        averages, direct = [], []
        for index, batch in enumerate(batches(24 * accumulate)):
            model.require_backward_grad_sync = (index + 1) % accumulate == 0
            (model(batch, uses[index // accumulate % len(uses)]).square().mean() / accumulate).backward()
            if model.require_backward_grad_sync:
                averages.append(grads(model))
                direct.append(engine is not None and engine.stepper.direct)
                optimizer.step()
                optimizer.zero_grad()
        if engine is not None:
            assert engine.step == 24
            engine.close()
    return flat(model), averages, direct


LAYOUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "one bucket": {"bucket_cap_mb": 25},
}


@pytest.mark.parametrize(("layout", "rigged"), by_default(covering(product(LAYOUTS, RIGGED), together=1), 2))
def test_density_1_trains_like_plain_ddp(two_ranks: Ranks, layout: str, rigged: tuple[float, float]) -> None:
    # Bit for bit, see tests/engine/test_engine.py; in all modes and at all changes between them.
    ddp = LAYOUTS[layout]
    plain = two_ranks(train, None, ddp)
    options = {"sparsifier": "union_top_k", "density": 1.0, "grouping": "layer"}
    for (found, _, direct), (expected, *_) in zip(two_ranks(train, options, ddp, rigged), plain, strict=True):
        assert torch.equal(found, expected)
        assert 4 <= sum(direct) < 24


def test_accumulated_gradients_are_exchanged_once(two_ranks: Ranks) -> None:
    plain = two_ranks(train, None, None, (2.0, 1.0), 3)
    options = {"sparsifier": "top_k", "density": 1.0}
    for (found, _, direct), (expected, *_) in zip(two_ranks(train, options, None, (2.0, 1.0), 3), plain, strict=True):
        assert torch.equal(found, expected)
        assert any(direct)


def test_unused_parameters_are_treated_as_by_plain_ddp(two_ranks: Ranks) -> None:
    # A pattern of three steps, so that every branch is left out in sparse, in dense and in direct steps.
    uses, ddp = ("both", "right", "left"), {"find_unused_parameters": True}
    plain = two_ranks(train, None, ddp, (2.0, 1.0), 1, uses)
    options = {"sparsifier": "top_k", "density": 1.0, "grouping": "layer"}
    for (found, averages, direct), (expected, others, _) in zip(
        two_ranks(train, options, ddp, (2.0, 1.0), 1, uses), plain, strict=True
    ):
        assert torch.equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(averages, others, strict=True))
        assert sum(direct) >= 3
    # At a low density, direct steps still are DDP's.
    for found, _, direct in two_ranks(train, options | {"density": 0.05}, ddp, (2.0, 1.0), 1, uses):
        assert bool(found.isfinite().all())
        assert sum(direct) >= 3


def unused_while_dense(cap: float) -> list[tuple[str, bool, Tensor, Tensor, Tensor]]:
    """The left branch is used before the first dense step, and again in sparse ones at the end."""
    ddp = {"find_unused_parameters": True, "bucket_cap_mb": cap}
    with rigged_training(LAYERS, ddp=ddp, dtype=torch.float64) as (clock, model, engine):
        books, seen = Balance(model), []
        for number, batch in enumerate(batches(62, torch.float64)):
            if number == 30:
                clock.seconds = {"sparse": 3.0, "dense": 4.0}
            books.step(batch, "right" if 4 <= number < 59 else "both")
            left = engine.residual("left.weight")
            assert left is not None
            held = residuals(model, engine)
            seen.append((clock.fallback.mode, engine.stepper.direct, left.clone(), held, books.missing.clone()))
    return seen


@pytest.mark.parametrize(("cap", "goes_direct"), by_default([(25, True), (0.001, False)]))
def test_the_residual_of_an_unused_parameter_waits(two_ranks: Ranks, cap: float, goes_direct: bool) -> None:
    for seen in two_ranks(unused_while_dense, cap):
        kept = seen[3][2]
        assert kept.count_nonzero() > 0
        assert all(torch.equal(left, kept) for _, _, left, *_ in seen[4:59])
        assert not torch.equal(seen[-1][2], kept)
        for *_, held, missing in seen:
            torch.testing.assert_close(held, missing, rtol=0, atol=1e-13)
        assert "dense" in {mode for mode, *_ in seen[4:30]}
        assert seen[-1][0] == "sparse"
        # A group of which nobody used anything has not sent what it holds.
        assert any(direct for _, direct, *_ in seen) == goes_direct


def poison(model: Any) -> None:
    if dist.get_rank() == 1:
        next(model.parameters()).grad[0, 0] = float("nan")


def poisoned(where: str) -> list[tuple[str, bool, bool, Tensor, Tensor]]:
    """In what should be the first dense step, a number is bad on rank 1."""
    with rigged_training(LAYERS, dtype=torch.float64) as (clock, model, engine):
        books, seen = Balance(model), []
        turn = SHORT["WARMUP"] + SHORT["STEPS"]
        for number, batch in enumerate(batches(11, torch.float64)):
            bad = number == turn
            if bad and where == "in backward" and dist.get_rank() == 1:
                batch[0, 0] = float("nan")
            books.step(batch, between=poison if bad and where == "after it" else lambda model: None)
            seen.append(
                (
                    clock.fallback.mode,
                    engine.stepper.direct,
                    engine.stepper.record.latest_skipped,
                    residuals(model, engine),
                    books.missing.clone(),
                )
            )
    return seen


@pytest.mark.parametrize("where", ["in backward", "after it"])
def test_a_bad_number_in_the_first_dense_step_leaves_the_residual_to_the_next(two_ranks: Ranks, where: str) -> None:
    for seen in two_ranks(poisoned, where):
        turn = SHORT["WARMUP"] + SHORT["STEPS"]
        began = "dense" if where == "after it" else "sparse"  # nothing begins where backward has gone wrong
        assert [mode for mode, *_ in seen[turn - 1 : turn + 3]] == ["sparse", began, "dense", "dense"]
        assert [direct for _, direct, *_ in seen[turn : turn + 3]] == [False, False, True]
        assert [bad for _, _, bad, *_ in seen] == [number == turn for number in range(len(seen))]
        assert seen[turn][3].count_nonzero() > 0
        assert not seen[turn + 1][3].any()
        for *_, held, missing in seen:
            torch.testing.assert_close(held, missing, rtol=0, atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [ls.memories.MomentumCorrection(0.5), ls.memories.AdamCorrection(0.5)], ids=repr)
def test_memories_with_momentum_never_leave_ddp_alone(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    # Everything is sent, so that momenta alone decide: without a loss of them, modes do not matter.
    options = {"sparsifier": "everything", "memory": memory}
    steady = two_ranks(train_steadily, options)
    for (found, _, direct), expected in zip(two_ranks(train, options), steady, strict=True):
        assert not any(direct)
        assert torch.equal(found, expected)


def train_steadily(options: dict[str, Any]) -> Tensor:
    model, engine = wrapped(options)
    optimizer = sgd(model, options)
    for batch in batches(24):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    engine.close()
    return flat(model)


def changing() -> tuple[list[str], dict[str, float]]:
    """Dense is faster at first; after 30 steps, both take longer, and sparse is faster."""
    with rigged_training({"sparsifier": "top_k"}) as (clock, model, _):
        modes = []
        for number, batch in enumerate(batches(64)):
            if number == 30:
                clock.seconds = {"sparse": 3.0, "dense": 4.0}
            take_step(model, batch)
            modes.append(clock.fallback.mode)
    return modes, clock.fallback.seconds


def test_ranks_compare_again_together(two_ranks: Ranks) -> None:
    (modes, seconds), other = two_ranks(changing)
    assert (modes, seconds) == other
    assert modes[25:31] == ["dense"] * 6
    assert modes[-8:] == ["sparse"] * 8
    assert seconds == {"sparse": 3.0, "dense": 4.0}


def summaries() -> list[tuple[bool, dict[str, float], dict[str, Any]]]:
    with rigged_training(LAYERS) as (_, model, engine):
        seen = []
        for batch in batches(11):
            take_step(model, batch)
            seen.append((engine.stepper.direct, engine.summary(), engine._group_summaries()))
    return seen


def test_summaries_say_when_ddp_was_left_alone(two_ranks: Ranks) -> None:
    first, second = two_ranks(summaries)
    assert [summary for _, summary, _ in first] == [summary for _, summary, _ in second]
    direct = [one for one, *_ in first]
    for before, now, (_, summary, groups) in zip([False, *direct], direct, first, strict=False):
        left_alone = before or now  # groups change after backward: the last step of a turn is DDP's, too
        assert set(summary) <= set(ls.engine.metrics.QUANTITIES)
        assert summary["steps/direct"] == float(left_alone)
        if left_alone:
            assert groups == {}
            assert summary["traffic/sent_mb"] == 4 * 8880 / 1e6  # 2 (n - 1) / n with two ranks
            assert (summary["density"], summary["traffic/ratio"], summary["residual_norm"]) == (1, 1, 0)
        else:
            assert groups
    assert set(direct) == {False, True}


def saved_and_resumed(folder: str) -> tuple[list[list[str]], bool]:
    """Modes of a run that is saved in a dense step and of one that is resumed there, and whether ranks are equal."""
    options = {**SPARSE, "sparsifier": "exdyna", "fallback": True, "strict_resume": True}
    modes: list[list[str]] = []
    found = []
    for resumed in (False, True):
        clock = Rigged(2.0, 1.0)
        with shortened(clock):
            run = Run(FABRICS[0], options, 1)
            [engine] = run.engines
            clock.watch(engine)
            modes.append([])
            if resumed:
                run.fabric.load(f"{folder}/dense.pt", run.state)
                run.done = 20
            for step in range(run.done, 40 if resumed else 20):
                run.steps(step + 1)
                modes[-1].append(clock.fallback.mode)
            if not resumed:
                run.fabric.save(f"{folder}/dense.pt", run.state)
            found.append(flat(run.models[0]))
            close(run.fabric)
    mean = torch.cat(found)
    dist.all_reduce(mean)
    return modes, torch.equal(mean / 2, torch.cat(found))


def test_a_checkpoint_of_dense_steps_is_resumed_strictly(two_ranks: Ranks, tmp_path: Any) -> None:
    for modes, equal in two_ranks(saved_and_resumed, str(tmp_path)):
        first, again = modes
        assert first[-1] == "dense"
        assert again[0] == "sparse" and again[-1] == "dense"
        assert equal
