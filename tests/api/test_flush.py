"""One dense step that empties the residuals, on two real processes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, flat, make_trainer

SPARSE: dict[str, Any] = {"sparsifier": "top_k", "density": 0.05, "rules": EVERYTHING_SPARSE, "watch": None}
LR = 0.1


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)


def batches(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 10, generator=generator, dtype=torch.float64) for _ in range(steps)]


def residual(engine: Any) -> np.ndarray[Any, Any]:
    """What this rank has not sent, all of it."""
    return np.concatenate([np.asarray(engine.residual(name)).copy() for name in engine.stepper.parameters])


class Training:
    """A few steps of a model behind an engine."""

    def __init__(self, options: dict[str, Any], make_optimizer: Any = torch.optim.SGD, view: bool = False) -> None:
        self.model = make_model()
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=view)
        self.engine = ls.attach(self.ddp, **{**SPARSE, **options})
        self.optimizer = make_optimizer(self.ddp.parameters(), lr=LR)
        self.own = np.zeros(flat(self.model).numel())
        """Sum of this rank's own gradients."""

    def steps(self, steps: int) -> None:
        for batch in batches(steps):
            alone = copy.deepcopy(self.model)
            alone.zero_grad()
            alone(batch).square().mean().backward()
            self.own += np.concatenate([np.asarray(p.grad).ravel() for p in alone.parameters()])
            self.optimizer.zero_grad()
            self.ddp(batch).square().mean().backward()
            self.optimizer.step()

    @property
    def parameters(self) -> np.ndarray[Any, Any]:
        return flat(self.model).numpy().copy()


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def flush_sgd(options: dict[str, Any], view: bool) -> dict[str, Any]:
    training = Training(options, view=view)
    begin = training.parameters
    training.steps(5)
    before, held = training.parameters, residual(training.engine)
    grads = [p.grad for p in training.model.parameters()]
    norm = ls.flush(training.engine, [training.optimizer])
    assert all(p.grad is grad for p, grad in zip(training.model.parameters(), grads, strict=True))
    after = training.parameters
    assert ls.flush(training.engine, [training.optimizer]) == 0
    assert np.array_equal(training.parameters, after)
    left = residual(training.engine)
    training.steps(2)  # and training goes on
    goes_on = not np.array_equal(training.parameters, after)
    return {
        "begin": begin,
        "before": before,
        "held": held,
        "after": after,
        "left": left,
        "norm": norm,
        "goes on": goes_on,
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"sparsifier": "exdyna"},
    {"grouping": "layer", "sparsifier": "union_top_k"},
]


@pytest.mark.parametrize(
    ("options", "view"),
    [
        pytest.param(options, view, marks=[pytest.mark.thorough] * ((number % 2 == 1) != view))
        for number, options in enumerate(OPTIONS)
        for view in (False, True)
    ],
)
def test_with_sgd_parameters_move_by_the_mean_of_what_was_held_back(
    two_ranks: Ranks, options: dict[str, Any], view: bool
) -> None:
    first, second = two_ranks(flush_sgd, options, view)
    pending = (first["held"] + second["held"]) / 2
    assert np.linalg.norm(pending) > 0
    for result in (first, second):
        # An update of size 0.01 in double precision.
        np.testing.assert_allclose(result["after"], result["before"] - LR * pending, rtol=0, atol=1e-15)
        assert not result["left"].any()
        assert result["norm"] == pytest.approx(np.linalg.norm(pending), rel=1e-12)
        assert result["goes on"]
    assert np.array_equal(first["after"], second["after"])


def train_then_flush(options: dict[str, Any]) -> tuple[Any, Any, float]:
    training = Training(options)
    begin = training.parameters
    training.steps(10)
    own = training.own
    norm = ls.flush(training.engine, [training.optimizer])
    moved = training.parameters - begin
    return moved, own, norm


@pytest.mark.parametrize("sparsifier", by_default(["union_top_k", "exdyna", "top_k", "shared_top_k"], 2))
def test_over_a_run_all_gradients_arrive(two_ranks: Ranks, sparsifier: str) -> None:
    options = {"sparsifier": sparsifier, "exchange": "reduce_union" if sparsifier == "union_top_k" else None}
    (moved, own0, norm), (_, own1, _) = two_ranks(train_then_flush, options)
    assert norm > 0
    np.testing.assert_allclose(moved, -LR * (own0 + own1) / 2, rtol=0, atol=1e-14)


def flush_after(options: dict[str, Any], kind: str) -> tuple[bool, float]:
    """Whether a flush changes parameters or the optimizer's state."""
    training = Training(options, {"momentum": momentum, "adam": torch.optim.Adam}[kind])
    training.steps(3)
    before = training.parameters, copy.deepcopy(training.optimizer.state_dict())
    norm = ls.flush(training.engine, [training.optimizer])
    state = [v for s in training.optimizer.state_dict()["state"].values() for v in s.values() if v is not None]
    state_before = [v for s in before[1]["state"].values() for v in s.values() if v is not None]
    same = all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(state, state_before, strict=True))
    return same and np.array_equal(before[0], training.parameters), norm


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_where_nothing_is_pending_there_is_no_step(two_ranks: Ranks, kind: str) -> None:
    for options in ({"density": 1.0}, {"memory": ls.memories.NoMemory()}, {"dense": ["*"]}):
        assert two_ranks(flush_after, options, kind) == [(True, 0.0)] * 2
    assert [same for same, _ in two_ranks(flush_after, {}, kind)] == [False, False]


