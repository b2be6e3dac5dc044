"""What training loops do between backward and step, each beside plain DDP; a table in docs/guide has what was found.

At a density of 1 a loop trains as with plain DDP, bit for bit. Below it, ranks stay equal; or one sentence refuses it.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import lightning_sparse as ls
from tests.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "other-frameworks.md"
STEPS, MANY = 6, 42


class Gather(torch.autograd.Function):
    """Outputs of all ranks, one after another; backward has a collective of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x)
        return torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(grad := grad.contiguous())
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Training:
    """A model in DDP on this rank, with batches of its own; loops below are steps of it."""

    def __init__(self, density: float | None, **of_ddp: Any) -> None:
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(30, 40), nn.Linear(40, 20)
        self.model: Any = nn.Sequential(self.first, nn.Tanh(), self.second)
        self.ddp = DistributedDataParallel(self.model, **of_ddp)
        self.parameters = list(self.model.parameters())
        self.more: list[Tensor] = []
        """Parameters outside of the model."""
        self.optimizer: Optimizer = AdamW(self.parameters, lr=0.01)
        self.engine = None if density is None else ls.attach(self.ddp, density=density, watch=None)
        self.step = 0
        self._random = torch.Generator().manual_seed(dist.get_rank() + 1)

    def batch(self) -> Tensor:
        return torch.randn(8, 30, generator=self._random)

    def loss(self, factor: float = 1.0) -> Tensor:
        x = self.batch()
        return factor * (self.ddp(x) - x[:, :20].sin()).square().mean()

    def clip(self, limit: float) -> Tensor:
        of_engine = nn.utils.clip_grad_norm_ if self.engine is None else self.engine.clip_grad_norm_
        return of_engine(self.parameters, limit)


def one(t: Training) -> None:
    t.loss().backward()


def micro_batches(t: Training) -> None:
    for number in range(4):
        with t.ddp.no_sync() if number < 3 else contextlib.nullcontext():
            t.loss(0.25).backward()


def synchronised(t: Training) -> None:
    for _ in range(4):
        t.loss(0.25).backward()


def thrown_away(t: Training) -> None:
    t.loss(1000.0).backward()
    t.optimizer.zero_grad()
    t.loss().backward()


def within_a_hook(t: Training) -> None:
    """GradCache: the gradient of an embedding is known first, and goes backward through the model by parts."""
    parts = [t.batch() for _ in range(2)]
    with torch.no_grad():
        embedded = torch.cat([t.ddp(x) for x in parts])
    embedded.requires_grad_()
    embedded.square().mean().backward()
    assert embedded.grad is not None
    for x, grad in zip(parts, embedded.grad.split(8), strict=True):
        (t.ddp(x) * grad).sum().backward()


def masked(t: Training) -> None:
    t.loss().backward()
    t.first.weight.grad[:20] = 0  # type: ignore[index]


def noisy(t: Training) -> None:
    t.loss().backward()
    for p in t.parameters:
        p.grad.add_(0.01)  # type: ignore[union-attr]


def clipped_by_the_script(t: Training) -> None:
    t.loss().backward()
    nn.utils.clip_grad_norm_(t.parameters, 0.1)


def clipped_by_the_engine(t: Training) -> None:
    t.loss().backward()
    t.clip(0.1)


def clipped_by_weights(t: Training) -> None:
    """Adaptive clipping."""
    t.loss().backward()
    for p in t.parameters:
        limit = 0.01 * p.detach().norm()
        p.grad.mul_((limit / p.grad.norm()).clamp(max=1.0))  # type: ignore[union-attr]


def left_out(t: Training) -> None:
    """Steps with a norm that is not finite: of one rank every third time."""
    bad = t.step % 3 == 1 and dist.get_rank() == 1
    t.loss(float("inf") if bad else 1.0).backward()
    if not torch.isfinite(t.clip(1.0)):
        t.optimizer.zero_grad()


