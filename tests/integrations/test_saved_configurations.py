"""Configurations of other programs: saved by LightningCLI, also with a DDPStrategy, and made by Hydra."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
from collections import UserDict, UserList
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.covering import by_default
from tests.trainers import INTEGRATIONS, PACKAGES

PUBLISHED: dict[str, Any] = yaml.safe_load(
    """
    {accelerator: null, parallel_devices: null, cluster_environment: null, checkpoint_io: null, precision_plugin: null,
    ddp_comm_state: null, ddp_comm_hook: null, ddp_comm_wrapper: null, model_averaging_period: null,
    process_group_backend: null, timeout: '0:30:00', start_method: popen, output_device: null, dim: 0,
    broadcast_buffers: true, process_group: null, bucket_cap_mb: null, find_unused_parameters: false,
    check_reduction: false, gradient_as_bucket_view: false, static_graph: false, delay_all_reduce_named_params: null,
    param_to_hook_all_reduce: null, mixed_precision: null, device_mesh: null}
    """
)
"""As in configurations that are public."""


def strategy_from(package: str, folder: Path, strategy: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The strategy that LightningCLI makes, and the arguments that it saves."""
    pytest.importorskip("jsonargparse", reason="jsonargparse is not installed")
    (folder / "config.yaml").write_text(
        yaml.dump({"trainer": {"strategy": {"class_path": strategy, "init_args": arguments}}})
    )
    cli = importlib.import_module(f"{package}.cli").LightningCLI(
        importlib.import_module(f"{package}.demos.boring_classes").BoringModel,
        run=False,
        seed_everything_default=False,
        args=[f"--config={folder}/config.yaml", "--trainer.accelerator=cpu", "--trainer.logger=false"],
    )
    saved = yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))
    return cli.trainer.strategy, saved["trainer"]["strategy"]["init_args"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning 2.6 calls what it deprecates
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.mark.parametrize("package", by_default(PACKAGES))
def test_a_saved_ddp_strategy_becomes_ours_by_its_class_path(package: str, tmp_path: Path) -> None:
    ours = f"lightning_sparse.integrations.{INTEGRATIONS[package][0]}.SparseDDPStrategy"
    _, saved = strategy_from(package, tmp_path, f"{package}.strategies.DDPStrategy", {})
    assert {"ddp_comm_hook", "output_device", "mixed_precision"} < saved.keys()
    for arguments in (saved, PUBLISHED):
        strategy, again = strategy_from(package, tmp_path, ours, arguments)
        assert strategy.config == strategy_from(package, tmp_path, ours, {"timeout": "0:30:00"})[0].config
        assert strategy.config.timeout == timedelta(minutes=30)
        assert strategy._ddp_kwargs == {}  # DDP's own defaults
        assert arguments.keys() <= again.keys()
        assert strategy_from(package, tmp_path, ours, again)[0].config == strategy.config


def test_what_has_no_effect_is_refused_by_one_sentence(tmp_path: Path) -> None:
    wrong = {"dim": 1, "output_device": 0, "model_averaging_period": 4, "check_reduction": True}
    with pytest.raises(ValueError, match="does not take") as raised:
        strategy_from(PACKAGES[0], tmp_path, "lightning_sparse.SparseDDPStrategy", {**PUBLISHED, **wrong})
    told = str(raised.value).partition("does not take ")[2].partition(": ")[0]
    assert set(told.split(", ")) == wrong.keys()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["SparseDDPStrategy", "FabricSparseDDPStrategy"])
def test_all_arguments_of_lightning_and_ddp_are_known(package: str, name: str) -> None:
    module = importlib.import_module(f"lightning_sparse.integrations.{INTEGRATIONS[package]['Fabric' in name]}")
    strategy = getattr(module, name)
    theirs = next(kind for kind in strategy.__mro__ if kind.__name__ == "DDPStrategy")
    parameters = {**inspect.signature(DistributedDataParallel).parameters, **inspect.signature(theirs).parameters}
    defaults = {n: p.default for n, p in parameters.items() if n not in ("module", "device_ids", "kwargs")}
    for given in (defaults, {**defaults, **dict.fromkeys(strategy.unused)}):
        assert strategy(**given)._ddp_kwargs == {}
    with pytest.raises(ValueError, match=f"{name} does not take process_group, "):
        strategy(process_group=3, device_mesh=4)


@pytest.mark.parametrize("kind", ["of our own", "of Hydra"])
def test_lists_and_dictionaries_of_other_kinds_become_plain(kind: str) -> None:
    if kind == "of Hydra":
        make = pytest.importorskip("omegaconf", reason="hydra-core is not installed").OmegaConf.create
    else:
        make = lambda given: UserList(given) if isinstance(given, list) else UserDict(given)  # noqa: E731
    rules = ls.Rules(dense=make(["a.*"]), sparse=make(["b"]), densities=make({"c.*": 0.5}))
    config = ls.SparseDDPStrategy(dense=make(["*.bias"]), rules=rules, watch=ls.Watch(every=5)).config
    plain = ls.SparseDDPStrategy(
        dense=["*.bias"], rules=ls.Rules(["a.*"], ["b"], {"c.*": 0.5}), watch=ls.Watch(5)
    ).config
    assert config == plain == pickle.loads(pickle.dumps(config))
    assert json.dumps(config.as_dict()) == json.dumps(plain.as_dict())
    assert ls.SparsityMonitor(shadow=make(["top_k"])).shadow == [ls.sparsifiers.TopK()]
