"""Choice between the two Lightning packages, ``pytorch_lightning`` and ``lightning.pytorch``."""

from __future__ import annotations

import importlib.util
import sys

PYTORCH_LIGHTNING = "pytorch_lightning"
LIGHTNING = "lightning.pytorch"

# Evaluated once, now: registering the strategies imports both.
_loaded_before = [name for name in (PYTORCH_LIGHTNING, LIGHTNING) if sys.modules.get(name)]


def installed() -> list[str]:
    """Return the packages that can be imported."""
    tops = {PYTORCH_LIGHTNING: "pytorch_lightning", LIGHTNING: "lightning"}
    return [name for name, top in tops.items() if importlib.util.find_spec(top) is not None]


def preferred() -> str:
    """Return the package of ``lightning_sparse.SparseDDPStrategy`` and ``FabricSparseDDPStrategy``.

    It is the one that the program imported before lightning_sparse, if it was only one; else ``pytorch_lightning`` if
    it is installed.

    Raises:
        ImportError: if neither is installed.
    """
    available = installed()
    if not available:
        raise ImportError("lightning_sparse needs pytorch-lightning or lightning: pip install pytorch-lightning")
    return _loaded_before[0] if len(_loaded_before) == 1 else available[0]
