"""Fixtures that several folders share."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import covering
from tests.forked import spawned_warm
from tests.ranks import Ranks
from tests.warm import warm_python

if TYPE_CHECKING:
    from tests.streams import Streams

BROWSER = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
BROWSER += ["--disable-background-networking", "--disable-component-update"]


def pytest_configure(config: pytest.Config) -> None:
    # What a run leaves out anyway need not be collected.
    covering.everything = config.option.markexpr != "not thorough"
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]  # workers are warm, and what they start need not be


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        spec.python = shlex.quote(warm_python())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["python"] = sys.executable


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long and mostly waits runs beside the many short tests, not alone when these are over.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    # What is there by now stays. Each look at all of it for garbage takes 0.3 s, 4 % of the time of short tests.
    gc.freeze()


@pytest.fixture(autouse=True)
def own_weights_and_biases() -> Iterator[None]:
    """W&B leaves the address of its process in the environment: programs of later tests would write through it."""
    yield
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture
def not_launched() -> Iterator[None]:
    """An environment in which nobody has started ranks; Lightning leaves addresses and ports in it."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def warm_spawn() -> Iterator[None]:
    with spawned_warm():
        yield


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One real process."""
    ranks = Ranks(1)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two real processes."""
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    """Four of them, which take memory as long as they are there."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """Three real processes: sums depend on their order, and nothing divides evenly."""
    with Ranks(3) as ranks:
        yield ranks


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, whose engines end with it."""
    import torch.distributed as dist

    from tests.engines import closing

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with closing():
        yield
    dist.destroy_process_group()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> Iterator[Streams]:
    """A device with a main stream and a side stream, on CPU tensors."""
    from tests.streams import play

    played = play(monkeypatch)
    with played:
        yield played


@pytest.fixture
def chromium(tmp_path: Path) -> Iterator[Any]:
    """A page of a browser that notes requests and complaints."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=found, args=BROWSER, viewport={"width": 1200, "height": 800}
        )
        page = context.pages[0]
        page.set_default_timeout(100_000)
        page.noted = []
        page.on("console", lambda message: page.noted.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.noted.append(f"error: {error}"))
        page.on("request", lambda request: page.noted.append(f"request: {request.url[:100]}"))
        yield page
        context.close()
