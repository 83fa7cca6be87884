"""`hf-lowprec run SCRIPT ARGS…`: an unmodified training script that knows our `--optim` names."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

import hf_lowprec

# Everything after the script's name is the script's, options included.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    script: Annotated[str, typer.Argument(help="A Python script, or a module's name with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a training script as `python SCRIPT ARGS…` would, with our optimizer names registered."""
    hf_lowprec.register()
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script!r} (to run a module by name, give -m)", param_hint="SCRIPT")
    sys.argv = [script, *(arguments or [])]
    if module:
        sys.path.insert(0, "")
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
