"""The subcommands of ``lightning-sparse``; signatures and docstrings are their options.

They import what they need when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from lightning_sparse_cli.output import print_json, show, tell

if TYPE_CHECKING:
    from lightning_sparse.tools.compare.sheets import Sheet

NEEDED = {
    "jsonargparse": ("jsonargparse", "cli"),
    "docstring_parser": ("docstring-parser", "cli"),
    "rich": ("rich", "cli"),
    "matplotlib": ("matplotlib", "cli"),
    "plotly": ("plotly", "cli"),
    "sklearn": ("scikit-learn", "cli"),
    "yaml": ("pyyaml", "cli"),
    "wandb": ("wandb", "dashboard"),
    "wandb_workspaces": ("wandb-workspaces", "dashboard"),
}
"""Modules that commands need, the packages that they come from, and the extra that has them."""


def simulate(
    streams: list[str] = ["digits", "text", "heavy_tail"],  # noqa: B006  # shown as defaults, never changed
    ranks: list[int] = [4, 8, 16],  # noqa: B006
    densities: list[float] = [0.01, 0.001],  # noqa: B006
    methods: list[str] | None = None,
    steps: int = 120,
    seed: int = 0,
    text: str | None = None,
    out: Path = Path("simulate"),
    json: bool = False,
) -> None:
    """Give all methods the same recorded gradients, and compare density, balance, quality of the picks and traffic.

    What is finished is kept in the folder; the same command again does only what is missing.

    Args:
        streams: where gradients come from: digits or text, recorded in dense training, or heavy_tail; lists are
            written as in --streams digits text.
        ranks: numbers of simulated ranks.
        densities: k / numel, with k as each method means it: for each rank or for all together.
        methods: names such as top_k; all if left out. A wrong name is answered with all that there are.
        steps: length of the streams.
        seed: of the streams.
        text: text file for the stream text; if left out, the reference of the Python language.
        out: folder for simulate.csv, simulate.md and figures; what is finished there is not done again.
        json: print the numbers as JSON, a list with an object for each stream, density and method, instead of tables.

    Examples:
        lightning-sparse simulate --streams heavy_tail --methods top_k union_top_k --steps 20
        lightning-sparse simulate --ranks 64 --densities 0.001 --out large
        lightning-sparse simulate --methods top_k --json > top_k.json
    """
    need("matplotlib", "rich", "sklearn")
    from lightning_sparse.tools.compare import recorded
    from lightning_sparse.tools.compare.figures import simulate_figures
    from lightning_sparse.tools.compare.sheets import Sheet
    from lightning_sparse.tools.compare.tables import simulate_tables

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
    show(out / "simulate.md", simulate_tables(rows), rows if json else None, meanings)


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
    json: bool = False,
) -> None:
    """Train with every method, all with the same traffic, and compare the losses.

    What is finished is kept in the folder; the same command again does only what is missing.

    Args:
        tasks: what to train: digits or text; lists are written as in --tasks digits text.
        ranks: number of simulated ranks.
        densities: a method may send the bytes that MiCRO sends at this density.
        methods: names such as top_k; all if left out. A wrong name is answered with all that there are. Dense
            training is always there.
        seeds: of initial parameters and order of examples.
        steps: length of each training.
        every: steps between points of the curves.
        text: text file for the task text; if left out, the reference of the Python language.
        jobs: processes to train in, with one torch thread each.
        out: folder for judge.csv, judge_curves.csv, judge.md and figures; what is finished there is not done again.
        json: print the results as JSON, a list with an object for each training, instead of tables.

    Examples:
        lightning-sparse judge --tasks digits --methods top_k union_top_k --seeds 0
        lightning-sparse judge --tasks text --text my_text.txt --jobs 4
    """
    need("matplotlib", "rich", "sklearn")
    from lightning_sparse.tools.compare import training
    from lightning_sparse.tools.compare.figures import judge_figures
    from lightning_sparse.tools.compare.sheets import Sheet
    from lightning_sparse.tools.compare.tables import judge_tables

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
    show(out / "judge.md", judge_tables(results), results if json else None)


def advise(
    config: list[Path],
    ranks: list[int] = [],  # noqa: B006
    gbit: list[float] = [],  # noqa: B006
    rtt: float | None = None,
    sparsifiers: list[str] | None = None,
    densities: list[float] = [0.1, 0.01, 0.001],  # noqa: B006
    model: str | None = None,
    data: str | None = None,
    warmup: int = 5,
    steps: int = 10,
    out: Path = Path("advice"),
    json: bool = False,
) -> None:
    """Say whether sparsification pays for a training, and which; writes the configuration to use.

    Runs some steps of the training that a LightningCLI configuration describes, with its own devices and launcher.

    Args:
        config: a LightningCLI configuration, such as config.yaml in a run's log folder; of several, later ones replace
            what earlier ones say.
        ranks: other numbers of ranks to predict for; lists are written as in --ranks 8 64.
        gbit: rates of a link to predict for, in Gbit/s, as in --gbit 1 10 100.
        rtt: milliseconds to add to each round trip, as between regions; as measured if left out.
        sparsifiers: names such as top_k; all but random_k if left out.
        densities: to predict for.
        model: import path of the LightningModule, if the configuration does not name its class.
        data: import path of the LightningDataModule, likewise.
        warmup: steps that are not timed.
        steps: steps that are timed.
        out: folder for advice.md, advice.csv, advice.png and config.yaml, one for each network.
        json: print the predictions as JSON, an object with verdicts, assumptions and predictions, instead of tables.

    Examples:
        lightning-sparse advise --config config.yaml
        lightning-sparse advise --config base.yaml --config large.yaml --gbit 1 10 --ranks 8 64
    """
    need("matplotlib", "rich", "yaml")
    from lightning_utilities.core.rank_zero import rank_zero_only

    from lightning_sparse.tools.advisor.config import advise_config
    from lightning_sparse.tools.advisor.report import (
        SHOWN,
        across,
        figure,
        markdown,
        overview,
        write_configs,
        write_csv,
    )

    with _complaints("advise"):
        folder = _folder(out)
        advice, given = advise_config(
            *config,
            model=model,
            data=data,
            ranks=ranks,
            gbit=gbit,
            rtt=rtt,
            sparsifiers=sparsifiers,
            densities=densities,
            warmup=warmup,
            steps=steps,
            progress=tell,
        )
    if rank_zero_only.rank:  # type: ignore[attr-defined]  # set by Lightning
        return  # one of the processes that the launcher started beside the first
    figure(advice, folder / "advice.png")
    write_csv(advice, folder / "advice.csv")
    configs = write_configs(advice, folder, given)
    (folder / "advice.md").write_text(markdown(advice), encoding="utf-8")
    if json:
        verdicts = {scenario.label: advice.verdict(scenario) for scenario in advice.scenarios}
        return print_json(
            {"verdicts": verdicts, "assumptions": advice.assumptions(), "predictions": advice.predictions}
        )
    for table in (overview(advice, rows=SHOWN), across(advice)):
        table.show()
    print("Assumptions:", *(f"- {sentence}" for sentence in advice.assumptions()), "", sep="\n")
    for scenario in advice.scenarios:
        late = advice.late(scenario)
        print(advice.verdict(scenario), *([late] if late else []), *advice.remarks(scenario), sep="\n")
    print(f"All predictions and a figure are in {folder}, and configurations to train with:")
    for scenario, path in zip(advice.scenarios, configs, strict=True):
        print(f"{path} ({scenario.label})")


def probe(
    devices: int | None = None,
    nodes: int | None = None,
    accelerator: str = "auto",
    density: float = 0.01,
    parameters: list[float] = [14e6, 124e6, 1.5e9],  # noqa: B006
    ranks: list[int] = [],  # noqa: B006
    gbit: list[float] = [],  # noqa: B006
    rtt: list[float] = [],  # noqa: B006
    out: Path = Path("probe"),
    json: bool = False,
) -> None:
    """Measure the links of a cluster before anyone trains on it, and say what an exchange will take.

    Start it as the training will be started: by itself on one machine, or by torchrun or srun on several nodes.

    Args:
        devices: processes of a node; if left out, those of the launcher, all GPUs, or 2 without GPUs.
        nodes: number of nodes; if left out, those of the launcher, or 1.
        accelerator: of Lightning, such as cpu or cuda.
        density: of the sparse exchange.
        parameters: numbers of parameters to predict for, as in --parameters 14e6 7e9.
        ranks: other numbers of ranks to predict for.
        gbit: other rates of a link to predict for, in Gbit/s.
        rtt: milliseconds to add to each round trip, for a distance that cannot be measured here.
        out: folder for probe.md.
        json: print links and expectations as JSON instead of tables.

    Examples:
        lightning-sparse probe --devices 4
        lightning-sparse probe --rtt 20 50 --parameters 124e6 7e9
        srun lightning-sparse probe --rtt 20 50
        torchrun --nnodes 2 --nproc-per-node 4 --no-python lightning-sparse probe --parameters 124e6
    """
    need("rich")
    from lightning_sparse.tools import probe as tool

    with _complaints("probe"):
        folder = _folder(out)
        found = tool.probe(devices, nodes, accelerator, density, parameters, ranks, gbit, rtt)
    if found is None:
        return  # one of the ranks beside the first
    verdicts = found.verdicts()
    notes = "\n".join(f"- {sentence}" for sentence in (*verdicts, *found.assumptions())) + "\n"
    links = found.links
    rows = {"verdicts": verdicts, "links": links.links, "expected": found.expected, "assumptions": found.assumptions()}
    show(folder / "probe.md", found.tables(), rows if json else None, notes)
    if not json:
        print(*verdicts, sep="\n")


def report(
    runs: list[Path],
    /,
    names: list[str] | None = None,
    title: str | None = None,
    out: Path = Path("report.html"),
    svg: Path | None = None,
    json: bool = False,
) -> None:
    """Turn the logs of one or several runs into one page with figures that needs no network.

    Args:
        runs: folders of CSVLogger, of W&B offline runs (offline-run-*) or of TensorBoardLogger, or folders above
            several ones.
        names: of all runs, or of those that can be read, in their order; what distinguishes their paths, if left out.
        title: of the page; the names of the runs, if left out.
        out: file for the page.
        svg: folder for all figures as SVG files; none are written, if left out.
        json: print the runs in numbers as JSON, a list with an object for each run, instead of a table.

    Examples:
        lightning-sparse report lightning_logs/version_0
        lightning-sparse report runs/dense runs/top_k --names dense "Top-k" --out compared.html --svg figures
        lightning-sparse report wandb/offline-run-20260101_120000-abcd1234 --json
    """
    need("plotly", "rich", *(["matplotlib"] if svg else []))
    package = find_spec("lightning_sparse")  # does not import it
    assert package is not None and package.origin is not None
    with _complaints("report"):
        run_path(str(Path(package.origin).with_name("tools") / "report" / "files.py"))["run_files"](runs)
    from lightning_sparse.tools.report.page import write_page
    from lightning_sparse.tools.report.runs import read_runs
    from lightning_sparse.tools.report.summary import totals, totals_table

    with _complaints("report"):
        found = read_runs(runs, names)
        write_page(found, out, title)
        if svg:
            from lightning_sparse.tools.report.static import write_figures

            write_figures(found, _folder(svg, "svg"))
    for run in found:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    if json:
        return print_json([total.as_dict() for total in totals(found)])
    totals_table(found).show()
    print(f"The page is {out}." + (f" Figures are in {svg}." if svg else ""))


def dashboard(
    entity: str,
    project: str,
    name: str = "Sparsified training",
    results: list[str] = ["train/loss", "val/loss", "val/accuracy"],  # noqa: B006
    out: Path = Path("dashboard.json"),
    publish: bool = False,
) -> None:
    """Make a Weights & Biases workspace with the papers' figures, as a file or online.

    Args:
        entity: user or team that owns the project.
        project: that the runs are logged to.
        name: of the workspace.
        results: logged quantities to draw against steps, megabytes and seconds; lists are written as in
            --results train/loss val/loss.
        out: file for the specification of the workspace; nothing is sent, and no account is needed.
        publish: also save the workspace online; log in with wandb login before.

    Examples:
        lightning-sparse dashboard --entity my-team --project my-project
        lightning-sparse dashboard --entity my-team --project my-project --results val/perplexity --publish
    """
    need("wandb", "wandb_workspaces")
    from lightning_sparse.tools.report.dashboard import publish_workspace, workspace, write_specification

    with _complaints("dashboard"):
        made = workspace(entity, project, name, results)
        write_specification(made, out)
        print(f"The specification is {out}.")
        if publish:
            print(f"The workspace is {publish_workspace(made)}.")


def need(*modules: str) -> None:
    """Name the packages that are missing, and what installs them.

    Args:
        modules: keys of :data:`NEEDED`.

    Raises:
        SystemExit: if one of them cannot be imported.
    """
    missing = [NEEDED[module] for module in modules if find_spec(module) is None]
    if missing:
        extras = ",".join(dict.fromkeys(extra for _, extra in missing))
        raise SystemExit(
            f"The command lightning-sparse needs {', '.join(package for package, _ in missing)}. "
            f"Install what is missing with: pip install 'lightning-sparse[{extras}]'"
        )


@contextmanager
def _complaints(command: str) -> Iterator[None]:
    """Settings that make no sense are answered in one line; errors of the program keep their traceback."""
    try:
        yield
    except ValueError as error:
        print(f"lightning-sparse {command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _folder(out: Path, option: str = "out") -> Path:
    """Make the folder of results, and write into it, now and not when the first one is there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Expected {option} to be a folder, but got {out}: {error.strerror}.") from error
    try:
        with TemporaryFile(dir=out) as file:
            file.write(b"results")
    except OSError as error:
        raise ValueError(f"Expected {option} to be a folder to write into, but got {out}: {error.strerror}.") from error
    return out


def _complete(jobs: Sequence[Any], sheet: Sheet[Any], done: Iterable[Any], work: Any) -> list[Any]:
    """Results of all jobs: those that are there, and, as they are made and written, the others.

    Args:
        jobs: in the order of the results.
        sheet: where results are kept.
        done: those that are in it.
        work: makes results from jobs, each with a text to show.
    """
    from rich.console import Console
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
    columns = (BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("working", total=len(jobs), completed=len(jobs) - len(missing))
        for result, text in work(missing):
            sheet.append([result])
            results[result.key] = result
            progress.update(bar, advance=1, description=text)
    return [results[job.key] for job in jobs]
