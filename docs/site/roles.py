"""A Griffe extension: references in docstrings, written as in Sphinx, become code.

``:class:`~lightning_sparse.MiCRO``` is read as ``MiCRO``. Docstrings are for ``help()`` first, which knows no links.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)(?:[^`<]*<)?([\w.]+)>?`")
DOUBLE = re.compile(r"``([^`]+)``")


def plain(text: str) -> str:
    """A docstring without roles, and with single backticks."""
    text = ROLE.sub(lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2]}`", text)
    return DOUBLE.sub(r"`\1`", text)


class PlainRoles(Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
