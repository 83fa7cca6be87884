"""FSDP2 on GPUs: parameters offloaded to the CPU, and NCCL's FP32 sums, which need several GPUs with NVLink."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import hf_lowprec
from hf_lowprec.reduction import reduce_scatter_in_fp32, shard_fp32_parameters
from tests.scripts.reduction_fsdp2 import BF16, Linear

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_offloaded_parameters_are_stepped_on_the_cpu_to_the_same_bits(one_rank):
    """Forward and backward run on the GPU; weights, gradients and states are in the CPU's memory."""
    weights = []
    inputs = torch.randn(8, 33, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    for policy, device in ((OffloadPolicy(), "cuda"), (CPUOffloadPolicy(), "cpu")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 64), nn.LayerNorm(64), nn.Linear(64, 5))
        hf_lowprec.cast_model(model)
        shard_fp32_parameters(model, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        reduce_scatter_in_fp32(model)
        optimizer = hf_lowprec.AdamW(model.parameters(), lr=1e-3, rounding="split")
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.clip_grad_norm_(1e-3)
            optimizer.step()
        stored = [*model.parameters(), *(param.grad for param in model.parameters())]
        stored += [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        assert {tensor.device.type for tensor in stored} == {device}
        weights.append([param.full_tensor().cpu() for param in model.parameters()])
    assert all(map(torch.equal, *weights))


def sum_by_nccl(rank: int, ranks: int, store: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, device_id=device)
    model = Linear(BF16, (1025, 64)).to(device)
    fully_shard(model)
    reduce_scatter_in_fp32(model, "nccl")
    gradients = torch.randn(ranks, 1025, 64, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    model.factors = [gradients[rank]]
    model(torch.zeros((), requires_grad=True, device=device)).backward()
    exact = gradients.double().mean(0)
    (param,) = model.parameters()
    # One rounding of the sum, one of its quotient, each half a unit in the last place, and FP32's.
    allowed = 2 * exact.abs() * 2**-8 + gradients.double().abs().sum(0) * 2**-24
    assert ((param.grad.full_tensor().double() - exact).abs() <= allowed).all()
    dist.destroy_process_group()


def test_sums_by_nccl_on_several_gpus(tmp_path):
    """`reduce_scatter_in_fp32` raises an error if NCCL sums in BF16, as it does without NVLink."""
    if (ranks := torch.cuda.device_count()) < 2:
        pytest.skip("needs two CUDA devices")
    torch.multiprocessing.spawn(sum_by_nccl, (ranks, f"file://{tmp_path}/store"), nprocs=ranks)
