"""Gradient release waits for DDP's averages, and says where it cannot."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import hf_lowprec
from hf_lowprec.reduction import reduce_in_fp32


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(torch.bfloat16)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    model(x).float().square().sum().backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps=range(3)) -> list[torch.Tensor]:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def test_ddp_without_our_hook_is_an_error():
    """Its averages would come after the step, and replicas would diverge."""
    model = DistributedDataParallel(network())
    optimizer = hf_lowprec.AdamW(model.parameters(), gradient_release=True)
    with pytest.raises(RuntimeError, match=r"call hf_lowprec\.prepare_accelerator.*reduce_in_fp32"):
        backward(model)
    assert not optimizer.state


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_options_of_ddp_that_decide_at_the_end_are_errors(option):
    model = DistributedDataParallel(network(), **{option: True})
    reduce_in_fp32(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), gradient_release=True)
    with pytest.raises(RuntimeError, match=rf"{option}=True.*use FSDP2"):
        backward(model)
    assert not optimizer.state


def test_fsdp1_is_an_error():
    model = FullyShardedDataParallel(network().float(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = hf_lowprec.AdamW(model.parameters(), gradient_release=True)
    with pytest.raises(RuntimeError, match="does not support FSDP1"):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("views", [False, True])
def test_the_bits_are_those_of_the_ordinary_step(views):
    found = []
    for release in (False, True):
        model = DistributedDataParallel(network(), gradient_as_bucket_view=views)
        reduce_in_fp32(model)
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=0.01, gradient_release=release)
        found.append(train(model, optimizer))
        assert all(param.grad is None for param in model.parameters())
    assert all(map(torch.equal, *found))


def test_micro_batches_without_synchronization_are_an_error():
    model = DistributedDataParallel(network())
    reduce_in_fp32(model)
    optimizer = hf_lowprec.AdamW(model.parameters(), gradient_release=True)
    with model.no_sync():
        backward(model)
    with pytest.raises(RuntimeError, match="got a second gradient"):
        backward(model)
    assert not optimizer.state


def test_averages_that_nobody_takes_are_in_the_gradients():
    """DDP itself no longer writes them there. A parameter of no optimizer, and then one of an ordinary optimizer."""
    model = DistributedDataParallel(network())
    averager = reduce_in_fp32(model)
    optimizer = hf_lowprec.AdamW(model.module[0].parameters(), lr=0.01, gradient_release=True)
    averager.take_means.append(lambda params, means: [mean.mul_(2) is None for mean in means])  # as if ranks differed

    def averaged(seed: int) -> list[bool]:
        """Which parameters have the gradient of the means, in a further backward pass."""
        model.zero_grad()
        twin = copy.deepcopy(model.module)
        backward(model, seed)
        backward(twin, seed)
        params = zip(model.parameters(), twin.parameters(), strict=True)
        return [param.grad is not None and torch.equal(param.grad, 2 * other.grad) for param, other in params]

    assert averaged(1)[2:] == [True] * 2
    optimizer.step()
    assert all(param.grad is None for param in model.module[0].parameters())
    del optimizer
    gc.collect()
    assert averaged(2) == [True] * 4
