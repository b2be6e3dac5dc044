"""The default method of this package in one file of plain torch: UnionTopK, a residual, two collectives, for SGD.

It is for readers, and an oracle for tests: it is slow, and imports nothing of the package.

n ranks train copies of one model. In step t = 0, 1, ... rank i has a gradient ``g_i`` of d coordinates, and a residual
``r_i``, what it has not sent yet, 0 at first. A step sends ``k = density d`` of them::

    a_i = r_i + g_i                                                    error feedback
    L_i = the k/n largest |a_i|                                        select; of equal ones the lower coordinates
    S_i = the c k/n largest others in the stripe j = i - t (mod n)     spare ones; no two ranks have the same
    U   = all L_i, and of all S_i as many as fill U to k               1. all-gather of L_i and S_i
    u_j = 1/n sum_i a_ij for j in U, else 0                            2. all-reduce of a_i at U
    r_i = a_i outside of U, 0 within                                   so that n u + sum_i r_i = sum_i a_i

The optimizer steps with u in place of ``g_i``, equal on all ranks. L_i of several ranks may have coordinates in common,
and spare ones make up for these: with c = 1, U always has k. If m different coordinates are named, a step has needed
``c k - (m - k)`` of them, and counts as ``2 c k`` if m < k. c k is the largest need of the latest 64 to 128 steps, plus
5 % of k and 1, at most k; in the first 64 steps it is k.

Parameters with fewer than 2 dimensions, or fewer than 256 coordinates, are averaged densely, as in DDP; their gradients
travel with the values of 2. All others form one vector, the last parameter first.

Left out are gradients that are not finite (the engine skips such steps), parameters of several dtypes or devices, and
overlap with backward. An unused parameter has a gradient of zero here; the engine leaves its residual alone.

References:
    Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599, for error feedback;
    UnionTopK is ours, see :class:`~lightning_sparse.methods.sparsifiers.UnionTopK`.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer


def sparsify(model: nn.Module, optimizer: Optimizer, density: float = 0.01) -> Sparsified:
    """Let an optimizer step with sparsified averages over the ranks of the default process group.

    Without a group, this process is the only rank. Call it on all ranks, which must have equal parameters.

    Args:
        model: not wrapped in DDP.
        optimizer: of its parameters, such as SGD. Gradients must be there when it steps, so that there is no closure.
        density: share of coordinates that a step sends, in (0, 1).

    Returns:
        The exchange, which each step calls, with this rank's residual.

    Raises:
        ValueError: if the density is not in (0, 1), or all parameters are too small to be sparsified.

    Example:
        >>> model = nn.Linear(100, 10)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsified = sparsify(model, optimizer, density=0.01)
        >>> model(torch.randn(8, 100)).square().mean().backward()
        >>> gradient = model.weight.grad.flatten()
        >>> optimizer.step()
        >>> update = model.weight.grad.flatten()
        >>> int(update.count_nonzero()), torch.equal(update + sparsified.residual, gradient)
        (10, True)
    """
    sparsified = Sparsified(model, density)
    optimizer.register_step_pre_hook(lambda *_: sparsified.exchange())
    return sparsified


class Sparsified:
    """Replaces the gradients of a model by their sparsified averages; made by :func:`sparsify`."""

    def __init__(self, model: nn.Module, density: float) -> None:
        trained = [p for p in model.parameters() if p.requires_grad][::-1]
        self.sparse = [p for p in trained if p.dim() >= 2 and p.numel() >= 256]
        self.dense = [p for p in trained if p.dim() < 2 or p.numel() < 256]
        if not (0 < density < 1 and self.sparse):
            raise ValueError(f"Expected a density in (0, 1) and a matrix to sparsify, but got {density!r} and {model}.")
        self.residual = torch.cat([torch.zeros_like(p).detach().flatten() for p in self.sparse])
        """(d,) r_i."""
        self.k = max(1, math.floor(density * self.residual.numel() * (1 + 1e-12)))  # 0.29 * 100 is below 29
        self.step = 0
        self.needs = [1.0] * 64
        """Of spare coordinates in each step, as shares of k; the largest one in a window before the first step."""

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace each parameter's ``.grad`` by the average; collective."""
        n, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.sparse + self.dense]
        acc = self.residual + torch.cat(gradients[: len(self.sparse)])
        union = self.union(acc, n, rank)
        sent = torch.cat([acc[union], *gradients[len(self.sparse) :]])
        means, dense = (all_reduce(sent, n) / n).tensor_split([union.numel()])
        update = torch.zeros_like(acc).index_copy_(0, union, means)
        self.residual = acc.index_fill(0, union, 0.0)
        self.step += 1
        parts = torch.split(torch.cat([update, dense]), [gradient.numel() for gradient in gradients])
        for p, part in zip(self.sparse + self.dense, parts, strict=True):
            p.grad = part.view_as(p)

    def union(self, acc: Tensor, n: int, rank: int) -> Tensor:
        """Return the coordinates U of this step, at most k, equal on all ranks."""
        k, d, turn = self.k, acc.numel(), (rank - self.step) % n
        c = min(max(0.0, *self.needs[64 * (len(self.needs) // 64 - 1) :]) + 0.05 + 1 / k, 1.0)
        share, spare = (k + turn) // n, math.floor((c * k + n - 1 - turn) / n)  # what n does not divide goes in turns
        order = acc.abs().argsort(descending=True, stable=True)
        first, others = order[:share], order[share:]
        message = torch.cat([first, ~others[others % n == turn][:spare]])  # spare ones are negative
        most = -(-k // n) + math.floor((c * k + n - 1) / n)
        message = torch.cat(all_gather(pad(message, (0, most - message.numel()), value=d), n))
        firsts, spares = torch.unique(message[(message >= 0) & (message < d)]), torch.unique(~message[message < 0])
        spares = spares[~torch.isin(spares, firsts)]
        room, named = k - firsts.numel(), firsts.numel() + spares.numel()
        self.needs.append(min(2 * c if named < k else c - (named - k) / k, 1.0))
        if spares.numel() > room:  # leave some out, evenly over the vector, and others in the next step
            ordinals = torch.arange(1, spares.numel() + 1, device=acc.device)
            spares = spares[(ordinals * room + self.step) % spares.numel() < room]
        return torch.cat([firsts, spares])


def all_gather(x: Tensor, n: int) -> list[Tensor]:
    """Return the vectors of all n ranks."""
    rows = [torch.empty_like(x) for _ in range(n)] if n > 1 else [x]
    if n > 1:
        dist.all_gather(rows, x)
    return rows


def all_reduce(x: Tensor, n: int) -> Tensor:
    """Return the sum of a vector over n ranks, of which each adds up a part: ``dist.all_reduce`` in the order of ranks.

    The order in which a library adds up decides the last bit of a sum of three numbers.
    """
    parts = pad(x, (0, -x.numel() % n)).view(n, -1)
    received = torch.empty_like(parts) if n > 1 else parts
    if n > 1:
        dist.all_to_all_single(received, parts)
    return torch.cat(all_gather(reduce(torch.add, received.unbind()), n))[: x.numel()]
