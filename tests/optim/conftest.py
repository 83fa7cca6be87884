"""Backends to run a test on, and a mesh for distributed tensors."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.triton_available import device_of, require_triton


@pytest.fixture(params=["eager", "native", "triton"])
def backend(request) -> str:
    """Each backend in turn, if it can run here."""
    if request.param == "triton":
        require_triton()
    return request.param


@pytest.fixture
def any_backend(backend) -> Iterator[str]:
    """As `backend`; new tensors are made where it runs."""
    with nullcontext() if device_of(backend) == "cpu" else torch.device(device_of(backend)):
        yield backend


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
