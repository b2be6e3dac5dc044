"""The engine behind plain DistributedDataParallel, on real gloo processes."""

from __future__ import annotations

import functools
import weakref
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine import Engine
from lightning_sparse.methods.grouping import Group, ParameterSize, make_plan
from tests.covering import by_default, covering
from tests.engines import exchange
from tests.gpu.models import Branches
from tests.gpu.training import LAYOUTS
from tests.ranks import RankError, Ranks, error_of
from tests.trainers import EVERYTHING_SPARSE

PAIRS = [
    ("top_k", "gather_pairs"),
    ("top_k", "reduce_union"),
    ("shared_top_k", None),
    ("union_top_k", None),
    ("striped_top_k", None),
    ("micro", None),
    ("exdyna", None),
]


def wrapped(layout: str = "default", dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Engine | None]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Branches().to(dtype), **LAYOUTS[layout])
    return ddp, ls.attach(ddp, **{"rules": EVERYTHING_SPARSE, **options}) if options else None


def batches(steps: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    return [torch.randn(8, 20, generator=generator).to(dtype) for _ in range(steps)]


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def sgd(ddp: nn.Module, options: dict[str, Any]) -> torch.optim.SGD:
    """With momentum, unless the memory has its own."""
    memory = options.get("memory")
    has_own = memory is not None and memory.averages != "gradients"
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.0 if has_own else 0.9)


def train(layout: str, options: dict[str, Any], accumulate: int = 1, steps: int = 6) -> tuple[Tensor, int]:
    """SGD; returns the parameters and the number of steps that were exchanged."""
    ddp, engine = wrapped(layout, **options)
    optimizer = sgd(ddp, options)
    for index, batch in enumerate(batches(steps * accumulate)):
        ddp.require_backward_grad_sync = (index + 1) % accumulate == 0
        (ddp(batch).square().mean() / accumulate).backward()
        if ddp.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    return flat(ddp), 0 if engine is None else engine.step


GROUPINGS: list[Any] = ["bucket", "layer", "model", ls.grouping.MergeBelow(3000)]


@functools.cache
def plainly(ranks: Ranks, layout: str) -> Tensor:
    """Parameters after the same training with DDP alone."""
    plain, *others = (parameters for parameters, _ in ranks(train, layout, {}))
    assert all(torch.equal(plain, other) for other in others)
    return plain


@pytest.mark.parametrize(
    ("layout", "sparsifier", "grouping"),
    covering(
        product(
            LAYOUTS,
            ["top_k", "shared_top_k", "striped_top_k", "micro", "exdyna", "everything"],
            GROUPINGS,
        ),
        together=1,
    ),
)
def test_density_1_trains_like_plain_ddp(two_ranks: Ranks, layout: str, sparsifier: str, grouping: Any) -> None:
    # Bit for bit: with two ranks a sum has one order, and halving is exact before it (DDP) and after it (here).
    options = {"sparsifier": sparsifier, "density": 1.0, "grouping": grouping}
    for sparse, exchanged in two_ranks(train, layout, options):
        assert torch.equal(sparse, plainly(two_ranks, layout))
        assert exchanged == 6


def test_density_1_trains_like_plain_ddp_on_three_ranks(three_ranks: Ranks) -> None:
    options = {"sparsifier": "exdyna", "density": 1.0}
    plain, sparse = three_ranks(train, "default", {}), three_ranks(train, "default", options)
    # A sum of three terms depends on their order, and thirds are rounded: a few units in the last place per step, on
    # parameters of size up to 0.3.
    torch.testing.assert_close(sparse[0][0], plain[0][0], rtol=0, atol=1e-6)
    assert torch.equal(sparse[0][0], sparse[1][0])
    assert torch.equal(sparse[0][0], sparse[2][0])


def test_accumulated_gradients_are_exchanged_once(two_ranks: Ranks) -> None:
    options = {"sparsifier": "exdyna", "density": 1.0}
    for layout in ("default", "view", "find_unused"):
        for (plain, _), (sparse, _) in zip(
            two_ranks(train, layout, {}, 3), two_ranks(train, layout, options, 3), strict=True
        ):
            assert torch.equal(sparse, plain), layout


