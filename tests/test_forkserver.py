"""Scripts that the fork server runs end as scripts that are started from nothing, and ranks are forked together."""

import os
import subprocess
import time

import psutil
import pytest

from tests.support.processes import forkserver
from tests.support.processes.fork_ranks import fork_ranks

RANKS = 4


def script(tmp_path, text: str):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_a_script_has_arguments_environment_output_and_a_status(tmp_path):
    text = "import os, sys\nprint(sys.argv[1:], os.environ['WORD'], __name__)\nsys.exit('no')"
    done = forkserver.run(script(tmp_path, text), ["a", "b c"], timeout=60, WORD="said")
    assert done == (1, "['a', 'b c'] said __main__\n", "no\n")
    assert "WORD" not in os.environ


def test_a_script_that_raises_or_is_killed_says_so(tmp_path):
    done = forkserver.run(script(tmp_path, "raise ValueError('as planned')"), [], timeout=60)
    assert done.returncode == 1 and "ValueError: as planned" in done.stderr
    killed = forkserver.run(script(tmp_path, "import os\nos.kill(os.getpid(), 9)"), [], timeout=60)
    assert killed.returncode == -9
    crashed = forkserver.run(script(tmp_path, "import os\nos.abort()"), [], timeout=60)
    assert crashed.returncode == -6 and "in <module>" in crashed.stderr


def test_a_script_that_does_not_end_is_ended_with_all_that_it_forked(tmp_path):
    text = "import os, time\nprint(os.fork(), flush=True)\ntime.sleep(600)"
    with pytest.raises(subprocess.TimeoutExpired) as error:
        forkserver.run(script(tmp_path, text), [], timeout=1)
    child = max(int(word) for word in error.value.stdout.split())
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(child, 0)
            subprocess.run(["sleep", "0.05"], check=True)
    assert forkserver.run(script(tmp_path, ""), [], timeout=60).returncode == 0


def test_a_script_is_forked_from_a_single_thread(tmp_path):
    """glibc and torch are sure to work in a fork of one thread only."""
    text = "import os\nprint(os.listdir(f'/proc/{os.getppid()}/task') == [str(os.getppid())])"
    assert forkserver.run(script(tmp_path, text), [], timeout=60).stdout == "True\n"


def test_a_script_finds_everything_imported(tmp_path, monkeypatch):
    """The fork server itself ignores an import that fails: each script would silently take seconds more."""
    monkeypatch.chdir(tmp_path)
    text = "import os, sys\nprint({'torch', 'transformers', 'hf_lowprec'} <= sys.modules.keys(), os.getcwd())"
    assert forkserver.run(script(tmp_path, text), [], timeout=60).stdout == f"True {tmp_path}\n"


def test_no_rank_begins_before_all_are_forked(tmp_path):
    """Each counts the processes that were forked with it, and stays until all have counted."""
    before = {child.pid for child in psutil.Process().children()}

    def count(rank: int) -> None:
        forked = {child.pid for child in psutil.Process(os.getppid()).children()} - before
        (tmp_path / f"rank {rank}").write_text(str(len(forked)))
        while len(list(tmp_path.iterdir())) < RANKS:
            time.sleep(0.01)

    assert fork_ranks(count, RANKS) is None
    assert [int(file.read_text()) for file in tmp_path.iterdir()] == [RANKS] * RANKS
