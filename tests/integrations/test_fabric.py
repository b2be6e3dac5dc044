"""`Fabric(strategy="sparse_ddp")` in both packages, on two real processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, flat
from tests.warm import warm_python

FABRICS = ["lightning_fabric", "lightning.fabric"]
SPARSE: dict[str, Any] = {"rules": EVERYTHING_SPARSE, "sparsifier": "top_k", "density": 0.05}


def strategy_class(package: str) -> Any:
    name = package.partition(".")[0]
    return importlib.import_module(f"lightning_sparse.integrations.{name}").FabricSparseDDPStrategy


def make_fabric(package: str, strategy: Any, loss_scale: float | None = None, precision: str | None = None) -> Any:
    """Launched; a dict is for SparseDDPStrategy."""
    if isinstance(strategy, dict):
        strategy = strategy_class(package)(**strategy)
    plugins = []
    if loss_scale is not None:
        mixed = importlib.import_module(package + ".plugins.precision.amp").MixedPrecision
        scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=3)
        plugins = [mixed("16-mixed", "cpu", scaler)]
    fabric = importlib.import_module(package).Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=plugins, precision=precision
    )
    fabric.launch()
    return fabric


def make_model(width: int = 30) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 3))


def batches(steps: int, rank: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return [torch.randn(8, 10, generator=generator) for _ in range(steps)]


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def close(fabric: Any) -> None:
    for engine in getattr(fabric.strategy, "engines", ()):
        engine.close()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "view": {"ddp": {"gradient_as_bucket_view": True}},
    "accumulate": {"accumulate": 3},
    "clip": {"clip": {"max_norm": 0.05}},
    "clip value": {"clip": {"clip_val": 0.002}},
    "closure": {"closure": True},
    "scaled": {"loss_scale": 2.0**12},
    "scaled, accumulate, clip": {"loss_scale": 2.0**12, "accumulate": 2, "clip": {"max_norm": 0.05}},
    "compiled": {"compiled": True},
}


def train(
    package: str,
    strategy: Any,
    steps: int = 6,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    loss_scale: float | None = None,
    closure: bool = False,
    compiled: bool = False,
    ddp: dict[str, Any] | None = None,
) -> tuple[Tensor, list[int]]:
    """Parameters, and steps of the engines."""
    if ddp and strategy == "ddp":
        strategy = importlib.import_module(package + ".strategies").DDPStrategy(**ddp)
    elif ddp:
        strategy = {**strategy, **ddp}
    fabric = make_fabric(package, strategy, loss_scale)
    model = make_model()
    model, optimizer = fabric.setup(torch.compile(model, backend="eager") if compiled else model, sgd(model))
    for index, batch in enumerate(batches(steps * accumulate)):
        last = (index + 1) % accumulate == 0

        def backward(batch: Tensor = batch, last: bool = last) -> Tensor:
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(batch).square().mean() / accumulate
                fabric.backward(loss)
            return loss

        if closure:
            optimizer.step(backward)
            optimizer.zero_grad()
            continue
        backward()
        if last:
            if clip:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    calls = [engine.step for engine in getattr(fabric.strategy, "engines", ())]
    close(fabric)
    return flat(model), calls


@pytest.mark.parametrize(
    ("case", "package", "sparsifier"),
    by_default(
        covering(
            product(CASES, FABRICS, ["top_k", "exdyna"]),
            together=1,
            seen_as=lambda case, package, sparsifier: (case, (package, sparsifier)),
        ),
        5,
    ),
)
def test_density_1_trains_like_ddp(two_ranks: Ranks, package: str, case: str, sparsifier: str) -> None:
    job = partial(train, **CASES[case])
    plain = two_ranks(job, package, "ddp")
    chosen = {"sparsifier": sparsifier, "density": 1.0, "rules": EVERYTHING_SPARSE}
    # Bit for bit: two ranks, see tests/engine/test_engine.py.
    for (sparse, calls), (dense, none) in zip(two_ranks(job, package, chosen), plain, strict=True):
        assert torch.equal(sparse, dense)
        assert (calls, none) == ([6], [])


@pytest.mark.parametrize("package", FABRICS)
def test_the_name_alone_trains_sparsely(two_ranks: Ranks, package: str) -> None:
    dense, sparse = two_ranks(train, package, "ddp"), two_ranks(train, package, "sparse_ddp")
    assert [calls for _, calls in sparse] == [[6], [6]]
    assert torch.equal(sparse[0][0], sparse[1][0])
    assert not torch.equal(sparse[0][0], dense[0][0])


def train_gan(package: str, strategy: Any) -> tuple[Tensor, Tensor, list[int]]:
    """Two modules, each set up with its optimizer; the second takes two steps for each of the first."""
    fabric = make_fabric(package, strategy)
    maker, judge = make_model(20), nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
    maker, maker_optimizer = fabric.setup(maker, sgd(maker))
    judge = fabric.setup_module(judge)
    judge_optimizer = fabric.setup_optimizers(torch.optim.Adam(judge.parameters(), lr=0.01))
    for index, batch in enumerate(batches(8)):
        fabric.backward(judge(maker(batch).detach()).square().mean() - judge(batch[:, :3]).mean())
        judge_optimizer.step()
        judge_optimizer.zero_grad()
        if index % 2:
            judge.requires_grad_(False)
            fabric.backward(judge.module(maker(batch)).mean())
            judge.requires_grad_(True)
            maker_optimizer.step()
            maker_optimizer.zero_grad()
    steps = [engine.step for engine in getattr(fabric.strategy, "engines", ())]
    if steps:
        assert fabric.strategy.engine_of(maker.module) is fabric.strategy.engines[0]
        with pytest.raises(RuntimeError, match="There are 2 engines, one for each module"):
            _ = fabric.strategy.engine
    close(fabric)
    return flat(maker), flat(judge), steps


@pytest.mark.parametrize("package", by_default(FABRICS))
def test_two_modules_train_like_ddp_at_density_1_and_alike_on_all_ranks_below(two_ranks: Ranks, package: str) -> None:
    torch.manual_seed(0)
    plain = two_ranks(train_gan, package, "ddp")
    full = two_ranks(train_gan, package, {**SPARSE, "density": 1.0})
    for (maker, judge, steps), (plain_maker, plain_judge, _) in zip(full, plain, strict=True):
        assert torch.equal(maker, plain_maker)
        assert torch.equal(judge, plain_judge)
        assert steps == [4, 8]
    first, second = two_ranks(train_gan, package, {**SPARSE, "watch": None})
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], plain[0][0])


def conserve(package: str, options: dict[str, Any], loss_scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the averages that arrived, sum of this rank's own gradients, this rank's residual at the end."""
    fabric = make_fabric(package, options, loss_scale)
    model = make_model().double() if loss_scale is None else make_model()
    alone = make_model().to(next(model.parameters()).dtype)  # same parameters, no exchange
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    arrived, own = torch.zeros_like(flat(model)), torch.zeros_like(flat(model))
    for batch in batches(8):
        batch = batch.to(own.dtype)
        fabric.backward(model(batch).square().mean())
        factor = fabric.strategy.precision.scaler.get_scale() if loss_scale else 1
        optimizer.step()
        arrived += torch.cat([p.grad.flatten() for p in model.parameters()])
        optimizer.zero_grad()
        alone.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=loss_scale is not None):
            output = alone(batch if loss_scale is None else batch.half())  # as Fabric does
        (output.to(own.dtype).square().mean() * factor).backward()
        own += torch.cat([p.grad.flatten() for p in alone.parameters()]) / factor
    engine = fabric.strategy.engine
    residual = torch.cat([engine.residual(name) for name in engine.stepper.parameters])
    close(fabric)
    return arrived, own, residual


