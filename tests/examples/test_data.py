"""What the examples train on: each form that it may be kept in, and its download."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import lzma
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.examples import made_up

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def wikitext2(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("wikitext2")


@pytest.fixture
def cifar10(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("cifar10")


def written_text(folder: Path, kind: str) -> Path:
    """Write the made-up text in one of the forms, and return `dir`."""
    folder.mkdir()
    for split, lines, seed in (("train", 50, 0), ("valid", 10, 1)):
        content = made_up.text(lines, seed)
        if kind == "tokens":
            (folder / f"wiki.{split}.tokens").write_text(content)
        elif kind == "unpacked":
            (folder / "wikitext-2").mkdir(exist_ok=True)
            (folder / "wikitext-2" / f"wiki.{split}.tokens").write_text(content)
        elif kind == "txt":
            (folder / f"{split}.txt").write_text(content)
        else:
            (folder / f"{split}.txt.xz").write_bytes(lzma.compress(content.encode()))
    return folder


@pytest.mark.parametrize("kind", ["tokens", "unpacked", "txt", "xz"])
def test_text_is_read_from_each_form(wikitext2: Any, tmp_path: Path, kind: str) -> None:
    data = wikitext2.WikiText2(written_text(tmp_path / kind, kind), words=60, length=16)
    data.prepare_data()  # downloads nothing
    data.setup("fit")
    text = made_up.text(50, 0).replace("\n", " <eos> ").split()
    assert len(data.train_set) == (len(text) - 1) // 16
    numbers = torch.cat([data.train_set[number][0] for number in range(len(data.train_set))])
    assert numbers.max() == 59
    assert int((numbers == 0).sum()) > 0, "rare words are one"
    meant = {
        number: {word for word, other in zip(text, numbers.tolist(), strict=False) if other == number}
        for number in range(60)
    }
    assert all(len(words) == 1 for number, words in meant.items() if number)
    assert len(meant[0]) > 100


def test_what_comes_next_is_to_be_predicted(wikitext2: Any) -> None:
    windows = wikitext2.Windows(torch.arange(11), 5)
    assert [(x.tolist(), y.tolist()) for x, y in map(windows.__getitem__, range(len(windows)))] == [
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5]),
        ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10]),
    ]


def test_text_in_bytes(wikitext2: Any, tmp_path: Path) -> None:
    data = wikitext2.WikiText2(written_text(tmp_path / "text", "txt"), words=None, length=8)
    data.setup("fit")
    assert data.vocabulary == 256
    assert bytes(data.train_set.tokens.tolist()).decode() == made_up.text(50, 0)


def test_text_is_downloaded_and_checked(wikitext2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / wikitext2.ARCHIVE
    made_up.wikitext2(archive)
    monkeypatch.setattr(wikitext2, "ADDRESS", (tmp_path / "nowhere" / wikitext2.ARCHIVE).as_uri())
    with pytest.raises(
        SystemExit, match=r"cannot be reached \(.*\)\. Put the file into .*first, or name .* --data\.dir\."
    ):
        wikitext2.WikiText2(tmp_path / "first").prepare_data()
    monkeypatch.setattr(wikitext2, "ADDRESS", archive.as_uri())
    with pytest.raises(RuntimeError, match="invalid hash"):
        wikitext2.WikiText2(tmp_path / "first").prepare_data()
    monkeypatch.setattr(wikitext2, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    data = wikitext2.WikiText2(tmp_path / "first")
    with pytest.raises(FileNotFoundError, match=r"No train\.txt, wiki\.train\.tokens or wikitext-2-v1\.zip in"):
        data.setup("fit")
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_set) > 100
    monkeypatch.setattr(wikitext2, "ADDRESS", "nowhere")
    data.prepare_data()  # nor is anything asked for again


@pytest.mark.parametrize(
    ("folder", "write"),
    [
        ("cifar-10-batches-bin", made_up.cifar10_binary),
        ("cifar-10-batches-py", made_up.cifar10_python),
        ("bin", made_up.cifar10_binary),
        ("py", made_up.cifar10_python),
        ("npz", lambda path: made_up.cifar10_npz(path, differences=False)),
        ("differences", lambda path: made_up.cifar10_npz(path, differences=True)),
    ],
)
def test_images_are_read_from_each_form(
    cifar10: Any, tmp_path: Path, folder: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / folder)
    data = cifar10.CIFAR10(tmp_path if folder.startswith("cifar-10") else tmp_path / folder)
    data.prepare_data()  # downloads nothing
    data.setup("fit")
    expected = [made_up.images(n, seed) for seed, n in enumerate(made_up.FILES.values())]
    pixels, labels = data.train_set.tensors
    assert np.array_equal(pixels, np.concatenate([each[0] for each in expected[:5]]))
    assert np.array_equal(labels, np.concatenate([each[1] for each in expected[:5]]))
    assert np.array_equal(data.val_set.tensors[0], expected[5][0])


def test_images_are_downloaded_and_checked(cifar10: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up.cifar10_binary(tmp_path / "made")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(tmp_path / "made", "cifar-10-batches-bin")
    monkeypatch.setattr(cifar10, "ADDRESS", archive.as_uri())
    data = cifar10.CIFAR10(tmp_path / "data")
    with pytest.raises(RuntimeError, match="invalid hash"):
        data.prepare_data()
    with pytest.raises(FileNotFoundError, match=r"No data_batch_\[1-5\]\.bin in"):
        data.setup("fit")
    monkeypatch.setattr(cifar10, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    data.prepare_data()
    data.setup("fit")
    assert len(data.train_set) == 320
    monkeypatch.setattr(cifar10, "ADDRESS", f"nowhere/{archive.name}")
    data = cifar10.CIFAR10(tmp_path)  # has an archive that somebody has put there
    data.prepare_data()
    assert len(data.found("train")) == 5


def test_a_pickle_that_calls_something_is_refused(cifar10: Any, tmp_path: Path) -> None:
    class Calls:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "called",))

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Calls()}, protocol=2))
    with pytest.raises(pickle.UnpicklingError, match="Expected arrays"):
        cifar10.CIFAR10(tmp_path).load("train")
    assert not (tmp_path / "called").exists()


def test_training_images_are_shifted_and_flipped(cifar10: Any) -> None:
    torch.manual_seed(0)
    images = torch.randn(100, 3, 32, 32)
    changed = cifar10.shifted_and_flipped(images)
    assert changed.is_contiguous()
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    found: list[tuple[int, int, bool]] = []
    for down, right, flipped in itertools.product(range(9), range(9), (False, True)):
        cut = padded[:, :, down : down + 32, right : right + 32]
        equal = ((cut.flip(3) if flipped else cut) == changed).flatten(1).all(1)
        found += [(down, right, flipped)] * int(equal.sum())
    assert len(found) == len(images), "each image comes from one place, in one direction"
    assert {down for down, _, _ in found} == {right for _, right, _ in found} == set(range(9))
    assert 30 < sum(flipped for _, _, flipped in found) < 70


def test_only_training_images_are_changed(cifar10: Any) -> None:
    images, labels = torch.randint(256, (20, 3, 32, 32), dtype=torch.uint8), torch.arange(20)
    mean, deviation = (torch.tensor(each).view(3, 1, 1) for each in (cifar10.MEAN, cifar10.DEVIATION))
    plain = (images / 255 - mean) / deviation
    data = cifar10.CIFAR10()
    for training in (False, True):
        data.trainer = SimpleNamespace(training=training)
        found, same = data.on_after_batch_transfer((images, labels), 0)
        assert torch.equal(found, plain) == (not training)
        assert same is labels
