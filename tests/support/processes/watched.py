"""Start the processes of a test, watch them, and end them, even if the test fails."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.processes import forkserver

ROOT = Path(__file__).resolve().parents[3]
_MARK = "HF_LOWPREC_TEST_RUN"


class Process:
    """A process with a session of its own, whose output goes to the files `NAME.out` and `NAME.err` of a folder.

    Args:
        name: unique in the folder.
        folder: the folder.
        process: what was started.
    """

    def __init__(self, name: str, folder: Path, process: subprocess.Popen | BaseProcess) -> None:
        self.name = name
        self._out, self._err = output_files(name, folder)
        self._process = process
        self.pid = process.pid

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.poll() if isinstance(self._process, subprocess.Popen) else self._process.exitcode

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def end(self) -> None:
        """Kill it and what it started in its session, if it still runs."""
        if self.code is None:
            os.killpg(self.pid, signal.SIGKILL)
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        else:
            self._process.join()

    def report(self) -> str:
        """How it ended and the last of its output, for a failed assertion."""
        return f"--- {self.name} (exit status {self.code})\n{self.out[-1500:]}\n{self.err[-9000:]}"


class Processes:
    """Starts processes, and ends them and their children at the end of the `with` block.

    Args:
        folder: where their output goes, and where they run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.started: list[Process] = []

    def __enter__(self) -> "Processes":
        return self

    def start(self, name: str, command: list[Any], **environment: object) -> Process:
        """Run `command` with `environment` added to this process's."""
        out, err = output_files(name, self.folder)
        with out.open("w") as stdout, err.open("w") as stderr:
            popen = subprocess.Popen(
                [str(word) for word in command],
                env=self._environment(environment),
                cwd=self.folder,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        self.started.append(Process(name, self.folder, popen))
        return self.started[-1]

    def fork(self, name: str, script: Path, *arguments: object, **environment: object) -> Process:
        """As `start`, a script in a process that has imported torch and transformers already."""
        words = [str(argument) for argument in arguments]
        files = output_files(name, self.folder)
        process = forkserver.start(script, words, self._environment(environment), self.folder, *files)
        self.started.append(Process(name, self.folder, process))
        return self.started[-1]

    def _environment(self, added: dict[str, object]) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return {
            **inherited,
            _MARK: self.mark,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "no accelerate configuration here"),
            **{key: str(value) for key, value in added.items()},
        }

    def wait(self, what: str, happened: Callable[[], bool], seconds: float) -> float:
        """Wait until `happened`; returns how long it took, and fails with all output after `seconds`."""
        begin = time.monotonic()
        while not happened():
            took = time.monotonic() - begin
            assert took < seconds, "\n".join([f"after {took:.0f} s: {what}", *(p.report() for p in self.started)])
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_for_end(self, processes: list[Process], seconds: float) -> float:
        """Wait until all of them have ended; as `wait`."""
        names = ", ".join(process.name for process in processes)
        return self.wait(f"{names} did not end", lambda: all(p.code is not None for p in processes), seconds)

    def __exit__(self, *failure: object) -> None:
        for process in self.started:
            process.end()
        # Launchers give their workers sessions of their own, and those survive a launcher that was killed.
        while left := [pid for pid in _process_ids() if self._is_ours(pid)]:
            for pid in left:
                with suppress(ProcessLookupError):  # it may have ended meanwhile
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _is_ours(self, pid: int) -> bool:
        try:
            return f"{_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False  # it has ended, or is not ours to read


def output_files(name: str, folder: Path) -> tuple[Path, Path]:
    """Where the output and the errors of the process `name` go."""
    return folder / f"{name}.out", folder / f"{name}.err"


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]
