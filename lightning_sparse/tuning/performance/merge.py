"""Merge layers to groups, for the shortest step.

A message for each layer overlaps best with backward, but each message has its price; one message for all pays once and
overlaps with nothing. There are ``2 ** (L - 1)`` ways to cut L layers into groups of neighbours.

The model of one iteration is that of :mod:`~lightning_sparse.tuning.performance.cost`. :class:`OptimalMerge` merges
layers by a given profile.

Layers are given in the order in which backward finishes them, the model's last layer first.

References:
    Shi et al., MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms, INFOCOM 2019, arXiv
    1811.11141. Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on
    GPUs (OMGS-SGD), INFOCOM 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

from lightning_sparse.core.checks import check_number, expect, is_integer
from lightning_sparse.methods.grouping import GROUPINGS, Cut, Grouping, Model, ParameterSize
from lightning_sparse.methods.grouping.groupings import join
from lightning_sparse.tuning.performance.cost import CostModel, Progress, end_seconds
from lightning_sparse.tuning.performance.profile import Profile

MergeRule = Literal["optimal", "published"]
"""Rule to merge layers: the exact optimum, or OMGS-SGD's greedy rule."""


def iteration_seconds(
    groups: Sequence[Sequence[int]], numels: Sequence[int], backward_seconds: Sequence[float], cost: CostModel
) -> float:
    """Return the seconds from the start of backward to the end of the last exchange.

    Args:
        groups: layers of each group, by position; neighbours, and all layers in order.
        numels: coordinates of each layer, in the order of backward.
        backward_seconds: of each layer.
        cost: of selections and exchanges.

    Raises:
        ValueError: if there are no layers, lengths differ, a number is outside its range, or groups are not all layers
            in order.

    Example:
        Merging the first two layers saves a message, but the last exchange starts later.

        >>> from lightning_sparse.tuning.performance.cost import CostModel, Line
        >>> cost = CostModel(exchange=Line(alpha=3, beta=1))
        >>> [iteration_seconds(groups, [2, 1, 1], [1, 2, 3], cost) for groups in ([[0, 1], [2]], [[0], [1, 2]])]
        [13.0, 11.0]
    """
    _check_layers(numels, backward_seconds)
    if [layer for group in groups for layer in group] != list(range(len(numels))) or not all(groups):
        raise ValueError(
            f"Expected groups to hold all layers 0 to {len(numels) - 1} in order, each group at least one, "
            f"but got {[list(group) for group in groups]}."
        )
    sizes = [sum(numels[layer] for layer in group) for group in groups]
    seconds = [sum(backward_seconds[layer] for layer in group) for group in groups]
    return end_seconds((sizes, seconds), [cost] * len(groups))


def optimal_merge(numels: Sequence[int], backward_seconds: Sequence[float], cost: CostModel) -> list[list[int]]:
    """Return the groups with the shortest iteration, exactly; of equally short ones, the fewest groups.

    Unrolled, the iteration ends at ``max_j (ready_j + sum_{i >= j} exchange_i)`` over groups j: from some group on, the
    network never waits. Consider the layers from ``first`` on, cut into g groups, with time from the start of their
    backward:

    - Their exchanges take ``network = g alpha + beta * numel`` together, for any cuts, because the exchange costs a
      straight line.
    - They end at ``E = compute + max(network, E_rest)``. ``compute`` is backward and selection of the first group,
      and ``E_rest`` the end of the groups after it, from the start of *their* backward.

    E grows with ``E_rest`` and depends on nothing else of the later cuts. For each (first, g) the smallest E is
    therefore enough, and no grouping is missed, for any cost of selection. From the front this does not work: there,
    both ``ready`` and ``done`` matter, and neither orders the groupings.

    It takes ``L ** 3 / 3`` operations in numpy; 500 layers take a fraction of a second.

    Args:
        numels: coordinates of each layer, at least 1, in the order of backward.
        backward_seconds: of each layer, at least 0.
        cost: of selections and exchanges; without selection, the layers are merged for dense training.

    Returns:
        Positions of layers, by group.

    Raises:
        ValueError: if there are no layers, lengths differ or a number is outside its range.

    Example:
        >>> from lightning_sparse.tuning.performance.cost import CostModel, Line
        >>> optimal_merge([2, 1, 1], [1, 2, 3], CostModel(exchange=Line(alpha=3, beta=1)))
        [[0], [1, 2]]
    """
    _check_layers(numels, backward_seconds)
    layers = len(numels)
    before = [0, *accumulate(numels)]
    elapsed = np.array([0.0, *accumulate(backward_seconds)])
    # By number of groups and first layer; rows are contiguous over the searched end of the first group.
    ends = np.full((layers + 1, layers + 1), np.inf)
    ends[0, layers] = 0.0
    cuts = np.zeros((layers + 1, layers + 1), dtype=np.int64)
    for first in reversed(range(layers)):
        left = layers - first
        selection = [cost.select_seconds(before[end] - before[first]) for end in range(first + 1, layers + 1)]
        compute = elapsed[first + 1 :] - elapsed[first] + np.array(selection)
        network = cost.exchange.alpha * np.arange(1, left + 1) + cost.exchange.beta * (before[-1] - before[first])
        tried = np.maximum(ends[:left, first + 1 :], network[:, None]) + compute
        best = tried.argmin(1)
        ends[1 : left + 1, first] = tried[np.arange(left), best]
        cuts[1 : left + 1, first] = first + 1 + best
    groups: list[list[int]] = []
    first = 0
    for remaining in range(int(ends[:, 0].argmin()), 0, -1):
        end = int(cuts[remaining, first])
        groups.append(list(range(first, end)))
        first = end
    return groups


