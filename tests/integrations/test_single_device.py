"""One device trains as plain DDP does, unless it is asked to rehearse; what waits when ranks become one is sent."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.integrations.test_checkpoints import looker, strategy_of
from tests.integrations.test_fabric import FABRICS, batches, close, make_fabric, make_model
from tests.integrations.test_telling import Lines
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer

SETTINGS: dict[str, Any] = {"density": 0.05, "rules": EVERYTHING_SPARSE}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
SAID = (
    "sparse_ddp: one device has nobody to send to, and trains densely, as plain DDP does. To rehearse "
    "UnionTopK(max_factor=2.0) on it, set single_device='sparse'."
)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for batch in batches(steps):
        ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(package: str, settings: dict[str, Any] | None, name: str) -> tuple[nn.Module, Any, Any]:
    module = make_module(package)
    module.configure_optimizers = lambda: OPTIMIZERS[name](module.parameters())
    strategy = "ddp" if settings is None else strategy_of(package, settings)
    trainer = make_trainer(package, strategy=strategy, devices=1, max_epochs=1, gradient_clip_val=0.1)
    trainer.fit(module, make_data(), make_data(16))
    return module, trainer.optimizers[0], getattr(trainer.strategy, "engine", None)


def with_fabric(package: str, settings: dict[str, Any] | None, name: str) -> tuple[nn.Module, Any, Any]:
    fabric = make_fabric(package, "ddp" if settings is None else settings)
    module = make_model()
    model, optimizer = fabric.setup(module, OPTIMIZERS[name](module.parameters()))
    for batch in batches(4):
        fabric.backward(model(batch).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    engine = getattr(fabric.strategy, "engine", None)
    if engine is not None:
        close(fabric)
    return module, optimizer.optimizer, engine


def with_attach(_: str, settings: dict[str, Any] | None, name: str) -> tuple[nn.Module, Any, Any]:
    module = make_model()
    ddp = DistributedDataParallel(module)
    engine = None if settings is None else ls.attach(ddp, **settings)
    optimizer = OPTIMIZERS[name](module.parameters())
    for batch in batches(4):
        ddp(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.close()
    return module, optimizer, engine


def beside_ddp(door: Any, package: str, name: str) -> tuple[list[Tensor], list[list[str]], list[int], list[int]]:
    """Weights, lines, bytes of memory, and parameters that torch's optimizer keeps something of."""
    weights, said, kept, held = [], [], [], []
    for settings in (None, SETTINGS, SETTINGS | {"single_device": "sparse"}):
        with Lines() as lines, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are calling `clip_gradients`")
            module, optimizer, engine = door(package, settings, name)
        weights.append(flat(module))
        said.append(lines)
        kept.append(0 if engine is None else engine.memory_bytes)
        held.append(sum(len(state) > 0 for state in optimizer.state.values()))
    return weights, said, kept, held


DOORS = [
    *((with_trainer, package) for package in PACKAGES),
    *((with_fabric, package) for package in FABRICS),
    (with_attach, "torch"),
]


@pytest.mark.parametrize(
    ("door", "package", "name"),
    covering(
        ((*door, name) for door, name in in_turns(DOORS, list(OPTIMIZERS))),
        together=1,
        seen_as=lambda door, package, name: (package, name),
    ),
)
def test_one_device_trains_as_plain_ddp_bit_for_bit_and_says_how_to_rehearse(
    alone: Ranks, door: Any, package: str, name: str
) -> None:
    [[(plain, dense, sparse), said, kept, held]] = alone(beside_ddp, door, package, name)
    assert torch.equal(dense, plain)
    assert not torch.equal(sparse, plain)
    assert kept[:2] == [0, 0] and kept[2] >= 4 * 333
    assert held[0] == held[1] == 4
    assert len(said[1]) == 2 and said[1][0].startswith(SAID)
    assert said[1][1].startswith("sparse_ddp: in ") and "nothing was sent by the only rank" in said[1][1]
    assert said[2][0].startswith("sparse_ddp: UnionTopK(max_factor=2.0) selects 4.96 % of ")


