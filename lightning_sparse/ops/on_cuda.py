"""Which kernels run on CUDA tensors: those in Triton, or operations of torch.

Triton compiles a kernel when it is first used, on the user's machine. Where that fails, training goes on with
operations of torch, after one warning. Both give the same bits wherever ranks have to agree, so that it may fail on
some ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter

from lightning_sparse.ops.c.library import SETTING, choose_on_cuda


class MismatchError(RuntimeError):
    """Kernels compute something else than operations of torch."""


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0, **about: Any) -> None:
    """Compare what kernels have computed with what operations of torch have. For rehearsals: it waits.

    Args:
        found: tensors by name.
        expected: tensors of the same names, shapes and dtypes.
        rtol: part of a value by which it may differ; 0: not in any bit.
        about: what else a reader needs to know.

    Raises:
        MismatchError: naming the first tensor that differs, where, by how much, and ``about``.

    Example:
        >>> compare({"acc": torch.tensor([1.0, 2.0, 5.0])}, {"acc": torch.tensor([1.0, 2.5, 4.0])}, k=3, step=1)
        Traceback (most recent call last):
        ...
        lightning_sparse.ops.on_cuda.MismatchError: acc, (3,) torch.float32, differs at 2 of 3 places, first at 1: \
2.0 instead of 2.5; the largest difference is 1 (k=3, step=1)
    """
    for name, wanted in expected.items():
        x, y = (each.detach().flatten() for each in (found[name], wanted))
        same = torch.isclose(x.double(), y.double(), rtol, 0.0, equal_nan=True)
        if same.all():
            continue
        shape, places = f"{tuple(wanted.shape)} {wanted.dtype}", (~same).nonzero().flatten()
        first = int(places[0])
        largest = (x.double() - y.double()).abs().max()
        others = ", ".join(f"{key}={value}" for key, value in about.items())
        raise MismatchError(
            f"{name}, {shape}, differs at {len(places)} of {len(x)} places, first at {first}: {x[first].item()} "
            f"instead of {y[first].item()}; the largest difference is {float(largest):.3g} ({others})"
        )


class OnCuda:
    """The choice between kernels in Triton and torch for CUDA tensors."""

    def __init__(self) -> None:
        self.trouble: str | None = choose_on_cuda()
        """Why the kernels in Triton are not used; None if they are."""
        self.refused: dict[Any, str] = {}
        """Why some of them are not, which compute something else; by what was tried."""
        self._tried: set[Any] = set()

    def takes(self, x: Tensor) -> bool:
        """Return whether kernels in Triton may run on a tensor; not where it has no content, as under tracing."""
        return self.trouble is None and x.is_cuda and type(x) in (Tensor, Parameter)

    @property
    def problems(self) -> str:
        """Why operations of torch take the place of kernels, of all or of some; empty where they do not."""
        return self.trouble or "; ".join(self.refused.values())

    def knows(self, what: Any) -> bool:
        """Return whether :meth:`tried` has nothing to try."""
        return self.trouble is not None or what in self._tried or what in self.refused

    def tried(self, what: Any, attempt: Callable[[], Any]) -> bool:
        """Return whether kernels work: the first time, and before anything counts, by an attempt.

        Args:
            what: hashable; for everything that is equal to it, one attempt is enough.
            attempt: launches the kernels on something that does not count; what it raises is the reason to do without.
        """
        if not self.knows(what):
            try:
                with _free_to_wait():
                    attempt()
                self._tried.add(what)
            except MismatchError as error:
                self.refused[what] = str(error)
                self._warn("Some kernels in Triton compute something else here than operations of torch", error)
            except Exception as error:  # of Triton, of its compiler, or of the driver
                self.trouble = f"{type(error).__name__}: {error}"
                self._warn("The kernels in Triton do not work here", error)
        return self.trouble is None and what in self._tried

    def _warn(self, what: str, error: Exception) -> None:
        rank_zero_warn(
            f"{what}. Operations of torch take their place, which compute the same and take longer. {SETTING}=torch "
            f"asks for these without a warning. What happened: {type(error).__name__}: {error}"
        )


@contextmanager
def _free_to_wait() -> Iterator[None]:
    """The host may wait for the device, also where the user has asked torch to raise when it does."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    mode = torch.cuda.get_sync_debug_mode() if begun else 0
    if not mode:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


on_cuda = OnCuda()
