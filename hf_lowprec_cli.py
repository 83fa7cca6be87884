"""The console script `hf-lowprec`.

It is not in the package, because importing any module of the package first runs `hf_lowprec/__init__.py`, which
registers the optimizer names and so imports torch and transformers. That file reads `running`, and leaves the
registration to the command that runs, so that help and wrong arguments need neither.
"""

from __future__ import annotations

running = False
"""Whether this process runs the command line. Processes that a command spawns import this module but do not run it."""


def main() -> None:
    """Entry point of `hf-lowprec`."""
    global running
    running = True
    from hf_lowprec.tools.cli import main as run_command_line

    run_command_line()
