"""`hf-lowprec run SCRIPT ARGS…`: an unmodified training script that knows our `--optim` names."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

import hf_lowprec
from hf_lowprec.cli.launchers import working_command

# Everything after the script's name is the script's, options included.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    script: Annotated[str, typer.Argument(help="A Python script, or a module's name with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a training script as `python SCRIPT ARGS…` would, with our optimizer names registered."""
    if command := working_command(script, arguments or [], module):
        typer.echo(
            f"Error: {script} starts training in new processes, where the optimizer names are not registered. Run "
            "hf_lowprec inside the launcher; launcher options, including those from a config file, go before -m:"
            f"\n\n  {command}\n",
            err=True,
        )
        raise typer.Exit(2)
    hf_lowprec.register()
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script!r} (to run a module by name, give -m)", param_hint="SCRIPT")
    sys.argv = [script, *(arguments or [])]
    if not module:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
        return
    sys.path.insert(0, "")
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if not _is_of_runpy(error):
            raise
        raise typer.BadParameter(str(error), param_hint="-m") from None


def _is_of_runpy(error: ImportError) -> bool:
    """Whether the module was not found, rather than something that it imports."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return all(frame.filename == runpy.run_module.__code__.co_filename for frame in frames)
