"""What docs/reports/equal-bytes.md shows, and recorded-gradients.md: all sparsifiers on both.

Calls `lightning-sparse replay` and `lightning-sparse compare` with the settings of the documentation, into two folders
of their own. Takes hours; what was interrupted goes on where it stopped when the same command is given again.

    OMP_NUM_THREADS=1 python benchmarks/compare_sparsifiers.py --out comparison --jobs 4
"""

from pathlib import Path

from jsonargparse import CLI

from lightning_sparse_cli.commands import compare, replay


def main(out: Path = Path("comparison"), jobs: int = 1, text: str | None = None) -> None:
    """Run both comparisons.

    Args:
        out: folder.
        jobs: processes that train.
        text: text file such as WikiText-2's; None: the text that comes with Python.
    """
    densities = [0.01, 0.001]
    replay(
        streams=["heavy_tail", "digits", "text"],
        ranks=[4, 8, 16],
        densities=densities,
        steps=120,
        text=text,
        out=out / "replay",
    )
    compare(
        tasks=["digits", "text"],
        ranks=[8],
        budgets=densities,
        seeds=[0, 1, 2],
        steps=400,
        text=text,
        jobs=jobs,
        out=out / "compare",
    )


if __name__ == "__main__":
    CLI(main, as_positional=False)
