"""Colours of the plots, light and dark. The colour-blind can tell the runs apart (after Okabe and Ito)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours as `#rrggbb`. All of a theme differ, because the page finds them by their value.

    Attributes:
        page: the background.
        ink: titles.
        faint: labels, axes and explanations.
        grid: lines behind the data.
        runs: one colour per run.
    """

    page: str
    ink: str
    faint: str
    grid: str
    runs: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """The name of each colour as a CSS variable."""
        runs = {f"--run-{k}": colour for k, colour in enumerate(self.runs)}
        return {"--page": self.page, "--ink": self.ink, "--faint": self.faint, "--grid": self.grid, **runs}


LIGHT = Theme(
    "#ffffff", "#1f2328", "#6b7280", "#e5e7eb", ("#0072b2", "#c24e00", "#007f5c", "#9c3f8f", "#8a6100", "#3b4252")
)
DARK = Theme(
    "#14171c", "#e6e9ef", "#a0a7b4", "#343a46", ("#6cc0f5", "#ff9a5a", "#3fd0a0", "#e59ad8", "#e3b93c", "#f2f4f8")
)
DASHES = ("solid", "dashed", "dotted")
"""After the last colour, the first comes again with the next of these."""


def run_colour(theme: Theme, run: int) -> str:
    return theme.runs[run % len(theme.runs)]


def run_dash(run: int) -> str:
    return DASHES[run // len(LIGHT.runs) % len(DASHES)]
