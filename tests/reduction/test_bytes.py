"""Bytes on the wire, counted by the kernel in a network of its own."""

import shutil
import subprocess

import pytest

from tests.reduction.worlds import run_script


def namespace() -> tuple[str, ...]:
    """A command that runs another one where the loopback interface is its own; skips where there is none."""
    lift = 'ip link set lo up && exec "$@"'
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        within = (*command, "sh", "-c", lift, "sh")
        if (
            shutil.which(command[0])
            and subprocess.run([*within, "true"], capture_output=True, check=False).returncode == 0
        ):
            return within
    pytest.skip("no network namespace can be made here (needs Linux, unshare, ip, and the right to do so)")


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_travel_in_as_many_bytes_as_a_native_reduction_of_bf16():
    """2 (N − 1) / N times the bucket per rank: half of what FP32 takes."""
    printed = run_script("reduction_bytes.py", within=namespace(), GLOO_SOCKET_IFNAME="lo")
    print(printed)
    assert "as many bytes as defined" in printed
