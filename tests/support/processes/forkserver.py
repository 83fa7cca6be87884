"""A process that has imported what scripts need and forks those that tests start: to import takes each five seconds.

`run` starts a script as `python SCRIPT ARGUMENTS` would. What matters is as there: its own process and session, files
for output, arguments, environment, working directory. What is not: modules read their environment when the nursery
was started, once in each process of pytest.
"""

import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(script: Path, arguments: list[str], timeout: float, **environment: str) -> Done:
    """Run a script to its end, or to the end of its patience: then it is killed, and TimeoutExpired raised."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"script": str(script), "arguments": arguments, "environment": {**os.environ, **environment}}
        request |= {"out": str(out), "err": str(err), "cwd": os.getcwd()}
        nursery = _nursery()
        nursery.stdin.write(json.dumps(request).encode() + b"\n")
        child = int(nursery.stdout.readline())
        ready, _, _ = select.select([nursery.stdout], [], [], timeout)
        if not ready:
            os.killpg(child, signal.SIGKILL)
        code = int(nursery.stdout.readline())
        if not ready:
            raise subprocess.TimeoutExpired(str(script), timeout, out.read_text(), err.read_text())
        return Done(code, out.read_text(errors="replace"), err.read_text(errors="replace"))


@functools.cache
def _nursery() -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.forkserver"],
        env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        bufsize=0,  # a line that was read ahead would be one that `select` waits for
    )  # fmt: skip


def serve() -> None:
    """Fork a script per line of standard input, and say its process and then how it ended, until there are no more."""
    gc.freeze()  # the children's collections neither visit nor copy what was imported
    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_become(json.loads(line)))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(request: dict[str, Any]) -> int:
    """Run the script, and return what the process is to exit with."""
    os.setsid()
    for descriptor, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = str(Path(request["script"]).parent)
    sys.path.insert(1, str(ROOT))
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    import accelerate.utils  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: F401

    import hf_lowprec.integrations  # noqa: F401

    serve()