@pytest.mark.parametrize(
    ("sparsifier", "loss_scale"), covering(in_turns(["top_k", "union_top_k", "exdyna"], [None, 2.0**10]), together=1)
)
def test_nothing_is_lost(two_ranks: Ranks, sparsifier: str, loss_scale: float | None) -> None:
    options = {**SPARSE, "sparsifier": sparsifier}
    (arrived, own0, left0), (other, own1, left1) = two_ranks(conserve, FABRICS[0], options, loss_scale)
    assert torch.equal(arrived, other)
    assert left0.norm() > 0.1 * own0.norm()  # something is held back
    # The loss scale is a power of 2 and changes on the way: nothing is rounded by it but by sums in float32.
    tolerance = 1e-12 if loss_scale is None else 1e-5
    expected = (own0 + own1).to(arrived)
    torch.testing.assert_close(2 * arrived + left0 + left1, expected, rtol=0, atol=tolerance)


def overflow(package: str, options: dict[str, Any], loss_scale: float | None, clip: bool) -> dict[str, Any]:
    """Seven steps; rank 1 meets an infinite loss in the fourth."""
    fabric = make_fabric(package, options, loss_scale)
    model = make_model()
    model, optimizer = fabric.setup(model, sgd(model))
    engine = fabric.strategy.engine
    moved, residuals = [], []
    with warnings.catch_warnings(record=True, action="always") as caught:
        for index, batch in enumerate(batches(7)):
            factor = float("inf") if index == 3 and dist.get_rank() == 1 else 1.0
            before = flat(model)
            fabric.backward(model(batch).square().mean() * factor)
            if clip:
                said = pytest.raises(RuntimeError, match="finite") if index == 3 and not loss_scale else nullcontext()
                with said:
                    fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=loss_scale is None)
            optimizer.step()
            optimizer.zero_grad()
            moved.append(not torch.equal(flat(model), before))
            residuals.append(torch.cat([engine.residual(name) for name in engine.stepper.parameters]).clone())
    result = {
        "moved": moved,
        "kept": torch.equal(residuals[2], residuals[3]),
        "residuals": torch.stack(residuals),
        "finite": bool(flat(model).isfinite().all()),
        "parameters": flat(model),
        "steps": (engine.step, engine.skipped_steps),
        "warnings": [str(w.message) for w in caught if "was not finite" in str(w.message)],
    }
    close(fabric)
    return result


