"""What copies and agreed weights keep to whatever happens between steps: on real ranks."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.methods.grouping import ParameterSize, make_plan
from tests.covering import by_default
from tests.engine.drift.models import Lion, batch, flat, is_sparse, loss_of, net
from tests.ranks import Ranks
from tests.trainers import EVERYTHING_SPARSE


class Recording(Lion):
    """Adds up what it does to weights on this rank."""

    moved: Tensor

    def __init__(self, parameters: Any, **settings: Any) -> None:
        self.ours = list(parameters)
        super().__init__(self.ours, **settings)

    def step(self, closure: Any = None) -> Any:
        before = flat(self.ours).double()
        super().step(closure)
        self.moved += flat(self.ours).double() - before


class Training:
    """A loop in plain PyTorch on this rank.

    Args:
        state: of an earlier one, to go on from.
        made: makes the optimizer.
        options: of :func:`ls.attach`.
    """

    def __init__(self, state: Any = None, made: Callable[..., Any] = Lion, **options: Any) -> None:
        self.model = net()
        if state is not None:
            self.model.load_state_dict(state["model"])
        self.ddp = DistributedDataParallel(self.model)
        self.engine = ls.attach(self.ddp, **{"density": 0.1, "watch": None, "grouping": "layer", **options})
        self.optimizer = made(self.model.parameters(), lr=0.01, weight_decay=0.01)
        self.number = 0
        if state is not None:
            self.engine.load_state_dict(state["engine"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.number = state["number"]

    def step(self, spoil: bool = False) -> None:
        loss = loss_of(self.ddp, batch(self.number, dist.get_rank()))
        (loss * float("nan") if spoil and dist.get_rank() == 1 else loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1

    def save(self) -> dict[str, Any]:
        """The optimizer is that of rank 0, as in a checkpoint."""
        optimizers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(optimizers, self.optimizer.state_dict())
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "engine": self.engine.state_dict(),
                "optimizer": optimizers[0],
                "number": self.number,
            }
        )

    def mine(self) -> Tensor:
        return flat(self.model.parameters())

    def agreed(self) -> Tensor:
        with self.engine.agreed():
            return self.mine()

    def close(self) -> None:
        self.engine.close()


def quietly(job: Callable[..., Any], *args: Any) -> Any:
    """Without warnings of skipped steps, and of weights that were written to."""
    with warnings.catch_warnings(action="ignore"):
        return job(*args)


def in_random_order(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Steps, skipped steps, other groups, flushes, saves and loads.

    Returns:
        Weights of this rank and of all before and after, and what this rank's optimizers have moved.
    """
    torch.set_num_threads(1)
    chosen = random.Random(seed)
    training = Training(made=Recording)
    begin = training.mine().double()
    training.optimizer.moved = moved = torch.zeros_like(begin)
    for _ in range(30):
        training.step()
        what = chosen.choice(
            ["nothing"] * 3 + ["skip", "regroup", "flush", "flush next", "load", "agreed", "density 1"]
        )
        engine = training.engine
        if what == "skip":
            training.step(spoil=True)
        elif what == "regroup":
            sizes = [ParameterSize.of(name, p) for name, p in training.model.named_parameters()]
            engine.regroup(make_plan(sizes, chosen.choice(["layer", "model", "bucket"])))
        elif what == "flush":
            ls.flush(engine, [training.optimizer])
        elif what == "flush next":
            engine._flush_next_step()
        elif what == "load":
            state = training.save()
            training.close()
            training = Training(state, made=Recording)
            training.optimizer.moved = moved
        elif what == "agreed":
            training.agreed()
    return begin, training.mine(), training.agreed(), moved


@pytest.mark.parametrize("seed", by_default(range(12), 2))
def test_the_mean_of_copies_moves_as_ranks_do_and_all_agree(two_ranks: Ranks, seed: int) -> None:
    found = two_ranks(quietly, in_random_order, seed)
    begin, agreed = found[0][0], found[0][2]
    means = torch.stack([mine.double() for _, mine, *_ in found]).mean(0)
    moves = torch.stack([moved for *_, moved in found]).mean(0)
    torch.testing.assert_close(means, begin + moves, atol=3e-5, rtol=0)
    assert all(torch.equal(other, agreed) for _, _, other, _ in found)


def resumed(stops: bool, made: str, **options: Any) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    options["memory"] = "drift"  # else it would be said that others were not measured
    made_by = {"lion": Lion, "nadam": torch.optim.NAdam, "rmsprop": torch.optim.RMSprop}[made]
    training = Training(made=made_by, **options)
    for number in range(14):
        if stops and number == 7:
            state = training.save()
            training.close()
            training = Training(state, made=made_by, **options)
        training.step()
    return training.mine(), training.agreed()


