"""The stages of the demonstration: every way from the same weights, on the same data in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_lowprec.cli.demo.text import (
    BYTES,
    Blocks,
    encode_bytes,
    standard_library_documentation,
    standard_library_modules,
    token_blocks,
)
from hf_lowprec.cli.demo.training import WAYS, Run, Settings, Way, train_way

LENGTH = 128
"""Tokens per block."""

SMALL_LLAMA = "byte-level Llama, random weights"
"""What `small_llama` is, for the file of numbers."""

BATCH_SIZE = 4
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


def pretraining_blocks(steps: int) -> Blocks:
    """What pre-training of so many steps reads, and is validated on."""
    return token_blocks(standard_library_modules(), encode_bytes, LENGTH, steps * BATCH_SIZE, VALIDATION_BLOCKS)


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
    code = pretraining_blocks(steps)
    prose = token_blocks(standard_library_documentation(), encode_bytes, LENGTH, steps * BATCH_SIZE, VALIDATION_BLOCKS)
    warmup = max(1, steps // 20)
    first, pretrained = _stage(
        "pretraining",
        f"Pre-training from random weights on {code.title}",
        lambda: small_llama(seed),
        code,
        ways,
        Settings(steps, BATCH_SIZE, PRETRAINING_RATE, "cosine", warmup, seed),
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
        ways,
        Settings(steps, BATCH_SIZE, FINE_TUNING_RATE, "constant_with_warmup", warmup, seed),
        output_dir,
        progress,
    )
    return [first, second]


def fine_tune(
    ways: Sequence[Way],
    build: Callable[[], nn.Module],
    blocks: Blocks,
    settings: Settings,
    output_dir: Path,
    progress: Progress | None = None,
) -> list[Stage]:
    """Fine-tuning of a given model, as the second stage of `pretrain_and_fine_tune`.

    Args:
        ways: how to train.
        build: gives the model in FP32, the same weights every time.
        blocks: what to train and validate on.
        settings: shared by the ways.
        output_dir: for the Trainer.
        progress: called on the way.
    """
    stage, _ = _stage(
        "fine-tuning", f"Fine-tuning on {blocks.title}", build, blocks, ways, settings, output_dir, progress
    )
    return [stage]


def _stage(
    name: str,
    title: str,
    build: Callable[[], nn.Module],
    blocks: Blocks,
    ways: Sequence[Way],
    settings: Settings,
    output_dir: Path,
    progress: Progress | None,
) -> tuple[Stage, dict[str, Tensor]]:
    """One stage, and the weights that FP32 ended with (empty if FP32 is not among the ways)."""
    progress = progress or Progress()
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
    counts = {"train": len(blocks.train), "validation": len(blocks.validation), "length": blocks.length}
    return Stage(name, title, parameters, counts, settings, runs), result
