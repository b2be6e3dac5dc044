"""Lion and Muon through Trainers and Fabric: the weights that all agree on are validated, saved and returned."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn

import lightning_sparse as ls
from tests.covering import by_default
from tests.engine.drift.models import Lion
from tests.integrations.test_fabric import close, make_fabric
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, PACKAGES, flat, make_data, make_module, make_trainer, straight_and_resumed

SPARSE: dict[str, Any] = {"density": 0.1, "rules": EVERYTHING_SPARSE, "watch": None}


def module_of(kind: str, package: str = PACKAGES[0]) -> Any:
    module = make_module(package)
    if kind == "lion":
        module.configure_optimizers = lambda: Lion(module.parameters(), lr=0.01, weight_decay=0.01)
    else:

        def both() -> Any:
            matrices = [p for p in module.parameters() if p.dim() == 2]
            rest = [p for p in module.parameters() if p.dim() != 2]
            return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]

        module.configure_optimizers = both
        module.automatic_optimization = False

        def training_step(batch: list[Tensor], batch_idx: int) -> None:
            loss = nn.functional.cross_entropy(module.net(batch[0]), batch[1])
            module.manual_backward(loss)
            for optimizer in module.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        module.training_step = training_step
    return module


def loss_of(state: dict[str, Tensor], rank: int) -> Tensor:
    """Summed over the samples that Lightning gives a rank, by plain torch."""
    plain = make_module(PACKAGES[0])
    plain.load_state_dict(state)
    losses = []
    with torch.no_grad():
        dataset = make_data().dataset
        chosen = torch.utils.data.Subset(dataset, list(range(rank, len(dataset), 2)))  # type: ignore[arg-type]
        for x, y in torch.utils.data.DataLoader(chosen, batch_size=8):
            losses.append(nn.functional.cross_entropy(plain.net(x), y) * len(y))
    return torch.stack(losses).sum()


def fit(kind: str, package: str, path: str) -> dict[str, Any]:
    module = module_of(kind, package)
    saved = ModelCheckpoint if package == PACKAGES[0] else importlib.import_module(package).callbacks.ModelCheckpoint
    callback = saved(path, monitor="val_loss", save_last=True, filename="best")
    trainer = make_trainer(package, strategy=SPARSE, max_epochs=3, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(module, make_data(), make_data())
    found = {"val": trainer.callback_metrics["val_loss"], "after": flat(module)}
    file = torch.load(callback.last_model_path, weights_only=False)
    found["saved"] = loss_of(file["state_dict"], trainer.global_rank)
    found["file"] = torch.cat([x.flatten() for x in file["state_dict"].values()])
    with warnings.catch_warnings(action="ignore"):  # of samples that may be counted twice
        found["again"] = trainer.validate(module, make_data(), verbose=False)[0]["val_loss"]
    return found


@pytest.mark.parametrize(
    ("kind", "package"),
    by_default([("lion", PACKAGES[0]), ("muon", PACKAGES[1]), ("muon", PACKAGES[0]), ("lion", PACKAGES[1])], 2),
)
def test_the_loss_of_validation_is_that_of_the_saved_file(
    two_ranks: Ranks, tmp_path: Path, kind: str, package: str
) -> None:
    found = two_ranks(fit, kind, package, str(tmp_path))
    by_torch = torch.stack([one["saved"] for one in found]).sum() / 48
    for one in found:
        assert torch.equal(one["val"], by_torch)
        assert one["again"] == float(by_torch)
        assert torch.equal(one["after"], one["file"])


def resumed(kind: str, path: str) -> dict[str, Any]:
    def run(ckpt: Any = None, **options: Any) -> Any:
        module, trainer = module_of(kind), make_trainer(PACKAGES[0], strategy=SPARSE, **options)
        trainer.fit(module, make_data(), make_data(), ckpt_path=ckpt)
        return trainer, module

    return straight_and_resumed(PACKAGES[0], Path(path), lambda module: {"all": flat(module)}, run, run)


@pytest.mark.parametrize("kind", by_default(["lion", "muon"]))
def test_a_resumed_fit_equals_a_straight_one(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    for one in two_ranks(resumed, kind, str(tmp_path)):
        assert torch.equal(one["first"]["weights"]["all"], one["second"]["weights"]["all"])


def frozen_meanwhile(path: str, epoch: int, at_once: bool) -> dict[str, Any]:
    """A layer is frozen in one epoch; the checkpoint is from behind the second one.

    Args:
        path: of checkpoints.
        epoch: from 0 on.
        at_once: whether it is frozen when the second run begins, and not only in the epoch's first hook.
    """

    def run(ckpt: Any = None, **options: Any) -> Any:
        module = make_module(PACKAGES[0])
        module.configure_optimizers = lambda: torch.optim.NAdam(module.parameters(), lr=0.01)
        module.setup = lambda stage: module.net[0].requires_grad_(not (ckpt and at_once))
        module.on_train_epoch_start = lambda: module.net[0].requires_grad_(module.trainer.current_epoch != epoch)
        strategy = SPARSE | {"memory": "drift", "grouping": "layer", "strict_resume": True}
        trainer = make_trainer(PACKAGES[0], strategy=strategy, **options)
        trainer.fit(module, make_data(), make_data(), ckpt_path=ckpt)
        return trainer, module

    return straight_and_resumed(PACKAGES[0], Path(path), lambda module: {"all": flat(module)}, run, run)


@pytest.mark.parametrize(("epoch", "at_once"), [(1, True), (1, False), (2, False)])
def test_a_resumed_fit_equals_a_straight_one_in_which_a_layer_is_frozen_for_a_while(
    two_ranks: Ranks, tmp_path: Path, epoch: int, at_once: bool
) -> None:
    for one in two_ranks(frozen_meanwhile, str(tmp_path), epoch, at_once):
        assert torch.equal(one["first"]["weights"]["all"], one["second"]["weights"]["all"])


def second_fit(changes: bool) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Two fits one after the other; and between them, weights that are loaded."""
    module = module_of("lion")
    trainer = make_trainer(PACKAGES[0], strategy=SPARSE, max_epochs=2)
    trainer.fit(module, make_data(), make_data())
    first = flat(module)
    before = trainer.strategy.engine.state_dict()
    if changes:
        module.load_state_dict(make_module(PACKAGES[0]).state_dict())
    begun: list[Tensor] = []
    module.on_train_start = lambda: begun.append(flat(module))
    trainer.fit_loop.max_epochs = 4
    with warnings.catch_warnings(action="ignore"):  # of what is dropped
        trainer.fit(module, make_data(), make_data())
    own = torch.cat([before["parameters"][name]["copy"] for name, _ in module.named_parameters()])
    return first, begun[0], flat(module), bool(torch.equal(begun[0], own))


