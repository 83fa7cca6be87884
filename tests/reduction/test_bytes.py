"""Bytes on the wire, counted by the operating system in a network namespace."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.processes.ranks import SCRIPTS


def namespace() -> tuple[str, ...]:
    """A command that runs another one with a loopback interface of its own; skips where that is not possible."""
    lift = 'ip link set lo up && exec "$@"'
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        within = (*command, "sh", "-c", lift, "sh")
        if (
            shutil.which(command[0])
            and subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0
        ):
            return within
    pytest.skip("no network namespace can be made here (needs Linux, unshare, ip, and the right to do so)")


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_travel_in_as_many_bytes_as_a_native_reduction_of_bf16():
    """Each rank sends 2 (N − 1) / N times the bucket, half as much as in FP32."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS.parents[1]), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*namespace(), sys.executable, str(SCRIPTS / "reduction_bytes.py")],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "as many bytes as defined" in done.stdout
