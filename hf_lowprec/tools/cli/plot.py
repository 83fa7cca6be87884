"""`hf-lowprec plot RUN …`: draw what training runs have logged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

NAME = "hf_lowprec_plot.png"


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Output folders of training runs, checkpoints, or trainer_state.json files.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"File to write. By default {NAME}, in the run's folder, or in the current folder for several runs."
        ),
    ] = None,
) -> None:
    """Draw loss, lost updates by part of the model, and learning rate.

    It reads trainer_state.json from a run's folder, or else from the newest
    checkpoint in it. Runs without hf_lowprec work too. Several runs are drawn
    in the same axes.
    """
    from hf_lowprec.integrations.checkpoint_files.input_files import InputError, explain_input_errors
    from hf_lowprec.tools.plotting import draw, read_log

    folder = Path() if len(runs) > 1 else runs[0] if runs[0].is_dir() else runs[0].parent
    file = out or folder / NAME
    above = os.path.commonpath([os.path.dirname(os.path.abspath(run)) for run in runs])
    try:
        logs = {}
        for run in runs:
            with explain_input_errors(f"{str(run)!r} cannot be read"):
                logs[os.path.relpath(run, above)] = read_log(run)
        with explain_input_errors(f"{str(file)!r} cannot be written"):
            draw(logs).savefig(file, format=file.suffix[1:] or "png", dpi=130)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(f"Written to {file}")
