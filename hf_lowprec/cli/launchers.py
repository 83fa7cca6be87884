"""Programs that start the training in processes of their own, which do not know our optimizer names.

`hf-lowprec run` reaches one process. So a launcher starts `hf_lowprec run`, and not the other way round.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

_ACCELERATE = "accelerate launch -m hf_lowprec run"
_TORCHRUN = "torchrun --nproc-per-node 2 -m hf_lowprec run"
_COMMANDS = {
    "accelerate-launch": _ACCELERATE,
    "accelerate.commands.launch": _ACCELERATE,
    "torchrun": _TORCHRUN,
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "deepspeed": _TORCHRUN,
    "deepspeed.launcher.runner": _TORCHRUN,
}
"""Programs and modules that launch whatever their arguments are, and what starts `hf_lowprec run` instead."""
_ACCELERATE_CLI = ("accelerate", "accelerate.commands.accelerate_cli")
_TRL_CLI = ("trl", "trl.cli.main")
_TRL_TRAININGS = ("distillation", "dpo", "grpo", "kto", "reward", "rloo", "sft")


def working_command(script: str, arguments: Sequence[str], module: bool) -> str | None:
    """The command to use instead, if `script` with `arguments` trains in processes that it starts; else None.

    Args:
        script: a path, the name of a program, or that of a module.
        arguments: those of the script.
        module: whether `script` is a module's name.
    """
    name = script if module else Path(script).name
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if name in _TRL_CLI and command in _TRL_TRAININGS:
        return f"{_ACCELERATE} {shlex.join(['-m', f'trl.scripts.{command}', *rest])}"
    if name in _ACCELERATE_CLI and command == "launch":
        return f"{_ACCELERATE} script.py …"
    return f"{_COMMANDS[name]} script.py …" if name in _COMMANDS else None
