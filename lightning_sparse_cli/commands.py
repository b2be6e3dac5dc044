"""The subcommands of ``lightning-sparse``; signatures and docstrings are their options.

They import what they need when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_sparse.compare.sheets import Sheet
    from lightning_sparse.console import Table

NEEDED = {
    "jsonargparse": "jsonargparse",
    "docstring_parser": "docstring-parser",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules of the extra ``cli``, and the packages that they come from."""


def simulate(
    streams: list[str] = ["digits", "text", "heavy_tail"],  # noqa: B006  # shown as defaults, never changed
    ranks: list[int] = [4, 8, 16],  # noqa: B006
    densities: list[float] = [0.01, 0.001],  # noqa: B006
    methods: list[str] | None = None,
    steps: int = 120,
    seed: int = 0,
    text: str | None = None,
    out: Path = Path("simulate"),
) -> None:
    """Give all methods the same recorded gradients, and compare density, balance, quality of the picks and traffic.

    What is finished is kept in the folder; the same command again does only what is missing.

    Args:
        streams: where gradients come from: digits or text, recorded in dense training, or heavy_tail; lists are
            written as in --streams digits text.
        ranks: numbers of simulated ranks.
        densities: k / numel, with k as each method means it: for each rank or for all together.
        methods: names such as topk; all if left out. A wrong name is answered with all that there are.
        steps: length of the streams.
        seed: of the streams.
        text: text file for the stream text; if left out, the reference of the Python language.
        out: folder for simulate.csv, simulate.md and figures; what is finished there is not done again.
    """
    need("matplotlib", "rich", "sklearn")
    from lightning_sparse.compare import recorded
    from lightning_sparse.compare.figures import simulate_figures
    from lightning_sparse.compare.sheets import Sheet
    from lightning_sparse.compare.tables import simulate_tables

    with _complaints("simulate"):
        jobs = recorded.plan(
            streams=streams, ranks=ranks, densities=densities, methods=methods, steps=steps, seed=seed, text=text
        )
        sheet = Sheet(_folder(out) / "simulate.csv", recorded.Row)
        done = sheet.read()

    def work(missing: list[Any]) -> Iterator[tuple[Any, str]]:
        for row in recorded.execute_all(missing):
            yield row, f"{row.stream}, {row.ranks} ranks, {row.method}"

    rows = _complete(jobs, sheet, done, work)
    meanings = "".join(f"- {name}: {meaning}.\n" for name, meaning in recorded.QUANTITIES.items())
    simulate_figures(rows, out)
    _report(out / "simulate.md", simulate_tables(rows), meanings)


def judge(
    tasks: list[str] = ["digits", "text"],  # noqa: B006
    ranks: int = 8,
    densities: list[float] = [0.01, 0.001],  # noqa: B006
    methods: list[str] | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 400,
    every: int = 50,
    text: str | None = None,
    jobs: int = 1,
    out: Path = Path("judge"),
) -> None:
    """Train with every method, all with the same traffic, and compare the losses.

    What is finished is kept in the folder; the same command again does only what is missing.

    Args:
        tasks: what to train: digits or text; lists are written as in --tasks digits text.
        ranks: number of simulated ranks.
        densities: a method may send the bytes that MiCRO sends at this density.
        methods: names such as topk; all if left out. A wrong name is answered with all that there are. Dense
            training is always there.
        seeds: of initial parameters and order of examples.
        steps: length of each training.
        every: steps between points of the curves.
        text: text file for the task text; if left out, the reference of the Python language.
        jobs: processes to train in, with one torch thread each.
        out: folder for judge.csv, judge_curves.csv, judge.md and figures; what is finished there is not done again.
    """
    need("matplotlib", "rich", "sklearn")
    from lightning_sparse.compare import training
    from lightning_sparse.compare.figures import judge_figures
    from lightning_sparse.compare.sheets import Sheet
    from lightning_sparse.compare.tables import judge_tables

    with _complaints("judge"):
        wanted = training.plan(
            tasks=tasks,
            ranks=ranks,
            densities=densities,
            methods=methods,
            seeds=seeds,
            steps=steps,
            every=every,
            text=text,
        )
        if jobs < 1:
            raise ValueError(f"Expected jobs to be at least 1, but got {jobs}.")
        sheet = Sheet(_folder(out) / "judge.csv", training.Result)
        curves = Sheet(out / "judge_curves.csv", training.CurvePoint)
        done = sheet.read()
        curves.read()  # what cannot be read is found now, not after hours

    def work(missing: list[Any]) -> Iterator[tuple[Any, str]]:
        for result, points in training.execute_all(missing, jobs):
            curves.append(points)  # before the result, which cannot stay behind without its curve
            yield result, f"{result.task} {result.method}: loss {result.loss:.4f}"

    results = _complete(wanted, sheet, done, work)
    judge_figures(results, curves.read(), out)
    _report(out / "judge.md", judge_tables(results))


