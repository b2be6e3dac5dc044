"""Callback that draws the ranks' ranges of coordinates over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_sparse.core.checks import check_integer
from lightning_sparse.core.console import Table
from lightning_sparse.core.step import Context
from lightning_sparse.engine import Engine
from lightning_sparse.integrations.callback import Callback
from lightning_sparse.integrations.loggers import log_figure, log_table


class Range(NamedTuple):
    """Range of one rank in one step: coordinates from ``begin`` to before ``end``, of which it selected ``picks``."""

    step: int
    group: str
    rank: int
    begin: int
    end: int
    picks: int


class PartitionMap(Callback):
    """Record and draw the ranks' ranges of ExDyna and MiCRO, over time.

    At the end of fit, rank zero gives all loggers a table ``sparse/partition_map`` (a CSV file if a logger shows no
    tables) and, with matplotlib, a figure: ranges of coordinates against steps, one shade for each rank. A recorded
    step waits for the device; other steps cost nothing.

    Args:
        every: steps from one recorded step to the next, at least 1.
        most: largest number of recorded groups, the largest groups first, at least 1.

    Raises:
        ValueError: for a number outside its range.

    Example:
        >>> import lightning_sparse as ls
        >>> from pytorch_lightning import Trainer
        >>> strategy = ls.SparseDDPStrategy(sparsifier="exdyna")
        >>> trainer = Trainer(strategy=strategy, devices=2, accelerator="cpu", logger=False,
        ...                   callbacks=[ls.PartitionMap(every=10)], enable_model_summary=False)
    """

    def __init__(self, every: int = 50, most: int = 4) -> None:
        self.every, self.most = check_integer(every, "every"), check_integer(most, "most")
        self.rows: list[Range] = []
        """Recorded ranges of this fit."""
        self._recorded = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Clear the record; warn if there is nothing to record."""
        self.rows, self._recorded = [], 0
        engine = self._engine_of(trainer)
        if engine is None or not has_ranges(engine):
            rank_zero_warn(
                "PartitionMap has nothing to record: only sparsifiers that give ranks ranges of coordinates have a "
                "partition, such as 'exdyna' and 'micro'. Use SparseDDPStrategy(sparsifier='exdyna'), or remove the "
                "callback."
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Record the ranges, if it is due."""
        engine = self._engine_of(trainer)
        if engine is None or not trainer.is_global_zero or trainer.fit_loop._should_accumulate():
            return
        self._recorded += 1
        if (self._recorded - 1) % self.every == 0:
            self.rows += ranges_of(engine, self.most)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the recorded ranges."""
        if not self.rows or not trainer.is_global_zero:
            return
        table = Table("Ranges of ranks", Range._fields, [[str(cell) for cell in row] for row in self.rows], left=(1,))
        data = {"header": list(Range._fields), "rows": [list(row) for row in self.rows]}
        for logger in trainer.loggers:
            log_table(logger, "partition_map", table, trainer.global_step)
            log_figure(logger, "partition_map/map", data, lambda: draw(self.rows), trainer.global_step)


def has_ranges(engine: Engine) -> bool:
    """Return True if the sparsifier has ranges; works before the first step, too."""
    return any(_ranges(engine, group) is not None for group in engine.stepper.groups if not group.plan.dense)


def _ranges(engine: Engine, group: Any) -> Any:
    step = max(0, engine.step - 1)
    ctx = Context(step, group.density(step), engine.comm.rank, engine.comm.world_size)
    return group.sparsifier.ranges(group.plan.numel, group.state.selector, ctx)


def ranges_of(engine: Engine, most: int) -> list[Range]:
    """Return the ranges of the latest step, of the largest groups."""
    found = []
    stepper = engine.stepper
    groups = [] if stepper.direct else [group for group in stepper.groups if not group.plan.dense and group.ran]
    for group in sorted(groups, key=lambda group: -group.plan.numel)[:most]:
        ranges, known = _ranges(engine, group), group.statistics
        if ranges is not None and known is not None:
            rows = zip(range(len(ranges)), *ranges.T.tolist(), known.counts.tolist(), strict=True)
            found += [Range(engine.step, group.plan.name, *row) for row in rows]
    return found


def draw(rows: Sequence[Range]) -> Any:
    """Draw a panel for each group: ranges of coordinates against steps, one shade for each rank."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(row.group for row in rows))
    ranks = 1 + max(row.rank for row in rows)
    figure = Figure(figsize=(7, 1 + 2.2 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        own = [row for row in rows if row.group == group]
        width = min((b - a for a, b in pairwise(sorted({row.step for row in own}))), default=1)
        for rank in range(ranks):
            steps, _, _, begins, ends, _ = zip(*(row for row in own if row.rank == rank), strict=True)
            heights = [end - begin for begin, end in zip(begins, ends, strict=True)]
            shade = colormaps["viridis"](rank / max(1, ranks - 1))
            axes.bar(steps, heights, width, begins, color=shade, label=f"rank {rank}")
        axes.set(ylabel="coordinate", ylim=(0, max(row.end for row in own)))
        axes.set_title(group, loc="left")
    panels[-1].set_xlabel("step")
    panels[0].legend(ncols=min(ranks, 8), frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    return figure