def flush_adam(options: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    training = Training({"memory": "residual", **options}, torch.optim.Adam)
    training.steps(4)
    held = [np.asarray(training.engine.residual(f"0.{which}")).copy() for which in ("weight", "bias")]
    state = [training.optimizer.state[p] for p in training.model[0].parameters()]
    moments = [(s["exp_avg"].numpy().copy().ravel(), s["exp_avg_sq"].numpy().copy().ravel()) for s in state]
    before = [training.parameters[:300], training.parameters[300:330], training.parameters[330:]]
    ls.flush(training.engine, [training.optimizer])
    after = [training.parameters[:300], training.parameters[300:330], training.parameters[330:]]
    return held, moments, before, after


@pytest.mark.parametrize(
    "options",
    [
        {"dense": ["2.*"]},
        # With a residual in which nothing is left.
        {"grouping": "layer", "rules": ls.Rules(dense_ndim=0, dense_numel=0, densities={"2.*": 1.0})},
    ],
)
def test_with_adam_it_is_one_step_of_adam(two_ranks: Ranks, options: dict[str, Any]) -> None:
    (held0, moments, before, after), (held1, *_) = two_ranks(flush_adam, options)
    for index in range(2):
        grad = (held0[index] + held1[index]) / 2
        mean, square = moments[index]
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        mean, square = mean / (1 - 0.9**5), square / (1 - 0.999**5)  # the fifth step
        np.testing.assert_allclose(
            after[index], before[index] - LR * mean / (np.sqrt(square) + 1e-8), rtol=0, atol=1e-13
        )
    assert np.array_equal(after[2], before[2])


def flush_fabric(loss_scale: float | None, explicit: bool) -> tuple[Any, Any, Any]:
    """Two modules, the second with two optimizers; before, held back, after."""
    plugins = []
    if loss_scale is not None:
        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=loss_scale))]
    strategy = ls.integrations.lightning_fabric.FabricSparseDDPStrategy(**SPARSE)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    fabric.launch()
    one, two = make_model(torch.float32), make_model(torch.float32)
    one, first = fabric.setup(one, torch.optim.SGD(one.parameters(), lr=LR))
    two, *others = fabric.setup(two, *(torch.optim.SGD(layer.parameters(), lr=LR) for layer in (two[0], two[2])))
    for batch in batches(4):
        fabric.backward((one(batch.float()) + two(batch.float())).square().mean())
        for optimizer in (first, *others):
            optimizer.step()
            optimizer.zero_grad()
    before = torch.cat([flat(one), flat(two)]).numpy().copy()
    held = np.concatenate([residual(engine) for engine in strategy.engines])
    if explicit:
        for engine, chosen in zip(strategy.engines, ([first], others), strict=True):
            ls.flush(engine, chosen)
    else:
        ls.flush(fabric)
    assert all(p.grad is None for p in (*one.parameters(), *two.parameters()))
    assert not any(residual(engine).any() for engine in strategy.engines)
    for engine in strategy.engines:
        engine.close()
    return before, held, torch.cat([flat(one), flat(two)]).numpy()


@pytest.mark.parametrize(("loss_scale", "explicit"), covering(in_turns([2.0**10, None], [False, True]), together=1))
def test_fabric_flushes_all_modules_with_their_optimizers(
    two_ranks: Ranks, loss_scale: float | None, explicit: bool
) -> None:
    (before, held0, after), (_, held1, other) = two_ranks(flush_fabric, loss_scale, explicit)
    # One rounding in float32, of numbers below 1.
    np.testing.assert_allclose(after, before - LR * (held0 + held1) / 2, rtol=0, atol=2e-7)
    assert np.array_equal(after, other)
    assert np.abs(held0 + held1).max() > 1e-3


def flush_wrongly() -> None:
    training = Training({})
    with pytest.raises(ValueError, match=r"optimizers, too, as in flush\(engine, \[optimizer\]\)"):
        ls.flush(training.engine)
    for given in (training.model, ["adam"]):
        with pytest.raises(ValueError, match="Expected an optimizer, or a list of them, but got"):
            ls.flush(training.engine, given)
        with pytest.raises(ValueError, match="Expected an optimizer, or a list of them, but got"):
            training.engine._show(given)
    training.engine.close()
    with pytest.raises(RuntimeError, match=r"The engine is closed.*FlushResidual"):
        ls.flush(training.engine, [training.optimizer])


def test_what_cannot_be_flushed_is_refused(two_ranks: Ranks) -> None:
    two_ranks(flush_wrongly)
    for what in (object(), nn.Linear(2, 2), make_trainer("pytorch_lightning", strategy="ddp")):
        with pytest.raises(ValueError, match="Expected an engine and its optimizers, or a Trainer or Fabric"):
            ls.flush(what, [torch.optim.SGD([torch.zeros(2)], lr=0.1)])
