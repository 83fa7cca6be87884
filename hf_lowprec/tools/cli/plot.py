"""`hf-lowprec plot RUN …`: draw what training runs have logged, as a page and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_lowprec.tools.plotting.runs import Run

NAME = "hf_lowprec_plot"
SUFFIXES = (".html", ".png", ".svg")
_RESOLUTION = 130
"""Pixels per inch."""


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Output folders of training runs, checkpoints, or files (hf_lowprec_metrics.jsonl, "
            "trainer_state.json).",
            show_default=False,
        ),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"File to write, .html, .png or .svg; may be repeated. By default {NAME}.html and {NAME}.png, in the "
            "run's folder, or in the current folder for several runs."
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="Name of a run; once per run, in order. By default, the part in which the paths differ."),
    ] = None,
) -> None:
    """Draw loss, gradient norm, lost updates and more for one or several runs.

    Reads hf_lowprec_metrics.jsonl in a run's folder. For runs that have none,
    such as FP32 runs with the stock Trainer, it reads trainer_state.json of the
    folder or of its newest checkpoint. Several runs are drawn side by side, in
    the same axes.

    The page is one file, which opens offline. It also has the findings, the
    last numbers, the worst tensors and the precision report.
    """
    if find_spec("matplotlib") is None:
        typer.echo("hf-lowprec plot needs matplotlib: pip install 'hf-lowprec[plot]'", err=True)
        raise typer.Exit(1)
    for path in out or ():
        if path.suffix not in SUFFIXES:
            raise typer.BadParameter(
                f"{path} must end in one of {', '.join(SUFFIXES)}, which selects the format", param_hint="--out"
            )
    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError
    from hf_lowprec.tools.plotting.runs import load_runs

    try:
        loaded = load_runs(runs, label or ())
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    for run in loaded:
        _print_summary(run)
    typer.echo("Files written:")
    for path in out or _default_files(runs):
        try:
            write_plot(loaded, path)
        except OSError as error:
            raise typer.BadParameter(
                f"{path} cannot be written: {error.strerror}; name another file with --out", param_hint="--out"
            ) from None
        typer.echo(f"  {path}")


def _default_files(runs: Sequence[Path]) -> list[Path]:
    folder = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
    return [folder / f"{NAME}{suffix}" for suffix in (".html", ".png")]


def write_plot(runs: Sequence[Run], path: Path) -> None:
    """Write a page (`.html`) or a picture (`.png`, `.svg`), and the folder that it is to be in.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib

    from hf_lowprec.tools.plotting.figures import overview
    from hf_lowprec.tools.plotting.html_page import html_page

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(html_page(runs), encoding="utf-8")
    elif path.suffix == ".png":
        overview(runs).savefig(path, format="png", dpi=_RESOLUTION)
    else:
        with matplotlib.rc_context({"svg.hashsalt": "hf_lowprec"}):  # the same bytes every time
            overview(runs).savefig(path, format="svg", metadata={"Date": None})


def _print_summary(run: Run) -> None:
    """Print where a run was read, and the findings and notes of its log."""
    typer.echo(f"{run.name}: {run.last_step} steps, from {run.records.source}")
    for finding in run.findings():
        typer.echo(f"  step {finding.last_step}: {finding.message}")
    for note in run.notes():
        typer.echo(f"  {note}")


def require_matplotlib(path: Path | None) -> Path | None:
    """Refuse `--plot` of another command without matplotlib; a callback of typer, which names the option.

    Raises:
        typer.BadParameter: a file was given, and matplotlib is not installed.
    """
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("it needs matplotlib: pip install 'hf-lowprec[plot]'")
    return path
