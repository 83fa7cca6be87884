"""`hidden_matrices`: the weights of linear layers and experts, without embeddings and heads."""

import pytest
import torch
from torch import nn
from transformers import (
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

from hf_lowprec.optim.algorithms._hidden_matrices import hidden_matrices

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def names(model: nn.Module) -> set[str]:
    found = {id(param) for param in hidden_matrices(model)}
    return {name for name, param in model.named_parameters() if id(param) in found}


def linear_names(model: nn.Module, prefix: str) -> set[str]:
    """Names of the weights of linear layers whose name starts with `prefix`."""
    modules = model.named_modules()
    return {f"{name}.weight" for name, m in modules if isinstance(m, nn.Linear) and name.startswith(prefix)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_causal_model_without_embeddings_and_head(tied):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, num_key_value_heads=2, **SIZES))
    assert names(model) == linear_names(model, "model.layers.")
    assert len(names(model)) == 2 * 7


def test_gpt2s_convolutions_are_linear_layers():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8))
    layer = "transformer.h.0."
    assert names(model) == {
        f"{layer}{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }


def test_a_classifier_without_its_head():
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **SIZES))
    assert names(model) == linear_names(model, "bert.")
    assert "classifier.weight" not in names(model)


def test_patches_positions_and_the_class_token_are_not_matrices():
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SIZES))
    assert names(model) == linear_names(model, "vit.")


def test_experts_are_stacks_of_matrices():
    model = MixtralForCausalLM(MixtralConfig(vocab_size=32, num_local_experts=3, num_key_value_heads=2, **SIZES))
    stacks = {name for name, param in model.named_parameters() if param.ndim == 3}
    assert len(stacks) == 4 and stacks <= names(model)
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in names(model))


def test_a_plain_model_has_the_matrices_of_its_linear_layers():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv1d(6, 6, 3), nn.Linear(6, 8))
    assert names(model) == {"1.weight", "4.weight"}
    model[4].weight = nn.Parameter(torch.zeros(8, 6))
    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    tied[1].weight = tied[0].weight
    assert names(tied) == set()
