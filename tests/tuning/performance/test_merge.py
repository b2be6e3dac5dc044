"""Groups by time: against all groupings, against slower algorithms, and what holds for any model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.methods.grouping import merge_below
from lightning_sparse.tuning.performance.cost import CostModel, Line
from lightning_sparse.tuning.performance.merge import greedy_merge, iteration_seconds, optimal_merge
from tests.reference.merging import Seconds, algorithm_1, groupings, pareto_seconds, simulated_seconds


@dataclass(frozen=True)
class Sort(Line):
    """A selection that is no straight line: OMGS-SGD models Top-k as a full sort."""

    sorting: float

    def __call__(self, amount: float) -> float:
        return super().__call__(amount) + self.sorting * amount * math.log2(amount)


class Instance(NamedTuple):
    numels: list[int]
    backward: list[float]
    alpha: float
    """Of the exchange."""
    beta: float
    fixed: float
    """Of the selection."""
    each: float
    sorting: float
    """For each of x log2 x, of the selection, too."""

    @property
    def cost(self) -> CostModel:
        return CostModel(Line(self.alpha, self.beta), Sort(self.fixed, self.each, self.sorting))

    def select(self, numel: int) -> float:
        return self.fixed + self.each * numel + self.sorting * numel * math.log2(numel)

    def exchange(self, numel: int) -> float:
        return self.alpha + self.beta * numel

    def time(self, groups: list[list[int]]) -> float:
        return iteration_seconds(groups, self.numels, self.backward, self.cost)

    def optimal(self) -> list[list[int]]:
        return optimal_merge(self.numels, self.backward, self.cost)


def drawn(generator: random.Random, layers: int) -> Instance:
    """Anything from negligible to dominating exchanges and selections; each price is absent in a third of all cases.

    Half of the instances are of small integers, where times tie.
    """

    def price(largest: float) -> float:
        if generator.random() < 1 / 3:
            return 0.0
        return generator.randint(1, 8) / 8 if whole else largest * 10 ** generator.uniform(-3, 0)

    whole = generator.random() < 0.5
    numels = [generator.randint(1, 8) if whole else int(10 ** generator.uniform(0, 4)) for _ in range(layers)]
    backward = [generator.randint(0, 3) * 1.0 if whole else generator.uniform(0, 2) for _ in range(layers)]
    return Instance(numels, backward, price(10), price(1e-2), price(3), price(3e-3), price(3e-4))


def shortest(instance: Instance) -> float:
    numels, backward, *_ = instance
    return min(
        simulated_seconds(groups, numels, backward, instance.select, instance.exchange)
        for groups in groupings(len(numels))
    )


def test_one_iteration_by_hand() -> None:
    # Backward ends at 1, 3 and 6; selections of 1 + x/2 delay all that follows.
    cost = CostModel(exchange=Line(3, 1), selection=Line(1, 0.5))
    layers = [2, 1, 1], [1.0, 2.0, 3.0]
    # Ready at 3, 6.5 and 11: 3 + 5 = 8, then 8 + 4 = 12, then 12 + 4 = 16.
    assert iteration_seconds([[0], [1], [2]], *layers, cost) == 16
    # Ready at 3 and 10: 3 + 5 = 8; the network waits; 10 + 5 = 15.
    assert iteration_seconds([[0], [1, 2]], *layers, cost) == 15
    # Ready at 5.5 and 10: 5.5 + 6 = 11.5, then 11.5 + 4 = 15.5.
    assert iteration_seconds([[0, 1], [2]], *layers, cost) == 15.5
    # Ready at 9, then 7 seconds.
    assert iteration_seconds([[0, 1, 2]], *layers, cost) == 16


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.thorough] * (seed > 0)) for seed in range(6)])
def test_nothing_is_shorter_than_the_optimum_among_all_groupings(seed: int) -> None:
    generator = random.Random(seed)
    merged = 0
    for _ in range(120):
        instance = drawn(generator, layers=generator.randint(1, 11))
        groups = instance.optimal()
        numels, backward, *_ = instance
        taken = simulated_seconds(groups, numels, backward, instance.select, instance.exchange)
        assert taken == pytest.approx(shortest(instance), rel=1e-12)
        merged += 1 < len(groups) < len(numels)
    assert merged > 20  # neither of the trivial groupings


def test_nothing_is_shorter_among_all_groupings_of_12_layers() -> None:
    generator = random.Random(12)
    for _ in range(5):
        instance = drawn(generator, layers=12)
        assert instance.time(instance.optimal()) == pytest.approx(shortest(instance), rel=1e-12)


def test_times_are_those_of_the_simulation() -> None:
    generator = random.Random(100)
    for _ in range(300):
        instance = drawn(generator, layers=generator.randint(1, 7))
        numels, backward, *_ = instance
        groups = generator.choice(list(groupings(len(numels))))
        simulated = simulated_seconds(groups, numels, backward, instance.select, instance.exchange)
        assert instance.time(groups) == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_sixty_layers_take_as_long_as_by_the_pairs_of_the_slow_algorithm(seed: int) -> None:
    instance = drawn(random.Random(seed), layers=60)
    expected = pareto_seconds(*instance[:2], instance.select, instance.exchange)
    assert instance.time(instance.optimal()) == pytest.approx(expected, rel=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("fixed", [0.0, pytest.param(1e-4, marks=pytest.mark.thorough)])
def test_five_hundred_layers(fixed: float) -> None:
    generator = random.Random(500)
    numels = [int(10 ** generator.uniform(2, 6.5)) for _ in range(500)]
    backward = [generator.uniform(0, 1e-3) for _ in range(500)]
    instance = Instance(numels, backward, alpha=3e-3, beta=1e-9, fixed=fixed, each=5e-10, sorting=0.0)
    groups = instance.optimal()
    assert [layer for group in groups for layer in group] == list(range(500))
    assert 1 < len(groups) < 500
    expected = pareto_seconds(numels, backward, instance.select, instance.exchange)
    assert instance.time(groups) == pytest.approx(expected, rel=1e-11)


def test_the_published_rules_are_not_optimal() -> None:
    # Layers 3, 2, 1 of the paper. The merge of the first two looks good, and spoils the merge of the last two.
    without = Instance([2, 1, 1], [1.0, 2.0, 3.0], alpha=3, beta=1, fixed=0, each=0, sorting=0)
    assert greedy_merge(*without[:2], without.cost) == [[0, 1], [2]]
    assert without.time([[0, 1], [2]]) == 13
    assert without.optimal() == [[0], [1, 2]]
    assert without.time([[0], [1, 2]]) == 11
    sorting = Instance([4, 2, 2], [1.0, 1.0, 1.0], alpha=2, beta=1 / 4, fixed=0, each=0, sorting=1 / 8)
    assert sorting.time(greedy_merge(*sorting[:2], sorting.cost)) == pytest.approx(9.94, abs=0.005)
    assert sorting.optimal() == [[0], [1, 2]]
    assert sorting.time([[0], [1, 2]]) == 8


def test_the_published_rule_is_that_of_algorithm_1() -> None:
    generator = random.Random(1)
    partly = 0
    for _ in range(600):
        instance = drawn(generator, layers=generator.randint(1, 15))
        numels, backward, alpha, *_ = instance
        groups = greedy_merge(numels, backward, instance.cost)
        assert groups == algorithm_1(numels, backward, instance.select, instance.exchange, alpha)
        without = greedy_merge(numels, backward, CostModel(instance.cost.exchange))
        assert without == algorithm_1(numels, backward, lambda numel: 0.0, instance.exchange, alpha)
        partly += 1 < len(groups) < len(numels)
    assert partly > 100


def test_the_first_of_the_published_tests_matters_only_where_a_selection_has_a_fixed_price() -> None:
    generator = random.Random(2)
    differ = {True: 0, False: 0}
    for _ in range(400):
        instance = drawn(generator, layers=8)
        numels, backward, alpha, *_ = instance
        second_only = algorithm_1(numels, backward, instance.select, instance.exchange, alpha, first_test=False)
        differ[instance.fixed > 0] += second_only != greedy_merge(numels, backward, instance.cost)
    assert differ[False] == 0
    assert differ[True] > 0


def test_two_layers_are_merged_as_published() -> None:
    # As long as the network is the bottleneck, which the first of the published tests asks for.
    generator = random.Random(3)
    for _ in range(500):
        instance = drawn(generator, layers=2)._replace(fixed=0.0)
        numels, backward, *_ = instance
        greedy = instance.time(greedy_merge(numels, backward, instance.cost))
        assert greedy == pytest.approx(instance.time(instance.optimal()), rel=1e-12)


instances = st.builds(
    drawn,
    st.integers(0, 2**32).map(random.Random),
    st.integers(1, 30),
)


@settings(deadline=None, max_examples=150)
@given(instance=instances, threshold=st.integers(0, 20_000))
def test_the_optimum_is_no_longer_than_any_rule(instance: Instance, threshold: int) -> None:
    numels, backward, *_ = instance
    best = instance.time(instance.optimal()) * (1 - 1e-12)
    assert best <= instance.time(greedy_merge(numels, backward, instance.cost))
    assert best <= instance.time(greedy_merge(numels, backward, CostModel(instance.cost.exchange)))
    assert best <= instance.time(merge_below(numels, threshold))
    assert best <= instance.time([[layer] for layer in range(len(numels))])
    assert best <= instance.time([list(range(len(numels)))])
    # Backward, and all exchanges in one message, have to be done by any grouping.
    assert best <= sum(backward) + instance.select(sum(numels)) + instance.exchange(sum(numels))
    assert instance.time(instance.optimal()) >= max(sum(backward), instance.exchange(sum(numels))) * (1 - 1e-12)


@settings(deadline=None, max_examples=100)
@given(instance=instances, name=st.sampled_from(Instance._fields[1:]), more=st.floats(0, 5), where=st.integers(0, 29))
def test_nothing_gets_shorter_when_anything_takes_longer(
    instance: Instance, name: str, more: float, where: int
) -> None:
    value = getattr(instance, name)
    if name == "backward":
        where %= len(value)
        slower = instance._replace(backward=[*value[:where], value[where] + more, *value[where + 1 :]])
    else:
        slower = instance._replace(**{name: value + more})
    assert slower.time(slower.optimal()) >= instance.time(instance.optimal()) * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(instance=instances)
def test_groups_do_not_depend_on_the_unit_of_time(instance: Instance) -> None:
    numels, backward, *prices = instance
    # Times a power of 2, which rounds nothing.
    shrunk = Instance(numels, [t / 1024 for t in backward], *(price / 1024 for price in prices))
    assert shrunk.optimal() == instance.optimal()
    for cost in (lambda one: one.cost, lambda one: CostModel(one.cost.exchange)):
        shrunken = greedy_merge(numels, shrunk.backward, cost(shrunk))
        assert shrunken == greedy_merge(numels, backward, cost(instance))


@settings(deadline=None, max_examples=60)
@given(instance=instances)
def test_extreme_prices_have_trivial_groups(instance: Instance) -> None:
    numels, backward, *_ = instance
    layers = len(numels)
    total = instance.time([[layer] for layer in range(layers)]) + 1
    dear = instance._replace(alpha=total, sorting=0.0)
    assert dear.optimal() == greedy_merge(numels, backward, dear.cost) == [list(range(layers))]
    # Messages without a price of their own: nothing is faster than a message for each layer.
    cheap = instance._replace(alpha=0.0, fixed=0.0)
    alone = cheap.time([[layer] for layer in range(layers)])
    assert cheap.time(cheap.optimal()) == pytest.approx(alone, rel=1e-12)


def test_equally_short_groupings_are_decided_for_the_fewest_groups() -> None:
    free = CostModel(Line(0, 0))
    assert optimal_merge([3, 4, 5], [1, 2, 3], free) == [[0, 1, 2]]
    assert iteration_seconds([[0], [1], [2]], [3, 4, 5], [1, 2, 3], free) == 6
    assert optimal_merge([3, 4, 5], [0, 0, 0], free) == [[0, 1, 2]]
    assert greedy_merge([3, 4, 5], [0, 0, 0], free) == [[0], [1], [2]]  # merges only where it gains something


def test_one_layer_is_one_group() -> None:
    cost = CostModel(Line(2, 0.5), Line(1, 0.25))
    assert optimal_merge([4], [3], cost) == greedy_merge([4], [3], cost) == [[0]]
    assert iteration_seconds([[0]], [4], [3], cost) == 3 + 2 + 4


COST = CostModel(Line(1, 1))
TIMED: list[Callable[..., object]] = [
    optimal_merge,
    greedy_merge,
    lambda numels, backward, cost: iteration_seconds([[i] for i in range(len(numels))], numels, backward, cost),
]


@pytest.mark.parametrize("function", TIMED, ids=["optimal", "greedy", "time"])
@pytest.mark.parametrize(
    ("numels", "backward", "sentence"),
    [
        ([], [], "Expected at least one layer, but got none"),
        ([1, 2], [1.0], "one time of backward for each layer, but got 2 layers and 1 times"),
        ([1, 0], [1.0, 1.0], "Expected numels to be integers of at least 1, but got 0"),
        ([1, -2], [1.0, 1.0], "at least 1, but got -2"),
        ([1, 2.0], [1.0, 1.0], r"at least 1, but got 2\.0"),
        ([1, 2], [1.0, -0.5], r"Expected backward_seconds to be finite and at least 0, but got -0\.5"),
        ([1, 2], [1.0, math.nan], "at least 0, but got nan"),
        ([1, 2], [1.0, math.inf], "at least 0, but got inf"),
    ],
)
def test_bad_layers_are_refused(
    function: Callable[..., object], numels: list[int], backward: list[float], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        function(numels, backward, COST)


@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1], [], [2]], [[0, 2], [1]], [[0, 1, 2], [2]], [[0, 1, 2, 3]], []])
def test_groups_that_are_not_all_layers_in_order_are_refused(groups: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="Expected groups to hold all layers 0 to 2 in order"):
        iteration_seconds(groups, [1, 1, 1], [1, 1, 1], COST)


def test_the_slow_ways_agree_with_each_other() -> None:
    # Costs as functions; what the tests above rest on.
    free: Seconds = lambda numel: 0.0  # noqa: E731
    assert simulated_seconds([[0], [1]], [1, 1], [1.0, 1.0], free, lambda numel: 5.0) == 11
    assert pareto_seconds([1, 1], [1.0, 1.0], free, lambda numel: 5.0) == 7
    assert len(list(groupings(12))) == 2048
