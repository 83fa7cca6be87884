"""Run a script in a process of its own, forked by multiprocessing's fork server, which has imported torch already.

Importing torch, transformers and this package takes seconds; a fork takes milliseconds. As with `python SCRIPT`, the
script has its own session, output files, arguments, environment and working directory. What differs: modules of
`preloaded.py` have read the environment of the first call, since they were imported then.
"""

import faulthandler
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.support.processes.fork_ranks import renew_thread_pool

ROOT = Path(__file__).resolve().parents[3]


class Done(NamedTuple):
    """How a script ended."""

    returncode: int
    """As `subprocess` has it: minus the signal's number, if a signal ended it."""
    stdout: str
    stderr: str


def run(script: Path, arguments: list[str], timeout: float, **environment: str) -> Done:
    """Run a script to its end.

    Args:
        script: a Python file, run as `__main__`.
        arguments: its `sys.argv[1:]`.
        timeout: in seconds.
        **environment: added to this process's environment.

    Raises:
        subprocess.TimeoutExpired: the script took longer; it was killed, with all processes of its session.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(script, arguments, {**os.environ, **environment}, Path.cwd(), out, err)
        try:
            process.join(timeout)
        finally:
            if timed_out := process.exitcode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
        stdout, stderr = out.read_text(errors="replace"), err.read_text(errors="replace")
        if timed_out:
            raise subprocess.TimeoutExpired(str(script), timeout, stdout, stderr)
        return Done(process.exitcode, stdout, stderr)


def start(
    script: Path, arguments: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path
) -> BaseProcess:
    """Start a script in `folder`, with all of its environment; its output goes to the files `out` and `err`."""
    for file in (out, err):
        file.touch()
    process = _fork_server().Process(target=_become, args=(str(script), arguments, environment, folder, out, err))
    process.start()
    return process


@functools.cache
def _fork_server() -> multiprocessing.context.ForkServerContext:
    """Start the fork server of this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.processes.preloaded"])
    # It takes no module path from this process before Python 3.13, and ignores an import that fails.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def _become(script: str, arguments: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    """Be `python script *arguments` from here on; multiprocessing turns exceptions into tracebacks and exit codes."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background jobs of a shell start without
    for descriptor, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    faulthandler.enable()  # so that a crash in a library says where Python was, on any rank
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # may be known already; TMPDIR may say otherwise
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), str(ROOT)]
    renew_thread_pool()
    runpy.run_path(script, run_name="__main__")
