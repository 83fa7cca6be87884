"""Which tensors of replicas are compared; ranks that differ are in `tests/scripts/reduction_replicas.py`."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hf_lowprec.reduction import check_replicas
from hf_lowprec.reduction.compare_ranks import synchronized_parameters
from tests.support.processes.ranks import run_script


@pytest.mark.slow
@pytest.mark.distributed
def test_one_bit_on_one_rank_is_named_on_all():
    assert run_script("reduction_replicas.py").count("check_") == 9


def test_without_ranks_there_is_nothing_to_compare():
    assert check_replicas(torch.nn.Linear(2, 2)) is None


def test_parameters_that_ddp_ignores_are_a_ranks_own():
    """They are found below DDP's prefix of names, and a tied one only if all of its names are ignored."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = ["0.weight", "0.bias", "1.bias"]
    assert [name for name, _ in synchronized_parameters(model)] == names
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    where = f"torch {torch.__version__} keeps them elsewhere"
    assert [name for name, _ in synchronized_parameters(model)] == names[:2], where
    outer = torch.nn.ModuleDict({"module": model})
    assert [name for name, _ in synchronized_parameters(outer)] == ["module.0.weight", "module.0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    assert [name for name, _ in synchronized_parameters(model)] == names, "DDP reduces it by its other name"
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "1.weight"])
    assert [name for name, _ in synchronized_parameters(model)] == names[1:]
