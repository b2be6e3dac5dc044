"""The command ``lightning-sparse``. A subcommand is a function in :data:`COMMANDS`; its signature gives the options."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_sparse.advisor.report import SHOWN, across, figure, markdown, overview, write_configs, write_csv
from lightning_sparse.bench import compare
from lightning_sparse.bench.figures import judge_figures, simulate_figures
from lightning_sparse.bench.runs import CurvePoint, Result, execute_all, plan
from lightning_sparse.bench.sheets import Sheet
from lightning_sparse.bench.tables import judge_tables, simulate_tables
from lightning_sparse.console import WIDTH, Table

if TYPE_CHECKING:
    from rich.progress import Progress

NEEDED = {
    "jsonargparse": "jsonargparse",
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
    _need("matplotlib", "rich", "sklearn")
    with _complaints("simulate"):
        wanted = compare.plan(
            streams=streams, ranks=ranks, densities=densities, methods=methods, steps=steps, seed=seed, text=text
        )
        sheet = Sheet(_folder(out) / "simulate.csv", compare.Row)
        rows = {row.key: row for row in sheet.read()}
    missing = [job for job in wanted if job.key not in rows]
    with _progress() as progress:
        bar = progress.add_task("simulating", total=len(wanted), completed=len(wanted) - len(missing))
        for row in compare.execute_all(missing):
            sheet.append([row])
            rows[row.key] = row
            progress.update(bar, advance=1, description=f"{row.stream}, {row.ranks} ranks, {row.method}")
    found = [rows[job.key] for job in wanted]
    meanings = "".join(f"- {name}: {meaning}.\n" for name, meaning in compare.QUANTITIES.items())
    simulate_figures(found, out)
    _report(out / "simulate.md", simulate_tables(found), meanings)


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
    _need("matplotlib", "rich", "sklearn")
    with _complaints("judge"):
        wanted = plan(
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
            raise ValueError(f"Expected jobs to be at least 1 but got {jobs}.")
        sheet, curves = Sheet(_folder(out) / "judge.csv", Result), Sheet(out / "judge_curves.csv", CurvePoint)
        results = {result.key: result for result in sheet.read()}
        curves.read()  # what cannot be read is found now, not after hours
    missing = [job for job in wanted if job.key not in results]
    with _progress() as progress:
        bar = progress.add_task("training", total=len(wanted), completed=len(wanted) - len(missing))
        for result, points in execute_all(missing, jobs):
            curves.append(points)  # first, so that a result without its curve cannot stay behind
            sheet.append([result])
            results[result.key] = result
            progress.update(bar, advance=1, description=f"{result.task} {result.method}: loss {result.loss:.4f}")
    found = [results[job.key] for job in wanted]
    judge_figures(found, curves.read(), out)
    _report(out / "judge.md", judge_tables(found))


def advise(
    config: Path,
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
        config: a LightningCLI configuration, such as config.yaml in a run's log folder.
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
    _need("matplotlib", "rich", "yaml")
    with _complaints("advise"):
        from lightning_sparse.advisor.config import advise_config

        folder = _folder(out)
        advice, given = advise_config(
            config,
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
    _show([overview(advice, rows=SHOWN), across(advice)])
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


COMMANDS: dict[str, Any] = {"simulate": simulate, "judge": judge, "advise": advise}


def main(args: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Args:
        args: the command line without the command's name; None: what this process was called with.
    """
    _need("jsonargparse")
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="lightning-sparse")
    subcommands = parser.add_subcommands(required=True)
    for name, command in COMMANDS.items():
        title = inspect.getdoc(command).partition("\n")[0]  # type: ignore[union-attr]
        options = ArgumentParser(description=title)
        if "config" not in inspect.signature(command).parameters:
            options.add_argument("--config", action="config", help="Path to a file with these options.")
        options.add_function_arguments(command, as_group=False, as_positional=False)
        subcommands.add_subcommand(name, options, help=title)
    given = parser.parse_args(_join_lists(sys.argv[1:] if args is None else list(args)))
    command = COMMANDS[given.subcommand]
    accepted = inspect.signature(command).parameters
    try:
        command(**{name: value for name, value in given[given.subcommand].items() if name in accepted})
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", file=sys.stderr)
        raise SystemExit(130) from None  # as shells say it


def _need(*modules: str) -> None:
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
        raise ValueError(f"Expected out to be a folder but got {out}: {error.strerror}.") from error
    try:
        with TemporaryFile(dir=out) as file:
            file.write(b"results")
    except OSError as error:
        raise ValueError(f"Expected out to be a folder that may be written but got {out}: {error.strerror}.") from error
    return out


def _join_lists(args: list[str]) -> list[str]:
    """Write ``--ranks 4 8`` as ``--ranks=[4, 8]``, which is how jsonargparse takes lists."""
    command = COMMANDS.get(args[0]) if args else None
    if command is None:
        return args
    kinds = get_type_hints(command)
    elements = {f"--{name}": _element(kinds[name]) for name in inspect.signature(command).parameters}
    joined, rest = [args[0]], args[1:]
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if equals and not elements.get(option):
            joined.append(f"{option}={value}")
            continue
        values = [value] if equals else []
        while elements.get(option) and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        if values and not values[0].startswith("["):
            # Names are quoted: some of them mean something else in YAML.
            names = elements[option] is str
            joined.append(f"{option}={json.dumps(values) if names else '[' + ', '.join(values) + ']'}")
        else:
            joined += [option, *values]
    return joined


def _element(kind: Any) -> Any:
    """``int`` of ``list[int]`` and of ``list[int] | None``; None of everything else."""
    for one in (kind, *get_args(kind)):
        if get_origin(one) is list:
            return get_args(one)[0]
    return None


def _progress() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    return Progress(BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}"))


def _report(path: Path, tables: Sequence[Table], notes: str = "") -> None:
    """Write tables in markdown, and show them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*(table.markdown() for table in tables), *([notes] if notes else [])]), encoding="utf-8")
    _show(tables)
    print(f"Tables, numbers and figures are in {path.parent}.")


def _show(tables: Sequence[Table]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    console.width = max(console.width, WIDTH)
    for table in tables:
        shown = RichTable(title=table.title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(table.header):
            shown.add_column(name, justify="right" if i else "left", no_wrap=not i)
        for cells in table.rows:
            shown.add_row(*cells)
        console.print(shown)


if __name__ == "__main__":
    main()
