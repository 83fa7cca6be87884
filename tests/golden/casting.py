"""`cast_model` on tiny transformers models: every tensor afterwards, and the dtypes that pass through every module.

Weights are set from `exact.weights`, so their digests hold on every machine. Buffers may come from powers and cosines;
of them the dtype is kept, and whether the cast changed a bit. Outputs are matrix products, of which only dtypes are
kept: these show where inputs are rounded and outputs converted.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import hf_lowprec
from tests.golden.exact import digest, integers, weights

WIDTH, VOCABULARY, LENGTH = 16, 48, 6
COMMON = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1}
COMMON |= {"num_attention_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
TOKENS = {"input_ids": integers((2, LENGTH), 1, 20).abs() + 1, "labels": integers((2, LENGTH), 2, 20).abs() + 1}
CLASSES = {**TOKENS, "labels": torch.tensor([0, 1])}
PIXELS = {"pixel_values": weights((2, 3, 8, 8), 3), "labels": torch.tensor([0, 1])}


def _llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**COMMON, num_key_value_heads=1, use_cache=False, **options)
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**COMMON, **dropout))


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 32}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, use_cache=False))


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return transformers.T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    experts = {"num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**COMMON, **experts, use_cache=False))


def _vit() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **dropout, image_size=8, patch_size=4)
    )


MODELS = {
    "llama": (_llama, TOKENS, {}),
    "llama, tied": (lambda: _llama(tie_word_embeddings=True), TOKENS, {}),
    "llama, keep_fp32": (_llama, TOKENS, {"keep_fp32": ["lm_head"]}),
    "bert": (_bert, CLASSES, {}),
    "gpt2": (_gpt2, TOKENS, {}),
    "t5": (_t5, TOKENS, {}),
    "mixtral": (_mixtral, TOKENS, {}),
    "vit": (_vit, PIXELS, {}),
}
"""A builder, a batch with labels, and options of `cast_model` for each model."""


def build(name: str) -> nn.Module:
    """The model before its cast, with small weights that are the same everywhere."""
    builder, _, _ = MODELS[name]
    model = builder().train()
    with torch.no_grad():
        for key, param in enumerate(model.parameters()):
            param.copy_(weights(tuple(param.shape), key) / 16 + (param.ndim == 1))
    return model


def dtypes(values: Any) -> str:
    """The dtypes of all floating-point tensors in arguments or in an output, in order."""
    if isinstance(values, Tensor):
        return str(values.dtype).removeprefix("torch.") if values.is_floating_point() else ""
    if isinstance(values, dict):
        values = values.values()
    if not isinstance(values, list | tuple | type({}.values())):
        return ""
    return " ".join(filter(None, map(dtypes, values)))


def record(name: str) -> dict[str, Any]:
    """Digests of tensors after the cast, and dtypes: of tensors, and of what each module gets and gives."""
    _, batch, options = MODELS[name]
    model = build(name)
    before = {key: value.clone() for key, value in model.named_buffers()}
    hf_lowprec.cast_model(model, **options)
    found = {
        "parameters": {key: f"{str(p.dtype)[6:]} {digest([p])}" for key, p in model.named_parameters()},
        "buffers": {
            key: f"{str(value.dtype)[6:]} {'as before' if torch.equal(value, before[key]) else 'changed'}"
            for key, value in model.named_buffers()
        },
        "state dict keys": " ".join(sorted(model.state_dict())),
    }
    passed: dict[str, str] = {}
    for key, module in model.named_modules():
        module.register_forward_hook(_note(passed, key or "the model"), with_kwargs=True)
    model(**batch)["loss"].backward()
    wrong = [key for key, p in model.named_parameters() if p.grad is not None and p.grad.dtype != p.dtype]
    return {**found, "dtypes in and out": passed, "gradients of other dtypes than their parameters": wrong}


def _note(passed: dict[str, str], key: str) -> Any:
    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passed[key] = f"{dtypes([args, kwargs])} -> {dtypes(output)}"

    return note
