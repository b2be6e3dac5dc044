"""What each option means, whatever the command; the signatures of the commands have types and defaults."""

OPTIONS = {
    "accelerator": "Accelerator by its name in Lightning, such as cpu or cuda.",
    "budgets": "Traffic that each sparsifier may have: the bytes that MiCRO sends at these densities.",
    "config": (
        "LightningCLI configuration of a training, such as config.yaml in the log folder of a run; of several, later "
        "ones replace what earlier ones say."
    ),
    "data": "Import path of the LightningDataModule, for a configuration that does not name its class.",
    "densities": "Shares of the coordinates that are sent, as in --densities 0.01 0.001.",
    "density": "Share of the coordinates that the sparse exchange sends.",
    "devices": "Number of processes of a node; left out, those of the launcher, all GPUs, or 2 without GPUs.",
    "every": "Number of steps from one point of a training's curve to the next.",
    "gbit": "Rates of a link in Gbit/s to give results for, as in --gbit 1 10.",
    "jobs": "Number of processes to train in, with one torch thread each.",
    "json": "Print numbers as JSON instead of tables.",
    "model": "Import path of the LightningModule, for a configuration that does not name its class.",
    "names": "Names of all runs, or of those that can be read, in their order; left out, parts of their paths.",
    "nodes": "Number of nodes; left out, those of the launcher, or 1.",
    "out": "Path of the results: a folder, or the page of a report.",
    "parameters": "Sizes of models to give results for, in parameters, as in --parameters 14e6 7e9.",
    "publish": "Save the workspace online; log in with wandb login before.",
    "ranks": "Numbers of ranks, which are the processes of a training, to give results for, as in --ranks 8 64.",
    "results": "Logged quantities that the workspace draws, as in --results train/loss val/loss.",
    "rtt": "Milliseconds to add to each round trip, as between regions; results are given with and without.",
    "runs": (
        "Folders of CSVLogger, of W&B offline runs (offline-run-*) or of TensorBoardLogger, or folders above several "
        "ones."
    ),
    "seeds": "Seeds of data and initial parameters; with several, everything is repeated with each.",
    "sparsifiers": (
        "Names of sparsifiers, such as top_k; left out, all that it makes sense to try. A wrong name is answered with "
        "all that there are."
    ),
    "steps": "Number of training steps, of each run.",
    "streams": "Sources of gradients: heavy_tail is made up, digits and text are recorded in dense training.",
    "svg": "Folder for all figures as SVG files; left out, none are written.",
    "tasks": "Trainings to compare in: digits, text or both.",
    "text": (
        "Text file in UTF-8 to train on for the task or stream called text; left out, the reference of the Python "
        "language."
    ),
    "title": "Title of the page and the workspace; left out, they are named after the runs and the package.",
    "warmup": "Number of steps before those that are timed.",
    "workspace": "Team and project of W&B, as in my-team/my-project, to make a workspace with the same figures for.",
}
"""A sentence or two for each option. An option with this name has this meaning in every command that has it."""
