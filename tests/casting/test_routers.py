"""Routers of experts: like any weight, unless the model or the caller wants them in FP32."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import BF16, FP32


def mixture(name: str, model_type: str) -> nn.Module:
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(tiny_config(model_class, model_type)).eval()


def gates(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}


def test_weights_are_cast_as_transformers_loads_them() -> None:
    model = mixture("Qwen3MoeForCausalLM", "qwen3_moe")
    cast_model(model)
    assert gates(model) and all(gate.weight.dtype == BF16 for gate in gates(model).values())


@pytest.mark.parametrize(
    ("name", "model_type", "tensor"),
    [
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "gate.weight"),
        ("DeepseekV3ForCausalLM", "deepseek_v3", "e_score_correction_bias"),
    ],
)
def test_what_the_model_wants_in_float32(name: str, model_type: str, tensor: str) -> None:
    model = mixture(name, model_type)
    assert any(tensor in pattern for pattern in model._keep_in_fp32_modules_strict)  # type: ignore[union-attr]
    exact = {n: t.clone() for n, t in (*model.named_parameters(), *model.named_buffers()) if n.endswith(tensor)}
    cast_model(model)
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert exact and all(now[n].dtype == FP32 and torch.equal(now[n], value) for n, value in exact.items())
    tokens = torch.arange(64, 76)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_a_kept_router_chooses_as_in_float32() -> None:
    model = mixture("Qwen3MoeForCausalLM", "qwen3_moe")
    exact = copy.deepcopy(model)
    cast_model(model, keep_fp32="*.gate")
    x = torch.randn(500, 64, dtype=BF16)
    for one, two in zip(gates(model).values(), gates(exact).values(), strict=True):
        # Scores come rounded, the choice does not: softmax and rank are inside the module.
        assert torch.equal(one(x)[-1], two(x.float())[-1])
        assert one(x)[0].dtype == BF16
