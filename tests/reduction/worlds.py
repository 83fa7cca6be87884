"""Starting a script of worlds (`tests/scripts/reduction_worlds.py`) from a test."""

import sys

from tests.ranks import SCRIPTS, run_command


def run_script(script: str, *arguments: object, within: tuple[str, ...] = (), **environment: str) -> str:
    """What `tests/scripts/SCRIPT` prints; fails the test if it fails. `within`: a command that runs the command."""
    return run_command([*within, sys.executable, str(SCRIPTS / script), *map(str, arguments)], **environment)
