"""Compile kernels in Triton for sm_90, and print what became of them as JSON.

::

    python -m tests.ops.compile_triton form select
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # which importing the tests has set

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Without what the packages themselves import: kernels need torch and triton alone.
for name in ("lightning_sparse", "lightning_sparse.ops"):
    package = ModuleType(name)
    package.__path__ = [str(Path(__file__).parents[2].joinpath(*name.split(".")))]
    sys.modules[name] = package

from lightning_sparse.ops.triton import dense as triton_dense  # noqa: E402
from lightning_sparse.ops.triton import launch as triton_launch  # noqa: E402
from lightning_sparse.ops.triton import numbers as triton_numbers  # noqa: E402
from lightning_sparse.ops.triton import packed as triton_packed  # noqa: E402
from lightning_sparse.ops.triton import select as triton_select  # noqa: E402
from lightning_sparse.ops.triton import sums as triton_sums  # noqa: E402
from lightning_sparse.ops.triton import tables as triton_tables  # noqa: E402
from lightning_sparse.ops.triton import union as triton_union  # noqa: E402
from lightning_sparse.ops.triton import values as triton_values  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
FLOATS = [
    "acc", "grad", "bound", "scale", "x", "units", "values", "second", "beside", "by", "out", "divisor", "taken",
    "rounding", "score", "average",
]  # fmt: skip
LONGS = ["number", "numbers", "indices", "sizes", "union"]
TYPES = (
    dict.fromkeys(FLOATS, "*fp32")
    | dict.fromkeys(LONGS, "*i64")
    | {"decay": "fp32", "value": "fp32", "skipped": "*u8", "after": "*fp64"}
    | dict.fromkeys(("flag", "skipped"), "*i1")
    | {"threshold": "*fp64", "parts": "*fp64", "sums": "*fp64", "state": ("*fp64",) * 5, "power": "*fp64"}
    | {"keep": "fp32", "add": "fp32", "damping": "fp32", "offset": "fp32"}
)
NUMBERS = [
    "numel", "per", "need", "capacity", "turn", "n", "share", "slots", "room", "total", "limit", "phase", "block",
    "end", "most", "apart", "filled", "tiles", "raise_by", "k", "programs", "most_parts", "runs",
    *triton_packed.OFFSETS,
]  # fmt: skip
"""Arguments that are int32; all others are pointers to int32."""


def lies(kind: str, in_runs: bool = False) -> dict[str, Any]:
    """Constants of a vector of a kind, alone or in runs that are aligned."""
    return {"KIND": {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}[kind], "ALIGNED": True} | {
        "IN_RUNS": in_runs
    }


def without(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants of kernels that read or write single elements, for which alignment is nothing."""
    return {name: value for name, value in constants.items() if name != "ALIGNED"}


