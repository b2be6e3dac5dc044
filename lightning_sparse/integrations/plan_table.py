"""The plan of groups as a table: for the terminal, and for loggers."""

from __future__ import annotations

from lightning_sparse.core.console import Table
from lightning_sparse.engine import Engine
from lightning_sparse.engine.metrics import MB
from lightning_sparse.engine.network import ring_all_reduce_bytes

LONGEST = 40
"""Groups that are printed one by one."""


def plan_table(engine: Engine, longest: int | None = None) -> Table:
    """Return the groups of an engine with sizes, densities, exchange, and MB of a dense ring.

    Args:
        engine: with the groups.
        longest: number of groups that are listed one by one; None: all.
    """
    settings, n = engine.settings, engine.comm.world_size
    title = f"sparse_ddp: groups at {settings.density}"
    header = ["group", "parameters", "coordinates", "density now", "k now", "exchange", "dense MB"]
    rows = []
    listed = engine.plan[:longest]
    for running, group in zip(engine.groups, listed, strict=False):
        density, whole = running.density(engine.step), not running.selects(engine.step)
        k = group.numel if whole else group.picks(density)
        shown = "" if group.dense else "1" if whole else f"{density:.3g}"
        exchange = "dense" if whole else type(settings.exchange).__name__
        dense_mb = ring_all_reduce_bytes(group.numel * group.parameters[0].element_size, n) / MB
        sizes = [f"{len(group.parameters)}", f"{group.numel:,}"]
        rows.append([group.name, *sizes, shown, f"{k:,}", exchange, f"{dense_mb:.3g}"])
    if rest := engine.plan[len(listed) :]:
        rows.append([f"{len(rest)} more", "", f"{sum(g.numel for g in rest):,}", "", "", "", ""])
    return Table(title, header, rows, left=(0, 5))
