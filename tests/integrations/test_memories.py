"""Memories in training: dense groups, and the optimizer that has to go with them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lightning_sparse as ls
from tests.covering import by_default, covering, in_turns
from tests.ranks import Ranks
from tests.trainers import PACKAGES, flat, make_data, make_module, make_trainer


def fit(package: str, strategy: Any, name: str, settings: dict[str, Any], devices: int = 2) -> tuple[Tensor, str]:
    """Parameters after one epoch with an optimizer of torch's, and what was warned of or refused."""
    module = make_module(package)
    module.configure_optimizers = lambda: getattr(torch.optim, name)(module.parameters(), **settings)
    trainer = make_trainer(package, strategy=strategy, max_epochs=1, devices=devices)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            trainer.fit(module, make_data(), make_data(16))
        except ValueError as error:
            return flat(module), str(error)
    return flat(module), " ".join(str(w.message) for w in caught if "Correction" in str(w.message))


@pytest.mark.parametrize("nesterov", by_default([False, True]))
def test_momentum_correction_at_full_density_trains_like_ddp_with_momentum(two_ranks: Ranks, nesterov: bool) -> None:
    reference = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    [(plain, _), _] = two_ranks(fit, "pytorch_lightning", "ddp", "SGD", reference)
    memory = ls.memories.MomentumCorrection(0.9, nesterov)
    for sparsifier, dense in (("top_k", []), ("exdyna", ["*.bias"]), ("top_k", ["*.weight"]), ("everything", [])):
        strategy = {"sparsifier": sparsifier, "density": 1.0, "memory": memory, "dense": dense}
        for parameters, said in two_ranks(fit, "pytorch_lightning", strategy, "SGD", {"lr": 0.1}):
            # Six steps of float32 momentum, whose products and sums are rounded in another order.
            torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-6)
            assert said == ""


def test_clipping_reaches_dense_groups(two_ranks: Ranks) -> None:
    def moved(max_norm: float, dense: list[str]) -> float:
        strategy = {"density": 1.0, "memory": ls.memories.ClipByNorm(max_norm), "grouping": "model", "dense": dense}
        before = flat(make_module("pytorch_lightning"))
        [(parameters, _), _] = two_ranks(fit, "pytorch_lightning", strategy, "SGD", {"lr": 1.0})
        return float((parameters - before).norm())

    for dense in ([], ["*"]):
        # Six steps of at most 1e-3 / sqrt(2): gradients here are longer.
        assert 1e-3 < moved(1e-3, dense) <= 6e-3 / 2**0.5 + 1e-6
        assert moved(1e3, dense) > 0.1


@pytest.mark.usefixtures("not_launched")
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("dense", [[], ["*.bias"]], ids=["all", "dense biases"])
def test_adam_correction_on_one_device_at_full_density_is_adamw(package: str, dense: list[str]) -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1}
    strategy = {"sparsifier": "top_k", "density": 1.0, "memory": ls.memories.AdamCorrection(0.9), "dense": dense}
    strategy["single_device"] = "sparse"
    try:
        ours, _ = fit(package, strategy, "SGD", settings, devices=1)
        theirs, _ = fit(package, "ddp", "AdamW", settings, devices=1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    # Twelve steps of 0.01 in float32.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("package", by_default(PACKAGES[::-1]))
def test_adam_correction_keeps_ranks_equal(two_ranks: Ranks, package: str) -> None:
    memory = ls.memories.AdamCorrection()
    strategy = {"sparsifier": "shared_top_k", "density": 0.1, "memory": memory, "dense": ["*.bias"]}
    (first, said), (second, _) = two_ranks(fit, package, strategy, "SGD", {"lr": 0.01})
    assert said == ""
    assert torch.equal(first, second)
    assert bool(first.isfinite().all())
    assert not torch.equal(first, flat(make_module(package)))


WRONG: list[tuple[ls.memories.Memory, str, dict[str, Any], str, list[bool]]] = [
    (ls.memories.AdamCorrection(), "AdamW", {}, "but got AdamW. Set torch.optim.SGD(lr=", [True, True]),
    (ls.memories.AdamCorrection(), "SGD", {"lr": 0.1, "momentum": 0.9}, "but got SGD with momentum. Set", [True, True]),
    (ls.memories.ClipByNorm(1.0, ls.memories.AdamCorrection()), "Adam", {}, "but got Adam. Set", [True, True]),
    # A warning is given once, on rank 0.
    (ls.memories.MomentumCorrection(), "SGD", {"lr": 0.1, "momentum": 0.9}, "SGD would apply momentum", [True, False]),
    (ls.memories.Residual(), "AdamW", {}, "Correction", [False, False]),
]


@pytest.mark.parametrize(("case", "package"), covering(in_turns(range(len(WRONG)), PACKAGES), together=1))
def test_the_optimizer_is_looked_at_before_the_first_step(two_ranks: Ranks, case: int, package: str) -> None:
    memory, name, settings, message, said = WRONG[case]
    results = two_ranks(fit, package, {"memory": memory}, name, settings)
    assert [message in answer for _, answer in results] == said
    untouched = [torch.equal(parameters, flat(make_module(package))) for parameters, _ in results]
    assert untouched == [isinstance(memory, (ls.memories.AdamCorrection, ls.memories.ClipByNorm))] * 2
