"""Write a configuration for each sparsifier, from the registry.

python configs/generate.py           # writes configs/<name>.yaml for all
python configs/generate.py --check   # fails if one differs from what would be written
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from lightning_sparse.sparsifiers import SPARSIFIERS, Sparsifier

HERE = Path(__file__).parent
MORE = {
    "dgc": """\
      sparsifier: DGC
      # The whole of Deep Gradient Compression: a density that is lowered over the first steps, velocities in place of
      # gradients, and clipping before they are accumulated. The momentum is in the memory, not in the optimizer.
      density:
        class_path: Warmup
        init_args: {start: 0.25, end: 0.01, steps: 80}
      memory:
        class_path: ClipByNorm
        init_args:
          max_norm: 10.0  # in each group, of the sum over ranks; here it only bounds accidents
          memory:
            class_path: MomentumCorrection
            init_args: {momentum: 0.9}
model:
  momentum: 0.0
""",
    "hard_threshold": """\
      sparsifier:
        class_path: HardThreshold
        # The threshold is in units of the gradient and belongs to this model: 0.06 gives a density of about 1 % on
        # average over this run, from almost nothing in the first steps to 2 % near step 100. It does not follow the
        # target density, which only serves to log the error.
        init_args: {threshold: 0.06}
""",
}
"""Settings of methods that are more than a sparsifier, or have no defaults, by registered name."""


def text_of(name: str, cls: type[Sparsifier]) -> str:
    """Return the configuration that chooses a sparsifier, with the first line of its docstring as comment."""
    summary = (cls.__doc__ or "").strip().splitlines()[0]
    comment = textwrap.fill(f"{cls.__name__}: {summary}", 118, initial_indent="# ", subsequent_indent="# ")
    settings = MORE.get(name)
    body = f"\n{settings}" if settings else f" {{sparsifier: {cls.__name__}}}\n"
    return f"{comment}\ntrainer:\n  strategy:\n    init_args:{body}"


def main(given: Sequence[str] | None = None) -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description="Write a configuration for each sparsifier.")
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if a file differs.")
    check = parser.parse_args(given).check
    wanted = {HERE / f"{name}.yaml": text_of(name, cls) for name, cls in SPARSIFIERS.items()}
    other = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if check and other:
        sys.exit(f"These differ: {', '.join(path.name for path in other)}. Run python configs/generate.py.")
    for path in () if check else other:
        path.write_text(wanted[path])


if __name__ == "__main__":
    main()