@pytest.mark.parametrize(
    ("layout", "pair"),
    covering(product(LAYOUTS, PAIRS), together=1),
)
def test_ranks_stay_equal_at_low_density(three_ranks: Ranks, layout: str, pair: tuple[str, str | None]) -> None:
    sparsifier, exchange = pair
    options = {"sparsifier": sparsifier, "exchange": exchange, "density": 0.02}
    results = [parameters for parameters, _ in three_ranks(train, layout, options)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], plainly(three_ranks, layout))


def kind_of(sparsifier: str) -> tuple[Any, ...]:
    """What decides how a step goes: how ranks agree, and whether the method ignores the density."""
    method = ls.sparsifiers.SPARSIFIERS.resolve(sparsifier)
    return method.agreement, method.exchange, sparsifier == "hard_threshold"


@pytest.mark.parametrize(
    "sparsifier",
    covering(
        ((name,) for name, _ in ls.sparsifiers.SPARSIFIERS.items()),
        together=1,
        seen_as=lambda sparsifier: (kind_of(sparsifier),),
    ),
)
def test_every_sparsifier_trains_like_plain_ddp_at_full_density(two_ranks: Ranks, sparsifier: str) -> None:
    everything = ls.sparsifiers.HardThreshold(1e-30) if sparsifier == "hard_threshold" else sparsifier
    plain = plainly(two_ranks, "default")
    for parameters, _ in two_ranks(train, "default", {"sparsifier": everything, "density": 1.0}):
        torch.testing.assert_close(parameters, plain, rtol=0, atol=1e-6)  # random numbers are summed in their own order


@pytest.mark.thorough
@pytest.mark.parametrize("sparsifier", [name for name, _ in ls.sparsifiers.SPARSIFIERS.items()])
def test_every_sparsifier_keeps_ranks_equal_below(two_ranks: Ranks, sparsifier: str) -> None:
    options = {
        "sparsifier": sparsifier,
        "density": 0.02,
        "memory": ls.memories.ClipByNorm(1.0, ls.memories.MomentumCorrection(0.5)),
    }
    first, second = (parameters for parameters, _ in two_ranks(train, "default", options, 1, 4))
    assert torch.equal(first, second)
    assert bool(torch.isfinite(first).all())


PLANS: list[tuple[Any, list[str]]] = [
    ("bucket", []),
    ("layer", []),
    (ls.grouping.MergeBelow(3000), []),
    ("model", ["*.bias"]),  # biases become dense, and sparse again
    ("bucket", ["*"]),
    ("layer", ["*"]),
    ("model", []),
]


def regroup(engine: Engine, number: int) -> None:
    grouping, dense = PLANS[number % len(PLANS)]
    order = {name: place for place, (name, _) in enumerate(Branches().named_parameters())}
    sizes = sorted((p for group in engine.groups for p in group.parameters), key=lambda p: order[p.name])
    engine.regroup(make_plan(sizes, grouping, EVERYTHING_SPARSE.also_dense(dense)))


def train_with_changing_groups(options: dict[str, Any]) -> Tensor:
    """As :func:`train`, with other groups after each step."""
    ddp, engine = wrapped("small_buckets", **options)
    optimizer = sgd(ddp, options)
    for number, batch in enumerate(batches(6)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        regroup(engine, number)
    return flat(ddp)


def balance_with_changing_groups(options: dict[str, Any]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """After each step: all residuals before and after other groups, and what was given so far without being applied."""
    ddp, engine = wrapped("default", torch.float64, **options)
    torch.manual_seed(0)
    alone = Branches().double()
    missing = torch.zeros_like(flat(alone))
    seen = []

    def residuals() -> Tensor:
        pieces = [(engine.residual(name), p) for name, p in ddp.module.named_parameters()]
        held = torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if r is None else r for r, p in pieces])
        dist.all_reduce(held)
        return held

    for number, batch in enumerate(batches(7, torch.float64)):
        ddp.zero_grad()
        alone.zero_grad()
        ddp(batch).square().mean().backward()
        exchange(engine)
        alone(batch).square().mean().backward()
        given = torch.cat([p.grad.flatten() for p in alone.parameters()])
        dist.all_reduce(given)
        missing += given - dist.get_world_size() * torch.cat([p.grad.flatten() for p in ddp.parameters()])
        before = residuals()
        regroup(engine, number + 3)  # twice, without a step between
        regroup(engine, number)
        seen.append((before, residuals(), missing.clone()))
    return seen


