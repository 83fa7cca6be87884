"""compute-sanitizer sees no access outside of a tensor.

A file of its own, which `benchmarks/gpu_report.py` runs last: the tool is slow.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60


def test_compute_sanitizer_finds_nothing():
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        pytest.skip("compute-sanitizer is not installed")
    program = """
import torch
from hf_lowprec.optim import AdamW
params = [torch.nn.Parameter(torch.randn(n, device="cuda").bfloat16()) for n in (1, 7, 1023, 8192, 8193, 20000)]
params.append(torch.nn.Parameter(torch.randn(9000, device="cuda").bfloat16()[3:]))
optimizer = AdamW(params, max_grad_norm=1.0)
for _ in range(2):
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
torch.cuda.synchronize()
print("stepped")
"""
    # Without torch's allocator each tensor is an allocation of its own, and an access beyond it is seen.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [tool, "--error-exitcode", "9", "--report-api-errors", "no", sys.executable, "-c", program]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compute-sanitizer took more than {SECONDS} s")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "stepped" in done.stdout