def test_a_second_fit_goes_on_from_the_copies(two_ranks: Ranks) -> None:
    one, other = two_ranks(second_fit, False)
    assert torch.equal(one[0], other[0]) and torch.equal(one[2], other[2])
    assert not torch.equal(one[1], other[1]) and one[3] and other[3]
    one, other = two_ranks(second_fit, True)
    fresh = flat(make_module(PACKAGES[0]))
    assert torch.equal(one[1], fresh) and torch.equal(other[1], fresh)
    assert torch.equal(one[2], other[2])


def best_is_loaded() -> tuple[Tensor, Tensor, Tensor]:
    """A callback loads the best weights at the start of the last epoch, on all ranks."""

    class Loads(EarlyStopping):
        def __init__(self) -> None:
            super().__init__("val_loss", patience=100)
            self.best: dict[str, Tensor] = {}
            self.seen: list[Tensor] = []

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.best = {name: x.clone() for name, x in pl_module.state_dict().items()}
            if trainer.current_epoch == 3:
                pl_module.load_state_dict(self.best)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            if trainer.current_epoch == 3 and not self.seen:
                with trainer.strategy.engine.agreed():
                    self.seen.append(flat(pl_module))

    module, loads = module_of("lion"), Loads()
    trainer = make_trainer(PACKAGES[0], strategy=SPARSE, max_epochs=4, callbacks=[loads])
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module, make_data(), make_data())
    return torch.cat([x.flatten() for x in loads.best.values()]), loads.seen[0], flat(module)


def test_the_best_weights_that_are_loaded_between_steps_count(two_ranks: Ranks) -> None:
    (best, seen, after), other = two_ranks(best_is_loaded)
    assert torch.equal(after, other[2]) and torch.equal(seen, other[1])
    assert float((seen - best).abs().max()) <= 0.0143  # one step of Lion away, and its decay
    assert int((seen != best).sum()) < 0.5 * len(best)


