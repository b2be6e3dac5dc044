"""Adam's steps where averages and what they are to be divided by are known, of many parameters at once.

On CUDA all operations are rounded one by one, in Triton as in torch, so that ranks may differ in what they use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_sparse.core.layout import fills_memory, flattened, in_pieces, shaped
from lightning_sparse.ops import put_, take
from lightning_sparse.ops.addresses import DTYPES, Addresses, run_table, takes
from lightning_sparse.ops.on_cuda import compare, on_cuda
from lightning_sparse.ops.on_device import different
from lightning_sparse.ops.reference import PIECE

HOST = "cpu"
"""Where steps are taken one by one."""


class Step(NamedTuple):
    """``p = keep p - rate g / scale / divisor``, in the divisor's precision."""

    rate: float | Tensor
    """Learning rate; a number, or () on the device, as keep is then."""
    keep: float | Tensor
    """The part of a parameter that weight decay leaves."""
    scale: Tensor | None = None
    """() that gradients are divided by first."""
    skip: Tensor | None = None
    """() on the device, above 0 where no step is to be taken."""


class Moved(NamedTuple):
    """A parameter that is stepped; shapes and strides are the same."""

    parameter: Tensor
    """(...), overwritten."""
    grad: Tensor
    divisor: Tensor
    """float32, or float64 for float64."""
    indices: Tensor | None = None
    """(u,) int64 coordinates in memory order at which the gradient counts, for a divisor of as many values; elsewhere
    it counts as 0. None: all. On the CPU only."""

    def everywhere(self) -> Moved:
        """Return the same with a divisor of all coordinates."""
        if self.indices is None:
            return self
        flat = torch.ones(self.parameter.numel(), dtype=self.divisor.dtype, device=self.divisor.device)
        put_(flat, self.indices, self.divisor)
        arrived = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, self.indices, True)
        grad = self.grad.where(shaped(arrived, self.parameter), 0)
        return Moved(self.parameter, grad, shaped(flat, self.parameter))


class Sparse(NamedTuple):
    """Averages of a group at the coordinates where they have arrived."""

    parameters: Sequence[Tensor | int]
    """Of the group, in the order of coordinates, overwritten; of others their number of elements alone."""
    indices: Tensor
    """(u,) int64 coordinates, equal ones beside each other, and maybe the padding index."""
    values: Tensor
    """(u,) averages; where a coordinate is repeated, so is its value."""
    divisors: Tensor
    """(u,)"""


class Steps:
    """Takes steps, and keeps addresses from step to step, as long as these do not change."""

    def __init__(self) -> None:
        self._addresses = Addresses()

    def take_(self, moved: Sequence[Moved], by: Step) -> None:
        """Step for these parameters; the host waits for nothing.

        Args:
            moved: any number.
            by: for all of them.
        """
        alike: defaultdict[Any, list[Moved]] = defaultdict(list)
        for one in moved:
            alike[one.parameter.device, one.parameter.dtype, one.grad.dtype, one.divisor.dtype].append(one)
        for what, ones in alike.items():
            if what[0].type == HOST:
                for one in ones:
                    _on_host(one, by)
                continue
            served: list[Moved] = []
            others: list[Moved] = []
            for one in ones:
                (served if _serves(one, by) else others).append(one)
            if served and on_cuda.tried((Steps, what, _form(by)), partial(_rehearse, served[0], by)):
                _in_triton(self._addresses, what, served, by)
            else:
                others = ones
            if others:
                _in_torch(others, by)

    def take_at_(self, arrived: Sparse, by: Step) -> bool:
        """Step where averages have arrived, if there is a kernel for it, without a divisor for every coordinate.

        Args:
            arrived: averages; at least one parameter is there.
            by: for all of these; no scale, and no flag that decides.

        Returns:
            False if nothing was done.
        """
        here = [x for x in arrived.parameters if isinstance(x, Tensor)]
        if by.scale is not None or by.skip is not None or not arrived.indices.numel():
            return False
        wide = all(x.dtype == torch.float32 for x in (*here, arrived.values, arrived.divisors))
        if not wide or not all(map(fills_memory, here)) or not all(map(on_cuda.takes, here)):
            return False
        if any(isinstance(x, Tensor) and x.device != here[0].device for x in by):
            return False
        number = not isinstance(by.rate, Tensor)
        if not on_cuda.tried((Sparse, here[0].device, number), partial(_rehearse_at, arrived, by)):
            return False
        _at_in_triton(arrived, by)
        return True


def _at_in_triton(arrived: Sparse, by: Step) -> None:
    from lightning_sparse.ops.triton import tables

    here = [x for x in arrived.parameters if isinstance(x, Tensor)]
    if isinstance(by.keep, Tensor):
        torch._foreach_mul_(here, by.keep.float())
    elif by.keep != 1:
        torch._foreach_mul_(here, by.keep)
    tables.step_at_(run_table(arrived.parameters), *arrived[1:], by.rate)
    torch.autograd.graph.increment_version(here)


def _as_others(by: Step) -> Step:
    """Return a step of the same form that moves weights: rates may be 0 in the first steps."""
    rate, keep = (
        torch.full_like(x, y) if isinstance(x, Tensor) else y for x, y in zip(by[:2], (0.3, 0.96), strict=True)
    )
    return by._replace(rate=rate, keep=by.keep if isinstance(by.keep, float) and by.keep == 1 else keep)


