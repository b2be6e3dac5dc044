"""Every precision with whatever a training loop may do: at full density as plain DDP, below it nothing is lost."""

from __future__ import annotations

import importlib
import shutil
import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.covering import covering
from tests.integrations.test_strategy import strategy_class
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE, make_trainer

PACKAGE = "pytorch_lightning"
STEPS = 5
"""Batches of each rank."""

PRECISIONS = ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true"]

BEHAVIOURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Options of the Trainer and of the strategy.
    "plain": ({}, {}),
    "accumulate": ({"accumulate_grad_batches": 3}, {}),
    "clip by norm": ({"gradient_clip_val": 0.05}, {}),
    "clip by value": ({"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, {}),
    "two optimizers": ({}, {"find_unused_parameters": True}),
    "unused": ({}, {"find_unused_parameters": True}),
    "static graph": ({}, {"static_graph": True}),
    "checkpointing": ({}, {}),
    "compiled": ({}, {}),
}

SPARSIFIERS: dict[str, dict[str, Any]] = {
    # With the default rules, biases and the small last layer are dense.
    "top_k": {},
    "exdyna": {"rules": EVERYTHING_SPARSE},
    "sidco_e": {"grouping": "layer"},
    "shared_top_k": {"rules": EVERYTHING_SPARSE, "grouping": "layer"},
}


def make_module(behaviour: str) -> Any:
    """Three layers, and two more that are used now and then, or never."""
    import pytorch_lightning as pl

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 24)
            self.second = nn.Linear(24, 24)
            self.third = nn.Linear(24, 4)
            if behaviour == "unused":
                self.sometimes = nn.Linear(24, 24)
                self.never = nn.Linear(24, 24)
            self.automatic_optimization = behaviour != "two optimizers"

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            x = checkpoint(self.second, x, use_reentrant=False) if behaviour == "checkpointing" else self.second(x)
            out: Tensor = self.third(x.relu())
            return out

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            x, y = batch
            if not self.automatic_optimization:
                self.take_turns(x, y)
                return None
            if behaviour == "unused" and batch_idx % 3 == 1 and self.global_rank == 1:
                return nn.functional.cross_entropy(self.third(self.sometimes(self.first(x).relu()).relu()), y)
            return nn.functional.cross_entropy(self(x), y)

        def take_turns(self, x: Tensor, y: Tensor) -> None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                self.toggle_optimizer(optimizer)
                # Only now: what the other one's backward has left is still there in this one's.
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self(x), y))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            if self.automatic_optimization:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            own = [*self.first.parameters(), *self.second.parameters()]
            return [torch.optim.SGD(own, lr=0.1, momentum=0.9), torch.optim.SGD(self.third.parameters(), lr=0.05)]

    torch.manual_seed(0)
    return Net()


def make_data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2 * 8 * STEPS, 12, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=8)


