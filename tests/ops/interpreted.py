"""Kernels in Triton's interpreter, on CPU tensors: Python and numpy in place of a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_sparse.engine import pipeline
from lightning_sparse.ops import on_device
from lightning_sparse.ops.on_cuda import OnCuda, on_cuda
from tests.static_path import static_path


def interpret() -> None:
    """Skip a module of tests where kernels are not interpreted in this process; see ``tests/__init__.py``."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU, for which kernels are compiled", allow_module_level=True)
    import triton
    from triton.runtime import interpreter

    assert isinstance(triton.language.sum, interpreter.InterpretedFunction), "triton was imported before the tests"
    _prepare(interpreter)


@cache
def _prepare(interpreter: Any) -> None:
    """Mend the interpreter of Triton 3.6 to 3.9, and make it three times as fast.

    It replaces the functions of the language whenever a function is called, also by another one. Here they are replaced
    once, for each module that asks, and stay so.
    """
    patch_tensor, patch = interpreter._patch_lang_tensor, interpreter._patch_lang

    def with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # From NumPy 2.4 on, int() takes no array of one element, which is what a scalar is there.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @cache
    def patched(module: str) -> None:
        patch(functions[module])

    def once(function: Any) -> Any:
        functions[function.__module__] = function
        patched(function.__module__)
        return interpreter._LangPatchScope()

    convert = interpreter._convert_float

    def to_nearest(x: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (str(given), str(wanted)) == ("bf16", "fp32"):  # subnormal numbers become others there
            return np.left_shift(x.view(np.uint16), 16, dtype=np.uint32)
        if (str(given), str(wanted)) != ("fp32", "bf16"):
            return convert(x, given, wanted, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(x)).bfloat16().view(torch.int16).numpy()
        return rounded.view(np.uint16).reshape(x.shape)

    def with_flags(name: str, position: int) -> None:
        """It joins flags of a block and a number to integers, which 3.9 refuses as masks."""
        function = getattr(interpreter.InterpreterBuilder, name)

        def call(self: Any, *args: Any) -> Any:
            mask = args[position]
            flags = interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)
            return function(self, *args[:position], flags, *args[position + 1 :])

        setattr(interpreter.InterpreterBuilder, name, call)

    for name, position in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        with_flags(name, position)
    interpreter._convert_float = to_nearest  # as GPUs do; it cuts off
    functions: dict[str, Any] = {}
    interpreter._patch_lang_tensor, interpreter._patch_lang = with_index, once


class ExactRoots(TorchFunctionMode):
    """Roots are rounded correctly, as on a GPU; those of torch on the CPU may be off by one digit."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (Tensor.sqrt, Tensor.sqrt_) and args[0].dtype == torch.float32:
            root = args[0].double().sqrt().float()
            return args[0].copy_(root) if func is Tensor.sqrt_ else root
        return func(*args, **(kwargs or {}))


class Dirty(TorchFunctionMode):
    """New memory has all bits set, as what others have left in it may have: NaN, -1, True."""

    MADE = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self.MADE and made.device.type == "cpu":
            made.untyped_storage().fill_(255)
        return made


@pytest.fixture(autouse=True)
def dirty() -> Iterator[None]:
    """Whatever reads what nobody has written is seen, in all tests of ops."""
    with Dirty():
        yield


@pytest.fixture
def silent() -> Iterator[None]:
    """Numbers overflow without a warning, as on a GPU."""
    with np.errstate(all="ignore"):
        yield


@contextmanager
def in_triton() -> Iterator[OnCuda]:
    """The path that groups take on a GPU with Triton, on CPU tensors.

    Kernels are tried on one block, which takes the interpreter a quarter of the time.
    """
    assert "triton" in sys.modules
    before = on_cuda.trouble, on_cuda.refused, on_cuda._tried, OnCuda.takes
    on_cuda.trouble, on_cuda.refused, on_cuda._tried = None, {}, set()
    OnCuda.takes = lambda self, x: self.trouble is None  # type: ignore[method-assign]
    try:
        with static_path(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(on_device, "FEW", 1000)
            patch.setattr(pipeline, "REHEARSED", (1000, 0.25))
            yield on_cuda
    finally:
        on_cuda.trouble, on_cuda.refused, on_cuda._tried, OnCuda.takes = before  # type: ignore[method-assign]
