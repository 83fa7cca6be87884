"""Starting a script of worlds (`tests/scripts/reduction_worlds.py`) from a test."""

import os
import subprocess
import sys

from tests.ranks import SCRIPTS


def run_script(script: str, *arguments: object, within: tuple[str, ...] = (), **environment: str) -> str:
    """What `tests/scripts/SCRIPT` prints; fails the test if it fails. `within`: a command that runs the command."""
    path = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1])}
    done = subprocess.run(
        [*within, sys.executable, str(SCRIPTS / script), *map(str, arguments)],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout
