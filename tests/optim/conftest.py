"""Backends to run a test on, and a mesh for distributed tensors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.triton_available import require_triton


@pytest.fixture(params=["eager", "native", "triton"])
def any_backend(request):
    """Each backend in turn; new tensors are made where it runs."""
    if request.param == "triton":
        require_triton()
        if torch.cuda.is_available():
            torch.set_default_device("cuda")
    yield request.param
    torch.set_default_device(None)


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
