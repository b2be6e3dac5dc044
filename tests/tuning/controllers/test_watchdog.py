"""Watchdogs: each one warns once, of the thing that is wrong, and none does where nothing is."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.agreement import checksum
from lightning_sparse.methods.grouping import make_plan
from lightning_sparse.tuning.controllers.watchdog import Watchdog
from tests.covering import by_default
from tests.ranks import RankError, Ranks
from tests.trainers import make_data, make_module, make_trainer

SHAPES = {"a": (20, 30), "b": (30, 20), "c": (40, 15)}
NUMEL = 600
ALL_SPARSE = ls.Rules(dense_ndim=0, dense_numel=0)
SPARSIFIERS = [name for name, _ in ls.sparsifiers.SPARSIFIERS.items()]
QUICK = ("union_top_k", "exdyna", "sidco_e", "hard_threshold")

Gradients = dict[str, Tensor]


class Given(nn.Module):
    """Parameters whose gradients are what forward is given; the others are not used. A buffer differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, gradients: Gradients) -> Tensor:
        self.seen += dist.get_rank()
        return torch.stack([(self.get_parameter(name) * given).sum() for name, given in gradients.items()]).sum()


def noise(scale: dict[str, float] | float = 1.0) -> Callable[[int], Gradients]:
    """Normal gradients, other ones on each rank, of a scale by parameter."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    scales = scale if isinstance(scale, dict) else dict.fromkeys(SHAPES, scale)
    return lambda step: {name: one * torch.randn(SHAPES[name], generator=generator) for name, one in scales.items()}


class Training:
    """Step after step with given gradients; parameters stay as they are, at a rate of 0."""

    def __init__(self, ddp: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = DistributedDataParallel(Given().to(dtype), **ddp or {})
        chosen = {"rules": ALL_SPARSE, "sparsifier": "top_k", "density": 0.1, "single_device": "sparse", **options}
        self.engine = ls.attach(self.model, **chosen)
        self.optimizers: list[Any] = [torch.optim.SGD(self.model.parameters(), lr=0.0)]
        self.done, self.micro, self.looks = 0, 1, False
        """``micro``: backwards a step; ``looks``: whether the user steps only where gradients are finite."""

    def run(self, steps: int, gradients: Callable[[int], Gradients]) -> list[str]:
        """The warnings of some steps."""
        with warnings.catch_warnings(record=True, action="always") as seen:
            for _ in range(steps):
                self.model.zero_grad()
                given = gradients(self.done)
                for _ in range(self.micro):
                    self.model(given).backward()
                if not self.looks or all(p.grad is None or p.grad.isfinite().all() for p in self.model.parameters()):
                    for optimizer in self.optimizers:
                        optimizer.step()
                self.done += 1
        return [str(warning.message) for warning in seen]

    def parameter(self, name: str) -> Tensor:
        return self.model.module.get_parameter(name).detach()


def one_warning(results: Sequence[list[str]]) -> str:
    """The only one, of rank 0."""
    assert [len(messages) for messages in results] == [1] + [0] * (len(results) - 1), results
    return results[0][0]


def watched(options: dict[str, Any], *stretches: tuple[int, Any]) -> list[str]:
    """The warnings of a training that is looked at at every fifth step: numbers of steps, and scales of their noise."""
    training = Training(**{"watch": ls.Watch(every=5), **options})
    seen = [text for steps, scale in stretches for text in training.run(steps, noise(scale))]
    training.engine.close()
    return seen


def negate(training: Training) -> None:
    """Of the parameters of rank 1, a coordinate of b grows by 0.25 and c changes its sign."""
    training.parameter("b")[3, 4] = training.parameter("b")[3, 4] + 0.25
    training.parameter("c").neg_()


def permute(training: Training) -> None:
    """Nothing that a sum would show."""
    a, c = training.parameter("a"), training.parameter("c")
    a.copy_(a.roll(1, 0))
    c.mul_(1 - 2 * (torch.arange(c.shape[1]) % 2))


def shift(training: Training) -> None:
    training.parameter("a")[0, 0] += 1


def drifting(
    change: Callable[[Training], None], rank: int, every: int, options: dict[str, Any], before: int = 1
) -> list[str]:
    training = Training(watch=ls.Watch(every=every), **options)
    gradients = noise()
    seen = training.run(before, gradients)
    if dist.get_rank() == rank:
        change(training)
    seen += training.run(2 * every + 1, gradients)
    training.engine.close()
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_that_drift_apart_are_noticed_at_the_second_step(two_ranks: Ranks, dtype: torch.dtype) -> None:
    message = one_warning(two_ranks(drifting, negate, 1, 7, {"dtype": dtype}))
    assert "at step 1: 2 of 3 parameters" in message
    assert "first is 'b', by up to 0.25; rank(s) [1] differ" in message


def test_all_ranks_that_differ_from_the_first_are_named(three_ranks: Ranks) -> None:
    message = one_warning(three_ranks(drifting, shift, 0, 3, {}, 3))
    assert "at step 3: 1 of 3 parameters" in message
    assert "first is 'a', by up to 1; rank(s) [1, 2] differ" in message


def growing(factor: float) -> list[str]:
    # At density 0.1 the reference is taken at the first check after 30 steps.
    options = {"grouping": "layer", "watch": ls.Watch(every=5, growth=5.0)}
    return watched(options, (40, 1.0), (25, {"a": 1.0, "b": factor, "c": 1.0}))


def test_a_residual_that_grows_is_noticed(two_ranks: Ranks) -> None:
    message = one_warning(two_ranks(growing, 100.0))
    assert "the residual of group 'b' has the norm" in message
    assert "and had" in message
    assert "at step 35, at the same density 0.1" in message


def test_a_residual_that_grows_a_little_is_left_alone(two_ranks: Ranks) -> None:
    assert two_ranks(growing, 3.0) == [[], []]


def filling(density: Any, stretches: tuple[int, ...]) -> tuple[list[str], list[float]]:
    training = Training(density=density, watch=ls.Watch(every=5, growth=1.3))
    gradients, norms, seen = noise(), [], []
    for steps in stretches:
        seen += training.run(steps, gradients)
        norms.append(training.engine.summary()["residual_norm"])
    training.engine.close()
    return seen, norms


LONG = (1, 100, 199)


@pytest.mark.parametrize(
    ("density", "stretches"),
    by_default([(0.05, (1, 40, 79)), (0.02, LONG), (ls.Warmup(0.9, 0.02, steps=150), LONG)]),
    ids=repr,
)
def test_a_residual_may_fill(two_ranks: Ranks, density: Any, stretches: tuple[int, ...]) -> None:
    for seen, norms in two_ranks(filling, density, stretches):
        assert not seen
        assert norms[1] > 2 * norms[0]  # far more than the factor that is allowed later


@pytest.mark.parametrize("sparsifier", ["top_k", "union_top_k"])
def test_a_parameter_that_gets_nothing_is_noticed(two_ranks: Ranks, sparsifier: str) -> None:
    options = {"sparsifier": sparsifier}
    # c is zero throughout: nothing is withheld from it.
    message = one_warning(two_ranks(watched, options, (35, {"a": 1.0, "b": 1e-9, "c": 0.0})))
    # Seen at steps 1, 5, ..., 30; from the second check on, 60 of 600 coordinates are expected at each.
    assert "at step 25: gradients arrive at 'b' (about 300 expected), but no coordinate was sent at the latest 5" in (
        message
    )
    assert "'c'" not in message
    assert "densities={'b': ...}" in message


@pytest.mark.thorough
def test_a_parameter_whose_turn_comes_late_is_left_alone(two_ranks: Ranks) -> None:
    for options in (
        {"grouping": "layer"},
        {"rules": ls.Rules(dense=["b"])},
        {"watch": ls.Watch(every=5, missed=100_000)},
    ):
        assert two_ranks(watched, options, (35, {"a": 1.0, "b": 1e-9, "c": 1.0})) == [[], []]


def alternating() -> tuple[list[str], float]:
    """b is used in every step that no check sees, and has a residual; large gradients of others take all places."""
    training = Training({"find_unused_parameters": True}, watch=ls.Watch(every=4))
    both = noise({"a": 1.0, "b": 1e-6, "c": 1.0})
    without = noise({"a": 1.0, "c": 1.0})
    seen = training.run(80, lambda step: (without if step % 4 == 3 else both)(step))
    residual = training.engine.residual("b")
    assert residual is not None
    training.engine.close()
    return seen, float(residual.abs().sum())


def test_a_parameter_that_is_not_used_is_no_starving_one(two_ranks: Ranks) -> None:
    for seen, waiting in two_ranks(alternating):
        assert not seen
        assert waiting > 0


def selecting(sparsifier: ls.sparsifiers.Sparsifier, scale: float, memory: Any = None) -> list[str]:
    return watched({"sparsifier": sparsifier, "memory": memory}, (30, scale))


def test_a_threshold_that_nothing_reaches_is_noticed(two_ranks: Ranks) -> None:
    message = one_warning(two_ranks(selecting, ls.sparsifiers.HardThreshold(1e9), 1.0))
    assert "at step 10: nothing was selected in group 'bucket0' at 3 checks in a row" in message
    assert "180 coordinates are wanted; the threshold is 1e+09" in message


def test_nothing_is_selected_where_there_is_nothing(two_ranks: Ranks) -> None:
    assert two_ranks(selecting, ls.sparsifiers.HardThreshold(1e9), 0.0) == [[], []]


def test_far_more_than_the_density_is_noticed(two_ranks: Ranks) -> None:
    message = one_warning(two_ranks(selecting, ls.sparsifiers.HardThreshold(1e-3), 1.0))
    assert "at step 10: in group 'bucket0', 1" in message  # 1798 of 1800, or so
    assert "selected by a single rank, where a density of 0.1 stands for 180;" in message
    message = one_warning(two_ranks(selecting, ls.sparsifiers.MiCRO(variant="published"), 100.0))
    assert "selected by all ranks together, where a density of 0.1 stands for 180;" in message


def test_far_less_than_the_density_is_noticed(two_ranks: Ranks) -> None:
    # What is not sent is nearly forgotten, so that about 1 % of the coordinates reach the threshold at every step.
    message = one_warning(
        two_ranks(selecting, ls.sparsifiers.HardThreshold(2.5), 1.0, ls.memories.Residual(decay=0.01))
    )
    assert "at step 10: in group 'bucket0', only " in message
    assert "selected by a single rank, where a density of 0.1 stands for 180; less than a share of 1/3" in message


def failing(pattern: str, skips: int, micro: int = 1, looks: bool = False) -> tuple[list[str], int]:
    """Warnings, and how many steps were skipped. A letter a step: n is not finite on rank 1."""
    training = Training(watch=ls.Watch(every=1000, skips=skips))
    training.micro, training.looks = micro, looks
    gradients = noise()

    def spoilt(step: int) -> Gradients:
        given = gradients(step)
        if pattern[step] == "n" and dist.get_rank() == 1:
            given["c"][2, 3] = math.inf
        return given

    seen = training.run(len(pattern), spoilt)
    training.engine.close()
    return [text for text in seen if "no rank takes this step" not in text], training.engine.skipped_steps


@pytest.mark.parametrize("looks", [False, True])
def test_skipped_steps_in_a_row_are_noticed(two_ranks: Ranks, looks: bool) -> None:
    found = two_ranks(failing, "..." + 11 * "n" + "." + 11 * "n", 8, 1, looks)
    assert "at step 3: each of the latest 8 steps was skipped" in one_warning([seen for seen, _ in found])
    assert [skipped for _, skipped in found] == [22, 22]
    assert two_ranks(failing, 3 * (7 * "n" + "."), 8, 1, looks) == [([], 21)] * 2


def test_a_skipped_step_of_many_backwards_counts_once(two_ranks: Ranks) -> None:
    assert two_ranks(failing, "..nnn.n", 20, 4) == [([], 4)] * 2


def direct() -> tuple[bool, list[str]]:
    training = Training(dense=["*"], watch=ls.Watch(every=3))
    gradients = noise()
    seen = training.run(2, gradients)
    went = training.engine._go_direct()
    seen += training.run(2, gradients)
    if dist.get_rank() == 1:
        training.parameter("c")[0, 0] += 1
    seen += training.run(8, gradients)
    training.engine.close()
    return went, seen


def test_ranks_that_drift_apart_are_noticed_in_dense_steps(two_ranks: Ranks) -> None:
    results = two_ranks(direct)
    assert [went for went, _ in results] == [True, True]
    assert "first is 'c', by up to 1;" in one_warning([seen for _, seen in results])


def regrouping(every: int | None) -> list[str]:
    training = Training(sparsifier=ls.sparsifiers.HardThreshold(1e9), watch=ls.Watch(every=5))
    gradients, seen, sizes = noise(), [], [p for group in training.engine.groups for p in group.parameters][::-1]
    for number in range(4):
        seen += training.run(7, gradients)
        if every and number % every == 0:
            training.engine.regroup(make_plan(sizes, "model" if number % (2 * every) else "layer", ALL_SPARSE))
    training.engine.close()
    return seen


def test_what_was_seen_of_groups_goes_with_them(two_ranks: Ranks) -> None:
    assert two_ranks(regrouping, 1) == [[], []]
    assert "nothing was selected" in one_warning(two_ranks(regrouping, None))


def test_groups_that_are_replaced_are_let_go(one_rank: None) -> None:
    training = Training(watch=ls.Watch(every=2))
    gradients = noise()
    training.run(5, gradients)
    old = [weakref.ref(group) for group in training.engine.stepper.groups]
    training.engine.regroup(training.engine.groups)
    gc.collect()
    assert [group() for group in old] == [None]
    training.engine.close()


class Counted:
    """Notes operations and sizes."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        def call(x: Tensor, *rest: Any) -> Any:
            self.calls.append((operation, x.numel()))
            return getattr(self.comm, operation)(x, *rest)

        return call


