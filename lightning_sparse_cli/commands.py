"""The commands of ``lightning-sparse``. Their signatures are their options, their docstrings the texts above these.

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

from lightning_sparse_cli.output import Rows, print_json, progress, show, tell, write

if TYPE_CHECKING:
    from lightning_sparse.tools.compare.sheets import Sheet

NEEDED = {
    "jsonargparse": ("jsonargparse", "cli"),
    "rich": ("rich", "cli"),
    "matplotlib": ("matplotlib", "cli"),
    "plotly": ("plotly", "cli"),
    "sklearn": ("scikit-learn", "cli"),
    "yaml": ("pyyaml", "cli"),
    "wandb": ("wandb", "wandb"),
    "wandb_workspaces": ("wandb-workspaces", "wandb"),
}
"""Modules that commands need, the packages that they come from, and the extra that has them."""


def probe(
    devices: int | None = None,
    nodes: int | None = None,
    accelerator: str = "auto",
    density: float = 0.01,
    parameters: list[float] = [14e6, 124e6, 1.5e9],  # noqa: B006  # shown as default, never changed
    ranks: list[int] = [],  # noqa: B006
    gbit: list[float] = [],  # noqa: B006
    rtt: list[float] = [],  # noqa: B006
    out: Path = Path("probe"),
    json: bool = False,
) -> None:
    """Measure the links of a cluster before anyone trains on it, and say what an exchange will take.

    Start it as the training will be started: by itself on one machine, or by torchrun or srun on several nodes. The
    folder gets probe.md.

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
    write(folder / "probe.md", tables := found.tables(), notes)
    if json:
        links = found.links.links
        return print_json(
            {"verdicts": verdicts, "links": links, "expected": found.expected, "assumptions": found.assumptions()}
        )
    show(folder, tables)
    print(*verdicts, sep="\n")


