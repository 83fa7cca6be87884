"""Tiny randomly initialised models of the common architectures, and a batch with labels for each.

`ARCHITECTURES` maps a name to its builder. Every builder takes `seed`, `tied` (input and output embeddings,
ignored where the architecture has none to tie) and `attention` (`"sdpa"` or `"eager"`), downloads nothing,
has no dropout, and returns `(model, batch)`: an FP32 model in training mode and a batch with labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

Batch = dict[str, Tensor]
Built = tuple[transformers.PreTrainedModel, Batch]

VOCABULARY, WIDTH, LAYERS, HEADS = 96, 32, 2, 4
BATCH, LENGTH, CLASSES = 2, 12, 3
TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LLAMA: dict[str, Any] = {
    **TEXT,
    **SIZES,
    **{"intermediate_size": 2 * WIDTH, "num_key_value_heads": HEADS // 2},
    **{"max_position_embeddings": 64, "pad_token_id": 0},
}
ENCODER: dict[str, Any] = {
    **SIZES,
    **{"intermediate_size": 2 * WIDTH, "num_labels": CLASSES},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def _tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)


def _causal_batch(seed: int) -> Batch:
    tokens = _tokens(seed)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _classified_batch(seed: int) -> Batch:
    return _causal_batch(seed) | {"labels": torch.arange(BATCH) % CLASSES}


def _translated_batch(seed: int) -> Batch:
    return _causal_batch(seed) | {"labels": _tokens(seed + 1)}


def _image_batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + seed)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.arange(BATCH) % CLASSES}


def _builder(
    name: str, fields: dict[str, Any], batch: Callable[[int], Batch] = _causal_batch, attention: str = "sdpa"
) -> Callable[..., Built]:
    """Builder of a model class of transformers with these fields of its config."""
    model_class = getattr(transformers, name)
    default = attention

    def build(seed: int = 0, tied: bool = False, attention: str = default, **overrides: Any) -> Built:
        ties = {"tie_word_embeddings": tied} if "use_cache" in fields else {}
        config = model_class.config_class(**{**fields, **ties, **overrides})
        config._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return model_class(config).train(), batch(seed)

    return build


GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
# Half of each head is rotated. With the default quarter the one frequency is 1, which rounding keeps.
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# Before transformers 5.16, T5 has one kind.
T5_ATTENTIONS = ("sdpa", "eager") if transformers.T5ForConditionalGeneration._supports_sdpa else ("eager",)

llama = _builder("LlamaForCausalLM", LLAMA)
mistral = _builder("MistralForCausalLM", {**LLAMA, "sliding_window": 8})
qwen2 = _builder("Qwen2ForCausalLM", LLAMA)
qwen3 = _builder("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8})
qwen3_moe = _builder(
    "Qwen3MoeForCausalLM",
    {**LLAMA, "head_dim": 8, "moe_intermediate_size": WIDTH, "num_experts": 4, "num_experts_per_tok": 2},
)
gemma2 = _builder("Gemma2ForCausalLM", GEMMA)
gemma3 = _builder("Gemma3ForCausalLM", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]})
phi3 = _builder("Phi3ForCausalLM", {**LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0})
gpt_neox = _builder(
    "GPTNeoXForCausalLM", {**LLAMA, "attention_dropout": 0.0, "hidden_dropout": 0.0, "rope_parameters": HALF}
)
gpt2 = _builder(
    "GPT2LMHeadModel",
    {
        **TEXT,
        **{"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
)
opt = _builder(
    "OPTForCausalLM",
    {
        **TEXT,
        **SIZES,
        **{"ffn_dim": 2 * WIDTH, "max_position_embeddings": 64, "word_embed_proj_dim": WIDTH, "pad_token_id": 0},
        **{"dropout": 0.0, "attention_dropout": 0.0},
    },
)
_TEXT_ENCODER = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0}
bert = _builder("BertForSequenceClassification", _TEXT_ENCODER, _classified_batch)
roberta = _builder("RobertaForSequenceClassification", _TEXT_ENCODER, _classified_batch)
# Encoder and decoder, whose feed-forward output `wo` the model itself wants in FP32.
t5 = _builder(
    "T5ForConditionalGeneration",
    {
        **{"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": LAYERS},
        **{"num_heads": HEADS, "dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False},
    },
    _translated_batch,
    T5_ATTENTIONS[0],
)
# An image classifier on FP32 pixels.
vit = _builder("ViTForImageClassification", {**ENCODER, "image_size": 16, "patch_size": 4}, _image_batch)


@dataclass(frozen=True)
class Architecture:
    """A builder and what its model can vary."""

    build: Callable[..., Built]
    can_tie: bool = True
    attentions: tuple[str, ...] = ("sdpa", "eager")

    def variants(self) -> list[tuple[bool, str]]:
        """Every (tied, attention) the architecture supports."""
        return [(tied, kind) for tied in ((False, True) if self.can_tie else (False,)) for kind in self.attentions]


ARCHITECTURES = {
    "llama": Architecture(llama),
    "mistral": Architecture(mistral),
    "qwen2": Architecture(qwen2),
    "qwen3": Architecture(qwen3),
    "gemma2": Architecture(gemma2, attentions=("eager",)),
    "gemma3": Architecture(gemma3),
    "phi3": Architecture(phi3),
    "gpt2": Architecture(gpt2),
    "gpt_neox": Architecture(gpt_neox),
    "opt": Architecture(opt),
    "bert": Architecture(bert, can_tie=False),
    "roberta": Architecture(roberta, can_tie=False),
    "t5": Architecture(t5, attentions=T5_ATTENTIONS),
    "vit": Architecture(vit, can_tie=False),
}