def test_groups_that_change_train_like_plain_ddp_at_full_density(two_ranks: Ranks) -> None:
    [(plain, _), _] = two_ranks(train, "default", {})
    for sparsifier in ("union_top_k", "exdyna"):
        for parameters in two_ranks(train_with_changing_groups, {"sparsifier": sparsifier, "density": 1.0}):
            assert torch.equal(parameters, plain)


@pytest.mark.parametrize("sparsifier", by_default(["top_k", "union_top_k", "exdyna", "sidco_e"], 2))
def test_no_residual_is_lost_when_groups_change(two_ranks: Ranks, sparsifier: str) -> None:
    results = two_ranks(balance_with_changing_groups, {"sparsifier": sparsifier, "density": 0.05})
    for steps in results:
        for before, after, missing in steps:
            assert torch.equal(after, before)
            torch.testing.assert_close(before, missing, rtol=0, atol=1e-13)
        # After the fifth step all became dense: the sixth has sent all that was left.
        assert bool(steps[4][1].count_nonzero() > 0)
        assert bool((steps[5][0] == 0).all())


@pytest.mark.parametrize(
    "memory",
    [ls.memories.MomentumCorrection(0.5), ls.memories.AdamCorrection(0.5), ls.memories.ClipByNorm(0.1)],
    ids=str,
)
def test_all_that_is_remembered_of_a_parameter_moves_with_it(two_ranks: Ranks, memory: ls.memories.Memory) -> None:
    # Everything is sent, so that momenta alone decide: groups do not matter, if nothing of them is lost.
    if isinstance(memory, ls.memories.ClipByNorm):  # clipping by group does depend on groups: only equality of ranks
        options = {"sparsifier": "top_k", "density": 0.1, "memory": memory}
        first, second = two_ranks(train_with_changing_groups, options)
        assert torch.equal(first, second)
        return
    options = {"sparsifier": "everything", "memory": memory}
    for changing, (steady, _) in zip(
        two_ranks(train_with_changing_groups, options), two_ranks(train, "default", options), strict=True
    ):
        assert torch.equal(changing, steady)


def sparse_plan(sizes: list[ParameterSize], grouping: str) -> list[Group]:
    return make_plan(sizes, grouping, EVERYTHING_SPARSE)


def bad_plans() -> list[str]:
    ddp, engine = wrapped("default", sparsifier="top_k")
    sizes = [p for group in engine.groups for p in group.parameters][::-1]
    told = []
    for plan in (
        sparse_plan(sizes[1:], "layer"),
        [*sparse_plan(sizes, "layer"), *sparse_plan(sizes[:1], "model")],
        [group._replace(name="same") for group in sparse_plan(sizes, "layer")],
        sparse_plan([sizes[0]._replace(name="trunc.weight"), *sizes[1:]], "model"),
    ):
        with pytest.raises(ValueError, match="Expected") as caught:
            engine.regroup(plan)
        told.append(str(caught.value))
    for nothing in (3, "layer", [3]):
        with pytest.raises(ValueError, match=r"^Expected plan to be a list of groups, as make_plan\(\) gives it"):
            engine.regroup(nothing)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="The ranks disagree"):
        engine.regroup(3 if dist.get_rank() else engine.groups)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="The ranks disagree") as disagreement:
        engine.regroup(sparse_plan(sizes, "layer" if dist.get_rank() else "model"))
    told.append(str(disagreement.value))
    with pytest.raises(RuntimeError, match="The ranks disagree"):  # on the rank whose plan is right, too
        engine.regroup(sparse_plan(sizes[dist.get_rank() :], "layer"))
    before = engine.groups
    ddp(batches(1)[0]).square().mean().backward()
    assert exchange(engine)  # still at work, with the old groups
    assert (engine.groups, engine.step) == (before, 1)
    return told


