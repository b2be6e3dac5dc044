"""What should each exchange take from its ranks, and give them? One entry of :data:`RELEASES` for each exchange.

Written with dictionaries, loops and sets; shares nothing with the library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tests.lockstep import Outcome, gave, sent
from tests.reference.merged import merge_up_a_tree, split_and_reduce


class Step(NamedTuple):
    """One step of all ranks."""

    outcome: Outcome
    accs: Tensor  # (n, numel)
    picks: list[Tensor]
    offers: list[dict[int, float]]
    k: int
    may_travel_twice: bool
    """Whether two ranks may name the same coordinate."""

    @classmethod
    def of(cls, outcome: Outcome, density: float, *, may_travel_twice: bool) -> Step:
        accs = torch.stack(outcome.accs)
        picks = [selection.indices[: int(selection.count)] for selection in outcome.selections]
        offers = [dict(zip(p.tolist(), acc[p].tolist(), strict=True)) for acc, p in zip(accs, picks, strict=True)]
        return cls(outcome, accs, picks, offers, max(1, int(density * accs.shape[1])), may_travel_twice)

    @property
    def n(self) -> int:
        return len(self.accs)

    @property
    def numel(self) -> int:
        return self.accs.shape[1]

    def close(self, expected: Tensor) -> None:
        """The average is as expected: exactly but for thirds, which are rounded."""
        torch.testing.assert_close(self.outcome.averages[0], expected, rtol=0, atol=1e-12 if self.n == 3 else 0)


Taken = Callable[[Step], list[Tensor]]


def own_picks(step: Step) -> list[Tensor]:
    """A rank contributes and forgets its own picks."""
    return step.picks


def all_picks(step: Step) -> list[Tensor]:
    """Every rank contributes and forgets its values at the picks of all."""
    return [union_of(step.outcome)] * step.n


def picks_of_the_leader(step: Step) -> list[Tensor]:
    """Every rank contributes and forgets its values at the picks of the rank whose turn it is."""
    return [step.picks[step.outcome.step % step.n]] * step.n


def common_picks(step: Step) -> list[Tensor]:
    """Every rank contributes and forgets its values at the picks that all have in common."""
    assert all(torch.equal(p, step.picks[0]) for p in step.picks)
    return [step.picks[0]] * step.n


def let_through(step: Step) -> list[Tensor]:
    """A rank contributes and forgets those of its picks that the owner of their region let through."""
    _, taken = split_and_reduce(step.offers, step.numel, step.k, step.outcome.step)
    return [torch.tensor(places).long() for places in taken]


def everything(step: Step) -> list[Tensor]:
    """All coordinates."""
    return [torch.arange(step.numel)] * step.n


def released_at(taken: Taken, step: Step) -> None:
    """Values travel as they are, at the coordinates that a rule gives for each rank."""
    outcome = step.outcome
    assert all(update.sent_values is None for update in outcome.updates)
    expected = torch.zeros_like(step.accs[0])
    for rank, places in enumerate(taken(step)):
        found = sent(outcome.updates[rank], step.numel).sort().values
        if step.may_travel_twice:
            found = found.unique()
        assert torch.equal(found, places)
        expected[places] += step.accs[rank, places]
    step.close(expected / step.n)


def merged_up_a_tree(step: Step) -> None:
    """A rank contributes its own picks, and what a rank dropped while merging comes back to it."""
    result, dropped = merge_up_a_tree(step.offers, keep=max(map(len, step.picks)))
    assert torch.equal(step.outcome.averages[0], vector(result, step.numel) / step.n)
    for offer, back, update, acc in zip(step.offers, dropped, step.outcome.updates, step.accs, strict=True):
        assert torch.equal(gave(update, acc), vector(offer, step.numel) - vector(back, step.numel))


def rounded_at_all_picks(step: Step) -> None:
    """As at all picks, rounded to half a step that the picks at a coordinate decide."""
    outcome, n, numel = step.outcome, step.n, step.numel
    union, exact = union_of(outcome), n == 1 or step.k == numel
    assert torch.equal(outcome.updates[0].indices.unique(), union)
    total, steps = torch.zeros(numel, dtype=torch.float64), steps_of(step.accs, step.picks)
    for update, acc in zip(outcome.updates, step.accs, strict=True):
        given, expected = gave(update, acc), torch.zeros(numel, dtype=torch.float64)
        expected[union] = acc[union] if exact else rounded(acc[union], steps[union], 32767 // n)
        assert torch.equal(given, expected)
        assert torch.equal(sent(update, numel).unique(), union if exact else given.nonzero().flatten())
        total += given
    step.close(total / n)


RELEASES: dict[str, Callable[[Step], None]] = {
    "gather_pairs": partial(released_at, own_picks),
    "reduce_union": partial(released_at, all_picks),
    "follow_leader": partial(released_at, picks_of_the_leader),
    "reduce_shared": partial(released_at, common_picks),
    "balanced": partial(released_at, let_through),
    "dense": partial(released_at, everything),
    "tree": merged_up_a_tree,
    "packed_union": rounded_at_all_picks,
}
"""By the exchange's name: checks a step."""


def steps_of(accs: Tensor, picks: list[Tensor]) -> Tensor:
    """(numel,) of what each coordinate that was picked is rounded to a multiple of."""
    most = 32767 // len(picks)
    steps, lowest = torch.zeros_like(accs[0]), 0.0
    for acc, places in zip(accs, picks, strict=True):
        magnitudes = acc[places].abs().tolist()
        largest = max(magnitudes, default=0.0)
        if largest == 0:
            continue
        top = 2.0 ** math.ceil(math.log2(largest / most))
        told = [top / 8.0 ** max(c for c in range(8) if x <= largest / 8.0**c) for x in magnitudes]
        steps[places] = torch.maximum(steps[places], torch.tensor(told, dtype=torch.float64))
        lowest = max(lowest, min(told))
    raised = torch.where(steps > 0, steps * 2.0 ** max(0, most.bit_length() - 7), math.inf).clamp(max=lowest)
    return torch.maximum(steps, raised).clamp(min=torch.finfo(torch.float64).tiny)  # all that was picked is zero


def rounded(values: Tensor, steps: Tensor, most: int) -> Tensor:
    """The nearest multiples, of which there are ``most`` on either side of zero."""
    return (values / steps).round().clamp(-most, most) * steps


def union_of(outcome: Outcome) -> Tensor:
    """The union of picks; of more than the limit, evenly as many, spare ones last, and others in each step."""
    firsts, spares, limit = set(), set(), outcome.selections[0].limit
    for selection in outcome.selections:
        picks = selection.indices[: int(selection.count)].tolist()
        extra = [False] * len(picks) if selection.spare is None else selection.spare.tolist()
        for place, is_spare in zip(picks, extra, strict=False):
            (spares if is_spare else firsts).add(place)
    spares -= firsts
    if limit is None:
        return torch.tensor(sorted(firsts | spares), dtype=torch.int64)
    kept = evenly(sorted(firsts), limit, outcome.step)
    return torch.tensor(sorted(kept + evenly(sorted(spares), limit - len(kept), outcome.step)), dtype=torch.int64)


def evenly(places: list[int], room: int, phase: int) -> list[int]:
    """All, or as many as there is room for."""
    total = len(places)
    return [p for i, p in enumerate(places, 1) if total <= room or (i * room + phase) % total < room]


def vector(sparse: dict[int, float], numel: int) -> Tensor:
    """(numel,) a sparse vector with all its zeros."""
    dense = torch.zeros(numel, dtype=torch.float64)
    for place, value in sparse.items():
        dense[place] = value
    return dense
