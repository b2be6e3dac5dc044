"""What the command lines of the examples share: LightningCLI, `--fast`, and the time of a step in the log."""

import sys
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import ArgsType, LightningArgumentParser, LightningCLI

# Registers the strategy names, and makes short class names (`TopK`, `SparsityMonitor`) known to the command line.
import lightning_sparse  # noqa: F401


class StepTimer(pl.Callback):
    """Log `step_ms`: wall time of a training step on rank 0, in ms, mean over the steps since the last logged one.

    The clock runs from the start of a batch to its end, optimizer step included, loading of the batch excluded. On CUDA
    each step is waited for, because the clock would otherwise see the launching of the work only; this is a tool for
    comparing runs, not one to leave on in a long training.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self.started)
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log("step_ms", 1000 * sum(self.seconds) / len(self.seconds))
            self.seconds.clear()


class ExampleCLI(LightningCLI):
    """LightningCLI for one model and one data set, with `--fast`.

    Args:
        model: class of the model.
        data: class of the data.
        fast: the settings that `--fast` stands for, such as ``{"trainer.max_steps": 20}``. What comes after `--fast` on
            the command line wins over them, and they over what comes before.
        linked: settings of the model that are read from the data, such as ``{"data.num_classes": "model.classes"}``.
        trainer: defaults of the Trainer that belong to the model, such as clipping.
    """

    def __init__(
        self,
        model: type[pl.LightningModule],
        data: type[pl.LightningDataModule],
        fast: dict[str, Any],
        linked: dict[str, str] | None = None,
        trainer: dict[str, Any] | None = None,
    ) -> None:
        self.fast = [f"--{name}={value}" for name, value in fast.items()]
        self.linked = linked or {}
        defaults = {"callbacks": [StepTimer()], **(trainer or {})}
        what, _, _ = str(sys.modules[model.__module__].__doc__).partition("\n")
        description = f"{what} --fast stands for {' '.join(self.fast)}"
        super().__init__(
            model,
            data,
            seed_everything_default=0,
            trainer_defaults=defaults,
            parser_kwargs={"description": description},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for source, target in self.linked.items():
            parser.link_arguments(source, target, apply_on="instantiate")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        spread = ([arg] if arg != "--fast" else self.fast for arg in sys.argv[1:])
        self.config = parser.parse_args([arg for part in spread for arg in part])

    def before_fit(self) -> None:
        # Before other ranks are started: they would tell at length that the first one has gone.
        if self.trainer.is_global_zero:
            self.datamodule.prepare_data()