@pytest.mark.parametrize(("loss_scale", "clip", "package"), covering(product([None, 2.0**10], [False, True], FABRICS)))
def test_an_overflow_on_one_rank_is_skipped_on_all(
    two_ranks: Ranks, loss_scale: float | None, clip: bool, package: str
) -> None:
    results = two_ranks(overflow, package, SPARSE, loss_scale, clip)
    assert torch.equal(results[0]["parameters"], results[1]["parameters"])
    for rank, result in enumerate(results):
        assert result["moved"] == [True, True, True, False, True, True, True]
        assert result["kept"]
        assert result["finite"] and bool(result["residuals"].isfinite().all())
        assert result["steps"] == (6, 1)
        assert bool(result["warnings"]) == (rank == 0 and loss_scale is None)


class Run:
    """Some steps, with a checkpoint on the way or from a checkpoint."""

    def __init__(self, package: str, options: dict[str, Any] | str, modules: int, early: bool = False) -> None:
        self.fabric = make_fabric(package, options)
        self.models: list[Any] = [make_model(20 + 5 * index) for index in range(modules)]
        momentum = 0.0 if "memory" in options else 0.9  # of the memory's own
        self.optimizers: list[Any] = [sgd(model, momentum) for model in self.models]
        self.done = 0
        if not early:
            self.setup()

    def setup(self) -> None:
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            self.models[index], self.optimizers[index] = self.fabric.setup(model, optimizer)

    @property
    def state(self) -> dict[str, Any]:
        models = {f"model/{index}": model for index, model in enumerate(self.models)}
        return {**models, **{f"optimizer {i}": o for i, o in enumerate(self.optimizers)}, "done": self.done}

    def steps(self, until: int) -> None:
        for index, batch in list(enumerate(batches(until)))[self.done :]:
            for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                if index % (number + 1) == 0:  # the second module takes every other step
                    self.fabric.backward(model(batch).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
        self.done = until

    @property
    def engines(self) -> list[Any]:
        return list(self.fabric.strategy.engines)

    @property
    def outcome(self) -> list[Any]:
        """All that must be equal."""
        states = [engine.state_dict() for engine in self.engines]
        remembered = [v for state in states for vectors in state["parameters"].values() for v in vectors.values()]
        assert all(bool(v.any()) for v in remembered if v.numel() > 30)
        return [*map(flat, self.models), *remembered, *(torch.tensor(engine.step) for engine in self.engines)]


def goes_on(package: str, options: dict[str, Any], modules: int, folder: str, early: bool) -> list[str]:
    """Names in the folder."""
    path = f"{folder}/deep/checkpoint.pt"
    first = Run(package, options, modules)
    first.steps(4)
    first.fabric.save(path, first.state | {"note": "mine"})
    first.steps(9)
    expected = first.outcome
    close(first.fabric)
    again = Run(package, options | {"strict_resume": True}, modules, early)
    state = again.state
    rest = again.fabric.load(path, state)
    assert rest == {"note": "mine"}
    assert sorted(state) == sorted(again.state)
    again.done = state["done"]
    assert again.done == 4
    if early:
        again.setup()
    again.steps(9)
    for ours, theirs in zip(again.outcome, expected, strict=True):
        assert torch.equal(ours, theirs)
    full = again.fabric.load(path)
    assert sorted(full) == sorted([*again.state, "note"])
    close(again.fabric)
    dist.barrier()
    root = Path(folder)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("package", "modules", "early"), by_default(covering(product(FABRICS, [1, 2], [False, True])), 2)
)
def test_a_run_goes_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path, package: str, modules: int, early: bool) -> None:
    names, _ = two_ranks(goes_on, package, SPARSE, modules, str(tmp_path), early)
    assert names[0] == "deep/checkpoint.pt"
    folders = {os.path.dirname(name) for name in names[1:]}
    own = {"deep/checkpoint.pt.sparse"}
    several = {f"deep/checkpoint.pt.sparse/model%2F{index}.sparse" for index in range(2)}
    assert folders == (own if modules == 1 else several)
    assert len(names) == 1 + 2 * modules