def messages_of_looks() -> list[list[tuple[str, int]]]:
    training = Training(watch=None, grouping="layer")
    training.run(1, noise())
    dog, engine, calls = Watchdog(ls.Watch(every=3)), training.engine, []
    comm = engine.comm
    for number in range(10):
        if number == 9 and dist.get_rank() == 1:
            training.parameter("a")[0, 0] += 1
        counted: Any = Counted(comm)
        engine.comm = counted
        with warnings.catch_warnings(action="ignore"):
            dog.before_step(engine)
        engine.comm = comm
        calls.append(counted.calls)
        training.run(1, noise())
    engine.close()
    return calls


def test_a_look_is_one_message(two_ranks: Ranks) -> None:
    first, second = two_ranks(messages_of_looks)
    assert first == second
    check = [("all_gather", 6)]  # three parameters, three groups
    assert first[:9] == [[], check, [], check, [], [], check, [], []]
    assert first[9] == [*check, ("broadcast", NUMEL), ("all_gather", 1)]


def healthy(sparsifier: str, steps: int) -> list[str]:
    scale, chosen = 1.0, {"sparsifier": sparsifier}
    if sparsifier == "hard_threshold":
        # It holds a density only where its threshold happens to fit: 0.1 is reached about every 100 steps.
        scale, chosen = 0.1 / 9, {"sparsifier": ls.sparsifiers.HardThreshold(0.1)}
    return watched({**chosen, "density": 0.01, "watch": ls.Watch(every=10)}, (steps, scale))


