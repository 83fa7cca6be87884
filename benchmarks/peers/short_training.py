"""The loss after a short fine-tuning of the demonstration's byte-level Llama, the same loop for all candidates.

FP32 pre-trains the model from random weights on code; each candidate then fine-tunes the result on prose, as
`hf-lowprec demo` does. All candidates with BF16 weights get the model from `cast_model`, norms in FP32, so that only
optimizers differ. A seed sets the first weights and the order of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

import hf_lowprec
from hf_lowprec.tools.demo.stages import (
    BATCH_SIZE,
    FINE_TUNING_RATE,
    LENGTH,
    PRETRAINING_RATE,
    VALIDATION_BLOCKS,
    pretraining_blocks,
    small_llama,
)
from hf_lowprec.tools.demo.text import Blocks, encode_bytes, standard_library_documentation, token_blocks
from peers.candidates import BASELINE, BF16, CANDIDATES, Candidate

OPTIONS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def final_losses(candidates: Sequence[Candidate], steps: int, seed: int) -> dict[str, float]:
    """Validation losses after fine-tuning, in nats per byte, by candidate.

    Args:
        candidates: what is compared.
        steps: of the pre-training, and of the fine-tuning.
        seed: of the first weights and the order of the data.
    """
    (fp32,) = (candidate for candidate in CANDIDATES if candidate.name == BASELINE)
    pretrained = small_llama(seed)
    train(fp32, pretrained, pretraining_blocks(steps), PRETRAINING_RATE, "cosine", steps, seed)
    prose = token_blocks(standard_library_documentation(), encode_bytes, LENGTH, steps * BATCH_SIZE, VALIDATION_BLOCKS)
    losses = {}
    for candidate in candidates:
        model = small_llama(seed)
        model.load_state_dict(pretrained.state_dict())
        train(candidate, model, prose, FINE_TUNING_RATE, "constant_with_warmup", steps, seed)
        losses[candidate.name] = _validation_loss(model, _tokens(prose.validation))
        print(f"seed {seed}, {candidate.name}: {losses[candidate.name]:.5f}", file=sys.stderr, flush=True)
    return losses


def train(
    candidate: Candidate, model: nn.Module, blocks: Blocks, rate: float, schedule: str, steps: int, seed: int
) -> None:
    """Train an FP32 model in place; for BF16 weights, it is cast first.

    Args:
        candidate: which optimizer.
        model: what is trained.
        blocks: training data.
        rate: the peak learning rate.
        schedule: transformers' name of it; 5% of the steps warm up.
        steps: how many.
        seed: of the order of the data, and of torch's generator.
    """
    if candidate.dtype == BF16:
        hf_lowprec.cast_model(model, keep_low_bits=True)
        hf_lowprec.return_float32(model)
    torch.manual_seed(seed)
    optimizer = candidate.build(model.parameters(), lr=rate, **OPTIONS)
    scheduler = get_scheduler(schedule, optimizer, max(1, steps // 20), steps)
    inputs = _tokens(blocks.train)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    for batch in inputs[order].split(BATCH_SIZE)[:steps]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def _tokens(dataset: Any) -> Tensor:
    return torch.as_tensor(dataset[:]["input_ids"])


@torch.no_grad()
def _validation_loss(model: Callable[..., Any], blocks: Tensor) -> float:
    losses = [model(input_ids=batch, labels=batch).loss.float() for batch in blocks.split(16)]
    return torch.stack(losses).mean().item()
