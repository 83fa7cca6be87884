"""Which parameters of a model are matrices for Muon."""

import re

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from hf_lowprec import hidden_matrices

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def names(model: nn.Module) -> set[str]:
    found = {id(param) for param in hidden_matrices(model)}
    return {name for name, param in model.named_parameters() if id(param) in found}


LLAMA = {"vocab_size": 32, "num_key_value_heads": 2, **SIZES}
MODELS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "model.layers.", 14),
    "tied": (lambda: LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **LLAMA)), "model.layers.", 14),
    "classifier": (lambda: BertForSequenceClassification(BertConfig(vocab_size=32, **SIZES)), "bert.", 13),
    "image patches": (lambda: ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SIZES)), "vit.", 12),
}


@pytest.mark.parametrize(("make", "prefix", "count"), MODELS.values(), ids=MODELS)
def test_the_linear_layers_of_a_model_without_embeddings_and_head(make, prefix, count):
    modules = make().named_modules()
    found = {f"{name}.weight" for name, module in modules if isinstance(module, nn.Linear) and name.startswith(prefix)}
    assert names(make()) == found and len(found) == count


def test_gpt2s_convolutions_are_linear_layers():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert names(model) == {f"transformer.h.0.{name}.weight" for name in layers}


def test_experts_are_stacks_of_matrices():
    model = MixtralForCausalLM(MixtralConfig(num_local_experts=3, **LLAMA))
    stacks = {name for name, param in model.named_parameters() if param.ndim == 3}
    assert len(stacks) == 4 and stacks <= names(model)
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in names(model))


MIXTURES = {
    "phimoe": (r"q_proj|k_proj|v_proj|o_proj|experts\.\w+_proj", r"router"),
    "jetmoe": (r"kv_proj|(input|output)_linear", r"router"),
    "qwen2_moe": (r"\w_proj", r"gate\.weight|shared_expert_gate"),
    "llama4_text": (r"\w_proj", r"router"),
    "afmoe": (r"\w_proj", r"router\.gate"),
    "longcat_flash": (r"\w_proj(_with_mqa)?", r"router\.classifier"),
    "switch_transformers": (r"layer\.\d+\.\w+\.[qkvo]|\.w[io]", r"router\.classifier"),
}
"""Patterns of the names of matrices, and of parameters left to AdamW in addition to norms and embeddings."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_routers_are_left_to_adamw(kind):
    if kind not in CONFIG_MAPPING:
        pytest.skip("an older transformers")
    config = AutoConfig.for_model(kind)
    for name in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
        if getattr(config, name, 0) > 4:
            setattr(config, name, 4)
    for name in ("layer_types", "moe_layers"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:4])
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    matrices, others = MIXTURES[kind]
    found = names(model)
    rest = {name for name, param in model.named_parameters() if param.ndim > 1} - found
    assert all(re.search(f"({matrices})(\\.weight)?$", name) for name in found), sorted(found)
    assert all(re.search(f"{others}|shared|embed|relative_attention_bias|bias", name) for name in rest), sorted(rest)
    assert any(re.search(others, name) for name in rest)


def test_a_plain_model_has_the_matrices_of_its_linear_layers():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv1d(6, 6, 3), nn.Linear(6, 8))
    assert names(model) == {"1.weight", "4.weight"}
    model[4].weight = nn.Parameter(torch.zeros(8, 6))
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    tied[1].weight = tied[0].weight
    assert names(tied) == set()