def with_a_hole(t: Training) -> None:
    """A backward in which a few numbers of one parameter are not finite, on one rank in every second step."""
    hole = (0.0 * t.second.bias[:3]).norm() if t.step % 2 and dist.get_rank() == 1 else 0.0
    (t.loss() + 0.0 * hole).backward()


def mended(t: Training) -> None:
    with_a_hole(t)
    for p in t.parameters:
        torch.nan_to_num(p.grad, out=p.grad)  # type: ignore[arg-type]


def without_a_parameter(t: Training) -> None:
    with_a_hole(t)
    for p in t.parameters:
        if not p.grad.isfinite().all():  # type: ignore[union-attr]
            p.grad = None


def by_hand(t: Training) -> None:
    """PCGrad and others: gradients of tasks by autograd.grad, own averages; an ordinary backward every second time."""
    if t.step % 2:
        t.loss().backward()
        return
    for p, grad in zip(
        t.parameters, torch.autograd.grad(t.model(t.batch()).square().mean(), t.parameters), strict=True
    ):
        dist.all_reduce(grad)
        p.grad = grad / dist.get_world_size()


def past_the_wrapper(t: Training) -> None:
    """The model is called itself, and its gradients are averaged by the script."""
    t.model(t.batch()).square().mean().backward()
    for p in t.parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


def other_storage(t: Training) -> None:
    """Averaged weights take the place of the model's for a validation."""
    kept = [p.data for p in t.parameters]
    for p in t.parameters:
        p.data = p.data.double().float() * 0.5
    with torch.no_grad():
        t.model(t.batch())
    for p, data in zip(t.parameters, kept, strict=True):
        p.data = data
    t.loss().backward()


def gathered(t: Training) -> None:
    """A loss over the outputs of all ranks."""
    out = t.ddp(t.batch())
    (out @ Gather.apply(out).T).square().mean().backward()  # type: ignore[no-untyped-call]


def scaled(t: Training) -> None:
    scaler = vars(t).setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=256.0))
    scaler.scale(t.loss()).backward()
    scaler.unscale_(t.optimizer)
    nn.utils.clip_grad_norm_(t.parameters, 0.5)
    scaler.step(t.optimizer)
    scaler.update()
    t.optimizer.zero_grad()


def averaged_weights(t: Training) -> None:
    """A moving average of the weights, as a copy of the model."""
    average = vars(t).setdefault("average", copy.deepcopy(t.model))
    t.loss().backward()
    for mean, p in zip(average.parameters(), t.parameters, strict=True):
        mean.detach().lerp_(p.detach(), 0.1)


def loss_weights(t: Training) -> None:
    """Trained weights of losses, outside of the wrapper, in the same optimizer."""
    if not t.more:
        t.more = [torch.zeros(2, requires_grad=True)]
        t.optimizer.add_param_group({"params": t.more})
    (weights,) = t.more
    losses = torch.stack([t.loss(), t.ddp(t.batch()).abs().mean()])
    ((-weights).exp() * losses + weights).sum().backward()
    dist.all_reduce(weights.grad)
    weights.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


def turns(t: Training) -> None:
    """Two optimizers, each for its half, the second one every other time."""
    if t.step == 0:
        t.optimizer = SGD(t.first.parameters(), lr=0.1, momentum=0.9)
        vars(t)["other"] = AdamW(t.second.parameters(), lr=0.01)
    t.loss().backward()
    if t.step % 2:
        vars(t)["other"].step()
    vars(t)["other"].zero_grad()


def made_anew(t: Training) -> None:
    """A new optimizer in the middle."""
    if t.step == 3:
        t.optimizer = AdamW(t.parameters, lr=0.005)
    t.loss().backward()


def compiled(t: Training) -> None:
    if t.step == 0:
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's compiler
        t.optimizer = SGD(t.parameters, lr=0.1)
        t.optimizer.step = torch.compile(t.optimizer.step, backend="eager")  # type: ignore[method-assign]
    t.loss().backward()


