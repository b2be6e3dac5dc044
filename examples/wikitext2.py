"""WikiText-2 for the examples: read from a folder, or downloaded into it.

`dir`, or a folder `wikitext-2` in it, may hold the files of the official archive (`wiki.train.tokens`,
`wiki.valid.tokens`), or `train.txt` and `valid.txt`, each compressed with xz or not, or the archive itself,
`wikitext-2-v1.zip`. Where there is none of these, the archive is downloaded (4.5 MB). The text is Wikipedia's: CC BY-SA
3.0, Merity et al. 2016, "Pointer Sentinel Mixture Models", https://arxiv.org/abs/1609.07843.
"""

import lzma
import zipfile
from collections import Counter
from pathlib import Path

import pytorch_lightning as pl
import torch
from download import download
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ARCHIVE = "wikitext-2-v1.zip"
ADDRESS = f"https://wikitext.smerity.com/{ARCHIVE}"  # the author's
SHA256 = "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of `length` tokens that do not overlap, each with the tokens that come next."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[number * self.length : (number + 1) * self.length + 1]
        return window[:-1], window[1:]


class WikiText2(pl.LightningDataModule):
    """Words of Wikipedia, as numbers.

    The most frequent words of the training text are the vocabulary, and all others are one: perplexities are not those
    of the full vocabulary of 33 278, which papers report.

    Args:
        dir: folder of the text.
        words: size of the vocabulary; None: no words but bytes, of which there are 256.
        length: of the pieces that the text is cut into, in tokens.
        batch_size: pieces per process and step.
    """

    def __init__(
        self, dir: Path = Path("data/wikitext-2"), words: int | None = 4096, length: int = 64, batch_size: int = 8
    ) -> None:
        super().__init__()
        self.dir, self.words, self.length, self.batch_size = Path(dir), words, length, batch_size
        self.vocabulary = words or 256

    def prepare_data(self) -> None:
        if not self.found("train"):
            download(ADDRESS, SHA256, self.dir)

    def found(self, split: str) -> Path | None:
        """The file of a split, if there is one; the archive for any of them."""
        names = [f"wiki.{split}.tokens", f"{split}.txt"]
        names = [name + compressed for name in names for compressed in ("", ".xz")] + [ARCHIVE]
        paths = [folder / name for folder in (self.dir, self.dir / "wikitext-2") for name in names]
        return next((path for path in paths if path.exists()), None)

    def read(self, split: str) -> str:
        path = self.found(split)
        if path is None:
            raise FileNotFoundError(f"No {split}.txt, wiki.{split}.tokens or {ARCHIVE} in {self.dir}.")
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                return archive.read(f"wikitext-2/wiki.{split}.tokens").decode()
        data = path.read_bytes()
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()

    def setup(self, stage: str) -> None:
        train, val = self.read("train"), self.read("valid")
        if self.words is None:
            tokens = [torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() for text in (train, val)]
        else:
            texts = [text.replace("\n", " <eos> ").split() for text in (train, val)]
            frequent = Counter(texts[0]).most_common(self.words - 1)
            number = {word: position for position, (word, _) in enumerate(frequent, start=1)}
            tokens = [torch.tensor([number.get(word, 0) for word in text]) for text in texts]
        self.train_set, self.val_set = (Windows(part, self.length) for part in tokens)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val_set, 2 * self.batch_size)
