"""Side files: pairs with the checkpoint at every moment, agreement on the way back, other numbers of ranks."""

from __future__ import annotations

import functools
import io
import os
import pickle
import random
import re
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

import lightning_sparse as ls
from lightning_sparse.api.checkpoint import SideFile, SideFiles, restore, side_directory
from lightning_sparse.engine.config import StrategyConfig
from lightning_sparse.engine.state.schema import NOTHING, STATE_FORMAT, check_state, checksum, renamed, with_pending
from tests.covering import by_default
from tests.network import AbandonedError, Network, Port

SHAPES: dict[str, dict[str, int]] = {
    "weight": {"residual": 6, "momentum": 6},
    "bias": {"residual": 3, "momentum": 3},
    "scale": {},  # dense
}


class Engine:
    """What is left of an engine without gradients: `run` and `step` name its state, which differs from rank to rank."""

    def __init__(self, comm: Any, run: str = "a", step: int = 0) -> None:
        self.comm, self.run_id, self.step, self.device = comm, run, step, torch.device("cpu")
        self.settings = SimpleNamespace(node_size=None)
        self.loaded: dict[str, Any] | None = None
        self.flushing = False
        self.remarks: list[str] = []

    def state_dict(self, moment: torch.Tensor | None = None) -> dict[str, Any]:
        assert moment is None or int(moment) == self.step
        generator = torch.Generator().manual_seed(hash((self.run_id, self.step, self.comm.rank)) % 2**31)
        return {
            **NOTHING,
            "format": STATE_FORMAT,
            "moment": self.step,
            "step": self.step,
            "skipped_steps": 0,
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
            "settings": {"density": 0.1},
            "parameters": {
                name: {key: torch.randn(numel, generator=generator) for key, numel in vectors.items()}
                for name, vectors in SHAPES.items()
            },
            "groups": [
                {"name": "all", "parameters": list(SHAPES), "numel": 9, "state": {"selector": [1.0, None, None]}}
            ],
        }

    _parts = 1
    refuses = False
    frozen: ClassVar[dict[str, Any]] = {}

    @property
    def _rank(self) -> int:
        return self.comm.rank  # type: ignore[no-any-return]

    @property
    def _world_size(self) -> int:
        return self.comm.world_size  # type: ignore[no-any-return]

    _exchanging = _world_size

    def _all_gather_object(self, what: Any) -> list[Any]:
        return self.comm.all_gather_object(what, self.device)  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        if self.refuses and state["parameters"]:
            raise ValueError("rank 1: of another planet.")  # as the real one does, on all ranks
        self.loaded = state
        self.step = state["step"]
        return self.remarks

    def _flush_next_step(self) -> None:
        self.flushing = True


def write(content: Any, path: str) -> None:
    """As plugins do: a file appears when it is complete."""
    file_system, root = fsspec.url_to_fs(path)
    file_system.makedirs(os.path.dirname(root), exist_ok=True)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    with file_system.open(root + ".part", "wb") as file:
        file.write(buffer.getvalue())
    file_system.mv(root + ".part", root)


def load(path: str) -> Any:
    with fsspec.open(path, "rb") as file:
        return torch.load(file, weights_only=True)


class Rank(Port):
    """A rank that can also share objects."""

    def all_gather_object(self, what: Any, device: torch.device) -> list[Any]:
        text = torch.tensor(list(pickle.dumps(what)), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor(len(text)))
        rows = self.all_gather(torch.nn.functional.pad(text, (0, int(lengths.max()) - len(text))))
        return [pickle.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def on_ranks(n: int, job: Callable[[Port], Any]) -> list[Any]:
    """What `job(comm)` returned or raised, by rank."""
    network = Network(n)

    def work(rank: int) -> Any:
        network.begin(rank)
        try:
            return job(Rank(network, rank))
        except BaseException as error:
            return error
        finally:
            network.end(rank)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(work, range(n)))


