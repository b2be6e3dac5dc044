"""Download a file of data once, and check that it is the right one."""

from pathlib import Path
from urllib.error import URLError

import torch


def download(address: str, sha256: str, folder: Path) -> Path:
    """Where the file is now. Ends the program in one sentence where there is no network.

    Raises:
        RuntimeError: the checksum is another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / Path(address).name
    print(f"No data in {folder}: downloading {address}")
    try:
        torch.hub.download_url_to_file(address, str(path), sha256)
    except URLError as error:
        raise SystemExit(
            f"{address} cannot be reached ({error.reason}). Put the file into {folder}, or name the folder that has "
            "the data with --data.dir."
        ) from None
    return path
