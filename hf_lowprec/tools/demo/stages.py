"""The stages of the demonstration: all variants start from the same weights and see the same data in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_lowprec.tools.demo.text import (
    BYTES,
    Blocks,
    encode_bytes,
    standard_library_documentation,
    standard_library_modules,
    token_blocks,
)
from hf_lowprec.tools.demo.training import Run, Settings, train_variant
from hf_lowprec.tools.demo.variants import Variant

LENGTH = 128
"""Tokens per block."""

SMALL_LLAMA = "byte-level Llama, random weights"
"""Name of `small_llama`'s model in the file of numbers."""

BATCH_SIZE = 4
"""Blocks per step."""

VALIDATION_BLOCKS = 128

PRETRAINING_RATE = 1e-3
FINE_TUNING_RATE = 2e-5


@dataclass(frozen=True)
class Stage:
    """A stage and the runs of the variants in it.

    Attributes:
        name: `pretraining` or `fine-tuning`.
        title: for tables and plots.
        parameters: number of the model's parameters.
        blocks: number of blocks: `train`, `validation`, and tokens in each as `length`.
        settings: shared by the variants.
        runs: by the variant's name.
    """

    name: str
    title: str
    parameters: int
    blocks: dict[str, int]
    settings: Settings
    runs: dict[str, Run]


@dataclass(frozen=True)
class Progress:
    """Functions that are called during training.

    Attributes:
        on_run: called before every run, with the stage's name and the variant.
        on_step: called after every optimizer step.
        on_result: called after every run, with its record.
    """

    on_run: Callable[[str, Variant], None] = lambda stage, variant: None
    on_step: Callable[[], None] = lambda: None
    on_result: Callable[[str, Variant, Run], None] = lambda stage, variant, run: None


def small_llama(seed: int) -> nn.Module:
    """Build a byte-level Llama of 0.7 M parameters with random weights."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        # Every byte is text.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def pretraining_blocks(steps: int) -> Blocks:
    """The blocks needed to pre-train for this many steps, and to validate."""
    return token_blocks(standard_library_modules(), encode_bytes, LENGTH, steps * BATCH_SIZE, VALIDATION_BLOCKS)


def pretrain_and_fine_tune(
    variants: Sequence[Variant],
    steps: int,
    seed: int,
    output_dir: Path,
    progress: Progress | None = None,
    rate_factor: float = 1.0,
) -> list[Stage]:
    """Pre-train `small_llama` on code, then fine-tune its FP32 result on prose.

    Args:
        variants: must include FP32, since the second stage starts from its result.
        steps: optimizer steps per run.
        seed: seed of the weights and the data order.
        output_dir: the Trainer's output folder.
        progress: functions to call during training.
        rate_factor: multiplies the learning rates of both stages.
    """
    code = pretraining_blocks(steps)
    prose = token_blocks(standard_library_documentation(), encode_bytes, LENGTH, steps * BATCH_SIZE, VALIDATION_BLOCKS)
    warmup = max(1, steps // 20)
    first, pretrained = _stage(
        "pretraining",
        f"Pre-training from random weights on {code.title}",
        lambda: small_llama(seed),
        code,
        variants,
        Settings(steps, BATCH_SIZE, rate_factor * PRETRAINING_RATE, "cosine", warmup, seed),
        output_dir,
        progress,
    )

    def start() -> nn.Module:
        model = small_llama(seed)
        model.load_state_dict(pretrained)
        return model

    second, _ = _stage(
        "fine-tuning",
        f"Fine-tuning of the FP32 result on {prose.title}",
        start,
        prose,
        variants,
        Settings(steps, BATCH_SIZE, rate_factor * FINE_TUNING_RATE, "constant_with_warmup", warmup, seed),
        output_dir,
        progress,
    )
    return [first, second]


def fine_tune(
    variants: Sequence[Variant],
    build: Callable[[], nn.Module],
    blocks: Blocks,
    settings: Settings,
    output_dir: Path,
    progress: Progress | None = None,
) -> list[Stage]:
    """Fine-tune a given model, as in the second stage of `pretrain_and_fine_tune`.

    Args:
        variants: the variants to train.
        build: builds the model in FP32, with the same weights every time.
        blocks: training and validation data.
        settings: shared by the variants.
        output_dir: the Trainer's output folder.
        progress: functions to call during training.
    """
    stage, _ = _stage(
        "fine-tuning", f"Fine-tuning on {blocks.title}", build, blocks, variants, settings, output_dir, progress
    )
    return [stage]


def _stage(
    name: str,
    title: str,
    build: Callable[[], nn.Module],
    blocks: Blocks,
    variants: Sequence[Variant],
    settings: Settings,
    output_dir: Path,
    progress: Progress | None,
) -> tuple[Stage, dict[str, Tensor]]:
    """Run one stage.

    Returns:
        The stage, and the weights that FP32 ended with; empty if FP32 is not among the variants.
    """
    progress = progress or Progress()
    runs: dict[str, Run] = {}
    result: dict[str, Tensor] = {}
    parameters = 0
    for variant in variants:
        progress.on_run(name, variant)
        model = build()
        parameters = sum(p.numel() for p in model.parameters())
        runs[variant.name] = train_variant(variant, model, blocks, settings, output_dir, progress.on_step)
        progress.on_result(name, variant, runs[variant.name])
        if variant.name == "fp32":
            result = {key: tensor.detach().cpu().clone() for key, tensor in model.state_dict().items()}
    counts = {"train": len(blocks.train), "validation": len(blocks.validation), "length": blocks.length}
    return Stage(name, title, parameters, counts, settings, runs), result