def results(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def all_raise(match: str, outcomes: list[Any]) -> None:
    for outcome in outcomes:
        with pytest.raises(RuntimeError, match=match):
            raise outcome


class Run:
    """n ranks of one run, which save at a path again and again."""

    def __init__(self, n: int, path: Any, run: str = "a") -> None:
        self.n, self.path, self.run, self.step = n, str(path), run, 0
        self.side_files = [SideFiles() for _ in range(n)]
        self.write, self.write_main = write, write

    def save(self, agreeing: bool = True) -> list[Any]:
        self.step += 1

        def job(comm: Port) -> None:
            engine = Engine(comm, self.run, self.step)
            beside = self.side_files[comm.rank].beside
            with beside(self.path, engine, self.write, comm if agreeing else None) as marker:  # type: ignore[arg-type]
                if comm.rank == 0:
                    self.write_main({"marker": marker, "step": self.step}, self.path)

        return on_ranks(self.n, job)

    def remove(self) -> None:
        file_system, root = fsspec.url_to_fs(self.path)
        if file_system.exists(root):
            file_system.rm(root)
        for rank, side_files in enumerate(self.side_files):
            side_files.remove(self.path, rank, self.n)


def saved(n: int, path: Any, run: str = "a") -> Run:
    """Ranks that have saved once."""
    made = Run(n, path, run)
    results(made.save())
    return made


def restoring(path: Any, marker: Any, make: Any = Engine, read: Any = load, **options: Any) -> Callable[[Port], Engine]:
    def job(comm: Port) -> Engine:
        engine = make(comm, "new")
        restore(engine, str(path), marker, read, **options)
        return engine

    return job


def resumed(n: int, path: Any, **options: Any) -> list[Engine]:
    """Engines of a new run on n ranks that continues from a checkpoint."""
    return results(on_ranks(n, restoring(path, load(str(path))["marker"], **options)))


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def assert_continues(path: Any, n: int, run: str = "a") -> None:
    """Every rank gets its own state of the step that the checkpoint was written at."""
    step = load(str(path))["step"]
    for engine in resumed(n, path, strict=True):
        expected = Engine(engine.comm, run, step).state_dict()
        assert same(engine.loaded, expected)
        assert engine.step == step


def files(path: Any) -> list[str]:
    directory = Path(side_directory(path))
    return sorted(file.name for file in directory.iterdir()) if directory.is_dir() else []


def test_names_of_side_files() -> None:
    file = SideFile(3, 12, "0f-1", 7)
    assert SideFile.parse(file.name) == file
    for other in ("rank-3-of-12.0f-7.pt.tmp", "rank-3.0f-7.pt", "rank-a-of-12.0f-7.pt", "readme.txt"):
        assert SideFile.parse(other) is None


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_rank_gets_its_own_state_back(tmp_path: Path, n: int) -> None:
    run = saved(n, tmp_path / "x.ckpt")
    assert files(run.path) == [f"rank-{rank}-of-{n}.a-1.pt" for rank in range(n)]
    assert_continues(run.path, n)


def test_a_path_on_any_file_system() -> None:
    run = Run(2, "memory://folder/x.ckpt")
    for _ in range(3):
        results(run.save())
    assert_continues(run.path, 2)
    memory = fsspec.filesystem("memory")
    found = sorted(os.path.basename(file) for file in memory.ls("/folder/x.ckpt.sparse", detail=False))
    assert found == [f"rank-{rank}-of-2.a-{number}.pt" for rank in range(2) for number in (2, 3)]
    run.remove()
    assert not memory.exists("/folder/x.ckpt.sparse")


def test_saving_at_one_path_again_and_again_keeps_two_saves(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for n, name in ((3, "old"), (2, "new")):
        run = Run(n, path, name)
        for number in range(1, 5):
            results(run.save())
            assert_continues(path, n, name)
            kept = [f"rank-{rank}-of-{n}.{name}-{i}.pt" for rank in range(n) for i in (number - 1, number) if i]
            if number > 1:
                assert files(path) == kept  # nothing of the 3 ranks of the old run is left
            else:
                assert set(kept) <= set(files(path))


class KilledError(BaseException):
    """The process ends here."""


class Killer:
    """Lets a number of changes of the disk happen, and half of one more; then nothing."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def write(self, content: Any, path: str) -> None:
        self.left -= 1
        if self.left >= 0:
            write(content, path)
            return
        if self.left == -1 and path.endswith(
            ".pt"
        ):  # a side file that does not appear at once, as on some file systems
            write(content, path)
            os.truncate(path, os.path.getsize(path) // 2)
        raise KilledError

    def remove(self, path: str) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError
        os.remove(path)


def test_killed_at_any_moment_the_checkpoint_on_disk_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, finished = 0, False
    while not finished:
        path = tmp_path / str(moments) / "last.ckpt"
        old = Run(2, path, "old")
        for _ in range(2):
            results(old.save())
        killer = Killer(moments)
        run = Run(2, path, "new")
        run.write = run.write_main = killer.write
        with monkeypatch.context() as patch:
            patch.setattr(LocalFileSystem, "rm_file", killer.remove)
            outcomes: list[Any] = []
            while not any(outcomes) and run.step < 4:
                outcomes = run.save()
        assert {type(outcome) for outcome in outcomes if outcome} <= {KilledError, AbandonedError}
        finished = not any(outcomes)
        main = load(str(path))["marker"]["save"]
        assert_continues(path, 2, main.split("-")[0])
        # And the next run clears up.
        third = Run(2, path, "third")
        for _ in range(2):
            results(third.save())
        assert files(path) == [f"rank-{rank}-of-2.third-{number}.pt" for rank in range(2) for number in (1, 2)]
        moments += 1
    assert moments > 4 * 3  # four saves with three files each, and removals


@pytest.mark.parametrize("seed", by_default(range(20), 6))
def test_what_is_written_in_the_background_is_never_removed_too_early(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "last.ckpt"
    saved(2, path, "old")
    choose = random.Random(seed)
    queues: list[deque[tuple[Any, str]]] = [deque(), deque()]
    run = Run(2, path, "new")
    run.write = lambda content, place: queues[int(SideFile.parse(os.path.basename(place)).rank)].append(  # type: ignore[union-attr]
        (content, place)
    )
    run.write_main = lambda content, place: queues[0].append((content, place))
    for _ in range(6):
        results(run.save())
        for queue in queues:
            for _ in range(choose.randrange(5)):
                if queue:
                    write(*queue.popleft())
            save = load(str(path))["marker"]["save"]
            coming = {os.path.basename(place) for queue in queues for _, place in queue}
            assert all(f"rank-{rank}-of-2.{save}.pt" in coming | set(files(path)) for rank in range(2))
    for queue in queues:
        while queue:
            write(*queue.popleft())
    assert_continues(path, 2, "new")
    for _ in range(2):
        results(run.save())
        for queue in queues:
            while queue:
                write(*queue.popleft())
    assert len(files(path)) <= 6


def test_a_rank_that_cannot_write_stops_all_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    run = saved(3, tmp_path / "x.ckpt")

    def fail(content: Any, path: str) -> None:
        if "rank-1-" in path:
            raise OSError(28, "No space left on device " + "\N{SEE-NO-EVIL MONKEY}" * 1000)
        write(content, path)

    run.write = fail
    outcomes = run.save()
    assert all(isinstance(outcome, RuntimeError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert "rank 1: OSError: [Errno 28] No space left on device" in str(outcomes[0])
    assert "Set save_residuals=False" in str(outcomes[0])
    assert len(str(outcomes[0])) < 1000
    assert_continues(run.path, 3)


def test_a_directory_that_another_rank_has_just_removed_is_made_again(tmp_path: Path) -> None:
    run = Run(2, tmp_path / "x.ckpt")
    failed = set()

    def write_later(content: Any, path: str) -> None:
        if path not in failed:
            failed.add(path)
            raise FileNotFoundError(path)
        write(content, path)

    run.write = write_later
    results(run.save())
    assert_continues(run.path, 2)


def test_alone_after_an_error_a_rank_saves_what_it_can(tmp_path: Path) -> None:
    run = Run(2, tmp_path / "x.ckpt")
    for _ in range(3):
        results(run.save(agreeing=False))
    assert len(files(run.path)) == 2 * 3  # nobody knows what the others have: nothing is removed
    assert_continues(run.path, 2)

    def fail(content: Any, path: str) -> None:
        raise OSError("gone")

    run.write = fail
    with pytest.warns(UserWarning, match="could not save its residuals: OSError: gone"):
        results(run.save(agreeing=False))
    assert load(run.path)["step"] == 4


class Moving(Engine):
    """An exchange ends here after the first state was taken: while this rank waits for that, or while ranks agree."""

    def state_dict(self, moment: torch.Tensor | None = None) -> dict[str, Any]:
        state = super().state_dict(moment)
        self.step += moment is None
        return state


class Broken(Engine):
    """An error has ended a step on rank 1 while residuals were being changed."""

    def state_dict(self, moment: torch.Tensor | None = None) -> dict[str, Any]:
        if self.comm.rank == 1:
            raise RuntimeError("An error has ended a step. They cannot be saved.")
        return super().state_dict(moment)


def save_with(path: Path, make: Callable[[Any], Engine], agreeing: bool = True) -> list[Any]:
    """What each of two ranks says when they save, with engines of their own."""

    def job(comm: Port) -> None:
        with SideFiles().beside(path, make(comm), write, comm if agreeing else None) as marker:  # type: ignore[arg-type]
            if comm.rank == 0:
                write({"marker": marker, "step": marker["step"]}, str(path))

    return on_ranks(2, job)


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_all_ranks_save_after_the_newest_exchange_of_any(tmp_path: Path, ahead: int | None) -> None:
    path = tmp_path / "x.ckpt"
    results(save_with(path, lambda comm: Moving(comm, step=7 + (comm.rank == ahead))))
    assert load(str(path))["step"] == 7 + (ahead is not None)
    assert_continues(path, 2)


def test_a_rank_without_a_state_stops_all_or_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    broken = save_with(path, lambda comm: Broken(comm, step=7))
    all_raise(r"rank 1: An error has ended a step\. They cannot be saved\. The check", broken)
    assert not path.exists()
    with pytest.warns(UserWarning, match="Rank 1 could not save its residuals: An error has ended a step"):
        results(save_with(path, lambda comm: Broken(comm, step=7), agreeing=False))
    assert files(path) == ["rank-0-of-2.a-1.pt"]
    with pytest.warns(UserWarning, match="rank 1: rank-1-of-2.a-1.pt is missing .* starts empty on all ranks"):
        resumed(2, path)


def spoil(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """What happens to the file of rank 1."""
    return lambda directory: change(directory / "rank-1-of-2.a-2.pt")


def in_its_place(other: str) -> Callable[[Path], Any]:
    return spoil(lambda file: shutil.copy(file.with_name(other), file))


def edit(change: Callable[[dict[str, Any]], Any], sealed: bool = True) -> Callable[[Path], None]:
    """What somebody else has written, or what time has done to it."""

    def damage(file: Path) -> None:
        content = torch.load(file)
        change(content)
        if sealed:
            content["checksum"] = checksum({key: value for key, value in content.items() if key != "checksum"})
        torch.save(content, file)

    return spoil(damage)


def put(**fields: Any) -> Callable[[Path], None]:
    return edit_state(lambda state: state.update(fields))


def put_bias(**vectors: Any) -> Callable[[Path], None]:
    return edit_state(lambda state: state["parameters"]["bias"].update(vectors))


def edit_state(change: Callable[[dict[str, Any]], Any], sealed: bool = True) -> Callable[[Path], None]:
    return edit(lambda content: change(content["state"]), sealed)


def without(field: str) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: fields.pop(field)


def flip_a_bit(state: dict[str, Any]) -> None:
    state["parameters"]["bias"]["residual"].view(torch.int32)[1] ^= 1 << 20


FILE = "rank-1-of-2.a-2.pt"
DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (spoil(Path.unlink), f"{FILE} is missing from .*files of the saves a-1, a-2"),
    (spoil(lambda file: file.write_bytes(file.read_bytes()[:700])), f"{FILE} cannot be read"),
    (spoil(lambda file: file.write_bytes(b"not a file of torch")), f"{FILE} cannot be read"),
    (in_its_place("rank-1-of-2.a-1.pt"), f"{FILE} holds something else"),
    (in_its_place("rank-0-of-2.a-2.pt"), f"{FILE} holds something else"),
    (edit(without("state"), False), f"{FILE} cannot be read .KeyError"),
    (edit(without("checksum"), False), f"{FILE} cannot be read .KeyError"),
    (edit_state(flip_a_bit, False), f"{FILE} is damaged: .*checksum"),
    (edit_state(lambda state: state.update(settings={}), False), f"{FILE} is damaged"),
    (edit(lambda content: content.update(save="b-2"), False), f"{FILE} is damaged"),
    *(
        (edit_state(without(field)), f"{FILE} holds no state: .*{field}.* but got nothing")
        for field in ("step", "skipped_steps", "rank", "world_size", "settings", "parameters", "counters", "groups")
    ),
    (put(format=2), "holds no state: .*format 4, .* but got format 2"),
    (edit_state(without("format")), "holds no state: Expected a state of format 4"),
    (edit(lambda content: content.update(state=[])), "holds no state: Expected a state of format 4"),
    (put(step="2"), "step to be an integer from 0 on, but got '2'"),
    (put(skipped_steps=-1), "skipped_steps to be an integer from 0 on"),
    (put(counters={"bias": {"steps": None}}), "steps of bias of the state.s counters to be a"),
    (edit_state(lambda state: state["parameters"].update(bias=3)), "bias of the state.s parameters to be a dict"),
    (
        put_bias(residual=torch.ones(3, dtype=torch.int64)),
        "residual of bias of .* to be a vector of finite floating-point numbers, but got a tensor of shape",
    ),
    (put_bias(residual=torch.ones(3, 1)), "a vector"),
    (put_bias(residual=torch.full((3,), float("nan"))), "not finite"),
    (edit_state(lambda state: state["groups"][0].pop("parameters")), "parameters of number 0 of the .* got nothing"),
    (edit_state(lambda state: state["groups"][0].pop("state")), "state of number 0 of the state.s groups"),
    (put(groups=[None]), "number 0 of the state.s groups to be a dict.* but got None"),
    (put(step=9), "something else"),
    (edit(lambda content: content.update(save="b-2")), "something else"),
]
DAMAGES = [(shutil.rmtree, "ranks 0, 1: there are no side files in"), *((d, f"rank 1: .*{r}") for d, r in DAMAGES)]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[reason[-40:] for _, reason in DAMAGES])
def test_what_one_rank_cannot_restore_no_rank_does(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    run = Run(2, tmp_path / "x.ckpt")
    for _ in range(2):
        results(run.save())
    damage(Path(side_directory(run.path)))
    with pytest.warns(UserWarning, match=reason) as caught:
        engines = resumed(2, run.path)
    assert len(caught) == 1
    assert "Error feedback starts empty on all ranks" in str(caught[0].message)
    for engine in engines:
        assert engine.loaded["parameters"] == {} and engine.loaded["groups"] == []
        assert engine.step == 2  # schedules go on
    marker = load(run.path)["marker"]
    outcomes = on_ranks(2, restoring(run.path, marker, strict=True))
    all_raise(reason, outcomes)
    assert all("x.ckpt.sparse belongs to the checkpoint" in str(outcome) for outcome in outcomes)


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


@pytest.mark.parametrize(("seed", "count"), by_default([(0, 20), (1, 300), (2, 300)]))
def test_no_flipped_bit_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, count: int) -> None:
    """Wherever a bit of one rank's file is flipped: all ranks get what was saved, or none does and it is said."""
    monkeypatch.setitem(SHAPES, "weight", {"residual": 1500, "momentum": 1500})
    run = saved(2, tmp_path / "x.ckpt")
    file = Path(side_directory(run.path)) / "rank-1-of-2.a-1.pt"
    generator, lost = random.Random(seed), 0
    for _ in range(count):
        bit = generator.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with warnings.catch_warnings(record=True, action="always") as caught:
            engines = resumed(2, run.path)
        flip(file, bit)
        told = [str(w.message) for w in caught if "residuals" in str(w.message)]
        lost += bool(told)
        for engine in engines:
            expected = Engine(engine.comm, "a", 1).state_dict()
            assert engine.loaded["parameters"] == {} if told else same(engine.loaded, expected), bit
        assert not told or re.search("rank 1: rank-1-of-2.a-1.pt .*Error feedback starts empty on all ranks", told[0])
    assert lost > count / 2
    assert_continues(run.path, 2)


@pytest.mark.parametrize(
    "outside", ["..", "../..", "/", "elsewhere", "../elsewhere.ckpt.sparse", "a\\b.sparse", 7, None]
)
@pytest.mark.parametrize("field", ["directory", "save", "world_size", "step"])
def test_what_a_checkpoint_names_stays_beside_it(tmp_path: Path, field: str, outside: Any) -> None:
    """Parts of names of files are not taken from a checkpoint as they come."""
    if field in ("world_size", "step") and outside == 7:
        outside = -7
    run = saved(1, tmp_path / "in" / "x.ckpt")
    asked: list[str] = []
    marker = load(run.path)["marker"] | {field: outside}
    for place in (tmp_path, tmp_path / "elsewhere", tmp_path / "elsewhere.ckpt.sparse"):
        place.mkdir(exist_ok=True)
        shutil.copy(Path(side_directory(run.path)) / "rank-0-of-1.a-1.pt", place)
    shutil.rmtree(side_directory(run.path))

    def watched(path: str) -> Any:
        asked.append(path)
        return load(path)

    with pytest.warns(UserWarning, match=f"the checkpoint names the {field} .*, which is none"):
        [engine] = results(on_ranks(1, restoring(run.path, marker, read=watched)))
    assert asked == []
    assert engine.loaded is not None and engine.loaded["parameters"] == {}


@pytest.mark.parametrize("marker", [[], "residuals", {}, {"format": 3}])
def test_a_marker_that_is_none_is_said_on_all_ranks(tmp_path: Path, marker: Any) -> None:
    with pytest.warns(UserWarning, match="were not restored .* ranks 0, 1: ") as caught:
        results(on_ranks(2, restoring(tmp_path / "x.ckpt", marker)))
    assert len(caught) == 1


class Refusing(Engine):
    refuses = True


def test_what_an_engine_refuses_no_rank_keeps(tmp_path: Path) -> None:
    run = saved(2, tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="rank 1: of another planet. Error feedback starts empty on all ranks"):
        engines = resumed(2, run.path, make=Refusing)
    assert [(engine.loaded["parameters"], engine.step) for engine in engines] == [({}, 1)] * 2
    marker = load(run.path)["marker"]
    all_raise("of another planet", on_ranks(2, restoring(run.path, marker, Refusing, strict=True)))


def test_a_checkpoint_without_residuals(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with pytest.warns(UserWarning, match="x.ckpt: ranks 0, 1: it was saved without them.*starts empty") as caught:
        engines = results(on_ranks(2, restoring(path, None)))
    assert len(caught) == 1
    for engine in engines:
        assert (engine.loaded["parameters"], engine.loaded["groups"], engine.step) == ({}, [], 0)
    all_raise("saved without them", on_ranks(2, restoring(path, None, strict=True)))


def test_of_a_checkpoint_for_which_nothing_waited_nothing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for strict in (False, True):
        further = functools.partial(Engine, step=3)
        for engine in results(on_ranks(2, restoring(path, None, further, strict=strict, dense=True))):
            assert (engine.loaded["parameters"], engine.step) == ({}, 0)
    with pytest.warns(UserWarning, match="rank 0: it is of a training without .*; rank 1: it was saved without them"):
        results(on_ranks(2, lambda comm: restoring(path, None, dense=comm.rank == 0)(comm)))


@pytest.mark.parametrize("other", [2, 4, None])
def test_another_format_is_not_guessed_at(tmp_path: Path, other: int | None) -> None:
    run = saved(1, tmp_path / "x.ckpt")
    main = load(run.path)
    main["marker"]["format"] = other
    torch.save(main, run.path)
    with pytest.warns(UserWarning, match=f"in format {other}, and this version of lightning-sparse knows 3"):
        resumed(1, run.path)


def test_many_ranks_with_many_reasons_fit_into_one_message(tmp_path: Path) -> None:
    run = saved(12, tmp_path / "x.ckpt")
    for file in Path(side_directory(run.path)).iterdir():
        file.write_bytes("schön ".encode() * 100)
    with pytest.warns(UserWarning, match="rank 7: .* and 4 more ranks"):
        resumed(12, run.path)


def test_what_does_not_fit_is_told_once(tmp_path: Path) -> None:
    run = saved(2, tmp_path / "x.ckpt")

    def make(comm: Port, name: str) -> Engine:
        engine = Engine(comm, name)
        engine.remarks = ["There is no parameter old.weight any more.", "And another."] * comm.rank
        return engine

    with pytest.warns(
        UserWarning, match=r"do not fit in every respect\. On rank 1: There is no parameter old\.weight"
    ) as caught:
        resumed(2, run.path, make=make)
    assert len(caught) == 1
    marker = load(run.path)["marker"]
    all_raise(r"no parameter old\.weight", on_ranks(2, restoring(run.path, marker, make, strict=True)))


def test_links_copies_and_moves(tmp_path: Path) -> None:
    run = saved(2, tmp_path / "a" / "epoch=1.ckpt")
    (tmp_path / "a" / "last.ckpt").symlink_to("epoch=1.ckpt")
    (tmp_path / "elsewhere.ckpt").symlink_to(tmp_path / "a" / "last.ckpt")
    shutil.copy(run.path, tmp_path / "a" / "copy.ckpt")  # what Lightning does where links are not allowed
    for name in ("a/last.ckpt", "elsewhere.ckpt", "a/copy.ckpt"):
        assert_continues(tmp_path / name, 2)
    # To remove a link is not to remove what it points to.
    for rank, side_files in enumerate(run.side_files):
        side_files.remove(tmp_path / "a" / "last.ckpt", rank, 2)
    assert_continues(run.path, 2)
    # A checkpoint takes its directory along, and both may get another name.
    shutil.copy(run.path, tmp_path / "moved.ckpt")
    shutil.move(side_directory(run.path), tmp_path / "moved.ckpt.sparse")
    assert_continues(tmp_path / "moved.ckpt", 2)
    with pytest.warns(UserWarning, match="no side files"):
        resumed(2, run.path)


def test_a_path_relative_to_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = saved(2, "x.ckpt")
    shutil.copy("x.ckpt", "y.ckpt")
    for name in ("x.ckpt", "y.ckpt"):
        assert_continues(name, 2)
    run.remove()
    assert os.listdir() == ["y.ckpt"]


def test_ranks_remove_their_shares_and_nothing_else(tmp_path: Path) -> None:
    run = saved(3, tmp_path / "x.ckpt")
    other = saved(3, tmp_path / "y.ckpt")
    note = Path(side_directory(run.path)) / "note.txt"
    note.write_text("mine")
    everything = files(run.path)
    now = [SideFiles() for _ in range(2)]  # of a later run with fewer ranks
    now[1].remove(run.path, 1, 2)  # which rank 0 has not done
    assert files(run.path) == everything
    shutil.copytree(side_directory(run.path), tmp_path / "z.ckpt.sparse")  # a disk on which there is no checkpoint
    now[1].remove(tmp_path / "z.ckpt", 1, 2)
    assert files(tmp_path / "z.ckpt") == ["note.txt", "rank-0-of-3.a-1.pt", "rank-2-of-3.a-1.pt"]
    now[0].remove(run.path, 0, 2)
    assert files(run.path) == ["note.txt"]
    shutil.rmtree(tmp_path / "z.ckpt.sparse")
    note.unlink()
    other.remove()
    assert not Path(side_directory(other.path)).exists()
    other.remove()
    run.remove()
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt.sparse"]


def test_a_file_that_cannot_be_removed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(1, tmp_path / "x.ckpt")

    def refuse(file_system: LocalFileSystem, path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "rm_file", refuse)
    with pytest.warns(UserWarning, match="Could not remove .*rank-0-of-1.a-1.pt: PermissionError"):
        run.remove()


def test_a_file_that_another_rank_has_just_removed_is_none_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(1, tmp_path / "x.ckpt")

    def late(file_system: LocalFileSystem, path: str) -> None:
        os.remove(path)
        os.remove(path)

    monkeypatch.setattr(LocalFileSystem, "rm_file", late)
    run.remove()
    assert os.listdir(tmp_path) == []


def test_what_is_written_after_its_removal_is_swept_away(tmp_path: Path) -> None:
    run = Run(1, tmp_path / "x.ckpt")
    [side_files] = run.side_files
    queue: list[tuple[Any, str]] = []
    run.write = lambda content, path: queue.append((content, path))
    results(run.save())
    run.remove()
    write(*queue.pop())
    assert len(files(run.path)) == 1
    side_files.sweep()
    assert not Path(side_directory(run.path)).exists()
    # What is saved again after its removal stays.
    results(run.save())
    run.remove()
    run.write = write
    results(run.save())
    side_files.sweep()
    assert_continues(run.path, 1)


def mean(states: list[dict[str, Any]], name: str, key: str) -> np.ndarray[Any, Any]:
    rows = [state["parameters"][name][key].numpy().astype(np.float64) for state in states]
    total: np.ndarray[Any, Any] = np.sum(rows, axis=0) / len(rows)
    return total


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 2), (2, 4), (1, 3), (3, 1)])
@pytest.mark.parametrize("resize", ["merge", "flush"])
def test_other_numbers_of_ranks_keep_the_pending_update(tmp_path: Path, before: int, after: int, resize: str) -> None:
    run = saved(before, tmp_path / "x.ckpt")
    old = results(on_ranks(before, lambda comm: Engine(comm, "a", 1).state_dict()))
    engines = resumed(after, run.path, resize=resize, strict=True)
    assert not any(engine.flushing for engine in resumed(before, run.path, resize=resize))  # nothing to be resized
    for engine in engines:
        assert engine.step == 1
        assert engine.flushing == (resize == "flush")
        assert engine.loaded["groups"] == []
        for name, vectors in SHAPES.items():
            for key in vectors:
                got = engine.loaded["parameters"][name][key]
                assert got.dtype == torch.float32
                np.testing.assert_array_equal(got.numpy(), mean(old, name, key).astype(np.float32))
    # What all new ranks together send is what all old ones would have sent.
    new = [engine.loaded for engine in engines if engine.loaded is not None]
    np.testing.assert_allclose(
        mean(new, "weight", "residual"), mean(old, "weight", "residual"), rtol=2**-23, atol=2**-149
    )