def closure(t: Training) -> None:
    def again() -> Tensor:
        t.optimizer.zero_grad()
        loss = t.loss()
        loss.backward()
        return loss

    t.optimizer.step(again)
    t.optimizer.zero_grad()


def sharpness(t: Training) -> None:
    """SAM in two stages: the gradient at a point uphill is used."""
    t.loss().backward()
    uphill = [0.05 * p.grad / (1 + p.grad.norm()) for p in t.parameters]  # type: ignore[union-attr, operator]
    kept = [p.detach().clone() for p in t.parameters]
    for p, rise in zip(t.parameters, uphill, strict=True):
        p.data.add_(rise)
    t.optimizer.zero_grad()
    t.loss().backward()
    for p, before in zip(t.parameters, kept, strict=True):
        p.data.copy_(before)


class Sharpness(Optimizer):
    """SAM as many scripts have it: it goes uphill, calls its closure, and steps from where it was."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        uphill = [0.05 * p.grad / (1 + p.grad.norm()) for p in parameters]
        for p, rise in zip(parameters, uphill, strict=True):
            p.add_(rise)
        with torch.enable_grad():
            closure()
        for p, rise in zip(parameters, uphill, strict=True):
            p.sub_(rise)
        self.inner.step()


def sharpness_by_a_closure(t: Training) -> None:
    if t.step == 0:
        t.optimizer = Sharpness(SGD(t.parameters, lr=0.1))
    t.loss().backward()
    closure(t)


def line_search(t: Training) -> None:
    if t.step == 0:
        t.optimizer = torch.optim.LBFGS(t.parameters, lr=0.1, max_iter=3)
    closure(t)


def in_backward(t: Training) -> None:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    if t.step == 0:
        each = {p: SGD([p], lr=0.1) for p in t.parameters}
        for p in t.parameters:
            p.register_post_accumulate_grad_hook(lambda p: each[p].step() or each[p].zero_grad())  # type: ignore[no-untyped-call]
    t.loss().backward()


def twice(t: Training) -> None:
    """Two optimizers step the same parameters after one backward."""
    other = vars(t).setdefault("other", SGD(t.parameters, lr=0.1))
    t.loss().backward()
    other.step()


class Loop(NamedTuple):
    what: str
    """In the page."""
    step: Callable[[Training], None]
    refused: str = ""
    """Sentence below a density of 1."""
    ranks_differ: bool = False
    """Whether plain DDP lets ranks drift apart."""


LOOPS = [
    Loop("a backward for each step", one),
    Loop("micro-batches within `no_sync()`", micro_batches),
    Loop("micro-batches that are all synchronised", synchronised),
    Loop("a backward whose gradients are thrown away (warm-up, attacks, a generator's loss)", thrown_away),
    Loop("several backwards by parts of a batch (GradCache)", within_a_hook),
    Loop("rows of gradients set to zero", masked),
    Loop("noise added to gradients", noisy),
    Loop("`torch.nn.utils.clip_grad_norm_`", clipped_by_the_script),
    Loop("`engine.clip_grad_norm_`", clipped_by_the_engine),
    Loop("adaptive clipping by the norms of weights", clipped_by_weights),
    Loop("steps left out where a norm is not finite", left_out),
    Loop("numbers that are not finite replaced (`torch.nan_to_num`)", mended),
    Loop("parameters left out whose gradient is not finite", without_a_parameter),
    Loop("gradients by `autograd.grad` and averages of your own, for some steps", by_hand),
    Loop("gradients past the wrapper, averaged by the script", past_the_wrapper),
    Loop("`p.data` replaced and put back (averaged weights for validation)", other_storage),
    Loop("a loss over the outputs of all ranks", gathered),
    Loop("a `GradScaler`, with `unscale_` and clipping", scaled),
    Loop("a moving average of weights", averaged_weights),
    Loop("trained weights of losses, outside of the wrapper", loss_weights),
    Loop("two optimizers, one of which does not always step", turns),
    Loop("an optimizer made anew", made_anew),
    Loop("`torch.compile` of the optimizer's step", compiled),
    Loop("a closure", closure),
    Loop("SAM in two stages", sharpness),
    Loop("a closure that is called several times a step (LBFGS)", line_search, "has called its closure a second time"),
    Loop("SAM by a closure", sharpness_by_a_closure, "has moved weights before it called its closure"),
    Loop("optimizers that step within backward", in_backward, "takes a step within a backward", ranks_differ=True),
    Loop("two optimizers that step one parameter after one backward", twice, "Two optimizers step"),
]
WORDS = "as with plain DDP"


def train(loop: int, density: float | None, steps: int = STEPS) -> Tensor:
    t = Training(density)
    for t.step in range(steps):
        LOOPS[loop].step(t)
        if any(p.grad is not None for p in t.parameters):
            t.optimizer.step()
        t.optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in (*t.parameters, *t.more)])


def outcome(loop: int) -> str:
    """What a loop does at a density of 0.05: whether ranks are equal, or what it is refused with, or warned of."""
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            weights = train(loop, 0.05, MANY)
    except RuntimeError as error:
        return str(error)
    if told := [str(each.message) for each in caught if "no longer equal on all ranks" in str(each.message)]:
        return told[0]
    rows = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, weights)
    return "equal" if all(torch.equal(row, weights) for row in rows) and bool(weights.isfinite().all()) else "different"


numbered = pytest.mark.parametrize("loop", range(len(LOOPS)), ids=[each.step.__name__ for each in LOOPS])


@numbered
def test_at_density_1_a_loop_trains_as_with_plain_ddp(two_ranks: Ranks, loop: int) -> None:
    plain, ours = two_ranks(train, loop, None), two_ranks(train, loop, 1.0)
    assert torch.equal(plain[0], plain[1]) != LOOPS[loop].ranks_differ
    assert all(torch.equal(x, y) for x, y in zip(plain, ours, strict=True))


@numbered
def test_below_it_ranks_stay_equal_or_a_sentence_refuses_the_loop(loop: int, two_ranks: Ranks) -> None:
    if LOOPS[loop].refused:
        with Ranks(2) as ranks:
            assert all(LOOPS[loop].refused in said for said in ranks(outcome, loop))
    else:
        assert two_ranks(outcome, loop) == ["equal", "equal"]


def test_the_page_lists_what_was_tried() -> None:
    section = PAGE.read_text().partition("### What your loop does")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert rows[2:] == [(each.what, "refused below a density of 1" if each.refused else WORDS) for each in LOOPS]


def stepped_within_backward(density: float | None) -> Tensor:
    """Weights behind steps in backward of a model with several buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(3)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
    engine = None if density is None else ls.attach(ddp, density=density)
    each = {p: SGD([p], lr=0.1) for p in model.parameters()}
    for p in each:
        p.register_post_accumulate_grad_hook(lambda p: each[p].step() or each[p].zero_grad())  # type: ignore[no-untyped-call]
    for _ in range(3):
        ddp(torch.ones(4, 200)).square().mean().backward()
    if engine is not None:
        engine.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("density", [0.05, 1.0])
def test_one_process_steps_within_backward_as_with_plain_ddp(density: float) -> None:
    assert torch.equal(stepped_within_backward(density), stepped_within_backward(None))


def what_is_said_of_steps_within_backward() -> str:
    try:
        stepped_within_backward(1.0)
    except RuntimeError as error:
        return str(error)
    return ""


def test_steps_within_a_backward_of_several_buckets_are_called_by_their_name() -> None:
    with Ranks(2) as ranks:
        assert all("takes a step within a backward" in said for said in ranks(what_is_said_of_steps_within_backward))
