"""`Trainer(strategy="sparse_ddp")` in both Lightning packages, on two real processes."""

from __future__ import annotations

import importlib
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import PACKAGES, flat, make_data, make_module, make_trainer

FABRICS = ["lightning_fabric", "lightning.fabric"]


def strategy_class(package: str) -> Any:
    name = {"pytorch_lightning": "pytorch_lightning", "lightning.pytorch": "lightning"}[package]
    return importlib.import_module(f"lightning_sparse.integrations.{name}").SparseDDPStrategy


def fit(
    package: str, strategy: Any, layers: str = "plain", options: dict[str, Any] | None = None
) -> tuple[Tensor, int, str]:
    """Parameters after two epochs, number of exchanges, class of the strategy. A dict is for SparseDDPStrategy."""
    if isinstance(strategy, dict):
        strategy = strategy_class(package)(**strategy)
    trainer = make_trainer(package, strategy=strategy, **options or {})
    module = make_module(package, layers)
    trainer.fit(module, make_data(), make_data(16))
    engine = getattr(trainer.strategy, "engine", None)
    return flat(module), 0 if engine is None else engine.step, type(trainer.strategy).__module__


@pytest.mark.parametrize("package", PACKAGES)
def test_the_name_alone_trains_sparsely(two_ranks: Ranks, package: str) -> None:
    dense = two_ranks(fit, package, "ddp")
    sparse = two_ranks(fit, package, "sparse_ddp")
    # 48 samples, 2 ranks, batches of 8, 2 epochs: 6 steps, one bucket each.
    assert [calls for _, calls, _ in sparse] == [6, 6]
    assert [calls for _, calls, _ in dense] == [0, 0]
    assert torch.equal(sparse[0][0], sparse[1][0])
    assert not torch.equal(sparse[0][0], dense[0][0])
    assert sparse[0][2] == "lightning_sparse.integrations." + package.removesuffix(".pytorch")


@pytest.mark.parametrize(
    ("case", "package", "sparsifier"),
    covering(
        product(["default", "view", "find_unused", "static_graph", "accumulate"], PACKAGES, ["top_k", "exdyna"]),
        together=1,
        seen_as=lambda case, package, sparsifier: (case, (package, sparsifier)),
    ),
)
def test_density_1_trains_like_ddp(two_ranks: Ranks, case: str, package: str, sparsifier: str) -> None:
    ddp_options: dict[str, dict[str, Any]] = {
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    }
    keywords = ddp_options.get(case, {})
    options = {"accumulate_grad_batches": 3} if case == "accumulate" else {}
    layers = "unused" if case in ("find_unused", "static_graph") else "plain"
    plain = two_ranks(fit_ddp, package, keywords, layers, options)
    chosen = {"sparsifier": sparsifier, "density": 1.0, **keywords}
    # Bit for bit: two ranks, see tests/engine/test_engine.py.
    for (parameters, calls, _), reference in zip(two_ranks(fit, package, chosen, layers, options), plain, strict=True):
        assert torch.equal(parameters, reference)
        assert calls == (2 if case == "accumulate" else 6)


def fit_ddp(package: str, keywords: dict[str, Any], layers: str, options: dict[str, Any]) -> Tensor:
    strategy = importlib.import_module(package).strategies.DDPStrategy(**keywords)
    return fit(package, strategy, layers, options)[0]


