"""Measurements in files: what they were, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_sparse.tools.advisor.prediction import Measured
from tests.tools.advisor.made_up import measured


def without(key: str) -> Any:
    def change(plain: dict[str, Any]) -> Any:
        del plain[key]
        return plain

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(without(key) for key in ("layers", "rest_seconds", "network", "costs", "overlap")),
        without("bucket_numels"),
        lambda plain: plain | {"costs": [{"density": 0.1}]},
        lambda plain: plain | {"layers": [["m", ["m.p"], 1]]},
        lambda plain: plain | {"layers": 3},
        lambda plain: plain | {"network": {"all_reduce": {"alpha": 1.0}}},
        lambda plain: plain | {"network": plain["network"] | {"ranks": 0}},
        lambda plain: plain | {"overlap": "some"},
        lambda plain: None,
        lambda plain: [1, 2],
    ],
)
def test_what_is_no_measurement_is_refused(change: Any) -> None:
    seen = measured()
    plain = json.loads(json.dumps(seen.as_dict()))
    assert Measured.from_dict(plain).as_dict() == seen.as_dict()
    plain["profile"] = change(plain["profile"])
    with pytest.raises(ValueError, match="Expected a measured as"):
        Measured.from_dict(plain)
