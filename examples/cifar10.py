"""CIFAR-10 for the examples: read from a folder, or downloaded into it.

`dir` may hold the official binary archive or its files (`data_batch_1.bin`, ..., `test_batch.bin`), those of the Python
one (`data_batch_1`, ..., `test_batch`), a folder `cifar-10-batches-bin` or `cifar-10-batches-py` with them, or `.npz`
files (see `from_npz`). Where there is none of these, the binary archive is downloaded (170 MB). Krizhevsky 2009,
"Learning Multiple Layers of Features from Tiny Images", https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from download import download
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, TensorDataset

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
FOLDERS = (".", "cifar-10-batches-bin", "cifar-10-batches-py")
PATTERNS = {  # of the files with images to train on, and of those to judge by
    "train": ("data_batch_[1-5].bin", "data_batch_[1-5]", "train*.npz"),
    "test": ("test_batch.bin", "test_batch", "test*.npz"),
}
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of each colour, over the training images

Arrays = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images (n, 3, 32, 32), labels (n,)


def from_binary(path: Path) -> Arrays:
    """Rows of a label and an image."""
    rows = np.fromfile(path, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


class _ArraysOnly(pickle.Unpickler):
    """A pickle may call anything; these files need numpy's arrays alone."""

    def find_class(self, module: str, name: str) -> object:
        array = module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype")
        if array or (module, name) == ("_codecs", "encode"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"Expected arrays, got {module}.{name}.")


def from_python(path: Path) -> Arrays:
    with path.open("rb") as file:
        batch = _ArraysOnly(file, encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], np.uint8)


def from_npz(path: Path) -> Arrays:
    """`labels` (n,) and either `images` (n, 32, 32, 3), or `d`: differences, which compress better.

    `d` (3, n, 32, 32) holds red minus green, green, blue minus green, each minus its neighbour above and on the left,
    modulo 256.
    """
    with np.load(path) as file:
        if "images" in file:
            return file["images"].transpose(0, 3, 1, 2), file["labels"]
        colours = file["d"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        labels = file["labels"]
    colours[[0, 2]] += colours[1]
    return colours.transpose(1, 0, 2, 3), labels


def read(path: Path) -> Arrays:
    return {".bin": from_binary, ".npz": from_npz}.get(path.suffix, from_python)(path)


class CIFAR10(pl.LightningDataModule):
    """60 000 colour images of 32x32 pixels in ten classes, 10 000 of them for validation.

    Args:
        dir: folder of the files.
        batch_size: images per process and step.
        augment: shift training images by up to 4 pixels and flip half of them.
    """

    def __init__(self, dir: Path = Path("data/cifar10"), batch_size: int = 64, augment: bool = True) -> None:
        super().__init__()
        self.dir, self.batch_size, self.augment = Path(dir), batch_size, augment

    def prepare_data(self) -> None:
        if not self.found("train"):
            archive = self.dir / Path(ADDRESS).name
            with tarfile.open(archive if archive.exists() else download(ADDRESS, SHA256, self.dir)) as file:
                # Python 3.11 knows filters from 3.11.4 on; the file has been checked already.
                file.extractall(self.dir, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))

    def found(self, split: str) -> list[Path]:
        """The files of a split, of the first kind that there is."""
        kinds = (sorted((self.dir / folder).glob(each)) for folder in FOLDERS for each in PATTERNS[split])
        return next(filter(None, kinds), [])

    def load(self, split: str) -> TensorDataset:
        """Images in bytes, as they are read: 180 MB in all."""
        if not self.found(split):
            raise FileNotFoundError(f"No {PATTERNS[split][0]} in {self.dir}.")
        images, labels = (np.concatenate(parts) for parts in zip(*map(read, self.found(split)), strict=True))
        return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels).long())

    def setup(self, stage: str) -> None:
        self.train_set, self.val_set = self.load("train"), self.load("test")

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, 250)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Numbers around 0 instead of bytes; shifted and flipped for training. On the device, whole batches at once."""
        images, labels = batch
        mean, deviation = (torch.tensor(each, device=images.device).view(3, 1, 1) for each in (MEAN, DEVIATION))
        images = (images / 255 - mean) / deviation
        if self.augment and self.trainer is not None and self.trainer.training:
            images = shifted_and_flipped(images)
        return images, labels


def shifted_and_flipped(images: Tensor) -> Tensor:
    """Each image cut out of its zero-padded self at a place of its own, and mirrored with probability 1/2."""
    n, _, height, width = images.shape
    down, right = torch.randint(9, (2, n, 1, 1), device=images.device)
    rows = down + torch.arange(height, device=images.device).view(1, -1, 1)
    columns = right + torch.arange(width, device=images.device).view(1, 1, -1)
    columns = torch.where(torch.rand(n, 1, 1, device=images.device) < 0.5, columns, columns.flip(2))
    which = torch.arange(n, device=images.device).view(-1, 1, 1)
    cut = pad(images, (4, 4, 4, 4)).permute(0, 2, 3, 1)[which, rows, columns]
    return cut.permute(0, 3, 1, 2).contiguous()
