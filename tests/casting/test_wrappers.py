"""A cast model inside the wrappers of torch.distributed, which must come after the cast."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from hf_lowprec.casting import cast_model
from hf_lowprec.rounding.attached_low_bits import attached_low_bits


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestWrappers:
    def test_a_model_that_is_wrapped_is_refused(self, process_group: None) -> None:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        sharded = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
        for target in (wrapped, nn.Sequential(wrapped), sharded, nn.Sequential(sharded)):
            with pytest.raises(ValueError, match="cast before prepare"):
                cast_model(target)

    @pytest.mark.parametrize("trainable", [True, False])
    def test_dtensors_are_converted_in_place(self, process_group: None, trainable: bool) -> None:
        """Tensor parallelism shards a model before it is cast; optimizers and FSDP2 hold its parameters."""
        model, plain = nn.Linear(3, 5), nn.Linear(3, 5)
        plain.load_state_dict(model.state_dict())
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh), requires_grad=trainable)
        model.weight.grad = distribute_tensor(torch.full((5, 3), 1 / 3), mesh)
        model.weight.note = "kept"
        plain.weight.requires_grad_(trainable)
        weight = model.weight
        for each in (model, plain):
            cast_model(each)
        assert model.weight is weight and (weight.note, weight.requires_grad) == ("kept", trainable)
        assert (weight.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(weight.full_tensor(), plain.weight)
        assert (attached_low_bits(weight) is not None) == trainable
        assert not trainable or torch.equal(attached_low_bits(weight), attached_low_bits(plain.weight))
        cast_model(model)
        assert model.weight is weight

    def test_what_transformers_shards_at_load_is_cast_before_it_runs(self, process_group: None) -> None:
        """FSDP2 notes dtypes in the first forward pass; a cast after it would go unnoticed."""
        model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=init_device_mesh("cpu", (1,)))
        model.is_distributed_loading_by_transformers = True
        model(torch.ones(1, 2))
        with pytest.raises(ValueError, match="cast before the first forward pass"):
            cast_model(model)

    def test_what_an_earlier_transformers_shards_is_refused(self) -> None:
        model = nn.Linear(2, 2)
        model.tp_size = 2
        with pytest.raises(ValueError, match=r"tp_size=2.*upgrade transformers"):
            cast_model(model)
