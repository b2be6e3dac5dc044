"""The plan of groups as a table: for the terminal, and for loggers."""

from __future__ import annotations

from lightning_sparse.collective import ring_all_reduce_bytes
from lightning_sparse.console import Table
from lightning_sparse.core import Agreement
from lightning_sparse.metrics import MB
from lightning_sparse.reducer import Engine

LONGEST = 40
"""Groups that are printed one by one."""


def plan_table(engine: Engine, longest: int | None = None) -> Table:
    """Groups with their sizes, what is selected, how it travels, and MB of a dense ring.

    Args:
        engine: whose groups.
        longest: number of groups that are listed one by one; None: all.
    """
    settings, n = engine.settings, engine.comm.world_size
    density = settings.density(engine.step)
    title = f"sparse_ddp: {settings.sparsifier}, {settings.density}, {settings.memory}, " + (
        f"{n} ranks" if n > 1 else "1 rank: nothing is sent"
    )
    header = ["group", "parameters", "coordinates", "density now", "k now", "exchange", "dense MB"]
    rows = []
    listed = engine.plan[:longest]
    for running, group in zip(engine.groups, listed, strict=False):
        whole = running.sparsifier.agreement is Agreement.EVERYTHING
        size = group.parameters[0].element_size
        rows.append(
            [
                group.name,
                str(len(group.parameters)),
                f"{group.numel:,}",
                "" if group.dense else "1" if whole else f"{group.density or density:.3g}",
                f"{group.numel if whole else group.picks(density):,}",
                "dense" if group.dense else type(settings.exchange).__name__,
                f"{ring_all_reduce_bytes(group.numel * size, n) / MB:.3g}",
            ]
        )
    if rest := engine.plan[len(listed) :]:
        rows.append([f"{len(rest)} more", "", f"{sum(g.numel for g in rest):,}", "", "", "", ""])
    return Table(title, header, rows, left=(0, 5))


def print_plan(engine: Engine) -> None:
    """Print the groups, what error feedback keeps, and what stays dense; plain text where rich is missing."""
    plan_table(engine, LONGEST).show()
    rules = engine.settings.rules
    if numel := sum(group.numel for group in engine.plan if not group.dense):
        kept = engine.memory_bytes
        print(f"error feedback: {kept / MB:.3g} MB on each rank, {kept / numel:.2g} bytes a coordinate", flush=True)
    if dense := [p for group in engine.plan if group.dense for p in group.parameters]:
        numel, all_numel = sum(p.numel for p in dense), sum(group.numel for group in engine.plan)
        share = f"{len(dense)} parameters, {numel:,} coordinates ({100 * numel / all_numel:.2g} %)"
        print(f"dense: {share}" + (f": {rules.reasons()}" if rules.reasons() else ""), flush=True)