@pytest.mark.parametrize(
    "options",
    by_default(
        [
            {"sparsifier": "exdyna"},
            {"memory": ls.memories.MomentumCorrection(0.5)},
            {"memory": ls.memories.Residual(rates=True)},
        ],
        2,
    ),
    ids=lambda options: next(iter(options)),
)
def test_what_sparsifiers_and_memories_hold_goes_on_too(
    two_ranks: Ranks, tmp_path: Path, options: dict[str, Any]
) -> None:
    two_ranks(goes_on, FABRICS[0], {**SPARSE, **options}, 1, str(tmp_path), False)


def load_with_an_average(package: str, precision: str, path: str) -> list[list[Tensor]]:
    """Weights of a module and of an average that is never set up: saved, loaded behind a set-up, and before one."""
    found = []
    for early in (False, True):
        fabric = make_fabric(package, {**SPARSE, "strict_resume": True}, precision=precision)
        plain, average = make_model(), make_model()
        optimizer: Any = sgd(plain)
        if early:
            nn.init.zeros_(average[0].weight)
            fabric.load(path, {"model": plain, "optimizer": optimizer, "average": average})
            nn.init.ones_(plain[2].bias)
        model, optimizer = fabric.setup(plain, optimizer)
        if early:
            assert bool((plain[2].bias == 1).all())  # what the user has changed stays
            with torch.no_grad():
                plain[2].bias.copy_(found[0][0][-3:])
        else:
            state = {"model": model, "optimizer": optimizer, "average": average}
            for batch in batches(3):
                fabric.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            fabric.save(path, state)
            found.append([flat(model), flat(average)])
            nn.init.zeros_(average[0].weight)
            fabric.load(path, state)
        found.append([flat(model), flat(average)])
        close(fabric)
    return found


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_modules_have_the_precision_that_fabric_gives_them(two_ranks: Ranks, tmp_path: Path, precision: str) -> None:
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}[precision]
    for saved, *loaded in two_ranks(load_with_an_average, FABRICS[0], precision, str(tmp_path / "saved.pt")):
        assert [x.dtype for x in saved] == [dtype, torch.float32]
        for found in loaded:
            assert [x.dtype for x in found] == [dtype, torch.float32]
            assert all(map(torch.equal, found, saved))


