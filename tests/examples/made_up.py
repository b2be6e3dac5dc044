"""Small data sets in the formats of the real ones."""

from __future__ import annotations

import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def text(lines: int, seed: int) -> str:
    """As the files of WikiText-2: words and marks with a space between them, rare ones as <unk>."""
    words = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(200)]
    sentences = (" ".join(words.choices(vocabulary, range(200, 0, -1), k=20)) for _ in range(lines))
    return "".join(f" {sentence} <unk> @-@ . \n" for sentence in sentences)


def wikitext2(archive: Path) -> None:
    """wikitext-2-v1.zip."""
    with zipfile.ZipFile(archive, "w") as file:
        for number, split in enumerate(("train", "valid", "test")):
            file.writestr(f"wikitext-2/wiki.{split}.tokens", text(700 if split == "train" else 80, number))


def images(n: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """(n, 3, 32, 32) and (n,): a class has a brightness."""
    numbers = np.random.default_rng(seed)
    labels = numbers.integers(0, 10, n, dtype=np.uint8)
    noise = numbers.integers(0, 25, (n, 3, 32, 32), dtype=np.uint8)
    return noise + 25 * labels[:, None, None, None], labels


FILES = {f"data_batch_{number}": 64 for number in range(1, 6)} | {"test_batch": 40}


def cifar10_binary(folder: Path) -> None:
    """cifar-10-batches-bin."""
    folder.mkdir(parents=True)
    for seed, (name, n) in enumerate(FILES.items()):
        pixels, labels = images(n, seed)
        (folder / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels.reshape(n, -1)], 1).tobytes())


def cifar10_python(folder: Path) -> None:
    """cifar-10-batches-py, whose pickles are of Python 2 and numpy 1."""
    folder.mkdir(parents=True)
    for seed, (name, n) in enumerate(FILES.items()):
        pixels, labels = images(n, seed)
        batch = {b"data": pixels.reshape(n, -1), b"labels": labels.tolist(), b"batch_label": name.encode()}
        pickled = pickle.dumps(batch, protocol=2).replace(b"numpy._core.", b"numpy.core.")
        (folder / name).write_bytes(pickled)


def cifar10_npz(folder: Path, differences: bool) -> None:
    folder.mkdir(parents=True)
    for seed, (name, n) in enumerate(FILES.items()):
        pixels, labels = images(n, seed)
        file = folder / f"{name.replace('data_batch', 'train').replace('test_batch', 'test')}.npz"
        if differences:
            colours = pixels.transpose(1, 0, 2, 3).copy()
            colours[[0, 2]] -= colours[1]
            down = np.diff(colours, axis=2, prepend=np.uint8(0))
            np.savez(file, d=np.diff(down, axis=3, prepend=np.uint8(0)), labels=labels)
        else:
            np.savez(file, images=pixels.transpose(0, 2, 3, 1), labels=labels)
