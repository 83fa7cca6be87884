"""PEFT's adapters on a tiny Llama, and how far training moves them."""

import copy
from typing import Any

import peft
import torch
from torch import Tensor, nn

from tests.support.models import tiny_models

ATTENTION = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
METHODS: dict[str, Any] = {
    "lora": peft.LoraConfig(**ATTENTION),
    "dora": peft.LoraConfig(**ATTENTION, use_dora=True),
    "rslora": peft.LoraConfig(**ATTENTION, use_rslora=True, lora_dropout=0.1),
    "all_linear": peft.LoraConfig(r=4, target_modules="all-linear", **CAUSAL),
    "embedding": peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], **CAUSAL),
    "saved_head": peft.LoraConfig(**ATTENTION, modules_to_save=["lm_head"]),
    "saved_both": peft.LoraConfig(**ATTENTION, modules_to_save=["lm_head", "embed_tokens"]),
    "tokens": peft.LoraConfig(**ATTENTION, trainable_token_indices=[1, 2, 3]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL),
    "prompt": peft.PromptTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "prefix": peft.PrefixTuningConfig(num_virtual_tokens=4, **CAUSAL),
    "p_tuning": peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **CAUSAL),
}
TIED = ("saved_both", "embedding", "tokens")
"""Those whose base has one matrix for input and output embeddings."""


def adapted(method: str, base: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A tiny Llama in `base` with fresh adapters; equal seeds give equal models."""
    model, _ = tiny_models.llama(tied=method in TIED)
    torch.manual_seed(seed)
    return peft.get_peft_model(model.to(base), copy.deepcopy(METHODS[method]))


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """FP32 copies of the trainable weights."""
    return {name: p.detach().float().clone() for name, p in model.named_parameters() if p.requires_grad}


def moved(model: nn.Module, start: dict[str, Tensor]) -> Tensor:
    """How far every trainable weight is from where it began, in one vector."""
    return torch.cat([(p - start[name]).flatten() for name, p in trainable(model).items()]).double()


def frozen_dtypes(model: nn.Module) -> set[torch.dtype]:
    """Dtypes of the frozen weights, norms excluded."""
    return {p.dtype for name, p in model.named_parameters() if not p.requires_grad and "norm" not in name}