def load_other_states(package: str, folder: str) -> list[list[str]]:
    """Warnings about residuals: weights alone, raw ones, a state of plain DDP, and one saved without residuals."""
    run = Run(package, SPARSE, 1)
    run.steps(3)
    path = f"{folder}/{package}.pt"
    run.fabric.save(path + ".weights", {"model/0": run.models[0]})
    run.fabric.save(path + ".whole", run.state)
    close(run.fabric)
    dense = Run(package, {**SPARSE, "save_residuals": False}, 1)
    dense.steps(3)
    dense.fabric.save(path + ".dense", dense.state)
    plain = Run(package, "ddp", 1)
    plain.steps(3)
    plain.fabric.save(path + ".ddp", plain.state)
    raw = f"{path}.raw.{dist.get_rank()}"
    torch.save(make_model(20).state_dict(), raw)
    if dist.get_rank() == 0:
        saved = torch.load(path + ".dense", weights_only=False)
        for number, entry in enumerate(["x", {"model/0": 7}]):
            torch.save({**saved, "lightning_sparse": entry}, f"{path}.odd{number}")
    dist.barrier()
    close(dense.fabric)
    heard = []
    new = Run(package, SPARSE, 1)
    calls: list[Any] = [
        lambda: new.fabric.load(path + ".weights", {"model/0": new.models[0]}),
        lambda: new.fabric.load(path + ".whole", {"model/0": new.models[0]}),
        lambda: new.fabric.load_raw(raw, new.models[0]),
        lambda: new.fabric.load(path + ".ddp", new.state),
        lambda: new.fabric.load(path + ".dense", new.state),
        lambda: new.fabric.load(path + ".odd0", new.state),
        lambda: new.fabric.load(path + ".odd1", new.state),
    ]
    for call in calls:
        with warnings.catch_warnings(record=True, action="always") as caught:
            call()
        heard.append([str(w.message) for w in caught if "residuals" in str(w.message)])
    assert new.fabric.strategy.engine.step == 0
    strict = Run(package, {**SPARSE, "strict_resume": True}, 1)
    strict.fabric.load(path + ".ddp", strict.state)
    with pytest.raises(RuntimeError, match="saved without them"):
        strict.fabric.load(path + ".dense", strict.state)
    with pytest.raises(ValueError, match="Expected a state without the key 'lightning_sparse'"):
        new.fabric.save(path, {**new.state, "lightning_sparse": 1})
    close(new.fabric)
    close(strict.fabric)
    return heard


@pytest.mark.parametrize("package", by_default(FABRICS))
def test_residuals_are_asked_for_with_whole_states_only(two_ranks: Ranks, tmp_path: Path, package: str) -> None:
    first, second = two_ranks(load_other_states, package, str(tmp_path))
    assert first[:4] == second[:4] == [[], [], [], []]
    assert len(first[4]) == 1
    assert "saved without them. Error feedback starts empty on all ranks" in first[4][0]
    assert all(len(told) == 1 and "damaged, and has" in told[0] for told in first[5:])
    assert second[4:] == [[], [], []]
    assert sorted(p.name for p in tmp_path.glob(f"{package}.pt*.sparse")) == [f"{package}.pt.whole.sparse"]


