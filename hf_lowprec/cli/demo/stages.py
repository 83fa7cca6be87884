"""The stages of the demonstration: every way from the same weights, on the same data in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_lowprec.cli.demo.text import (
    BYTES,
    Blocks,
    Text,
    encode_bytes,
    standard_library_documentation,
    standard_library_modules,
    token_blocks,
)
from hf_lowprec.cli.demo.training import WAYS, Run, Settings, Way, train_way

LENGTH = 128
"""Tokens per block."""

BATCH_SIZE = 8
"""Blocks per step."""

VALIDATION_BLOCKS = 128

PRETRAINING_RATE = 1e-3
FINE_TUNING_RATE = 2e-5


@dataclass(frozen=True)
class Stage:
    """One stage and what the ways did in it.

    Attributes:
        name: `pretraining` or `fine-tuning`.
        title: for people.
        parameters: the model's.
        blocks: number of blocks: `train`, `validation`, and tokens in each as `length`.
        settings: what the ways shared.
        runs: by the way's name.
    """

    name: str
    title: str
    parameters: int
    blocks: dict[str, int]
    settings: Settings
    runs: dict[str, Run]


@dataclass(frozen=True)
class Progress:
    """Calls that tell how far things are.

    Attributes:
        on_run: before every run, with the stage's name and the way.
        on_step: after every optimizer step.
        on_result: after every run.
    """

    on_run: Callable[[str, Way], None] = lambda stage, way: None
    on_step: Callable[[], None] = lambda: None
    on_result: Callable[[str, Way, Run], None] = lambda stage, way, run: None


def small_llama(seed: int) -> nn.Module:
    """A byte-level Llama of 0.7 M parameters with random weights."""
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


def pretrain_and_fine_tune(
    ways: Sequence[Way], steps: int, seed: int, output_dir: Path, progress: Progress | None = None
) -> list[Stage]:
    """Pre-training of `small_llama` on code, then fine-tuning of its FP32 result on prose.

    Args:
        ways: FP32 must be among them: the second stage starts from its result.
        steps: optimizer steps per run.
        seed: of the weights and the data order.
        output_dir: for the Trainer.
        progress: called on the way.
    """
    progress = progress or Progress()
    first, pretrained = _stage(
        *("pretraining", f"Pre-training from random weights on {{text}} (learning rate {PRETRAINING_RATE:g}, cosine)"),
        *(standard_library_modules(), encode_bytes, lambda: small_llama(seed), ways),
        Settings(steps, BATCH_SIZE, PRETRAINING_RATE, "cosine", max(1, steps // 20), seed),
        *(LENGTH, output_dir, progress),
    )

    def start() -> nn.Module:
        model = small_llama(seed)
        model.load_state_dict(pretrained)
        return model

    title = f"Fine-tuning of the FP32 result on {{text}} (learning rate {FINE_TUNING_RATE:g}, constant)"
    second, _ = _stage(
        *("fine-tuning", title, standard_library_documentation(), encode_bytes, start, ways),
        Settings(steps, BATCH_SIZE, FINE_TUNING_RATE, "constant_with_warmup", max(1, steps // 20), seed),
        *(LENGTH, output_dir, progress),
    )
    return [first, second]


def fine_tune(
    ways: Sequence[Way],
    build: Callable[[], nn.Module],
    encode: Any,
    text: Text,
    settings: Settings,
    length: int,
    output_dir: Path,
    progress: Progress | None = None,
) -> list[Stage]:
    """Fine-tuning of a given model, as the second stage of `pretrain_and_fine_tune`.

    Args:
        ways: how to train.
        build: gives the model in FP32, the same weights every time.
        encode: texts to tokens, as `text.Encode`.
        text: to train and validate on.
        settings: shared by the ways.
        length: tokens per block.
        output_dir: for the Trainer.
        progress: called on the way.
    """
    title = f"Fine-tuning on {{text}} (learning rate {settings.learning_rate:g}, constant)"
    stage, _ = _stage(
        *("fine-tuning", title, text, encode, build, ways, settings, length, output_dir, progress or Progress())
    )
    return [stage]


def _stage(
    name: str,
    title: str,
    text: Text,
    encode: Any,
    build: Callable[[], nn.Module],
    ways: Sequence[Way],
    settings: Settings,
    length: int,
    output_dir: Path,
    progress: Progress,
) -> tuple[Stage, dict[str, Tensor]]:
    """One stage, and the weights that FP32 ended with (empty if FP32 is not among the ways)."""
    blocks = token_blocks(text, encode, length, settings.steps * settings.batch_size, VALIDATION_BLOCKS)
    runs: dict[str, Run] = {}
    result: dict[str, Tensor] = {}
    parameters = 0
    for way in ways:
        progress.on_run(name, way)
        model = build()
        parameters = sum(p.numel() for p in model.parameters())
        runs[way.name] = train_way(way, model, blocks, settings, output_dir, progress.on_step)
        progress.on_result(name, way, runs[way.name])
        if way is WAYS["fp32"]:
            result = {key: tensor.detach().cpu().clone() for key, tensor in model.state_dict().items()}
    counts = {"train": len(blocks.train), "validation": len(blocks.validation), "length": length}
    return Stage(name, title.format(text=text.title), parameters, counts, settings, runs), result