def _rehearse_at(arrived: Sparse, by: Step) -> None:
    """Compare steps at some coordinates, of which one comes twice, with operations of torch.

    Raises:
        MismatchError: if they differ. Whatever compilers and drivers raise comes through.
    """
    values, by = different(arrived.divisors) / 64, _as_others(by)
    places = torch.arange(0, len(values), 3, device=values.device)
    places[1] = 0
    ends = [len(values) // 3, len(values) // 2]
    found, expected = ([x.clone() for x in values.flip(0).tensor_split(ends)] for _ in range(2))
    averages, divisors = values[places], values[places].abs() / 3
    padded = torch.cat([places, torch.full((2,), len(values), device=values.device)])
    more = [torch.cat([x, x.new_zeros(2)]) for x in (averages, divisors)]
    _at_in_triton(Sparse([found[0], found[1].numel(), found[2]], padded, *more), by)
    whole = torch.ones_like(values).index_copy_(0, places, divisors)
    grad = torch.zeros_like(values).index_copy_(0, places, averages)
    parts = zip(expected, grad.tensor_split(ends), whole.tensor_split(ends), strict=True)
    _in_torch([Moved(*part) for number, part in enumerate(parts) if number != 1], by)
    ours, theirs = ({str(i): x for i, x in enumerate(each)} for each in (found, expected))
    compare(ours, theirs, step="Adam's, where averages have arrived")


def _serves(one: Moved, by: Step) -> bool:
    """Return whether there is a kernel for a parameter."""
    known = one.divisor.dtype == torch.float32 and {one.parameter.dtype, one.grad.dtype} <= DTYPES
    return known and takes(one[:3], *by)


def _form(by: Step) -> tuple[bool, ...]:
    """For which a kernel is compiled."""
    numbers = not isinstance(by.rate, Tensor)
    return numbers, not numbers or bool(by.keep != 1), by.scale is None, by.skip is None


def _on_host(one: Moved, by: Step) -> None:
    """In place, where all are numbers."""
    parameter, grad, divisor, indices = one
    rate, keep, scale, skip = by
    numbers = scale is None and skip is None
    if not numbers or isinstance(rate, Tensor) or parameter.dtype != grad.dtype or grad.dtype != divisor.dtype:
        _in_torch([one.everywhere()], by)
        return
    if indices is not None and not (fills_memory(parameter) and parameter.stride() == grad.stride()):
        _on_host(one.everywhere(), by)
        return
    if keep != 1:
        parameter.mul_(keep)
    if indices is None:
        parameter.addcdiv_(grad, divisor, value=-rate)
        return
    flat = flattened(parameter)
    put_(flat, indices, take(flat, indices).addcdiv_(take(flattened(grad), indices), divisor, value=-rate))
    torch.autograd.graph.increment_version(parameter)


def _in_torch(ones: Sequence[Moved], by: Step) -> None:
    """Few launches for many parameters; what is only needed on the way takes as much as :data:`PIECE` elements do."""
    for piece in in_pieces([one[:3] for one in ones], PIECE):
        _at_once([Moved(*part) for part in piece], by)


def _at_once(ones: Sequence[Moved], by: Step) -> None:
    """Take the steps with vectors on the way as large as all parameters together."""
    wide = ones[0].divisor.dtype
    parameters = [one.parameter for one in ones]
    steps = [one.grad.to(wide) for one in ones]
    if by.scale is not None:
        steps = list(torch._foreach_div(steps, by.scale.to(wide)))
    steps = list(torch._foreach_div(steps, [one.divisor for one in ones]))
    rate, keep = (x.to(wide) if isinstance(x, Tensor) else x for x in by[:2])
    torch._foreach_mul_(steps, rate)
    if parameters[0].dtype == wide and by.skip is None:
        if isinstance(keep, Tensor) or keep != 1:
            torch._foreach_mul_(parameters, keep)
        torch._foreach_sub_(parameters, steps)
        return
    kept = torch._foreach_mul([p.to(wide) for p in parameters], keep)
    stepped = list(torch._foreach_sub(kept, steps))
    if by.skip is not None:
        skipped = by.skip > 0
        stepped = [torch.where(skipped, p.to(wide), x) for p, x in zip(parameters, stepped, strict=True)]
    torch._foreach_copy_(parameters, stepped)


def _in_triton(addresses: Addresses, what: Any, ones: Sequence[Moved], by: Step) -> None:
    """One launch for many parameters."""
    from lightning_sparse.ops.triton import tables

    parameters, grads, divisors, _ = zip(*ones, strict=True)
    table = addresses.table(what, (parameters, grads, divisors), aligned=2)
    scale = None if by.scale is None else by.scale.float()
    tables.step_(table, parameters[0].dtype, grads[0].dtype, by.rate, by.keep, scale, by.skip)
    torch.autograd.graph.increment_version(parameters)


def _rehearse(one: Moved, by: Step) -> None:
    """Compile the kernel, and compare what it computes.

    Raises:
        MismatchError: if it differs from operations of torch. Whatever compilers and drivers raise comes through.
    """
    whole, by = different(one.divisor), _as_others(by)
    values = whole / 64
    grads = values.where(whole % 3 == 0, 0.0).to(one.grad.dtype)
    before = values.flip(0).to(one.parameter.dtype)
    found = [Moved(before.clone(), grads, values.abs() / 3) for _ in range(2)]
    if by.skip is not None:
        by = by._replace(skip=torch.zeros_like(by.skip))
    _in_torch(found[:1], by)
    _in_triton(Addresses(), None, found[1:], by)
    expected, ours = ({"parameter": each.parameter} for each in found)
    about: dict[str, Any] = {"grad": one.grad.dtype, "divisor": one.divisor.dtype, "scaled": by.scale is not None}
    compare(ours, expected, step="Adam's", numel=len(values), rate=float(by.rate), keep=float(by.keep), **about)
