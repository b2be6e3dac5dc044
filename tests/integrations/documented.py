"""Names of logged quantities, as docs/reference/metrics.md has them."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def documented(under: str) -> list[str]:
    """Names below ``<under>/`` in a table."""
    found = re.findall(rf"^\| `{re.escape(under)}/(\w+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert found
    return found
