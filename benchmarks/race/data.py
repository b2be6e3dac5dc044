"""Texts to learn: read from a folder, or downloaded into it.

The folder, or `wikitext-2` and `tinyshakespeare` in it, may hold `train.txt` and `valid.txt` (WikiText-2; or
`wiki.train.tokens` and `wiki.valid.tokens`), and `input.txt`, each compressed with xz or not.
"""

from __future__ import annotations

import lzma
import zipfile
from pathlib import Path

import torch

WIKITEXT = "https://wikitext.smerity.com/wikitext-2-v1.zip"
WIKITEXT_SHA256 = "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def wikitext(folder: Path) -> tuple[Path, Path]:
    """Files of training and validation."""

    def both() -> list[Path | None]:
        names = ["wiki.{}.tokens", "{}.txt"]
        return [_found(folder, "wikitext-2", [n.format(split) for n in names]) for split in ("train", "valid")]

    train, valid = both()
    if train is None or valid is None:
        archive = _downloaded(WIKITEXT, WIKITEXT_SHA256, folder)
        with zipfile.ZipFile(archive) as file:
            file.extractall(folder)
        train, valid = both()
    assert train is not None and valid is not None
    return train, valid


def shakespeare(folder: Path) -> str:
    """The text of tinyshakespeare."""
    path = _found(folder, "tinyshakespeare", ["input.txt"])
    path = path or _downloaded(SHAKESPEARE, SHAKESPEARE_SHA256, folder)
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()


def _found(folder: Path, name: str, files: list[str]) -> Path | None:
    places = [where / (file + end) for where in (folder, folder / name) for file in files for end in ("", ".xz")]
    return next((path for path in places if path.exists()), None)


def _downloaded(address: str, sha256: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(address).name
    print(f"No data in {folder}: downloading {address}", flush=True)
    torch.hub.download_url_to_file(address, str(path), sha256)
    return path
