"""Backends to run a test on, a cache for what it compiles, and a mesh for distributed tensors."""

from collections.abc import Iterator

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
    if device_of(backend) != "cpu":
        torch.set_default_device(device_of(backend))
    yield backend
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def private_cache(tmp_path_factory) -> Iterator[None]:
    """Compile into a folder of this file's own, not into the cache of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_LOWPREC_CACHE", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
