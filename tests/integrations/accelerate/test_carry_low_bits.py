"""Low bits find their parameters in the wrapped model. Several ranks are in `tests/distributed/test_low_bits.py`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hf_lowprec
from hf_lowprec.integrations.carry_low_bits import give_low_bits, taken_low_bits
from hf_lowprec.rounding.attached_low_bits import attached_low_bits


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["layer", "module"])
def test_ddp_has_a_prefix_that_names_in_the_model_may_have_as_well(one_rank, name, compiled):
    model = nn.ModuleDict({name: nn.Linear(8, 8)})
    hf_lowprec.cast_model(model)
    before = {param: attached_low_bits(param) for param in model.parameters()}
    with taken_low_bits(model) as kept:
        assert not any(attached_low_bits(param) is not None for param in before)
        wrapped = DistributedDataParallel(model)
    give_low_bits(torch.compile(wrapped) if compiled else wrapped, kept, torch.device("cpu"))
    assert all(torch.equal(attached_low_bits(param), expected) for param, expected in before.items())
