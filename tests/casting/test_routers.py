"""Routers of experts are in FP32 where the model wants it."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.casting import cast_model
from tests.support.every_architecture.tiny_configs import tiny_config
from tests.support.models.inspection import FP32


def mixture(name: str, model_type: str) -> nn.Module:
    model_class: Any = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(tiny_config(model_class, model_type)).eval()


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
