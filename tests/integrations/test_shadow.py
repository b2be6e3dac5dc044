"""Sparsifiers that look on: what they see is what they would have seen, and training does not notice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.engine.network import TorchCollective
from lightning_sparse.integrations.callback import LocalGradients
from lightning_sparse.integrations.shadow import Shadow
from tests.integrations.documented import documented
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, flat, make_data, make_module, make_trainer

METHODS = ["top_k", "exdyna", "union_top_k", "sidco_e"]


def train(strategy: Any, shadow: list[str], **options: Any) -> tuple[Tensor, dict[str, float]]:
    callbacks = [ls.SparsityMonitor(shadow=shadow, shadow_every=2, shadow_density=0.05, table=False)] if shadow else []
    trainer = make_trainer(
        "pytorch_lightning", strategy=strategy, max_epochs=1, callbacks=callbacks, log_every_n_steps=1, **options
    )
    module = make_module("pytorch_lightning")
    trainer.fit(module, make_data(64), make_data(16))
    found = {name.removeprefix("sparse/shadow/"): float(x) for name, x in trainer.callback_metrics.items()}
    return flat(module), {name: x for name, x in found.items() if "/" in name and not name.startswith("sparse/")}


def beside(strategy: str, options: dict[str, Any]) -> tuple[bool, dict[str, float]]:
    chosen = (
        ls.SparseDDPStrategy(sparsifier="everything", rules=EVERYTHING_SPARSE) if strategy == "sparse_ddp" else strategy
    )
    with warnings.catch_warnings(action="ignore"):
        alone, nothing = train("ddp", [], **options)
        with_shadow, found = train(chosen, METHODS, **options)
    assert nothing == {}
    return torch.equal(alone, with_shadow), found


@pytest.mark.parametrize(("strategy", "options"), [("ddp", {"accumulate_grad_batches": 2}), ("sparse_ddp", {})])
def test_training_does_not_notice(two_ranks: Ranks, strategy: str, options: dict[str, Any]) -> None:
    results = two_ranks(beside, strategy, options)
    for same, found in results:
        assert same, "bit for bit those of plain DDP"
        assert found == results[0][1]
        names = {f"{method}/{quantity}" for method in METHODS for quantity in documented("shadow/<name>")}
        assert found.keys() == names | {"dense/sent_mb"}
        for method in METHODS:
            assert 0 < found[f"{method}/density"] < 0.2
            assert 0 < found[f"{method}/energy"] < 1
            assert found[f"{method}/sent_mb"] < found["dense/sent_mb"]
        assert found["top_k/threshold_error"] == found["exdyna/threshold_error"] == 0  # their counts are exact
        assert found["dense/sent_mb"] == pytest.approx(4 * 423 / 1e6)


def streams() -> list[dict[str, list[tuple[float, float]]]]:
    """What a shadow that is shown a stream of gradients says of each method, and what `simulate` does."""
    rank, n = torch.distributed.get_rank(), torch.distributed.get_world_size()
    stream = torch.randn(4, n, 400, generator=torch.Generator().manual_seed(0)) ** 3
    parameters = {"w": torch.nn.Parameter(torch.zeros(20, 20))}
    shadow = Shadow(parameters, METHODS, ls.engine.config.SparsificationConfig(density=0.05), TorchCollective())
    shown: dict[str, list[tuple[float, float]]] = {name: [] for name in METHODS}
    for rows in stream:
        gradients = {"w": rows[rank].clone()}
        shadow.step(gradients)
        assert torch.equal(gradients["w"], rows[rank])
        for name, seen in shown.items():
            seen.append((shadow.quantities[f"{name}/density"], shadow.quantities[f"{name}/sent_mb"]))
    before = dict(shadow.quantities)
    shadow.step({"w": torch.full((400,), float("nan") if rank else 1.0)})
    assert shadow.quantities == before, "a skipped step says nothing, on all ranks"
    simulated = {
        name: [
            (trace.density, trace.quantities["traffic/sent_mb"])
            for trace in ls.simulate(stream, sparsifier=name, density=0.05)
        ]
        for name in METHODS
    }
    return [shown, simulated]


def test_it_does_what_the_method_does(two_ranks: Ranks) -> None:
    for shown, simulated in two_ranks(streams):
        for name in METHODS:
            for step, expected in zip(shown[name], simulated[name], strict=True):
                assert step == pytest.approx(expected), name


def test_energy_is_the_share_that_leaves() -> None:
    parameters = {"w": torch.nn.Parameter(torch.zeros(20, 20))}
    gradient = torch.zeros(400)
    gradient[:3] = torch.tensor([3.0, 4.0, 12.0])
    shadow = Shadow(
        parameters, [ls.sparsifiers.TopK()], ls.engine.config.SparsificationConfig(density=1 / 400), TorchCollective()
    )
    shadow.step({"w": gradient})
    assert shadow.quantities["top_k/energy"] == pytest.approx(144 / 169)
    shadow.step({})  # residual alone: 3 and 4 are left
    assert shadow.quantities["top_k/energy"] == pytest.approx(16 / 25)
    with pytest.raises(ValueError, match="'top_k' twice"):
        Shadow(parameters, ["top_k", ls.sparsifiers.TopK()], ls.engine.config.SparsificationConfig(), TorchCollective())


def test_gradients_are_copied_only_when_asked() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    unused = torch.nn.Parameter(torch.ones(2))
    watching = LocalGradients({"weight": weight, "unused": unused})
    weight.square().sum().backward()
    assert watching.take() == {}
    watching.start()
    factor = torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last)
    weight.grad = None
    (weight * factor).sum().backward()
    (weight * factor).sum().backward()
    found = watching.take(torch.tensor(2.0))
    assert list(found) == ["weight"]
    assert torch.equal(found["weight"], factor.permute(0, 2, 3, 1).flatten()), "sums, in the order of memory"
    assert not watching.started
    assert not weight._post_accumulate_grad_hooks


def test_wrong_settings_are_refused() -> None:
    for options, words in (
        ({"shadow": ["exdina"]}, "Did you mean 'exdyna'"),
        ({"shadow": 3}, "sparsifier or its name, but got 3"),
        ({"shadow": ls.sparsifiers.TopK}, r"write TopK\(\)"),
        ({"shadow_every": 0}, "shadow_every to be"),
        ({"groups": 3}, "groups to be True or False"),
        ({"table": "no"}, "table to be True or False"),
        ({"shadow_density": 2.0}, "density to be"),
    ):
        with pytest.raises(ValueError, match=words):
            ls.SparsityMonitor(**options)


def test_one_sparsifier_may_be_named_without_a_list() -> None:
    assert (
        ls.SparsityMonitor(shadow="top_k").shadow
        == ls.SparsityMonitor(shadow=[ls.sparsifiers.TopK()]).shadow
        == [ls.sparsifiers.TopK()]
    )
    with pytest.raises(ValueError, match=r"'topc'.*top_k"):
        ls.SparsityMonitor(shadow="topc")
