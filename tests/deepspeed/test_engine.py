"""DeepSpeed's engine around our optimizers in an own loop."""

import pytest

from tests.support.processes.ranks import run_script

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_checkpoints_and_nonfinite_gradients(tmp_path):
    """Runs resume bit for bit, DeepSpeed's tools find all bits of FP32 weights, other checkpoints are refused, NaN on
    one rank stops all."""
    assert "all checks passed" in run_script("zero_engine.py", tmp_path)
