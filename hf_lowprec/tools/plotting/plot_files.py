"""The files that a plot of runs is written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from hf_lowprec.tools.plotting.figures import overview
from hf_lowprec.tools.plotting.html_page import html_page
from hf_lowprec.tools.plotting.runs import Run

_RESOLUTION = 130
"""Pixels per inch."""


def write_plot(runs: Sequence[Run], path: Path) -> None:
    """Write a page (`.html`) or a picture (`.png`, `.svg`), and the folder that it is to be in.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(html_page(runs), encoding="utf-8")
    elif path.suffix == ".png":
        overview(runs).savefig(path, format="png", dpi=_RESOLUTION)
    else:
        with matplotlib.rc_context({"svg.hashsalt": "hf_lowprec"}):  # the same bytes every time
            overview(runs).savefig(path, format="svg", metadata={"Date": None})