def thaw(package: str) -> tuple[Tensor, float, bool]:
    """The first layer is frozen for four steps; then the model is set up again."""
    fabric = make_fabric(package, SPARSE)
    original = make_model()
    optimizer = sgd(original)
    original[0].requires_grad_(False)
    model, wrapped = fabric.setup(original, optimizer)
    frozen = original[0].weight.clone()
    residual = 0.0
    for index, batch in enumerate(batches(8)):
        if index == 4:
            assert torch.equal(original[0].weight, frozen)
            original[0].requires_grad_(True)
            residual = float(fabric.strategy.engine.residual("2.weight").norm())
            model = fabric.setup_module(original)
            assert float(fabric.strategy.engine.residual("2.weight").norm()) == residual
            assert fabric.strategy.engine.step == 4
        fabric.backward(model(batch).square().mean())
        wrapped.step()
        wrapped.zero_grad()
    assert len(fabric.strategy.engines) == 1
    close(fabric)
    return flat(original), residual, torch.equal(original[0].weight, frozen)


def test_a_module_can_be_set_up_again(two_ranks: Ranks) -> None:
    (first, residual, same), (second, _, _) = two_ranks(thaw, FABRICS[0])
    assert torch.equal(first, second)
    assert residual > 0
    assert not same


def set_up_adam(options: dict[str, Any], together: bool) -> str:
    fabric = make_fabric(FABRICS[0], options)
    model = make_model()
    adam = torch.optim.Adam(model.parameters())
    try:
        if together:
            fabric.setup(model, adam)
        else:  # the optimizer first
            fabric.setup_optimizers(adam)
            fabric.setup_module(model)
    except (ValueError, UserWarning, RuntimeError) as error:
        return str(error)
    finally:
        close(fabric)
    return ""


@pytest.mark.parametrize("together", [True, False])
def test_optimizers_are_checked_when_they_are_set_up(two_ranks: Ranks, together: bool) -> None:
    for message in two_ranks(set_up_adam, {"memory": ls.memories.Residual(rates=True)}, together):
        assert "Residual(rates=True) needs steps of lr * gradient" in message
    # A warning of rank 0, which is an error in these tests, and so one of all ranks.
    for message in two_ranks(set_up_adam, {"memory": ls.memories.MomentumCorrection(0.9)}, together):
        assert "Adam would apply momentum to them a second time" in message


@pytest.mark.usefixtures("not_launched")
def test_one_device_rehearses_without_communication() -> None:
    try:
        strategy = strategy_class(FABRICS[0])(sparsifier="top_k", single_device="sparse")
        fabric = importlib.import_module(FABRICS[0]).Fabric(accelerator="cpu", devices=1, strategy=strategy)
        fabric.launch()
        model = make_model()
        model, optimizer = fabric.setup(model, sgd(model))
        for batch in batches(3):
            fabric.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        engine = fabric.strategy.engine
        assert engine.summary()["traffic/sent_mb"] == 0
        assert engine.step == 3
        assert ls.flush(fabric) > 0
        fabric.strategy.teardown()
        assert engine.closed
    finally:
        dist.destroy_process_group()


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"resize": "most"}, ValueError, "Expected resize to be one of 'merge', 'flush', 'zero'"),
    ({"ddp_comm_hook": print}, TypeError, "does not know the keyword 'ddp_comm_hook'"),
    ({"precision_plugin": None}, TypeError, "does not know the keyword 'precision_plugin'"),
]


@pytest.mark.parametrize(("keywords", "error", "message"), BAD, ids=[next(iter(b[0])) for b in BAD])
def test_bad_settings_fail_at_construction(keywords: dict[str, Any], error: type[Exception], message: str) -> None:
    for package in FABRICS:
        with pytest.raises(error, match=message):
            strategy_class(package)(**keywords)


SCRIPT = """
import torch
import lightning_sparse as ls
from {package} import Fabric

fabric = Fabric(accelerator="cpu", devices={devices}, strategy="sparse_ddp_{launch}")
def train(fabric):
    model = torch.nn.Linear(20, 20)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        fabric.backward(model(torch.randn(4, 20)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {{fabric.global_rank}} steps {{fabric.strategy.engine.step}}\\n", end="", flush=True)
fabric.launch(train)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("not_launched")
def test_a_program_starts_its_ranks_and_ends() -> None:
    program = SCRIPT.format(package="lightning.fabric", launch="fork", devices=2)
    done = subprocess.run([warm_python(), "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 steps 3", "rank 1 steps 3"]