def advise(
    config: list[Path],
    ranks: list[int] = [],  # noqa: B006
    gbit: list[float] = [],  # noqa: B006
    rtt: list[float] = [],  # noqa: B006
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

    Runs some steps of the training that a LightningCLI configuration describes, with its own devices and launcher. The
    folder gets advice.md, advice.csv, advice.png, and a configuration for each network.

    Examples:
      lightning-sparse advise --config config.yaml
      lightning-sparse advise --config base.yaml --config large.yaml --gbit 1 10 --ranks 8 64
    """
    need("jsonargparse", "matplotlib", "rich", "yaml")
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
    print(advice)
    print(f"All predictions and a figure are in {folder}, and configurations to train with:")
    for scenario, path in zip(advice.scenarios, configs, strict=True):
        print(f"{path} ({scenario.label})")


def report(
    runs: list[Path] = [],  # noqa: B006
    /,
    names: list[str] | None = None,
    title: str | None = None,
    out: Path = Path("report.html"),
    svg: Path | None = None,
    workspace: str | None = None,
    results: list[str] = ["train/loss", "val/loss", "val/accuracy"],  # noqa: B006
    publish: bool = False,
    json: bool = False,
) -> None:
    """Turn the logs of one or several runs into one page with figures that needs no network.

    With --workspace, the same figures also become a workspace of Weights & Biases for all runs of a project. Its
    specification is a JSON file beside the page; no account is needed, and nothing is sent without --publish.

    Examples:
      lightning-sparse report lightning_logs/version_0
      lightning-sparse report runs/dense runs/top_k --names dense "Top-k" --out compared.html --svg figures
      lightning-sparse report wandb/offline-run-20260101_120000-abcd1234 --json
      lightning-sparse report --workspace my-team/my-project --results val/perplexity --publish
    """
    with _complaints("report"):
        if not runs and not workspace:
            raise ValueError("Expected folders of runs, or --workspace with a project of W&B, but got neither.")
        if publish and not workspace:
            raise ValueError("Expected --workspace with a project of W&B, to publish there, but got none.")
    if runs:
        _report(runs, names, title, out, svg, json)
    if workspace:
        _workspace(workspace, title or "Sparsified training", results, out.with_suffix(".json"), publish, json)


def _report(
    runs: list[Path], names: list[str] | None, title: str | None, out: Path, svg: Path | None, json: bool
) -> None:
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


def _workspace(project: str, name: str, results: list[str], path: Path, publish: bool, json: bool) -> None:
    need("wandb", "wandb_workspaces")
    from lightning_sparse.tools.report.dashboard import publish_workspace, workspace, write_specification

    with _complaints("report"):
        team, _, project = project.partition("/")
        made = workspace(team, project, name, results)
        write_specification(made, path)
        said = [f"The specification of the workspace is {path}."]
        if publish:
            said.append(f"The workspace is {publish_workspace(made)}.")
    print(*said, sep="\n", file=sys.stderr if json else sys.stdout)


def compare(
    tasks: list[str] = ["digits", "text"],  # noqa: B006
    ranks: list[int] = [8],  # noqa: B006
    budgets: list[float] = [0.01, 0.001],  # noqa: B006
    sparsifiers: list[str] | None = None,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    steps: int = 400,
    every: int = 50,
    text: str | None = None,
    jobs: int = 1,
    out: Path = Path("compare"),
    json: bool = False,
) -> None:
    """Train simulated ranks with every sparsifier, all with the same traffic, and compare the losses.

    Each training is printed when it ends; tables with the best mean loss first come last. Dense training is always
    there. The folder gets compare.csv, compare_curves.csv and compare.md. What is finished is kept in it: the same
    command again does only what is missing.

    Examples:
      lightning-sparse compare --tasks digits --sparsifiers top_k union_top_k --seeds 0
      lightning-sparse compare --tasks text --text my_text.txt --jobs 4
    """
    need("rich", "sklearn")
    from lightning_sparse.tools.compare import tables, training
    from lightning_sparse.tools.compare.sheets import Sheet

    with _complaints("compare"):
        if jobs < 1:
            raise ValueError(f"Expected jobs to be at least 1, but got {jobs}.")
        wanted = training.plan(
            tasks=tasks,
            ranks=ranks,
            densities=budgets,
            methods=sparsifiers,
            seeds=seeds,
            steps=steps,
            every=every,
            text=text,
        )
        sheet = Sheet(_folder(out) / "compare.csv", training.Result)
        curves = Sheet(out / "compare_curves.csv", training.CurvePoint)
        done = sheet.read()
        curves.read()  # what cannot be read is found now, not after hours

    def work(missing: list[Any]) -> Iterator[Any]:
        for result, points in training.execute_all(missing, jobs):
            curves.append(points)  # before the result, which cannot stay behind without its curve
            yield result

    printed = None if json else Rows(tables.TRAINED, tables.trained)
    results = _complete(wanted, sheet, done, work, printed)
    write(out / "compare.md", ranking := tables.compare_tables(results))
    if json:
        return print_json(results)
    show(out, ranking)


def replay(
    streams: list[str] = ["heavy_tail", "digits", "text"],  # noqa: B006
    ranks: list[int] = [8],  # noqa: B006
    densities: list[float] = [0.01, 0.001],  # noqa: B006
    sparsifiers: list[str] | None = None,
    steps: int = 120,
    seeds: list[int] = [0],  # noqa: B006
    text: str | None = None,
    out: Path = Path("replay"),
    json: bool = False,
) -> None:
    """Give all sparsifiers the same recorded gradients, and compare density, balance, quality of the picks and traffic.

    A density is meant as in the paper of each sparsifier: for each rank, or for all together. Each row is printed when
    it is there. The folder gets replay.csv, and replay.md, which explains the numbers. What is finished is kept in it:
    the same command again does only what is missing.

    Examples:
      lightning-sparse replay --streams heavy_tail --sparsifiers top_k union_top_k --steps 20
      lightning-sparse replay --ranks 64 --densities 0.001 --out large
      lightning-sparse replay --sparsifiers top_k --json > top_k.json
    """
    need("rich", "sklearn")
    from lightning_sparse.tools.compare import recorded, tables
    from lightning_sparse.tools.compare.sheets import Sheet

    with _complaints("replay"):
        jobs = recorded.plan(
            streams=streams, ranks=ranks, densities=densities, methods=sparsifiers, steps=steps, seeds=seeds, text=text
        )
        sheet = Sheet(_folder(out) / "replay.csv", recorded.Row)
        done = sheet.read()
    printed = None if json else Rows(tables.REPLAYED, tables.replayed)
    rows = _complete(jobs, sheet, done, recorded.execute_all, printed)
    meanings = "".join(f"- {name}: {meaning}.\n" for name, meaning in recorded.QUANTITIES.items())
    write(out / "replay.md", tables.replay_tables(rows), meanings)
    if json:
        return print_json(rows)
    show(out, [])


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


def _complete(
    jobs: Sequence[Any], sheet: Sheet[Any], done: Iterable[Any], work: Any, printed: Rows | None
) -> list[Any]:
    """Results of all jobs: those that are there, and, as they are made and written, the others.

    Args:
        jobs: in the order of the results.
        sheet: where results are kept.
        done: those that are in it.
        work: makes results from jobs.
        printed: prints each result, if there is one.
    """
    results = {result.key: result for result in done}
    missing = [job for job in jobs if job.key not in results]
    for job in jobs:
        if printed and job.key in results:
            printed.add(results[job.key])
    with progress(len(jobs), len(jobs) - len(missing)) as advance:
        for result in work(missing):
            sheet.append([result])
            results[result.key] = result
            if printed:
                printed.add(result)
            advance()
    return [results[job.key] for job in jobs]