def advise(
    config: list[Path],
    ranks: list[int] = [],  # noqa: B006
    gbit: list[float] = [],  # noqa: B006
    sparsifiers: list[str] | None = None,
    densities: list[float] = [0.1, 0.01, 0.001],  # noqa: B006
    model: str | None = None,
    data: str | None = None,
    warmup: int = 5,
    steps: int = 10,
    out: Path = Path("advice"),
) -> None:
    """Say whether sparsification pays for a training, and which; writes the configuration to use.

    Runs some steps of the training that a LightningCLI configuration describes, with its own devices and launcher.

    Args:
        config: a LightningCLI configuration, such as config.yaml in a run's log folder; of several, later ones replace
            what earlier ones say.
        ranks: other numbers of ranks to predict for; lists are written as in --ranks 8 64.
        gbit: rates of a link to predict for, in Gbit/s, as in --gbit 1 10 100.
        sparsifiers: names such as topk; all but random_k if left out.
        densities: to predict for.
        model: import path of the LightningModule, if the configuration does not name its class.
        data: import path of the LightningDataModule, likewise.
        warmup: steps that are not timed.
        steps: steps that are timed.
        out: folder for advice.md, advice.csv, advice.png and config.yaml, one for each network.
    """
    need("matplotlib", "rich", "yaml")
    from lightning_utilities.core.rank_zero import rank_zero_only

    from lightning_sparse.advisor.config import advise_config
    from lightning_sparse.advisor.report import SHOWN, across, figure, markdown, overview, write_configs, write_csv

    with _complaints("advise"):
        folder = _folder(out)
        advice, given = advise_config(
            *config,
            model=model,
            data=data,
            ranks=ranks,
            gbit=gbit,
            sparsifiers=sparsifiers,
            densities=densities,
            warmup=warmup,
            steps=steps,
            progress=_tell,
        )
    if rank_zero_only.rank:  # type: ignore[attr-defined]  # set by Lightning
        return  # one of the processes that the launcher started beside the first
    figure(advice, folder / "advice.png")
    write_csv(advice, folder / "advice.csv")
    configs = write_configs(advice, folder, given)
    (folder / "advice.md").write_text(markdown(advice), encoding="utf-8")
    for table in (overview(advice, rows=SHOWN), across(advice)):
        table.show()
    print("Assumptions:", *(f"- {sentence}" for sentence in advice.assumptions()), "", sep="\n")
    for scenario in advice.scenarios:
        print(advice.verdict(scenario), *advice.remarks(scenario), sep="\n")
    print(f"All predictions and a figure are in {folder}, and configurations to train with:")
    for scenario, path in zip(advice.scenarios, configs, strict=True):
        print(f"{path} ({scenario.label})")


def _tell(what: str, done: float) -> None:
    """Progress of profiling; a plain function, so that launchers can send it to other processes."""
    start, end = ("\x1b[2K", "\r") if sys.stderr.isatty() else ("", "\n")
    print(f"{start}[{done:4.0%}] {what}", end=end, file=sys.stderr, flush=True)


def need(*modules: str) -> None:
    """Name the packages that are missing, and what installs them.

    Args:
        modules: keys of :data:`NEEDED`.

    Raises:
        SystemExit: if one of them cannot be imported.
    """
    missing = [NEEDED[module] for module in modules if find_spec(module) is None]
    if missing:
        raise SystemExit(
            f"The command lightning-sparse needs {', '.join(missing)}. "
            "Install what is missing with: pip install 'lightning-sparse[cli]'"
        )


@contextmanager
def _complaints(command: str) -> Iterator[None]:
    """Settings that make no sense are answered in one line; errors of the program keep their traceback."""
    try:
        yield
    except ValueError as error:
        print(f"lightning-sparse {command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _folder(out: Path) -> Path:
    """Make the folder of results, and write into it, now and not when the first one is there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Expected out to be a folder, but got {out}: {error.strerror}.") from error
    try:
        with TemporaryFile(dir=out) as file:
            file.write(b"results")
    except OSError as error:
        raise ValueError(f"Expected out to be a folder to write into, but got {out}: {error.strerror}.") from error
    return out


def _complete(jobs: Sequence[Any], sheet: Sheet[Any], done: Iterable[Any], work: Any) -> list[Any]:
    """Results of all jobs: those that are there, and, as they are made and written, the others.

    Args:
        jobs: in the order of the results.
        sheet: where results are kept.
        done: those that are in it.
        work: makes results from jobs, each with a text to show.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    results = {result.key: result for result in done}
    missing = [job for job in jobs if job.key not in results]
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    with Progress(BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}")) as progress:
        bar = progress.add_task("working", total=len(jobs), completed=len(jobs) - len(missing))
        for result, text in work(missing):
            sheet.append([result])
            results[result.key] = result
            progress.update(bar, advance=1, description=text)
    return [results[job.key] for job in jobs]


def _report(path: Path, tables: Sequence[Table], notes: str = "") -> None:
    """Write tables in markdown, and show them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*(table.markdown() for table in tables), *([notes] if notes else [])]), encoding="utf-8")
    for table in tables:
        table.show()
    print(f"Tables, numbers and figures are in {path.parent}.")
