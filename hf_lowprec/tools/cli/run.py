"""`hf-lowprec run SCRIPT ARGS…`: run an unmodified training script with our optimizer names registered.

The names are registered in one process. A launcher starts training in new processes, so the launcher must start
`hf_lowprec run`, and not vice versa; `launcher_command` recognizes launchers and returns the command to use.
"""

from __future__ import annotations

import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

# Everything after the script's name, options included, is passed to the script.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": True}

_ACCELERATE = "accelerate launch"
_LAUNCHERS = (
    "accelerate-launch",
    "accelerate.commands.launch",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
)
"""Programs and modules that always launch processes."""
_DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner")
_TORCHRUN = "torchrun --nproc-per-node gpu"
_RUN = "-m hf_lowprec run"
_ACCELERATE_CLI = ("accelerate", "accelerate.commands.accelerate_cli")
_TRL_CLI = ("trl", "trl.cli.main")
_TRL_TRAINERS = ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")
"""Subcommands of `trl` that launch a training run."""
_LLAMA_FACTORY = ("llamafactory-cli", "lmf", "llamafactory.cli")
"""With several GPUs, `train` launches processes."""


def run(
    script: Annotated[str, typer.Argument(help="A Python script or, with -m, the name of a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="Treat SCRIPT as the name of a module.")] = False,
) -> None:
    """Run a training script like `python SCRIPT ARGS…`, with the names of our optimizers registered."""
    if command := launcher_command(script, arguments or [], module):
        typer.echo(
            f"Error: {script} starts training in new processes, where the optimizer names are not registered. Let the "
            "launcher start hf_lowprec; launcher options, including those from a config file, go before -m:"
            f"\n\n  {command}\n",
            err=True,
        )
        raise typer.Exit(2)
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script!r} (to run a module by name, use -m)", param_hint="SCRIPT")
    import hf_lowprec

    hf_lowprec.register()
    sys.argv = [script, *(arguments or [])]
    if not module:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
        return
    sys.path.insert(0, "")
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if not _raised_by_runpy(error):
            raise
        raise typer.BadParameter(str(error), param_hint="-m") from None


def launcher_command(script: str, arguments: Sequence[str], module: bool) -> str | None:
    """Return the command to use instead if `script` with `arguments` launches training processes; None if it does not.

    Args:
        script: a path, or the name of a program or module.
        arguments: the script's arguments.
        module: whether `script` is the name of a module.
    """
    name = script if module else Path(script).name
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in _TRL_CLI and command in _TRL_TRAINERS:
        return f"{_ACCELERATE} {_RUN} {shlex.join(['-m', f'trl.scripts.{command}', *rest])}"
    if name in _LLAMA_FACTORY and command == "train":
        return f"{_TORCHRUN} {_RUN} {shlex.join(['-m', 'llamafactory.launcher', *rest])}"
    program = f"python -m {script}" if module else shlex.quote(script)
    if name in _ACCELERATE_CLI and command == "launch":
        return f"{program} launch {_with_us(rest)}"
    if name in _DEEPSPEED:
        return f"{_TORCHRUN} {_with_us(arguments, keeps_options=False)}"
    return f"{program} {_with_us(arguments)}" if name in _LAUNCHERS else None


def _with_us(arguments: Sequence[str], keeps_options: bool = True) -> str:
    """Return the arguments of a launcher that starts `hf_lowprec run` with the script that `arguments` start.

    Without knowing which of the launcher's options take a value, the script is the first word that ends in `.py` or
    follows `-m`.
    """
    is_script = (word.endswith(".py") or word in ("-m", "--module") for word in arguments)
    start = next((k for k, found in enumerate(is_script) if found), None)
    if start is None:
        return f"{_RUN} script.py …"
    options = arguments[:start] if keeps_options else ()
    return " ".join([*map(shlex.quote, options), _RUN, *map(shlex.quote, arguments[start:])])


def _raised_by_runpy(error: ImportError) -> bool:
    """Return whether the module itself was not found, rather than a module that it imports."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return all(frame.filename == runpy.run_module.__code__.co_filename for frame in frames)
