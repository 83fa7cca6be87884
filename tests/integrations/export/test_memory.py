"""Exports hold the tensors of one file in memory, not a second model."""

import json
import sys

import pytest

from tests.support.processes.ranks import run_script

SLACK = 3_000_000
"""Bytes of objects that are no tensors. A model of 40,000 parameters takes 1.5 MB, two thirds of them for names."""


@pytest.mark.every_case
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_peak_of_function_and_command(tmp_path):
    lines = map(json.loads, run_script("memory_of_exports.py", tmp_path).splitlines())
    found = {name: sizes for line in lines for name, sizes in line.items()}
    assert found.keys() == {"warm-up", "llama", "mixtral"}
    for name, sizes in found.items():
        # Of one more tensor there are at most the FP32 weight, its compensation and the sum; or, where the file has
        # another layout, its elements' positions in 32 bits, before and after they move, and its 16-bit value: 2.5.
        bound = sizes["shard"] + 3 * sizes["tensor"] + SLACK
        assert sizes["function"] < bound and sizes["command"] < bound, name
    assert found["llama"]["model"] > 4 * (found["llama"]["shard"] + 3 * found["llama"]["tensor"] + SLACK)