@pytest.mark.parametrize(
    "settings",
    [
        {"fallback": True},
        {"sparsifier": "everything"},
        {"memory": ls.memories.Residual(rates=True)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_one_device_measures_nothing(
    one_rank: None, settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    module = make_model()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SETTINGS | settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(ddp, optimizer, 30)
    assert engine.stepper.direct and engine.step == 30
    assert engine.summary()["density"] == 1
    assert ls.flush(engine, [optimizer]) == 0
    engine.close()
    assert "dense steps take" not in capfd.readouterr().out


def test_one_device_checks_settings_as_many_do(one_rank: None) -> None:
    with pytest.raises(ValueError, match=r"'\*\.bais' in dense matches no parameter"):
        ls.attach(DistributedDataParallel(make_model()), dense=["*.bais"])
    with pytest.raises(ValueError, match=r"Expected single_device to be 'dense' or 'sparse', but got 'spars'\."):
        ls.engine.config.SparsificationConfig(single_device="spars")  # type: ignore[arg-type]


def test_momentum_of_a_memory_is_kept_where_nothing_waits(one_rank: None) -> None:
    module = make_model()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SETTINGS, memory=ls.memories.MomentumCorrection(0.5))
    batch = batches(1)[0]
    ddp(batch).square().mean().backward()
    assert engine.exchange(module.parameters())
    first = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    module.zero_grad()
    ddp(batch).square().mean().backward()
    assert engine.exchange(module.parameters())
    second = torch.cat([p.grad.flatten() for p in module.parameters()])  # type: ignore[union-attr]
    engine.close()
    torch.testing.assert_close(second, 1.5 * first)


# Ranks become one, and more again


def train_on_two(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state of the engine, and weights."""
    module = make_model()
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SETTINGS)
    optimizer = OPTIMIZERS[name](module.parameters())
    train(ddp, optimizer, 5)
    state = engine.state_dict()
    engine.close()
    return state, module.state_dict()


@pytest.mark.parametrize("resize", ["merge", "flush"])
def test_what_waited_on_two_ranks_is_sent_in_the_first_step_of_one(
    two_ranks: Ranks, one_rank: None, resize: str
) -> None:
    (one, weights), (other, _) = two_ranks(train_on_two, "SGD")
    merged = ls.merge_states([one, other])
    module, plain = make_model(), make_model()
    for each in (module, plain):
        each.load_state_dict(weights)
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SETTINGS)
    assert engine.load_state_dict(merged) == []
    if resize == "flush":
        engine._flush_next_step()
    waits = torch.cat([merged["parameters"][name]["residual"] for name, _ in module.named_parameters()])
    assert waits.count_nonzero() > 100
    for step, batch in enumerate(batches(4, rank=0)):
        if step == 1:  # a step that counts for nothing loses nothing
            waits = torch.zeros_like(waits)
        for each in (ddp, plain):
            each.zero_grad()
            each(batch).square().mean().backward()
        assert engine.exchange(module.parameters())
        got, own = (torch.cat([p.grad.flatten() for p in each.parameters()]) for each in (module, plain))
        torch.testing.assert_close(got, own + waits, rtol=0, atol=1e-6 if step == 0 else 0)
    assert engine.stepper.direct and engine.memory_bytes == 0
    engine.close()


def test_a_skipped_first_step_keeps_what_waits(two_ranks: Ranks, one_rank: None) -> None:
    (one, weights), (other, _) = two_ranks(train_on_two, "SGD")
    merged = ls.merge_states([one, other])
    module = make_model()
    module.load_state_dict(weights)
    ddp = DistributedDataParallel(module)
    engine = ls.attach(ddp, **SETTINGS)
    engine.load_state_dict(merged)
    (ddp(batches(1)[0]).square().mean() * float("inf")).backward()
    assert not engine.exchange(module.parameters())
    assert engine.skipped_steps == 1
    kept = engine.state_dict()["parameters"]
    for name, vectors in merged["parameters"].items():
        assert torch.equal(kept[name]["residual"], vectors["residual"])
    engine.close()


def fit_on(folder: str, package: str, name: str, epochs: int) -> tuple[list[Tensor], int]:
    """Residuals before and after the first step, and bytes of memory at the end; goes on where the last one was."""
    module, seen = make_module(package), list[Tensor]()
    module.configure_optimizers = lambda: OPTIMIZERS[name](module.parameters())
    trainer = make_trainer(
        package,
        strategy=strategy_of(package, SETTINGS | {"strict_resume": True}),
        devices=dist.get_world_size(),
        max_epochs=epochs,
        callbacks=[looker(package, seen)],
    )
    before = Path(folder) / f"{epochs - 1}.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        trainer.fit(module, make_data(), make_data(16), ckpt_path=before if before.exists() else None)
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return seen, trainer.strategy.engine.memory_bytes


def train_in_fabric(folder: str, package: str, name: str, epochs: int) -> tuple[list[Tensor], int]:
    """As :func:`fit_on`."""
    fabric = make_fabric(package, SETTINGS | {"strict_resume": True})
    module, seen = make_model(), list[Tensor]()
    model, optimizer = fabric.setup(module, OPTIMIZERS[name](module.parameters()))
    state, before = {"model": model, "optimizer": optimizer}, Path(folder) / f"{epochs - 1}.ckpt"
    if before.exists():
        fabric.load(before, state)
    engine = fabric.strategy.engine
    for batch in batches(5):
        seen.append(
            torch.cat([*(v["residual"] for v in engine.state_dict()["parameters"].values() if v), torch.zeros(0)])
        )
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(f"{folder}/{epochs}.ckpt", state)
    kept = engine.memory_bytes
    close(fabric)
    return seen, kept


@pytest.mark.parametrize("name", by_default(OPTIMIZERS))
@pytest.mark.parametrize("run", [fit_on, train_in_fabric], ids=["Trainer", "Fabric"])
def test_a_run_goes_on_on_one_device_and_on_two_again(
    two_ranks: Ranks, alone: Ranks, tmp_path: Path, run: Any, name: str
) -> None:
    package = (PACKAGES if run is fit_on else FABRICS)[0]
    for _, kept in two_ranks(run, str(tmp_path), package, name, 1):
        assert kept > 0
    [((before, after, *_), kept)] = alone(run, str(tmp_path), package, name, 2)
    assert before.any() and not after.any()
    assert kept == 0
    for (before, after, *_), kept in two_ranks(run, str(tmp_path), package, name, 3):
        assert not before.any() and after.any()
        assert kept > 0


@pytest.mark.parametrize("run", [fit_on, train_in_fabric], ids=["Trainer", "Fabric"])
def test_a_run_begins_on_one_device_and_goes_on_on_two(
    two_ranks: Ranks, alone: Ranks, tmp_path: Path, run: Any
) -> None:
    package = (PACKAGES if run is fit_on else FABRICS)[0]
    [(seen, kept)] = alone(run, str(tmp_path), package, "AdamW", 1)
    assert kept == 0 and not any(residual.any() for residual in seen)
    for (before, after, *_), kept in two_ranks(run, str(tmp_path), package, "AdamW", 2):
        assert not before.any() and after.any()
        assert kept > 0


@pytest.mark.parametrize("resize", ["merge", "flush"])
def test_adams_own_moments_outlast_the_step_that_sends_residuals(one_rank: None, resize: str) -> None:
    """Those of parameters that stay dense: torch steps them before, and from the next step on again."""
    model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bias, counted, state = model[0].bias, [], None
    for alone in ("sparse", "dense"):
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, density=0.1, single_device=alone)
        engine._show(optimizer)
        if state is not None:
            engine.load_state_dict(state)
            if resize == "flush":
                engine._flush_next_step()
        for batch in torch.randn(3, 4, 20).unbind():
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            counted.append(float(optimizer.state[bias]["step"]))
        state = engine.state_dict()
        engine.close()
    assert counted == [1, 2, 3, 3, 4, 5]  # the fourth is one of the engine's
