"""Kernels of others in a cast model: torch's flash attention, and Liger's."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import hf_lowprec
from tests.support.training.liger_patches import liger_patches_undone
from tests.support.training.tiny_trainer import arguments, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


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