def test_plans_that_cannot_work_are_refused_on_all_ranks(two_ranks: Ranks) -> None:
    for told in two_ranks(bad_plans):
        assert told[0].endswith("unknown, missing or named twice: trunk.weight.")
        assert told[1].endswith("named twice: trunk.weight.")
        assert "groups with different names, but got ['same', 'same'" in told[2]
        assert told[3].endswith("named twice: trunc.weight, trunk.weight.")


def balance(layout: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(n * what was applied + all residuals, all gradients) after five steps at fixed parameters, float64."""
    ddp, engine = wrapped(layout, torch.float64, **options)
    torch.manual_seed(0)
    alone = Branches().double()
    n = dist.get_world_size()
    applied = torch.zeros_like(flat(alone))
    for batch in batches(5, torch.float64):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        exchange(engine)
        applied += torch.cat([p.grad.flatten() for p in ddp.parameters()])
        alone(batch).square().mean().backward()  # gradients add up in .grad
    given = torch.cat([p.grad.flatten() for p in alone.parameters()])
    pieces = [engine.residual(name) for name, _ in ddp.module.named_parameters()]
    residual = torch.cat(
        [torch.zeros(p.numel()) if r is None else r for r, p in zip(pieces, alone.parameters(), strict=True)]
    )
    dist.all_reduce(given)
    dist.all_reduce(residual)
    return n * applied + residual, given


@pytest.mark.parametrize(
    ("layout", "grouping", "sparsifier"),
    covering(
        product(
            LAYOUTS,
            GROUPINGS,
            [
                ls.sparsifiers.TopK(),
                ls.sparsifiers.ExDyna(),
                ls.sparsifiers.HardThreshold(1e-3),
                ls.sparsifiers.MiCRO(),
            ],
        ),
        together=1,
    ),
)
def test_no_gradient_is_lost_across_changing_buckets(
    two_ranks: Ranks, layout: str, grouping: ls.grouping.Grouping | str, sparsifier: ls.sparsifiers.Sparsifier
) -> None:
    options = {"sparsifier": sparsifier, "density": 0.05, "grouping": grouping, "dense": ["head.*"]}
    for found, given in two_ranks(balance, layout, options):
        # Sums of at most ten float64 numbers of size one.
        torch.testing.assert_close(found, given, rtol=0, atol=1e-13)


def unused() -> dict[str, Any]:
    """Two steps with both branches, one with the right branch only, one where rank 0 goes left and rank 1 right."""
    rank = dist.get_rank()
    ddp, engine = wrapped("find_unused", sparsifier="top_k", density=0.05, grouping="layer")
    seen = {}
    for step, use in enumerate(["both", "both", "right", ("left", "right")[rank]]):
        ddp.zero_grad()
        ddp(batches(4)[step], use).square().mean().backward()
        exchange(engine)
        seen[step] = (
            ddp.module.left.weight.grad is None or bool((ddp.module.left.weight.grad == 0).all()),
            engine.residual("left.weight").clone(),
            engine.residual("trunk.weight").clone(),
        )
    return seen


def test_residual_of_a_parameter_that_no_rank_used_is_kept(two_ranks: Ranks) -> None:
    for seen in two_ranks(unused):
        assert not seen[1][0]
        assert seen[1][1].count_nonzero() > 0
        assert seen[2][0], "nothing was applied"
        assert torch.equal(seen[1][1], seen[2][1]), "DDP would have thrown away what the residual had sent"
        assert not torch.equal(seen[1][2], seen[2][2]), "the rest of the model was exchanged as ever"
        assert not seen[3][0]
        assert not torch.equal(seen[2][1], seen[3][1]), "used on one rank is used"


def unused_vectors(memory: ls.memories.Memory) -> list[tuple[str, bool, bool]]:
    """What a step without the left branch changed in the memory: of the left branch, of the others in its group."""
    ddp, engine = wrapped("find_unused", sparsifier="top_k", density=0.05, memory=memory, dense=["left.bias"])
    seen = []
    for step, use in enumerate(["both", "both", "right"]):
        before = [{k: v.clone() for k, v in g.memory.vectors(g.state.memory).items()} for g in engine.stepper.groups]
        ddp.zero_grad()
        ddp(batches(3)[step], use).square().mean().backward()
        exchange(engine)
    for group, vectors in zip(engine.stepper.groups, before, strict=True):
        for name, vector in group.memory.vectors(group.state.memory).items():
            mine = torch.zeros_like(vector, dtype=torch.bool)
            for parameter, span in group.spans.items():
                mine[span] = parameter.startswith("left")
            same = vector[:-1] == vectors[name][:-1]
            seen.append((name, bool(same[mine[:-1]].all()), bool(same[~mine[:-1]].all())))
    return seen


@pytest.mark.parametrize(
    "memory", [ls.memories.MomentumCorrection(), ls.memories.AdamCorrection(), ls.memories.ClipByNorm(0.1)], ids=repr
)
def test_a_parameter_that_no_rank_used_keeps_all_that_is_remembered_of_it(
    two_ranks: Ranks, memory: ls.memories.Memory
) -> None:
    for seen in two_ranks(unused_vectors, memory):
        vectors = list(memory.vectors(memory.init(1, torch.device("cpu"), torch.float32)))
        assert {name for name, _, _ in seen} == set(vectors)
        assert all(kept for _, kept, _ in seen)
        assert not all(others_kept for _, _, others_kept in seen[: len(vectors)])


def two_backwards() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A backward through one branch while the old average of the other is still in .grad."""
    ddp, engine = wrapped("find_unused", sparsifier="top_k", density=0.05, grouping="bucket")
    first, second = batches(2)
    ddp(first, "left").square().mean().backward()
    exchange(engine)
    average, residual = ddp.module.left.weight.grad.clone(), engine.residual("left.weight").clone()
    for p in (*ddp.module.trunk.parameters(), *ddp.module.head.parameters()):
        p.grad = None
    ddp(second, "right").square().mean().backward()
    exchange(engine)
    return average, ddp.module.left.weight.grad, residual, engine.residual("left.weight")


def test_an_old_average_is_neither_sent_again_nor_changed(two_ranks: Ranks) -> None:
    for average, later_average, residual, later_residual in two_ranks(two_backwards):
        assert average.count_nonzero() > 0
        assert torch.equal(average, later_average)
        assert torch.equal(residual, later_residual)


def poisoned(
    bad: float, options: dict[str, Any], layer: str | None = None
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Three steps at fixed parameters; in the second one rank 1 has a bad number in its input, or in one gradient.

    Returns:
        Averages and residuals after each step; what backward leaves in the second one, and this rank's own gradient.
    """
    ddp, engine = wrapped("default", density=0.05, **options)
    grads, residuals, left, own = [], [], torch.empty(0), torch.empty(0)
    for step, batch in enumerate(batches(3)):
        hook = None
        if step == 1 and dist.get_rank() == 1:
            if layer is None:
                batch[0, 0] = bad
            else:
                weight = getattr(ddp.module, layer).weight
                hook = weight.register_hook(lambda grad: grad * bad)
        ddp.zero_grad()
        if step == 1:
            alone = torch.autograd.grad(ddp.module(batch).square().mean(), list(ddp.module.parameters()))
            own = torch.cat([grad.flatten() for grad in alone])
        ddp(batch).square().mean().backward()
        if hook is not None:
            hook.remove()
        if step == 1:
            left = torch.cat([p.grad.flatten() for p in ddp.parameters()])
        assert exchange(engine) == (step != 1)
        grads.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
        residuals.append(torch.cat([engine.residual(name) for name, _ in ddp.module.named_parameters()]).clone())
    return grads, residuals, left, own


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_on_one_rank_voids_the_step_on_all(two_ranks: Ranks, bad: float) -> None:
    for options in (
        {"sparsifier": "top_k"},
        {"sparsifier": "exdyna"},
        {"sparsifier": ls.sparsifiers.HardThreshold(1e-3)},
    ):
        found = two_ranks(poisoned, bad, options)
        mean = sum(own / 2 for *_, own in found)
        for grads, residuals, left, _ in found:
            assert grads[0].isfinite().all()
            torch.testing.assert_close(left, mean, rtol=0, atol=0, equal_nan=True)  # what plain DDP leaves
            assert not grads[1].any()
            assert grads[2].isfinite().all()
            assert torch.equal(residuals[1], residuals[0])  # nothing was absorbed: the batch is lost, as with DDP
            assert residuals[2].isfinite().all()
            assert grads[2].any() and not torch.equal(residuals[2], residuals[1])


def kept_dense() -> tuple[Tensor, Tensor, list[tuple[str, bool]], float]:
    ddp, engine = wrapped("default", sparsifier="top_k", density=0.01, dense=["*.bias"])
    plain, _ = wrapped("default")
    [batch] = batches(1)
    ddp(batch).square().mean().backward()
    exchange(engine)
    plain(batch).square().mean().backward()
    biases = [torch.cat([m.module.left.bias.grad, m.module.head.bias.grad]) for m in (ddp, plain)]
    summary = engine.summary()
    plan = [(group.name, group.dense) for group in engine.groups]
    return biases[0], biases[1], plan, summary["density"]


def test_dense_parameters_get_the_exact_mean_and_do_not_count_as_density(two_ranks: Ranks) -> None:
    for sparse, plain, plan, density in two_ranks(kept_dense):
        assert torch.equal(sparse, plain)
        assert ("dense.bucket0", True) in plan
        assert density <= 0.02  # two ranks, 1 % each


def disagreeing() -> str:
    return error_of(functools.partial(wrapped, sparsifier="top_k", density=0.01 * (1 + dist.get_rank())))


def test_ranks_with_different_settings_are_refused_everywhere(two_ranks: Ranks) -> None:
    for message in two_ranks(disagreeing):
        assert "ranks disagree: rank(s) [1]" in message


class Refusing(ls.sparsifiers.Sparsifier):
    """Fails at its second selection, on every rank."""

    agreement = ls.sparsifiers.TopK.agreement
    exchange = "gather_pairs"

    def select(self, acc: Tensor, state: Any, ctx: Any) -> Any:
        if ctx.step == 1:
            raise ArithmeticError("second selection")
        return ls.sparsifiers.TopK().select(acc, state, ctx)

    def __repr__(self) -> str:
        return "Refusing()"


def failing() -> str:
    ddp, _ = wrapped("small_buckets", sparsifier=Refusing())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for batch in batches(2):
        ddp(batch).square().mean().backward()
        try:
            optimizer.step()
        except ArithmeticError as error:
            return str(error)
    return ""


def test_an_error_in_a_sparsifier_comes_out_of_the_step() -> None:
    with Ranks(2) as ranks:  # of its own: connections are closed by an error
        assert ranks(failing) == ["second selection"] * 2


def test_a_job_that_fails_on_a_rank_fails_the_test() -> None:
    ranks = Ranks(2)
    with pytest.raises(RankError, match=r"(?s)rank 1: .*ZeroDivisionError"):
        ranks(divide)


def divide() -> float:
    return 1 / (1 - dist.get_rank())


def summaries() -> tuple[dict[str, float], dict[str, dict[str, float]], dict[str, float], float]:
    ddp, engine = wrapped("default", sparsifier="top_k", density=0.05, grouping="layer")
    empty = engine.summary()
    for batch in batches(3):
        ddp(batch).square().mean().backward()
        exchange(engine)
    own = float(torch.cat([engine.residual(name) for name, _ in ddp.module.named_parameters()]).norm())
    result = engine.summary(), engine._group_summaries(), empty, own
    engine.close()
    with pytest.raises(RuntimeError, match="The engine is closed"):
        engine.summary()
    return result


def bytes_with_flags() -> float:
    ddp, engine = wrapped("find_unused", sparsifier="top_k", density=0.05, grouping="model")
    [batch] = batches(1)
    ddp(batch, "left").square().mean().backward()
    exchange(engine)
    return engine.summary()["traffic/sent_mb"] * 1e6


def test_what_ranks_say_they_do_counts_as_traffic(two_ranks: Ranks) -> None:
    # 13 words of 8 bytes in backward and as many in the step, the last one for which of 8 parameters were used; and the
    # count and floor(0.05 * 8885) pairs.
    assert two_ranks(bytes_with_flags) == pytest.approx([2 * 112 + 4 + 8 * 444] * 2)


def test_summary_combines_groups_and_ranks(two_ranks: Ranks) -> None:
    results = two_ranks(summaries)
    for summary, groups, empty, _ in results:
        assert empty == {}
        assert summary == results[0][0], "equal on all ranks"
        assert set(groups) == {"trunk", "left", "right", "head"}
        # k = floor(0.05 * numel) of 1260, 3660, 3660 and 305 coordinates, an int32 index and a float32 value each, one
        # int32 count per group; in a ring of two every rank sends its own message once. Backward and the step have a
        # header of 112 bytes each.
        assert [groups[name]["traffic/sent_mb"] for name in ("trunk", "left", "right", "head")] == [
            (4 + 8 * k) / 1e6 for k in (63, 183, 183, 15)
        ]
        sent = sum(4 + 8 * k for k in (63, 183, 183, 15)) + 2 * 112
        assert summary["traffic/sent_mb"] == sent / 1e6
        assert summary["traffic/ratio"] == pytest.approx(4 * 8885 / sent)
        assert summary["padding_ratio"] == 1
        assert summary["residual_norm"] == pytest.approx((results[0][3] + results[1][3]) / 2)
        assert summary["time/select_ms"] > 0
        assert summary["time/exchange_ms"] > 0
        assert summary["time/exposed_ms"] >= 0
        assert "threshold" not in summary
        union = sum(groups[name]["density"] * numel for name, numel in (("left", 3660), ("right", 3660)))
        assert 366 <= union <= 732


def closed() -> tuple[bool, bool]:
    ddp, engine = wrapped("default", sparsifier="top_k")
    ddp(batches(1)[0]).square().mean().backward()
    exchange(engine)
    group = weakref.ref(engine.comm.group)
    before = group() is not None
    engine.close()
    return before, group() is None


def test_a_closed_engine_holds_no_process_group(two_ranks: Ranks) -> None:
    # One that is left to the end of the interpreter may abort the process.
    assert two_ranks(closed) == [(True, True)] * 2


def test_one_rank_needs_no_network(one_rank: None) -> None:
    ddp, engine = wrapped("default", sparsifier="exdyna", density=0.1, single_device="sparse")
    for batch in batches(3):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        exchange(engine)
    summary = engine.summary()
    assert summary["traffic/sent_mb"] == 0
    assert summary["density"] == pytest.approx(0.1, rel=0.01)
    applied = torch.cat([p.grad.flatten() for p in ddp.parameters()]).count_nonzero()
    assert applied <= 0.1 * 8885


def test_gradients_that_are_no_flat_vectors_are_refused(one_rank: None) -> None:
    embedding = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"gradients of '0' are sparse tensors.*Set sparse=False"):
        ls.attach(DistributedDataParallel(embedding))
    rotation = nn.ParameterDict({"phase": nn.Parameter(torch.ones(3, dtype=torch.complex64))})
    with pytest.raises(ValueError, match=r"phase is torch.complex64"):
        ls.attach(DistributedDataParallel(rotation))


def test_what_a_model_calls_sparse_itself_is_no_gradient(one_rank: None) -> None:
    attention = nn.Sequential(nn.Linear(20, 20))
    attention.sparse = True
    ls.attach(DistributedDataParallel(attention))


def test_reducers_that_bypass_buckets_are_refused(one_rank: None) -> None:
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        pytest.raises(ValueError, match="bypasses DDP's buckets"),
    ):
        wrapped("default", sparsifier="top_k")
