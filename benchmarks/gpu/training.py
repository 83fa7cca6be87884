"""Tokens per second and memory of training a Llama: FP32 with BF16 autocast, as is usual, and pure BF16."""

from __future__ import annotations

import math
import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

import hf_lowprec
from gpu.candidates import BF16, COMMON, MODES, our_backend
from gpu.device import Device
from gpu.shapes import Llama

AUTOCAST = "FP32 + BF16 autocast, torch AdamW fused"
VARIANTS = {
    AUTOCAST: None,
    "BF16, hf_lowprec split": "split",
    "BF16, hf_lowprec stochastic": "stochastic",
    "BF16, hf_lowprec stochastic, 8-bit states": "stochastic, 8-bit states",
}
"""The mode of each way to train; None is torch's optimizer."""
TRAINING = {**COMMON, "lr": 1e-4}


@dataclass
class Run:
    """The measurements of one variant of training over all rounds."""

    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    resident_bytes: int = 0
    """Weights, gradients and optimizer state."""
    losses: list[float] = field(default_factory=list)

    def row(self, variant: str, tokens: int, count: int) -> dict[str, Any]:
        """The row of the table."""
        median = statistics.median(self.step_ms)
        return {
            "way": variant,
            "step_ms": median,
            "fastest_ms": min(self.step_ms),
            "tokens_per_second": 1e3 * tokens / median,
            "peak_gigabytes": self.peak_bytes / 1e9,
            "non_activation_gigabytes": self.resident_bytes / 1e9,
            "non_activation_bytes_per_parameter": self.resident_bytes / count,
            "losses": self.losses,
        }


def build(shape: Llama, device: Device) -> torch.nn.Module:
    """A Llama with random FP32 weights, made where it will be trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.hidden // shape.heads,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
        use_cache=False,
        dtype="float32",
    )
    torch.manual_seed(0)
    with device.device:
        model = LlamaForCausalLM(config)
    if sum(param.numel() for param in model.parameters()) != shape.parameters:
        raise RuntimeError(f"transformers built another model than {shape.name}")
    return model.train()


def train(
    device: Device, shape: Llama, variant: str, size: tuple[int, int], steps: int, discard: int, run: Run
) -> None:
    """Train for `discard + steps` steps on batches of `size` (sequences, tokens) and add what was measured to `run`.

    The host does not wait for the device between steps, as in a training loop that does not log every step.
    """
    mode = VARIANTS[variant]
    before = device.allocated()
    model = build(shape, device)
    optimizer: torch.optim.Optimizer
    if mode is None:
        optimizer = torch.optim.AdamW(model.parameters(), **TRAINING, fused=True)
    else:
        hf_lowprec.cast_model(model)
        backend = our_backend(device)
        optimizer = hf_lowprec.AdamW(model.parameters(), **TRAINING, **MODES[mode], backend=backend)
    generator = torch.Generator(device.device).manual_seed(0)
    marks, losses = [], []
    for step in range(discard + steps):
        if step == discard:
            device.reset_peak()
            marks.append(device.mark())
        tokens = torch.randint(shape.vocabulary, size, device=device.device, generator=generator)
        context: AbstractContextManager = torch.autocast(device.device.type, BF16) if mode is None else nullcontext()
        with context:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
        del loss
        optimizer.step()
        run.resident_bytes = device.allocated() - before
        optimizer.zero_grad()
        if step >= discard:
            marks.append(device.mark())
    device.synchronize()
    run.peak_bytes = max(run.peak_bytes, device.peak() - before)
    run.step_ms += [device.between(first, second) for first, second in pairwise(marks)]
    run.losses += [losses[0].item(), losses[-1].item()]
    if not all(map(math.isfinite, run.losses)):
        raise RuntimeError(f"the loss of {variant} is not finite: {run.losses}")
