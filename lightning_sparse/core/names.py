"""Names of parameters and modules, which stay the same when layers are compiled or checkpointed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.nn import Module, Parameter

_WRAPPERS = r"(?:(?:_orig_mod|_checkpoint_wrapped_module)(?:\.|$))+"
"""What ``torch.compile`` and ``checkpoint_wrapper`` put into names; torch's own state dicts leave it out, too."""
_IN_NAMES = re.compile(rf"(?:^|(?<=\.)){_WRAPPERS}")
_IN_PATTERNS = re.compile(rf"(?:^|(?<=[^]*?]\.)){_WRAPPERS}")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without those of wrappers.

    Example:
        >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.weight"), plain_name("not_orig_mod.weight")
        ('blocks.0.weight', 'not_orig_mod.weight')
    """
    return _IN_NAMES.sub("", name).removesuffix(".")


def named_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Iterate over a module and those within it, by plain names."""
    return ((plain_name(name), one) for name, one in module.named_modules())


def plain_pattern(pattern: str) -> str:
    """Return a pattern of names without those of wrappers, but for those behind a wildcard, which would match all.

    Example:
        >>> plain_pattern("_orig_mod.head.*"), plain_pattern("*._orig_mod.*")
        ('head.*', '*._orig_mod.*')
    """
    return _IN_PATTERNS.sub("", pattern)


def named_parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters of a module by name, in order of registration: the only names that engines know.

    No two get the same one: a wrapper has one child and no parameters of its own.
    """
    return {plain_name(name): p for name, p in module.named_parameters()}