def averaged() -> str:
    trainer = make_trainer(PACKAGES[0], strategy=SPARSE, callbacks=[StochasticWeightAveraging(0.1)])
    with pytest.raises(ValueError, match="which would read the copy of one rank") as raised:
        trainer.fit(module_of("lion"), make_data(), make_data())
    return str(raised.value)


def test_averages_over_steps_are_refused(two_ranks: Ranks) -> None:
    assert all("StochasticWeightAveraging" in told for told in two_ranks(averaged))


def by_fabric(path: str) -> tuple[Tensor, Tensor, Tensor]:
    fabric = make_fabric("lightning_fabric", SPARSE)
    plain = make_module(PACKAGES[0]).net
    model, optimizer = fabric.setup(plain, Lion(plain.parameters(), lr=0.01))
    for step in range(6):
        x = torch.randn(8, 10, generator=torch.Generator().manual_seed(2 * step + fabric.global_rank))
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(f"{path}/it.ckpt", {"model": model, "optimizer": optimizer})
    with fabric.strategy.engine.agreed():
        agreed = flat(plain)
    saved = torch.load(f"{path}/it.ckpt", weights_only=True)["model"]
    mine = flat(plain)
    close(fabric)
    return agreed, torch.cat([x.flatten() for x in saved.values()]), mine


def test_fabric_saves_the_agreed_weights(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks(by_fabric, str(tmp_path))
    assert torch.equal(one[0], other[0]) and torch.equal(one[0], one[1])
    assert not torch.equal(one[2], other[2])


def watched() -> list[str]:
    module = module_of("lion")
    callbacks = [
        ls.SparsityMonitor(shadow=["top_k"]),
        ls.ResidualAudit(),
        ls.GradientDistribution(every=2),
        ls.FlushResidual(),
    ]
    strategy = SPARSE | {"watch": ls.Watch(every=5)}
    trainer = make_trainer(PACKAGES[0], strategy=strategy, max_epochs=6, callbacks=callbacks, log_every_n_steps=1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, make_data(), make_data())
    assert "sparse/residual_norm" in trainer.callback_metrics
    return [str(one.message) for one in caught if "sparse_ddp" in str(one.message)]


def test_callbacks_and_the_watchdog_find_nothing_wrong(two_ranks: Ranks) -> None:
    assert two_ranks(watched) == [[], []]


def clamp(module: nn.Module) -> None:
    for p in module.parameters():
        p.data.clamp_(-0.1, 0.1)


def clamped_and_saved(path: str) -> Tensor:
    """Weights that a callback clamps after each step, as files and validation have them."""

    class Clamps(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
            clamp(pl_module)
            trainer.save_checkpoint(f"{path}/{trainer.global_rank}.ckpt")
            self.saved = torch.cat([x.flatten() for x in pl_module.state_dict().values()]).clone()

    clamps = Clamps()
    trainer = make_trainer(PACKAGES[0], strategy=SPARSE, callbacks=[clamps], max_steps=4)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(module_of("lion"), make_data(), make_data())
    return clamps.saved


def test_clamped_weights_are_saved_as_all_ranks_agree(two_ranks: Ranks, tmp_path: Path) -> None:
    one, other = two_ranks(clamped_and_saved, str(tmp_path))
    assert torch.equal(one, other) and float(one.abs().max()) <= 0.1 + 1e-6


def clamped_last(hook: str) -> tuple[Tensor, Tensor, str]:
    """Weights behind a fit, those of a file that is saved then, and what was warned of at the end."""

    class Clamps(Callback):
        pass

    setattr(Clamps, hook, lambda self, trainer, pl_module, *args, **kwargs: clamp(pl_module))
    module = module_of("lion")
    trainer = make_trainer(PACKAGES[0], strategy=SPARSE, callbacks=[Clamps()], max_steps=4)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, make_data(), make_data())
    saved = torch.cat([x.flatten() for x in module.state_dict().values()])
    return flat(module), saved, " ".join(str(one.message) for one in caught if "closed" in str(one.message))


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_end"])
def test_weights_that_are_written_to_last_are_equal_behind_a_fit(two_ranks: Ranks, hook: str) -> None:
    one, other = two_ranks(clamped_last, hook)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], one[0])
    assert float(one[0].abs().max()) <= 0.1 + 1e-6 and one[2] == other[2] == ""
