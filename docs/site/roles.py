"""A Griffe extension: docstrings, which are for ``help()`` first, in the form that the site expects.

References as in Sphinx become code, such as ``MiCRO``. A section ``Example`` becomes ``Examples``, which is what Griffe
reads as a session of Python.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):`(~?)(?:[^`<]*<)?([\w.]+)>?`")
DOUBLE = re.compile(r"``([^`]+)``")


def plain(text: str) -> str:
    """A docstring without roles, with single backticks and with sections that Griffe knows."""
    text = ROLE.sub(lambda found: f"`{found[2].rpartition('.')[2] if found[1] else found[2].lstrip('.')}`", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    return DOUBLE.sub(r"`\1`", text)


class PlainRoles(Extension):
    """Rewrites each docstring when its object has been read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)
