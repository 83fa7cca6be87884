"""Whether an optimizer can take a step here, tried in a process of its own.

An optimizer of another package may compile for minutes, in code that no signal interrupts, or end its process. Then
only the trial ends. What it compiles lies in the compilers' caches on disk, where the benchmark finds it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]


def trial_failure(name: str, rehearsal: bool, seconds: float) -> str:
    """Why the candidate `name` cannot step the model within `seconds`; empty if it can."""
    command = [sys.executable, "-c", "from gpu.trial import main; main()", name, *["--rehearse"] * rehearsal]
    # A session of its own, so that the compilers' own processes can be ended with it.
    process = subprocess.Popen(
        command, cwd=BENCHMARKS, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        errors = process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        return f"its first steps took more than {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return ""
    return (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1][:200]


def main() -> None:
    """Take two steps with the candidate that the command line names."""
    from gpu.candidates import candidates
    from gpu.device import Device, Gpu, Rehearsal
    from gpu.shapes import LLAMA_1B, TINY, parameters

    name, rehearsal = sys.argv[1], "--rehearse" in sys.argv[2:]
    device: Device = Rehearsal() if rehearsal else Gpu()
    (candidate,) = (found for found in candidates(device) if found.name == name)
    shapes = (TINY if rehearsal else LLAMA_1B).shapes
    optimizer = candidate.build(parameters(shapes, candidate.dtype, device.device))
    for _ in range(2):
        optimizer.step()
    device.synchronize()
