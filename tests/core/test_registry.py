"""How a name finds its class, and a typo its cure."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import lightning_sparse as ls
from lightning_sparse.core.registry import Registry


class Fruit:
    pass


@pytest.fixture
def fruits() -> Registry:
    registry = Registry("fruit", Fruit)

    @registry.register
    class Apple(Fruit):
        pass

    @registry.register
    @dataclass(frozen=True)
    class BloodOrange(Fruit):
        juicy: bool = True

    @registry.register
    class HTTPBerry(Fruit):
        name = "berry"

    return registry


def test_classes_are_known_by_their_snake_case_name_or_their_name_attribute(fruits: Registry) -> None:
    assert [name for name, _ in fruits.items()] == ["apple", "blood_orange", "berry"]


@pytest.mark.parametrize("name", ["blood_orange", "BloodOrange", "bloodorange", "blood-orange", "BLOOD_ORANGE"])
def test_case_underscores_and_hyphens_do_not_matter(fruits: Registry, name: str) -> None:
    orange = fruits.resolve(name)
    assert type(orange).__name__ == "BloodOrange"
    assert orange.juicy


def test_an_instance_resolves_to_itself_even_if_never_registered(fruits: Registry) -> None:
    class Quince(Fruit):
        pass

    quince = Quince()
    assert fruits.resolve(quince) is quince
    assert fruits.name_of(quince) == "Quince"
    assert fruits.name_of(fruits.resolve("berry")) == "berry"


def test_a_typo_is_answered_with_what_is_close_and_what_is_known(fruits: Registry) -> None:
    with pytest.raises(
        ValueError, match=r"Unknown fruit 'appel'\. Did you mean 'apple'\? Known names: apple, berry, bl"
    ):
        fruits.resolve("appel")


def test_a_name_that_is_like_no_other_gets_the_list_without_a_guess(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"Unknown fruit 'xyz'\. Known names: apple, berry, blood_orange\.$"):
        fruits.resolve("xyz")


def test_a_class_is_answered_with_how_to_write_an_instance(fruits: Registry) -> None:
    with pytest.raises(ValueError, match=r"got the class Apple: write Apple\(\)"):
        fruits.resolve(dict(fruits.items())["apple"])


def test_a_class_that_needs_settings_says_which(fruits: Registry) -> None:
    @fruits.register
    class Melon(Fruit):
        def __init__(self, weight: float, *, seeds: int, ripe: bool = True, **other: object) -> None: ...

    with pytest.raises(ValueError, match=r"Fruit 'melon' needs settings: write Melon\(weight=\.\.\., seeds=\.\.\.\)\."):
        fruits.resolve("melon")


@pytest.mark.parametrize("name", ["BloodOrange", "Bloodorange"])
def test_a_name_that_another_class_has_is_refused(fruits: Registry, name: str) -> None:
    with pytest.raises(ValueError, match=rf"name of its own for the fruit {name}, but 'blood_orange' is"):
        fruits.register(type(name, (Fruit,), {}))
    assert fruits.resolve("blood_orange").juicy


def test_a_class_that_is_defined_once_more_takes_its_own_place(fruits: Registry) -> None:
    def define() -> type:
        class Plum(Fruit):
            pass

        return fruits.register(Plum)

    define()
    again = define()
    assert type(fruits.resolve("plum")) is again


@pytest.mark.parametrize("given", [None, 3, ["apple"], int])
def test_anything_else_is_answered_with_what_is_expected(fruits: Registry, given: object) -> None:
    with pytest.raises(ValueError, match=r"Expected a fruit or its name, but got .* Known names: apple"):
        fruits.resolve(given)


def test_names_of_the_library() -> None:
    assert {name: cls.__name__ for name, cls in ls.sparsifiers.SPARSIFIERS.items()}.items() >= {
        ("top_k", "TopK"),
        ("hard_threshold", "HardThreshold"),
        ("micro", "MiCRO"),
        ("exdyna", "ExDyna"),
        ("everything", "Everything"),
    }
    assert ls.sparsifiers.SPARSIFIERS.resolve("Top_K") == ls.sparsifiers.TopK()
    assert ls.sparsifiers.SPARSIFIERS.resolve("ExDyna") == ls.sparsifiers.ExDyna()
    assert ls.exchanges.EXCHANGES.resolve("GatherPairs") == ls.exchanges.GatherPairs()
    with pytest.raises(ValueError, match=r"Unknown sparsifier 'exdina'\. Did you mean 'exdyna'"):
        ls.sparsifiers.SPARSIFIERS.resolve("exdina")
