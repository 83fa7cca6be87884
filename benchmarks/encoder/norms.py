"""Do the weights of norms move? Fine-tune some steps in every variant, and without the cast policy."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from encoder.fine_tuning import Outcome, fine_tune
from encoder.text import PACKAGES, corpus, passages
from hf_lowprec.tools.demo.stages import BATCH_SIZE, LENGTH, PRETRAINING_RATE, small_llama
from hf_lowprec.tools.demo.text import (
    encode_bytes,
    standard_library_documentation,
    standard_library_modules,
    token_blocks,
)
from hf_lowprec.tools.demo.training import Settings
from hf_lowprec.tools.demo.variants import VARIANTS

Build = Callable[[], nn.Module]

BF16_NORMS = ", norms in BF16"
RUNS = {
    **{variant.label: (variant, False) for variant in VARIANTS.values()},
    **{variant.label + BF16_NORMS: (variant, True) for variant in VARIANTS.values() if variant.is_ours},
}
"""Label → the variant, and whether our cast is left out."""


@dataclass(frozen=True)
class Moving:
    """How the models are fine-tuned.

    Attributes:
        encoder: folder of the pretrained encoder.
        length: tokens per passage for it.
        llama_steps: of the Llama's pre-training.
        steps: of fine-tuning.
        learning_rate: the peak, after warming up in a twentieth of the steps.
        work: folder for the Trainer.
    """

    encoder: str
    length: int
    llama_steps: int
    steps: int
    learning_rate: float
    work: Path


def norm_runs(moving: Moving, say: Callable[[str], None]) -> dict[str, dict[str, Outcome]]:
    """Train every model in every variant of `RUNS`; those of a model share the first weights and the batches.

    Args:
        moving: how.
        say: told of every run.
    """
    warmup = max(1, moving.steps // 20)
    settings = Settings(moving.steps, BATCH_SIZE, moving.learning_rate, "constant_with_warmup", warmup, 0)
    labelled, blocks = _passages(moving), _blocks(moving.steps)
    models = {
        "encoder, pre-trained": (_pretrained_encoder(moving), labelled),
        "encoder, random": (_random_encoder(moving), labelled),
        "Llama, pre-trained": (_pretrained_llama(moving), blocks),
        "Llama, random": (partial(small_llama, 0), blocks),
    }
    found = dict[str, dict[str, Outcome]]()
    for name, (build, data) in models.items():
        found[name] = {}
        for label, (variant, bfloat16_norms) in RUNS.items():
            run = fine_tune(variant, build(), data, None, settings, moving.work / "trainer", bfloat16_norms)
            say(f"{name}, {label}: {run.norms.never_moved:.1%} of {run.norms.elements} weights of norms never moved")
            found[name][label] = run
    return found


def _passages(moving: Moving) -> Any:
    most = -(-moving.steps * BATCH_SIZE // len(PACKAGES))
    return passages(corpus().train, AutoTokenizer.from_pretrained(moving.encoder), moving.length, most)


def _blocks(steps: int) -> Any:
    text = standard_library_documentation()
    return token_blocks(text, encode_bytes, LENGTH, steps * BATCH_SIZE, validation=1).train


def _pretrained_encoder(moving: Moving) -> Build:
    def build() -> Any:
        torch.manual_seed(0)  # of the head
        return AutoModelForSequenceClassification.from_pretrained(
            moving.encoder, num_labels=len(PACKAGES), dtype=torch.float32
        )

    return build


def _random_encoder(moving: Moving) -> Build:
    def build() -> Any:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(moving.encoder, num_labels=len(PACKAGES), dtype=torch.float32)
        return AutoModelForSequenceClassification.from_config(config)

    return build


def _pretrained_llama(moving: Moving) -> Build:
    model, steps = small_llama(0), moving.llama_steps
    code = token_blocks(standard_library_modules(), encode_bytes, LENGTH, steps * BATCH_SIZE, validation=1)
    settings = Settings(steps, BATCH_SIZE, PRETRAINING_RATE, "cosine", max(1, steps // 20), 0)
    fine_tune(VARIANTS["fp32"], model, code.train, None, settings, moving.work / "trainer")
    return partial(deepcopy, model)
