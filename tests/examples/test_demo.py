"""The picture of the demo."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    for needed in ("matplotlib", "rich", "sklearn", "jsonargparse"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("demo")


def test_a_method_has_one_colour_in_all_panels(demo: Any, tmp_path: Path) -> None:
    def curves(*names: str) -> dict[str, list[tuple[int, float]]]:
        return {f"sparse/{name}": [(0, 0.5), (1, 0.25)] for name in ("density", "target_density", *names)}

    logged = {
        "dense": {"step_ms": [(0, 1.0)]},
        "union_topk": curves("padding_ratio"),  # has no threshold
        "exdyna": curves("padding_ratio", "threshold"),
        "topk": curves("padding_ratio"),
    }
    demo.plot(logged, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 0
    panels = [{line.get_label(): line.get_color() for line in axes.get_lines()} for axes in demo.plt.gcf().axes]
    demo.plt.close("all")
    assert [sorted(panel) for panel in panels] == [
        ["ExDyna", "Top-k", "UnionTopK", "target"],
        ["ExDyna"],
        ["ExDyna", "Top-k", "UnionTopK"],
    ]
    for panel in panels[1:]:
        assert {name: panels[0][name] for name in panel} == panel
    assert len(set(panels[0].values())) == 4
