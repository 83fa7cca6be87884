"""The models that are fine-tuned: a byte-level Llama and a small encoder, both pre-trained in FP32 for minutes.

The Llama goes on from code to the language reference. The encoder either gets a new head and tells packages apart, or
goes on predicting masked tokens. Neither has dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from encoder.fine_tuning import fine_tune
from encoder.pretraining import Pretraining, pretrained
from encoder.text import PACKAGES, packages
from torch import Tensor, nn
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
)

from hf_lowprec.tools.demo.stages import BATCH_SIZE, LENGTH, PRETRAINING_RATE, small_llama
from hf_lowprec.tools.demo.text import (
    encode_bytes,
    standard_library_documentation,
    standard_library_modules,
    token_blocks,
)
from hf_lowprec.tools.demo.training import Settings
from hf_lowprec.tools.demo.variants import VARIANTS

Batch = dict[str, Tensor]

PASSAGES = 8
"""Passages of the encoder per step."""


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        name: for tables.
        build: builds the FP32 model; the seed sets the weights of a new head.
        train: all training batches; a seed chooses among them.
        validation: the batches whose mean loss is measured.
    """

    name: str
    build: Callable[[int], nn.Module]
    train: list[Batch]
    validation: list[Batch]

    def batches(self, seed: int, steps: int) -> list[Batch]:
        """The batches of a run, in an order that depends on `seed` alone."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))
        return [self.train[int(k)] for k in order[:steps]]


def tasks(steps: int, llama_steps: int, recipe: Pretraining, validation: int, work: Path) -> list[Task]:
    """Pre-train both models, or find them in `work`, and build the three tasks.

    Args:
        steps: of fine-tuning; there are three times as many training batches.
        llama_steps: of the Llama's pre-training.
        recipe: the encoder's pre-training.
        validation: blocks or passages to validate on.
        work: folder for the models.
    """
    encoder = work / "encoder"
    pretrained(recipe, encoder)
    return [
        _byte_llama(steps, llama_steps, validation, work),
        _classification(steps, encoder, recipe.length, validation),
        _masked_lm(steps, encoder, recipe.length, validation),
    ]


def _byte_llama(steps: int, llama_steps: int, validation: int, work: Path) -> Task:
    model, path = small_llama(0), work / f"llama-{llama_steps}-steps.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path))
    else:
        code = token_blocks(standard_library_modules(), encode_bytes, LENGTH, llama_steps * BATCH_SIZE, 1)
        settings = Settings(llama_steps, BATCH_SIZE, PRETRAINING_RATE, "cosine", max(1, llama_steps // 20), 0)
        fine_tune(VARIANTS["fp32"], model, code.train, None, settings, work / "trainer")
        torch.save(model.state_dict(), path)
    prose = token_blocks(standard_library_documentation(), encode_bytes, LENGTH, 3 * steps * BATCH_SIZE, validation)
    train, held_out = (_batches(split, BATCH_SIZE) for split in (prose.train, prose.validation))
    return Task("byte-level Llama", lambda seed: deepcopy(model), train, held_out)


def _classification(steps: int, encoder: Path, length: int, validation: int) -> Task:
    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForSequenceClassification.from_pretrained(
                encoder, num_labels=len(PACKAGES), dtype=torch.float32
            )

    return Task("classification", build, *_passages(steps, encoder, length, validation))


def _masked_lm(steps: int, encoder: Path, length: int, validation: int) -> Task:
    collate = DataCollatorForLanguageModeling(AutoTokenizer.from_pretrained(encoder), seed=0)

    def mask(batch: Batch) -> Batch:
        return dict(collate(list(batch["input_ids"])))

    def build(seed: int) -> nn.Module:
        return AutoModelForMaskedLM.from_pretrained(encoder, dtype=torch.float32)

    train, held_out = _passages(steps, encoder, length, validation)
    return Task("masked LM", build, list(map(mask, train)), list(map(mask, held_out)))


def _passages(steps: int, encoder: Path, length: int, validation: int) -> tuple[list[Batch], list[Batch]]:
    """Shuffled training batches, and validation batches, of passages with their class."""
    most = 4 * -(-validation // len(PACKAGES))  # a quarter is for validation
    most = max(most, -(-3 * steps * PASSAGES // len(PACKAGES)))
    found = packages(AutoTokenizer.from_pretrained(encoder), length, most)
    held_out = found.validation.shuffle(seed=0).select(range(min(validation, len(found.validation))))
    return _batches(found.train.shuffle(seed=0), PASSAGES), _batches(held_out, PASSAGES)


def _batches(rows: Any, size: int) -> list[Batch]:
    columns = {name: torch.tensor(rows[name][:]) for name in ("input_ids", "labels")}
    return [
        {name: values[first : first + size] for name, values in columns.items()}
        for first in range(0, len(rows) - size + 1, size)
    ]
