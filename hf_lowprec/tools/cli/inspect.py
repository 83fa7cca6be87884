"""`hf-lowprec inspect MODEL [LATER]`: show what is in a checkpoint, and what moved between two."""

from __future__ import annotations

import json
import textwrap
from typing import Annotated

import typer


def inspect(
    model: Annotated[str, typer.Argument(help="A model folder, a checkpoint, or a name on the Hub.")],
    later: Annotated[
        str | None, typer.Argument(help="A later checkpoint of the same model, to show what moved.", show_default=False)
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(min=0, help="Learning rate. Default: the one in the last checkpoint, or 2e-5."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON object.")] = False,
) -> None:
    """Look for lost precision in a checkpoint, or between two.

    For each part of the model, it shows the dtype, the share of weights that an
    update as large as the learning rate would leave unchanged if rounded to
    nearest, and the share that moved between two checkpoints. Then it lists
    what is wrong. Tensors are read one by one.

    It exits with 1 if something is wrong, and with 2 if a checkpoint cannot be
    read.
    """
    from hf_lowprec.integrations.checkpoint_files.input_files import InputError
    from hf_lowprec.tools.inspection import inspect_checkpoints

    try:
        found = inspect_checkpoints(model, later, lr)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({**found._asdict(), "findings": [one._asdict() for one in found.findings]}, indent=1))
    else:
        lost, moved = f"lost at {found.rate:.2g}", "   moved  distance" if later else ""
        typer.echo(f"{'part':<12}{'dtype':<10}{'weights':>14}  {lost:>15}{moved}")
        for row in found.parts:
            cells = f"{row['part']:<12}{row['dtype']:<10}{row['weights']:>14,}  {row['lost']:>15.1%}"
            cells += "" if row["moved"] is None else f"{row['moved']:>8.1%}"
            typer.echo(cells + ("" if row["distance"] is None else f"{row['distance']:>10.1e}"))
        typer.echo("lost: if an update this large were rounded to nearest, as in torch's AdamW\n")
        for finding in found.findings:
            typer.echo(textwrap.fill(f"- {finding.message}", 80, subsequent_indent="  ", break_on_hyphens=False))
        if not found.findings:
            typer.echo("Nothing wrong was found.")
    raise typer.Exit(int(bool(found.findings)))
