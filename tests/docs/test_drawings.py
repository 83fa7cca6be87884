"""The drawings in docs/images are what their scripts draw from the code as it is."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
MATPLOTLIBS_OWN = re.compile(r"^(figure|axes|patch|line2d|text|matplotlib|xtick|ytick|PolyCollection|FillBetween)")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of `make drawings` into another folder."""
    folder = tmp_path_factory.mktemp("drawings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["docs/drawings", str(folder)])
        runpy.run_path(str(ROOT / "docs" / "drawings"), run_name="__main__")
    return folder


def plotted(path: Path) -> dict[str, list[float]]:
    """The coordinates, in points, of everything in an SVG that the scripts have named."""
    found: dict[str, list[float]] = {}
    for group in ElementTree.parse(path).iter(f"{SVG}g"):
        name = group.get("id", "")
        if name and not MATPLOTLIBS_OWN.match(name):
            shapes = [*group.iter(f"{SVG}path"), *group.iter(f"{SVG}use")]
            text = " ".join(f"{s.get('d', '')} {s.get('x', '')} {s.get('y', '')}" for s in shapes)
            found.setdefault(name, []).extend(map(float, re.findall(r"-?\d+\.?\d*", text)))
    return found


@pytest.mark.every_case
def test_every_drawing_is_there_for_both_themes(drawn: Path) -> None:
    names = {path.name for path in drawn.iterdir()}
    assert names == {path.name for path in IMAGES.glob("*.svg")}
    assert {name.replace("-dark.svg", ".svg") for name in names if name.endswith("-dark.svg")} == {
        name for name in names if not name.endswith("-dark.svg")
    }


@pytest.mark.every_case
@pytest.mark.parametrize("name", sorted(path.name for path in IMAGES.glob("*.svg")))
def test_the_data_is_what_the_code_computes(name: str, drawn: Path) -> None:
    """To within half a point, the width of a thin line: matplotlib's versions differ in bytes and not in places."""
    committed, now = plotted(IMAGES / name), plotted(drawn / name)
    assert committed, "nothing in the drawing has a name to compare by"
    assert committed.keys() == now.keys()
    for part, values in committed.items():
        assert now[part] == pytest.approx(values, abs=0.5, rel=0), part


@pytest.mark.every_case
def test_no_text_is_cut_at_the_edge_of_a_drawing(drawn: Path) -> None:
    matplotlib, style = sys.modules["matplotlib"], sys.modules["style"]
    for name in {path.stem.removesuffix("-dark").replace("-", "_") for path in drawn.iterdir()}:
        with matplotlib.rc_context(style.RC):
            figure = sys.modules[name].draw(style.LIGHT)
            figure.draw_without_rendering()
            x0, y0, x1, y1 = figure.get_tightbbox().extents * figure.dpi
        assert min(x0, y0) >= 0 and x1 <= figure.bbox.x1 and y1 <= figure.bbox.y1, name


def test_every_drawing_is_on_a_page_with_a_description() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for path in IMAGES.glob("*.svg"):
        theme = "only-dark" if path.stem.endswith("-dark") else "only-light"
        assert re.search(rf"!\[[^\]]{{40,}}\]\([./]*images/{path.name}#{theme}\)", pages), path.name
