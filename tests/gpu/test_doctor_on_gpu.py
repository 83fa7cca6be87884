"""`hf-lowprec doctor` sees the GPU."""

import pytest
import torch

from tests.support.command_output import hf_lowprec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def test_every_check_of_the_gpu_passes():
    result = hf_lowprec("doctor")
    # A library that computes layers wrong on this machine's CPU says nothing about the GPU.
    failed = [line for line in result.output.splitlines() if "FAILED" in line and "layers     cpu:" not in line]
    assert not failed, result.output
    assert "cuda:0: backend 'triton' gives the same bits as 'eager'" in result.output
    assert "12 steps on cuda:0" in result.output
    assert torch.cuda.get_device_name(0) in result.output
