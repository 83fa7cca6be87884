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


def _build(model_class: type, config: Any, attention: str, seed: int) -> transformers.PreTrainedModel:
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).train()


def _tokens(seed: int, high: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, high, (BATCH, LENGTH), generator=generator)


def _causal_batch(seed: int) -> Batch:
    tokens = _tokens(seed)
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _decoder(config_class: type, model_class: type, **extra: Any) -> Callable[..., Built]:
    """Builder of a decoder-only language model whose config has the Llama argument names."""

    def build(seed: int = 0, tied: bool = False, attention: str = "sdpa", **overrides: Any) -> Built:
        arguments: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS // 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": tied,
            "use_cache": False,
        }
        config = config_class(**(arguments | extra | overrides))
        return _build(model_class, config, attention, seed), _causal_batch(seed)

    return build


llama = _decoder(transformers.LlamaConfig, transformers.LlamaForCausalLM)
mistral = _decoder(transformers.MistralConfig, transformers.MistralForCausalLM, sliding_window=8)
qwen2 = _decoder(transformers.Qwen2Config, transformers.Qwen2ForCausalLM)
qwen3 = _decoder(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, head_dim=8)
qwen3_moe = _decoder(
    transformers.Qwen3MoeConfig,
    transformers.Qwen3MoeForCausalLM,
    head_dim=8,
    moe_intermediate_size=WIDTH,
    num_experts=4,
    num_experts_per_tok=2,
)
gemma2 = _decoder(
    transformers.Gemma2Config,
    transformers.Gemma2ForCausalLM,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=8,
)
gemma3 = _decoder(
    transformers.Gemma3TextConfig,
    transformers.Gemma3ForCausalLM,
    head_dim=8,
    query_pre_attn_scalar=8,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"],
)
phi3 = _decoder(
    transformers.Phi3Config,
    transformers.Phi3ForCausalLM,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attention_dropout=0.0,
)
gpt_neox = _decoder(
    transformers.GPTNeoXConfig,
    transformers.GPTNeoXForCausalLM,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    # Half of each head is rotated. With the default quarter the one frequency is 1, which rounding keeps.
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
)


def gpt2(seed: int = 0, tied: bool = False, attention: str = "sdpa") -> Built:
    """GPT-2 with learned positions and fused `Conv1D` projections."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return _build(transformers.GPT2LMHeadModel, config, attention, seed), _causal_batch(seed)


def opt(seed: int = 0, tied: bool = False, attention: str = "sdpa") -> Built:
    """OPT with learned positions and ReLU."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=64,
        word_embed_proj_dim=WIDTH,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return _build(transformers.OPTForCausalLM, config, attention, seed), _causal_batch(seed)


def _encoder(config_class: type, model_class: type) -> Callable[..., Built]:
    """Builder of an encoder that classifies sequences; there is no output embedding to tie."""

    def build(seed: int = 0, tied: bool = False, attention: str = "sdpa") -> Built:
        config = config_class(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            pad_token_id=0,
        )
        batch = _causal_batch(seed) | {"labels": torch.arange(BATCH) % CLASSES}
        return _build(model_class, config, attention, seed), batch

    return build


bert = _encoder(transformers.BertConfig, transformers.BertForSequenceClassification)
roberta = _encoder(transformers.RobertaConfig, transformers.RobertaForSequenceClassification)


# Before transformers 5.16, T5 has one kind.
T5_ATTENTIONS = ("sdpa", "eager") if transformers.T5ForConditionalGeneration._supports_sdpa else ("eager",)


def t5(seed: int = 0, tied: bool = False, attention: str = T5_ATTENTIONS[0], gated: bool = False) -> Built:
    """T5 encoder and decoder, whose feed-forward output `wo` the model itself wants in FP32."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu",
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    batch = _causal_batch(seed) | {"labels": _tokens(seed + 1)}
    return _build(transformers.T5ForConditionalGeneration, config, attention, seed), batch


def vit(seed: int = 0, tied: bool = False, attention: str = "sdpa") -> Built:
    """ViT image classifier on FP32 pixels; no embedding to tie."""
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
    )
    generator = torch.Generator().manual_seed(1000 + seed)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    batch = {"pixel_values": pixels, "labels": torch.arange(BATCH) % CLASSES}
    return _build(transformers.ViTForImageClassification, config, attention, seed), batch


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
