"""Without a GPU, Triton's kernels run in its interpreter; it reads this when it is first imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own kernels instead of oneDNN's, whose faults, if this machine has any, are not the test's."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
