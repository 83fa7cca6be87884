"""Backends to run a test on."""

import pytest
import torch

from tests.triton_here import require_triton


@pytest.fixture(params=["eager", "native", "triton"])
def any_backend(request):
    """Each backend in turn; new tensors are made where it runs."""
    if request.param == "triton":
        require_triton()
        if torch.cuda.is_available():
            torch.set_default_device("cuda")
    yield request.param
    torch.set_default_device(None)