class Recorder:
    """What every rank gave to each step, clipped and without a loss scale, and what came out of it, by parameter."""

    def __init__(self) -> None:
        self.local: list[dict[str, Tensor]] = []
        self.averages: list[dict[str, Tensor]] = []
        self.parameters: list[Tensor] = []
        """All of them, after every batch."""
        self.residuals: dict[str, Tensor] = {}

    def callback(self) -> Any:
        import pytorch_lightning as pl

        recorder, local = self, dict[str, Tensor]()

        class Record(pl.Callback):
            def on_train_start(self, trainer: Any, module: Any) -> None:
                clip = module.configure_gradient_clipping

                def clip_and_note(optimizer: Any, *args: Any, **kwargs: Any) -> None:
                    clip(optimizer, *args, **kwargs)
                    self.on_before_optimizer_step(trainer, module, optimizer)  # what is clipped away is gone

                module.configure_gradient_clipping = clip_and_note

            def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                local.update({n: g for n, g in grads_of(module).items() if id(module.get_parameter(n)) in held})

            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                if local:
                    recorder.local.append(dict(local))
                    recorder.averages.append(grads_of(module))
                    local.clear()
                recorder.parameters.append(torch.cat([p.detach().flatten() for p in module.parameters()]))

            def on_train_end(self, trainer: Any, module: Any) -> None:
                engine = getattr(trainer.strategy, "engine", None)
                for name, remembered in remembered_by(engine).items():
                    if "residual" in remembered:
                        recorder.residuals[name] = remembered["residual"].double()

        return Record()


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies in float64."""
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: grad.to(torch.float64, copy=True) for name, grad in grads.items()}


def remembered_by(engine: Any) -> dict[str, dict[str, Tensor]]:
    """By parameter, those that are frozen for now among them; empty for plain DDP."""
    remembered: dict[str, dict[str, Tensor]] = {} if engine is None else engine.state_dict()["parameters"]
    return remembered


def fit(precision: str, behaviour: str, sparse: dict[str, Any] | None, backend: str = "aot_eager") -> Recorder:
    """A run with plain DDP or with these settings."""
    options, ddp = BEHAVIOURS[behaviour]
    if sparse is None:
        strategy = importlib.import_module(PACKAGE).strategies.DDPStrategy(**ddp)
    else:
        strategy = strategy_class(PACKAGE)(**sparse, **ddp)
    if precision == "16-mixed":
        from pytorch_lightning.plugins.precision import MixedPrecision

        # Grows twice in the run, without an overflow.
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        options = options | {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    else:
        options = options | {"precision": precision}
    recorder = Recorder()
    trainer = make_trainer(PACKAGE, strategy=strategy, max_epochs=1, callbacks=[recorder.callback()], **options)
    module = make_module(behaviour)
    with warnings.catch_warnings():
        if backend == "inductor":  # it uses what torch itself has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
        if behaviour == "compiled":
            module = torch.compile(module, backend=backend)
        trainer.fit(module, make_data())
    return recorder


def run(precision: str, behaviour: str, sparsifier: str, density: float) -> list[Recorder]:
    """The sparsifier, and plain DDP if its density is full."""
    torch._dynamo.reset()
    runs = [{"sparsifier": sparsifier, "density": density, **SPARSIFIERS[sparsifier]}, *[None] * (density == 1)]
    return [fit(precision, behaviour, settings) for settings in runs]


# Compiling takes seconds, and what is exchanged does not depend on who computed it: two precisions will do.
CELLS = [
    (b, p, s, (1.0, 0.05)[(number + number // 4 + number // 24) % 2])
    for number, (b, p, s) in enumerate(product(BEHAVIOURS, PRECISIONS, SPARSIFIERS))
    if b != "compiled" or p in ("32-true", "16-mixed")
]


@pytest.mark.parametrize(
    ("behaviour", "precision", "sparsifier", "density"),
    covering(
        CELLS,
        together=1,
        thorough={"compiled"},
        seen_as=lambda behaviour, precision, sparsifier, density: (behaviour, precision, (sparsifier, density)),
    ),
)
def test_full_density_trains_like_ddp_and_nothing_is_lost_below(
    two_ranks: Ranks, behaviour: str, precision: str, sparsifier: str, density: float
) -> None:
    (ours, *plain), (theirs, *_) = two_ranks(run, precision, behaviour, sparsifier, density)
    assert len(ours.parameters) == STEPS
    assert not torch.equal(ours.parameters[0], ours.parameters[-1])
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters, theirs.parameters, strict=True))
    check_conservation([ours, theirs], precision)
    if density == 1:
        first_step = 2 if behaviour == "accumulate" else 0
        check_equal(ours.parameters, plain[0].parameters, precision, first_step)
    else:
        assert sum(float(residual.norm()) for residual in ours.residuals.values()) > 1e-3  # not by sending everything


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's default backend needs a C++ compiler")
def test_modules_compiled_to_machine_code_train_like_ddp(two_ranks: Ranks) -> None:
    chosen = {"sparsifier": "top_k", "density": 1.0, "rules": EVERYTHING_SPARSE}
    plain, _ = two_ranks(fit, "32-true", "compiled", None, "inductor")
    for ours in two_ranks(fit, "32-true", "compiled", chosen, "inductor"):
        # A module may be compiled to other kernels the second time; plain DDP differs from itself by as much.
        torch.testing.assert_close(ours.parameters[-1], plain.parameters[-1], rtol=0, atol=1e-6)


def check_equal(ours: list[Tensor], plain: list[Tensor], precision: str, first_step: int) -> None:
    """Bit for bit where numbers are not narrower than those that are remembered: a sum of two has one order only.

    Loss scales are powers of two, so that dividing by them loses nothing.
    """
    if precision in ("bf16-true", "16-true"):
        # What rounding the average loses is sent later here, and never in DDP: equal in the first step only.
        assert torch.equal(ours[first_step], plain[first_step])
        # Parameters are below 0.3: four units in the last place.
        ulp = 2.0**-2 * torch.finfo(plain[0].dtype).eps
        torch.testing.assert_close(ours[-1], plain[-1], rtol=0, atol=4 * ulp)
        return
    for x, y in zip(ours, plain, strict=True):
        assert torch.equal(x, y)


def check_conservation(ranks: list[Recorder], precision: str) -> None:
    """n times the sum of averages and the residuals make up the sum of all gradients, for every parameter.

    Averages of dense groups are rounded to the gradient's dtype, as in DDP, and nothing is remembered there.
    """
    rounding = {"64-true": 1e-12}.get(precision, 1e-5)
    coarse = {"bf16-true": 2.0**-8, "16-true": 2.0**-10}.get(precision, rounding)
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for locals_, averages in zip(zip(*(r.local for r in ranks), strict=True), ranks[0].averages, strict=True):
        for name in {name for local in locals_ for name in local}:
            zero = torch.zeros_like(averages[name])
            given, sent = sums.get(name, (zero, zero))
            given = given + sum(local.get(name, zero) for local in locals_)
            sums[name] = given, sent + len(ranks) * averages[name]
    assert len(sums) >= 4
    for name, (given, sent) in sums.items():
        left = sum((r.residuals[name].view_as(sent) for r in ranks if name in r.residuals), torch.zeros_like(sent))
        scale = (rounding if name in ranks[0].residuals else coarse) * (float(given.abs().max()) + 1e-2)
        torch.testing.assert_close(sent + left, given, rtol=0, atol=scale)
    for name in ranks[0].residuals.keys() - sums.keys():
        assert not any(r.residuals[name].any() for r in ranks)