@pytest.mark.parametrize("made", ["lion", "nadam", "rmsprop"])
def test_a_run_that_is_resumed_goes_on_bit_for_bit(two_ranks: Ranks, made: str) -> None:
    for whole, again in zip(two_ranks(resumed, False, made), two_ranks(resumed, True, made), strict=True):
        assert torch.equal(whole[0], again[0]) and torch.equal(whole[1], again[1])


def saved(steps: int) -> tuple[dict[str, Any], Tensor]:
    training = Training()
    for _ in range(steps):
        training.step()
    return training.save(), training.mine()


def on_fewer(states: list[Any]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    merged = {**states[0], "engine": ls.merge_states(state["engine"] for state in states)}
    training = Training(merged)
    found = training.mine(), training.agreed()
    training.step()
    return *found, training.engine.state_dict()["optimizers"]["0.weight"]


def test_another_number_of_ranks_goes_on_from_means(two_ranks: Ranks, three_ranks: Ranks) -> None:
    every = three_ranks(saved, 9)
    states = [state for state, _ in every]
    model = net()
    model.load_state_dict(states[0]["model"])
    found = two_ranks(on_fewer, states)
    for mine, agreed, _ in found:
        torch.testing.assert_close(mine, torch.stack([mine for _, mine in every]).mean(0))
        assert torch.equal(agreed, flat(model.parameters()))
    assert not torch.equal(found[0][2]["exp_avg"], found[1][2]["exp_avg"])  # one step on


def best_is_loaded(partly: bool, regroup: bool = False) -> list[Tensor]:
    """Weights of an earlier step are loaded on all ranks, or clamped, past autograd; maybe groups change then."""
    training = Training()
    for _ in range(4):
        training.step()
    best = copy.deepcopy(training.model.state_dict())
    for _ in range(4):
        training.step()
    if partly:
        for p in training.model.parameters():
            p.data.clamp_(-0.05, 0.05)
    else:
        training.model.load_state_dict(best)
    if regroup:
        sizes = [ParameterSize.of(name, p) for name, p in training.model.named_parameters()]
        training.engine.regroup(make_plan(sizes, "model"))
    shown, saved = training.agreed(), flat(training.model.state_dict().values())
    mine = training.mine()
    loss_of(training.ddp, batch(99, dist.get_rank())).backward()
    after = [training.mine(), training.agreed()]
    training.optimizer.step()
    return [flat(best.values()), shown, saved, mine, *after, training.agreed()]


@pytest.mark.parametrize("regroup", [False, True])
def test_weights_that_are_loaded_within_training_are_the_model(two_ranks: Ranks, regroup: bool) -> None:
    for best, shown, saved, mine, here, agreed, later in two_ranks(quietly, best_is_loaded, False, regroup):
        assert [torch.equal(best, other) for other in (shown, saved, mine, here, agreed)] == [True] * 5
        assert not torch.equal(later, best)


def test_weights_that_are_clamped_are_averaged(two_ranks: Ranks) -> None:
    found = two_ranks(quietly, best_is_loaded, True)
    mean = torch.stack([mine for _, _, _, mine, *_ in found]).mean(0)
    for _, _, _, mine, here, agreed, _ in found:
        assert not torch.equal(mine, here)
        torch.testing.assert_close(here, mean, atol=1e-7, rtol=0)
        assert torch.equal(here, agreed) and float(here.abs().max()) <= 0.05 + 1e-7


def warned() -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        best_is_loaded(True)
    return [str(one.message) for one in caught if "Weights were written to" in str(one.message)]


def test_that_weights_were_written_to_is_said_once(two_ranks: Ranks) -> None:
    assert [len(told) for told in two_ranks(warned)] == [1, 0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(20, 20), nn.Conv2d(4, 16, 3), nn.Linear(20, 20)
        self.last.weight = self.first.weight
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).tanh())
        return y + self.middle(y.view(1, 4, 8, 5)).square().mean()


