"""Final losses of two short trainings of the demonstration's byte-level Llama, the same loop for all candidates.

Pre-training from random weights, then fine-tuning of FP32's result, as in `hf_lowprec/demo/stages.py` but with 200
steps each. All candidates with BF16 weights get the model from `cast_model`, norms in FP32, so that only optimizers
differ. A seed sets the first weights and the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from peers.candidates import BASELINE, BF16, Candidate
from torch import nn
from transformers import get_scheduler

import hf_lowprec
from hf_lowprec.demo.stages import (
    BATCH_SIZE,
    FINE_TUNING_RATE,
    LENGTH,
    PRETRAINING_RATE,
    VALIDATION_BLOCKS,
    pretraining_blocks,
    small_llama,
)
from hf_lowprec.demo.text import Blocks, encode_bytes, standard_library_documentation, token_blocks

WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Stage:
    """What all candidates train in a stage.

    Attributes:
        name: of the stage.
        blocks: training and validation data.
        rate: the peak learning rate.
        schedule: transformers' name of it; 5% of the steps warm up.
    """

    name: str
    blocks: Blocks
    rate: float
    schedule: str


def stages(steps: int, validation: int = VALIDATION_BLOCKS) -> tuple[Stage, Stage]:
    """Both stages.

    Args:
        steps: of each.
        validation: blocks of validation data of the second one.
    """
    prose = token_blocks(standard_library_documentation(), encode_bytes, LENGTH, steps * BATCH_SIZE, validation)
    return (
        Stage("pre-training", pretraining_blocks(steps), PRETRAINING_RATE, "cosine"),
        Stage("fine-tuning", prose, FINE_TUNING_RATE, "constant_with_warmup"),
    )


def final_losses(candidates: Sequence[Candidate], steps: int, seed: int) -> dict[str, dict[str, float]]:
    """Validation losses after the last step, in nats per byte, by stage and candidate; candidates include FP32."""
    pretraining, fine_tuning = stages(steps)
    found: dict[str, dict[str, float]] = {pretraining.name: {}, fine_tuning.name: {}}
    pretrained = {}
    for candidate in candidates:
        model = small_llama(seed)
        found[pretraining.name][candidate.name] = train(candidate, model, pretraining, steps, seed)
        if candidate.name == BASELINE:
            pretrained = model.state_dict()
    for candidate in candidates:
        model = small_llama(seed)
        model.load_state_dict(pretrained)
        found[fine_tuning.name][candidate.name] = train(candidate, model, fine_tuning, steps, seed)
    return found


def train(candidate: Candidate, model: nn.Module, stage: Stage, steps: int, seed: int) -> float:
    """Train a model in place; returns the validation loss of the weights that it computes with."""
    if candidate.dtype == BF16:
        hf_lowprec.cast_model(model, keep_low_bits=True)
        hf_lowprec.return_float32(model)
    torch.manual_seed(seed)
    optimizer = candidate.build(model.parameters(), lr=stage.rate, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.999), eps=1e-8)
    scheduler = get_scheduler(stage.schedule, optimizer, max(1, steps // 20), steps)
    inputs = torch.as_tensor(stage.blocks.train[:]["input_ids"])
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    for batch in inputs[order].split(BATCH_SIZE)[:steps]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return _validation_loss(model, torch.as_tensor(stage.blocks.validation[:]["input_ids"]))


@torch.no_grad()
def _validation_loss(model: Callable[..., object], blocks: torch.Tensor) -> float:
    losses = [model(input_ids=batch, labels=batch).loss.float() for batch in blocks.split(16)]
    return torch.stack(losses).mean().item()