def greedy_merge(numels: Sequence[int], backward_seconds: Sequence[float], cost: CostModel) -> list[list[int]]:
    """Return the groups of the published rule, which are not always the best.

    Layers are taken in the order of backward. With t and x for backward and coordinates of the group so far, y for the
    coordinates of the next layer, ``start`` for the start of the group's exchange if it were closed now, and u for the
    time at which the next layer's backward would end if the group were not closed, two groups are merged if

    - ``u + select(x) + select(y) < start + exchange(x)`` (the next message would wait for the network), and
    - ``u + select(x + y) < start + alpha`` (a common message starts before a second one could).

    Without selection, this is MG-WFBP. The rule is optimal for two layers, but not for more: a merge delays the
    following layers, and may prevent a better merge with the next. See :func:`optimal_merge`.

    Args:
        numels: coordinates of each layer, at least 1, in the order of backward.
        backward_seconds: of each layer, at least 0.
        cost: of selections and exchanges.

    Returns:
        Positions of layers, by group.

    Raises:
        ValueError: if there are no layers, lengths differ or a number is outside its range.

    Example:
        >>> from lightning_sparse.tuning.performance.cost import CostModel, Line
        >>> greedy_merge([2, 1, 1], [1, 2, 3], CostModel(exchange=Line(alpha=3, beta=1)))
        [[0, 1], [2]]

    References:
        OMGS-SGD, algorithm 1.
    """
    _check_layers(numels, backward_seconds)
    select = cost.select_seconds
    groups = [[0]]
    before = Progress()  # with the closed groups
    size, backward = numels[0], float(backward_seconds[0])
    for layer in range(1, len(numels)):
        numel, seconds = numels[layer], backward_seconds[layer]
        closed = before.after(size, backward, cost)
        start = max(closed.ready, before.done)
        available = before.ready + backward + seconds
        waits = available + select(size) + select(numel) < closed.done
        sooner = available + select(size + numel) < start + cost.exchange.alpha
        if waits and sooner:
            groups[-1].append(layer)
            size, backward = size + numel, backward + seconds
        else:
            before = closed
            groups.append([layer])
            size, backward = numel, float(seconds)
    return groups


def _check_layers(numels: Sequence[int], backward_seconds: Sequence[float]) -> None:
    layers, times = len(numels), len(backward_seconds)
    if not layers:
        raise ValueError("Expected at least one layer, but got none.")
    if layers != times:
        raise ValueError(f"Expected one time of backward for each layer, but got {layers} layers and {times} times.")
    for numel in numels:
        expect(is_integer(numel) and numel >= 1, "numels", "integers of at least 1", numel)
    for seconds in backward_seconds:
        check_number(seconds, "backward_seconds", "finite and at least 0")


@GROUPINGS.register
@dataclass(frozen=True)
class OptimalMerge(Grouping):
    """Layers, merged for the shortest step of a given profile, where exchanges hide behind backward.

    A setting of training with ``overlap=True``: the first steps are timed, with all layers in one group, and then
    layers are merged by these times, exactly (:func:`optimal_merge`). Without overlap it is refused: nothing hides
    there. With a given profile, :func:`~lightning_sparse.methods.grouping.make_plan` merges layers by it, and
    :meth:`.Engine.regroup` takes such a plan.

    Args:
        rule: "optimal", or "published" for the greedy rule of OMGS-SGD, which is not always the best.

    Raises:
        ValueError: for an unknown rule.

    Example:
        >>> import lightning_sparse as ls
        >>> ls.SparseDDPStrategy(grouping=ls.tuning.OptimalMerge())
        Traceback (most recent call last):
        ...
        ValueError: Expected grouping to be one such as MergeBelow(8192), but got OptimalMerge(rule='optimal'), ...

    References:
        Shi et al., Communication-Efficient Distributed Deep Learning with Merged Gradient Sparsification on GPUs
        (OMGS-SGD), INFOCOM 2020.
    """

    rule: MergeRule = "optimal"

    def __post_init__(self) -> None:
        rules = get_args(MergeRule)
        expect(self.rule in rules, "rule", f"one of {', '.join(map(repr, rules))}", self.rule)

    needs_profile = True

    def cut(self, parameters: Sequence[ParameterSize], bucket_cap_mb: float) -> Cut:
        """Return one group: nothing is known of layers without a profile."""
        return Model().cut(parameters, bucket_cap_mb)

    def cut_by(
        self, profile: Profile, density: float, parameters: Sequence[ParameterSize], bucket_cap_mb: float
    ) -> Cut:
        """Merge the layers that own these parameters.

        Raises:
            ValueError: if the profile does not know a parameter.
        """
        wanted = {p.name: p for p in parameters}
        layers: Cut = []
        seconds: list[float] = []
        passed = 0.0
        for layer, taken in zip(profile.layers, profile.delivery_seconds, strict=True):
            passed += taken
            if members := [wanted.pop(name) for name in layer.parameters if name in wanted]:
                layers.append((layer.name, members))
                seconds.append(passed)
                passed = 0.0
        if wanted:
            raise ValueError(f"The profile does not know the parameters {', '.join(list(wanted)[:5])}.")
        if not layers:
            return []
        numels = [max(1, sum(p.numel for p in members)) for _, members in layers]
        merge = {"optimal": optimal_merge, "published": greedy_merge}[self.rule]
        return join(layers, merge(numels, seconds, profile.cost(density)))
