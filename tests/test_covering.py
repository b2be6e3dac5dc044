"""What runs by default of a product covers it pair by pair, and nothing of it is lost."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests import covering as module
from tests.covering import covering, in_one_test, in_turns


@pytest.fixture(autouse=True)
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "everything", True)


def by_default(parameters: list[Any]) -> list[tuple[Any, ...]]:
    return [p.values for p in parameters if not p.marks]


def test_each_two_values_meet_in_few_cells() -> None:
    axes = range(9), "abcde", (True, False), (1.0, 2.0, 3.0)
    cells = list(product(*axes))
    chosen = by_default(covering(cells))
    for one, other in combinations(range(4), 2):
        assert {(cell[one], cell[other]) for cell in chosen} == set(product(axes[one], axes[other]))
    assert 9 * 5 <= len(chosen) <= 1.25 * 9 * 5  # each number with each letter takes 45
    assert chosen == by_default(covering(cells))


def test_the_rest_is_thorough_and_all_is_there() -> None:
    cells = [(*pair, number) for pair in [("x", "t"), ("x", "u"), ("y", "u")] for number in range(5)]
    parameters = covering(cells, thorough={4})
    assert [p.values for p in parameters] == cells
    assert {mark.name for p in parameters for mark in p.marks} == {"thorough"}
    chosen = by_default(parameters)
    assert {cell[:2] for cell in chosen} == {("x", "t"), ("x", "u"), ("y", "u")}
    assert {cell[2] for cell in chosen} == {0, 1, 2, 3}
    assert parameters[0].id == "x-t-0"


def test_each_value_alone_takes_as_many_cells_as_the_longest_axis_has_values() -> None:
    chosen = by_default(covering(in_turns("abcdef", range(3)), together=1))
    assert chosen == [("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 1), ("f", 2)]


def test_two_values_meet_beside_one_that_is_not_trivial() -> None:
    cells = list(product("abc", "uv", [1, 2, 3]))
    chosen = by_default(covering(cells, trivial={1}))
    assert {cell[:2] for cell in chosen if cell[2] > 1} == set(product("abc", "uv"))
    for axis, letters in enumerate(("abc", "uv")):
        assert {cell[axis] for cell in chosen if cell[2] == 1} == set(letters)
    assert len(chosen) < len(cells)


def test_cells_may_be_seen_as_something_else() -> None:
    cells = product(range(4), "ab")
    chosen = by_default(covering(cells, together=1, seen_as=lambda number, letter: (number % 2, letter)))
    assert chosen == [(0, "a"), (1, "b")]


def test_what_a_run_leaves_out_is_not_even_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = list(product(range(4), "ab", (True, False)))
    chosen = by_default(covering(cells))
    monkeypatch.setattr(module, "everything", False)
    assert [p.values for p in covering(cells)] == chosen != cells


ran: list[tuple[str, int]] = []


@pytest.mark.parametrize("part", ["names", "marks"])
def test_cells_are_looped_over_and_the_one_that_fails_is_named(part: str) -> None:
    def test(letter: str, number: int, part: str) -> None:
        assert part == "fixture"
        ran.append((letter, number))
        assert (letter, number) != ("b", 2)

    cells = covering(((letter, number) for letter in "ab" for number in (1, 2, 3)), thorough={3})
    decorated = in_one_test("letter, number", cells)(test)
    [mark] = decorated.pytestmark
    assert mark.args[0] == "cells"
    if part == "marks":
        named = [(p.id, {mark.name for mark in p.marks}) for p in mark.args[1]]
        assert named == [("a", set()), ("a-3", {"thorough"}), ("b", set()), ("b-3", {"thorough"})]
        [mark] = in_one_test("letter, number", cells, apart=0)(test).pytestmark
        assert [p.id for p in mark.args[1]] == ["all", "a-3", "b-3"]
        return
    ran.clear()
    first, rest, second, _ = (p.values[0] for p in mark.args[1])
    decorated(cells=first, part="fixture")
    decorated(cells=rest, part="fixture")
    assert ran == [("a", 1), ("a", 2), ("a", 3)]
    with pytest.raises(AssertionError) as caught:
        decorated(cells=second, part="fixture")
    assert caught.value.__notes__ == ["This was the cell b-2."]
