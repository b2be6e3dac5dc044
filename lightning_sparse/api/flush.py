"""Flush: an optimizer step with the residuals of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_sparse.core.layout import own
from lightning_sparse.engine import Engine
from lightning_sparse.engine.optimizers.hooks import uninterrupted
from lightning_sparse.engine.optimizers.kinds import gradients_aside, ids_of, listed, refuse_closure


def flush(what: Any, optimizers: Optimizer | Iterable[Optimizer] | None = None) -> float:
    """Take one dense step with the residuals of all ranks, and clear them. All ranks must call this.

    The pending update ``(1/n) sum_i residual_i`` becomes the gradient, and the optimizers take a step. With SGD without
    momentum, parameters are then the same as without sparsification, except that later gradients depend on earlier
    steps; momentum and weight decay act once more than without the flush; with Adam it is one step of Adam at its
    learning rate. The step uses the current learning rates of the optimizers: if a schedule has ended at 0,
    nothing moves, and with ``Residual(rates=True)`` what waits goes on waiting. Afterwards, parameters hold the same
    gradients as before.

    With :class:`~lightning_sparse.memories.Drift`, copies of the weights and what optimizers keep of them are averaged,
    and no optimizer steps: dense training may go on from there.

    Call this between two steps, for example before a model is exported. A parameter without a pending update is left
    alone, so that at density 1 there is no step. Residuals of 16-bit parameters keep what the cast rounds off.

    Args:
        what: an engine, or a Trainer or Fabric with one of this package's strategies.
        optimizers: the one or all that apply the averages; None: those of the Trainer or Fabric, or, where these hold
            none of the parameters, those that have stepped them.

    Returns:
        Euclidean norm of the pending update; 0 if there was none.

    Raises:
        ValueError: if ``what`` has no engine, if an engine comes without optimizers, if something else is among
            them, or for one whose step needs a closure.
        RuntimeError: if an engine is closed.

    Example:
        >>> import tempfile, torch, lightning_sparse as ls
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(tempfile.mktemp(), 1))
        >>> model = torch.nn.Linear(20, 20, bias=False)
        >>> ddp = DistributedDataParallel(model)
        >>> engine = ls.attach(ddp, sparsifier="top_k", density=0.1, single_device="sparse")
        >>> optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        >>> ddp(torch.ones(1, 20)).sum().backward()        # each of the 400 coordinates has the gradient 1
        >>> optimizer.step()                               # with the average of 40 of them
        >>> int(model.weight.grad.count_nonzero())
        40
        >>> flush(engine, [optimizer])                     # the norm of 360 ones
        18.97...
        >>> bool(engine.residual("weight").any())
        False
        >>> engine.close()
        >>> dist.destroy_process_group()
    """
    if isinstance(what, Engine) and optimizers is None:
        raise ValueError(
            "Expected an engine's optimizers, too, as in flush(engine, [optimizer]): it does not know them."
        )
    strategy = None if isinstance(what, Engine) else getattr(what, "strategy", None)
    engines = [what] if isinstance(what, Engine) else engines_of(strategy)
    parameters = [p for engine in engines for p in engine.stepper.parameters.values()]
    given: list[Any] = list(getattr(strategy, "optimizers", ())) if optimizers is None else listed(optimizers)
    # Without Lightning's wrapper, which would unscale gradients and count steps.
    chosen = [o.optimizer if hasattr(o, "_strategy") else o for o in given]
    if not engines or not chosen:
        raise ValueError(
            "Expected an engine and its optimizers, or a Trainer or Fabric whose strategy sparsifies, but got "
            f"{type(what).__name__} with {len(engines)} engines and {len(chosen)} optimizers."
        )
    if optimizers is None and all(ids_of(one).isdisjoint(map(id, parameters)) for one in chosen):
        chosen = list({id(one): one for engine in engines for one in engine._binding.optimizers}.values()) or chosen
    if any(engine.closed for engine in engines):
        raise RuntimeError(
            "The engine is closed: flush before the end of fit, in on_train_end at the latest. The callback "
            "FlushResidual does."
        )
    for optimizer in chosen:
        refuse_closure(optimizer)
    held = {key for optimizer in chosen for key in ids_of(optimizer)}
    left = [
        name
        for engine in engines
        for name, p in engine.stepper.parameters.items()
        if id(p) not in held
        and p.requires_grad
        and not engine.stepper.group_of[name].drifts
        and engine.residual(name) is not None
    ]
    if left and all(engine._rank == 0 for engine in engines):
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        rank_zero_warn(
            f"No optimizer of the flush holds the parameter {left[0]}{more}: what has waited is dropped there. "
            "With the Trainer, return all optimizers from configure_optimizers; with Fabric, pass all of them to "
            "fabric.setup; elsewhere, call flush(engine, [...]) with all of them."
        )
    square = drifted = 0.0
    with gradients_aside(chosen, parameters), ExitStack() as end:
        for engine in engines:
            end.callback(engine.stepper.end_flush)
            engine._binding.know(chosen)
            drifted += engine._meet_weights()
            engine._binding.meet_states()
            pending = engine._take_pending()
            found = [float(own(average).double().square().sum()) for average in pending.values()]
            squares = torch.tensor(found, dtype=torch.float64, device="cpu")
            for (name, average), own_square in zip(pending.items(), engine._sum_within(squares).tolist(), strict=True):
                if own_square:  # a step with zeros would still apply momentum
                    engine.stepper.parameters[name].grad = average
                    square += own_square
        for optimizer in chosen if square else ():
            with uninterrupted():
                optimizer.step()
    return math.sqrt(square + drifted)


def engines_of(strategy: Any) -> list[Engine]:
    """Return the engines of a strategy of this package; none for any other strategy."""
    return list(getattr(strategy, "engines", ()))
