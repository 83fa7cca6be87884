"""The package on a device that is not the CPU, without a GPU: tensors of two devices in one operation are an error."""

from pathlib import Path

import pytest

from tests.support.processes import forkserver
from tests.support.second_device import host_device

SCRIPT = Path(__file__).parent / "scripts" / "second_device.py"
CHECKS = (
    *("mixtures", "steps", "offload", "casting", "sharded", "trainer"),
    *(
        pytest.param(check, marks=pytest.mark.every_case)
        for check in ("algorithms", "checkpoints", "monitors", "default_device")
    ),
)


@pytest.mark.skipif(bool(host_device.missing()), reason=host_device.missing())
@pytest.mark.parametrize("check", CHECKS)
def test_bits_are_those_of_the_cpu(check):
    done = forkserver.run(SCRIPT, [check], timeout=280)
    assert done.returncode == 0, done.stderr
