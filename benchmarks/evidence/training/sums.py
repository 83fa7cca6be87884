"""The sums of two digits, and a small Llama that learns them from labels of which half are wrong."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ("<pad>", "<s>", "</s>", *"0123456789+")
ANSWER = 3
"""Tokens of a completion: two digits and the end."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    core = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def sums() -> list[dict[str, str]]:
    """All sums of two digits, as prompts and answers."""
    return [{"prompt": f"{a} + {b}", "answer": " ".join(f"{a + b:02}")} for a in range(10) for b in range(10)]


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right answer, 0 for any other text."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def tokens() -> Tensor:
    """Prompts with right answers and their end; shape (100, 6)."""
    return torch.tensor([tokenizer()(f"{row['prompt']} {row['answer']} </s>")["input_ids"] for row in sums()])


def answer_losses(model: nn.Module, texts: Tensor) -> Tensor:
    """Cross entropy of each text's answer, in nats; FP32."""
    logits = model(input_ids=texts[:, :-1]).logits[:, -ANSWER:].float()
    return F.cross_entropy(logits.mT, texts[:, -ANSWER:], reduction="none").sum(1)


def llama(width: int, layers: int) -> LlamaForCausalLM:
    """A model with random weights."""
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=8, max_position_embeddings=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, steps: int) -> None:
    """Train a model with labels of which half are random, so that it is right half of the time."""
    right = tokens()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 50) * (1 - step / steps)
        chosen, labels = (torch.randint(len(right), (128,)) for _ in range(2))
        texts = right[chosen]
        texts[:64, -ANSWER:] = right[labels[:64], -ANSWER:]
        answer_losses(model, texts).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
