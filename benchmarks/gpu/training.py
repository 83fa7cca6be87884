"""Time and memory of training a Llama in each way: as is usual, with FP32 weights or masters, and in pure BF16."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import torch

from benchmarks.evidence.training.modes import MODES
from gpu.candidates import COMMON
from gpu.device import Device
from gpu.shapes import Llama

AUTOCAST = "FP32 + BF16 autocast, torch AdamW fused"
MASTERS = "BF16 + FP32 masters (O2), torch AdamW fused"
ROUNDED = "BF16, torch AdamW fused"
OURS = "BF16, hf_lowprec "
WAYS = {AUTOCAST: "autocast", MASTERS: "o2", ROUNDED: "nearest"}
WAYS |= {OURS + MODES[name].label: name for name in ("split", "feedback", "split-int8", "feedback-int8")}
"""Names of the tables, and of `MODES`."""
TRAINING = {**COMMON, "lr": 1e-4}
CLIPPED_TO = 1.0
PARTS = ("forward", "backward", "clip", "step")
"""Of a training step. The gradients of O2 become FP32 in "clip" if they are clipped, else in "step"."""


@dataclass(frozen=True)
class Setting:
    """The setting in which all ways of a table train.

    Attributes:
        batch: sequences per step.
        length: tokens of each.
        compiled: whether each decoder layer is compiled.
        liger: whether Liger's kernels replace those of norms, rotary embeddings, MLPs and the loss.
    """

    batch: int
    length: int
    compiled: bool = False
    liger: bool = False

    def __str__(self) -> str:
        liger = ", Liger's kernels" if self.liger else ""
        return f"{self.batch} × {self.length} tokens, {'compiled' if self.compiled else 'eager'}{liger}"


@dataclass
class Run:
    """The measurements of one way to train over all rounds."""

    parts_ms: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    peak_bytes: int = 0
    resident_bytes: int = 0
    """Weights, gradients and optimizer state."""
    losses: list[float] = field(default_factory=list)

    @property
    def step_ms(self) -> list[float]:
        """From the end of one step to that of the next: the sum of its parts."""
        return [sum(parts) for parts in zip(*self.parts_ms.values(), strict=True)]

    def row(self, way: str, tokens: int, count: int) -> dict[str, Any]:
        """The row of the table."""
        low, median, high = statistics.quantiles(self.step_ms, n=4, method="inclusive")
        return {
            "way": way,
            "step_ms": median,
            "quartiles_ms": [low, high],
            "tokens_per_second": 1e3 * tokens / median,
            "peak_gigabytes": self.peak_bytes / 1e9,
            "non_activation_gigabytes": self.resident_bytes / 1e9,
            "non_activation_bytes_per_parameter": self.resident_bytes / count,
            "losses": self.losses,
            "parts_ms": self.parts_ms,
        }


def build(shape: Llama, device: Device) -> torch.nn.Module:
    """A Llama with random FP32 weights, made where it will be trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        head_dim=shape.hidden // shape.heads, tie_word_embeddings=True, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="sdpa", use_cache=False,
        dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    with device.device:
        model = LlamaForCausalLM(config)
    if sum(param.numel() for param in model.parameters()) != shape.parameters:
        raise RuntimeError(f"transformers built another model than {shape.name}")
    return model.train()


def train(
    device: Device, shape: Llama, way: str, setting: Setting, steps: int, discard: int, runs: dict[bool, Run]
) -> None:
    """Train for `discard + steps` steps without clipping, then as many with, and add what was measured to `runs`.

    All steps learn the same batch. The host does not wait for the device between steps, as in a training loop that
    does not log every step.

    Args:
        device: to train on.
        shape: of the model.
        way: a key of `WAYS`.
        setting: see there.
        steps: to measure.
        discard: steps before them, which compile and allocate.
        runs: by whether gradients are clipped.
    """
    if setting.compiled:
        torch.compiler.reset()  # torch stops compiling after a few models that share their code
        device.release()
    before, mode = device.allocated(), MODES[WAYS[way]]
    model = build(shape, device)
    if setting.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    optimizer: Any = mode.optimizer(model, **TRAINING)
    if setting.compiled:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager" if device.rehearsal else "inductor")
    torch.manual_seed(0)
    tokens = torch.randint(shape.vocabulary, (setting.batch, setting.length), device=device.device)
    for clipped, run in runs.items():
        marks, losses = [], []
        for step in range(discard + steps):
            if step == discard:
                device.reset_peak()
                marks = [device.mark()]
            with mode.precision(device.device.type):
                loss = model(input_ids=tokens, labels=tokens).loss
            marks.append(device.mark())
            loss.backward()
            losses.append(loss.detach())
            del loss
            marks.append(device.mark())
            if clipped and hasattr(optimizer, "clip_grad_norm_"):
                optimizer.clip_grad_norm_(CLIPPED_TO)
            elif clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_TO)
            marks.append(device.mark())
            optimizer.step()
            if step < discard:
                run.resident_bytes = device.allocated() - before
            optimizer.zero_grad()
            marks.append(device.mark())
        device.synchronize()
        run.peak_bytes = max(run.peak_bytes, device.peak() - before)
        for part, marked in zip(cycle(PARTS), pairwise(marks), strict=False):
            run.parts_ms[part].append(device.between(*marked))
        run.losses += [losses[0].item(), losses[-1].item()]
        if not all(map(math.isfinite, run.losses)):
            raise RuntimeError(f"the loss of {way} is not finite: {run.losses}")