def test_other_numbers_of_ranks_may_drop_the_pending_update_and_say_how_much(tmp_path: Path) -> None:
    run = saved(2, tmp_path / "x.ckpt")
    old = results(on_ranks(2, lambda comm: Engine(comm, "a", 1).state_dict()))
    norm = np.linalg.norm([*mean(old, "weight", "residual"), *mean(old, "bias", "residual")])
    with pytest.warns(
        UserWarning, match=rf"3 ranks instead of 2 and resize='zero': the residuals, an update of norm {norm:.4g} "
    ):
        engines = resumed(3, run.path, resize="zero")
    for engine in engines:
        assert engine.step == 1
        assert not any(v.any() for vectors in engine.loaded["parameters"].values() for v in vectors.values())


def test_averages_that_are_pending_are_dropped_with_the_residuals(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"

    class Within(Engine):
        def state_dict(self, moment: torch.Tensor | None = None) -> dict[str, Any]:
            return with_averages(self.comm.rank)

    results(save_with(path, Within))
    norm = np.linalg.norm([1.5, 2.0, 1.5, -6.5, 3.5, 5.5])
    with pytest.warns(UserWarning, match=rf"3 ranks instead of 2 and resize='zero': .* an update of norm {norm:.4g} "):
        engines = resumed(3, path, resize="zero")
    for engine in engines:
        assert engine.loaded["pending"] == {}


@pytest.mark.parametrize("resize", ["merge", "flush", "zero"])
def test_other_numbers_of_ranks_need_all_files(tmp_path: Path, resize: str) -> None:
    run = saved(3, tmp_path / "x.ckpt")
    (Path(side_directory(run.path)) / "rank-2-of-3.a-1.pt").unlink()
    with pytest.warns(UserWarning, match="ranks 0, 1: rank-2-of-3.a-1.pt is missing") as caught:
        engines = resumed(2, run.path, resize=resize)
    assert len(caught) == 1
    assert not any(engine.flushing for engine in engines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merged_states_are_means_to_the_last_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 1000, generator=generator, dtype=dtype) * torch.logspace(-20, 20, 1000, dtype=dtype)
    head = {**NOTHING, "format": STATE_FORMAT, "step": 3, "skipped_steps": 0, "world_size": 7, "settings": {"a": 0.1}}
    head["rates"] = {"w": 0.1}
    states: Iterator[dict[str, Any]] = (
        {**head, "rank": rank, "parameters": {"w": {"residual": rows[rank]}}} for rank in (3, 1, 0, 2, 6, 5, 4)
    )
    merged = ls.merge_states(states)
    exact = np.sum(rows[[3, 1, 0, 2, 6, 5, 4]].numpy().astype(np.float64), axis=0) / 7
    got = merged["parameters"]["w"]["residual"].numpy()
    np.testing.assert_allclose(got, exact, rtol=2**-24 if dtype == torch.float32 else 1e-13, atol=0)
    assert got.dtype == exact.astype(str(dtype).removeprefix("torch.")).dtype
    assert {**merged, "parameters": {}} == {**head, "rank": 0}


def with_averages(rank: int) -> dict[str, Any]:
    """A state within a step: some averages are pending, and rank 1 has absorbed a gradient more of one parameter."""
    vectors = {name: torch.full((numel,), float(1 + rank)) for name, numel in (("w", 4), ("b", 2))}
    averages = {
        "w": {"indices": torch.tensor([1, 3], dtype=torch.int32), "values": torch.tensor([0.5, -8.0])},
        "b": {"values": torch.tensor([2.0, 4.0])},
    }
    return {
        **NOTHING, "format": STATE_FORMAT, "moment": 3, "step": 3, "skipped_steps": 0, "rank": rank, "world_size": 2,
        "settings": {}, "parameters": {name: {"residual": vector} for name, vector in vectors.items()},
        "spans": {"w": [0, 4, 4], "b": [0, 2, 2]}, "absorbed": ["w"] if rank else [],
        "pending": {} if rank else averages,
    }  # fmt: skip


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_averages_that_are_pending_are_merged_as_they_are(order: tuple[int, int]) -> None:
    states = [with_averages(rank) for rank in order]
    merged = ls.merge_states(states)
    check_state(merged)
    assert same(merged["pending"], with_averages(0)["pending"])
    assert merged["parameters"]["w"]["residual"].tolist() == [1.5] * 4
    # One of any number of ranks takes them in, so that the mean over ranks has each of them once.
    for n in (1, 3):
        whole = with_pending(merged, n)["parameters"]
        assert whole["w"]["residual"].tolist() == [1.5, 1.5 + 0.5 * n, 1.5, 1.5 - 8 * n]
        assert whole["b"]["residual"].tolist() == [1.5 + 2 * n, 1.5 + 4 * n]
    assert merged["parameters"]["w"]["residual"].tolist() == [1.5] * 4  # not written to


def test_averages_that_are_pending_follow_parameters_to_other_names() -> None:
    state, lost = renamed(with_averages(0), {"w": "v"})
    check_state(state)
    assert lost == ["There is no parameter b any more."]
    assert with_pending(state, 2)["parameters"]["v"]["residual"].tolist() == [1.0, 2.0, 1.0, -15.0]
    assert renamed(with_averages(1), {"w": "v"})[0]["absorbed"] == ["v"]
    only_pending = with_averages(0)
    only_pending["parameters"]["b"]["residual"].zero_()
    assert renamed(only_pending, {"w": "v"})[1] == lost


def test_states_that_do_not_belong_together_are_not_merged() -> None:
    def state(rank: int, **other: Any) -> dict[str, Any]:
        parameters = {"w": {"residual": torch.ones(other.pop("numel", 3))}}
        head = {**NOTHING, "format": STATE_FORMAT, "step": 3, "skipped_steps": 0, "world_size": 2, "settings": {}}
        return {**head, "rank": rank, "parameters": parameters, **other}

    for other in ({"step": 4}, {"world_size": 3}, {"numel": 4}, {"parameters": {}}):
        with pytest.raises(ValueError, match=r"Expected states of one run at one step.* ranks 0 and 1 differ"):
            ls.merge_states([state(0), state(1, **other)])
    for ranks in ([0], [0, 0], [0, 1, 1], [1]):
        with pytest.raises(ValueError, match=r"all 2 ranks, each once, but got those of \["):
            ls.merge_states([state(rank) for rank in ranks])
    with pytest.raises(ValueError, match=r"but got those of \[\]"):
        ls.merge_states([])
    with pytest.raises(ValueError, match=r"^Expected states to be several states of Engine\.state_dict\(\), but got 3"):
        ls.merge_states(3)  # type: ignore[arg-type]
    for field in state(0):
        broken = state(1)
        del broken[field]
        with pytest.raises(ValueError, match=r"^Expected "):
            ls.merge_states([state(0), broken])
    with pytest.raises(ValueError, match="residual of w of the state's parameters to be a vector"):
        ls.merge_states([state(0), state(1, parameters={"w": {"residual": "large"}})])


def test_ways_to_continue_with_other_ranks_have_names() -> None:
    for name in ("merge", "flush", "zero"):
        assert StrategyConfig(resize=name).resize == name  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Expected resize to be one of 'merge', 'flush', 'zero', but got 'mean'"):
        StrategyConfig(resize="mean")  # type: ignore[arg-type]


def test_nothing_is_said_when_all_is_well(tmp_path: Path) -> None:
    run = Run(2, tmp_path / "x.ckpt")
    with warnings.catch_warnings(action="error"):
        results(run.save())
        resumed(2, run.path)
        run.remove()