def kernels(what: list[str]) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any], int]]:
    """Name, kernel, constants, types that differ, and warps."""
    tile = {"TILE": triton_launch.TILE}
    both = tile | {"PROGRAMS": triton_launch.PROGRAMS}
    picks = {"PICKS": triton_launch.PICKS}
    table = {"grad": "*i64"}
    if "form" in what:
        yield "form", triton_dense._form, tile | lies("fp32"), {}, 8
        yield "form_runs", triton_dense._form, tile | lies("fp32", True), table, 8
    if "form_bf16" in what:
        yield "form_bf16", triton_dense._form, tile | lies("bf16"), {"grad": "*bf16"}, 8
        yield "form_bf16_runs", triton_dense._form, tile | lies("bf16", True), table, 8
    adam, units = tile | {"EPS": 1e-8, "IN_PLACE": False}, {"units": "*fp64"}
    if "weigh" in what:
        yield "weigh", triton_dense._weigh, adam | lies("fp32"), units, 8
        yield "weigh_runs", triton_dense._weigh, adam | lies("fp32", True) | {"IN_PLACE": True}, units | table, 8
    if "second" in what:
        yield "weigh_bf16", triton_dense._weigh, adam | lies("bf16"), units | {"grad": "*bf16"}, 8
        yield "weigh_bf16_runs", triton_dense._weigh, adam | lies("bf16", True), units | table, 8
        yield "divide", triton_dense._divide, picks | {"EPS": 1e-8}, {}, 4
        given = dict.fromkeys(("lengths", "norm", "units"), "*fp64") | {"numel": "i32"}
        given |= dict.fromkeys(("beta2", "rest"), "fp32")
        constants = {"KEEP": 0.9, "LONG": 2.0, "FAR": 1.25, "ACTS": True}
        yield "measure", triton_numbers._measure, constants, given, 1
    if "adam" in what:
        for numbers, grad in ((True, "fp32"), (False, "bf16")):
            types = {"ALIGNED": True, "NUMBERS": numbers, "DECAYS": True, "SCALED": not numbers, "SKIPS": not numbers}
            types |= {"WEIGHT": tl.float32, "GRAD": getattr(tl, {"fp32": "float32", "bf16": "bfloat16"}[grad])}
            given = {"table": "*i64", "skip": "*fp32"} | dict.fromkeys(("rate", "keep"), "fp32" if numbers else "*fp32")
            yield f"adam_{grad}", triton_tables._step, tile | types, given, 8
        for number in (True, False):
            given = {"table": "*i64", "divisors": "*fp32", "rate": "fp32" if number else "*fp32"}
            yield f"adam_at_{number}", triton_tables._step_at, picks | {"NUMBER": number}, given, 4
    if "momentum" in what:
        for number, grad in ((True, "fp32"), (False, "bf16")):
            types = {"ALIGNED": True, "NUMBER": number, "SKIPS": not number, "LONGEST": 255, "WEIGHT": tl.float32}
            types |= {"VELOCITY": tl.float32, "GRAD": getattr(tl, {"fp32": "float32", "bf16": "bfloat16"}[grad])}
            given = {
                "table": "*i64",
                "skip": "*fp32",
                "steps": "i32",
                "shares": "*fp32",
                "reach": "fp32" if number else "*fp32",
            }
            yield f"momentum_{grad}", triton_tables._spend, tile | types, given, 8
    if "flags" in what:
        for in_runs in (False, True):
            given = {"any_flag": "*i1"} | ({"x": "*i64"} if in_runs else {})
            yield f"tell_and_fill_{in_runs}", triton_dense._fill_if, both | without(lies("fp32", in_runs)), given, 8
    if "select" in what:
        yield "empty", triton_select._empty, tile, {"words": "i32"}, 8
    for in_runs in (False, True) if "select" in what else ():
        both_ways, given, end = (
            both | {"IN_RUNS": in_runs},
            {"x": "*i64"} if in_runs else {},
            "_runs" if in_runs else "",
        )
        yield f"collect{end}", triton_select._collect, both_ways | {"WORDS": triton_select.WORDS}, given, 8
        for striped in (False, True):
            ending = ("_striped" if striped else "") + end
            spare = given | {"spare": "*i64" if striped else "*i32"}
            for search in range(1 + striped):
                for digit in (1, 2, 3, 4):
                    constants = both_ways | {"DIGIT": digit, "SEARCH": search, "STRIPED": striped}
                    yield f"digit{digit}_{search}{ending}", triton_select._count_digits, constants, spare, 8
            yield f"count{ending}", triton_select._count_picks, both_ways | {"STRIPED": striped}, given, 8
            written = given | {"spares": "*i1"}
            yield f"write{ending}", triton_select._write_picks, both_ways | {"STRIPED": striped}, written, 8
    if "union" in what:
        words = {"WORDS": triton_union.WORDS, "PROGRAMS": triton_launch.PROGRAMS}
        for spares, levels in ((False, 0), (True, 1), (True, 2)):
            yield f"list_{levels}", triton_union._list, words | {"SPARES": spares, "LEVELS": levels}, {}, 2
        for codes in (False, True):
            yield f"raise_{codes}", triton_union._raise_levels, picks | {"CODES": codes}, {}, 4
    if "packed" in what:
        yield "largest", triton_packed._largest, picks, {}, 4
        for codes in (False, True):
            constants = picks | {"CODES": codes}
            told = {"parts": "i32", "finite": "*i1", "spares": "*i1"}
            alone = constants | {"PARTS": 1024, "SPARES": codes}
            yield f"tell_{codes}", triton_packed._tell, alone, told, 4
            yield f"hear_{codes}", triton_packed._hear, constants | {"SPARES": codes}, {}, 4
        yield "count_marks", triton_packed._count_marks, {"WORDS": triton_packed.WORDS}, {}, 8
        for low, wide in ((0, False), (5, False), (12, True)):
            lanes = picks | {"LOW": low, "WIDE": wide}
            yield f"round_{low}", triton_packed._round, lanes | {"RANKS": triton_packed.MOST_RANKS}, {}, 4
            yield f"average_{low}", triton_packed._average, lanes, {}, 4
        for narrow, in_runs in product((False, True), repeat=2):
            kind = "fp16" if narrow else "fp32"
            types = {"largest": "fp32", "grad": "*i64" if in_runs else f"*{kind}"}
            constants = picks | {"NARROW": narrow, "SCALED": narrow} | without(lies(kind, in_runs))
            yield f"hand_over_{narrow}_{in_runs}", triton_values._hand_over, constants, types, 4
    if "settle" in what:
        for empty in (False, True):
            yield f"subtract_{empty}", triton_values._subtract_at, picks | {"EMPTY": empty}, {}, 4
    if "sums" in what:
        for kind, in_runs in product(("fp32", "bf16"), (False, True)):
            types = {"x": "*i64" if in_runs else f"*{kind}"}
            name = f"squares_{kind}{'_runs' if in_runs else ''}"
            yield name, triton_sums._parts, tile | lies(kind, in_runs), types, 8
        yield "norm", triton_sums._whole, {"PROGRAMS": triton_launch.PROGRAMS}, {"norm": "*fp64"}, 4


def measured(kernel: Any, constants: dict[str, Any], types: dict[str, Any], warps: int) -> dict[str, int]:
    """Compile a kernel, for pointers that are multiples of 16."""
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = types.get(name, TYPES.get(name, "i32" if name in NUMBERS else "*i32"))
        signature[name] = "constexpr" if name in constants else kind
        if str(signature[name]).startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps, **triton_launch.EXACT})
    with tempfile.NamedTemporaryFile() as binary:
        binary.write(made.asm["cubin"])
        binary.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", binary.name]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{what}:(\d+)", shown)[-1]) for what in ("REG", "STACK"))
    ptx = made.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack,
        "wide_loads": len(re.findall(r"ld\.global[^;]*\.v4", ptx)),
        "wide_stores": len(re.findall(r"st\.global[^;]*\.v4", ptx)),
        "flushes": ptx.count(".ftz"),
        "counting": ptx.count("popc"),  # most of what a histogram does
        "fences": len(re.findall(r"\batom[^\n]*acq|\bfence", ptx)),
        "fused": len(re.findall(r"\bfma\.rn\.f", ptx)),
    }


if __name__ == "__main__":
    results = {name: measured(*rest) for name, *rest in kernels(sys.argv[1:])}
    print(json.dumps(results))