def state_dicts() -> dict[str, Any]:
    model = Tied()
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.1, watch=None, rules=ls.Rules(dense_numel=0))
    optimizer = Lion(model.parameters(), lr=0.01)
    for step in range(3):
        ddp(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    found: dict[str, Any] = {"state": model.state_dict(), "wrapped": ddp.state_dict()}
    found["shared"] = found["state"]["first.weight"].data_ptr() == found["state"]["last.weight"].data_ptr()
    kept = model.state_dict(keep_vars=True)
    found["kept"] = all(kept[name] is p for name, p in model.named_parameters())
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    found["copies"] = [all(torch.equal(one.state_dict()[n], own[n]) for n in own) for one in (copied, loaded)]
    with engine.agreed():
        found["agreed"] = {name: p.detach().clone() for name, p in model.named_parameters()}
        with engine.agreed():
            pass
        found["within"] = {name: x.clone() for name, x in model.state_dict().items()}
    found["back"] = all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    found["differ"] = not torch.equal(own["middle.weight"], found["agreed"]["middle.weight"])
    state = engine.state_dict()
    engine.close()
    found["closed"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = engine.state_dict()
    found["later"] = all(
        torch.equal(x, after["parameters"][name][key])
        for name, vectors in state["parameters"].items()
        for key, x in vectors.items()
    )
    return found


def test_every_state_dict_has_the_agreed_weights(two_ranks: Ranks) -> None:
    one, other = two_ranks(state_dicts)
    for found in (one, other):
        assert found["shared"] and found["kept"] and found["back"] and found["differ"] and found["later"]
        assert found["copies"] == [True, True]  # which nobody can ask for more than they hold
        for name, x in one["agreed"].items():
            for where in ("state", "agreed", "within", "closed"):
                assert torch.equal(found[where][name], x)
            assert torch.equal(found["wrapped"][f"module.{name}"], x)


def stepped_within_agreed() -> str:
    training = Training()
    training.step()
    try:
        with training.engine.agreed():
            training.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_step_among_agreed_weights_is_an_error(two_ranks: Ranks) -> None:
    assert all("within engine.agreed()" in told for told in two_ranks(stepped_within_agreed))


def at_full_density(kind: str) -> list[Tensor]:
    density = 1.0 if kind == "constant" else ls.Warmup(1.0, 0.1, steps=6)
    if kind == "ddp":
        model = net()
        ddp = DistributedDataParallel(model)
        optimizer = Lion(model.parameters(), lr=0.01, weight_decay=0.01)
        for number in range(6):
            loss_of(ddp, batch(number, dist.get_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [flat(model.parameters())]
    training = Training(density=density)
    for _ in range(6 if kind == "constant" else 1):
        training.step()
    return [training.mine(), training.agreed()]


def test_a_density_of_one_is_ddp_and_a_schedule_from_one_averages_weights(two_ranks: Ranks) -> None:
    assert torch.equal(two_ranks(at_full_density, "ddp")[0][0], two_ranks(at_full_density, "constant")[1][0])
    one, other = two_ranks(at_full_density, "warm-up")
    assert torch.equal(one[0], other[0]) and torch.equal(one[0], one[1])


def in_half_precision() -> tuple[Tensor, Tensor, torch.dtype]:
    model = net().bfloat16()
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.1, watch=None)
    optimizer = Lion(model.parameters(), lr=1e-4)
    for step in range(40):
        loss_of(ddp, batch(step, dist.get_rank()).bfloat16()).backward()
        optimizer.step()
        optimizer.zero_grad()
    group = next(group for group in engine.stepper.groups if group.drifts)
    with engine.agreed():
        return group.state.memory.agreed.clone(), flat(model.parameters()), group.state.memory.agreed.dtype


def test_agreed_weights_of_half_precision_are_single(two_ranks: Ranks) -> None:
    (one, shown, dtype), (other, also, _) = two_ranks(in_half_precision)
    assert dtype == torch.float32 and torch.equal(one, other) and torch.equal(shown, also)
    assert bool((one.bfloat16().float() != one).any())  # moves that bfloat16 would round off add up


def flushed(ahead: bool) -> tuple[float, Tensor, Tensor]:
    training = Training()
    for _ in range(5):
        training.step()
    away = training.mine() - training.agreed()
    if ahead:
        training.engine._flush_next_step()
        training.step()
        return 0.0, away, training.mine() - training.agreed()
    return ls.flush(training.engine, [training.optimizer]), away, training.mine() - training.agreed()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_flush_leaves_equal_copies(two_ranks: Ranks, ahead: bool) -> None:
    found = two_ranks(flushed, ahead)
    assert all(bool(before.any()) and not bool(after.any()) for _, before, after in found)
    if not ahead:
        mean = torch.stack([before for _, before, _ in found]).mean(0)
        assert found[0][0] == pytest.approx(float(mean.double().norm()), rel=1e-5)


def rates_within(fails: bool) -> tuple[list[float], list[float], float]:
    """Rates that the optimizer steps with, and those that it has afterwards."""
    seen: list[float] = []

    class Looking(Lion):
        def step(self, closure: Any = None) -> Any:
            seen.extend(group["lr"] for group in self.param_groups for _ in group["params"])
            if fails and len(seen) > 8:
                raise ValueError("of the optimizer")
            return super().step(closure)

    training = Training(made=Looking)
    training.step()
    if fails:
        with pytest.raises(ValueError, match="of the optimizer"):
            training.step()
        training.optimizer.step = lambda: None  # type: ignore[method-assign]
    else:
        training.step()
    training.optimizer.zero_grad()
    return seen[:8], [group["lr"] for group in training.optimizer.param_groups], len(training.optimizer.param_groups)


def test_rates_are_longer_within_steps_alone(two_ranks: Ranks) -> None:
    for seen, rates, groups in two_ranks(rates_within, False):
        assert sorted(set(seen)) == pytest.approx([0.01, 0.01 * 2**0.5])
        assert rates == [0.01] and groups == 1


def scaled_and_accumulated(scaler: bool, accumulate: int) -> tuple[Tensor, Tensor]:
    """Half-batches, and a scale of the loss that is a power of two: as without."""
    torch.set_num_threads(1)
    training = Training()
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaler, growth_interval=1000)
    for step in range(6):
        for part in range(accumulate):
            x = batch(step, dist.get_rank()).chunk(accumulate)[part]
            loss = loss_of(training.ddp, x) / accumulate
            if part < accumulate - 1:
                with training.ddp.no_sync():
                    loss_of(training.ddp, x).div(accumulate).backward()
                continue
            grad_scaler.scale(loss).backward()
        grad_scaler.step(training.optimizer)
        grad_scaler.update()
        training.optimizer.zero_grad()
    return training.mine(), training.agreed()


def test_scaled_losses_give_the_same_weights(two_ranks: Ranks) -> None:
    plain, scaled = two_ranks(scaled_and_accumulated, False, 1), two_ranks(scaled_and_accumulated, True, 1)
    assert all(
        torch.equal(x, y) for one, other in zip(plain, scaled, strict=True) for x, y in zip(one, other, strict=True)
    )


def test_batches_are_accumulated_locally(two_ranks: Ranks) -> None:
    found = two_ranks(scaled_and_accumulated, False, 2)
    assert torch.equal(found[0][1], found[1][1]) and not torch.equal(found[0][0], found[1][0])


def refused(what: str) -> str:
    try:
        if what == "rate":
            training = Training(memory="drift", made=lambda ps, **_: Lion(ps, lr=None))  # type: ignore[arg-type]
        elif what == "parts":
            with warnings.catch_warnings(action="ignore"):  # of torch's own
                from torch.distributed.optim import ZeroRedundancyOptimizer

            training = Training(memory="drift", made=lambda ps, **_: ZeroRedundancyOptimizer(ps, Lion, lr=0.1))
        elif what == "exchange":
            training = Training(memory="drift")
            loss_of(training.ddp, batch(0, 0)).backward()
            training.engine.exchange(training.model.parameters())
        elif what == "overlap":
            training = Training(memory="drift", overlap=True)
        elif what == "fallback":
            training = Training(memory="drift", fallback=True)
        else:
            training = Training(memory="drift", node_size=2)
        training.step()
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rate", "a learning rate of Lion is no number"),
        ("parts", "ZeroRedundancyOptimizer steps a part of the parameters"),
        ("exchange", "engine.exchange() averages gradients"),
        ("overlap", "Expected overlap to be left out with memory Drift"),
        ("fallback", "Expected fallback to be left out with memory Drift"),
        ("nodes", "Expected node_size to be left out with memory Drift"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(two_ranks: Ranks, what: str, words: str) -> None:
    for told in two_ranks(refused, what):
        assert words in told


def many(unused: bool) -> tuple[Tensor, Tensor]:
    """A second head that one rank uses in some steps, and nobody in others."""
    torch.manual_seed(0)
    body, heads = nn.Linear(20, 30), nn.ModuleList([nn.Linear(30, 30), nn.Linear(30, 30)])

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = body, heads

        def forward(self, x: Tensor, which: int) -> Tensor:
            found: Tensor = self.heads[which](self.body(x).tanh()).square().mean()
            return found

    model = Two()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    engine = ls.attach(ddp, density=0.1, watch=None, grouping="model")
    optimizer = Lion(model.parameters(), lr=0.01)
    for step in range(12):
        which = int(step % 3 == 0 and dist.get_rank() == 1)
        before = heads[1].weight.detach().clone()
        ddp(batch(step, dist.get_rank()), which).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3:
            assert torch.equal(heads[1].weight, before)
    with engine.agreed():
        return flat(model.parameters()), heads[1].weight.detach().clone()


def test_parameters_that_nobody_has_used_stay(two_ranks: Ranks) -> None:
    one, other = two_ranks(many, True)
    assert torch.equal(one[0], other[0])


def two_rules() -> dict[str, Any]:
    """Muon for matrices, AdamW for an embedding and the rest: each by its own rule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 20), nn.Flatten(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 100))
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.1, watch=None)
    matrices = [model[2].weight, model[4].weight]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    random_ = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        words = torch.randint(100, (16, 3), generator=random_)
        nn.functional.cross_entropy(ddp(words), words.sum(1) % 100).backward()
        for optimizer in both:
            optimizer.step()
        model.zero_grad()
    kinds = {type(g.memory).__name__: sorted(g.spans) for g in engine.stepper.groups if g.sparsified}
    embedding = model[0].weight.detach().clone()
    return {"kinds": kinds, "embedding": embedding, "mine": flat(matrices), "model": flat(model.state_dict().values())}


def test_each_optimizer_has_its_own_rule(two_ranks: Ranks) -> None:
    one, other = two_ranks(two_rules)
    assert one["kinds"] == {"Drift": ["2.weight", "4.weight"], "SecondMoment": ["0.weight"]}
    assert torch.equal(one["embedding"], other["embedding"]) and torch.equal(one["model"], other["model"])
    assert not torch.equal(one["mine"], other["mine"])
    assert is_sparse(one["embedding"])


class Sam(torch.optim.Optimizer):
    """Foret et al., arXiv 2010.01412, in two stages, around another optimizer."""

    def __init__(self, parameters: Any, base: Callable[..., torch.optim.Optimizer], rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho, "lr": 0.01})
        self.base_optimizer = base(self.param_groups)

    @torch.no_grad()
    def first(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["old"] = p.clone()
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second(self) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


def around_another(base: str) -> tuple[set[str], Tensor]:
    model = net()
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.1, watch=None)
    optimizer = Sam(model.parameters(), lambda groups: getattr(torch.optim, base)(groups, lr=0.01))
    engine._show(optimizer)
    for step in range(4):
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        optimizer.first()
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        optimizer.second()
    return {type(group.memory).__name__ for group in engine.stepper.groups if group.sparsified}, flat(
        model.parameters()
    )


@pytest.mark.parametrize(("base", "memory"), [("SGD", "Residual"), ("AdamW", "SecondMoment")])
def test_the_optimizer_within_another_decides(two_ranks: Ranks, base: str, memory: str) -> None:
    one, other = two_ranks(around_another, base)
    assert one[0] == {memory} and torch.equal(one[1], other[1])


def a_group_is_added() -> tuple[set[str], bool]:
    model = net()
    ddp = DistributedDataParallel(model)
    engine = ls.attach(ddp, density=0.1, watch=None)
    optimizer = Lion([*model[0].parameters(), *model[1].parameters()], lr=0.01)
    for step in range(6):
        if step == 3:
            optimizer.add_param_group({"params": [*model[3].parameters(), *model[4].parameters()]})
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        optimizer.step()
        model.zero_grad()
    kinds = {type(group.memory).__name__ for group in engine.stepper.groups if group.sparsified}
    mine = flat(model.parameters())
    with engine.agreed():
        return kinds, bool((mine != flat(model.parameters())).any())


def test_parameters_that_an_optimizer_gets_later_drift_too(two_ranks: Ranks) -> None:
    assert two_ranks(quietly, a_group_is_added) == [({"Drift"}, True)] * 2


def spoiled_after_backward() -> tuple[Tensor, Tensor, int, int]:
    """A gradient that is NaN on one rank when the optimizer steps, once."""
    training = Training()
    for step in range(6):
        loss_of(training.ddp, batch(step, dist.get_rank())).backward()
        if step == 2 and dist.get_rank() == 1:
            training.model[0].weight.grad.fill_(float("nan"))  # type: ignore[union-attr, operator]
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.mine(), training.agreed(), training.engine.step, training.engine.skipped_steps


def test_a_gradient_that_is_spoiled_on_one_rank_skips_a_step(two_ranks: Ranks) -> None:
    one, other = two_ranks(quietly, spoiled_after_backward)
    assert torch.equal(one[1], other[1]) and bool(one[0].isfinite().all()) and bool(other[0].isfinite().all())
    assert one[2:] == other[2:] == (5, 1)


class Broken(Lion):
    """Makes NaN by itself, once, on one rank."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0][0, 0] = float("nan")


def healed() -> tuple[Tensor, Tensor, int]:
    training = Training(made=Broken)
    for _ in range(6):
        training.step()
    return training.mine(), training.agreed(), training.engine.skipped_steps


def test_weights_that_an_optimizer_spoils_go_back(two_ranks: Ranks) -> None:
    one, other = two_ranks(quietly, healed)
    assert torch.equal(one[1], other[1]) and bool(one[0].isfinite().all()) and bool(other[0].isfinite().all())
    assert one[2] == other[2] == 1


def loaded_before_the_first_step(explicit: bool) -> tuple[Tensor, Tensor]:
    training = Training(memory="drift" if explicit else None)
    with torch.no_grad():
        for p in training.model.parameters():
            p.fill_(0.25)
    saved = flat(training.model.state_dict().values())
    training.step()
    return saved, training.agreed()


@pytest.mark.parametrize("explicit", [False, True])
def test_weights_that_are_loaded_before_the_first_step_count(two_ranks: Ranks, explicit: bool) -> None:
    for saved, agreed in two_ranks(quietly, loaded_before_the_first_step, explicit):
        assert bool((saved == 0.25).all()) and float((agreed - 0.25).abs().max()) < 0.02


def written(how: str) -> list[Tensor]:
    training = Training()
    for _ in range(3):
        training.step()
    weight = training.model[0].weight.data  # type: ignore[union-attr]
    if how == "half":
        weight.mul_(0.5)
    elif how == "sign":
        weight.neg_()
    elif how == "rows":
        weight.copy_(weight.flip(0))  # type: ignore[operator]
    else:
        weight[3, 5] += 1e-7  # type: ignore[index]
    return [torch.tensor(training.engine.stepper.copies.changed() == ["0.weight"])]


@pytest.mark.parametrize("how", ["half", "sign", "rows", "one"])
def test_every_kind_of_write_is_noticed(two_ranks: Ranks, how: str) -> None:
    assert all(bool(found) for [found] in two_ranks(written, how))


def with_long_gradients() -> tuple[int, int]:
    """Steps that counted and that were skipped, with finite gradients whose sum is beyond float16."""
    layer = nn.Linear(600, 600, bias=False).half()
    ddp = DistributedDataParallel(layer)
    engine = ls.attach(ddp, density=0.1, watch=None)
    optimizer = Lion(layer.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        (0.5 * ddp.module.weight.sum(dtype=torch.float32) + 0 * ddp(torch.zeros(1, 600).half()).sum()).backward()
        optimizer.step()
    return engine.step, engine.skipped_steps


def test_gradients_whose_sum_is_too_large_are_finite(two_ranks: Ranks) -> None:
    assert two_ranks(with_long_gradients) == [(3, 0)] * 2


def clamped_between() -> float:
    """The largest agreed weight of what is clamped before another optimizer steps, as in a GAN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False))
    ddp = DistributedDataParallel(model)
    ls.attach(ddp, density=0.05, watch=None)
    optimizers = [Lion(layer.parameters(), lr=3e-3) for layer in model]
    for step in range(6):
        ddp.zero_grad()
        loss = ddp(torch.randn(8, 50, generator=torch.Generator().manual_seed(2 * step + dist.get_rank())))
        loss.square().mean().backward()
        optimizers[0].step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.02, 0.02)
        optimizers[1].step()
    ddp.zero_grad()
    ddp(torch.ones(8, 50)).square().mean().backward()
    return float(model.state_dict()["0.weight"].abs().max())


def test_weights_that_are_clamped_before_another_optimizer_steps_are_averaged(two_ranks: Ranks) -> None:
    for largest in two_ranks(quietly, clamped_between):
        assert largest <= 0.02


def attached_again() -> list[int]:
    """Hooks that each engine has left on an optimizer."""
    model, found = net(), []
    optimizer = Lion(model.parameters(), lr=1e-3)
    for step in range(3):
        ddp = DistributedDataParallel(model)
        engine = ls.attach(ddp, density=0.1, watch=None)
        optimizer.zero_grad()
        loss_of(ddp, batch(step, dist.get_rank())).backward()
        optimizer.step()
        engine.close()
        found.append(len(optimizer._optimizer_step_post_hooks) + len(optimizer._optimizer_state_dict_pre_hooks))
    return found


def test_closed_engines_leave_no_hooks_on_optimizers(two_ranks: Ranks) -> None:
    for found in two_ranks(quietly, attached_again):
        assert found[0] == found[-1]


class OwnedByRanks(Lion):
    """Sends rank 0's weights to all within its step, as distributed optimizers do."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                dist.broadcast(p.data, 0)


def exchanged_by_itself() -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        training = Training(made=OwnedByRanks)
        for _ in range(6):
            training.step()
    return [
        str(one.message)
        for one in caught
        if "leaves equal weights" in str(one.message) or "has left equal" in str(one.message)
    ]


def test_an_optimizer_that_exchanges_by_itself_is_warned_of(two_ranks: Ranks) -> None:
    assert [len(told) for told in two_ranks(exchanged_by_itself)] == [1, 0]


def rescued() -> tuple[list[float], int]:
    """The state of an optimizer whose step has failed."""
    training = Training(made=Recording)
    training.optimizer.moved = torch.zeros(1)  # of a wrong size
    with pytest.raises(RuntimeError):
        training.step()
    groups = training.optimizer.state_dict()["param_groups"]
    return [group["lr"] for group in groups], len(groups)


def test_a_rescued_state_has_the_rates_of_the_user(two_ranks: Ranks) -> None:
    assert two_ranks(rescued) == [([0.01], 1)] * 2


def wrapped_again() -> tuple[Tensor, Tensor]:
    """DDP sends rank 0's weights to all while they drift."""
    training = Training()
    for _ in range(3):
        training.step()
    again = DistributedDataParallel(training.model)
    training.close()
    engine = ls.attach(again, density=0.1, watch=None)
    for step in range(3):
        loss_of(again, batch(step, dist.get_rank())).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    with engine.agreed():
        return training.mine(), flat(training.model.state_dict().values())


def test_a_model_that_is_wrapped_again_goes_on_from_rank_zero(two_ranks: Ranks) -> None:
    one, other = two_ranks(quietly, wrapped_again)
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], one[0])


def perturbed() -> tuple[int, Tensor]:
    """SAM around Lion: weights are moved between two backwards, and put back."""
    training = Training(made=lambda ps, **_: Sam(ps, lambda groups: Lion(groups, lr=0.01)))
    for step in range(4):
        loss_of(training.ddp, batch(step, dist.get_rank())).backward()
        training.optimizer.first()
        loss_of(training.ddp, batch(step, dist.get_rank())).backward()
        training.optimizer.second()
    return training.engine.stepper.record.counts.flushes, training.agreed()


def test_weights_that_sam_moves_for_a_while_are_not_averaged(two_ranks: Ranks) -> None:
    one, other = two_ranks(perturbed)
    assert one[0] == other[0] == 0 and torch.equal(one[1], other[1])


def flushed_then_dense() -> tuple[Tensor, bool]:
    """Plain DDP goes on after a flush, with the same optimizer."""
    training = Training()
    for _ in range(6):
        training.step()
    ls.flush(training.engine, [training.optimizer])
    training.close()
    ddp = DistributedDataParallel(training.model)
    for step in range(30):
        loss_of(ddp, batch(100 + step, dist.get_rank())).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.mine(), True


def test_dense_training_goes_on_after_a_flush(two_ranks: Ranks) -> None:
    one, other = two_ranks(flushed_then_dense)
    assert torch.equal(one[0], other[0])


def a_step_fails_on_one_rank() -> str:
    class Fails(Lion):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1 and training.number == 3:  # DDP has messages of its own in the first steps
                raise ValueError("here")
            return super().step(closure)

    training = Training(made=Fails)
    try:
        for _ in range(5):
            try:
                training.step()
            except ValueError:
                training.number += 1
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_step_that_fails_on_one_rank_ends_all(two_ranks: Ranks) -> None:
    one, other = two_ranks(a_step_fails_on_one_rank)
    assert "lost another rank" in one and "step has failed on this rank" in other


class HasModes(Lion):
    def eval(self) -> None: ...

    def train(self) -> None: ...


class FindsRates(Lion):
    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group["d0"] = 1e-6


class AllInGroups(torch.optim.Optimizer):
    """Has its settings in groups alone, as a class for Muon beside Adam."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__([{"params": list(params), "lr": lr, "momentum": 0.9}], {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad.sign(), alpha=-self.param_groups[0]["lr"])


def memory_of(made: Any) -> set[str]:
    training = Training(made=made)
    training.step()
    return {type(group.memory).__name__ for group in training.engine.stepper.groups if group.sparsified}


@pytest.mark.parametrize(
    ("made", "memory"), [(HasModes, "Residual"), (FindsRates, "Residual"), (AllInGroups, "Drift"), (Lion, "Drift")]
)
def test_the_kind_of_an_optimizer_is_told_by_its_settings(two_ranks: Ranks, made: Any, memory: str) -> None:
    assert two_ranks(quietly, memory_of, made) == [{memory}] * 2


def scheduled_by_a_hook() -> tuple[list[float], int]:
    training = Training()
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1 / (1 + step))
    training.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    rates = []
    for _ in range(4):
        training.step()
        rates.append(training.optimizer.param_groups[0]["lr"])
    return rates, len(training.optimizer.param_groups)


def test_hooks_of_users_see_their_own_rates(two_ranks: Ranks) -> None:
    for rates, groups in two_ranks(quietly, scheduled_by_a_hook):
        assert rates == pytest.approx([0.01 / 2, 0.01 / 3, 0.01 / 4, 0.01 / 5]) and groups == 1


def written_through_a_state_dict() -> bool:
    training = Training(memory="drift")
    own = training.model.state_dict()
    for name, x in own.items():
        own[name].copy_(torch.full_like(x, 0.5))
    return all(bool((p == 0.5).all()) for p in training.model.parameters())


def test_a_state_dict_can_be_written_to_before_weights_drift(two_ranks: Ranks) -> None:
    assert two_ranks(written_through_a_state_dict) == [True, True]


def closed_after_writing(what: str) -> list[str]:
    """What is said when an engine is closed."""
    training = Training()
    best = copy.deepcopy(training.model.state_dict())
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(3):
            training.step()
            if what != "best":
                for p in training.model.parameters():
                    p.data.clamp_(-0.05, 0.05)
        if what == "best":
            training.model.load_state_dict(best)
        if what == "agreed":
            with training.engine.agreed(together=True):
                pass
        try:
            if what == "error":
                raise ValueError("here")
            training.close()
        except ValueError:
            training.close()
    return [str(one.message) for one in caught if "the engine is closed" in str(one.message)]


@pytest.mark.parametrize("what", ["clamped", "agreed", "best", "error"])
def test_that_weights_written_to_last_differ_is_said_where_an_engine_is_closed(two_ranks: Ranks, what: str) -> None:
    one, other = two_ranks(closed_after_writing, what)
    assert [len(one), len(other)] == [what == "clamped", 0]
    assert all("engine.agreed(together=True)" in told for told in one)


def with_zero_gradients(made: Any) -> tuple[Tensor, Tensor, int, list[str]]:
    """A layer that the first batch uses, and no other, keeps a gradient of zeros: optimizers go on to step it.

    Returns:
        The model's weights, those of the layer on this rank, full averages of weights, and warnings.
    """
    torch.manual_seed(0)
    body, rare = nn.Linear(20, 30), nn.Linear(20, 30)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.rare = body, rare

        def forward(self, x: Tensor, both: bool) -> Tensor:
            found: Tensor = self.body(x) + self.rare(x) if both else self.body(x)
            return found.square().mean()

    model = Two()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with warnings.catch_warnings(record=True, action="always") as caught:
        engine = ls.attach(ddp, memory="drift", density=0.2, watch=None, grouping="model")
        optimizer = made(model.parameters(), lr=0.01)
        for step in range(12):
            ddp(batch(step, dist.get_rank()), step == 0).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        mine = flat(rare.parameters())
        flushes = engine.stepper.record.counts.flushes
        engine.close()
    told = [str(one.message) for one in caught if "written to" in str(one.message)]
    return flat(model.parameters()), mine, flushes, told


@pytest.mark.parametrize("made", [torch.optim.NAdam, torch.optim.RMSprop, Lion])
def test_parameters_that_are_stepped_with_zeros_are_exchanged(two_ranks: Ranks, made: Any) -> None:
    one, other = two_ranks(with_zero_gradients, made)
    assert torch.equal(one[0], other[0]) and one[2] == other[2] == 0 and one[3] == other[3] == []


class ReadsGradients(Lion):
    """Takes sizes from gradients between two steps, as Sophia does."""

    @torch.no_grad()
    def look(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("size", torch.zeros_like(p)).addcmul_(p.grad, p.grad, value=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.addcdiv_(p.grad, self.state[p]["size"].sqrt() + 1e-3, value=-group["lr"])


def with_sizes_of_gradients() -> Tensor:
    training = Training(made=ReadsGradients, rules=EVERYTHING_SPARSE)
    for step in range(8):
        loss_of(training.ddp, batch(100 + step, dist.get_rank())).backward()
        training.optimizer.look()
        training.optimizer.zero_grad()
        training.step()
    return training.agreed()


def test_statistics_of_gradients_may_differ_where_all_parameters_drift(two_ranks: Ranks) -> None:
    one, other = two_ranks(with_sizes_of_gradients)
    assert torch.equal(one, other)
