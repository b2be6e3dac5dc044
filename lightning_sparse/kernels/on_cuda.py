"""Which kernels run on CUDA tensors: those in Triton, or operations of torch.

Triton compiles a kernel when it is first used, on the user's machine. Where that fails, training goes on with
operations of torch, after one warning. Both give the same bits wherever ranks have to agree, so that it may fail on
some ranks only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.kernels.library import SETTING, choose_on_cuda


class OnCuda:
    """What is used on CUDA tensors."""

    def __init__(self) -> None:
        self.trouble: str | None = choose_on_cuda()
        """Why the kernels in Triton are not used; None if they are."""
        self._tried: set[Any] = set()

    def takes(self, x: Tensor) -> bool:
        """Whether kernels in Triton may run on a tensor.

        Not where it has no content, as while something is traced, nor on a device other than the current one, whose
        stream kernels are launched on.
        """
        if self.trouble is not None or not x.is_cuda or type(x) not in (Tensor, Parameter):
            return False
        return x.get_device() == torch.cuda.current_device()

    def tried(self, what: Any, attempt: Callable[[], Any]) -> bool:
        """Whether kernels work: the first time, and before anything counts, by an attempt.

        Args:
            what: hashable; for everything that is equal to it, one attempt is enough.
            attempt: launches the kernels on something that does not count; what it raises is the reason to do without.
        """
        if self.trouble is None and what not in self._tried:
            try:
                attempt()
                self._tried.add(what)
            except Exception as error:  # of Triton, of its compiler, or of the driver
                self.trouble = f"{type(error).__name__}: {error}"
                rank_zero_warn(
                    "The kernels in Triton do not work here. Operations of torch take their place, which compute the "
                    f"same and take longer. {SETTING}=torch asks for these without a warning. What happened: "
                    f"{self.trouble}"
                )
        return self.trouble is None


on_cuda = OnCuda()
