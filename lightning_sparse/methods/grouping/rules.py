"""Rules that select the parameters to sparsify, and those with a density of their own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from lightning_sparse.core.checks import Settings, check_integer
from lightning_sparse.core.names import plain_pattern
from lightning_sparse.methods.density import check_density


@dataclass(frozen=True)
class Rules(Settings):
    """Rules that select the parameters to keep dense, and those with a density of their own.

    By default, parameters with fewer than 2 dimensions (biases, scales of normalisation layers) and parameters with
    fewer than 256 coordinates stay dense: they are a small share of the bytes, and training is sensitive to them.

    Names decide before sizes. Patterns are shell-style, case-sensitive, and match whole names as ``named_parameters()``
    gives them, without what ``torch.compile`` and activation checkpointing add; each must match a parameter, and none
    may be matched by ``dense`` and by one of the other two.

    Args:
        dense: patterns of parameters that stay dense.
        sparse: patterns of parameters that are sparsified at any size.
        densities: densities in (0, 1] by pattern, for parameters that do not follow the schedule; the first pattern
            that matches counts. They are sparsified at any size; at 1.0 they are sent as a whole.
        dense_ndim: parameters with fewer dimensions stay dense, at least 0; 0 switches this off.
        dense_numel: parameters with fewer coordinates stay dense, at least 0; 0 switches this off.

    Raises:
        ValueError: if a setting is of another kind or outside its range.

    Example:
        >>> rules = Rules(dense=["head.*"], densities={"embed*": 0.001}, dense_numel=1000)
        >>> [rules.keeps_dense(name, numel, ndim) for name, numel, ndim in
        ...  [("conv.weight", 4000, 4), ("conv.bias", 2000, 1), ("head.weight", 4000, 2), ("embed.scale", 1, 0)]]
        [False, True, True, False]
        >>> rules.density_of("embed.weight"), rules.density_of("conv.weight")
        (0.001, None)
    """

    dense: Sequence[str] = ()
    sparse: Sequence[str] = ()
    densities: Mapping[str, float] = field(default_factory=dict, hash=False)
    dense_ndim: int = 2
    dense_numel: int = 256

    def __post_init__(self) -> None:
        for name in ("dense", "sparse"):
            object.__setattr__(self, name, _patterns(name, getattr(self, name)))
        object.__setattr__(self, "densities", _densities(self.densities))
        for name in ("dense_ndim", "dense_numel"):
            check_integer(getattr(self, name), name, least=0)

    def also_dense(self, patterns: Sequence[str]) -> Rules:
        """Return these rules with more patterns of parameters that stay dense."""
        return replace(self, dense=(*self.dense, *_patterns("dense", patterns)))

    def keeps_dense(self, name: str, numel: int, ndim: int) -> bool:
        """Return True if a parameter stays dense."""
        if _first_match(name, self.dense) is not None:
            return True
        if _first_match(name, [*self.sparse, *self.densities]) is not None:
            return False
        return ndim < self.dense_ndim or numel < self.dense_numel

    def density_of(self, name: str) -> float | None:
        """Return a parameter's own density, in (0, 1]; None: the schedule's."""
        pattern = _first_match(name, self.densities)
        return None if pattern is None else self.densities[pattern]

    def check(self, names: Sequence[str]) -> None:
        """Check the patterns against the parameters of a model.

        Raises:
            ValueError: if a pattern matches no parameter, or a parameter is to be dense and sparsified.
        """
        for setting in ("dense", "sparse", "densities"):
            for pattern in getattr(self, setting):
                if not any(fnmatchcase(name, pattern) for name in names):
                    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3)
                    hint = f" Names that are close: {', '.join(close)}." if close else ""
                    raise ValueError(f"The pattern {pattern!r} in {setting} matches no parameter.{hint}")
        for name in names:
            one = _first_match(name, self.dense)
            for setting in ("sparse", "densities"):
                other = _first_match(name, getattr(self, setting))
                if one is not None and other is not None:
                    raise ValueError(
                        f"Expected every parameter to stay dense or to be sparsified, but {name!r} is matched by "
                        f"{one!r} in dense and by {other!r} in {setting}."
                    )

    def reasons(self) -> str:
        """Return the reasons for which parameters stay dense, in words; empty if none does.

        Example:
            >>> Rules(dense=["*.scale"]).reasons()
            'fewer than 2 dimensions, fewer than 256 coordinates or named'
        """
        reasons = [f"fewer than {self.dense_ndim} dimensions"] if self.dense_ndim else []
        reasons += [f"fewer than {self.dense_numel} coordinates"] if self.dense_numel else []
        reasons += ["named"] if self.dense else []
        return " or ".join([", ".join(reasons[:-1]), reasons[-1]] if len(reasons) > 1 else reasons)


def as_rules(rules: Rules | None, dense: Sequence[str] = ()) -> Rules:
    """Return the rules (None: the default ones) with more patterns of parameters that stay dense.

    Raises:
        ValueError: unless these are rules and patterns.
    """
    if rules is None:
        rules = Rules()
    if not isinstance(rules, Rules):
        raise ValueError(f"Expected rules to be Rules, such as Rules(dense=['*.bias']), but got {rules!r}.")
    return rules.also_dense(dense)


def _first_match(name: str, patterns: Sequence[str] | Mapping[str, Any]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _patterns(setting: str, given: Any) -> tuple[str, ...]:
    """Return patterns as a tuple; a single text is one pattern."""
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"Expected {setting} to be patterns of parameter names, such as ['*.bias'], but got {given!r}."
        )
    return tuple(map(plain_pattern, patterns))


def _densities(given: Any) -> dict[str, float]:
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(
            "Expected densities to be a mapping from patterns of parameter names to densities, such as "
            f"{{'embed*': 0.001}}, but got {given!r}."
        )
    checked = {pattern: check_density(density, f"densities[{pattern!r}]") for pattern, density in given.items()}
    return {plain_pattern(pattern): density for pattern, density in checked.items()}