HEALTHY: list[Any] = [("union_top_k", 60), *((s, 100) for s in QUICK)]
HEALTHY += [pytest.param(s, 200, marks=pytest.mark.thorough) for s in SPARSIFIERS]


@pytest.mark.parametrize(("sparsifier", "steps"), by_default(HEALTHY))
def test_nothing_is_wrong_with_random_gradients(two_ranks: Ranks, sparsifier: str, steps: int) -> None:
    assert two_ranks(healthy, sparsifier, steps) == [[], []]


def differing() -> None:
    Training(watch=ls.Watch(every=5 + dist.get_rank()))


def test_ranks_with_other_settings_are_told(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="The ranks disagree") as raised:
        two_ranks(differing)
    assert str(raised.value).count("RuntimeError: The ranks disagree") == 2


def test_one_rank_is_watched_too(one_rank: None) -> None:
    assert "nothing was selected" in one_warning([selecting(ls.sparsifiers.HardThreshold(1e9), 1.0)])


def test_memories_without_a_residual_are_watched_as_far_as_that_goes(one_rank: None) -> None:
    message = one_warning([selecting(ls.sparsifiers.HardThreshold(1e-3), 1.0, ls.memories.NoMemory())])
    assert "selected by a single rank" in message


def test_what_was_sent_in_full_is_not_judged(one_rank: None) -> None:
    training = Training(watch=ls.Watch(every=1))
    gradients = noise()
    for _ in range(6):
        training.engine._flush_next_step()
        assert training.run(1, gradients) == []
        assert not training.engine.stepper.record.latest_skipped
        assert training.engine.summary()["density"] == 1  # ten times the target
    training.engine.close()