class SumOverRanks(torch.autograd.Function):
    """A differentiable all-reduce; its gradient is one, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over all ranks for CPUs, where torch's SyncBatchNorm has no kernels.

    Its backward communicates, too: collectives of the model and of the exchange run side by side.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        rows = torch.cat([x.mean(0), x.square().mean(0)])
        mean, square = (SumOverRanks.apply(rows) / dist.get_world_size()).chunk(2)
        return (x - mean) / (square - mean.square() + self.eps).sqrt() * self.weight + self.bias


def fit_synced(package: str, strategy: Any) -> tuple[Tensor, bool]:
    sync = importlib.import_module(package + ".plugins.layer_sync").LayerSync

    class Plugin(sync):  # type: ignore[misc, valid-type]
        def apply(self, model: Any) -> Any:
            model.net[1] = SyncedBatchNorm(30)
            return model

        def revert(self, model: Any) -> Any:
            return model

    if isinstance(strategy, dict):
        strategy = strategy_class(package)(**strategy)
    trainer = make_trainer(package, strategy=strategy, plugins=[Plugin()])
    module = make_module(package, "norm")
    trainer.fit(module, make_data(), make_data(16))
    return flat(module), isinstance(module.net[1], SyncedBatchNorm)


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_synchronised_batch_normalisation_trains_like_ddp(two_ranks: Ranks, package: str) -> None:
    chosen = {"sparsifier": "exdyna", "density": 1.0}
    for (plain, was_synced), (sparse, _) in zip(
        two_ranks(fit_synced, package, "ddp"), two_ranks(fit_synced, package, chosen), strict=True
    ):
        assert was_synced
        assert torch.equal(plain, sparse)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="SyncBatchNorm and NCCL need two GPUs")
def test_sync_batchnorm_on_gpus_trains_like_ddp() -> None:
    options = {"sync_batchnorm": True, "accelerator": "gpu"}
    with Ranks(2, "cpu:gloo,cuda:nccl") as ranks:
        plain = ranks(fit, "pytorch_lightning", "ddp", "norm", options)
        sparse = ranks(fit, "pytorch_lightning", {"density": 1.0}, "norm", options)
    # Device kernels may sum in another order.
    torch.testing.assert_close(sparse[0][0], plain[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("package", PACKAGES)
def test_sync_batchnorm_converts_the_model(package: str) -> None:
    # The conversion alone: its forward has no CPU kernels.
    trainer = make_trainer(package, strategy="sparse_ddp", sync_batchnorm=True)
    assert trainer.strategy._layer_sync is not None
    module = trainer.strategy._layer_sync.apply(make_module(package, "norm"))
    assert isinstance(module.net[1], nn.SyncBatchNorm)


def fit_with_everything_else(package: str) -> tuple[bool, int, int, list[int]]:
    """Two fits with one strategy, and test, validate and predict around them."""
    warnings.filterwarnings("ignore", message="Using `DistributedSampler`")  # Lightning's advice on evaluation
    data, module = make_data(), make_module(package)
    trainer = make_trainer(package, strategy={"sparsifier": "top_k"}, limit_val_batches=1)
    trainer.validate(module, data, verbose=False)
    without_fit = trainer.strategy.engine is None
    trainer.fit(module, data, data)
    first = trainer.strategy.engine.step
    trainer.fit_loop.max_epochs += 1
    trainer.fit(module, data, data)
    second = trainer.strategy.engine.step
    trainer.test(module, data, verbose=False)
    predictions = trainer.predict(module, data)
    return without_fit, first, second, [len(p) for p in predictions]


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_fit_again_and_evaluate(two_ranks: Ranks, package: str) -> None:
    for without_fit, first, second, predicted in two_ranks(fit_with_everything_else, package):
        assert without_fit
        assert (first, second) == (6, 9), "a fit that follows goes on counting"
        assert sum(predicted) == 24


@pytest.mark.parametrize(
    ("package", "name", "others"),
    [
        *((package, "StrategyRegistry", {"sparse_hsdp"}) for package in PACKAGES),
        *((package, "STRATEGY_REGISTRY", set()) for package in FABRICS),
    ],
)
def test_all_names_are_registered(package: str, name: str, others: set[str]) -> None:
    registry = getattr(importlib.import_module(package + ".strategies"), name)
    known = registry.available_strategies()
    ours = {name for name in known if "sparse" in name}
    assert ours == {f"sparse_{name}" for name in known if name.startswith("ddp")} | others
    room = importlib.import_module(f"lightning_sparse.integrations.{package.partition('.')[0]}")
    for name in sorted(ours - others):
        strategy, plain = registry.get(name), registry.get(name.removeprefix("sparse_"))
        assert type(strategy) is (room.SparseDDPStrategy if others else room.FabricSparseDDPStrategy)
        assert strategy._start_method == plain._start_method
        flags = [one._ddp_kwargs.get("find_unused_parameters", False) for one in (strategy, plain)]
        assert flags[0] == flags[1]
        assert type(strategy.config.sparsifier) is ls.sparsifiers.UnionTopK


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_trainers_accept_the_name_with_any_precision(precision: str) -> None:
    for package in PACKAGES:
        trainer = make_trainer(package, strategy="sparse_ddp", precision=precision)
        assert trainer.strategy.precision_plugin.precision == precision


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sparsifier": "exdina"}, ValueError, "Unknown sparsifier 'exdina'. Did you mean 'exdyna'"),
    ({"sparsifier": ls.sparsifiers.TopK}, ValueError, r"write TopK\(\)"),
    ({"sparsifier": None}, ValueError, "Expected a sparsifier or its name, but got None"),
    ({"density": 0}, ValueError, r"in \(0, 1\].*but got 0"),
    ({"density": 1.01}, ValueError, r"in \(0, 1\].*but got 1.01"),
    ({"exchange": "gather_pair"}, ValueError, "Did you mean 'gather_pairs'"),
    ({"sparsifier": "everything", "exchange": "gather_pairs"}, ValueError, "Everything's are everything.*fit: dense"),
    ({"memory": "residul"}, ValueError, r"Unknown memory 'residul'\. Did you mean 'residual'"),
    ({"grouping": "modle"}, ValueError, "Did you mean 'model'"),
    ({"ddp_comm_hook": print}, ValueError, "does not take ddp_comm_hook.*one communication hook"),
    ({"ddp_comm_state": 3, "ddp_comm_wrapper": print}, ValueError, "ddp_comm_state, ddp_comm_wrapper"),
    ({"model_averaging_period": 4}, ValueError, "model_averaging_period"),
    ({"dim": 1, "ddp_comm_hook": print, "process_group": 3}, ValueError, "not take .*(dim|group|hook), .*, .*ignored"),
    ({"delay_all_reduce_named_params": []}, ValueError, "or be ignored"),
    ({"broadcast_buffers": 1}, ValueError, "broadcast_buffers to be one of True, False, None, but got 1"),
]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("keywords", "error", "message"), BAD, ids=[str(list(b[0])) + str(i) for i, b in enumerate(BAD)]
)
def test_bad_settings_fail_at_construction(
    package: str, keywords: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        strategy_class(package)(**keywords)


@pytest.mark.parametrize(("package", "other"), [PACKAGES, PACKAGES[::-1], FABRICS, FABRICS[::-1]])
def test_a_strategy_for_the_other_package_says_which_import_is_meant(package: str, other: str) -> None:
    kind, right = "Fabric" if package in FABRICS else "Trainer", other.partition(".")[0]
    name = "FabricSparseDDPStrategy" if package in FABRICS else "SparseDDPStrategy"
    ours = getattr(importlib.import_module(f"lightning_sparse.integrations.{package.partition('.')[0]}"), name)
    make = getattr(importlib.import_module(other), kind)
    with pytest.raises(ValueError, match=rf"a {other}.{kind} needs .* lightning_sparse.integrations.{right}>"):
        make(accelerator="cpu", devices=1, strategy=ours())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_name_that_nobody_knows_is_refused(package: str) -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        make_trainer(package, strategy="sparse_ddp_exdyna")


@pytest.mark.parametrize(
    ("precision", "method"),
    by_default(covering(in_turns(["bf16-mixed", "bf16-true", "64-true"], ["exdyna", "top_k"]), together=1), 2),
)
def test_other_precisions_train_alike_on_all_ranks(two_ranks: Ranks, precision: str, method: str) -> None:
    results = two_ranks(fit, "pytorch_lightning", {"sparsifier": method}, "plain", {"precision": precision})
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0].isfinite().all()
    assert results[0][0].dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)


def test_defaults_of_ddp_are_not_passed_on() -> None:
    # A configuration dumped with one torch version stays valid with another.
    assert strategy_class("pytorch_lightning")()._ddp_kwargs == {}
    given = strategy_class("pytorch_lightning")(bucket_cap_mb=3, static_graph=True, broadcast_buffers=False)._ddp_kwargs
    assert given == {"bucket_cap_mb": 3, "static_graph": True, "broadcast_buffers": False}
    # torch 2.13 warns of broadcast_buffers, and says to use this one.
    given = strategy_class("pytorch_lightning")(forward_sync_buffers=False)._ddp_kwargs
    assert given == {"forward_sync_buffers": False}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_lightning_that_attaches_no_exchange_does_not_train_densely(not_launched: None, package: str) -> None:
    def configure_ddp(self: Any) -> None:
        self.model = self._setup_model(self.model)

    base = strategy_class(package)
    later = type("Later", (base,), {"configure_ddp": configure_ddp})
    trainer = make_trainer(package, strategy=later(), devices=1)
    try:
        with pytest.raises(RuntimeError, match="would be averaged densely"):
            trainer.fit(make_module(package), make_data(96), make_data(16))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
