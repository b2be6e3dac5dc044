"""Accordion: send more of a layer while its gradient changes fast, and less otherwise. A callback of 40 lines.

    python examples/accordion.py                      # digits, two processes, 200 steps
    python examples/accordion.py --low 0.001 --high 0.2
    python examples/accordion.py --fast

After every `interval` steps, the callback compares the norm of each layer's summed gradient with that of the interval
before, and gives the layer the density `high` or `low` with `engine.regroup`. It prints how many layers have which.

Agarwal et al., Adaptive Gradient Communication via Critical Learning Regime Identification, MLSys 2021, arXiv
2010.16248, algorithm 1.
"""

import argparse
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from train_digits import Digits, DigitsClassifier

import lightning_sparse as ls


class Accordion(pl.Callback):
    """Densities of layers that follow the rate of change of their gradients.

    An interval is critical, with density `high`, if `|before - now| >= eta * before` for the norms of the two intervals
    before it, or if the learning rate has dropped; also the first two intervals, in which nothing can be compared.
    Gradients are those of each rank before error feedback, so that norms do not depend on the density. The mean of the
    squared norms over ranks decides, on all ranks alike. A resumed run begins with two critical intervals again.

    Args:
        low: density of a layer whose gradient changes little.
        high: density of a layer whose gradient changes fast; also that of the strategy.
        interval: optimizer steps between decisions; the paper takes 10 epochs.
        eta: relative change of the norm that counts as fast; 0.5 in the paper.
    """

    def __init__(self, low: float, high: float, interval: int, eta: float = 0.5) -> None:
        self.low, self.high, self.interval, self.eta = low, high, interval, eta

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.hooks = [p.register_hook(partial(self.add, name)) for name, p in parameters.items()]
        self.before: dict[str, float] = {}
        self.rate, self.due = self.learning_rate(trainer), trainer.global_step + self.interval

    def add(self, name: str, gradient: Tensor) -> None:
        self.sums[name] += gradient

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step < self.due:
            return
        self.due += self.interval
        engine = trainer.strategy.engine
        sparse = [group for group in engine.groups if not group.dense]
        squares = [sum(self.sums[p.name].square().sum() for p in group.parameters) for group in sparse]
        norms = trainer.strategy.reduce(torch.stack(squares), reduce_op="mean").sqrt().tolist()
        now = {group.name: norm for group, norm in zip(sparse, norms, strict=True)}
        dropped, self.rate = self.learning_rate(trainer) < self.rate, self.learning_rate(trainer)
        critical = {name for name in now if dropped or self.changes(self.before.get(name), now[name])}
        plan = [
            group if group.dense else group._replace(density=self.high if group.name in critical else self.low)
            for group in engine.groups
        ]
        if plan != engine.groups:
            engine.regroup(plan)
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}: {len(critical)} of {len(sparse)} layers are critical", flush=True)
        self.before = now
        for total in self.sums.values():
            total.zero_()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for hook in self.hooks:
            hook.remove()

    def changes(self, before: float | None, now: float) -> bool:
        return before is None or not abs(before - now) < self.eta * before  # NaN changes, too

    @staticmethod
    def learning_rate(trainer: pl.Trainer) -> float:
        return max(group["lr"] for group in trainer.optimizers[0].param_groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--low", type=float, default=0.01)
    parser.add_argument("--high", type=float, default=0.1)
    parser.add_argument("--interval", type=int, default=20, help="optimizer steps between decisions")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accelerator", default="cpu", help="cpu or gpu")
    parser.add_argument("--fast", action="store_true", help="20 steps, a decision after every 5")
    args = parser.parse_args()
    steps, interval = (20, 5) if args.fast else (args.steps, args.interval)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=2,
        strategy=ls.SparseDDPStrategy(density=args.high, grouping="layer"),
        callbacks=[Accordion(args.low, args.high, interval)],
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    digits, model = Digits(), DigitsClassifier()
    trainer.fit(model, digits)
    trainer.validate(model, digits)


if __name__ == "__main__":
    main()