@pytest.mark.parametrize("shown", [True, False])
def test_a_parameter_without_an_optimizer_is_noticed(one_rank: None, shown: bool) -> None:
    training = Training(watch=ls.Watch(every=3))
    training.optimizers = [torch.optim.SGD([training.model.module.get_parameter(name) for name in "ac"], lr=0.0)]
    if shown:
        training.engine._show(training.optimizers)
    seen = [training.run(1, noise()) for _ in range(8)]
    training.engine.close()
    assert "no optimizer holds 'b', which needs gradients" in one_warning([[text for texts in seen for text in texts]])
    assert len(seen[6]) == 1  # the second time that it is found


class ByHand:
    """An optimizer that torch does not know."""

    def __init__(self, engine: ls.engine.Engine, parameters: list[nn.Parameter]) -> None:
        self.engine, self.parameters = engine, parameters

    def step(self) -> None:
        assert self.engine.exchange(self.parameters)


@pytest.mark.parametrize("why", ["steps late", "not in the graph", "exchanged by hand"])
def test_parameters_that_an_optimizer_will_step_or_nobody_uses_are_not_told_of(one_rank: None, why: str) -> None:
    ddp = {"find_unused_parameters": True}
    training = Training(ddp, sparsifier="union_top_k", watch=ls.Watch(every=3))
    a, b, c = (training.model.module.get_parameter(name) for name in "abc")
    first = torch.optim.SGD([a, c], lr=0.0)
    second = torch.optim.SGD([b], lr=0.0) if why != "not in the graph" else None
    gradients = noise(dict.fromkeys("ac" if second is None else "abc", 1.0))
    told = []
    for step in range(12):
        late = why == "steps late" and second is not None and step >= 4
        training.optimizers = [first, second] if late else [first]
        if why == "exchanged by hand":
            training.optimizers.append(ByHand(training.engine, [b]))
        told += training.run(1, gradients)
    training.engine.close()
    assert not [text for text in told if "no optimizer holds" in text]


