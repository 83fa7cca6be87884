"""`hf-lowprec inspect MODEL [OTHER]`: what is in a checkpoint, and what moved between two."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_lowprec.tools.cli.plot import require_matplotlib

if TYPE_CHECKING:
    from rich.console import Console

    from hf_lowprec.tools.inspection.inspect_checkpoints import Inspection


def inspect(
    model: Annotated[str, typer.Argument(help="A model folder, a checkpoint, or a name on the Hub.")],
    other: Annotated[
        str | None, typer.Argument(help="A later checkpoint of the model, to show what moved.", show_default=False)
    ] = None,
    update: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Size of an update, to show for how many weights rounding to nearest would lose it. "
            "Default: the learning rate in the checkpoint, else 2e-5.",
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Learning rate, if the checkpoint has none.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Weight decay, if the checkpoint has none.")] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="Steps between the two, if they do not say.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw weights by magnitude, and which of them moved, to this file (.png, .svg).",
            callback=require_matplotlib,
        ),
    ] = None,
) -> None:
    """Look for lost precision in a checkpoint, or between two.

    One checkpoint: dtypes and bytes by part of the model, weights at exactly
    1.0 or 0.0, norms that still have their initial value, weights too coarse
    for an update, FP32 matrices among 16-bit ones, optimizer state. Two: what
    moved and what did not, weight decay and second moments that stood still.

    Exits with 1 if something is wrong, or the optimizer state cannot be read.
    Tensors are read one by one.
    """
    from rich.console import Console

    from hf_lowprec.integrations.checkpoint_files.input_errors import InputError, explain_input_errors
    from hf_lowprec.tools.inspection.inspect_checkpoints import inspect_checkpoints
    from hf_lowprec.tools.inspection.json_output import to_json
    from hf_lowprec.tools.inspection.training_record import Hyperparameters

    try:
        with Console(stderr=True).status("reading") as status:
            given = Hyperparameters(lr, weight_decay, steps, update)
            inspection = inspect_checkpoints(model, other, given, status.update)
        if plot is not None:
            from hf_lowprec.tools.inspection.plot import plot as draw

            with explain_input_errors(f"--plot: {str(plot)!r} cannot be written"):
                draw(plot, inspection.checkpoints[-1], inspection.comparison)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(to_json(*inspection))
    else:
        _print(inspection, Console())
    raise typer.Exit(int(bool(inspection.findings) or _is_unread(inspection)))


def _is_unread(inspection: Inspection) -> bool:
    """Return whether something of a checkpoint could not be read."""
    return any(checkpoint.unread for checkpoint in inspection.checkpoints)


def _print(inspection: Inspection, console: Console) -> None:
    """Print what each checkpoint is, a table, remarks, and at the end the findings."""
    from hf_lowprec.tools.inspection import tables
    from hf_lowprec.tools.inspection.findings_in_one import counted

    def sentence(text: str, indent: str = "") -> None:
        lines = textwrap.fill(
            text, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        console.print(lines, highlight=False, markup=False, soft_wrap=True)

    for checkpoint in inspection.checkpoints:
        sentence(tables.heading(checkpoint))
    if inspection.comparison:
        console.print(tables.changes_table(inspection.comparison))
        lines = tables.lines_on_two(inspection.comparison)
    else:
        console.print(tables.weights_table(inspection.checkpoints[0]))
        lines = tables.lines_on_one(inspection.checkpoints[0])
    for line in lines:
        sentence(f"- {line}", indent="  ")
    console.print()
    if not inspection.findings:
        sentence(f"Nothing wrong was found{' in what could be read' if _is_unread(inspection) else ''}.")
    else:
        sentence(f"{counted(len(inspection.findings), 'finding')}:")
    for number, finding in enumerate(inspection.findings, 1):
        sentence(f"{number}. {finding.message}", indent="   ")
