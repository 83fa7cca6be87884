"""Training on GPUs beside the step: kernels of others in a cast model, FSDP2, NCCL's FP32 sums, the mean of ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import hf_lowprec
from hf_lowprec.reduction import mean_in_rank_order, reduce_scatter_in_fp32, shard_fp32_parameters
from tests.reduction.test_fsdp2 import BF16, Linear
from tests.support.same_numbers import same_numbers
from tests.support.training.liger_patches import liger_patches_undone
from tests.support.training.tiny_trainer import arguments, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


# torch's flash attention, and Liger's kernels.


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def test_attention_is_torchs_flash_kernel():
    """It takes 16-bit tensors only, so a query, key or value in FP32 would raise."""
    model = llama().cuda()
    hf_lowprec.cast_model(model)
    tokens = torch.randint(0, 1024, (2, 128), device="cuda")
    gradients = []
    for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        model.zero_grad()
        with sdpa_kernel([kernel]):
            model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append(torch.cat([param.grad.flatten().double() for param in model.parameters()]))
    flash, plain = gradients
    # Both round what attention returns by at most 2**-9 of it, in two layers, and backward as often again: 4 roundings.
    # Each reaches all gradients; in the worst case the layers after it enlarge it fourfold.
    assert (flash - plain).norm() <= 16 * 2**-9 * plain.norm()


@pytest.mark.parametrize("config", [{}, {"fused_linear_cross_entropy": False}], ids=str)
def test_training_with_ligers_kernels_is_training_without_them(tmp_path, config):
    pytest.importorskip("liger_kernel")
    tokens = torch.randint(0, 64, (64, 128), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def trained(liger: bool) -> Trainer:
        settings = {"max_steps": 16, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": False}
        settings |= {"use_liger_kernel": liger, "liger_kernel_config": config if liger else None}
        args = arguments(tmp_path, optim="adamw_bf16_split", learning_rate=1e-3, **settings)
        trainer = Trainer(model=llama(), args=args, train_dataset=data)
        trainer.train()
        return trainer

    plain = trained(False)
    with liger_patches_undone():
        fused = trained(True)
    assert [each.model.model.norm._get_name() for each in (plain, fused)] == ["LlamaRMSNorm", "LigerRMSNorm"]
    dtypes = [{name: param.dtype for name, param in each.model.named_parameters()} for each in (plain, fused)]
    assert dtypes[0] == dtypes[1]
    expected, found = (torch.tensor(losses(each), dtype=torch.float64) for each in (plain, fused))
    assert len(expected) == 16 and expected[0] - expected[-1] > 2
    # Logits are rounded to BF16 at other places. Two roundings of all of them, by 2**-9 of values of size 1 and with
    # signs of their own, change a mean over 508 tokens by 2**-8 / sqrt(508) = 0.0002. On an H100, 16 steps make 0.0004
    # of it; ten times 0.0002 is allowed.
    assert (found - expected).abs().max() <= 10 * 2**-8 / 508**0.5


# FSDP2: parameters offloaded to the CPU; NCCL's sums need several GPUs with NVLink.


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


# The compiled kernel of the mean in rank order.

PAIRS = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]


@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 1024, 1_000_003])
def test_the_same_bits_as_on_the_cpu(dtypes, ranks, count):
    given, stored = (getattr(torch, name) for name in dtypes)
    generator = torch.Generator().manual_seed(count + ranks)
    scale = torch.exp2(torch.randint(-12, 12, (ranks, count), generator=generator).float())
    versions = (torch.randn(ranks, count, generator=generator) * scale).to(given)
    versions.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), -0.0])[: min(3, versions.numel())]
    for divisor in (1, ranks):
        expected = mean_in_rank_order(versions, divisor, torch.empty(count, dtype=stored))
        found = mean_in_rank_order(versions.cuda(), divisor, torch.empty(count, dtype=stored, device="cuda"))
        assert same_numbers(found, expected)