def test_none_looks_at_nothing(one_rank: None) -> None:
    training = Training(sparsifier=ls.sparsifiers.HardThreshold(1e9), watch=None)
    assert not any(isinstance(observer, Watchdog) for observer in training.engine.observers)
    assert training.run(30, noise()) == []
    training.engine.close()


def fitted(options: dict[str, Any]) -> list[Any]:
    package = "pytorch_lightning"
    trainer = make_trainer(
        package, max_epochs=1, strategy=ls.integrations.pytorch_lightning.SparseDDPStrategy(**options)
    )
    trainer.fit(make_module(package), make_data(), make_data(16))
    dogs = [observer for observer in trainer.strategy.engine.observers if isinstance(observer, Watchdog)]
    return [dog._settings for dog in dogs]


def test_the_strategy_passes_it_on(two_ranks: Ranks) -> None:
    for options, expected in [({}, [ls.Watch()]), ({"watch": ls.Watch(3)}, [ls.Watch(3)]), ({"watch": None}, [])]:
        assert two_ranks(fitted, {"rules": ALL_SPARSE, **options}) == [expected, expected]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"every": 0}, "every to be a positive integer, but got 0"),
        ({"every": 1.5}, "every to be a positive integer"),
        ({"every": True}, "every to be a positive integer"),
        ({"growth": 1}, "growth to be a finite number above 1, but got 1"),
        ({"growth": math.nan}, "growth to be a finite number"),
        ({"missed": -1}, "missed to be a positive integer"),
        ({"excess": math.inf}, "excess to be a finite number"),
        ({"skips": "20"}, "skips to be a positive integer"),
    ],
    ids=repr,
)
def test_settings_that_cannot_work_are_refused(setting: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=f"Expected {expected}"):
        ls.Watch(**setting)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ls.Watch()),
        (["--watch.every=7"], ls.Watch(every=7)),
        (["--watch={growth: 3.0, skips: 5}"], ls.Watch(growth=3.0, skips=5)),
        (["--watch.adam=false"], ls.Watch(adam=False)),
        (["--watch=null"], None),
    ],
    ids=repr,
)
def test_configurations_can_say_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: ls.Watch | None
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    parser = pytest.importorskip("jsonargparse", reason="jsonargparse is not installed").ArgumentParser()
    parser.add_class_arguments(ls.SparseDDPStrategy)
    assert (
        ls.SparseDDPStrategy(**vars(parser.instantiate_classes(parser.parse_args(arguments)))).config.watch == expected
    )


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def changed(x: Tensor, places: Any, factor: float = -1.0) -> Tensor:
    other = x.clone()
    other[places] *= factor
    return other


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [2, 231, 65536, 200_001])
def test_checksums_see_what_sums_of_bit_patterns_do_not(dtype: torch.dtype, numel: int) -> None:
    x = torch.rand(numel, generator=torch.Generator().manual_seed(0)).add_(0.5).to(dtype)
    x[0], x[-1] = 2.0, 1.0
    others = {
        "one sign": changed(x, numel // 2),
        "a bit of the first": changed(x, 0, 1.01),
        "a bit of the last": changed(x, -1, 1.01),
        "all signs": -x,
        "two signs": changed(x, [0, -1]),
        "every other sign": changed(x, slice(None, None, 2)),
        "two places": changed(changed(x, 0, 0.5), -1, 2.0),
        "backwards": x.flip(0),
        "moved on by one": x.roll(1),
        "sorted": x.sort().values,
    }
    expected = int(checksum(x))
    assert int(checksum(x.clone())) == expected
    assert int(checksum(torch.stack([x, x], 1)[:, 0])) == expected  # with gaps
    for what, other in others.items():
        assert int(checksum(other)) != expected, what


@pytest.mark.parametrize("rows", [1, 64])
def test_a_checksum_does_not_depend_on_how_it_is_summed(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    # Arithmetic modulo 2**64 in Python's own integers; devices sum many rows at a time.
    from lightning_sparse.engine import agreement as module

    monkeypatch.setattr(module, "ROW", 8)
    monkeypatch.setattr(module, "place_weights", module.place_weights.__wrapped__)  # not those of other rows
    monkeypatch.setattr(module, "ROWS_ON_DEVICES", rows)
    monkeypatch.setattr(module, "static_shapes", lambda device: True)
    x = torch.randn(37, generator=torch.Generator().manual_seed(0))
    columns, by_row = (w.tolist() for w in module.place_weights(x.device))
    words = np.frombuffer(x.numpy().tobytes(), dtype="<i4").tolist()
    total = sum(word * columns[i % 8] * by_row[i // 8] for i, word in enumerate(words)) % 2**64
    assert int(checksum(x)) % 2**64 == total


def test_ranks_whose_parameters_are_permuted_or_flipped_are_noticed(two_ranks: Ranks) -> None:
    message = one_warning(two_ranks(drifting, permute, 1, 3, {}))
    assert "at step 1: 2 of 3 parameters" in message
    assert "first is 'a'" in message


def growing_early(factor: float, steps: int) -> list[str]:
    options = {"density": 0.01, "sparsifier": "union_top_k", "grouping": "layer", "watch": ls.Watch()}
    return watched(options, (50, 1.0), (steps - 50, factor))


@pytest.mark.thorough
def test_a_short_training_is_judged_while_residuals_fill(two_ranks: Ranks) -> None:
    message = one_warning(two_ranks(growing_early, 1e9, 105))
    assert "at step 100: the residuals of all groups together have the norm" in message  # looks at 60, 90, 100
    assert "at step 8, of which filling explains a factor of" in message


@pytest.mark.thorough
def test_a_short_training_may_fill(two_ranks: Ranks) -> None:
    assert two_ranks(growing_early, 5.0, 210) == [[], []]


def leaving_a_plateau(seed: int) -> tuple[list[str], float]:
    """Warnings of a deep network as torch draws it, whose gradients become hundreds of times as long; its last loss."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for channels in (1, *[24] * 5):
        layers += [nn.Conv2d(channels, 24, 3, padding=1), nn.ReLU()]
    head = nn.Flatten(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 8)
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), *head)
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    patterns = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    with warnings.catch_warnings(record=True, action="always") as seen:
        for step in range(150):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank() + 77 * seed)
            target = torch.randint(0, 8, (32,), generator=generator)
            x = patterns[target].view(32, 1, 4, 8) + 0.3 * torch.randn(32, 1, 4, 8, generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), target)
            loss.backward()
            optimizer.step()
    engine.close()
    return [str(w.message) for w in seen if "residual" in str(w.message)], float(loss.detach())


@pytest.mark.thorough
@pytest.mark.slow
def test_leaving_a_plateau_is_no_growth(two_ranks: Ranks) -> None:
    for seen, loss in two_ranks(leaving_a_plateau, 2):
        assert not seen
        assert loss < 0.5


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.003),
}


def trained(optimizer: str, density: float, zero: bool, number: int) -> tuple[list[str], float, float]:
    """Warnings of a small classifier's steps, and the loss before and after; zero: the last layers start at it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    for layer in (module[2], module[4]) if zero else ():
        nn.init.zeros_(layer.weight)
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, rules=ALL_SPARSE, grouping="layer", density=density)
    steps = OPTIMIZERS[optimizer](ddp.parameters())
    generator, losses = torch.Generator().manual_seed(0), []
    target = torch.randn(32, 10, generator=generator)
    generator.manual_seed(1 + dist.get_rank())
    with warnings.catch_warnings(record=True, action="always") as seen:
        for _ in range(number):
            x = torch.randn(32, 32, generator=generator)
            steps.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), (x @ target).argmax(1))
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
    engine.close()
    return [str(w.message) for w in seen if "residual" in str(w.message)], losses[0], losses[-1]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "density", "zero", "steps"),
    [
        ("adamw", 0.01, True, 102),  # to the looks at 60, 90 and 100
        ("adamw", 0.01, True, 120),
        ("momentum", 0.001, False, 120),
        *product(OPTIMIZERS, (0.01, 0.001), (False, True), [300]),
    ],
)
def test_a_calm_training_is_left_alone(
    two_ranks: Ranks, optimizer: str, density: float, zero: bool, steps: int
) -> None:
    for seen, before, after in two_ranks(trained, optimizer, density, zero, steps):
        assert not seen
        assert after < before + 0.1  # at 0.001, little has moved by then
