"""Everything that docs/comparison.md shows: all sparsifiers on recorded gradients, and training at equal bytes.

Calls `lightning-sparse simulate` and `lightning-sparse judge` with the settings of the documentation, into two folders
of their own. Takes hours; what was interrupted goes on where it stopped when the same command is given again.

    OMP_NUM_THREADS=1 python benchmarks/compare_sparsifiers.py --out comparison --jobs 4
"""

import argparse
from pathlib import Path

from lightning_sparse_cli.commands import judge, simulate


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("comparison"), help="folder (default: comparison)")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train (default: 1)")
    parser.add_argument("--text", help="text file such as WikiText-2's; if left out, the text that comes with Python")
    arguments = parser.parse_args(args)
    densities = [0.01, 0.001]
    simulate(
        streams=["digits", "text", "heavy_tail"],
        ranks=[4, 8, 16],
        densities=densities,
        steps=120,
        text=arguments.text,
        out=arguments.out / "simulate",
    )
    judge(
        tasks=["digits", "text"],
        ranks=8,
        densities=densities,
        seeds=[0, 1, 2],
        steps=400,
        text=arguments.text,
        jobs=arguments.jobs,
        out=arguments.out / "judge",
    )


if __name__ == "__main__":
    main()
