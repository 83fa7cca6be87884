"""A cast model inside the wrappers of torch.distributed, which must come after the cast."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hf_lowprec.casting import cast_model
from tests.support.models import tiny_models
from tests.support.models.inspection import NORM_PATH


@pytest.fixture
def process_group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class TestWrappers:
    def test_data_parallel(self, process_group: None) -> None:
        model, batch = tiny_models.llama(tied=True)
        cast_model(model)
        single = copy.deepcopy(model)
        single(**batch).loss.backward()
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(**batch).loss.backward()
        for one, two in zip(single.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
        for target in (wrapped, nn.Sequential(wrapped)):
            with pytest.raises(ValueError, match=r"cast before prepare.*DistributedDataParallel"):
                cast_model(target)

    def test_fully_sharded(self, process_group: None) -> None:
        from torch.distributed.fsdp import fully_shard

        model, batch = tiny_models.llama()
        cast_model(model)
        single = copy.deepcopy(model)
        loss = single(**batch).loss
        loss.backward()
        mesh = init_device_mesh("cpu", (1,))
        norms = [module for name, module in model.named_modules() if NORM_PATH.search(name)]
        fully_shard(norms, mesh=mesh, reshard_after_forward=False)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded = model(**batch).loss
        sharded.backward()
        assert torch.equal(sharded, loss)
        for one, two in zip(single.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad.full_tensor())
        for target in (model, norms[0]):
            with pytest.raises(ValueError, match="cast before prepare"):
                cast_model(target)

    def test_sharded_tensors(self, process_group: None) -> None:
        from torch.distributed.tensor import distribute_tensor

        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
        with pytest.raises(ValueError, match=r"cast before prepare.*DTensor"):
            cast_model(model)
