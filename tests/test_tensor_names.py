"""The part of a model that a parameter belongs to, by its name and shape alone; short names in messages."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from hf_lowprec.tensor_names import PARAMETER_KINDS, listed, parameter_kinds

EXPECTED = {
    ("AutoModelForCausalLM", "llama"): {
        "model.embed_tokens.weight": "embeddings",
        "model.layers.0.self_attn.q_proj.weight": "attention",
        "model.layers.0.mlp.gate_proj.weight": "mlp",
        "model.layers.0.input_layernorm.weight": "norms",
        "model.norm.weight": "norms",
        "lm_head.weight": "head",
    },
    ("AutoModelForSequenceClassification", "bert"): {
        "bert.embeddings.word_embeddings.weight": "embeddings",
        "bert.embeddings.LayerNorm.bias": "norms",
        "bert.encoder.layer.0.attention.output.dense.weight": "attention",
        "bert.encoder.layer.0.output.dense.weight": "mlp",
        "bert.encoder.layer.0.output.dense.bias": "mlp",
        "bert.encoder.layer.0.output.LayerNorm.weight": "norms",
        "classifier.weight": "head",
        "classifier.bias": "head",
    },
    ("AutoModelForSeq2SeqLM", "t5"): {
        "shared.weight": "embeddings",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": "embeddings",
        "decoder.block.0.layer.1.EncDecAttention.k.weight": "attention",
        "encoder.block.0.layer.1.DenseReluDense.wo.weight": "mlp",
        "encoder.final_layer_norm.weight": "norms",
    },
    ("AutoModelForCausalLM", "gpt2"): {
        "transformer.wpe.weight": "embeddings",
        "transformer.h.0.ln_1.bias": "norms",
        "transformer.h.0.attn.c_proj.weight": "attention",
        "transformer.h.0.mlp.c_proj.bias": "mlp",
    },
    ("AutoModelForCausalLM", "mamba"): {"backbone.layers.0.mixer.A_log": "other", "backbone.norm_f.weight": "norms"},
}


@pytest.mark.parametrize("auto, model_type", EXPECTED)
def test_parts_of_transformers_models(auto: str, model_type: str) -> None:
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(model_type))
    kinds = parameter_kinds({name: param.shape for name, param in model.named_parameters()})
    assert set(kinds) == {name for name, _ in model.named_parameters()}
    assert set(kinds.values()) <= set(PARAMETER_KINDS)
    expected = EXPECTED[auto, model_type]
    assert {name: kinds[name] for name in expected} == expected


def test_norms_without_a_telling_name_have_one_dimension() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 1))
    kinds = parameter_kinds({name: param.shape for name, param in model.named_parameters()})
    assert [name for name, kind in kinds.items() if kind == "norms"] == ["1.weight", "1.bias"]


def test_adapters_come_before_the_layer_that_they_adapt() -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert parameter_kinds({name: (8, 64)}) == {name: "adapters"}


def test_layers_are_ranges() -> None:
    names = [f"model.layers.{k}.mlp.up_proj.weight" for k in (0, 1, 2, 5, 10, 11)]
    assert listed([*names, "lm_head.weight"]) == "model.layers.0-2,5,10-11.mlp.up_proj.weight, lm_head.weight"


def test_long_lists_are_cut() -> None:
    names = [f"{letter}.{k}.weight" for letter in "abcdef" for k in range(3)]
    assert listed(names) == "a.0-2.weight, b.0-2.weight, c.0-2.weight, d.0-2.weight and 6 more"


def test_only_the_first_number_is_the_layer() -> None:
    assert listed(["h.0.experts.0.w", "h.1.experts.0.w", "h.0.experts.1.w"]) == "h.0-1.experts.0.w, h.0.experts.1.w"
